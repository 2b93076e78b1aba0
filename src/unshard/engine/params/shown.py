"""What programs do to unsharded parameters while modules hold them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...torch_private import version_of
from .param import ManagedParam


class ShownParams:
    """The unsharded parameters of a unit that is kept unsharded, as they are before the program sees them."""

    def __init__(self, params: Sequence[ManagedParam], flat: nn.Parameter | None, is_shard: bool):
        """`flat`: the one that programs see as well, if any. `is_shard`: they lie in the shard itself."""
        self._flat, self._is_shard = flat, is_shard
        self._flat_version = 0 if flat is None else version_of(flat)
        self._params = [
            (param, unsharded, version_of(unsharded), unsharded.requires_grad, unsharded.data_ptr())
            for param in params
            if (unsharded := param.unsharded) is not None
        ]

    def follow(self) -> list[str]:
        """Freeze what was frozen since; returns the names of what was written since and is lost."""
        lost = []
        for param, unsharded, version, required, address in self._params:
            if unsharded.requires_grad != required:
                param.sharded.requires_grad_(not required)
            place = param.unsharded_view
            moved = unsharded.data_ptr() != address
            if moved and place is not None:
                unsharded.data = place  # else no all-gather would reach it again
            if moved or (version_of(unsharded) != version and not self._is_kept(param, address)):
                lost.append(param.name)
        if self._flat is not None and version_of(self._flat) != self._flat_version and not self._is_shard:
            lost.append("the flat parameter")
        return lost

    def _is_kept(self, param: ManagedParam, address: int) -> bool:
        """Whether writes at `address` are writes to the shard. Recurrent layers on a GPU have memory of their own."""
        return self._is_shard and param.unsharded_view is not None and param.unsharded_view.data_ptr() == address
