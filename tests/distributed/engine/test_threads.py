"""A model that two threads use at once: the second one gets an error, and the first one's numbers are right."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from bed import world
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded
from torch import nn

from unshard.engine.root import Root
from unshard.errors import StateError, ThreadError


class Other:
    """A thread that runs `function` until it comes to `wait`, and goes on at `finish`."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._there, self._go = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self.error = error
        self._there.set()

    def start(self) -> None:
        self._thread.start()
        assert self._there.wait(60)

    def wait(self, *unused: Any) -> None:
        if threading.current_thread() is self._thread:
            self._there.set()
            assert self._go.wait(60)

    def finish(self) -> None:
        self._go.set()
        self._thread.join(300)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("stage", ["forward", "backward"])
@world(1, 2)
def test_a_forward_while_another_thread_runs_the_model(stage: str) -> None:
    model, reference = sharded(Stack()), Stack()
    other = Other(lambda: loss_of(model).backward())
    if stage == "forward":
        model.blocks[1].register_forward_pre_hook(other.wait)
    else:
        model.blocks[1].register_full_backward_pre_hook(other.wait)
    other.start()
    for _ in range(2):
        with pytest.raises(
            ThreadError, match="Another thread is in a forward or backward of the model of Unit"
        ) as caught:
            model(batch())
        assert isinstance(caught.value, StateError)
    other.finish()
    assert other.error is None
    loss_of(reference).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)
    for each in (model, reference):  # one after the other is no error
        loss_of(each).backward()
    assert_gradients(model, reference)


@world(1)
def test_a_backward_while_another_thread_is_in_forward() -> None:
    model, reference = sharded(Stack()), Stack()
    loss = loss_of(model)
    other = Other(lambda: loss_of(model).backward())
    model.blocks[1].register_forward_pre_hook(other.wait)
    other.start()
    with pytest.raises(ThreadError):
        loss.backward()
    del loss
    other.finish()
    assert other.error is None
    loss_of(reference).backward()
    assert_gradients(model, reference)


@world(1)
def test_the_first_forward_in_two_threads() -> None:
    """One of them finds the root and the other one is refused, or both run one after the other."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)  # so that threads take turns at any place
    try:
        _run_first_forwards(60)
    finally:
        sys.setswitchinterval(interval)


@world(1)
def test_a_function_of_the_other_thread_returns_meanwhile() -> None:
    """Its frame no longer leads to the forward that it was called from."""
    model = sharded(Stack())
    other = Other(lambda: model(batch()))
    model.blocks[1].register_forward_pre_hook(other.wait)
    other.start()
    left: list[FrameType] = []
    thread = threading.Thread(target=lambda: left.append(sys._getframe()))
    thread.start()
    thread.join()
    now = sys._current_frames
    with mock.patch.object(sys, "_current_frames", side_effect=[{other._thread.ident: left[0]}, now(), now()]):
        with pytest.raises(ThreadError):
            model(batch())
    other.finish()
    assert other.error is None


@world(1)
def test_a_forward_is_over_when_all_units_are_sharded() -> None:
    marks: list[bool] = []
    reshard = Root._reshard_prefetched

    def noted(self: Root) -> None:
        marks.append(self.in_forward)
        reshard(self)

    model = sharded(Stack())
    with mock.patch.object(Root, "_reshard_prefetched", noted), torch.no_grad():
        for _ in range(2):
            model(batch())
    assert marks == [True, True]


def _run_first_forwards(times: int) -> None:
    for _ in range(times):
        model = sharded(Stack())
        barrier = threading.Barrier(2)

        def run(model: nn.Module = model, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(60)
            with torch.no_grad(), suppress(ThreadError):
                model(batch())

        others = [Other(run) for _ in range(2)]
        for each in others:
            each._thread.start()
        for each in others:
            each.finish()
            assert each.error is None
        assert_at_rest(model)


@world(1)
def test_a_forward_that_was_interrupted_in_another_thread() -> None:
    model, reference = sharded(Stack()), Stack()

    def interrupt(*unused: Any) -> None:
        raise KeyboardInterrupt

    def run() -> None:
        with suppress(KeyboardInterrupt):
            model(batch())
        other.wait()

    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    other = Other(run)
    other.start()  # it has left forward, and lives
    handle.remove()
    for each in (model, reference):
        loss_of(each).backward()
    assert_gradients(model, reference)
    other.finish()
    assert other.error is None
