"""Sends requests to the job's store, and stops waiting for an answer after some time.

Most requests of torch's `TCPStore` have no timeout. If the host of the store loses its network or its power, a request
blocks for a quarter of an hour; if the process that serves the store is stopped, forever. A rank that waits for a
collective makes requests, and must raise an error when the collective times out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent import futures
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist


class SilentStoreError(RuntimeError):
    """The job's store has not answered a request in time."""


class JobStore:
    """A store with the methods of torch's. `store` is torch's, for code that needs one and may wait."""

    def __init__(self, store: Any, requests: Requests | None = None):
        self.store, self.requests = store, requests or Requests()

    def prefixed(self, prefix: str) -> JobStore:
        return JobStore(dist.PrefixStore(prefix, self.store), self.requests)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.store, name)
        return lambda *arguments: self.requests.send(method, arguments)


class Requests:
    """Sends the requests of all threads of this process, one at a time, as the connection does.

    `patience` is how many seconds a thread waits. While a request has been unanswered for longer, further requests fail
    at once.
    """

    def __init__(self) -> None:
        self.patience: float | None = None
        self._unanswered: futures.Future[Any] | None = None
        self._queue: SimpleQueue[tuple[futures.Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        # A daemon, because a request may never end. Otherwise, the thread ends with this object.
        Thread(target=_send_all, args=(self._queue,), name="unshard requests", daemon=True).start()
        weakref.finalize(self, self._queue.put, None).atexit = False  # the end of the program is announced later

    def send(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if self._unanswered is None or self._unanswered.done():
            answer: futures.Future[Any] = futures.Future()
            self._queue.put((answer, method, arguments))
            try:
                return answer.result(self.patience)
            except futures.TimeoutError:
                self._unanswered = answer
            finally:
                del answer  # it holds the error, and the error's traceback this frame
        raise SilentStoreError(
            f"The job's store has not answered for {self.patience:.0f} s: the process that serves it, rank 0 or the "
            "launcher, has ended, is stopped, or cannot be reached. End the job on all ranks."
        )


def _send_all(queue: SimpleQueue[Any]) -> None:
    while _send_one(queue):
        pass


def _send_one(queue: SimpleQueue[Any]) -> bool:
    request = queue.get()
    if request is not None:
        answer, method, arguments = request
        try:
            answer.set_result(method(*arguments))
        except Exception as error:
            answer.set_exception(error)
        del answer, request  # for the same reason
        return True
    return False
