"""The master shard: this rank's piece of the unit in the original dtypes, one flat storage that stays."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import prod

import torch

from ..comm.interface import Transport
from ..layout.flat import FlatCut
from ..layout.rows import ROWS, Cut, Layout
from ..torch_private import contiguous_stride
from .precision import Segments
from .residence import Residence
from .shard import Shard

META = torch.device("meta")


class Master(Shard):
    """Storage, and each parameter's local tensor.

    Local tensors lie on storage slices at offset 0: a DTensor over a tensor with a storage offset can be neither
    saved nor deep-copied, and a slice saves only the parameter's own bytes. On meta there is no storage.
    """

    def __init__(
        self,
        cuts: Sequence[Cut | FlatCut],
        segments: Segments,
        transport: Transport,
        members: Sequence[int],
        device: torch.device,
        residence: Residence,
        layout: Layout = ROWS,
    ):
        """`device`: where the residence is, or meta."""
        super().__init__(cuts, segments, transport, members, layout)
        self.device = device
        # Zeros: padding is read by flat optimizers and must never hold anything else. Memory that stays, not a
        # Buffer: slices of an emptied storage would dangle.
        if device == META:
            self._flat = torch.empty(0, dtype=torch.uint8, device=META)
        else:
            self._flat = residence.memory(self.placement.nbytes)
        self.locals = self._make_locals()

    @property
    def storage(self) -> torch.UntypedStorage:
        return self._flat.untyped_storage()

    def stored(self) -> Master:
        """This shard as one that is gathered in the dtypes it has."""
        same = copy.copy(self)
        same.segments = self.segments.stored()
        return same

    def _make_locals(self) -> list[torch.Tensor]:
        tensors = [
            torch.empty(
                cut.local_shape(self.rank) if self.device == META or not prod(cut.local_shape(self.rank)) else 0,
                dtype=self.segments.dtypes(index).original,
                device=self.device,
            )
            for index, cut in enumerate(self.cuts)
        ]
        if self.device == META:
            return tensors
        storage = self._flat.untyped_storage()
        for index, begin in self.spots():
            shape, itemsize = self.cuts[index].local_shape(self.rank), tensors[index].element_size()
            if prod(shape):
                slice_ = storage[begin : begin + prod(shape) * itemsize]
                stride = self.cuts[index].local_stride or contiguous_stride(shape)
                tensors[index].set_(slice_, 0, shape, stride)
        return tensors
