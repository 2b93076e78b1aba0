"""The transport for a process group: another backend gets its transport here."""

from __future__ import annotations

from typing import Any

import torch

from .groups import group_like
from .interface import Label, Transport
from .order.check import order_of
from .order.checked_transport import OrderCheckedTransport
from .process_group import ProcessGroupTransport
from .solo import SoloTransport
from .split import SplitTransport


def transport_for(
    group: Any, device: torch.device, check_order: bool = True, separate: bool | None = None
) -> Transport:
    """The transport for a shard group; a group of one rank sends nothing.

    `check_order`: the ranks compare what they are about to issue, where they are real peers.
    `separate`: reduce-scatters have a process group of their own; None: where that is faster.
    """
    if group.size() == 1:
        return SoloTransport()
    gathers = ProcessGroupTransport(group, device)
    order = order_of(group, gathers.backend, device) if check_order else None
    transport: Transport = gathers
    if gathers.separate_is_faster if separate is None else separate:
        label = Label(lambda: "make a process group for reduce-scatters")

        def meet() -> None:
            if order is not None:
                order.check(label, meet=True)

        def reduce_scatters() -> Transport:
            return ProcessGroupTransport(group_like(group, gathers.backend, device, meet), device)

        transport = SplitTransport(gathers, reduce_scatters)
    return transport if order is None else OrderCheckedTransport(transport, order)


def separate_is_faster(group: Any, device: torch.device) -> bool:
    """Whether reduce-scatters of a shard group have a process group of their own by default."""
    return group.size() > 1 and ProcessGroupTransport(group, device).separate_is_faster
