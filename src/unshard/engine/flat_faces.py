"""Faces of a unit that is laid end to end: the unit as one parameter, and the original ones as pieces of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import nn

from ..comm.interface import Transport
from ..errors import StateError
from ..layout.rows import Region
from .faces import Faces, Home, Slot
from .grad_shard import GradShard
from .living import Living
from .master import Master
from .residence import Residence
from .tree import tensors_in


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
        self._veiled: list[Any] = [veils[slot] for slot in self._plain]

    def show_sharded(self) -> None:
        self._put(self._veiled)
        if self._special:
            self._chunks.empty()
            for home, slot in self._special:
                home.put(self._veils[slot])  # type: ignore[arg-type]
        self._flat.show_local()


class Veil(torch.Tensor):
    """Shape, dtype and device of a parameter that is elsewhere. Whoever computes with it is told what to do.

    The emptied full face would do, but reading it ends the process. Where no function of torch is called, its numbers
    are NaN.
    """

    _slot: weakref.ref[Slot]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        veil = next((each for each in tensors_in((args, kwargs)) if isinstance(each, Veil)), None)
        if getattr(func, "__name__", "") not in _LOOKS:
            slot = None if veil is None else veil._slot()
            name = "" if slot is None else f" {slot.name!r}"
            raise StateError(
                f"Parameter{name} is sharded, and whole only while its wrapped module computes. Call the module that "
                "FullyShardedDataParallel returned, model(x) instead of model.module(x), or whatever uses it inside "
                "FullyShardedDataParallel.summon_full_params(model)."
            )
        result = super().__torch_function__(func, types, args, kwargs or {})
        if veil is not None and isinstance(result, Veil):
            result._slot = veil._slot
        return result

    def data_ptr(self) -> int:
        """Nowhere. Recurrent layers move weights with addresses into one chunk."""
        return 0

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Veil(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


# What may be asked of a veil; properties are got by `__get__`.
_LOOKS = {
    *("__get__", "__set__", "__delete__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "stride"),
    *("storage_offset", "element_size", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_pinned"),
    *("is_shared", "is_inference", "get_device", "untyped_storage", "detach", "requires_grad_"),
}


def _veiled(nothing: torch.Tensor, slot: weakref.ref[Slot]) -> Veil:
    veil = nothing.as_subclass(Veil)
    veil._slot = slot
    return veil


def veil_for(slot: Slot, dtype: torch.dtype, device: torch.device) -> Veil:
    nothing = torch.zeros((), dtype=dtype, device=device)
    numbers = (nothing.fill_(torch.nan) if dtype.is_floating_point else nothing).expand(slot.cut.shape)
    return _veiled(numbers, weakref.ref(slot))  # the slot knows where it is registered, so it must not be held here


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
