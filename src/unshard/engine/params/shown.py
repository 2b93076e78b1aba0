"""What programs do to unsharded parameters while modules hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...torch_private import version_of
from .param import ManagedParam

if TYPE_CHECKING:
    from .flat_sharded import FlatParam


class ShownParams:
    """The unsharded parameters of a unit that is kept unsharded, as they are before the program sees them."""

    def __init__(self, params: Sequence[ManagedParam], flat: FlatParam | None, is_shard: bool):
        """`flat`: the one that programs see as well, if any. `is_shard`: they lie in the shard itself."""
        self._is_shard = is_shard
        self._params = [
            (param, unsharded, version_of(unsharded), unsharded.requires_grad, unsharded.data_ptr())
            for param in params
            if (unsharded := param.unsharded) is not None
        ]
        self._flat = flat
        if flat is not None:
            self._flat_version, self._flat_address = version_of(flat.sharded), flat.sharded.data_ptr()

    def follow(self) -> list[str]:
        """Freeze what was frozen since; returns the names of what was written since and is lost."""
        lost = []
        for param, unsharded, version, required, address in self._params:
            if unsharded.requires_grad != required:
                param.sharded.requires_grad_(not required)
            moved, place = unsharded.data_ptr() != address, param.unsharded_view
            if (moved or version_of(unsharded) != version) and not self._keep(unsharded, place):
                lost.append(param.name)
            if moved and place is not None:
                unsharded.data = place  # else no all-gather would reach it again
        if self._flat is not None:
            written = self._flat_has_moved or version_of(self._flat.sharded) != self._flat_version
            if written and not self._keep(self._flat.sharded, self._flat.unsharded):
                lost.append("the flat parameter")
        return lost

    @property
    def has_flat_to_keep(self) -> bool:
        """Whether the program gave the flat parameter other memory, which modules do not compute with yet."""
        return self._is_shard and self._flat_has_moved

    @property
    def _flat_has_moved(self) -> bool:
        return self._flat is not None and self._flat.sharded.data_ptr() != self._flat_address

    def _keep(self, parameter: torch.Tensor, place: torch.Tensor | None) -> bool:
        """Whether the shard has what was written. It is copied there from other memory."""
        if not self._is_shard or place is None or parameter.shape != place.shape:
            return False
        if parameter.data_ptr() != place.data_ptr():
            with torch.no_grad():
                place.copy_(parameter)
        return True
