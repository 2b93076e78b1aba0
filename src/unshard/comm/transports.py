"""The transport for a process group: another backend gets its transport here."""

from __future__ import annotations

from typing import Any

import torch

from .interface import Transport
from .order.check import order_of
from .order.checked_transport import OrderCheckedTransport
from .process_group import ProcessGroupTransport
from .solo import SoloTransport


def transport_for(group: Any, device: torch.device, check_order: bool = True) -> Transport:
    """The transport for a shard group; a group of one rank sends nothing.

    `check_order`: the ranks compare what they are about to issue, where they are real peers.
    """
    if group.size() == 1:
        return SoloTransport()
    transport = ProcessGroupTransport(group, device)
    order = order_of(group, transport.backend, device) if check_order else None
    return transport if order is None else OrderCheckedTransport(transport, order)
