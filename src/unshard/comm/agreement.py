"""Finds out, before the first step, that ranks were given different models: otherwise a hang or garbage."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from ..errors import ArgumentError
from .interface import Transport

_DETAIL = 64 * 1024  # bytes of facts that are compared one by one once the ranks are known to differ


def require_agreement(transport: Transport, device: torch.device, what: str, facts: Sequence[str]) -> None:
    """Raise on every rank of `transport` if the ranks' lists of facts differ, naming the first difference.

    One small gather; if the ranks differ they all see it, and a second one finds out where. Nothing is compared over an
    object that only looks like a process group and cannot gather.
    """
    if transport.world == 1 or not transport.traits.gathers:
        return
    transport.announce(f"compare {what} with the other ranks")
    text = "\n".join(facts).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    digests = _gather(transport, torch.tensor([digest], device=device)).flatten().tolist()
    if set(digests) == {digest}:
        return
    detail = torch.zeros(_DETAIL, dtype=torch.uint8)
    kept = text[:_DETAIL]
    detail[: len(kept)] = torch.frombuffer(bytearray(kept), dtype=torch.uint8)
    rows = _gather(transport, detail.to(device)).cpu()
    others = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace").split("\n") for row in rows]
    rank = next((r for r, other in enumerate(digests) if other != digests[0]), 0)
    raise ArgumentError(
        f"The ranks disagree about {what}: {_first_difference(others[0], others[rank], rank)} Build the same model, "
        "with the same calls of fully_shard in the same order, on every rank."
    )


def _gather(transport: Transport, mine: torch.Tensor) -> torch.Tensor:
    # Filled with this rank's own, so that a simulated group that delivers nothing agrees with itself.
    output = mine.repeat(transport.world)
    transport.all_gather([output], [mine]).wait()
    return output.view(transport.world, -1)


def _first_difference(first: list[str], other: list[str], rank: int) -> str:
    for number in range(max(len(first), len(other))):
        here = first[number] if number < len(first) else "nothing more"
        there = other[number] if number < len(other) else "nothing more"
        if here != there:
            return f"rank 0 of the group has {here}, rank {rank} has {there}."
    return f"rank 0 of the group and rank {rank} differ beyond what can be shown."
