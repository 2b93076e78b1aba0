"""The state of a flat unit: the arguments of the call, the handle, and what the root's first forward does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.interface import Transport
from ..engine.api import FSDPState, Phase, Precision, Root, Unit, division, state_of
from ..errors import ArgumentError, StateError, UnshardError, UnsupportedError
from ..torch_private import dtensor_extensions, never_compiled, root_mesh
from .api import CPUOffload, MixedPrecision, ShardingStrategy, default_settings
from .comm_hooks import HookedTransport, compressed_dtype, with_results_copied
from .flat_parameter import Handle, flat_sharded_of
from .groups import Groups
from .precision import CastBuffers


class TrainingState(Enum):
    """What a wrapped module is doing."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


@dataclass(frozen=True)
class Call:
    """The arguments of a call that are needed later."""

    groups: Groups
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    use_orig_params: bool
    limit_all_gathers: bool


_STATES: weakref.WeakKeyDictionary[Unit, weakref.ref[WrapperState]] = weakref.WeakKeyDictionary()


def _states_of(units: list[Unit]) -> list[WrapperState]:
    found = (_STATES[unit]() for unit in units)
    return [state for state in found if state is not None]


class WrapperState(FSDPState):
    """Ties a flat unit to a wrapper, or to the module that the legacy call was applied to."""

    full_state_dict: ClassVar[str] = (
        "model.state_dict() inside FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT)"
    )

    takes_over_units: ClassVar[bool] = True

    def __init__(self, unit: Unit, call: Call, handle: Handle | None, buffers: CastBuffers):
        super().__init__(unit)
        self.call, self._handle = call, handle
        _STATES[unit] = weakref.ref(self)
        self.own_buffers = buffers
        self.in_summon_full_params = False
        self.settings = default_settings()
        self.has_comm_hook = False
        self._extension: Any = None
        self.is_of_wrapper = False

    @property
    def handle(self) -> Handle | None:
        """None if the unit has no parameters of its own."""
        return self._handle if self.unit.param_groups else None

    @property
    def owners(self) -> list[WrapperState]:
        """Of the units whose parameters this one uses, besides its own."""
        return _states_of(self.unit.borrows_from)

    @property
    def sharers(self) -> list[WrapperState]:
        """Of the units that use its parameters, or whose parameters it uses."""
        return _states_of(self.unit.sharers)

    def __getstate__(self) -> Any:
        raise UnsupportedError(
            f"{self.unit} cannot be pickled or copied: its shards belong to one set of ranks and buffers. Save the "
            "state_dict(), and load it into a model that is sharded anew."
        )

    def attach_wrapper(self, module: nn.Module) -> None:
        self.is_of_wrapper = True
        super().attach_wrapper(module)

    def _attach_to_state_dicts(self, module: nn.Module) -> None:
        """None of the engine's hooks, which save DTensors: a plain shard would be saved as if it were the parameter."""

    def original_buffer_dtypes(self) -> dict[int, torch.dtype]:
        return self.own_buffers.original_dtypes()

    def install_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a user's hook reduce and divide the gradients."""
        self.has_comm_hook = True
        sharded = flat_sharded_of(self.unit)
        if sharded is None:
            return
        originals = {param.sharded.dtype for param in sharded.params}
        dtype = compressed_dtype(hook, state, self.call.groups.own, originals)
        if dtype is not None:
            self.unit.param_groups[0].gradients.forget_buffers()
            sharded.reduce_in(dtype)
            return
        hook = with_results_copied(hook)
        self.unit.options.divide_factor, self.unit.options.divide_in_halves = 1.0, True
        for group in self.unit.param_groups:
            group.wrap_reduce_transport(lambda inner: HookedTransport(inner, state, hook))

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        return self.call.groups.strategy

    @property
    def process_group(self) -> Any:
        return self.call.groups.own

    @property
    def transports(self) -> tuple[Transport, Transport]:
        """Over the shards, and over the replicas."""
        if self.unit.param_groups:
            return self.unit.param_groups[0].shards, self.unit.param_groups[0].replicas
        return self.call.groups.transports(self.unit.device)

    @property
    def training_state(self) -> TrainingState:
        if self.in_summon_full_params:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.IDLE if self.unit.phase is Phase.IDLE else TrainingState.FORWARD_BACKWARD

    @property
    def _fsdp_extension(self) -> Any:
        """What PyTorch's state has here, for programs that ask: not None if its mesh is a slice of another one.

        Nothing depends on it: tensor-parallel parameters are supported on every mesh.
        """
        mesh = self.call.groups.mesh
        if self._extension is None and mesh is not None and root_mesh(mesh) != mesh:
            self._extension = dtensor_extensions(self.unit.device)
        return self._extension

    @_fsdp_extension.setter
    def _fsdp_extension(self, value: Any) -> None:
        self._extension = value

    def tensor_parallel_meshes(self) -> list[DeviceMesh]:
        """The meshes that tensor-parallel parameters of the model are on, each once; the model below the root."""
        root = None if self.unit.root is None else self.unit.root()
        units = [self.unit] if root is None else root.units
        specs = [param.tp_spec for unit in units for param in unit.params if param.tp_spec is not None]
        found: list[DeviceMesh] = []
        for mesh in {id(spec.mesh): spec.mesh for spec in specs}.values():
            if mesh not in found:
                found.append(mesh)
        return found

    def division(self) -> tuple[float, float]:
        """What gradients are divided by before and after they are reduced."""
        shards, replicas = self.transports
        factors = division(shards.world, replicas.world, frozenset(), None, False, in_halves=True)
        return factors.before, factors.after

    @never_compiled
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.unit.policy.full_precision_in_eval and self.is_root(module):
            self._cast_or_restore_buffers(module)
        return super().pre_forward(module, args, kwargs)

    def is_root(self, module: nn.Module) -> bool:
        """Whether this state of `module` is the root's. Before the first forward, `module` becomes the root."""
        return self.find_root(module).unit is self.unit

    def _cast_or_restore_buffers(self, module: nn.Module) -> None:
        stored = self.unit.precision_in(module.training) is Precision.STORED
        for state in wrapper_states(module):
            state.own_buffers.restore() if stored else state.own_buffers.cast()

    def _make_root(self, module: nn.Module) -> Root:
        states = wrapper_states(module)
        _check_agreement(states)
        root = super()._make_root(module)
        for state in states:
            state.own_buffers.cast()
        return root


