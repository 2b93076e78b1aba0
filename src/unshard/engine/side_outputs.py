"""What a forward leaves on its modules, besides what it returns: a loss may be computed from that too."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..torch_private import sequence_nr_of

_OWN = frozenset(vars(nn.Module()))
_MOST = 1000
"""Of a longer container only the last ones are looked at."""


class SideOutputs:
    """Where modules keep tensors that their forward computes, mostly nowhere.

    All attributes are searched after the 1st, 2nd, 4th, 8th ... forward, because a search takes longer than the rest of
    what is done for a unit; in between only those that had such a tensor before.
    """

    def __init__(self) -> None:
        self._forwards, self._next_search = 0, 1
        self._places: dict[tuple[weakref.ref[nn.Module], str], None] = {}

    def expected(self) -> bool:
        """Whether it is worth looking. To be asked after every forward."""
        self._forwards += 1
        return self._forwards >= self._next_search or bool(self._places)

    def tensors(self, modules: Iterable[nn.Module], since: int) -> list[torch.Tensor]:
        """Those of the graph that has grown since the node of this number."""
        if self._forwards >= self._next_search:
            self._next_search *= 2
            for module in modules:
                for each in module.modules():
                    for name, value in _attributes(each):
                        if next(_grown(value, since), None) is not None:
                            self._places[weakref.ref(each), name] = None
        found: list[torch.Tensor] = []
        for ref, name in self._places:
            if (owner := ref()) is not None:
                found += _grown(getattr(owner, name, None), since)
        return found


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in _OWN:
            yield name, value
    yield from module.named_buffers(recurse=False)


def _grown(value: Any, since: int, levels: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        with suppress(RuntimeError):  # of a view that was overwritten: nobody can go back through it either
            if value.requires_grad and value.grad_fn is not None and sequence_nr_of(value) >= since:
                yield value
    elif levels and isinstance(value, dict | list | tuple | deque):
        items = value.values() if isinstance(value, dict) else value
        for item in islice(reversed(items), _MOST):
            yield from _grown(item, since, levels - 1)
