"""The gradient shard: this rank's piece of the reduced gradient, and the `.grad` objects over it, made once."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from itertools import groupby, repeat
from operator import attrgetter, is_, is_not
from typing import ClassVar, TypeVar

import torch
from torch.distributed.tensor import DTensor

from ..comm.interface import Transport
from ..layout.rows import Region
from ..torch_private import (
    DTensorSpec,
    foreach_add,
    local_of,
    make_dtensor,
    post_accumulate_hooks,
    spec_of,
    storage_uses,
    version_of,
)
from . import observer
from .buffers import ShardBuffer
from .faces import Slot
from .living import Living
from .master import Master
from .residence import Residence

_Views = TypeVar("_Views")

# Called for every parameter in every step, hence no Python function.
gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Stretch:
    """Gradients side by side that are distributed alike, as one flat tensor; what lies between them is zero."""

    tensor: torch.Tensor
    spec: DTensorSpec


class GradShard:
    """A flat buffer in the original dtypes with one gradient face per parameter.

    The faces' local tensors lie at offsets of one storage that can be emptied; the DTensors around them were
    made at offset 0, where saving and copying work.
    """

    living: ClassVar[Living[GradShard]] = Living()

    def __init__(
        self,
        master: Master,
        regions: Sequence[Region],
        slots: list[Slot],
        transport: Transport,
        residence: Residence,
    ):
        segments = master.segments
        self.away = residence.away
        """Whether it is on the host, and the computation is not."""
        self.arrive: Callable[[], None] = _nothing
        """Waits for numbers that are still on their way."""
        self.stepper: weakref.ref[object] | None = None
        """Who has used the gradients already, before the optimizer's `step`."""
        # On the host memory stays: taken anew it would be new to the process, page by page.
        memory = residence.memory if residence.away else None
        self.buffer = ShardBuffer(
            regions, segments, "gradient", transport.piece_alignment, residence.device, memory=memory
        )
        self.pinned = residence.away and self.buffer.whole.is_pinned()
        """Whether copies from the device need nobody to wait."""
        self._slots: list[Slot] = []
        self.faces: list[DTensor] = []
        self.locals: list[torch.Tensor] = []
        self.begins: list[int] = []
        """The byte where each face begins; they are in the order in which they lie."""
        self._flats: dict[tuple[torch.dtype, int, tuple[int, ...]], torch.Tensor] = {}
        self._stretches: list[Stretch] | None = None
        self._gaps: list[torch.Tensor] | None = None
        self.buffer.take()
        for region, spot in zip(regions, self.buffer.placement.places, strict=True):
            run = region.runs[0]
            dtype = segments.kinds[run.segment].gradient
            for index, start in region.begins(run, transport.rank):
                offset = spot.offset + start * dtype.itemsize
                self._add_face(slots[index], dtype, offset, transport.rank)
        self.buffer.release()
        self._parameters: list[torch.Tensor] = [slot.sharded for slot in self._slots]
        self._idle_uses = self._uses()
        self._known_idle = True
        self.living.add(self)

    def _add_face(self, slot: Slot, dtype: torch.dtype, offset: int, rank: int) -> None:
        spec = spec_of(slot.sharded)
        local = torch.empty(slot.cut.local_shape(rank), dtype=dtype, device=self.buffer.device)
        face = make_dtensor(local, spec.mesh, spec.placements, slot.sharded.shape)
        if local.numel():
            moved = self.buffer.tensor(dtype, offset, local.shape)
            local.set_(moved.untyped_storage(), moved.storage_offset(), moved.shape, moved.stride())
        self._slots.append(slot)
        self.faces.append(face)
        self.locals.append(local)
        self.begins.append(offset)

    def _uses(self) -> int:
        """Grows by one for whoever holds a face, its local tensor or any view of either."""
        held = sum(map(sys.getrefcount, self.faces)) + sum(map(sys.getrefcount, self.locals))
        return held + storage_uses(self.buffer.storage)

    @property
    def attached(self) -> bool:
        """Whether a face is some parameter's `.grad`."""
        return any(map(is_, map(gradient_of, self._parameters), self.faces))  # a loop in C: asked in every step

    @property
    def idle(self) -> bool:
        """Whether it may be written or emptied without anybody seeing: a user may still hold last step's `.grad`.

        Once it is, it stays so until it is delivered: nobody can get hold of it.
        """
        if not self._known_idle:
            self._known_idle = not self.attached and self._uses() == self._idle_uses
        return self._known_idle

    def serves(self, slots: Sequence[Slot]) -> bool:
        """Whether these are gradients of some of `slots`."""
        return any(slot in slots for slot in self._slots)

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def belongs_to(self, parameters: Set[int]) -> bool:
        """Whether every face is the `.grad` of its parameter, and the ids of these are all in `parameters`."""
        for parameter, face in zip(self._parameters, self.faces, strict=True):
            if parameter.grad is not face or id(parameter) not in parameters:
                return False
        return bool(self.faces)

    def flat(self, dtype: torch.dtype, begin: int, *shape: int) -> torch.Tensor:
        """A range of it, made once, while there is memory."""
        key = dtype, begin, shape
        if key not in self._flats:
            self._flats[key] = self.viewing(lambda: self.buffer.tensor(dtype, begin, shape))
        return self._flats[key]

    def viewing(self, make: Callable[[], _Views]) -> _Views:
        """What `make` makes, which will keep views of this for as long as this lives: they are not a user's."""
        before = self._uses()
        views = make()
        self._idle_uses += self._uses() - before
        return views

    def stretches(self) -> list[Stretch]:
        if self._stretches is None:
            self._stretches = self._find_stretches()
        return self._stretches

    def gaps(self) -> list[torch.Tensor]:
        """All bytes that belong to no gradient. To be asked for while there is memory."""
        if self._gaps is None:
            self._gaps = self.viewing(self._find_gaps)
        return self._gaps

    def _find_gaps(self) -> list[torch.Tensor]:
        found, end = [], 0
        for begin, local in zip([*self.begins, self.buffer.nbytes], [*self.locals, None], strict=True):
            if begin > end:
                found.append(self.buffer.tensor(torch.uint8, end, (begin - end,)))
            end = begin + (0 if local is None else local.numel() * local.element_size())
        return found

    def _find_stretches(self) -> list[Stretch]:
        def kind(each: tuple[int, torch.Tensor, Slot]) -> tuple[torch.dtype, int, object]:
            spec = spec_of(each[2].sharded)
            return each[1].dtype, id(spec.mesh), spec.placements

        found = []
        for (dtype, _, _), run in groupby(zip(self.begins, self.locals, self._slots, strict=True), kind):
            members = list(run)
            first, _, slot = members[0]
            last, local, _ = members[-1]
            numel = (last - first) // dtype.itemsize + local.numel()
            if numel:
                found.append(Stretch(self.flat(dtype, first, numel), spec_of(slot.sharded)))
        return found

    @property
    def stepped(self) -> bool:
        """Whether an optimizer that is still there has used the gradients already."""
        return self.stepper is not None and self.stepper() is not None

    def writes(self) -> int:
        """Grows when the gradients are written through what parameters have as `.grad`, as far as torch counts that."""
        return sum(map(version_of, self.faces)) + sum(map(version_of, self.locals))

    def names(self) -> str:
        """Whose gradients these are, in few words."""
        names = [slot.name for slot in self._slots]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def deliver(self, absent: Collection[Slot] = ()) -> None:
        """Become each parameter's `.grad`, or be added to the one it has; then call the user's hooks on it.

        `absent` are parameters that had no gradient, where all of the unit is reduced all the same. `.grad` may be
        there before its numbers, until the backward ends, unless somebody looks at them.
        """
        self._known_idle = False
        parameters, faces, locals_ = self._parameters, self.faces, self.locals
        if absent:
            here = [number for number, slot in enumerate(self._slots) if slot not in absent]
            parameters, faces = [parameters[number] for number in here], [faces[number] for number in here]
            locals_ = [locals_[number] for number in here]
        before = list(map(gradient_of, parameters))
        hooks = list(map(post_accumulate_hooks, parameters))
        added = any(map(is_not, before, repeat(None)))
        if added or any(hooks) or observer.current is not None:
            self.arrive()
        if added:
            _add(parameters, before, faces, locals_)
        else:
            deque(map(setattr, parameters, repeat("grad"), faces), maxlen=0)
        if not any(map(is_, before, repeat(None))):
            self.buffer.release()  # nothing of it was handed out
        if any(hooks):
            for parameter, own in zip(parameters, hooks, strict=True):
                for hook in list((own or {}).values()):
                    hook(parameter)
        if observer.current is not None:
            observer.current.delivered(self._slots)


def _add(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor | None],
    faces: list[DTensor],
    locals_: list[torch.Tensor],
) -> None:
    """Add to the gradients there are; become those that are missing."""
    existing, new = [], []
    for parameter, grad, face, local in zip(parameters, gradients, faces, locals_, strict=True):
        if grad is None:
            parameter.grad = face
        else:
            existing.append(local_of(grad) if isinstance(grad, DTensor) else grad)
            new.append(local)
    foreach_add(existing, new)
