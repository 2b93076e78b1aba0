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
from .output_memory import LeftAlias, aliases_in

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
        self.places: dict[tuple[weakref.ref[nn.Module], str], None] = {}
        """Attributes that had such a tensor, or one that shares memory with unsharded parameters."""
        self.aliases: list[LeftAlias] = []
        """Those that do. Copies are in their places until the next forward."""

    def expected(self) -> bool:
        """Whether it is worth looking. To be asked after every forward."""
        self._forwards += 1
        return self._forwards >= self._next_search or bool(self.places)

    def tensors(self, modules: Iterable[nn.Module], since: int) -> list[torch.Tensor]:
        """Those of the graph that has grown since the node of this number."""
        search = self._forwards >= self._next_search
        self.copy_aliases(modules, search)
        if search:
            self._next_search *= 2
            for module, name, value in _attributes(modules):
                if next(_grown(value, since), None) is not None:
                    self.places[weakref.ref(module), name] = None
        return [each for ref, name in self.places for each in _grown(getattr(ref(), name, None), since)]

    def copy_aliases(self, modules: Iterable[nn.Module], search: bool) -> None:
        """Copy tensors that share memory with unsharded parameters, which is emptied after forward.

        `search`: look at all attributes, not only at those that had one before.
        """
        if search:
            for module, name, value in _attributes(modules):
                if next(aliases_in(module, name, value), None) is not None:
                    self.places[weakref.ref(module), name] = None
        for ref, name in self.places:
            if (owner := ref()) is not None:
                self.aliases += aliases_in(owner, name, getattr(owner, name, None))
        for alias in self.aliases:
            alias.copy()

    def restore_aliases(self) -> None:
        """Let forward see them again: it may have made them once, and they show what is gathered each time."""
        aliases, self.aliases = self.aliases, []
        for alias in aliases:
            alias.restore()


def _attributes(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
    for top in modules:
        for module in top.modules():
            for name, value in vars(module).items():
                if name not in _OWN:
                    yield module, name, value
            for name, buffer in module.named_buffers(recurse=False):
                yield module, name, buffer


def _grown(value: Any, since: int, levels: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        with suppress(RuntimeError):  # of a view that was overwritten: nobody can go back through it either
            if value.requires_grad and value.grad_fn is not None and sequence_nr_of(value) >= since:
                yield value
    elif levels and isinstance(value, dict | list | tuple | deque):
        items = value.values() if isinstance(value, dict) else value
        for item in islice(reversed(items), _MOST):
            yield from _grown(item, since, levels - 1)
