"""Copies of a rank's tensors into host buffers, in the order and at the places that they have in its file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import torch

from .files import aligned
from .host_buffers import HostBuffer


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
