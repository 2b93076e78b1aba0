"""What programs do to the parameters of a unit that stays unsharded, or sliced, between forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller

import torch

from ...torch_private import version_of
from .param import ManagedParam
from .sharded import ShardedParams

# No Python functions: evaluations that keep their units look at every parameter.
_requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
_address: Callable[[torch.Tensor], int] = methodcaller("data_ptr")


class ShownParams:
    """Compares the parameters that modules hold with what they were when the program could first touch them."""

    def __init__(self, sharded: ShardedParams, is_shard: bool, sliced: bool):
        """`is_shard`: the unsharded parameters lie in the shard. `sliced`: modules hold slices instead."""
        self._sharded, self._is_shard, self._sliced = sharded, is_shard, sliced
        shown = [(param, param.sliced if sliced else param.unsharded) for param in sharded.params]
        self._params = [(param, each) for param, each in shown if each is not None and not each.is_inference()]
        flat = sharded.flat_parameter
        self._tensors = [each for _, each in self._params] + ([] if flat is None or sliced else [flat])
        self._before = self._now()

    @property
    def touched(self) -> bool:
        """True if the program has written, frozen or unfrozen any of them."""
        return self._now() != self._before

    def _now(self) -> tuple[list[int], list[bool], list[int]]:
        tensors = self._tensors
        return list(map(version_of, tensors)), list(map(_requires_grad, tensors)), list(map(_address, tensors))

    def follow(self) -> list[str]:
        """Freeze what the program has frozen and copy what it has written into the shard.

        Returns the names of written parameters that cannot be copied: slices, and copies in another dtype.
        """
        now = self._now()
        if now == self._before:
            return []
        lost, changes = [], list(zip(*self._before, *now, strict=True))
        with torch.no_grad(), torch.inference_mode(False):
            for (param, shown), change in zip(self._params, changes, strict=False):
                version, required, address, new_version, requires, new_address = change
                if requires != required:
                    param.sharded.requires_grad_(requires)
                if new_address != address:
                    kept = self._move_back(param, shown) and self._copy(param)
                else:
                    kept = new_version == version or self._copy(param)
                if not kept:
                    lost.append(param.name)
            if len(self._tensors) > len(self._params):
                version, _, address, new_version, _, new_address = changes[-1]
                if (version, address) != (new_version, new_address) and not self._sharded.copy_flat():
                    lost.append("the flat parameter")
        return lost

    def _copy(self, param: ManagedParam) -> bool:
        if self._sliced:
            return False
        if self._is_shard and not param.lies_elsewhere:
            return True
        return self._sharded.copy_unsharded(param)

    @staticmethod
    def _move_back(param: ManagedParam, shown: torch.Tensor) -> bool:
        """Put a parameter that was given other memory back into its place: no all-gather would reach it there."""
        place = param.unsharded_view
        if place is None:
            return False
        fits = shown.shape == place.shape and shown.dtype == place.dtype
        if fits:
            place.copy_(shown)
        shown.data = place
        return fits
