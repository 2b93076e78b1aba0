"""`FlatParameter` and the handle of a flat unit, with the attributes that programs read in PyTorch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..comm.interface import Transport
from ..engine.api import Dtypes, FlatShardedParams, ManagedParam, Unit, sharded_grads_of
from ..layout.flat import FlatOffsets
from .api import ShardingStrategy

FLAT_PARAM = "_flat_param"
_IS_FLAT_PARAM = "_is_flat_param"


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]
    """Makes plain parameters with an attribute instances: optimizers use no fused kernels for subclasses."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, _IS_FLAT_PARAM, False)


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """All parameters of a unit as one 1-D tensor. At rest it is this rank's shard, including padding.

    `_fqns`, `_shapes`, `_numels`: names, shapes and sizes of the original parameters. `_numels_with_padding`: also the
    padding between them. `_local_shard`: this rank's shard. `_full_param_padded`: the unsharded buffer, which has
    memory only while the unit is unsharded. `_mp_shard`: exists if the unit computes in another dtype, and never has
    memory, because the shard is cast directly into the unsharded buffer.
    """


class ParamInfo(NamedTuple):
    """The module and the name that an original parameter is registered under."""

    param_name: str
    module: nn.Module | None
    module_name: str


class SharedParamInfo(NamedTuple):
    """A further registration of a shared parameter, and its first one (`prim_`)."""

    param_name: str
    module: nn.Module | None
    module_name: str
    prim_param_name: str
    prim_module: nn.Module | None
    prim_module_name: str


class Handle:
    """The handle of one unit. It copies nothing and reads everything from the unit."""

    def __init__(
        self,
        module: nn.Module,
        sharded: FlatShardedParams,
        flat: FlatOffsets,
        shards: Transport,
        strategy: ShardingStrategy,
    ):
        self._module = weakref.ref(module)
        self._sharded, self._flat, self._shards = sharded, flat, shards
        self._sharding_strategy = strategy
        self._use_orig_params = sharded.originals
        self._set_metadata()

    @property
    def flat_param(self) -> nn.Parameter:
        parameter = self._sharded.flat.sharded
        if not getattr(parameter, _IS_FLAT_PARAM, False):
            self._set_metadata()  # the parameter was replaced
        self._set_tensors(parameter)
        return parameter

    @property
    def _fully_sharded_module(self) -> nn.Module | None:
        return self._module()

    @property
    def _dtypes(self) -> Dtypes:
        return self._sharded.shard.segments.kinds[0]

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        return self._dtypes.original

    @property
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        return self._dtypes.compute

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self._dtypes.reduce

    @property
    def uses_sharded_strategy(self) -> bool:
        return self._shards.world > 1

    @property
    def rank(self) -> int:
        return self._shards.rank

    @property
    def world_size(self) -> int:
        return self._shards.world

    @property
    def sharded_grad(self) -> torch.Tensor | None:
        return self.flat_param.grad

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
        """The sharded gradient, of which the gradients of the original parameters are views."""
        dtype, numel = self._dtypes.gradient, self._sharded.flat.local.numel()
        for grad in sharded_grads_of(self._sharded.parameters()):
            return grad.flat(dtype, 0, numel)
        if self._sharded.has_elements:
            return None
        # This rank has only padding, so there is no parameter whose gradient a user could clear or read.
        return torch.zeros(numel, dtype=dtype, device=self._sharded.flat.local.device)

    def _set_metadata(self) -> None:
        """Set the attributes that never change: names, sizes and positions of the original parameters."""
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
        parameter._padded_unsharded_size = torch.Size((flat.shard_numel * self._shards.world,))
        parameter._sharded_size = torch.Size((flat.shard_numel,))
        own = min(max(flat.length - self._shards.rank * flat.shard_numel, 0), flat.shard_numel)
        parameter._shard_numel_padded = flat.shard_numel - own
        parameter._params = [param.sharded for param in params] if self._use_orig_params else None
        parameter._tensors = [None] * len(params) if self._use_orig_params else None

    def _set_param_infos(self, parameter: Any) -> None:
        """Set only when a program reads the parameter: the reference cycle keeps the modules alive."""
        infos, shared = [], []
        for param in self._sharded.params:
            first, *others = [(location.name, location.module()) for location in param.locations]
            path = param.name.rpartition(".")[0]
            infos.append(ParamInfo(first[0], first[1], path))
            shared += [SharedParamInfo(name, module, "", first[0], first[1], path) for name, module in others]
        parameter._param_infos, parameter._shared_param_infos = tuple(infos), tuple(shared)
        parameter._modules = {info.module for info in infos}


def flat_sharded_of(unit: Unit) -> FlatShardedParams | None:
    """The sharded parameters of a flat unit; None if the unit has no parameters."""
    if not unit.param_groups:
        return None
    sharded = unit.param_groups[0].sharded
    assert isinstance(sharded, FlatShardedParams)
    return sharded


def shard_begins(sharded: FlatShardedParams, rank: int) -> Iterator[tuple[int, int]]:
    """Numbers of the parameters that `rank` has elements of, and the offsets of these in its shard."""
    for region in sharded.shard.regions:  # one, or none if the unit has no elements here
        yield from region.begins(region.runs[0], rank)


def in_memory_order(tensor: torch.Tensor, param: ManagedParam) -> torch.Tensor:
    """The elements of a parameter, its gradient or its state, in the order of the flat parameter.

    A tensor of another shape than the parameter holds only this rank's elements, already in this order.
    """
    if tensor.shape != torch.Size(param.sharding.shape) or tensor.ndim == 1:
        return tensor.reshape(-1)
    stride = param.sharding.stride
    if tuple(tensor.stride()) != stride:
        ordered = torch.empty_strided(param.sharding.shape, stride, dtype=tensor.dtype, device=tensor.device)  # type: ignore[arg-type]
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((param.sharding.numel,), (1,), tensor.storage_offset())
