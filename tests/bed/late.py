"""Lanes to a host that is this very host. What is queued in them happens at the last moment allowed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from unshard.engine import residence
from unshard.engine.buffers import Buffer
from unshard.engine.lane import Lanes
from unshard.torch_private import storage_uses

Step = Callable[[], object]


class LateLane:
    """Runs what it was given when the computation waits for it, and lets the host see copies when the host waits.

    `forgets`: the kind of wait that it takes no notice of, as if the engine had left it out. `home`: it leads to the
    host. `prompt`: what may happen at any time happens at once. Memory that a copy reads after everybody else has let
    go of it is full of NaN: it could be anybody's by then.
    """

    def __init__(self, forgets: str = "", home: bool = False, prompt: bool = False) -> None:
        self.forgets = forgets
        self.home = home
        self.prompt = prompt
        self._lock = threading.RLock()  # optimizers wait for gradients in a thread of their own
        self.steps: list[Step] = []
        self.seen_by_host: list[Step] = []

    def queue(self, do: Step, first: Step | None = None) -> LateMark:
        if first is not None and self.prompt:
            self.synchronize()  # it is in order all the same
            first()
            first = None
        self.steps += [do] if first is None else [first, do]
        return LateMark(self, self.steps[-1])

    def carry(self, targets: list[Tensor], sources: list[Tensor]) -> LateMark:
        sources = [each.detach() for each in sources]  # other tensors, which can tell whether theirs are still there

        def read() -> None:
            values = [each * torch.nan if _alone(each) else each.clone() for each in sources]
            if self.home:
                self.seen_by_host.append(lambda: torch._foreach_copy_(targets, values))
            else:
                torch._foreach_copy_(targets, values)

        return self.queue(read)

    def wait_for(self, last: Step) -> None:
        with self._lock:
            while last in self.steps:
                step = self.steps.pop(0)
                if self.forgets != "wait":  # run later, it would touch memory that is not there any more
                    step()

    def synchronize(self) -> None:
        if self.forgets != "synchronize":
            with self._lock:
                while self.steps:
                    self.steps.pop(0)()
                while self.seen_by_host:
                    self.seen_by_host.pop(0)()


class LateMark:
    def __init__(self, lane: LateLane, last: Step) -> None:
        self._lane, self._last = lane, last

    def wait(self) -> None:
        self._lane.wait_for(self._last)

    def synchronize(self) -> None:
        self._lane.synchronize()


@contextmanager
def late_host(up: str = "", down: str = "", prompt: bool = False) -> Iterator[Lanes]:
    """Inside, shards on the host are reached through such lanes, on a CPU too, and new memory is full of NaN."""
    lanes = Lanes(LateLane(up, prompt=prompt), LateLane(down, home=True))  # type: ignore[arg-type]
    with (
        mock.patch.object(residence, "lanes_of", lambda device: lanes),
        mock.patch.object(Buffer, "take", _take_and_poison(Buffer.take)),
    ):
        yield lanes


def _alone(tensor: Tensor) -> bool:
    other = torch.empty(1)
    return storage_uses(tensor.untyped_storage()) <= storage_uses(other.untyped_storage())


def _take_and_poison(take: Callable[[Buffer], None]) -> Callable[[Buffer], None]:
    def poisoned(self: Buffer) -> None:
        held = self.held
        take(self)
        if not held:
            torch.empty(0, dtype=torch.uint8).set_(self.storage).fill_(255)

    return poisoned
