"""The parameter groups that a flat optimizer steps: flat segments in place of parameters."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..engine.api import ShardedGrad, grad_ranges, gradient_of
from ..errors import StateError
from ..torch_private import local_of
from .flat_segments import (
    FlatSegment,
    Joined,
    adjacent,
    adjacent_gradients,
    params_in_memory_order,
    runs_of,
    same_state,
)

FlatGrads = list[tuple[FlatSegment, torch.Tensor]]
"""Segments with their flat gradients, which are views of sharded gradients."""


class FlatGroups:
    """The segments of an optimizer's parameters and their flat state.

    They follow from the parameters, where these are in memory, the entries of the state and the gradients. A step that
    finds all of these unchanged uses the segments of the last one: it makes a few comparisons per parameter, and at
    most one call of torch per segment.
    """

    def __init__(self) -> None:
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.segments: list[FlatSegment] = []
        self.streamed: list[FlatSegment] = []
        """Segments of this step whose state rests on the host."""
        self._plain: list[tuple[int, torch.Tensor]] = []
        self._other_state: dict[Any, Any] = {}
        self._parameters: list[DTensor] = []
        self._locals: list[torch.Tensor] = []
        self._layout: list[Any] = []
        self._entries: list[Any] = []
        self._optimizer_state: Any = None
        self._gradients: list[int] | None = None
        self._sharded_grads: list[weakref.ref[ShardedGrad]] = []
        self._flat_grads: FlatGrads = []
        self._collected: list[FlatSegment] = []
        """Segments whose gradients are copied into a flat one for each step."""

    def begin_step(self, optimizer: Any, done: Sequence[FlatSegment] = ()) -> list[dict[str, Any]]:
        """Groups for one step, with gradients on their tensors; `end_step` afterwards.

        Segments in `done` were stepped in backward and are not in the groups, nor are those in `streamed`.
        """
        param_groups = optimizer.param_groups
        layout = _layout(param_groups)
        if not self._is_current(layout, optimizer.state):
            if done:
                raise StateError(
                    "The optimizer's parameters, groups or state were changed between backward and step(), and with "
                    "step_in_backward=True backward has stepped some of them. Make such changes after step()."
                )
            self._rebuild(param_groups, optimizer.state, layout)
        self._find_gradients(optimizer.state)
        if not {id(segment) for segment in done} <= {id(segment) for segment, _ in self._flat_grads}:
            raise StateError(
                "Gradients were replaced or cleared between backward and step(), and with step_in_backward=True "
                "backward has stepped them already. Use them as they are, or leave out step_in_backward=True. The "
                "steps that backward took are kept."
            )
        self._take_other_state(optimizer.state)
        groups = [{**group, "params": []} for group in param_groups]
        for number, parameter in self._plain:
            groups[number]["params"].append(parameter)
        for segment, gradient in self._flat_grads:
            segment.flat.grad = gradient
        for segment in self._collected:
            segment.flat.grad = segment.collected_gradient()
        skipped = set(map(id, done))
        stepped = [segment for segment in self._with_gradient() if id(segment) not in skipped]
        for segment in stepped:
            if segment.state_offload is None:
                groups[segment.group]["params"].append(segment.flat)
        self.streamed = [segment for segment in stepped if segment.state_offload is not None]
        return groups

    def follow_changes(self, optimizer: Any) -> None:
        """Make segments and flat state anew if parameters, groups or state were changed since the last step."""
        layout = _layout(optimizer.param_groups)
        if not self._is_current(layout, optimizer.state):
            self._rebuild(optimizer.param_groups, optimizer.state, layout)

    def end_step(self, optimizer: Any, groups: list[dict[str, Any]]) -> None:
        """Drop the gradients, and put what the step did to state and groups into those of the optimizer."""
        for param_group, group in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = param_group["params"]
            param_group.update(group)
        self.update_entries(self._with_gradient(), optimizer.state)
        self._return_other_state(optimizer.state)

    def update_entries(self, segments: Sequence[FlatSegment], state: Any) -> None:
        """Drop the gradients of segments that were stepped, and make `state` agree with their flat state."""
        changed = False
        for segment in segments:
            segment.flat.grad = None
            if segment.flat in self.state:
                changed |= segment.update_entries(self.state[segment.flat], state)
        if changed:
            self._entries = _entries(state)

    def flat_grads_by_shard(self) -> list[tuple[ShardedGrad, FlatGrads]]:
        """The sharded gradients of the last step, each with the flat gradients in it."""
        found = []
        for shard in (ref() for ref in self._sharded_grads):
            if shard is not None:
                storage = shard.buffer.storage.data_ptr()
                own = [pair for pair in self._flat_grads if pair[1].untyped_storage().data_ptr() == storage]
                found.append((shard, own))
        return found

    def is_unchanged(self, optimizer: Any) -> bool:
        """Whether an optimizer is as its last step left it, and has no state except that of sharded parameters."""
        if not all(isinstance(key, DTensor) for key in optimizer.state):
            return False
        return self._is_current(_layout(optimizer.param_groups), optimizer.state)

    def _with_gradient(self) -> list[FlatSegment]:
        return [*(segment for segment, _ in self._flat_grads), *self._collected]

    def _take_other_state(self, state: Any) -> None:
        """Let the step see what `state` holds now for plain parameters and under any other keys."""
        self._other_state = {key: value for key, value in state.items() if not isinstance(key, DTensor)}
        own = {segment.flat: self.state[segment.flat] for segment in self.segments if segment.flat in self.state}
        self.state = defaultdict(dict, {**self._other_state, **own})

    def _return_other_state(self, state: Any) -> None:
        own = {id(segment.flat) for segment in self.segments}
        others = {key: value for key, value in self.state.items() if id(key) not in own}
        for key in self._other_state.keys() - others.keys():
            del state[key]
        state.update(others)
        self._other_state = {}

    def _is_current(self, layout: list[Any], state: Any) -> bool:
        """Whether the segments were made from these parameters, their present memory and this state."""
        if layout != self._layout or state is not self._optimizer_state:
            return False
        entries = _entries(state)
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        return all(map(is_, map(local_of, self._parameters), self._locals))

    def _rebuild(self, groups: list[dict[str, Any]], state: Any, layout: list[Any]) -> None:
        """Make segments as long as memory, groups and state allow, with the state in the entries."""
        params = params_in_memory_order(groups)
        in_memory, in_state = adjacent(groups), same_state(state)
        self.segments = [FlatSegment(run) for run in runs_of(params, lambda a, b: in_memory(a, b) and in_state(a, b))]
        self._plain = [
            (number, each)
            for number, group in enumerate(groups)
            for each in group["params"]
            if not isinstance(each, DTensor)
        ]
        self._parameters = [each.parameter for each in params]
        self._locals = [each.local for each in params]
        # One segment after the other, so that there are never two copies of all state.
        self.state = defaultdict(dict)
        for segment in self.segments:
            flat = segment.flat_state(state)
            if flat is not None:
                self.state[segment.flat] = flat
                segment.update_entries(flat, state)
        self._layout, self._optimizer_state, self._entries = layout, state, _entries(state)
        self._gradients = None

    def _find_gradients(self, state: Any) -> None:
        """Find each segment's flat gradient. Where only some parameters have one, the segment is split for good."""
        gradients = list(map(id, map(gradient_of, self._parameters)))
        known = gradients == self._gradients and None not in [each() for each in self._sharded_grads]
        if known and not self._collected:
            return
        self._gradients = gradients
        ranges = grad_ranges(self._parameters)
        self._split(adjacent_gradients(ranges), state)
        self._flat_grads, self._collected = [], []
        shards: dict[int, weakref.ref[ShardedGrad]] = {}
        for segment in self.segments:
            if segment.params[0].parameter.grad is None:
                continue
            found = segment.gradient(ranges)
            if found is None:
                self._collected.append(segment)
            else:
                shards[id(found[0])] = weakref.ref(found[0])
                self._flat_grads.append((segment, found[1]))
        self._sharded_grads = list(shards.values())

    def _split(self, joined: Joined, state: Any) -> None:
        segments: list[FlatSegment] = []
        for segment in self.segments:
            parts = segment.split(joined)
            segments += parts
            if len(parts) > 1 and (values := self.state.pop(segment.flat, None)) is not None:
                for part, own in zip(parts, segment.split_state(values, parts), strict=True):
                    self.state[part.flat] = own
                    part.update_entries(own, state)
        if len(segments) > len(self.segments):
            self.segments = segments
            self._entries = _entries(state)


def _layout(groups: list[dict[str, Any]]) -> list[Any]:
    """The parameters of each group, and the option that limits how long its segments may be."""
    return [(group.get("eps"), list(map(id, group["params"]))) for group in groups]


def _entries(state: Any) -> list[Any]:
    """All values, to compare with later ones. Kept themselves, not by id: ids of deleted objects are used again."""
    return [value for key, entry in state.items() if isinstance(key, DTensor) for value in entry.values()]
