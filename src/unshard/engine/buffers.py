"""One storage, typed tensors over it that are made once, and memory that comes and goes underneath them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..layout.rows import Placement, Region
from ..torch_private import contiguous_stride
from .precision import Segments


class Buffer:
    """A storage that can be emptied and refilled while the tensors over it stay the same objects.

    Autograd keeps the tensors between forward and backward; with an empty storage they cost nothing.
    """

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes = nbytes
        self.device = device
        self.storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        self._held = True

    def take(self) -> None:
        """Have memory, with undefined contents if there was none."""
        if not self._held:
            self.storage.resize_(self.nbytes)
            self._held = True

    def release(self) -> None:
        """Give the memory back. Only when no collective on it is under way."""
        if self._held:
            self.storage.resize_(0)
            self._held = False

    @property
    def held(self) -> bool:
        return self._held

    def tensor(self, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> torch.Tensor:
        """A contiguous tensor at a byte offset; to be called while memory is held.

        Made with `set_`, not by slicing, so that it has a version counter of its own: a gather into the buffer
        must not look to autograd like a change of the parameters it saved.
        """
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(self.storage, offset // dtype.itemsize, tuple(shape), contiguous_stride(shape))


def pieces(
    buffer: Buffer, placement: Placement, regions: Sequence[Region], segments: Segments, role: str
) -> list[torch.Tensor]:
    """One flat tensor per region of one segment: what a collective carries."""
    tensors = []
    for region, place in zip(regions, placement.places, strict=True):
        dtype = getattr(segments.kinds[region.runs[0].segment], role)
        tensors.append(buffer.tensor(dtype, place.offset, (place.piece * place.copies // dtype.itemsize,)))
    return tensors


def bodies(tensors: Sequence[torch.Tensor], regions: Sequence[Region]) -> list[torch.Tensor]:
    """The pieces of regions of one dtype without the padding at their end; while memory is held."""
    return [piece[: region.runs[0].numel] for piece, region in zip(tensors, regions, strict=True)]