def wrapper_state_of(module: nn.Module) -> WrapperState | None:
    state = state_of(module)
    return state if isinstance(state, WrapperState) else None


def wrapper_states(module: nn.Module) -> list[WrapperState]:
    """The states of `module` and of the modules below it, in the order of `modules()`."""
    found = (wrapper_state_of(each) for each in module.modules())
    return list(dict.fromkeys(state for state in found if state is not None))


def _check_agreement(states: list[WrapperState]) -> None:
    for what, values in (
        ("use_orig_params", {state.call.use_orig_params for state in states if state.handle is not None}),
        ("limit_all_gathers", {state.call.limit_all_gathers for state in states}),
        (
            "full precision in eval (FSDP_USE_FULL_PREC_IN_EVAL)",
            {state.unit.policy.full_precision_in_eval for state in states},
        ),
    ):
        if len(values) > 1:
            raise ArgumentError(
                f"Wrapped modules under one root must agree on {what}, found {sorted(values)}. Pass the same to all."
            )


def states_below_root(module: Any, method: str, error: type[UnshardError] = StateError) -> list[WrapperState]:
    """The states of the units of `module`, which has to be a root, wrapped or sharded by the legacy call."""
    state = wrapper_state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ArgumentError(
            f"{method} is for a module that was wrapped, or that unshard.composable.fully_shard was applied to; this "
            f"{type(module).__name__} is neither."
        )
    if not state.is_root(module):
        inside = type(getattr(module, "module", module)).__name__
        raise error(f"{method} is for the outermost wrapped module; this {inside} is inside another one.")
    return wrapper_states(module)


# -- functions of PyTorch's `_traversal_utils` that programs call ----------------------------------------------------


def _get_module_fsdp_state(module: Any) -> Any:
    """A wrapper is its own state; a module that the legacy call was applied to has one; None for other modules."""
    state = module if isinstance(module, WrapperState) else wrapper_state_of(module)
    return module if state is not None and state.is_of_wrapper else state


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[Any], list[nn.Module]]:
    """The states of the units at and below `module`, and the modules that have them, in the order of `modules()`."""
    found = {state: each for each in module.modules() if (state := _get_module_fsdp_state(each)) is not None}
    return list(found), list(found.values())


def _get_fsdp_states(module: nn.Module) -> list[Any]:
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_handles(module: nn.Module) -> list[Handle]:
    """The handles of the units that have parameters."""
    return [state.handle for state in wrapper_states(module) if state.handle is not None]
