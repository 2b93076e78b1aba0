"""A transport that compares the collectives of the ranks before it issues them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import DistError

from ..interface import Label, Transport, Work
from .check import Order
from .polling import PollingWork, with_timeout


class OrderCheckedTransport(Transport):
    """Checks the label, has another transport issue the collective, and gives up a wait when the order is broken."""

    order: Order

    def __init__(self, base: Transport, order: Order):
        self.rank, self.world, self.traits, self.pool = base.rank, base.world, base.traits, base.pool
        self._base, self.order = base, order
        self._polls = order.waits_on_host
        self._needs_thread = self._polls and base.traits.reduce_scatter_ignores_timeout

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None) -> Work:
        if label is not None:
            self.order.check(label)
        else:
            self.order.count_unlabelled()
        try:
            work = self._base.all_gather(outputs, inputs)
        except RuntimeError as error:
            self.order.raise_failed(error, label, patient=isinstance(error, DistError))
        return PollingWork(work, self.order, self._base, label) if self._polls else work

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None, *, average: bool
    ) -> Work:
        if label is not None:
            self.order.check(label)
        else:
            self.order.count_unlabelled()
        try:
            work = self._base.reduce_scatter(outputs, inputs, average=average)
        except RuntimeError as error:
            self.order.raise_failed(error, label, patient=isinstance(error, DistError))
        if self._needs_thread:
            work = with_timeout(work, self.order.wait_thread)
        return PollingWork(work, self.order, self._base, label) if self._polls else work

    def all_reduce(self, tensors: list[torch.Tensor], label: Label | None = None, *, average: bool) -> Work:
        if label is not None:
            self.order.check(label)
        else:
            self.order.count_unlabelled()
        try:
            work = self._base.all_reduce(tensors, average=average)
        except RuntimeError as error:
            self.order.raise_failed(error, label, patient=isinstance(error, DistError))
        return PollingWork(work, self.order, self._base, label) if self._polls else work

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._base.carrier(dtype)

    def next_unit_number(self) -> int:
        return self.order.next_unit_number()

    @property
    def compared_ranks(self) -> list[int]:
        return self.order.ranks

    def announce(self, what: str) -> None:
        self.order.next_unlabelled = what

    def raised(self, text: str) -> bool:
        return self.order.raised(text)

    def wrapped(self, wrap: Callable[[Transport], Transport]) -> Transport:
        checked = OrderCheckedTransport(wrap(self._base), self.order)
        checked.pool = self.pool
        return checked
