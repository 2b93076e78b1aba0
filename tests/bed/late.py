"""Side streams to a host that is this very host. What is queued in them happens at the last moment allowed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from unshard.engine.params import offload as offload
from unshard.engine.params.buffers import Buffer
from unshard.engine.side_stream import CopyStreams
from unshard.torch_private import storage_use_count

Step = Callable[[], object]


class LateStream:
    """Runs what it was given when the computation waits for it, and lets the host see copies when the host waits.

    `forgets`: the kind of wait that it takes no notice of, as if the engine had left it out. `to_host`: it leads to the
    host. `prompt`: what may happen at any time happens at once. Memory that a copy reads after everybody else has let
    go of it is full of NaN: it could be anybody's by then.
    """

    def __init__(self, forgets: str = "", to_host: bool = False, prompt: bool = False) -> None:
        self.forgets = forgets
        self.to_host = to_host
        self.prompt = prompt
        self._lock = threading.RLock()  # optimizers wait for gradients in a thread of their own
        self.steps: list[Step] = []
        self.seen_by_host: list[Step] = []

    def queue(self, do: Step, first: Step | None = None) -> LateEvent:
        if first is not None and self.prompt:
            self.synchronize()  # it is in order all the same
            first()
            first = None
        self.steps += [do] if first is None else [first, do]
        return LateEvent(self, self.steps[-1])

    def copy(self, targets: list[Tensor], sources: list[Tensor]) -> LateEvent:
        sources = [each.detach() for each in sources]  # other tensors, which show whether theirs are still there

        def read() -> None:
            values = [each * torch.nan if _alone(each) else each.clone() for each in sources]
            if self.to_host:
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


class LateEvent:
    def __init__(self, stream: LateStream, last: Step) -> None:
        self._copy_stream, self._last = stream, last

    def wait(self) -> None:
        self._copy_stream.wait_for(self._last)

    def synchronize(self) -> None:
        self._copy_stream.synchronize()


@contextmanager
def late_host(up: str = "", down: str = "", prompt: bool = False) -> Iterator[CopyStreams]:
    """Inside, shards on the host are reached through such streams, on a CPU too, and new memory is full of NaN."""
    copy_streams = CopyStreams(LateStream(up, prompt=prompt), LateStream(down, to_host=True))  # type: ignore[arg-type]
    with (
        mock.patch.object(offload, "copy_streams_of", lambda device: copy_streams),
        mock.patch.object(Buffer, "take", _take_and_poison(Buffer.take)),
    ):
        yield copy_streams


def _alone(tensor: Tensor) -> bool:
    other = torch.empty(1)
    return storage_use_count(tensor.untyped_storage()) <= storage_use_count(other.untyped_storage())


def _take_and_poison(take: Callable[[Buffer], None]) -> Callable[[Buffer], None]:
    def poisoned(self: Buffer) -> None:
        held = self.held
        take(self)
        if not held:
            torch.empty(0, dtype=torch.uint8).set_(self.storage).fill_(255)

    return poisoned
