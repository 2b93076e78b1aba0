"""Chooses the transport for a process group.

This module also contains transports for one rank, for a second process group for reduce-scatters, for the order check,
and for user-defined collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError

from ..layout.collective_tensors import PackingRule
from ..torch_private import foreach_copy
from .groups import group_like
from .interface import AllGather, Done, Label, ReduceScatter, Tensors, Traits, Transport, Work, WorkThen, joined
from .order.check import Order, order_of
from .order.waiting import PollingWork, with_timeout
from .process_group import ProcessGroupTransport


def transport_for(
    group: Any, device: torch.device, check_order: bool = True, separate: bool | None = None
) -> Transport:
    """Return a transport for a process group. For a group of one rank, the transport sends nothing.

    If `check_order` is True and `order_of` supports the group, ranks compare collectives before issuing them. If
    `separate` is True, reduce-scatters get their own process group. If `separate` is None, they get one only if a
    separate group is faster.
    """
    if group.size() == 1:
        return SoloTransport()
    transport = ProcessGroupTransport(group, device)
    backend = transport.backend
    order = order_of(group, backend, device) if check_order else None
    if transport.separate_is_faster if separate is None else separate:
        label = Label(lambda: "make a process group for reduce-scatters")

        def meet() -> None:
            if order is not None:
                order.check(label, meet=True)

        transport = SplitTransport(group, device, lambda: group_like(group, backend, device, meet))
    return transport if order is None else OrderCheckedTransport(transport, order)


def separate_is_faster(group: Any, device: torch.device) -> bool:
    """Return True if reduce-scatters of `group` get their own process group by default."""
    return group.size() > 1 and ProcessGroupTransport(group, device).separate_is_faster


class SoloTransport(Transport):
    """The transport of a group of one rank, which sends nothing.

    With this class, the engine needs no special case for one rank.
    """

    rank = 0
    world = 1
    traits = Traits(
        gathers_groups=True,
        reduces_groups=True,
        packing=PackingRule(least=9),  # nothing is sent, but packing would cost copies
        in_place_only=True,
        reduces_in_place=True,
        gathers_on_any_stream=True,
    )

    def all_gather(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None) -> Work:
        return Done()

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None, average: bool) -> Work:
        if inputs is not outputs:
            foreach_copy(outputs, inputs)
        return Done()

    def all_reduce(self, tensors: Tensors, *, label: Label | None = None, average: bool) -> Work:
        return Done()


class SplitTransport(ProcessGroupTransport):
    """Issues reduce-scatters in a second process group of the same ranks, so they do not queue behind all-gathers.

    All ranks create the second group together at the first reduce-scatter. A job that only evaluates never creates it.
    """

    def __init__(self, group: Any, device: torch.device, make_second_group: Callable[[], Any]):
        super().__init__(group, device)
        self._device, self._make_second_group = device, make_second_group

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None, average: bool) -> Work:
        second = ProcessGroupTransport(self._make_second_group(), self._device)
        self.reduce_scatter = second.reduce_scatter  # type: ignore[method-assign]  # hides this method from now on
        return second.reduce_scatter(outputs, inputs, average=average)


def _checked(name: str) -> Any:
    """Return a method that compares its label with other ranks and then calls method `name` of the base transport."""
    # All collectives share this one function without helpers, because every collective of a step calls it.
    is_reduce_scatter = name == "reduce_scatter"

    def issue(self: OrderCheckedTransport, *tensors: Any, label: Label | None = None, **options: Any) -> Work:
        order = self.order
        if label is not None:
            order.check(label)
        else:
            order.progress.count_unlabelled()
        try:
            work = getattr(self._base, name)(*tensors, **options)
        except RuntimeError as error:
            order.raise_failed(error, label, patient=isinstance(error, DistError))
        if not self._polls:
            return work
        if is_reduce_scatter and self.traits.reduce_scatter_ignores_timeout:
            work = with_timeout(work, order)
        return PollingWork(work, order, self._base, label)

    issue.__name__ = issue.__qualname__ = name
    return issue


class OrderCheckedTransport(Transport):
    """Wraps the transport `base`, and compares labels with other ranks before `base` issues a collective.

    If the backend waits on the host, this rank stops waiting when another rank has an error.
    """

    order: Order

    def __init__(self, base: Transport, order: Order):
        self.rank, self.world, self.traits, self.pool = base.rank, base.world, base.traits, base.pool
        self._base, self.order, self._polls = base, order, order.waits_on_host
        self.divides = base.divides

    all_gather = _checked("all_gather")
    reduce_scatter = _checked("reduce_scatter")
    all_reduce = _checked("all_reduce")

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._base.carrier(dtype)

    def wrapped(self, wrap: Callable[[Transport], Transport]) -> Transport:
        checked = OrderCheckedTransport(wrap(self._base), self.order)
        checked.pool = self.pool
        return checked


class PluginTransport(Transport):
    """Replaces the all-gather, the reduce-scatter, or both, of another transport with user-defined collectives."""

    def __init__(self, base: Transport, group: Any, all_gather: AllGather | None, reduce_scatter: ReduceScatter | None):
        self.rank, self.world, self.traits = base.rank, base.world, base.traits
        self._base, self._group = base, group
        self._all_gather, self._reduce_scatter = all_gather, reduce_scatter
        if all_gather is not None:
            self.traits = dataclasses.replace(
                self.traits,
                gathers_groups=hasattr(all_gather, "gather_many"),
                in_place_only=False,
                gathers_on_any_stream=False,
            )
        if reduce_scatter is not None:
            self.traits = dataclasses.replace(
                self.traits,
                reduces_groups=hasattr(reduce_scatter, "reduce_scatter_many"),
                reduces_in_place=False,
                waits_in_stream=False,
            )

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._base.carrier(dtype)

    def all_gather(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None) -> Work:
        comm = self._all_gather
        if comm is None:
            return self._base.all_gather(outputs, inputs, label=label)
        if self.traits.gathers_groups:
            return WorkThen(comm.gather_many(outputs, inputs, self._group))  # type: ignore[attr-defined]
        works = []
        for output, piece in zip(outputs, inputs, strict=True):
            whole = comm.allocate(output.shape, dtype=output.dtype, device=output.device)
            mine = whole.view(self.world, -1)[self.rank]
            mine.copy_(piece)
            works.append(WorkThen(comm(whole, mine, self._group, async_op=True), partial(_copy, output, whole)))
        return joined(works)

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None, average: bool) -> Work:
        comm = self._reduce_scatter
        if comm is None:
            return self._base.reduce_scatter(outputs, inputs, label=label, average=average)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        if self.traits.reduces_groups:
            return WorkThen(comm.reduce_scatter_many(outputs, inputs, self._group, op))  # type: ignore[attr-defined]
        works = []
        for output, unreduced in zip(outputs, inputs, strict=True):
            copy = comm.allocate(unreduced.shape, dtype=unreduced.dtype, device=unreduced.device)
            piece = comm.allocate(output.shape, dtype=output.dtype, device=output.device)
            copy.copy_(unreduced)
            work = comm(piece, copy, self._group, op, async_op=True)
            works.append(WorkThen(work, partial(_copy, output, piece, copy)))
        return joined(works)

    def all_reduce(self, tensors: Tensors, *, label: Label | None = None, average: bool) -> Work:
        return self._base.all_reduce(tensors, label=label, average=average)


def _copy(output: torch.Tensor, result: torch.Tensor, *kept: torch.Tensor) -> None:
    # A user's collective may read the tensors in `kept` until this call.
    output.copy_(result)
