"""Writes the data files of a checkpoint, and reads tensors from them."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointError, listed
from ..state.boxes import Box, boxes_of_range
from . import storage
from .manifest import BlockChecksums, FileEntry, TensorEntry, checksum_of, read_manifest
from .stored_boxes import StoredBox
from .values import DTYPES

CHUNK_BYTES = 32 * 2**20
"""Approximate size of the pieces in which tensors are copied to the host, and to and from files.

With smaller pieces, the background thread of a save would wait more often for the GIL, which training may hold.
"""

PIECE_ELEMENTS = 2**20
"""Maximum number of elements in each tensor that `CheckpointFiles.pieces` yields."""
STRIP_BLOCKS = 16
"""Maximum number of blocks that a verification thread takes at a time."""
VERIFYING_THREADS = 4
_REMEDY = "Restore the file, or load an older checkpoint."


def _rows(tensor: torch.Tensor) -> Iterator[Any]:
    if tensor.ndim == 0 or tensor.nbytes <= CHUNK_BYTES:
        yield ...
        return
    count = max(1, CHUNK_BYTES * tensor.shape[0] // tensor.nbytes)
    yield from (slice(first, first + count) for first in range(0, tensor.shape[0], count))


def copy_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target` in groups of rows, which limits the temporary host memory.

    PyTorch makes a contiguous host copy of strided rows before it copies the rows to a device.
    """
    for rows in _rows(target):
        target[rows].copy_(source[rows])


