"""`FullyShardedDataParallel`: the wrapper that PyTorch users know as FSDP1."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..engine.hooks import WRAPPED
from ..errors import ArgumentError, ConflictError, StateError, UnshardError, UnsupportedError
from . import optim_legacy
from . import optim_state as optim_states
from .auto_wrap import Policy, auto_wrap
from .checkpoint_helpers import ASKED_FOR, answer
from .flat_call import flat_state
from .flat_parameter import Handle
from .ignored import resolve_ignored
from .module import UnshardHandle
from .state_dict_kinds import get_state_dict_type, set_state_dict_type, state_dict_type
from .summon import summon_full_params
from .wrapper_api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .wrapper_arguments import check_module, checked_cpu_offload, checked_mixed_precision, checked_prefetch
from .wrapper_clip import clip_gradients
from .wrapper_groups import resolve_groups
from .wrapper_state import Call, TrainingState, WrapperState, wrapper_state_of, wrapper_states
from .wrapper_state_dict import StateDicts

FSDP_WRAPPED_MODULE = WRAPPED.rstrip(".")
FLAT_PARAM = "_flat_param"
_CHECKPOINTED = "_checkpoint_wrapped_module"


class FullyShardedDataParallel(nn.Module):
    """Wraps a module whose parameters are cut over ranks, laid end to end as one unit.

    Parameters that a module inside was wrapped with already are not its own. Build the optimizer afterwards: what
    `parameters()` gives is one flat parameter for each unit or, with `use_orig_params`, the original ones, of which
    each rank holds some elements in a row. Inside forward and `summon_full_params` they are whole.
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
        """`process_group`, `device_mesh`: which ranks share the module; for hybrid strategies a pair of groups or a
        mesh of two dimensions. `auto_wrap_policy` wraps modules inside first. `device_id`: where it computes, else
        where it is. `sync_module_states` sends the values of rank 0 to all. `param_init_fn` initialises modules that
        are on meta. Gathers are issued one unit ahead in forward, whatever `forward_prefetch` and `limit_all_gathers`
        say.
        """
        super().__init__()
        check_module(module, "FullyShardedDataParallel")
        backward_prefetch = checked_prefetch(backward_prefetch)
        precision, offload = checked_mixed_precision(mixed_precision), checked_cpu_offload(cpu_offload)
        _warn_about_containers(module)
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
                **ignored.given,
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
        state = flat_state(module, call, ignored, **common)
        setattr(self, FSDP_WRAPPED_MODULE, module)
        state.attach_wrapper(self)
        self._state_dicts = StateDicts(state)
        self.register_load_state_dict_post_hook(_loaded)
        self.forward_prefetch, self.backward_prefetch = forward_prefetch, backward_prefetch
        self.limit_all_gathers = limit_all_gathers

    # -- forward and backward -------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._state.run(self, self._modules[FSDP_WRAPPED_MODULE], args, kwargs)  # type: ignore[arg-type]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here keeps gradients whole on this rank; the next one outside reduces the sums. Root only.

        `FullyShardedDataParallel.no_sync(module)` is for what the legacy call was applied to.
        """
        states = _states_of_root(self, "no_sync")
        before = [(state.unit.options, state.unit.options.reshard_after_backward) for state in states]
        for options, _ in before:
            options.synchronise = options.all_reduce = False
            if options.reshard_after_forward is False:
                options.reshard_after_backward = False
        try:
            yield
        finally:
            for options, reshards in before:
                options.synchronise = options.all_reduce = True
                options.reshard_after_backward = reshards

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients down together so that their norm is at most `max_norm`; returns the norm. Root only.

        `FullyShardedDataParallel.clip_grad_norm_(module, ...)` is for what the legacy call was applied to.
        """
        _states_of_root(self, "clip_grad_norm_")
        return clip_gradients(self, float(max_norm), float(norm_type))

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """A context in which the wrapped modules below `module` hold whole parameters under their original names.

        What is written to them is kept, unless `writeback` is False.
        """
        return summon_full_params(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads)

    # -- what it looks like ---------------------------------------------------------------------------------

    @property
    def _state(self) -> WrapperState:
        state = wrapper_state_of(self)
        assert state is not None
        return state

    @property
    def module(self) -> nn.Module:
        """The module inside, looking through a wrapper of activation checkpointing."""
        inside: Any = self._modules[FSDP_WRAPPED_MODULE]
        return getattr(inside, _CHECKPOINTED, inside)

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
        """Whether this is the outermost wrapped module; the first forward decides, or this call."""
        return self._state.find_root(self).unit is self._state.unit

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """The wrapped modules inside, in the order of `modules()`.

        The legacy call wraps nothing: where it was applied, this lists the unit's state, as PyTorch did.
        """
        found: list[Any] = []
        for each in module.modules():
            state = wrapper_state_of(each)
            if state is not None and (not root_only or state.find_root(each).unit is state.unit):
                found.append(each if isinstance(each, FullyShardedDataParallel) else state)
        return found

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Call `fn` with every module inside, whose parameters are whole meanwhile; what it writes is kept."""
        if self._state.summoned:
            raise StateError("apply cannot be called inside summon_full_params, which holds the parameters already.")
        with summon_full_params(self, recurse=False):
            return super().apply(fn)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`.to()`, `.half()`: they convert the sharded parameters."""
        self._state.unit.reshard()
        result = super()._apply(fn, recurse)
        self._state.unit.settle()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also of units that are whole between forward and backward."""
        super().zero_grad(set_to_none)
        for wrapped in self.fsdp_modules(self):
            wrapped._state.unit.clear_gradients(set_to_none)

    def __getstate__(self) -> Any:
        return self._state.__getstate__()  # before anything inside is asked

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(
            "A wrapped module cannot be copied: its shards belong to one set of ranks and buffers. Copy the module "
            "before it is wrapped and wrap both, or load the state dict of one into the other."
        )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Inside `summon_full_params` under their original names."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield self._cleaned(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._cleaned(name), buffer

    def _cleaned(self, name: str) -> str:
        return name.replace(WRAPPED, "") if self._state.summoned else name

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook` reduce the gradients of all units, division included. Root only, once, before the first forward.

        It gets (state, whole flat gradient, piece to fill), or (state, gradient) where nothing is sharded.
        """
        if not callable(hook):
            raise ArgumentError(f"hook must be a function, got {hook!r}.")
        states = _states_of_root(self, "register_comm_hook", ConflictError)
        for each in states:
            if each.hooked:
                raise ConflictError("A communication hook is registered already.")
            if each.call.groups.replicas is not None:
                raise ConflictError(f"{each.call.groups.strategy.name} reduces in two steps, and takes no hook.")
        for each in states:
            each.install_hook(state, hook)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters; with `async_op` only issue it, and wait by the handle."""
        unit = self._state.unit
        unit.select(unit.precision_in(self.training))
        unit.gather()
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
        """Of the kind that is set. All ranks have to call, whatever they get."""
        names = ("destination", "prefix", "keep_vars")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._state.find_root(self)
        return self._state_dicts.save(
            self, lambda: super(FullyShardedDataParallel, self).state_dict(**given), given.get("prefix", "")
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._state_dicts.begin_loading(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _fqn_modifiers(self) -> Any:
        """What PyTorch's helpers for checkpoints ask for; also refuses what they would get wrong."""
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
        """The optimizer's state by the original names, of the kind that is set for the model. All ranks call.

        `torch.distributed.checkpoint.load` fills only what is in the state dict that it is given. An optimizer that
        has taken no step has no state; `for_loading=True` adds what its first step would create, to be filled. Neither
        the optimizer nor the parameters change.
        """
        return optim_states.optim_state_dict(model, optim, optim_state_dict, group, for_loading=for_loading)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from what `optim_state_dict` gave, with any number of ranks."""
        return optim_states.optim_state_dict_to_load(
            model, optim, optim_state_dict, is_named_optimizer, load_directly, group
        )

    full_optim_state_dict = staticmethod(optim_legacy.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optim_legacy.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optim_legacy.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optim_legacy.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optim_legacy.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optim_legacy.rekey_optim_state_dict)

    # -- what programs that look inside ask for -------------------------------------------------------------

    @property
    def _handle(self) -> Handle | None:
        return self._state.handle

    @property
    def _all_handles(self) -> list[Handle]:
        return [state.handle for state in wrapper_states(self) if state.handle is not None]

    @property
    def params(self) -> list[nn.Parameter]:
        """The unit's flat parameter, if it has parameters."""
        handle = self._state.handle
        return [] if handle is None else [handle.flat_param]

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return self.params[0] if self.params else None

    @property
    def _has_params(self) -> bool:
        return self._state.handle is not None

    @property
    def _is_root(self) -> bool | None:
        return self.check_is_root() if self._state.is_initialised else None

    @property
    def _use_orig_params(self) -> bool:
        return self._state.call.use_orig_params

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
    def _inter_node_pg(self) -> Any:
        return self._state.call.groups.replicas

    @property
    def _device_mesh(self) -> DeviceMesh | None:
        return self._state.call.groups.mesh

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
        """Raise unless the module is doing one of these."""
        allowed = expected if isinstance(expected, list) else [expected]
        if self.training_state not in allowed:
            names = ", ".join(each.name for each in allowed)
            raise ConflictError(f"{self._state.unit} is in state {self.training_state.name}, expected {names}.")

    @property
    def _gradient_predivide_factor(self) -> float:
        return self._state.division()[0]

    @property
    def _gradient_postdivide_factor(self) -> float:
        return self._state.division()[1]


def _states_of_root(module: Any, method: str, error: type[UnshardError] = StateError) -> list[WrapperState]:
    """Of everything below the outermost module that was wrapped, or sharded by the legacy call."""
    state = wrapper_state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ArgumentError(
            f"{method} is for a module that was wrapped, or that unshard.composable.fully_shard was applied to; this "
            f"{type(module).__name__} is none."
        )
    if state.find_root(module).unit is not state.unit:
        inside = type(getattr(module, "module", module)).__name__
        raise error(f"{method} is for the outermost wrapped module; this {inside} is inside another one.")
    return wrapper_states(module)


def _loaded(module: Any, incompatible_keys: Any) -> None:
    module._state_dicts.end_loading(incompatible_keys)


def _warn_about_containers(module: nn.Module) -> None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        warnings.warn(
            f"{type(module).__name__} has no forward, so nothing will gather its parameters. Wrap what is in it.",
            stacklevel=3,
        )
