"""Process groups made for this library, each once per set of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

# By default group, so that groups of a job that was torn down are not found again.
_MADE: weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], Any]] = weakref.WeakKeyDictionary()


def group_of(ranks: Sequence[int], purpose: str) -> Any:
    """The group of these ranks for a purpose; only they have to call, all in the same order."""
    made = _MADE.setdefault(dist.group.WORLD, {})
    key = purpose, tuple(ranks)
    if key not in made:
        made[key] = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"unshard {purpose}")
    return made[key]
