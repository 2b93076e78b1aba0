"""Requests to a store that does not answer."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import suppress

import pytest
import torch.distributed as dist

from unshard.comm.order.requests import JobStore, SilentStoreError


class Store:
    """Answers when it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def get(self, key: str) -> str:
        self.released.wait()
        return f"value of {key}"

    def check(self, keys: list[str]) -> bool:
        raise KeyError(keys[0])


def test_a_request_is_given_up_and_others_fail_at_once() -> None:
    store = JobStore(plain := Store())
    store.requests.patience = 0.1
    with pytest.raises(SilentStoreError, match="has not answered for 0 s: the process that serves it"):
        store.get("a")
    store.requests.patience = 1e6
    with pytest.raises(SilentStoreError):
        store.get("b")
    plain.released.set()
    while not store.requests._unanswered.done():
        time.sleep(0.01)
    assert store.get("c") == "value of c"
    with pytest.raises(KeyError, match="d"):
        store.check(["d"])


def test_parts_of_a_store() -> None:
    job = JobStore(dist.HashStore())
    part = job.prefixed("part")
    part.set("key", "value")
    assert part.requests is job.requests and part.get("key") == b"value"
    assert job.check(["part/key"]) and not job.check(["key"])


def test_the_thread_ends() -> None:
    before = {*threading.enumerate()}
    store = JobStore(dist.HashStore())
    store.set("key", "value")
    (thread,) = {*threading.enumerate()} - before
    del store
    thread.join(60)
    assert not thread.is_alive()


def test_an_error_keeps_no_frame() -> None:
    class Kept:
        pass

    def fail() -> weakref.ref[Kept]:
        kept = Kept()
        with suppress(KeyError):
            store.check(["a"])
        return weakref.ref(kept)

    store = JobStore(Store())
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()
