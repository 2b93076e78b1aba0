"""The state of an FSDP1 module, and the counterparts of PyTorch's `FlatParameter` and its handle."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.interface import Transport
from ..engine.api import (
    Dtypes,
    FlatShardedParams,
    FSDPState,
    ManagedParam,
    Phase,
    Precision,
    Root,
    Unit,
    division,
    sharded_grads_of,
    state_of,
)
from ..errors import ArgumentError, StateError, UnshardError, UnsupportedError
from ..layout.shardings import FlatOffsets
from ..torch_private import dtensor_extensions, never_compiled, own_buffers, root_mesh
from .api import CPUOffload, MixedPrecision, ShardingStrategy, default_settings
from .groups import Groups


class TrainingState(Enum):
    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


_STATES: weakref.WeakValueDictionary[Unit, WrapperState] = weakref.WeakValueDictionary()


def states_of(units: list[Unit]) -> list[WrapperState]:
    return [state for unit in units if (state := _STATES.get(unit)) is not None]


class WrapperState(FSDPState):
    """Connects a flat unit to a wrapper, or to a module that `composable.fully_shard` sharded."""

    full_state_dict: ClassVar[str] = (
        "model.state_dict() inside FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT)"
    )

    takes_over_units: ClassVar[bool] = True

    def __init__(
        self,
        unit: Unit,
        handle: Handle | None,
        groups: Groups,
        modules: Iterable[nn.Module],
        mixed_precision: MixedPrecision,
        cpu_offload: CPUOffload,
        use_orig_params: bool,
        limit_all_gathers: bool,
    ):
        super().__init__(unit)
        self._handle, self.groups = handle, groups
        self.sharding_strategy, self.process_group = groups.strategy, groups.own
        self.mixed_precision, self.cpu_offload = mixed_precision, cpu_offload
        self.use_orig_params, self.limit_all_gathers = use_orig_params, limit_all_gathers
        _STATES[unit] = self
        self._float_buffers = [
            (own_buffers(module), name, buffer.dtype)
            for module in modules
            for name, buffer in own_buffers(module).items()
            if buffer is not None and buffer.is_floating_point()
        ]
        self.in_summon_full_params = False
        self.settings = default_settings()
        self.has_comm_hook = False
        self._extension: Any = None
        self.is_of_wrapper = False

    @property
    def handle(self) -> Handle | None:
        return self._handle if self.unit.param_groups else None

    @property
    def owners(self) -> list[WrapperState]:
        """The states of the other units whose parameters this unit uses."""
        return states_of(self.unit.borrows_from)

    def __getstate__(self) -> Any:
        raise UnsupportedError(
            f"{self.unit} cannot be pickled or copied: its shards belong to one set of ranks and buffers. Save the "
            "state_dict(), and load it into a newly sharded model."
        )

    def attach_wrapper(self, module: nn.Module) -> None:
        self.is_of_wrapper = True
        super().attach_wrapper(module)

    def _attach_to_state_dicts(self, module: nn.Module) -> None:
        """Register nothing. The engine's hooks would save a plain shard as if it were the whole parameter."""

    def original_buffer_dtypes(self) -> dict[int, torch.dtype]:
        found = ((buffers.get(name), original) for buffers, name, original in self._float_buffers)
        return {id(buffer): original for buffer, original in found if buffer is not None}

    @torch.no_grad()
    def cast_buffers(self, restore: bool = False) -> None:
        """Cast floating-point buffers to `buffer_dtype` or, if `restore` is True, back to their original dtypes."""
        dtype = self.mixed_precision.buffer_dtype
        for buffers, name, original in self._float_buffers if dtype is not None else ():
            buffer, wanted = buffers.get(name), original if restore else dtype
            if buffer is not None and buffer.dtype != wanted and buffer.is_floating_point():
                buffers[name] = buffer.to(wanted)

    @property
    def transports(self) -> tuple[Transport, Transport]:
        """The transport for shards and the transport for replicas."""
        if self.unit.param_groups:
            return self.unit.param_groups[0].shards, self.unit.param_groups[0].replicas
        return self.groups.transports(self.unit.device)

    @property
    def training_state(self) -> TrainingState:
        if self.in_summon_full_params:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.IDLE if self.unit.phase is Phase.IDLE else TrainingState.FORWARD_BACKWARD

    @property
    def _fsdp_extension(self) -> Any:
        """As in PyTorch, None unless the mesh is a slice of a larger mesh. unshard never reads this attribute."""
        mesh = self.groups.mesh
        if self._extension is None and mesh is not None and root_mesh(mesh) != mesh:
            self._extension = dtensor_extensions(self.unit.device)
        return self._extension

    @_fsdp_extension.setter
    def _fsdp_extension(self, value: Any) -> None:
        self._extension = value

    def tensor_parallel_meshes(self) -> list[DeviceMesh]:
        """Return the distinct meshes of all tensor-parallel parameters under this unit's root."""
        root = None if self.unit.root is None else self.unit.root()
        units = [self.unit] if root is None else root.units
        specs = [param.tp_spec for unit in units for param in unit.params]
        return list(dict.fromkeys(spec.mesh for spec in specs if spec is not None))

    def division(self) -> tuple[float, float]:
        """Return the numbers by which gradients are divided before and after the reduction."""
        shards, replicas = self.transports
        factors = division(shards.world, replicas.world, frozenset(), None, False, in_halves=True)
        return factors.before, factors.after

    @never_compiled
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.unit.policy.full_precision_in_eval and self.is_root(module):
            stored = self.unit.precision_in(module.training) is Precision.STORED
            for state in wrapper_states(module):
                state.cast_buffers(restore=stored)
        return super().pre_forward(module, args, kwargs)

    def is_root(self, module: nn.Module) -> bool:
        """Return True if `module` is the root. If the root is not known yet, `module` becomes the root."""
        return self.find_root(module).unit is self.unit

    def _make_root(self, module: nn.Module) -> Root:
        states = wrapper_states(module)
        _check_agreement(states)
        root = super()._make_root(module)
        for state in states:
            state.cast_buffers()  # once, so buffers keep this dtype after forward
        return root


