"""What an optimizer steps instead of its parameters: flat tensors, in groups that shadow its parameter groups."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..engine.flat import gradient_spots
from ..engine.grad_shard import GradShard, gradient_of
from ..errors import StateError
from ..torch_private import local_of
from .entries import absorb, alike, divide, show
from .spans import Span, cut, neighbours, pieces_of, together


class Shadow:
    """The spans of an optimizer's parameters and their flat state.

    All of it follows from the parameters, where they lie, the entries of the state and the gradients. A step that finds
    these as they were takes what the last one made: it looks at each parameter, with a few comparisons, and calls torch
    once per span at most.
    """

    def __init__(self) -> None:
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.spans: list[Span] = []
        self.streamed: list[Span] = []
        """Spans of this step whose state rests on the host."""
        self._plain: list[tuple[int, torch.Tensor]] = []
        self._others: dict[Any, Any] = {}
        self._parameters: list[DTensor] = []
        self._locals: list[torch.Tensor] = []
        self._layout: list[Any] = []
        self._entries: list[Any] = []
        self._visible: Any = None
        self._gradients: list[int] | None = None
        self._shards: list[weakref.ref[GradShard]] = []
        self._fed: list[tuple[Span, torch.Tensor]] = []
        self._irregular: list[Span] = []

    def groups(self, optimizer: Any, done: Sequence[Span] = ()) -> list[dict[str, Any]]:
        """Groups for one step, with gradients on their tensors; `release` afterwards.

        Those `done` are not in them: they were stepped already. Nor are those `streamed`.
        """
        visible = optimizer.param_groups
        layout = _layout(visible)
        if not self._fits(layout, optimizer.state):
            if done:
                raise StateError(
                    "The optimizer's parameters, groups or state were changed between backward and step(), and with "
                    "ahead=True backward has stepped some of them. Make such changes after step()."
                )
            self._rebuild(visible, optimizer.state, layout)
        self._match(optimizer.state)
        if not {id(span) for span in done} <= {id(span) for span, _ in self._fed}:
            raise StateError(
                "Gradients were replaced or cleared between backward and step(), and with ahead=True backward has "
                "stepped them already. Use them as they are, or leave out ahead=True. What was stepped stays so."
            )
        self._lend_others(optimizer.state)
        shadows = [{**group, "params": []} for group in visible]
        for number, parameter in self._plain:
            shadows[number]["params"].append(parameter)
        for span, gradient in self._fed:
            span.flat.grad = gradient
        for span in self._irregular:
            span.flat.grad = span.collected_gradient()
        out = set(map(id, done))
        waiting = [span for span in self._stepped() if id(span) not in out]
        for span in waiting:
            if span.home is None:
                shadows[span.group]["params"].append(span.flat)
        self.streamed = [span for span in waiting if span.home is not None]
        return shadows

    def _stepped(self) -> list[Span]:
        """Those that have a gradient."""
        return [*(span for span, _ in self._fed), *self._irregular]

    def fed_by_shard(self) -> list[tuple[GradShard, list[tuple[Span, torch.Tensor]]]]:
        """The gradient shards of the last step, and the spans that each of them fed."""
        found = []
        for shard in (ref() for ref in self._shards):
            if shard is not None:
                storage = shard.buffer.storage.data_ptr()
                fed = [pair for pair in self._fed if pair[1].untyped_storage().data_ptr() == storage]
                found.append((shard, fed))
        return found

    def release(self, optimizer: Any, shadows: list[dict[str, Any]]) -> None:
        """Let go of the gradients, and let the optimizer show what the step did to state and groups."""
        for group, shadow in zip(optimizer.param_groups, shadows, strict=True):
            shadow["params"] = group["params"]
            group.update(shadow)
        self.show(self._stepped(), optimizer.state)
        self._return_others(optimizer.state)

    def show(self, spans: Sequence[Span], state: Any) -> None:
        """Let go of the gradients of spans that were stepped, and let `state` show what became of theirs."""
        changed = False
        for span in spans:
            span.flat.grad = None
            if span.flat in self.state:
                changed |= show(span, self.state[span.flat], state)
        if changed:
            self._entries = _entries(state)

    def _lend_others(self, state: Any) -> None:
        """Let the step see what `state` holds for plain parameters and under any other keys, and nothing older."""
        self._others = {key: value for key, value in state.items() if not isinstance(key, DTensor)}
        own = {span.flat: self.state[span.flat] for span in self.spans if span.flat in self.state}
        self.state = defaultdict(dict, {**self._others, **own})

    def _return_others(self, state: Any) -> None:
        own = {id(span.flat) for span in self.spans}
        others = {key: value for key, value in self.state.items() if id(key) not in own}
        for key in self._others.keys() - others.keys():
            del state[key]
        state.update(others)
        self._others = {}

    def fits(self, optimizer: Any) -> bool:
        """Whether an optimizer is as the last step left it, and has no state but that of parameters."""
        if not all(isinstance(key, DTensor) for key in optimizer.state):
            return False
        return self._fits(_layout(optimizer.param_groups), optimizer.state)

    def _fits(self, layout: list[Any], state: Any) -> bool:
        """Whether parameters, the places where they lie and the state are what the spans were made from."""
        if layout != self._layout or state is not self._visible:
            return False
        entries = _entries(state)
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        return all(map(is_, map(local_of, self._parameters), self._locals))

    def _rebuild(self, groups: list[dict[str, Any]], state: Any, layout: list[Any]) -> None:
        """Spans as long as layout, groups and state allow, with the state that the entries show."""
        pieces = pieces_of(groups)
        near, like = neighbours(groups), alike(state)
        self.spans = [Span(run) for run in cut(pieces, lambda a, b: near(a, b) and like(a, b))]
        self._plain = [
            (number, each)
            for number, group in enumerate(groups)
            for each in group["params"]
            if not isinstance(each, DTensor)
        ]
        self._parameters = [piece.parameter for piece in pieces]
        self._locals = [piece.local for piece in pieces]
        # One span after the other, so that there are never two copies of all state.
        self.state = defaultdict(dict)
        for span in self.spans:
            flat = absorb(span, state)
            if flat is not None:
                self.state[span.flat] = flat
                show(span, flat, state)
        self._layout, self._visible, self._entries = layout, state, _entries(state)
        self._gradients = None

    def _match(self, state: Any) -> None:
        """Find each span's flat gradient. Where only some parameters have one, the span is split for good."""
        gradients = list(map(id, map(gradient_of, self._parameters)))
        known = gradients == self._gradients and None not in [each() for each in self._shards]
        if known and not self._irregular:
            return
        self._gradients = gradients
        spots = gradient_spots()
        self._split(together(spots), state)
        self._fed, self._irregular = [], []
        shards: dict[int, weakref.ref[GradShard]] = {}
        for span in self.spans:
            if span.pieces[0].parameter.grad is None:
                continue
            found = span.gradient(spots)
            if found is None:
                self._irregular.append(span)
            else:
                shards[id(found[0])] = weakref.ref(found[0])
                self._fed.append((span, found[1]))
        self._shards = list(shards.values())

    def _split(self, joined: Callable[[Any, Any], bool], state: Any) -> None:
        spans: list[Span] = []
        for span in self.spans:
            parts = span.split(joined)
            spans += parts
            if len(parts) > 1 and (values := self.state.pop(span.flat, None)) is not None:
                for part, own in zip(parts, divide(span, values, parts), strict=True):
                    self.state[part.flat] = own
                    show(part, own, state)
        if len(spans) > len(self.spans):
            self.spans = spans
            self._entries = _entries(state)


def _layout(groups: list[dict[str, Any]]) -> list[Any]:
    """Which parameters are in which group, and what in a group decides how long its spans may be."""
    return [(group.get("eps"), list(map(id, group["params"]))) for group in groups]


def _entries(state: Any) -> list[Any]:
    """Tells whether anybody else has changed the entries. Kept, not their ids: those of dead objects are used again."""
    return [value for key, entry in state.items() if isinstance(key, DTensor) for value in entry.values()]
