"""Lists of objects that every call compares with those of the call before, by functions in C."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch


class SameObjects:
    """A list of objects, equal to one of the same objects in the same order. It holds them, so no id is used again.

    `==` of the objects is not used: two tensors of equal values are not the same, and programs may define it.
    """

    def __init__(self, objects: list[Any]):
        self.objects = objects

    def followed_by(self, objects: list[Any]) -> SameObjects:
        """This one if it has these objects, else a new one."""
        mine = self.objects
        return self if len(mine) == len(objects) and all(map(is_, mine, objects)) else SameObjects(objects)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObjects) and self.followed_by(other.objects) is self

    __hash__ = None  # type: ignore[assignment]

    def tensors(self) -> list[torch.Tensor]:
        return [each for each in self.objects if isinstance(each, torch.Tensor)]

    def are_in(self, other: SameObjects) -> bool:
        return set(map(id, self.objects)) <= set(map(id, other.objects))


def values_of(dicts: Iterable[dict[Any, Any]]) -> list[Any]:
    """The values of all dicts in one list, in the order that they have there."""
    return list(chain.from_iterable(map(dict.values, dicts)))
