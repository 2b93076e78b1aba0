"""The optimizer groups that a flat optimizer steps: flat spans in place of parameters."""

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
from .flat_spans import FlatSpan, Joined, adjacent, adjacent_gradients, params_in_memory_order, runs_of

FlatGrads = list[tuple[FlatSpan, torch.Tensor]]
"""Spans with their flat gradients, which are views of sharded gradients."""


class FlatGroups:
    """The spans of an optimizer's parameters and their flat state.

    They depend on the parameters and their memory, the optimizer's state and the gradients. If none of these changed, a
    step reuses the spans of the previous one: a few comparisons per parameter, at most one torch call per span.
    """

    def __init__(self) -> None:
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.spans: list[FlatSpan] = []
        self.streamed: list[FlatSpan] = []
        """Spans of this step whose state is on the host."""
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
        self._collected: list[FlatSpan] = []
        """Spans whose gradients are copied into a flat one at each step."""

    def begin_step(self, optimizer: Any, done: Sequence[FlatSpan] = ()) -> list[dict[str, Any]]:
        """Optimizer groups for one step, with gradients on their tensors; call `end_step` afterwards.

        Spans in `done` were stepped in backward. They are not in the groups, and neither are those in `streamed`.
        """
        if not self._is_current(optimizer):
            if done:
                raise StateError(
                    "The optimizer's parameters, groups or state were changed between backward and step(). With "
                    "step_in_backward=True, backward has already stepped some of them. Make such changes after step()."
                )
            self._rebuild(optimizer)
        self._find_gradients(optimizer.state)
        skipped = set(map(id, done))
        if not skipped <= {id(span) for span, _ in self._flat_grads}:
            raise StateError(
                "Gradients were replaced or cleared between backward and step(). With step_in_backward=True, backward "
                "has already stepped them, and these steps are kept. Leave gradients unchanged, or leave out "
                "step_in_backward=True."
            )
        self._take_other_state(optimizer.state)
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        for number, parameter in self._plain:
            groups[number]["params"].append(parameter)
        for span, gradient in self._flat_grads:
            span.flat.grad = gradient
        for span in self._collected:
            span.flat.grad = span.collected_gradient()
        stepped = [span for span in self._with_gradient() if id(span) not in skipped]
        self.streamed = [span for span in stepped if span.state_offload is not None]
        for span in stepped:
            if span.state_offload is None:
                groups[span.group]["params"].append(span.flat)
        return groups

    def follow_changes(self, optimizer: Any) -> None:
        """Rebuild spans and flat state if parameters, groups or state changed since the last step."""
        if not self._is_current(optimizer):
            self._rebuild(optimizer)

    def end_step(self, optimizer: Any, groups: list[dict[str, Any]]) -> None:
        """Drop the gradients, and copy the step's changes to state and groups into those of the optimizer."""
        for param_group, group in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = param_group["params"]
            param_group.update(group)
        self.update_entries(self._with_gradient(), optimizer.state)
        self._return_other_state(optimizer.state)

    def update_entries(self, spans: Sequence[FlatSpan], state: Any) -> None:
        """Drop the gradients of spans that were stepped, and make `state` agree with their flat state."""
        changed = False
        for span in spans:
            span.flat.grad = None
            if span.flat in self.state:
                changed |= span.update_entries(self.state[span.flat], state)
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
        """Return True if nothing changed since the last step, and only sharded parameters have state."""
        return all(isinstance(key, DTensor) for key in optimizer.state) and self._is_current(optimizer)

    def _with_gradient(self) -> list[FlatSpan]:
        return [*(span for span, _ in self._flat_grads), *self._collected]

    def _take_other_state(self, state: Any) -> None:
        """Show the step the present state of plain parameters and under any other keys."""
        self._other_state = {key: value for key, value in state.items() if not isinstance(key, DTensor)}
        own = {span.flat: self.state[span.flat] for span in self.spans if span.flat in self.state}
        self.state = defaultdict(dict, {**self._other_state, **own})

    def _return_other_state(self, state: Any) -> None:
        own = {id(span.flat) for span in self.spans}
        others = {key: value for key, value in self.state.items() if id(key) not in own}
        for key in self._other_state.keys() - others.keys():
            del state[key]
        state.update(others)
        self._other_state = {}

    def _is_current(self, optimizer: Any) -> bool:
        """Return True if the spans were made from these parameters, their present memory and this state."""
        if _layout(optimizer.param_groups) != self._layout or optimizer.state is not self._optimizer_state:
            return False
        entries = _entries(optimizer.state)
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        return all(map(is_, map(local_of, self._parameters), self._locals))

    def _rebuild(self, optimizer: Any) -> None:
        """Make spans as long as memory, groups and state allow, with the state in the entries."""
        groups, state = optimizer.param_groups, optimizer.state
        params = params_in_memory_order(groups)
        self.spans = [FlatSpan(run) for run in runs_of(params, adjacent(groups, state))]
        numbered = [(number, each) for number, group in enumerate(groups) for each in group["params"]]
        self._plain = [(number, each) for number, each in numbered if not isinstance(each, DTensor)]
        self._parameters = [each.parameter for each in params]
        self._locals = [each.local for each in params]
        # One span after the other, so that there are never two copies of all state.
        self.state = defaultdict(dict)
        for span in self.spans:
            flat = span.flat_state(state)
            if flat is not None:
                self.state[span.flat] = flat
                span.update_entries(flat, state)
        self._layout, self._optimizer_state, self._entries = _layout(groups), state, _entries(state)
        self._gradients = None

    def _find_gradients(self, state: Any) -> None:
        """Find each span's flat gradient. A span of which only some parameters have gradients is split for good."""
        gradients = list(map(id, map(gradient_of, self._parameters)))
        known = gradients == self._gradients and None not in [each() for each in self._sharded_grads]
        if known and not self._collected:
            return
        self._gradients = gradients
        ranges = grad_ranges(self._parameters)
        self._split(adjacent_gradients(ranges), state)
        self._flat_grads, self._collected = [], []
        shards: dict[int, weakref.ref[ShardedGrad]] = {}
        for span in self.spans:
            if span.params[0].parameter.grad is None:
                continue
            found = span.gradient(ranges)
            if found is None:
                self._collected.append(span)
            else:
                shards[id(found[0])] = weakref.ref(found[0])
                self._flat_grads.append((span, found[1]))
        self._sharded_grads = list(shards.values())

    def _split(self, joined: Joined, state: Any) -> None:
        spans: list[FlatSpan] = []
        for span in self.spans:
            runs = runs_of(span.params, joined)
            parts = [span] if len(runs) == 1 else [FlatSpan(run) for run in runs]
            spans += parts
            if len(parts) > 1 and (values := self.state.pop(span.flat, None)) is not None:
                for part in parts:
                    own = self.state[part.flat] = span.state_of_part(values, part)
                    part.update_entries(own, state)
        if len(spans) > len(self.spans):
            self.spans = spans
            self._entries = _entries(state)


def _layout(groups: list[dict[str, Any]]) -> list[Any]:
    """The parameters of each group, and the option that limits how long its spans may be."""
    return [(group.get("eps"), list(map(id, group["params"]))) for group in groups]


def _entries(state: Any) -> list[Any]:
    """All values, to compare with later ones. The values themselves: ids of deleted objects are used again."""
    return [value for key, entry in state.items() if isinstance(key, DTensor) for value in entry.values()]
