"""Somebody who looks on while units are gathered and reduced: an audit. Normally nobody, which costs a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from .faces import Slot

Members = Sequence[tuple[int, ...]]
"""For each tensor of a collective, the numbers of the parameters in it."""


class Observer(Protocol):
    """Is told by any unit of the process. Must change nothing, keep no tensor and issue no collective."""

    def gathering(self, slots: Sequence[Slot], members: Members, sent: Sequence[torch.Tensor]) -> None:
        """A gather of `sent` was issued."""

    def whole(self, slots: Sequence[Slot]) -> None:
        """The full faces hold what was gathered."""

    def keeping(self, slots: Sequence[Slot], sums: Mapping[int, torch.Tensor]) -> None:
        """A backward that does not synchronise left these sums, by number of the parameter."""

    def reducing(
        self,
        slots: Sequence[Slot],
        members: Members,
        gradients: Mapping[int, torch.Tensor],
        sent: Sequence[torch.Tensor],
        sums: Sequence[torch.Tensor],
    ) -> None:
        """A reduce-scatter, or an exchange, of `sent` into `sums` was issued."""

    def all_reducing(self, slots: Sequence[Slot], members: Members, sums: Sequence[torch.Tensor]) -> None:
        """An all-reduce over the replicas was issued."""

    def delivered(self, slots: Sequence[Slot]) -> None:
        """The parameters have their `.grad`s, and the user's hooks have seen them."""


# Of the module and not of a thread: autograd runs backward in threads of its own.
current: Observer | None = None
