"""An observer of all-gathers and reductions: an audit. Normally there is none, which costs a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from .params.param import ManagedParam

Members = Sequence[tuple[int, ...]]
"""For each tensor of a collective, the numbers of the parameters in it."""


class Observer(Protocol):
    """Called by every unit of the process. It must change nothing, keep no tensor and issue no collective."""

    def all_gathering(self, params: Sequence[ManagedParam], members: Members, sent: Sequence[torch.Tensor]) -> None:
        """An all-gather of `sent` was issued."""

    def unsharded(self, params: Sequence[ManagedParam]) -> None:
        """The unsharded parameters hold what was gathered."""

    def keeping(self, params: Sequence[ManagedParam], sums: Mapping[int, torch.Tensor]) -> None:
        """A backward without synchronisation left these sums, by number of the parameter."""

    def reducing(
        self,
        params: Sequence[ManagedParam],
        members: Members,
        gradients: Mapping[int, torch.Tensor],
        sent: Sequence[torch.Tensor],
        sums: Sequence[torch.Tensor],
    ) -> None:
        """A reduce-scatter, or an all-to-all, of `sent` into `sums` was issued."""

    def all_reducing(self, params: Sequence[ManagedParam], members: Members, sums: Sequence[torch.Tensor]) -> None:
        """An all-reduce over the replicas was issued."""

    def delivered(self, params: Sequence[ManagedParam]) -> None:
        """The parameters have their `.grad`s, and the user's hooks have seen them."""


# Of the module and not of a thread: autograd runs backward in threads of its own.
current: Observer | None = None