def wrapper_state_of(module: nn.Module) -> WrapperState | None:
    state = state_of(module)
    return state if isinstance(state, WrapperState) else None


def wrapper_states(module: nn.Module) -> list[WrapperState]:
    """Return the states of all wrapped modules in `module`, in the order of `module.modules()`."""
    found = (wrapper_state_of(each) for each in module.modules())
    return list(dict.fromkeys(state for state in found if state is not None))


def _check_agreement(states: list[WrapperState]) -> None:
    for what, values in (
        ("use_orig_params", {state.use_orig_params for state in states if state.handle is not None}),
        ("limit_all_gathers", {state.limit_all_gathers for state in states}),
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
    """Return the states of all units in `module`. Raise if `module` is not the outermost wrapped module."""
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
    """Return `module` if it is a wrapper, its state if `composable.fully_shard` sharded it, and None otherwise."""
    state = module if isinstance(module, WrapperState) else wrapper_state_of(module)
    return module if state is not None and state.is_of_wrapper else state


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[Any], list[nn.Module]]:
    found = {state: each for each in module.modules() if (state := _get_module_fsdp_state(each)) is not None}
    return list(found), list(found.values())


def _get_fsdp_states(module: nn.Module) -> list[Any]:
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_handles(module: nn.Module) -> list[Handle]:
    return [state.handle for state in wrapper_states(module) if state.handle is not None]


# -- `FlatParameter` and the handle of a flat unit, with the attributes that programs read in PyTorch ----------------


