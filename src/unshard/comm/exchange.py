"""Reduce-scatters made of an exchange: each rank receives its pieces of the others and adds them up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch


class _Exchange:
    """An exchange of pieces in flight. The first wait adds them up."""

    _work: Any

    def wait(self, timeout: timedelta | None = None) -> None:
        if self._work is None:
            return
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)
        self._work = None
        self._add_up()

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def _add_up(self) -> None:
        raise NotImplementedError


class ReduceOfCopy(_Exchange):
    """A reduce-scatter of a copy, which lives until the wait."""

    def __init__(self, work: Any, copy: torch.Tensor):
        self._work, self._copy = work, copy

    def _add_up(self) -> None:
        del self._copy


class AllToAllReduce(_Exchange):
    """An exchange between all ranks. The pieces are added up in the order of the ranks."""

    def __init__(self, work: Any, received: torch.Tensor, output: torch.Tensor, average: bool):
        """`received`: a row per rank."""
        self._work = work
        self._received, self._output, self._average = received, output, average

    def _add_up(self) -> None:
        # Both are padded to the same number of bytes, so narrow rows may be longer.
        add_up(self._received[:, : self._output.numel()], self._output, self._average)
        del self._received


class PairwiseReduce(_Exchange):
    """An exchange with the only other rank. The received piece and this rank's own are added.

    `received` may be `output` itself.
    """

    def __init__(self, work: Any, own: torch.Tensor, received: torch.Tensor, output: torch.Tensor, average: bool):
        self._work = work
        self._own, self._received, self._output, self._average = own, received, output, average

    def _add_up(self) -> None:
        output, numel = self._output, self._output.numel()
        if self._received is not output:
            output.copy_(self._received[:numel])
        output.add_(self._own if self._own.numel() == numel else self._own[:numel])
        if self._average:
            output.div_(2)
        del self._own, self._received


def add_up(rows: torch.Tensor, output: torch.Tensor, average: bool) -> None:
    """`output` <- the sum or mean of `rows`. Narrow dtypes are added up in float32 and rounded once."""
    if rows.dtype != output.dtype or rows.dtype.itemsize < 4:
        (torch.mean if average else torch.sum)(rows, 0, dtype=output.dtype, out=output)
        return
    # Twice as fast as a reduction over so few rows, on a CPU.
    first, second, *others = rows.unbind()
    torch.add(first, second, out=output)
    for row in others:
        output.add_(row)
    if average:
        output.div_(rows.shape[0])
