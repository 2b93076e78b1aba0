"""Allocates reusable host memory for background saves and copies tensors to it."""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable
from math import prod

import torch

from ..errors import ArgumentError
from .stored_boxes import ALIGNMENT, aligned

_log = logging.getLogger("unshard")


class HostBuffer:
    """Host memory that is accessible as a tensor for copies and as a memoryview for file writes."""

    def __init__(self, nbytes: int):
        self.nbytes, self.pinned, self._pin_failed = nbytes, False, False
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages make the first touch cheaper, because there are 500 times fewer page faults.
        # Without DONTFORK, every write would copy a page as long as a forked DataLoader worker lives.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(AttributeError, OSError):  # not supported by the system
                memory.madvise(getattr(mmap, advice))
        self.view = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def touch(self) -> None:
        """Make the system allocate the buffer's pages now instead of during the first copy to the buffer."""
        if not self.pinned:
            self.tensor.zero_()

    def pin(self) -> None:
        if self.pinned or self._pin_failed:
            return
        address, cudart = self.tensor.data_ptr(), torch.cuda.cudart()
        # Pin the memory in place, because torch's pinned allocator would round its size up to a power of two.
        if error := int(cudart.cudaHostRegister(address, self.nbytes, 0)):
            self._pin_failed = True
            _log.warning(
                "%d bytes of host memory for checkpoints could not be pinned (CUDA error %d), so copies are slower. "
                "Raise the limit of locked memory (ulimit -l), or pass a smaller host_bytes.",
                *(self.nbytes, error),
            )
            return
        self.pinned = True
        # Do not unregister at exit: CUDA may be gone by then.
        weakref.finalize(self, cudart.cudaHostUnregister, address).atexit = False


class HostBuffers:
    """The host buffers of one `Saver`.

    By default, one buffer holds this rank's whole file. If the file is larger than `host_bytes`, there are two buffers
    with half of `host_bytes` each. A save fills one buffer while it writes the other to the file.
    """

    def __init__(self, host_bytes: int | None):
        if host_bytes is not None and (type(host_bytes) is not int or host_bytes < 2 * ALIGNMENT):
            raise ArgumentError(
                f"host_bytes must be None or an integer of at least {2 * ALIGNMENT}, got {host_bytes!r}."
            )
        self._host_bytes = host_bytes
        self.buffers: list[HostBuffer] = []
        self._preparing: threading.Thread | None = None

    def reserve(self, nbytes: int, pinned: bool) -> list[HostBuffer]:
        """Return buffers for a file of `nbytes`, and reuse the existing buffers if they are large enough."""
        self._make(nbytes)
        if pinned:
            for each in self.buffers:
                each.pin()
        return self.buffers

    def prepare(self, nbytes: int, pinned: bool) -> None:
        """Allocate buffers for a file of `nbytes`, and start a thread that pins them (if `pinned`) and touches them."""
        self._make(nbytes)
        device = torch.cuda.current_device() if pinned else None
        # Not a daemon, because at exit Python must wait for the thread before it frees the memory.
        self._preparing = threading.Thread(
            target=_prepare, args=(list(self.buffers), device), name="unshard prepare", daemon=False
        )
        self._preparing.start()

    def wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _make(self, nbytes: int) -> None:
        self.wait()
        sizes = [nbytes] if nbytes else []
        if self._host_bytes is not None and nbytes > self._host_bytes:
            sizes = [self._host_bytes // 2 // ALIGNMENT * ALIGNMENT] * 2
        have = [each.nbytes for each in self.buffers]
        if len(have) < len(sizes) or any(a < b for a, b in zip(have, sizes, strict=False)):
            self.buffers.clear()  # free them first, because old and new buffers together exceed `host_bytes`
            self.buffers = [HostBuffer(size) for size in sizes]


def _prepare(buffers: list[HostBuffer], device: int | None) -> None:
    for each in buffers:
        if device is not None:
            with torch.cuda.device(device):  # a new thread starts on device 0, and pinning would allocate there
                each.pin()
        each.touch()


class Staging:
    """Copies tensors into a sequence of buffers, which together contain the bytes of this rank's file in order.

    `next_buffer` returns an empty buffer. `hand_over` receives a filled buffer and the number of bytes in it.
    """

    def __init__(self, next_buffer: Callable[[], HostBuffer], hand_over: Callable[[tuple[HostBuffer, int]], None]):
        self._next_buffer, self._hand_over = next_buffer, hand_over
        self._buffer: HostBuffer | None = None
        self._used = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @torch.no_grad()
    def copy(self, views: Iterable[tuple[torch.Tensor, torch.dtype]]) -> None:
        """Copy all views to buffers, cast to the given dtypes. Afterwards, training may change the tensors."""
        for view, dtype in views:
            self._put(view.detach(), dtype)
            nbytes = view.numel() * dtype.itemsize
            if padding := aligned(nbytes) - nbytes:
                assert self._buffer is not None  # padding fits, because buffer sizes are multiples of the alignment
                self._buffer.tensor[self._used : self._used + padding].zero_()
                self._used += padding
        self._finish_buffer()

    def _room(self) -> int:
        """Return the number of free bytes in the current buffer, after replacing the buffer if it is full."""
        if self._buffer is not None and self._used == self._buffer.nbytes:
            self._finish_buffer()
        if self._buffer is None:
            self._buffer, self._used = self._next_buffer(), 0
        return self._buffer.nbytes - self._used

    def _finish_buffer(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        if self._buffer is not None:
            full, self._buffer = self._buffer, None
            self._hand_over((full, self._used))

    def _put(self, view: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy `view` in row-major order, and continue in the next buffer whenever the current one is full."""
        if not view.numel():
            return
        if view.numel() * dtype.itemsize <= self._room():
            self._copy(view, dtype)
            return
        if view.is_contiguous():
            view = view.reshape(-1)
        width = prod(view.shape[1:]) * dtype.itemsize
        first = 0
        while first < view.shape[0]:
            rows = self._room() // width
            if rows:
                self._copy(view[first : first + rows], dtype)
            else:
                self._put(view[first], dtype)
            first += max(rows, 1)

    def _copy(self, view: torch.Tensor, dtype: torch.dtype) -> None:
        assert self._buffer is not None
        end = self._used + view.numel() * dtype.itemsize
        target = self._buffer.tensor[self._used : end].view(dtype).view(view.shape)
        self._used = end
        if not view.is_cuda:
            target.copy_(view)
            return
        if view.device not in self._streams:  # a side stream that waits for the work queued on the compute stream
            self._streams[view.device] = torch.cuda.Stream(view.device)
            self._streams[view.device].wait_stream(torch.cuda.current_stream(view.device))
        with torch.cuda.stream(self._streams[view.device]):
            target.copy_(view, non_blocking=True)