FLAT_PARAM = "_flat_param"
_IS_FLAT_PARAM = "_is_flat_param"


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]
    """Makes `isinstance` return True for marked parameters. Instances of a subclass would disable fused optimizers."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, _IS_FLAT_PARAM, False)


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """All parameters of a unit as one 1-D tensor. At rest, this tensor holds only this rank's padded shard.

    `_fqns`, `_shapes` and `_numels` are the names, shapes and sizes of the original parameters. `_numels_with_padding`
    also has the sizes of padding between parameters. `_local_shard` is this rank's shard. `_full_param_padded` is the
    unsharded buffer, which has memory only while the unit is unsharded. `_mp_shard` exists if the unit computes in
    another dtype. It never has memory, because the shard is cast directly into the unsharded buffer.
    """


class ParamInfo(NamedTuple):
    """The module that holds an original parameter, and the name of the parameter in this module."""

    param_name: str
    module: nn.Module | None
    module_name: str


class SharedParamInfo(NamedTuple):
    """A second registration of a shared parameter. Fields with the prefix `prim_` describe its first registration."""

    param_name: str
    module: nn.Module | None
    module_name: str
    prim_param_name: str
    prim_module: nn.Module | None
    prim_module_name: str


class Handle:
    """Provides the attributes of PyTorch's `FlatParamHandle` that programs read. All values come from the unit."""

    def __init__(
        self,
        module: nn.Module,
        sharded: FlatShardedParams,
        flat: FlatOffsets,
        shards: Transport,
        strategy: ShardingStrategy,
    ):
        self._module = weakref.ref(module)
        self._sharded, self._flat = sharded, flat
        self._sharding_strategy = strategy
        self._use_orig_params = sharded.originals
        self.rank, self.world_size = shards.rank, shards.world
        self.uses_sharded_strategy = shards.world > 1
        self._set_metadata()

    @property
    def flat_param(self) -> nn.Parameter:
        parameter = self._sharded.flat.sharded
        if not getattr(parameter, _IS_FLAT_PARAM, False):
            self._set_metadata()  # the parameter was replaced
        self._set_tensors(parameter)
        return parameter

    _fully_sharded_module = property(lambda self: self._module())

    @property
    def _dtypes(self) -> Dtypes:
        return self._sharded.shard.segments.kinds[0]

    _orig_param_dtype = property(attrgetter("_dtypes.original"))
    _fwd_bwd_param_dtype = property(attrgetter("_dtypes.compute"))
    _reduce_dtype = property(attrgetter("_dtypes.reduce"))
    sharded_grad = property(attrgetter("flat_param.grad"))

    def _set_tensors(self, parameter: Any) -> None:
        """Set the attributes that change from step to step."""
        flat, dtypes = self._sharded.flat, self._dtypes
        self._set_param_infos(parameter)
        parameter._local_shard = flat.local
        empty = torch.empty(0, dtype=dtypes.compute, device=flat.local.device)
        parameter._full_param_padded = empty if flat.padded is None else flat.padded
        if dtypes.compute != dtypes.original:
            parameter._mp_shard = empty
            parameter._full_prec_full_param_padded = torch.empty(0, dtype=dtypes.original, device=flat.local.device)
        if self._use_orig_params:
            parameter.grad = self._gradient()

    def _gradient(self) -> torch.Tensor | None:
        # The gradients of the original parameters are views of one tensor, the sharded gradient.
        dtype, numel = self._dtypes.gradient, self._sharded.flat.local.numel()
        for grad in sharded_grads_of(self._sharded.parameters()):
            return grad.flat(dtype, 0, numel)
        if self._sharded.has_elements:
            return None
        # This rank has only padding, so there is no parameter whose gradient a user could clear or read.
        return torch.zeros(numel, dtype=dtype, device=self._sharded.flat.local.device)

    def _set_metadata(self) -> None:
        """Set the flat parameter's attributes that never change."""
        params, flat = self._sharded.params, self._flat
        parameter: Any = self._sharded.flat.sharded
        setattr(parameter, _IS_FLAT_PARAM, True)
        parameter._fqns = tuple(param.name for param in params)
        parameter._shapes = tuple(torch.Size(param.sharding.shape) for param in params)
        parameter._strides = tuple(param.sharding.stride for param in params)
        parameter._numels = tuple(param.sharding.numel for param in params)
        parameter._numels_with_padding = flat.padded
        parameter._is_padding_mask = tuple(padding for _, padding in flat.numels)
        parameter._num_params = len(params)
        parameter._unpadded_unsharded_size = torch.Size((flat.length,))
        parameter._padded_unsharded_size = torch.Size((flat.shard_numel * self.world_size,))
        parameter._sharded_size = torch.Size((flat.shard_numel,))
        own = min(max(flat.length - self.rank * flat.shard_numel, 0), flat.shard_numel)
        parameter._shard_numel_padded = flat.shard_numel - own
        parameter._params = [param.sharded for param in params] if self._use_orig_params else None
        parameter._tensors = [None] * len(params) if self._use_orig_params else None

    def _set_param_infos(self, parameter: Any) -> None:
        """Set modules and names of parameters. Call this only on demand, because it creates a reference cycle."""
        infos, shared = [], []
        for param in self._sharded.params:
            first, *others = [(location.name, location.module()) for location in param.locations]
            path = param.name.rpartition(".")[0]
            infos.append(ParamInfo(first[0], first[1], path))
            shared += [SharedParamInfo(name, module, "", first[0], first[1], path) for name, module in others]
        parameter._param_infos, parameter._shared_param_infos = tuple(infos), tuple(shared)
        parameter._modules = {info.module for info in infos}


def flat_sharded_of(unit: Unit) -> FlatShardedParams | None:
    if not unit.param_groups:
        return None
    sharded = unit.param_groups[0].sharded
    assert isinstance(sharded, FlatShardedParams)
    return sharded


def shard_begins(sharded: FlatShardedParams, rank: int) -> Iterator[tuple[int, int]]:
    """Yield (parameter number, offset in the rank's shard) for each parameter with elements on `rank`."""
    for region in sharded.shard.regions:  # one region, or none if this rank has no elements
        yield from region.begins(region.runs[0], rank)


def in_shape(unsharded: torch.Tensor, param: ManagedParam) -> torch.Tensor:
    """Return a view of `param` in an unsharded flat parameter, gradient or state. The view has the shape of `param`."""
    cut = param.sharding
    return unsharded.as_strided(cut.shape, cut.stride, cut.begin)  # type: ignore[arg-type, union-attr]


def in_memory_order(tensor: torch.Tensor, param: ManagedParam) -> torch.Tensor:
    """Return the elements of a parameter, gradient or state as a 1-D tensor, in the order of the flat parameter.

    If the shape of `tensor` differs from the parameter's, `tensor` must hold only this rank's elements, already in this
    order.
    """
    if tensor.shape != torch.Size(param.sharding.shape) or tensor.ndim == 1:
        return tensor.reshape(-1)
    stride = param.sharding.stride
    if tuple(tensor.stride()) != stride:
        ordered = torch.empty_strided(param.sharding.shape, stride, dtype=tensor.dtype, device=tensor.device)  # type: ignore[arg-type]
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((param.sharding.numel,), (1,), tensor.storage_offset())