def host_pieces(view: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Cast `view` to `dtype` and yield its bytes in pieces, in row-major order. Memory is copied only if necessary."""
    view, contiguous = view.detach(), view.is_contiguous()
    view = view.reshape(-1) if contiguous else view
    for rows in [...] if contiguous and view.device.type == "cpu" else _rows(view):
        host = view[rows].to("cpu", dtype).resolve_conj().resolve_neg().contiguous()
        yield host.reshape(-1).view(torch.uint8).numpy().data


def write_file(path: Path, buffers: Iterable[memoryview], algorithm: str, expected: int | None = None) -> FileEntry:
    """Write the buffers to a new file, wait until the file is on the disk, and return its manifest entry.

    `expected` is the required file size in bytes. Any thread may call this function, because it uses no model or
    process group.
    """
    checksums = BlockChecksums(algorithm, path)

    def pieces() -> Iterator[memoryview]:
        for buffer in buffers:
            for first in range(0, len(buffer), CHUNK_BYTES):
                piece = buffer[first : first + CHUNK_BYTES]
                checksums.update(piece)
                yield piece

    nbytes = storage.write(path, pieces(), expected)
    if expected is not None and nbytes != expected:
        raise CheckpointError(f"{path} has {nbytes} bytes, expected {expected}.")
    return FileEntry(path.name, nbytes, checksums.hexdigests())


class CheckpointFiles:
    """Context manager that reads the manifest of a checkpoint, and opens its data files on first use."""

    def __init__(self, folder: Path):
        self.folder, self.manifest = folder, read_manifest(folder)
        self._files: dict[int, BinaryIO] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._verified: set[tuple[int, int]] = set()
        """(file, block) numbers that `pieces` has verified. A block with several tensors is verified only once."""

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *unused: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        # Do not close the maps, because tensors may still view them. The last of these tensors unmaps the file.
        self._maps.clear()

    def _open(self, number: int) -> BinaryIO:
        if number in self._files:
            return self._files[number]
        entry = self.manifest.files[number]
        path = self.folder / entry.name
        try:
            file = storage.open_file(path)
        except OSError as error:
            names = self.manifest.tensors_at(number, 0, entry.nbytes)
            text = f"{path} cannot be opened ({error.strerror}). It holds {listed(names)}."
            raise CheckpointError(f"{text} {_REMEDY}") from error
        self._files[number] = file
        nbytes = storage.size_of(file) or 0
        if nbytes != entry.nbytes:
            names = self.manifest.tensors_at(number, min(nbytes, entry.nbytes), entry.nbytes)
            lost = f" Bytes of {listed(names)} are missing." if names else ""
            raise CheckpointError(f"{path} has {nbytes} bytes, expected {entry.nbytes}.{lost} {_REMEDY}")
        return file

    def verify(self, file: int, blocks: Iterable[int]) -> None:
        """Verify the checksums of some blocks of a file on several threads, and raise for the first damaged block."""
        self._open(file)  # open the file before several threads need it
        ordered = sorted(blocks)
        strips = [ordered[first : first + STRIP_BLOCKS] for first in range(0, len(ordered), STRIP_BLOCKS)]
        if len(strips) <= 1:
            for strip in strips:
                self._verify_strip(file, strip)
            return
        with ThreadPoolExecutor(min(VERIFYING_THREADS, len(strips)), "unshard checkpoint") as threads:
            try:
                for _ in threads.map(partial(self._verify_strip, file), strips):
                    pass
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def _verify_strip(self, file: int, blocks: Sequence[int]) -> None:
        entry, size = self.manifest.files[file], self.manifest.block_bytes
        buffer = memoryview(bytearray(min(size, entry.nbytes)))  # reused, so it stays in the CPU cache
        for block in blocks:
            part = buffer[: min(size, entry.nbytes - block * size)]
            data = storage.read_at(self._files[file], block * size, part)
            found = checksum_of(data, self.manifest.algorithm, self.folder / entry.name)
            if found != entry.blocks[block]:
                names = self.manifest.tensors_at(file, block * size, (block + 1) * size)
                raise CheckpointError(
                    f"{self.folder / entry.name} is damaged: block {block} (bytes {block * size} to "
                    f"{block * size + len(data)}) has the checksum {found}, expected {entry.blocks[block]}. It holds "
                    f"{listed(names)}. {_REMEDY}"
                )

    def blocks_of(self, entry: TensorEntry, box: Box) -> Iterator[tuple[int, range]]:
        """Yield (file number, range of block numbers) for each stored box that overlaps `box`."""
        size = self.manifest.block_bytes
        for stored, common in entry.boxes.overlapping(box):
            begin, end = (stored.offset + at * entry.itemsize for at in common.elements_in(stored.box))
            yield stored.file, range(begin // size, -(-end // size))

    def copy(self, entry: TensorEntry, box: Box, target: torch.Tensor) -> None:
        """Copy a box of a stored tensor to `target` without verifying checksums."""
        for stored, common in entry.boxes.overlapping(box):
            source = self._tensor(entry, stored)
            copy_pieces(target[common.slices_in(box)], source[common.slices_in(stored.box)])

    def _tensor(self, entry: TensorEntry, stored: StoredBox) -> torch.Tensor:
        """Return a stored box as a view of the mapped file. The system reads each page on first access."""
        file = self._open(stored.file)
        if stored.file not in self._maps:
            self._maps[stored.file] = storage.map_file(file)
        dtype, numel = DTYPES[entry.dtype], stored.box.numel
        flat = torch.frombuffer(
            self._maps[stored.file], dtype=torch.uint8, count=numel * dtype.itemsize, offset=stored.offset
        )
        return flat.view(dtype).view(stored.box.size)

    def pieces(self, entry: TensorEntry) -> Iterator[torch.Tensor]:
        """Verify a tensor and yield it in row-major order, as 1-D tensors of at most PIECE_ELEMENTS elements."""
        numel = prod(entry.shape)
        for first in range(0, numel, PIECE_ELEMENTS):
            piece = torch.empty(min(PIECE_ELEMENTS, numel - first), dtype=DTYPES[entry.dtype])
            for start, box in boxes_of_range(entry.shape, first, piece.numel()):
                for file, blocks in self.blocks_of(entry, box):
                    new = {(file, block) for block in blocks} - self._verified
                    self.verify(file, [block for _, block in new])
                    self._verified |= new
                self.copy(entry, box, piece[start : start + box.numel].view(box.size))
            yield piece
            # Unmap the files. Otherwise, all pages that were read would stay in this process's memory.
            self._maps.clear()
