"""The tensors of a checkpoint, unsharded, a piece at a time: for what looks at a checkpoint without a model."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from ..state.boxes import boxes_of_range
from .dtypes import DTYPES
from .files import CheckpointFiles
from .manifest import TensorEntry, read_manifest

PIECE_ELEMENTS = 2**20


class StoredTensors:
    """The tensors of one checkpoint. Checksums are compared before bytes are used. Use it as a context."""

    def __init__(self, folder: Path):
        self.folder, self.manifest = folder, read_manifest(folder)
        self._files = CheckpointFiles(folder, self.manifest)
        self._verified: set[tuple[int, int]] = set()
        """Numbers of files and blocks: small tensors share blocks, and each block is verified once."""

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *unused: object) -> None:
        self._files.__exit__()

    def pieces(self, entry: TensorEntry) -> Iterator[torch.Tensor]:
        """Consecutive elements in row-major order, in one dimension, at most PIECE_ELEMENTS at a time."""
        numel = prod(entry.shape)
        for first in range(0, numel, PIECE_ELEMENTS):
            yield self._piece(entry, first, min(PIECE_ELEMENTS, numel - first))
            # Pages of files that are read stay in this process's memory as long as they are mapped.
            self._files.unmap()

    def _piece(self, entry: TensorEntry, first: int, count: int) -> torch.Tensor:
        piece = torch.empty(count, dtype=DTYPES[entry.dtype])
        for start, box in boxes_of_range(entry.shape, first, count):
            target = piece[start : start + box.numel].view(box.size)
            for stored in entry.boxes:
                common = box.intersection(stored.box)
                if common is not None:
                    blocks = self._files.blocks_of(entry, stored, *common.elements_in(stored.box))
                    self._verify(stored.file, blocks)
                    source = self._files.tensor(entry, stored)
                    target[common.slices_in(box)].copy_(source[common.slices_in(stored.box)])
        return piece

    def _verify(self, file: int, blocks: range) -> None:
        new = [block for block in blocks if (file, block) not in self._verified]
        if new:
            self._files.verify(file, new)
            self._verified.update((file, block) for block in new)
