"""State of a wrapped module (or of one that the legacy call sharded): its unit, arguments, buffers and hooks."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.interface import Done, Label, Tensors, Transport, Work
from ..engine.api import FSDPState, Phase, Precision, Root, Unit, division, state_of
from ..errors import ArgumentError, StateError, UnshardError, UnsupportedError
from ..torch_private import dtensor_extensions, low_precision_of, never_compiled, own_buffers, root_mesh
from .api import CPUOffload, MixedPrecision, ShardingStrategy, default_settings
from .flat_parameter import Handle, flat_sharded_of
from .groups import Groups


class TrainingState(Enum):
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
    """Connects a flat unit to a wrapper, or to the module that the legacy call was applied to."""

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
        """States of the units that own shared parameters of this one."""
        return _states_of(self.unit.borrows_from)

    @property
    def sharers(self) -> list[WrapperState]:
        """States of the units that share a parameter with this one, whichever of them owns it."""
        return _states_of(self.unit.sharers)

    def __getstate__(self) -> Any:
        raise UnsupportedError(
            f"{self.unit} cannot be pickled or copied: its shards belong to one set of ranks and buffers. Save the "
            "state_dict(), and load it into a newly sharded model."
        )

    def attach_wrapper(self, module: nn.Module) -> None:
        self.is_of_wrapper = True
        super().attach_wrapper(module)

    def _attach_to_state_dicts(self, module: nn.Module) -> None:
        """Register none of the engine's hooks: they would save a plain shard as if it were the parameter."""

    def original_buffer_dtypes(self) -> dict[int, torch.dtype]:
        return self.own_buffers.original_dtypes()

    def install_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a user's hook reduce and divide the gradients."""
        self.has_comm_hook = True
        sharded = flat_sharded_of(self.unit)
        if sharded is None:
            return
        originals = {param.sharded.dtype for param in sharded.params}
        dtype = _compressed_dtype(hook, state, self.call.groups.own, originals)
        if dtype is not None:
            self.unit.param_groups[0].gradients.forget_buffers()
            sharded.reduce_in(dtype)
            return
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
        """Like PyTorch's attribute, not None if the mesh is a slice of another one. unshard itself never reads it."""
        mesh = self.call.groups.mesh
        if self._extension is None and mesh is not None and root_mesh(mesh) != mesh:
            self._extension = dtensor_extensions(self.unit.device)
        return self._extension

    @_fsdp_extension.setter
    def _fsdp_extension(self, value: Any) -> None:
        self._extension = value

    def tensor_parallel_meshes(self) -> list[DeviceMesh]:
        """Distinct meshes of the tensor-parallel parameters below the root."""
        root = None if self.unit.root is None else self.unit.root()
        units = [self.unit] if root is None else root.units
        specs = [param.tp_spec for unit in units for param in unit.params]
        return list(dict.fromkeys(spec.mesh for spec in specs if spec is not None))

    def division(self) -> tuple[float, float]:
        """Divisors of the gradients before and after they are reduced."""
        shards, replicas = self.transports
        factors = division(shards.world, replicas.world, frozenset(), None, False, in_halves=True)
        return factors.before, factors.after

    @never_compiled
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.unit.policy.full_precision_in_eval and self.is_root(module):
            self._cast_or_restore_buffers(module)
        return super().pre_forward(module, args, kwargs)

    def is_root(self, module: nn.Module) -> bool:
        """Return True if `module` is the root. Before the first forward, this call makes it the root."""
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
    """States of `module` and of the modules below it, in the order of `modules()`."""
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
    """States of all units below `module`, which must be a root: wrapped, or sharded by the legacy call."""
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


# -- buffers ---------------------------------------------------------------------------------------------------------


class CastBuffers:
    """The floating-point buffers of a unit's modules. The root's first forward casts them to `dtype` for good."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype | None):
        self.dtype = dtype
        self._buffers = [
            (own_buffers(module), name, buffer.dtype)
            for module in modules
            for name, buffer in own_buffers(module).items()
            if buffer is not None and buffer.is_floating_point()
        ]

    def cast(self) -> None:
        """Cast to `dtype`, unless it is None."""
        for buffers, name, _ in self._buffers if self.dtype is not None else ():
            _cast(buffers, name, self.dtype)

    def restore(self) -> None:
        """Cast back to the original dtypes."""
        for buffers, name, original in self._buffers if self.dtype is not None else ():
            _cast(buffers, name, original)

    def original_dtypes(self) -> dict[int, torch.dtype]:
        """The dtype that each currently registered buffer had when the module was wrapped, by the buffer's id."""
        found = ((buffers.get(name), original) for buffers, name, original in self._buffers)
        return {id(buffer): original for buffer, original in found if buffer is not None}


