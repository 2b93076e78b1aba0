"""Pieces of gradients that are exchanged between the ranks and added up where they arrive."""

from __future__ import annotations

import torch

from .interface import Work


class Arrival:
    """An exchange of pieces under way. Waiting for it adds them up, in the order of the ranks."""

    def __init__(self, work: Work, arrived: torch.Tensor, output: torch.Tensor, average: bool):
        """`arrived`: a row per rank."""
        self._work: Work | None = work
        self._arrived, self._output, self._average = arrived, output, average

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        # Both are padded to the same number of bytes, so narrow rows may be longer.
        add_up(self._arrived[:, : self._output.numel()], self._output, self._average)
        del self._arrived


class Addition:
    """An exchange with the only other rank under way. Waiting for it adds what has arrived and this rank's own.

    `arrived` may be `output` itself.
    """

    def __init__(self, work: Work, own: torch.Tensor, arrived: torch.Tensor, output: torch.Tensor, average: bool):
        self._work: Work | None = work
        self._own, self._arrived, self._output, self._average = own, arrived, output, average

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        output, numel = self._output, self._output.numel()
        if self._arrived is not output:
            output.copy_(self._arrived[:numel])
        output.add_(self._own if self._own.numel() == numel else self._own[:numel])
        if self._average:
            output.div_(2)
        del self._own, self._arrived


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
