"""`FullyShardedDataParallel`, the FSDP1 wrapper."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..engine.api import UnshardHandle, refuse_shared_memory, state_of
from ..errors import TrainingStateError, UnsupportedError
from ..names import FSDP_PREFIX, behind_checkpoints
from ..torch_private import frame_not_compiled, stack_level_of_program
from . import optim_load, optim_state
from .api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    check_module,
    checked_cpu_offload,
    checked_mixed_precision,
    checked_prefetch,
)
from .auto_wrap import Policy, auto_wrap
from .build import build_state, resolve_ignored
from .full_params import summon_full_params
from .gradients import clip_grad_norm_, no_sync, register_comm_hook
from .groups import data_parallel_mesh, resolve_groups
from .optim_state import refuse_helpers
from .state import (
    TrainingState,
    WrapperState,
    _get_fsdp_handles,
    _get_module_fsdp_state,
    wrapper_state_of,
    wrapper_states,
)
from .state_dict import StateDictHandler, get_state_dict_type, set_state_dict_type, state_dict_type

FSDP_WRAPPED_MODULE = FSDP_PREFIX.rstrip(".")


class FullyShardedDataParallel(nn.Module):
    """Wraps a module, joins its parameters into one flat parameter, and shards the flat parameter over ranks.

    Wrapped modules inside `module` keep their own flat parameters. Parameters are unsharded only while forward,
    backward or `summon_full_params` needs them.

    Build the optimizer after wrapping. By default, `parameters()` then returns one flat parameter per wrapped module.
    With `use_orig_params=True`, it returns the original parameters, each with only this rank's elements.

    Example::

        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters())
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ):
        """Wrap `module` and shard its parameters.

        `process_group` or `device_mesh` selects the ranks. A hybrid strategy takes a pair of process groups or a mesh
        with two dimensions. Parameters may be DTensors that are tensor parallel on another dimension of the same mesh.
        `sharding_strategy` is FULL_SHARD by default. `auto_wrap_policy` chooses modules inside `module`, which are
        wrapped first. `mixed_precision` sets dtypes, and `cpu_offload` the place of shards. `ignored_modules` and
        `ignored_states` (modules or parameters) are not sharded. `device_id` is the compute device. By default, this is
        the module's accelerator or, for a module on the CPU, the current accelerator. `param_init_fn` initializes
        modules on the meta device. `sync_module_states` copies rank 0's parameters and buffers to all other ranks. With
        any `backward_prefetch` but None, backward prefetches one unit. Forward always prefetches one unit ahead,
        regardless of `forward_prefetch` and `limit_all_gathers`.

        Raises:
            ArgumentError: an argument is invalid, or shapes differ between ranks.
            PolicyError: an argument has the wrong type.
            StateError: the module is on several devices, or cannot be initialized.
        """
        super().__init__()
        check_module(module, "FullyShardedDataParallel")
        backward_prefetch = checked_prefetch(backward_prefetch)
        precision, offload = checked_mixed_precision(mixed_precision), checked_cpu_offload(cpu_offload)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            warnings.warn(
                f"{type(module).__name__} has no forward to all-gather its parameters. Wrap the modules in it.",
                stacklevel=stack_level_of_program(),
            )
        device_mesh = data_parallel_mesh(device_mesh, sharding_strategy, module, wrapper_states(module))
        groups = resolve_groups(process_group, device_mesh, sharding_strategy, auto_wrap_policy is not None)
        ignored = resolve_ignored(module, ignored_modules, ignored_states)
        common: dict[str, Any] = {
            "backward_prefetch": backward_prefetch,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
        }
        if auto_wrap_policy is not None:
            inside = {
                **groups.arguments(),
                **ignored.arguments,
                **common,
                "sharding_strategy": groups.strategy,
                "cpu_offload": cpu_offload,
                "mixed_precision": mixed_precision,
                "forward_prefetch": forward_prefetch,
            }
            auto_wrap(module, auto_wrap_policy, type(self), inside, ignored.modules, ignored.parameters)
        state = build_state(module, groups, ignored, precision, offload, **common)
        setattr(self, FSDP_WRAPPED_MODULE, module)
        state.attach_wrapper(self)
        self._state_dict_handler = StateDictHandler(state)
        self.register_load_state_dict_post_hook(lambda self, keys: self._state_dict_handler.end_loading(keys))
        self.forward_prefetch, self.backward_prefetch = forward_prefetch, backward_prefetch
        self.limit_all_gathers, self.mixed_precision, self.cpu_offload = limit_all_gathers, precision, offload
        self.sharding_strategy, self.process_group = groups.strategy, groups.own
        self.rank, self.world_size = groups.own.rank(), groups.own.size()

    # -- forward and backward -------------------------------------------------------------------------------

    @frame_not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: Any = state_of(self)
        return state.run(self, self._modules[FSDP_WRAPPED_MODULE], args, kwargs)

    no_sync = no_sync
    clip_grad_norm_ = clip_grad_norm_
    register_comm_hook = register_comm_hook
    summon_full_params = staticmethod(summon_full_params)

    # -- the module interface --------------------------------------------------------------------------------

    @property
    def _state(self) -> WrapperState:
        state = wrapper_state_of(self)
        assert state is not None
        return state

    @property
    def module(self) -> nn.Module:
        """The module that was wrapped, without a wrapper for activation checkpointing around it."""
        inside: Any = self._modules[FSDP_WRAPPED_MODULE]
        return behind_checkpoints(inside)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inside = self.__dict__.get("_modules", {}).get(FSDP_WRAPPED_MODULE)
            if inside is None:
                raise
            return getattr(inside, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def check_is_root(self) -> bool:
        """Return True if this module is the root. If there is no root yet, this call makes this module the root."""
        return self._state.is_root(self)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """Return all wrapped modules in `module`, including `module` itself, in the order of `module.modules()`.

        With `root_only`, return only roots. For a module that `composable.fully_shard` sharded, the list contains the
        module's state instead of the module, as in PyTorch.
        """
        found: list[Any] = []
        for each in module.modules():
            state = wrapper_state_of(each)
            if state is not None and (not root_only or state.is_root(each)):
                found.append(_get_module_fsdp_state(each))
        return found

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Call `fn` on every module inside this module, and then on this module.

        While `fn` runs on a module, the parameters of the module's unit are unsharded, and `fn` may change them. Raises
        a TrainingStateError inside `summon_full_params`.
        """
        if self._state.in_summon_full_params:
            raise TrainingStateError("apply calls summon_full_params, which cannot be nested. Call it outside.")
        with summon_full_params(self, recurse=False):
            return super().apply(fn)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        refuse_shared_memory(self._state.unit, fn)
        self._state.unit.reshard()
        result = super()._apply(fn, recurse)
        self._state.unit.rebind_params()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including gradients of units that are unsharded between forward and backward.

        With `set_to_none=False`, gradients become zeros.
        """
        super().zero_grad(set_to_none)
        for state in wrapper_states(self):
            state.unit.clear_gradients(set_to_none)

    def __getstate__(self) -> Any:
        return self._state.__getstate__()  # raises before any submodule is pickled

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(
            "A wrapped module cannot be copied: its shards belong to one set of ranks and buffers. Copy the module "
            "before you wrap it and wrap both, or load the state dict of one into the other."
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Like `nn.Module.named_parameters`. Inside `summon_full_params`, names have no wrapper prefix."""
        if not torch.compiler.is_compiling():
            self._state.before_listing()
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield self._cleaned(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._cleaned(name), buffer

    def _cleaned(self, name: str) -> str:
        return name.replace(FSDP_PREFIX, "") if self._state.in_summon_full_params else name

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        unit = self._state.unit
        unit.select(unit.precision_in(self.training))
        unit.all_gather()
        handle = UnshardHandle(self._state)
        if async_op:
            return handle
        handle.wait()
        return None

    # -- state dicts ----------------------------------------------------------------------------------------

    set_state_dict_type = staticmethod(set_state_dict_type)
    get_state_dict_type = staticmethod(get_state_dict_type)
    state_dict_type = staticmethod(state_dict_type)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return a state dict of the chosen `StateDictType`. All ranks must call this, even with `rank0_only`."""
        names = ("destination", "prefix", "keep_vars")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._state.find_root(self)
        return self._state_dict_handler.save(
            self, lambda: super(FullyShardedDataParallel, self).state_dict(**given), given.get("prefix", "")
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._state_dict_handler.begin_loading(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _fqn_modifiers(self) -> Any:
        """Raise if the caller is a `torch.distributed.checkpoint.state_dict` function that would use wrong values."""
        refuse_helpers(self, wrapped=True)
        return getattr(self._modules[FSDP_WRAPPED_MODULE], "_fqn_modifiers", dict)()

    optim_state_dict = staticmethod(optim_state.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optim_load.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optim_load.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_load.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_load.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_load.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_load.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_load.rekey_optim_state_dict)

    # -- attributes that programs read ----------------------------------------------------------------------

    _handle = property(attrgetter("_state.handle"))
    _use_orig_params = property(attrgetter("_state.use_orig_params"))
    _inter_node_pg = property(attrgetter("_state.groups.replicas"))
    _device_mesh = property(attrgetter("_state.groups.mesh"))
    _fsdp_extension = property(
        attrgetter("_state._fsdp_extension"), lambda self, value: setattr(self._state, "_fsdp_extension", value)
    )
    _all_handles = property(_get_fsdp_handles)
    _has_params = property(lambda self: self._handle is not None)
    _gradient_predivide_factor = property(lambda self: self._state.division()[0])
    _gradient_postdivide_factor = property(lambda self: self._state.division()[1])

    @property
    def params(self) -> list[nn.Parameter]:
        """A list with the unit's flat parameter, or an empty list if the unit has no parameters."""
        return [] if self._handle is None else [self._handle.flat_param]

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return self.params[0] if self.params else None

    @property
    def _is_root(self) -> bool | None:
        return self.check_is_root() if self._state.is_initialized else None

    @property
    def compute_device(self) -> torch.device:
        return self._state.unit.device

    @property
    def training_state(self) -> TrainingState:
        return self._state.training_state

    def _assert_state(self, expected: TrainingState | list[TrainingState]) -> None:
        allowed = expected if isinstance(expected, list) else [expected]
        if self.training_state not in allowed:
            names = ", ".join(each.name for each in allowed)
            raise TrainingStateError(f"{self._state.unit} is in state {self.training_state.name}, expected {names}.")
