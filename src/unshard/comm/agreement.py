"""Checks that ranks have equal values, broadcasts tensors, and reduces single numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ArgumentError, StateError, listed
from .groups import staging_device
from .interface import Label, Transport
from .order.waiting import SharedCall
from .transports import transport_for

_DETAIL = 64 * 1024  # bytes of facts that are compared one by one once the ranks are known to differ
_BUCKET = 64 * 1024 * 1024  # bytes of one broadcast

# -- compare -----------------------------------------------------------------------------------------------


def require_agreement(transport: Transport, device: torch.device, what: str, facts: Sequence[str]) -> None:
    """Raise an error on every rank of `transport` if the ranks pass different lists of `facts`.

    `what` describes the facts in the error, which shows the first difference. Without this check, ranks with different
    models would hang or compute garbage. If all ranks agree, the check costs one small all-gather. Otherwise, a second
    all-gather finds the difference. If `transport` has no all-gather, this function does nothing.
    """
    if transport.world == 1 or not transport.traits.gathers:
        return
    transport.announce(f"compare {what} with the other ranks")
    text = "\n".join(facts).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    digests = gathered(transport, torch.tensor([digest], device=device)).flatten().tolist()
    if set(digests) == {digest}:
        return
    detail = torch.zeros(_DETAIL, dtype=torch.uint8)
    kept = text[:_DETAIL]
    detail[: len(kept)] = torch.frombuffer(bytearray(kept), dtype=torch.uint8)
    rows = gathered(transport, detail.to(device)).cpu()
    others = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace").split("\n") for row in rows]
    rank = next((r for r, other in enumerate(digests) if other != digests[0]), 0)
    raise ArgumentError(
        f"The ranks disagree about {what}: {_first_difference(others[0], others[rank], rank)} Build the same model, "
        "with the same calls of fully_shard in the same order, on every rank."
    )


def gathered(transport: Transport, mine: torch.Tensor, label: Label | None = None) -> torch.Tensor:
    """All-gather the flat tensor `mine`, and return a matrix. Row `r` contains the values of rank `r`."""
    # Start with this rank's own values, so all ranks seem to agree if a simulated group delivers nothing.
    output = mine.repeat(transport.world)
    transport.all_gather([output], [mine], label=label).wait()
    return output.view(transport.world, -1)


def _first_difference(first: list[str], other: list[str], rank: int) -> str:
    for here, there in zip_longest(first, other, fillvalue="nothing more"):
        if here != there:
            return f"rank 0 of the group has {here}, rank {rank} has {there}."
    return f"rank 0 of the group and rank {rank} differ beyond what can be shown."


# -- broadcast ---------------------------------------------------------------------------------------------


def sync_module_states(module: nn.Module, process_group: Any = None) -> None:
    """Copy the parameters and buffers of `module` from rank 0 of `process_group` to its other ranks, in place.

    Call this on all ranks of the process group before you shard the module. By default, the process group contains all
    ranks of the job.

    Raises:
        ArgumentError: the ranks have other names, shapes or dtypes.
        StateError: `module` is already sharded.

    Example::

        model = Model()  # different weights on each rank
        sync_module_states(model)
        fully_shard(model)
    """
    group = dist.group.WORLD if process_group is None else process_group
    named = [*module.named_parameters(), *module.named_buffers()]
    sharded = [name for name, each in named if isinstance(each, DTensor)]
    if sharded:
        raise StateError(
            f"sync_module_states needs plain tensors, but {listed(sharded)} of {type(module).__name__} are DTensors. "
            "Call it before fully_shard."
        )
    on_meta = [name for name, each in named if each.is_meta]
    if on_meta:
        raise StateError(
            f"{listed(on_meta)} of {type(module).__name__} are on the meta device and have no values to send. "
            "Initialize them first."
        )
    device = staging_device(group, [each for _, each in named])
    facts = [f"{name} with shape {tuple(each.shape)} and {each.dtype}" for name, each in named]
    require_agreement(transport_for(group, device), device, "the parameters and buffers to broadcast", facts)
    broadcast_tensors([each for _, each in named], [group], device)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], groups: Iterable[Any], device: torch.device) -> None:
    """Copy `tensors` from rank 0 of each process group to the other ranks of that group, in place.

    Tensors of the same dtype are concatenated, so one broadcast sends many of them.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for each in tensors:
        by_dtype.setdefault(each.dtype, []).append(each.detach())
    for group in groups:
        if group.size() > 1:
            for same in by_dtype.values():
                for bucket in _buckets(same):
                    flat = torch.cat([each.reshape(-1).to(device) for each in bucket])
                    dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
                    for each, values in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                        each.copy_(values.view(each.shape))


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for each in tensors:
        bucket.append(each)
        size += each.numel() * each.element_size()
        if size >= _BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


# -- single numbers ----------------------------------------------------------------------------------------


def sum_over(group: Any, number: torch.Tensor, call: SharedCall) -> None:
    """Replace `number` with its sum over the ranks of `group`, in place. `call` runs the all-reduce."""
    _reduce(group, number, dist.ReduceOp.SUM, call)


def largest_over(group: Any, number: torch.Tensor, call: SharedCall) -> None:
    """Replace `number` with its largest absolute value on any rank, or with NaN if any rank has NaN.

    A backend may ignore NaN when it computes the maximum of floats. So this function compares the bits of the absolute
    values as integers. These integers have the same order as the absolute values, and NaN has the largest integers.
    """
    bits = {4: torch.int32, 8: torch.int64}[number.dtype.itemsize]
    _reduce(group, number.abs_().view(bits), dist.ReduceOp.MAX, call)


_INFINITY_BITS = 0x7FF0000000000000  # of a float64; the bits of NaN are larger


def smallest_over(group: Any, number: torch.Tensor, call: SharedCall) -> None:
    """Replace `number` (float64) with the smallest number that any rank passes, or with NaN if any rank passes NaN.

    The numbers must be non-negative. A rank without a number passes -1. The result is -1 if all ranks pass -1.
    """
    bits = number.view(torch.int64)
    distance = torch.where(number < 0, -1, _INFINITY_BITS - bits)
    _reduce(group, distance.masked_fill_(number.isnan(), torch.iinfo(torch.int64).max), dist.ReduceOp.MAX, call)
    bits.copy_(_INFINITY_BITS - distance.clamp(min=0))
    number.masked_fill_(distance < 0, -1)
    number.masked_fill_(distance > _INFINITY_BITS, torch.nan)


def _reduce(group: Any, number: torch.Tensor, how: Any, call: SharedCall) -> None:
    if group.size() > 1:
        call.run(partial(dist.all_reduce, number, how, group))
