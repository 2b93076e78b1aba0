"""Pieces of gradients that travel in a narrow dtype and are added up in a wide one where they arrive."""

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
        add = torch.mean if self._average else torch.sum
        # Both are padded to the same number of bytes, so narrow rows may be longer.
        add(self._arrived[:, : self._output.numel()], 0, dtype=self._output.dtype, out=self._output)
        del self._arrived
