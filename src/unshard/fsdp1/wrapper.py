"""`FullyShardedDataParallel`, the FSDP1 wrapper."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..engine.api import UnshardHandle, refuse_shared_memory, state_of
from ..errors import TrainingStateError, UnsupportedError
from ..names import FSDP_PREFIX, behind_checkpoints
from ..torch_private import frame_not_compiled
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
    data_parallel_mesh,
    resolve_groups,
)
from .auto_wrap import Policy, auto_wrap
from .build import build_state, resolve_ignored
from .full_params import summon_full_params
from .gradients import clip_grad_norm, register_comm_hook
from .optim_state import ASKED_FOR, answer
from .state import (
    Call,
    Handle,
    TrainingState,
    WrapperState,
    _get_fsdp_handles,
    _get_module_fsdp_state,
    states_below_root,
    wrapper_state_of,
    wrapper_states,
)
from .state_dict import StateDictHandler, get_state_dict_type, set_state_dict_type, state_dict_type

FSDP_WRAPPED_MODULE = FSDP_PREFIX.rstrip(".")


class FullyShardedDataParallel(nn.Module):
    """Wraps a module and shards its parameters over ranks, as one flat parameter.

    Wrapped modules inside keep their own parameters. Build the optimizer afterwards: `parameters()` returns one flat
    parameter per unit or, with `use_orig_params`, the original parameters, of which each rank holds consecutive
    elements. Parameters are unsharded inside forward and `summon_full_params`.
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
        """Wrap and shard `module`.

        `process_group` or `device_mesh` choose the ranks; hybrid strategies take a pair of groups, or a mesh of two
        dimensions. Parameters may be tensor parallel (DTensors) on another dimension of that mesh. `auto_wrap_policy`
        wraps modules inside first. `device_id` is the compute device, by default the module's. `sync_module_states`
        broadcasts rank 0's values. `param_init_fn` initialises modules on meta. Forward always prefetches one unit
        ahead, regardless of `forward_prefetch` and `limit_all_gathers`.
        """
        super().__init__()
        check_module(module, "FullyShardedDataParallel")
        backward_prefetch = checked_prefetch(backward_prefetch)
        precision, offload = checked_mixed_precision(mixed_precision), checked_cpu_offload(cpu_offload)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            warnings.warn(
                f"{type(module).__name__} has no forward to all-gather its parameters. Wrap the modules in it.",
                stacklevel=2,
            )
        device_mesh = data_parallel_mesh(device_mesh, sharding_strategy, module, wrapper_states(module))
        groups = resolve_groups(process_group, device_mesh, sharding_strategy, auto_wrap_policy is not None)
        ignored = resolve_ignored(module, ignored_modules, ignored_states)
        common: dict[str, Any] = {
            "backward_prefetch": backward_prefetch,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
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
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
            }
            auto_wrap(module, auto_wrap_policy, type(self), inside, ignored.modules, ignored.parameters)
        call = Call(groups, precision, offload, use_orig_params, limit_all_gathers)
        state = build_state(module, call, ignored, **common)
        setattr(self, FSDP_WRAPPED_MODULE, module)
        state.attach_wrapper(self)
        self._state_dict_handler = StateDictHandler(state)
        self.register_load_state_dict_post_hook(_loaded)
        self.forward_prefetch, self.backward_prefetch = forward_prefetch, backward_prefetch
        self.limit_all_gathers = limit_all_gathers

    # -- forward and backward -------------------------------------------------------------------------------

    @frame_not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state: Any = state_of(self)
        return state.run(self, self._modules[FSDP_WRAPPED_MODULE], args, kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward accumulates unsharded gradients; the next backward outside reduces them.

        Root only. For modules that the legacy call sharded, use `FullyShardedDataParallel.no_sync(module)`.
        """
        states = states_below_root(self, "no_sync")
        before = [(state.unit.options, state.unit.options.reshard_after_backward) for state in states]
        for options, _ in before:
            options.synchronize = options.all_reduce = False
            if options.reshard_after_forward is False:
                options.reshard_after_backward = False
        try:
            yield
        finally:
            for options, reshard_after_backward in before:
                options.synchronize = options.all_reduce = True
                options.reshard_after_backward = reshard_after_backward

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients together so that their norm is at most `max_norm`; return the norm before scaling.

        Root only. For modules that the legacy call sharded, use `FullyShardedDataParallel.clip_grad_norm_(module)`.
        """
        states_below_root(self, "clip_grad_norm_")
        return clip_grad_norm(self, max_norm, norm_type)

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """A context in which wrapped modules below `module` expose unsharded parameters under their original names.

        Writes are kept, unless `writeback` is False.
        """
        return summon_full_params(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads)

    # -- the module interface --------------------------------------------------------------------------------

    @property
    def _state(self) -> WrapperState:
        state = wrapper_state_of(self)
        assert state is not None
        return state

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without wrappers of activation checkpointing."""
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
        """Return True if this is the outermost wrapped module. This call, or the first forward, determines the root."""
        return self._state.is_root(self)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """The wrapped modules at and below `module`, in the order of `modules()`.

        For modules that the legacy call sharded without a wrapper, this lists their states, like PyTorch.
        """
        found: list[Any] = []
        for each in module.modules():
            state = wrapper_state_of(each)
            if state is not None and (not root_only or state.is_root(each)):
                found.append(_get_module_fsdp_state(each))
        return found

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Call `fn` with every module inside while this unit is unsharded; writes are kept."""
        if self._state.in_summon_full_params:
            raise TrainingStateError("apply calls summon_full_params, which cannot be nested. Call it outside.")
        with summon_full_params(self, recurse=False):
            return super().apply(fn)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert the sharded parameters in `.to()`, `.half()` and others."""
        refuse_shared_memory(self._state.unit, fn)
        self._state.unit.reshard()
        result = super()._apply(fn, recurse)
        self._state.unit.rebind_params()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those of units that are unsharded between forward and backward."""
        super().zero_grad(set_to_none)
        for state in wrapper_states(self):
            state.unit.clear_gradients(set_to_none)

    def __getstate__(self) -> Any:
        return self._state.__getstate__()  # refuses before anything inside is pickled

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(
            "A wrapped module cannot be copied: its shards belong to one set of ranks and buffers. Copy the module "
            "before you wrap it and wrap both, or load the state dict of one into the other."
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Names are the original ones inside `summon_full_params`."""
        if not torch.compiler.is_compiling():
            self._state.before_listing()
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield self._cleaned(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._cleaned(name), buffer

    def _cleaned(self, name: str) -> str:
        return name.replace(FSDP_PREFIX, "") if self._state.in_summon_full_params else name

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook` reduce and divide the gradients of all units. Root only, once, before the first forward.

        `hook` gets (state, unsharded flat gradient, this rank's shard to fill), or (state, gradient) with NO_SHARD.
        """
        register_comm_hook(self, state, hook)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard this module's own parameters. With `async_op`, only issue the all-gather; the handle waits."""
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
        """A state dict of the type that is set. All ranks must call this, also with `rank0_only`."""
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
        """Called by PyTorch's checkpoint helpers; refuses calls that they would get wrong."""
        inner = getattr(self._modules[FSDP_WRAPPED_MODULE], ASKED_FOR, dict)
        return answer(self, inner, wrapped=True)

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
        *,
        for_loading: bool = False,
    ) -> dict[str, Any]:
        """The optimizer's state by original name, in the type that is set for the model. All ranks must call this.

        `torch.distributed.checkpoint.load` fills only entries of the state dict that it is given, and an optimizer
        has no state before its first step. `for_loading=True` adds the state that the first step would create, without
        changing the optimizer or the parameters.
        """
        return optim_state.optim_state_dict(model, optim, optim_state_dict, group, for_loading=for_loading)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Convert the result of `optim_state_dict`, from any number of ranks, for `optim.load_state_dict`."""
        return optim_load.optim_state_dict_to_load(
            model, optim, optim_state_dict, is_named_optimizer, load_directly, group
        )

    full_optim_state_dict = staticmethod(optim_load.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_load.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_load.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_load.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_load.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_load.rekey_optim_state_dict)

    # -- attributes that programs read ----------------------------------------------------------------------

    _handle = property(attrgetter("_state.handle"))
    _use_orig_params = property(attrgetter("_state.call.use_orig_params"))
    _inter_node_pg = property(attrgetter("_state.call.groups.replicas"))
    _device_mesh = property(attrgetter("_state.call.groups.mesh"))

    @property
    def _all_handles(self) -> list[Handle]:
        return _get_fsdp_handles(self)

    @property
    def params(self) -> list[nn.Parameter]:
        """The unit's flat parameter, if it has parameters."""
        return [] if self._handle is None else [self._handle.flat_param]

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return self.params[0] if self.params else None

    @property
    def _has_params(self) -> bool:
        return self._state.handle is not None

    @property
    def _is_root(self) -> bool | None:
        return self.check_is_root() if self._state.is_initialized else None

    @property
    def mixed_precision(self) -> MixedPrecision:
        return self._state.call.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        return self._state.call.cpu_offload

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        return self._state.call.groups.strategy

    @property
    def process_group(self) -> Any:
        return self._state.call.groups.own

    @property
    def _fsdp_extension(self) -> Any:
        return self._state._fsdp_extension

    @_fsdp_extension.setter
    def _fsdp_extension(self, value: Any) -> None:
        self._state._fsdp_extension = value

    @property
    def world_size(self) -> int:
        return self.process_group.size()

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def compute_device(self) -> torch.device:
        return self._state.unit.device

    @property
    def training_state(self) -> TrainingState:
        return self._state.training_state

    def _assert_state(self, expected: TrainingState | list[TrainingState]) -> None:
        """Raise unless the module is in one of the expected states."""
        allowed = expected if isinstance(expected, list) else [expected]
        if self.training_state not in allowed:
            names = ", ".join(each.name for each in allowed)
            raise TrainingStateError(f"{self._state.unit} is in state {self.training_state.name}, expected {names}.")

    @property
    def _gradient_predivide_factor(self) -> float:
        return self._state.division()[0]

    @property
    def _gradient_postdivide_factor(self) -> float:
        return self._state.division()[1]


def _loaded(module: Any, incompatible_keys: Any) -> None:
    module._state_dict_handler.end_loading(incompatible_keys)
