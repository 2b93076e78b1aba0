"""The one parameter of a flat unit, and the handle, as programs that look inside know them."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from ..comm.interface import Transport
from ..engine.flat_faces import FlatGradShard
from ..engine.flat_sharded import FlatSharded
from ..engine.precision import Dtypes
from ..layout.flat import Flat
from .wrapper_api import ShardingStrategy

_MARK = "_is_flat_param"


class _ByMark(type(nn.Parameter)):  # type: ignore[misc]
    """Instances are plain parameters that bear a mark: optimizers treat subclasses of Parameter as strangers."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, _MARK, False)


class FlatParameter(nn.Parameter, metaclass=_ByMark):
    """All parameters of a unit laid end to end; this rank's piece, padding included, at rest.

    `_fqns`, `_shapes`, `_numels`: the original ones. `_numels_with_padding`: with what lies between them.
    `_local_shard`: this rank's piece. `_full_param_padded`: where the unit is gathered, without memory when it is not.
    `_mp_shard`: there is one where the unit computes in another dtype; it never has memory, because shards are cast
    straight into the place they are gathered in.
    """


class ParamInfo(NamedTuple):
    """Where an original parameter is registered."""

    param_name: str
    module: nn.Module | None
    module_name: str


class SharedParamInfo(NamedTuple):
    """Where it is registered besides, and where first."""

    param_name: str
    module: nn.Module | None
    module_name: str
    prim_param_name: str
    prim_module: nn.Module | None
    prim_module_name: str


class Handle:
    """One unit as programs see it that ask for handles. Everything is looked up when asked for."""

    def __init__(
        self, module: nn.Module, sharded: FlatSharded, flat: Flat, shards: Transport, strategy: ShardingStrategy
    ):
        self._module = weakref.ref(module)
        self._sharded, self._flat, self._shards = sharded, flat, shards
        self._sharding_strategy = strategy
        self._use_orig_params = sharded.originals
        self._describe()

    @property
    def flat_param(self) -> nn.Parameter:
        parameter = self._sharded.flat.sharded
        if not getattr(parameter, _MARK, False):
            self._describe()  # the parameter was replaced
        self._refresh(parameter)
        return parameter

    @property
    def _fully_sharded_module(self) -> nn.Module | None:
        return self._module()

    @property
    def _dtypes(self) -> Dtypes:
        return self._sharded.master.segments.kinds[0]

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

    def _refresh(self, parameter: Any) -> None:
        """What changes over time."""
        face, kinds = self._sharded.flat, self._dtypes
        self._name_places(parameter)
        parameter._local_shard = face.local
        empty = torch.empty(0, dtype=kinds.compute, device=face.local.device)
        parameter._full_param_padded = empty if face.padded is None else face.padded
        if kinds.compute != kinds.original:
            parameter._mp_shard = empty
            parameter._full_prec_full_param_padded = torch.empty(0, dtype=kinds.original, device=face.local.device)
        if self._sharded.originals:
            parameter.grad = self._gradient()

    def _gradient(self) -> torch.Tensor | None:
        """The gradients of the original parameters as the one tensor that they lie in."""
        dtype, numel = self._dtypes.gradient, self._sharded.flat.local.numel()
        for shard in FlatGradShard.living:
            if shard.attached and shard.serves(self._sharded.slots):
                return shard.flat(dtype, 0, numel)
        if self._sharded.has_elements:
            return None
        # All padding here: nobody can clear a gradient, or see that there was one.
        return torch.zeros(numel, dtype=dtype, device=self._sharded.flat.local.device)

    def _describe(self) -> None:
        """What stays: the names, sizes and places of the original parameters."""
        slots, flat = self._sharded.slots, self._flat
        parameter: Any = self._sharded.flat.sharded
        setattr(parameter, _MARK, True)
        parameter._fqns = tuple(slot.name for slot in slots)
        parameter._shapes = tuple(torch.Size(slot.cut.shape) for slot in slots)
        parameter._strides = tuple(slot.cut.stride for slot in slots)
        parameter._numels = tuple(slot.cut.numel for slot in slots)
        parameter._numels_with_padding = flat.padded
        parameter._is_padding_mask = tuple(padding for _, padding in flat.numels)
        parameter._num_params = len(slots)
        parameter._unpadded_unsharded_size = torch.Size((flat.length,))
        parameter._padded_unsharded_size = torch.Size((flat.share * self._shards.world,))
        parameter._sharded_size = torch.Size((flat.share,))
        last = min(max(flat.length - self._shards.rank * flat.share, 0), flat.share)
        parameter._shard_numel_padded = flat.share - last
        originals = self._sharded.originals
        parameter._params = [slot.sharded for slot in slots] if originals else None
        parameter._tensors = [None] * len(slots) if originals else None

    def _name_places(self, parameter: Any) -> None:
        """Only for whoever asks: the parameter belongs to the modules, and these would live as long as they."""
        infos, shared = [], []
        for slot in self._sharded.slots:
            first, *others = [(home.name, home.module()) for home in slot.homes]
            path = slot.name.rpartition(".")[0]
            infos.append(ParamInfo(first[0], first[1], path))
            shared += [SharedParamInfo(name, module, "", first[0], first[1], path) for name, module in others]
        parameter._param_infos, parameter._shared_param_infos = tuple(infos), tuple(shared)
        parameter._modules = {info.module for info in infos}
