"""Steps of spans whose state rests on the host: it comes to the device for its step and returns, load by load.

    up lane     | load 0 | load 1 | load 2 | load 3 |
    computation          | step 0 | step 1 | step 2 | step 3 |
    down lane                     | load 0 | load 1 | load 2 | load 3 |

So the device holds the state of three loads at most. The optimizer's own code steps each load by itself, in groups that
hold nothing else.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch

from ..engine.lane import Lanes, Mark
from .spans import Span

SMALL = 16 * 2**20
"""Spans that have no more bytes than this together are one load: a call of the optimizer takes as long as its copy."""

Groups = list[dict[str, Any]]


class Load:
    """Spans that are stepped together. The truth is on the host, in `state`, but for the time of their step."""

    def __init__(self, spans: Sequence[Span], state: MutableMapping[Any, Any]):
        self.spans = spans
        self.lanes = _lanes_of(spans[0])
        self._state = state
        self._lent: defaultdict[Any, Any] | None = None
        self._marks: list[Mark] = []

    def fetch(self) -> None:
        """Start to bring its state to the device. Counters stay what they are."""
        self._lent = defaultdict(dict)
        rooms: list[torch.Tensor] = []
        resting: list[torch.Tensor] = []
        for span in self.spans:
            if span.flat in self._state:
                own = self._lent[span.flat] = dict(self._state[span.flat])
                for key, value in own.items():
                    if span.matches(value):
                        own[key] = _room(value, span.flat.device)
                        rooms.append(own[key])
                        resting.append(value)
        if rooms:
            self._marks.append(self.lanes.up.carry(rooms, resting))

    def lend(self, groups: Groups, others: dict[Any, Any]) -> tuple[Groups, defaultdict[Any, Any]]:
        """Groups and state for its step."""
        self._wait()
        assert self._lent is not None
        self._lent.update(others)
        for span in self.spans:
            groups[span.group]["params"].append(span.flat)
        return groups, self._lent

    def send(self) -> None:
        """Start to bring home what the step left: the state it was lent, changed, or tensors that it made."""
        assert self._lent is not None
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for span in self.spans:
            if span.flat in self._lent:
                before = self._state.get(span.flat, {})
                after = dict(self._lent[span.flat])
                for key, value in after.items():
                    if span.matches(value):
                        after[key] = _home(span, before.get(key), value.dtype)
                        targets.append(after[key])
                        sources.append(value)
                self._state[span.flat] = after
        if targets:
            self._marks.append(self.lanes.down.carry(targets, sources))

    def leave(self) -> None:
        """Give the device's memory back, which is the computation's: not before the lanes have read and written it."""
        self._wait()
        self._lent = None

    def _wait(self) -> None:
        for mark in self._marks:
            mark.wait()
        self._marks.clear()


class Stream:
    """One step of an optimizer, as far as it is about spans whose state rests on the host."""

    def __init__(self, spans: Sequence[Span], state: MutableMapping[Any, Any], groups: Groups):
        """`state` also has what optimizers keep under other keys than parameters; `groups` are the visible ones."""
        self._loads = [Load(each, state) for each in _loads(spans)]
        # Each call finds these as they are now. One that counts its steps in them must count this one once.
        self._options: Groups = []
        self._others: dict[Any, Any] = {}
        if self._loads:
            self._options = [_copied({**group, "params": []}) for group in groups]
            self._others = _copied({key: each for key, each in state.items() if not isinstance(key, torch.Tensor)})
            self._loads[0].fetch()
        self._stepping: Load | None = None

    def lend(self) -> Iterator[tuple[Groups, defaultdict[Any, Any]]]:
        """Groups and state for one call of the optimizer's step after the other. `close` afterwards."""
        for number, load in enumerate(self._loads):
            if number + 1 < len(self._loads):
                self._loads[number + 1].fetch()
            lent = load.lend([_copied(group) for group in self._options], _copied(self._others))
            self._stepping = load
            yield lent
            self._send()
            if number:
                self._loads[number - 1].leave()

    def _send(self) -> None:
        load, self._stepping = self._stepping, None
        if load is not None:
            load.send()

    def close(self) -> None:
        """All state is home, also if a step has raised."""
        self._send()
        for load in self._loads:
            load.leave()
        for lanes in {load.lanes for load in self._loads}:
            lanes.down.synchronize()  # the host reads and writes state next


def _lanes_of(span: Span) -> Lanes:
    assert span.home is not None and span.home.lanes is not None
    return span.home.lanes


def _loads(spans: Sequence[Span]) -> list[list[Span]]:
    found: list[list[Span]] = []
    room = 0
    for span in spans:
        room -= span.flat.nbytes
        if found and room >= 0 and _lanes_of(found[-1][-1]) == _lanes_of(span):
            found[-1].append(span)
        else:
            found.append([span])
            room = SMALL - span.flat.nbytes
    return found


def _room(resting: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory of the computation, which a lane may write once the computation has come to here."""
    return torch.empty_like(resting, device=device)


def _home(span: Span, before: Any, dtype: torch.dtype) -> torch.Tensor:
    """Where a state rests: where it came from, or memory that is new."""
    return before if span.matches(before) and before.dtype == dtype else span.new_state(dtype)


def _copied(values: dict[Any, Any]) -> dict[Any, Any]:
    """With values of its own, where they can be changed in place."""
    kinds = (torch.Tensor, list, dict, set)
    return {key: copy.deepcopy(value) if isinstance(value, kinds) else value for key, value in values.items()}
