"""The data files of a checkpoint: writing buffers to a file, and reading tensors from files."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path

import torch

from ..errors import CheckpointError, listed
from ..state.boxes import boxes_of_range
from .manifest import BlockChecksums, FileEntry, Manifest, checksum_of, read_manifest
from .plan import StoredBox, TensorEntry, aligned
from .values import DTYPES

CHUNK_BYTES = 32 * 2**20
"""Tensors are copied to the host, and to and from the files, in pieces of about this size.

A thread that writes needs Python's lock between two pieces, which training may hold for a while.
"""

STRIP_BLOCKS = 16
"""So many blocks in a row are verified by one thread."""
VERIFYING_THREADS = 4


def host_buffers(view: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The elements of `view` in row-major order, in `dtype`, piece by piece; not copied if they are so on the host."""
    for piece in _pieces(view.detach()):
        host = piece.to("cpu", dtype).resolve_conj().resolve_neg().contiguous()
        yield host.reshape(-1).view(torch.uint8).numpy().data


def _pieces(view: torch.Tensor) -> Iterator[torch.Tensor]:
    """Consecutive parts of a tensor, or all of it if it is on the host as it has to be."""
    if not view.numel():
        return
    if view.is_contiguous():
        view = view.reshape(-1)
        if view.device.type == "cpu":
            yield view
            return
    if view.ndim == 0 or view.nbytes <= CHUNK_BYTES:
        yield view
        return
    rows = max(1, CHUNK_BYTES * view.shape[0] // view.nbytes)
    for first in range(0, view.shape[0], rows):
        yield view[first : first + rows]


def padding_after(nbytes: int) -> memoryview:
    return memoryview(bytes(aligned(nbytes) - nbytes))


def write_file(path: Path, buffers: Iterable[memoryview], algorithm: str, expected: int | None = None) -> FileEntry:
    """Write the buffers one after the other into a new file, and wait until they are on the disk.

    `expected`: so many bytes have to be in them. It uses neither model nor process group, so a thread may call it.
    """
    checksums, nbytes, begun = BlockChecksums(algorithm, path), 0, 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in _cut(buffers):
            checksums.update(piece)
            while piece:
                count = os.write(descriptor, piece)
                nbytes += count
                piece = piece[count:]
            if nbytes - begun >= CHUNK_BYTES:
                _begin_write_back(descriptor, begun, nbytes - begun)
                begun = nbytes
        os.fsync(descriptor)
    except OSError as error:
        raise not_written(path, error, nbytes, expected) from error
    finally:
        os.close(descriptor)
    if expected is not None and nbytes != expected:
        raise CheckpointError(f"{path} has {nbytes} bytes, expected {expected}.")
    return FileEntry(path.name, nbytes, checksums.finish())


def _cut(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        for first in range(0, len(buffer), CHUNK_BYTES):
            yield buffer[first : first + CHUNK_BYTES]


def _begin_write_back(descriptor: int, first: int, nbytes: int) -> None:
    """Let the system write these bytes to the disk while the next ones are copied; else all of them wait for fsync.

    On Linux this advice begins to write what is not on the disk yet, and waits for nothing. Two ranks that wrote 1.5 GB
    to one disk took less than half the time with it.
    """
    with contextlib.suppress(AttributeError, OSError):  # a system, or a file system, without it
        os.posix_fadvise(descriptor, first, nbytes, os.POSIX_FADV_DONTNEED)


def not_written(path: Path, error: OSError, nbytes: int, expected: int | None) -> CheckpointError:
    """What to raise for an error of the disk."""
    free = ""
    with contextlib.suppress(OSError):
        about = os.statvfs(path.parent)
        free = f" Its file system has {about.f_bavail * about.f_frsize} bytes free."
    after = f"{nbytes} bytes" if expected is None else f"{nbytes} of {expected} bytes"
    return CheckpointError(f"{path} could not be written: {error.strerror}, after {after}.{free}")


class CheckpointFiles:
    """The data files of one checkpoint, opened when they are needed. Use it as a context."""

    def __init__(self, folder: Path, manifest: Manifest):
        self._folder, self.manifest = folder, manifest
        self._descriptors: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *unused: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        # Not closed: tensors may still view them. They are unmapped with the last of these.
        self._maps.clear()
        self._descriptors.clear()

    def unmap(self) -> None:
        """Give back the memory of the files that were read; they are mapped again when they are needed."""
        self._maps.clear()

    def _open(self, file: int) -> int:
        if file not in self._descriptors:
            entry = self.manifest.files[file]
            path = self._folder / entry.name
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                names = self.manifest.tensors_at(file, 0, entry.nbytes)
                raise CheckpointError(
                    f"{path} cannot be opened ({error.strerror}). It holds {listed(names)}."
                ) from error
            self._descriptors[file] = descriptor
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_size != entry.nbytes:
                names = self.manifest.tensors_at(file, min(about.st_size, entry.nbytes), entry.nbytes)
                lost = f" It lacks bytes of {listed(names)}." if names else ""
                raise CheckpointError(f"{path} has {about.st_size} bytes, expected {entry.nbytes}.{lost}")
        return self._descriptors[file]

    def verify(self, file: int, blocks: Iterable[int]) -> None:
        """Compare the checksums of these blocks of a file, in several threads; raises for the first that differs."""
        self._open(file)
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
        buffer = memoryview(bytearray(min(size, entry.nbytes)))  # one for all blocks: the processor's cache keeps it
        for block in blocks:
            part = buffer[: min(size, entry.nbytes - block * size)]
            data = _read(self._descriptors[file], block * size, part)
            found = checksum_of(data, self.manifest.algorithm, self._folder / entry.name)
            if found != entry.blocks[block]:
                names = self.manifest.tensors_at(file, block * size, (block + 1) * size)
                raise CheckpointError(
                    f"{self._folder / entry.name} is damaged: block {block} (bytes {block * size} to "
                    f"{block * size + len(data)}) has the checksum {found}, expected {entry.blocks[block]}. It holds "
                    f"{listed(names)}. Load an older checkpoint."
                )

    def blocks_of(self, entry: TensorEntry, stored: StoredBox, first: int, last: int) -> range:
        """The blocks that have the elements `first` to `last` of a box."""
        size = self.manifest.block_bytes
        begin, end = stored.offset + first * entry.itemsize, stored.offset + last * entry.itemsize
        return range(begin // size, -(-end // size))

    def tensor(self, entry: TensorEntry, stored: StoredBox) -> torch.Tensor:
        """A box as a tensor on the file itself: only what is read of it is read from the disk."""
        descriptor = self._open(stored.file)
        if stored.file not in self._maps:
            # Writable for torch, which warns of other buffers; what is written stays in this process.
            self._maps[stored.file] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        dtype, numel = DTYPES[entry.dtype], stored.box.numel
        flat = torch.frombuffer(
            self._maps[stored.file], dtype=torch.uint8, count=numel * dtype.itemsize, offset=stored.offset
        )
        return flat.view(dtype).view(stored.box.size)


def _read(descriptor: int, offset: int, buffer: memoryview) -> memoryview:
    """Fill the buffer; returns less of it at the end of the file."""
    found = 0
    while found < len(buffer):
        count = os.preadv(descriptor, [buffer[found:]], offset + found)
        if not count:
            break
        found += count
    return buffer[:found]


def copy_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target` <- `source`, some rows at a time: a copy of strided elements to a device takes as much host memory."""
    if target.ndim == 0 or target.nbytes <= CHUNK_BYTES:
        target.copy_(source)
        return
    rows = max(1, CHUNK_BYTES * target.shape[0] // target.nbytes)
    for first in range(0, target.shape[0], rows):
        target[first : first + rows].copy_(source[first : first + rows])


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
