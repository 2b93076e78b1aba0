"""Snapshots of the gradients that a param group has between two steps.

A replayed step writes the same gradients as its recording but runs no Python code. `GradientSnapshot.restore` then
updates the Python objects. The gradients must stay at the addresses that they had during the recording.
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
"""Gradients in one buffer: the key of the buffer, the address of the buffer, and the indices of the gradients.

The key is the number of a `ShardedGrad`, the key of a `Reduction`, or None for unreduced gradients. In a `ShardedGrad`,
the indices refer to its gradients. Otherwise, they refer to the params of the group.
"""


@dataclass(frozen=True)
class GradientSnapshot:
    """The gradients of a param group between two steps.

    Two snapshots are equal if they have the same gradients in the same memory.
    """

    state: GradState = GradState.REDUCED
    """LOCAL or PARTIAL if gradients still have to be reduced, and REDUCED otherwise."""
    unreduced: tuple[InMemory, ...] = ()
    """Sums of gradients that no collective has reduced. They are in one buffer, so the tuple has at most one item."""
    partial: tuple[InMemory, ...] = ()
    """Gradients that are reduced over the ranks that shard, but not yet over the replicas."""
    attached: tuple[InMemory, ...] = ()
    """Sharded gradients that are assigned to the `.grad` of parameters."""
    foreign: tuple[int, ...] = ()
    """Ids of the parameters whose `.grad` was assigned by the program."""
    shown: bool = False
    """True if unreduced sums are assigned to the `.grad` of parameters."""

    @staticmethod
    def of(group: ParamGroup) -> GradientSnapshot:
        """Take a snapshot of a param group. Call this method outside forward and backward."""
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
        """True if `restore` can restore these gradients."""
        return not self.foreign and not self.shown

    def fits(self, group: ParamGroup) -> bool:
        """Return True if a replay may write these gradients.

        This is the case if no memory has moved since the snapshot, and no older gradients in this memory are in use.
        """
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
        """Update `group` so that it has exactly these gradients. Call this method after a replay has written them."""
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
    """Never free the memory of the current gradients, because recorded steps use this memory at a fixed address."""
    gradients = group.gradients
    if gradients.unreduced is not None and gradients.state is GradState.LOCAL:
        gradients.unreduced.buffer.stay()
    for reduction in gradients.reductions.values():
        if reduction.has_partial:
            reduction.partial.stay()
    for grad in gradients.sharded_grads():
        grad.buffer.stay()


def kept_grads(group: ParamGroup) -> list[ShardedGrad]:
    """Return the sharded gradients whose memory is never freed.

    A recorded step may write this memory even if no gradients remain at the end of the step.
    """
    return [grad for grad in group.gradients.all_grads() if grad.buffer.stays]


def _address(buffer: Buffer) -> int:
    return buffer.storage.data_ptr()
