"""Faces of a unit that is laid end to end: the unit as one parameter, and the original ones as pieces of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn

from ..comm.interface import Transport
from ..layout.rows import Region
from .faces import Faces, Home, Slot
from .grad_shard import GradShard
from .living import Living
from .master import Master
from .residence import Residence


@dataclass(eq=False)
class FlatFace:
    """The unit as one parameter of one dimension.

    Registered on a module in place of the original ones (`homes`), or nowhere, where those are what users see. While
    the unit computes it shows the full buffer.
    """

    homes: list[Home]
    sharded: nn.Parameter
    local: torch.Tensor
    length: int
    """Elements of the whole unit, without padding at the end."""
    name: str = "_flat_param"
    whole: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    """The full buffer, once it was gathered, without and with padding at the end."""
    _of: Any = None
    shows_whole: bool = False

    def show_whole(self, anchor: torch.Tensor) -> None:
        """`anchor` is any parameter's place in the full buffer, which has memory now."""
        if self._of is not anchor:
            storage, empty = anchor.untyped_storage(), torch.empty(0, dtype=anchor.dtype, device=anchor.device)
            self.padded = empty.set_(storage, 0, (storage.nbytes() // anchor.dtype.itemsize,), (1,))
            self.whole = torch.empty_like(empty[:0]).set_(storage, 0, (self.length,), (1,))
            self._of = anchor
        assert self.whole is not None
        self.sharded.data = self.whole
        self.shows_whole = True

    def show_local(self) -> None:
        if self.shows_whole:
            self.sharded.data = self.local
            self.shows_whole = False


class FlatFaces(Faces):
    """Shows the unit's one parameter whole and cut, besides swapping those of the modules."""

    def __init__(self, slots: Iterable[Slot], flat: FlatFace):
        super().__init__(slots)
        self._flat = flat
        self._anchored = next((slot for slot in self._slots if slot.cut.numel), None)

    def show_full(self) -> None:
        super().show_full()
        if self._anchored is not None and self._anchored.anchor is not None:
            self._flat.show_whole(self._anchored.anchor)

    def show_sharded(self) -> None:
        super().show_sharded()
        self._flat.show_local()


class VeiledFaces(FlatFaces):
    """The modules' own parameters are nowhere to be seen at rest: in their places lie veils."""

    def __init__(self, slots: Iterable[Slot], flat: FlatFace, veils: dict[Slot, torch.Tensor]):
        super().__init__(slots, flat)
        self._veils = veils

    def show_sharded(self) -> None:
        for parameters, name, slot in self._plain:
            parameters[name] = self._veils[slot]
        if self._special:
            self._chunks.empty()
            for home, slot in self._special:
                home.put(self._veils[slot])  # type: ignore[arg-type]
        self._flat.show_local()


def veil_for(slot: Slot, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Shape, dtype and device of a parameter that is elsewhere; whoever reads its numbers sees that there are none.

    The emptied full face would do, but reading it ends the process.
    """
    nothing = torch.zeros((), dtype=dtype, device=device)
    return (nothing.fill_(torch.nan) if dtype.is_floating_point else nothing).expand(slot.cut.shape)


class FlatGradShard(GradShard):
    """Gradients as plain tensors: one of the whole piece, or a row of elements for each parameter that has any here."""

    living: ClassVar[Living[GradShard]] = Living()

    def __init__(
        self,
        master: Master,
        regions: Sequence[Region],
        slots: list[Slot],
        transport: Transport,
        residence: Residence,
        flat: FlatFace | None,
    ):
        self._one = flat
        super().__init__(master, regions, slots, transport, residence)

    def _add_face(self, slot: Slot, dtype: torch.dtype, offset: int, rank: int) -> None:
        shape = slot.cut.local_shape(rank)
        if self._one is None:
            if prod(shape):
                self._put(slot, self.buffer.tensor(dtype, offset, shape, slot.cut.local_stride), offset)
        elif not self.faces:
            self._put(self._one, self.buffer.tensor(dtype, 0, self._one.local.shape), 0)

    def _put(self, holder: Any, face: torch.Tensor, offset: int) -> None:
        self._slots.append(holder)
        self.faces.append(face)  # type: ignore[arg-type]
        self.locals.append(face)
        self.begins.append(offset)