@torch.no_grad()
def _cast(buffers: dict[str, torch.Tensor | None], name: str, dtype: torch.dtype | None) -> None:
    buffer = buffers.get(name)
    if buffer is not None and buffer.dtype != dtype and buffer.is_floating_point():
        buffers[name] = buffer.to(dtype)


# -- `register_comm_hook` --------------------------------------------------------------------------------------------


class HookedTransport(Transport):
    """Gathers through the transport inside, and gives gradients to a user's hook.

    The hook of a sharded unit gets (state, flat gradient, this rank's shard to fill). The hook of a unit that is not
    sharded gets (state, gradient) and changes the gradient in place.
    """

    def __init__(self, inner: Transport, state: Any, hook: Callable[..., Any]):
        self._inner, self._state, self._hook = inner, state, hook
        self.rank, self.world = inner.rank, inner.world
        self.traits = dataclasses.replace(inner.traits, reduces_in_place=False, waits_in_stream=False)
        self.pool = inner.pool

    def all_gather(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None) -> Work:
        return self._inner.all_gather(outputs, inputs, label=label)

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None, average: bool) -> Work:
        for output, unreduced in zip(outputs, inputs, strict=True):
            if self.world > 1:
                self._call_hook(unreduced, output)
            else:  # one rank: the unit is not sharded
                self._call_hook(unreduced)
                output.copy_(unreduced[: output.numel()])
        return Done()

    def all_reduce(self, tensors: list[torch.Tensor], *, label: Label | None = None, average: bool) -> Work:
        for tensor in tensors:
            self._call_hook(tensor)
        return Done()

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._inner.carrier(dtype)

    def _call_hook(self, *tensors: torch.Tensor) -> None:
        """Call the hook and copy its result back if necessary.

        PyTorch's low-precision hooks (`torch.distributed.algorithms._comm_hooks.default_hooks`) replace the memory of
        the tensors that they get.
        """
        given = [each.detach() for each in tensors]
        self._hook(self._state, *given)
        if given[-1].data_ptr() != tensors[-1].data_ptr():
            tensors[-1].copy_(given[-1])


def _compressed_dtype(hook: Callable[..., Any], state: Any, group: Any, originals: set[torch.dtype]) -> Any:
    """The dtype that PyTorch's compression hooks reduce in; None if the hook does, or may do, anything else.

    The engine then reduces in that dtype itself, like `MixedPrecision(reduce_dtype=...)`: overlapped, on any device.
    `originals`: the dtypes of the unit's parameters.
    """
    usual = division(group.size(), 1, frozenset(), None, False, in_halves=True)
    factors = (
        getattr(state, "gradient_predivide_factor", None),
        getattr(state, "gradient_postdivide_factor", None),
    )
    same_ranks = getattr(state, "process_group", None) is group and factors == (usual.before, usual.after)
    restores = {getattr(state, "parameter_type", None)} == originals
    return low_precision_of(hook) if same_ranks and restores else None


# -- functions of PyTorch's `_traversal_utils` that programs call ----------------------------------------------------


def _get_module_fsdp_state(module: Any) -> Any:
    """A wrapper is its own state; a module that the legacy call was applied to has one; None for other modules."""
    state = module if isinstance(module, WrapperState) else wrapper_state_of(module)
    return module if state is not None and state.is_of_wrapper else state


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[Any], list[nn.Module]]:
    """States of the units at and below `module`, and the modules that have them, in the order of `modules()`."""
    found = {state: each for each in module.modules() if (state := _get_module_fsdp_state(each)) is not None}
    return list(found), list(found.values())


def _get_fsdp_states(module: nn.Module) -> list[Any]:
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_handles(module: nn.Module) -> list[Handle]:
    """Handles of the units that have parameters."""
    return [state.handle for state in wrapper_states(module) if state.handle is not None]
