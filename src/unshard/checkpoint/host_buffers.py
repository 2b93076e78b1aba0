"""Host memory for background saves, allocated once and reused, and the copies of tensors into it."""

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
from .plan import ALIGNMENT, aligned

_log = logging.getLogger("unshard")


class HostBuffer:
    """`nbytes` bytes, as a tensor to copy to and as a memoryview to write to a file."""

    def __init__(self, nbytes: int):
        self.nbytes, self.pinned, self._pin_failed = nbytes, False, False
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages: the first copy to each page is slower, and there are 500 times fewer of them.
        # Not in forked processes: each write to a page would copy it while such a process (of a DataLoader) lives.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            _advise(memory, advice)
        self.view = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def touch(self) -> None:
        """Let the system give the memory now, not at the first copy to it."""
        if not self.pinned:
            self.tensor.zero_()

    def pin(self) -> None:
        """Torch's own pinned memory has a power of two of bytes, up to twice of what was asked for."""
        if self.pinned or self._pin_failed:
            return
        address = self.tensor.data_ptr()
        result = torch.cuda.cudart().cudaHostRegister(address, self.nbytes, 0)
        if int(result):
            self._pin_failed = True
            _log.warning(
                "%d bytes of host memory for checkpoints could not be pinned (CUDA error %d); copies to them are "
                "slower. Raise the limit of locked memory (ulimit -l), or pass a smaller host_bytes.",
                *(self.nbytes, int(result)),
            )
            return
        self.pinned = True
        # Not at the end of the program, where CUDA may have ended already.
        weakref.finalize(self, _unpin, address).atexit = False


def _advise(memory: mmap.mmap, advice: str) -> None:
    with contextlib.suppress(AttributeError, OSError):  # a system without it
        memory.madvise(getattr(mmap, advice))


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class HostBuffers:
    """The buffers of one saver.

    One of all bytes, or two of half the bound each: while one is written, the next bytes are copied to the other.
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
        """Buffers for a file of so many bytes: those that exist, if they are large enough."""
        self.wait()
        self._make(nbytes)
        if pinned:
            for each in self.buffers:
                each.pin()
        return self.buffers

    def prepare(self, nbytes: int, pinned: bool) -> None:
        """As `reserve`; a thread lets the system give the memory, which takes longer than to copy to it."""
        self.wait()
        self._make(nbytes)
        device = torch.cuda.current_device() if pinned else None
        # Not a daemon: Python waits for it at the end of the program, before it takes the memory away.
        self._preparing = threading.Thread(
            target=_prepare, args=(list(self.buffers), device), name="unshard prepare", daemon=False
        )
        self._preparing.start()

    def wait(self) -> None:
        """Until what `prepare` has begun is finished."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _make(self, nbytes: int) -> None:
        sizes = self._sizes(nbytes)
        have = [each.nbytes for each in self.buffers]
        if len(have) < len(sizes) or any(a < b for a, b in zip(have, sizes, strict=False)):
            self.buffers.clear()  # before the new ones are made: both together would be over the bound
            self.buffers = [HostBuffer(size) for size in sizes]

    def _sizes(self, nbytes: int) -> list[int]:
        if not nbytes:
            return []
        if self._host_bytes is None or nbytes <= self._host_bytes:
            return [nbytes]
        return [self._host_bytes // 2 // ALIGNMENT * ALIGNMENT] * 2


def _prepare(buffers: list[HostBuffer], device: int | None) -> None:
    for each in buffers:
        if device is not None:
            with torch.cuda.device(device):  # a new thread has device 0, and pinning would use its memory
                each.pin()
        each.touch()


class Staging:
    """Fills one buffer after the other with the bytes of a file.

    `next_buffer` gives an empty buffer, `hand_over` takes a full one and the number of bytes in it. Sizes of buffers
    are multiples of the alignment of boxes, so a padding never begins a buffer.
    """

    def __init__(self, next_buffer: Callable[[], HostBuffer], hand_over: Callable[[HostBuffer, int], None]):
        self._next_buffer, self._hand_over = next_buffer, hand_over
        self._buffer: HostBuffer | None = None
        self._used = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @torch.no_grad()
    def copy(self, views: Iterable[tuple[torch.Tensor, torch.dtype]]) -> None:
        """Returns when everything is copied: the tensors may change then."""
        for view, dtype in views:
            self._put(view.detach(), dtype)
            end = view.numel() * dtype.itemsize
            self._put_zeros(aligned(end) - end)
        self._finish_buffer()

    def _room(self) -> int:
        """Bytes that the current buffer has left; a full one is handed over."""
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
            self._hand_over(full, self._used)

    def _put(self, view: torch.Tensor, dtype: torch.dtype) -> None:
        """The elements in row-major order; in parts, if there is no room for all of them."""
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
        if view.is_cuda:
            with torch.cuda.stream(self._stream(view.device)):
                target.copy_(view, non_blocking=True)
        else:
            target.copy_(view)

    def _put_zeros(self, count: int) -> None:
        if count:
            assert self._buffer is not None
            self._buffer.tensor[self._used : self._used + count].zero_()
            self._used += count

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """A side stream that begins after the work that the compute stream has been given."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]
