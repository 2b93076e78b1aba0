"""The unsharded parameters of a param group, their buffer, their all-gather, and detection of the program's writes."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...comm.interface import Transport
from ...errors import StateError, UnsupportedError
from ...torch_private import as_dtensor, no_transforms, set_local_tensor, version_of
from ..all_gather import AllGatherPlan, Slices, Slicing
from ..extension import Extension, Extensions
from ..states import Precision
from .buffers import Shard, UnshardedBuffer
from .offload import Upload
from .param import ManagedParam, give_attributes, mark_unsharded
from .sharded import ShardedParams


class UnshardedParams:
    """The unsharded parameters of a param group in one precision. They are created for the first all-gather.

    While the param group uses this precision, `ManagedParam.unsharded` refers to these parameters.
    """

    def __init__(
        self,
        sharded: ShardedParams,
        transport: Transport,
        mesh: DeviceMesh | None,
        device: torch.device,
        precision: Precision,
        slicing: Slicing | None,
    ):
        self._params = sharded.params
        self._sharded, self._transport, self._device, self._precision = sharded, transport, device, precision
        extended = sorted(sharded.extended)
        _check(self._params, extended, slicing)
        if precision is Precision.STORED:
            slicing = None
        self._members = [index for index in range(len(self._params)) if index not in sharded.extended]
        with torch.no_grad(), torch.inference_mode(False), no_transforms():
            shard = self._shard()
            self.is_shard = _can_use_shard(shard, self._members, device)
            """True if the shard is also the unsharded buffer, so nothing is gathered."""
            self.buffer = self._make_buffer(shard)
            self._extensions: Extensions | None = None
            if extended:
                made = [self._extension(shard, index, mesh) for index in extended]
                self._extensions = Extensions(made, transport)
            self.plan = self._make_plan(shard)
            self.buffer.take()
            self._made = [self._make(shard, index) for index in self._members]
            self.buffer.release()
            self.enter()
            self.slices = None if slicing is None else Slices(self._params, shard, self.buffer, slicing)
        self.plain = self._extensions is None and self.slices is None
        """True if there are no parameters with a gather protocol and no slices."""

    def use_new_shard(self) -> None:
        """Gather from the current shard of `sharded`, which must have the same layout as the previous shard.

        The unsharded parameters stay the same objects, because graphs refer to them.
        """
        with torch.no_grad(), torch.inference_mode(False), no_transforms():
            shard = self._shard()
            if self.is_shard:
                self.buffer = self._make_buffer(shard)
                self._made = [self._moved(shard, *each) for each in zip(self._members, self._made, strict=True)]
            self.plan = self._make_plan(shard)

    def _shard(self) -> Shard:
        return self._sharded.shard.stored() if self._precision is Precision.STORED else self._sharded.shard

    def _make_buffer(self, shard: Shard) -> UnshardedBuffer:
        memory = shard.memory if self.is_shard else None
        return UnshardedBuffer(shard, self._members, self._device, self._transport.pool, memory)

    def _make_plan(self, shard: Shard) -> AllGatherPlan:
        streams, writes = self._sharded.offload.copy_streams, self._sharded.writes
        upload = None if streams is None else Upload(shard, self._device, streams.up, writes)
        return AllGatherPlan(shard, self.buffer, self._transport, upload, self._extensions)

    def _make(self, shard: Shard, index: int) -> tuple[ManagedParam, torch.Tensor, nn.Parameter]:
        param = self._params[index]
        view = self.buffer.parameter(shard, index)
        parameter = nn.Parameter(as_dtensor(view, param.tp_spec), requires_grad=param.sharded.requires_grad)
        mark_unsharded(parameter, param.name)
        return param, view, parameter

    def _moved(
        self, shard: Shard, index: int, made: tuple[ManagedParam, torch.Tensor, nn.Parameter]
    ) -> tuple[ManagedParam, torch.Tensor, nn.Parameter]:
        """Move a parameter to its place in the new buffer. Tensors that a graph has saved stay in the old buffer."""
        param, _, parameter = made
        view = self.buffer.parameter(shard, index)
        if param.tp_spec is None:
            parameter.data = view
        else:
            set_local_tensor(parameter, view)
        return param, view, parameter

    def _extension(self, shard: Shard, index: int, mesh: DeviceMesh | None) -> Extension:
        param, dtype = self._params[index], shard.segments.dtypes(index).compute
        policy = param.policy if self._precision is Precision.POLICY else param.policy.without_casts
        return Extension(param, self._transport, mesh, policy, dtype, self._device)

    def enter(self) -> None:
        """Set `ManagedParam.unsharded` of each param to its unsharded parameter in this precision."""
        for param, view, parameter in self._made:
            param.unsharded_view, param.unsharded = view, parameter
            give_attributes(parameter, param.attributes, parameter.detach())
        if self._extensions is not None:
            self._extensions.enter()

    def parameters(self) -> list[tuple[ManagedParam, nn.Parameter]]:
        extensions = [] if self._extensions is None else self._extensions.parameters()
        return [(param, parameter) for param, _, parameter in self._made] + extensions

    # -- gather protocols and slices ------------------------------------------------------------------------

    def finish_special(self) -> None:
        """Unshard parameters with a gather protocol, and free slices.

        Call this method after waiting for the all-gather.
        """
        if self._extensions is not None:
            self._extensions.finish()
        if self.slices is not None:
            self.slices.release()

    def release_special(self) -> None:
        """Free the memory of gather protocols and slices. This memory is not part of the unsharded buffer."""
        if self._extensions is not None:
            self._extensions.release()
        if self.slices is not None:
            self.slices.release()


def _can_use_shard(shard: Shard, members: list[int], device: torch.device) -> bool:
    """Return True if the shard can be the unsharded buffer.

    This is the case if this rank has the whole unit, in the layout of the unsharded buffer and in the compute dtypes.
    """
    alone = not members or shard.shardings[0].world == 1
    cast = any(kind.compute != kind.original for kind in shard.segments.kinds)
    return alone and not cast and shard.layout.same_unsharded and shard.device == device


def _check(params: list[ManagedParam], extended: list[int], slicing: Slicing | None) -> None:
    for param in params:
        dtype = param.sharded.dtype
        if param.sharded.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise StateError(f"Parameter {param.name!r} is {dtype} and cannot require grad.")
    if extended and slicing is not None:
        names = ", ".join(params[index].name for index in extended)
        raise UnsupportedError(
            f"Parameters with their own gather protocol ({names}) cannot be resharded to a smaller group: pass "
            "True or False for reshard_after_forward."
        )


# Not Python functions, because `touched` calls them for every parameter of units that stay unsharded after forward.
_requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
_address: Callable[[torch.Tensor], int] = methodcaller("data_ptr")


class ShownParams:
    """Detects changes that the program makes to unsharded parameters or slices outside forward and backward."""

    def __init__(self, sharded: ShardedParams, is_shard: bool, sliced: bool):
        """Record the current state of the parameters.

        `is_shard` is True if the shard is also the unsharded buffer. `sliced` is True if modules hold slices.
        """
        self._sharded, self._is_shard, self._sliced = sharded, is_shard, sliced
        shown = [(param, param.sliced if sliced else param.unsharded) for param in sharded.params]
        self._params = [(param, each) for param, each in shown if each is not None and not each.is_inference()]
        flat = sharded.flat_parameter
        self._tensors = [each for _, each in self._params] + ([] if flat is None or sliced else [flat])
        self._before = self._now()

    @property
    def touched(self) -> bool:
        """True if the program has written, moved, frozen or unfrozen any of these parameters or slices."""
        return self._now() != self._before

    def _now(self) -> tuple[list[int], list[bool], list[int]]:
        tensors = self._tensors
        return list(map(version_of, tensors)), list(map(_requires_grad, tensors)), list(map(_address, tensors))

    def follow(self) -> list[str]:
        """Apply the program's changes to the sharded parameters.

        Changes of `requires_grad` are applied, and written values are copied into the shard. Returns the names of
        written parameters that cannot be copied, because they are slices or have another dtype than the shard.
        """
        now = self._now()
        if now == self._before:
            return []
        lost, changes = [], list(zip(*self._before, *now, strict=True))
        with torch.no_grad(), torch.inference_mode(False):
            for (param, shown), change in zip(self._params, changes, strict=False):
                version, required, address, new_version, requires, new_address = change
                if requires != required:
                    param.sharded.requires_grad_(requires)
                if new_address != address:
                    kept = self._move_back(param, shown) and self._copy(param)
                else:
                    kept = new_version == version or self._copy(param)
                if not kept:
                    lost.append(param.name)
            if len(self._tensors) > len(self._params):
                version, _, address, new_version, _, new_address = changes[-1]
                if (version, address) != (new_version, new_address) and not self._sharded.copy_flat():
                    lost.append("the flat parameter")
        return lost

    def _copy(self, param: ManagedParam) -> bool:
        if self._sliced:
            return False
        if self._is_shard and not param.is_outside_buffer:
            return True
        return self._sharded.copy_unsharded(param)

    @staticmethod
    def _move_back(param: ManagedParam, shown: torch.Tensor) -> bool:
        place = param.unsharded_view
        if place is None:
            return False
        fits = shown.shape == place.shape and shown.dtype == place.dtype
        if fits:
            place.copy_(shown)
        shown.data = place
        return fits
