"""This rank's reduced gradients and unreduced sums, and the list of optimizers that step during backward."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, repeat
from math import prod
from operator import attrgetter, is_, is_not
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from ..comm.interface import Transport
from ..errors import listed
from ..layout.collective_tensors import Region, lay_out
from ..torch_private import (
    DTensorSpec,
    foreach_add,
    foreach_copy,
    local_of,
    make_gradient,
    post_accumulate_hooks,
    spec_of,
    storage_use_count,
    version_of,
)
from . import observer
from .params.buffers import Buffer, Shard, ShardBuffer
from .params.offload import OffloadPlan
from .params.param import ManagedParam

_made = itertools.count()
_Views = TypeVar("_Views")

# No Python function: called for every parameter in every step.
gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


@dataclass(frozen=True)
class FlatGradient:
    """Adjacent gradients with the same distribution, as one flat tensor with zeros in the gaps between gradients."""

    tensor: torch.Tensor
    spec: DTensorSpec


class ShardedGrad:
    """Holds this rank's reduced gradients in one flat buffer, with one `.grad` object per parameter.

    The `.grad` objects are created once. Their local tensors are at offsets of one storage, which can be emptied. Torch
    can neither copy nor save DTensors with an offset, so `make_gradient` returns DTensors that support both.
    """

    def __init__(
        self,
        shard: Shard,
        regions: Sequence[Region],
        params: list[ManagedParam],
        transport: Transport,
        offload: OffloadPlan,
    ):
        segments = shard.segments
        self.number = next(_made)
        """Order of creation. Several sharded gradients are summed in this order, so every run gives the same sum."""
        self.offloaded = offload.offloaded
        """True if the buffer is on the host and the unit computes on a device."""
        self.wait_for_copy: Callable[[], None] = lambda: None
        """Makes the host wait for a copy from the device that is in flight, if any."""
        self.stepper: weakref.ref[object] | None = None
        """The optimizer that stepped with these gradients during backward, if any."""
        # Host memory is never freed: fresh pages would fault one by one, and pinning them is slow.
        memory = offload.memory if offload.offloaded else None
        self.buffer = ShardBuffer(
            regions, segments, "gradient", transport.traits.piece_alignment, offload.device, memory=memory
        )
        self.pinned = offload.offloaded and self.buffer.all_bytes.is_pinned()
        """True if the host memory is pinned, so copies from the device are asynchronous."""
        self._params: list[ManagedParam] = []
        self.grads: list[DTensor] = []
        self.locals: list[torch.Tensor] = []
        self.begins: list[int] = []
        """Offset of each gradient in bytes, in ascending order."""
        self._flats: dict[tuple[torch.dtype, int, tuple[int, ...]], torch.Tensor] = {}
        self.buffer.take()
        for region, at in zip(regions, self.buffer.buffer_layout.ranges, strict=True):
            run = region.runs[0]
            dtype = segments.kinds[run.segment].gradient
            for index, start in region.begins(run, transport.rank):
                offset = at.offset + start * dtype.itemsize
                self._add(params[index], dtype, offset, transport.rank)
        self.buffer.release()
        self.parameters: list[torch.Tensor] = [param.sharded for param in self._params]
        self._idle_uses = self._uses()
        self._known_idle = True

    def _add(self, param: ManagedParam, dtype: torch.dtype, offset: int, rank: int) -> None:
        spec = spec_of(param.sharded)
        shape = param.sharding.local_shape(rank)
        if prod(shape):
            local = self.buffer.tensor(dtype, offset, shape)
        else:
            local = torch.empty(shape, dtype=dtype, device=self.buffer.device)
        self._put(param, make_gradient(local, spec.mesh, spec.placements, param.sharded.shape), local, offset)

    def _put(self, holder: Any, grad: Any, local: torch.Tensor, offset: int) -> None:
        self._params.append(holder)
        self.grads.append(grad)
        self.locals.append(local)
        self.begins.append(offset)

    def _uses(self) -> int:
        """Count the references to the grads, their local tensors and the storage. Views of the storage also count."""
        held = sum(map(sys.getrefcount, self.grads)) + sum(map(sys.getrefcount, self.locals))
        return held + storage_use_count(self.buffer.storage)

    @property
    def attached(self) -> bool:
        """True if at least one gradient is set as the `.grad` of its parameter."""
        return any(map(is_, map(gradient_of, self.parameters), self.grads))  # a loop in C: called in every step

    def attached_members(self) -> tuple[int, ...]:
        """Return the indices of the gradients that are set as `.grad` of their parameters."""
        pairs = enumerate(zip(self.parameters, self.grads, strict=True))
        return tuple(number for number, (parameter, grad) in pairs if parameter.grad is grad)

    def attach(self, members: Sequence[int]) -> None:
        """Set `.grad` of the parameters with the indices `members`. These parameters must not have a `.grad`."""
        self._known_idle = False
        for number in members:
            self.parameters[number].grad = self.grads[number]

    @property
    def idle(self) -> bool:
        """True if the buffer can be overwritten or freed: no gradient is set as `.grad`, and no user holds one.

        Once True, this stays True until `deliver` or `attach`, because users cannot get a reference before then.
        """
        if not self._known_idle:
            self._known_idle = not self.attached and self._uses() == self._idle_uses
        return self._known_idle

    def belongs_to(self, parameters: Set[int]) -> bool:
        """Return True if every gradient is set as `.grad` and the ids of all parameters are in `parameters`."""
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            if parameter.grad is not grad or id(parameter) not in parameters:
                return False
        return bool(self.grads)

    def flat(self, dtype: torch.dtype, begin: int, *shape: int) -> torch.Tensor:
        """Return a view of the allocated buffer. Calls with the same arguments return the same tensor."""
        key = dtype, begin, shape
        if key not in self._flats:
            self._flats[key] = self.viewing(lambda: self.buffer.tensor(dtype, begin, shape))
        return self._flats[key]

    def viewing(self, make: Callable[[], _Views]) -> _Views:
        """Return the result of `make`. The views that it creates belong to the engine and do not count as uses."""
        before = self._uses()
        views = make()
        self._idle_uses += self._uses() - before
        return views

    @cached_property
    def gaps(self) -> list[torch.Tensor]:
        """Views of all bytes that belong to no gradient. The first read must happen while the buffer is allocated."""
        return self.viewing(self._find_gaps)

    def _find_gaps(self) -> list[torch.Tensor]:
        found, end = [], 0
        for begin, local in zip([*self.begins, self.buffer.nbytes], [*self.locals, None], strict=True):
            if begin > end:
                found.append(self.buffer.tensor(torch.uint8, end, (begin - end,)))
            end = begin + (0 if local is None else local.numel() * local.element_size())
        return found

    @cached_property
    def flat_gradients(self) -> list[FlatGradient]:
        """All gradients in as few tensors as possible. The first read must happen while the buffer is allocated."""

        def kind(each: tuple[int, torch.Tensor, ManagedParam]) -> tuple[torch.dtype, int, object]:
            spec = spec_of(each[2].sharded)
            return each[1].dtype, id(spec.mesh), spec.placements

        found = []
        for (dtype, _, _), run in groupby(zip(self.begins, self.locals, self._params, strict=True), kind):
            members = list(run)
            first, _, param = members[0]
            last, local, _ = members[-1]
            numel = (last - first) // dtype.itemsize + local.numel()
            if numel:
                found.append(FlatGradient(self.flat(dtype, first, numel), spec_of(param.sharded)))
        return found

    @property
    def stepped(self) -> bool:
        """True if an optimizer has already stepped with these gradients and still exists."""
        return self.stepper is not None and self.stepper() is not None

    def writes(self) -> int:
        """Return a counter that grows with every write that torch notices."""
        return sum(map(version_of, self.grads)) + sum(map(version_of, self.locals))

    def names(self) -> str:
        """Return the names of the parameters, shortened for use in messages."""
        return listed(param.name for param in self._params)

    def deliver(self, absent: Collection[ManagedParam] = ()) -> None:
        """Set each parameter's `.grad`, or add to an existing one. Then call the post-accumulate hooks.

        `absent` contains parameters without a gradient on this rank. They get a `.grad` only if the sum is not zero,
        because then another rank had a gradient. With offload, `.grad` is set while the copy to the host is in flight.
        The end of backward waits for the copy. This method waits earlier if it reads the values or a hook may read
        them.
        """
        self._known_idle = False
        parameters, grads, locals_ = self.parameters, self.grads, self.locals
        if absent:
            self.wait_for_copy()
            numbered = enumerate(zip(self._params, locals_, strict=True))
            here = [number for number, (param, local) in numbered if param not in absent or bool(local.any())]
            parameters, grads = [parameters[number] for number in here], [grads[number] for number in here]
            locals_ = [locals_[number] for number in here]
        before = list(map(gradient_of, parameters))
        hooks = list(map(post_accumulate_hooks, parameters))
        added = any(map(is_not, before, repeat(None)))
        if added or any(hooks) or observer.current is not None:
            self.wait_for_copy()
        if added:
            _add(parameters, before, grads, locals_)
        else:
            deque(map(setattr, parameters, repeat("grad"), grads), maxlen=0)
        if not any(map(is_, before, repeat(None))):
            self.buffer.release()  # all were added to existing gradients
        if any(hooks):
            for parameter, own in zip(parameters, hooks, strict=True):
                for hook in list((own or {}).values()):
                    hook(parameter)
        if observer.current is not None:
            observer.current.delivered(self._params)


class FlatShardedGrad(ShardedGrad):
    """Sharded gradients as plain tensors. There is one per parameter, or a single one for a flat parameter."""

    def __init__(self, *arguments: Any, flat: Any):
        """`flat` is the flat parameter, if the unit has one."""
        self._one = flat
        super().__init__(*arguments)

    def _add(self, param: ManagedParam, dtype: torch.dtype, offset: int, rank: int) -> None:
        shape = param.sharding.local_shape(rank)
        if self._one is None:
            if prod(shape):
                grad = self.buffer.tensor(dtype, offset, shape, param.sharding.local_stride)
                self._put(param, grad, grad, offset)
        elif not self.grads:
            grad = self.buffer.tensor(dtype, 0, self._one.local.shape)
            self._put(self._one, grad, grad, 0)


def _add(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    grads: list[DTensor],
    locals_: list[torch.Tensor],
) -> None:
    existing, new = [], []
    for parameter, gradient, grad, local in zip(parameters, gradients, grads, locals_, strict=True):
        if gradient is None:
            parameter.grad = grad
        else:
            existing.append(local_of(gradient) if isinstance(gradient, DTensor) else gradient)
            new.append(local)
    foreach_add(existing, new)


class UnreducedGradients:
    """Sums the gradients of backwards without synchronization in one flat buffer, usually in the reduce dtype."""

    def __init__(self, shard: Shard, device: torch.device, reduce: bool = False):
        """If `reduce` is True, sum in the reduce dtype, even if the policy accumulates in another dtype."""
        role = "reduce" if reduce else "kept"
        itemsizes = shard.segments.itemsizes(role)
        items = [
            replace(item, sharding=item.sharding.unsharded, itemsize=itemsizes[item.segment]) for item in shard.items
        ]
        regions = shard.layout.unsharded_regions(items, range(len(items)))
        buffer_layout = lay_out(regions, itemsizes, items[0].sharding.world if items else 1)
        self.buffer = Buffer(buffer_layout.nbytes, device)
        self._views = {}
        for region, at in zip(regions, buffer_layout.ranges, strict=True):
            run = region.runs[0]
            for index, start in zip(run.members, run.starts, strict=True):
                dtype, sharding = getattr(shard.segments.dtypes(index), role), shard.shardings[index]
                self._views[index] = self.buffer.tensor(
                    dtype, at.offset + start * dtype.itemsize, sharding.shape, sharding.stride
                )
        self._flats: dict[int, torch.Tensor] = {}
        self._uses = storage_use_count(self.buffer.storage)
        self.buffer.release()
        self.present: set[int] = set()
        """Indices of the parameters that have a sum."""

    def add(self, gradients: dict[int, torch.Tensor]) -> None:
        self.buffer.take()
        new = [index for index in gradients if index not in self.present]
        old = [index for index in gradients if index in self.present]
        if new:
            foreach_copy([self._views[i] for i in new], [gradients[i] for i in new])
        if old:
            foreach_add([self._views[i] for i in old], [gradients[i] for i in old])
        self.present.update(new)

    def sums(self) -> dict[int, torch.Tensor]:
        return {index: self._views[index] for index in sorted(self.present)}

    def flat(self, length: int) -> torch.Tensor:
        """Return the sums of a flat unit as one tensor, with zeros for parameters without a sum."""
        if length not in self._flats:
            dtype = next(iter(self._views.values())).dtype
            self._flats[length] = self.buffer.tensor(dtype, 0, (length,))
            self._uses += 1
        flat = self._flats[length]
        if len(self.present) < len(self._views):
            kept = [view.clone() for view in self.sums().values()]
            flat.zero_()
            foreach_copy(list(self.sums().values()), kept)
        return flat

    def forget(self, indices: Iterable[int]) -> None:
        self.present.difference_update(indices)

    def clear(self) -> bool:
        """Drop all sums and free the memory. Return False and keep the memory if a user holds a view of it."""
        self.present.clear()
        if self.buffer.held and storage_use_count(self.buffer.storage) > self._uses:
            return False
        self.buffer.release()
        return True


LISTENERS: dict[int, weakref.ref[Any]] = {}
"""Optimizers that step units during backward. The dict is usually empty, and every unit checks it in every step.

`gradients_ready(sharded_grads)` is called in the thread of backward when gradients are complete. Their copy to the host
may be in flight, so call `ShardedGrad.wait_for_copy` before reading them. `finish_steps()` is called before a program
reads parameters.
"""


def listen(listener: Any) -> None:
    """Call the methods of `listener` from now on, as long as it exists. `LISTENERS` describes the methods."""
    key = id(listener)
    LISTENERS[key] = weakref.ref(listener, lambda _: LISTENERS.pop(key, None))


def unlisten(listener: Any) -> None:
    LISTENERS.pop(id(listener), None)


def listeners() -> list[Any]:
    return [listener for ref in list(LISTENERS.values()) if (listener := ref()) is not None]


def finish_steps() -> None:
    """Make all listeners finish their steps. Call this before parameters are read outside backward."""
    for listener in listeners():
        listener.finish_steps()
