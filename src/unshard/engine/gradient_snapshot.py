"""Snapshots of the gradients that a param group has between two steps.

A replayed step leaves the same gradients as its recording but runs no Python, so `restore` updates the Python objects.
The gradients must stay at the addresses that they had during the recording.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from .param_group import ParamGroup
from .params.buffers import Buffer
from .sharded_grad import ShardedGrad
from .states import GradState

InMemory = tuple[Any, int, tuple[int, ...]]
"""Gradients in one buffer: the buffer's key, its address, and the indices of the parameters (`ShardedGrad`: of grads).

The key: the number of a `ShardedGrad`, the key of a `Reduction`, or None for unreduced gradients.
"""


@dataclass(frozen=True)
class GradientSnapshot:
    """The gradients of a param group at rest. Equal snapshots have the same gradients in the same memory."""

    state: GradState = GradState.REDUCED
    """LOCAL or PARTIAL; REDUCED if there is nothing left to reduce."""
    unreduced: tuple[InMemory, ...] = ()
    """Sums that no collective has reduced: one buffer, or none."""
    partial: tuple[InMemory, ...] = ()
    """Sums over the shards that wait for their all-reduce over the replicas."""
    attached: tuple[InMemory, ...] = ()
    """Sharded gradients that are the `.grad` of parameters."""
    foreign: tuple[int, ...] = ()
    """Ids of the parameters whose `.grad` the program has set."""
    shown: bool = False
    """True if unreduced sums are visible as `.grad`."""

    @staticmethod
    def of(group: ParamGroup) -> GradientSnapshot:
        """Take a snapshot of a param group at rest."""
        gradients = group.gradients
        grads = gradients.all_grads()
        attached = [
            (grad.number, _address(grad.buffer), members) for grad in grads if (members := grad.attached_members())
        ]
        with_grad = [param.sharded for param in group.sharded.params if param.sharded.grad is not None]
        if not attached and not with_grad and gradients.state in (GradState.EMPTY, GradState.REDUCED):
            return NO_GRADIENTS
        ours = {id(each) for grad in grads for each in grad.grads}
        sums = gradients.unreduced if gradients.state is GradState.LOCAL else None
        return GradientSnapshot(
            GradState.REDUCED if gradients.state is GradState.EMPTY else gradients.state,
            () if sums is None else ((None, _address(sums.buffer), tuple(sums.sums())),),
            tuple(
                (key, _address(reduction.partial), key[0])
                for key, reduction in gradients.reductions.items()
                if reduction.has_partial
            ),
            tuple(attached),
            tuple(id(each) for each in with_grad if id(each.grad) not in ours),
            group.sharded.shows_unreduced,
        )

    @property
    def repeatable(self) -> bool:
        """True if `restore` can bring these gradients back."""
        return not self.foreign and not self.shown

    def fits(self, group: ParamGroup) -> bool:
        """Return True if a replay may write these gradients: no memory has moved, and no user holds older gradients."""
        gradients = group.gradients
        grads = {grad.number: grad for grad in gradients.all_grads()}
        for number, address, _ in self.attached:
            grad = grads.get(number)
            if grad is None or _address(grad.buffer) != address or not (grad.attached or grad.idle):
                return False
        sums, reductions = gradients.unreduced, gradients.reductions
        for _, address, members in self.unreduced:
            if members and (sums is None or _address(sums.buffer) != address):
                return False
        for key, address, _ in self.partial:
            if key not in reductions or _address(reductions[key].partial) != address:
                return False
        return True

    def restore(self, group: ParamGroup) -> None:
        """Update `group` so that it has exactly these gradients. Call this after a replay has written them."""
        gradients = group.gradients
        deque(map(setattr, (param.sharded for param in group.sharded.params), repeat("grad"), repeat(None)), maxlen=0)
        grads = {grad.number: grad for grad in gradients.all_grads()}
        for number, _, members in self.attached:
            grads[number].attach(members)
        if gradients.unreduced is not None:
            gradients.unreduced.present = {index for _, _, members in self.unreduced for index in members}
        partial = {key for key, _, _ in self.partial}
        for key, reduction in gradients.reductions.items():
            reduction.has_partial = key in partial
        gradients.state = self.state


NO_GRADIENTS = GradientSnapshot()


def keep_gradient_memory(group: ParamGroup) -> None:
    """Keep the memory of the current gradients forever, because recordings use it at a fixed address."""
    gradients = group.gradients
    if gradients.unreduced is not None and gradients.state is GradState.LOCAL:
        gradients.unreduced.buffer.stay()
    for reduction in gradients.reductions.values():
        if reduction.has_partial:
            reduction.partial.stay()
    for grad in gradients.sharded_grads():
        grad.buffer.stay()


def kept_grads(group: ParamGroup) -> list[ShardedGrad]:
    """Return the sharded gradients whose memory is never freed. A recording may write it and leave no gradients."""
    return [grad for grad in group.gradients.all_grads() if grad.buffer.stays]


def _address(buffer: Buffer) -> int:
    return buffer.storage.data_ptr()
