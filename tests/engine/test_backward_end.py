"""A backward that an exception left, reported by the destructor of what would have been called at its end."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from bed import loopback
from bed.boom import Boom, boom_in_backward
from bed.stack import Stack, assert_at_rest, loss_of, sharded
from torch import nn

from unshard import FullyShardedDataParallel
from unshard.engine import root as root_module
from unshard.engine.backward_hooks import BackwardEnd
from unshard.torch_private import queue_backward_callback, runs_split_backward


class Left:
    """A root whose units cannot be returned to rest: a rank that they wait for is gone."""

    resets = 0

    def drop_backward(self, number: int) -> None:
        self.resets += number
        raise RuntimeError("Connection closed by peer")


def test_a_failure_after_a_failure_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that left the backward is the user's; a traceback of the destructor would come before it."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    root: Any = Left()
    end = BackwardEnd(root, 1)
    del end
    assert root.resets == 1 and not told


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What is called at the end of each backward, so that it lives on where autograd drops it."""
    callbacks: list[Callable[[], None]] = []

    def queue(callback: Callable[[], None]) -> None:
        callbacks.append(callback)
        queue_backward_callback(callback)

    monkeypatch.setattr(root_module, "queue_backward_callback", queue)
    return callbacks


@pytest.mark.parametrize("front_end", ["fully_shard", "wrapper"])
def test_an_optimizer_is_built_before_a_failed_backward_is_dropped(
    front_end: str, held: list[Callable[[], None]]
) -> None:
    """It gets the sharded parameters. While a backward runs, or in another thread, nothing is brought to rest."""

    def look(*unused: object) -> None:
        assert len(list(model.parameters())) == len(before)
        thread = Thread(target=lambda: seen.append(len(list(model.parameters()))))
        thread.start()
        thread.join()

    with loopback.job(2):
        model, seen = Stack(), []
        inner = model
        if front_end == "wrapper":
            model = FullyShardedDataParallel(model, use_orig_params=True)
        else:
            sharded(model)
        before = list(model.parameters())
        hook = inner.blocks[1].register_forward_hook(boom_in_backward)
        with pytest.raises(Boom):
            loss_of(model).backward()
        hook.remove()
        assert list(map(id, model.parameters())) == list(map(id, before))
        loss = loss_of(model)
        loss.register_hook(look)
        loss.backward()
        assert seen == [len(before)] and all(each.grad is not None or not each.numel() for each in before)
        held.clear()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_failed_backward_that_is_dropped_during_the_next_step(when: str, held: list[Callable[[], None]]) -> None:
    """By another thread: of a backward on a GPU, autograd's own may be the last to hold it."""

    def drop_the_first(*unused: object) -> None:
        thread = Thread(target=held.pop, args=(0,))
        thread.start()
        thread.join()

    def drop_in_backward(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(drop_the_first)

    with loopback.job(2):
        model = sharded()
        loss_of(model).backward()
        expected = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        held.clear()
        for _ in range(2):
            hook = model.blocks[1].register_forward_hook(boom_in_backward)
            with pytest.raises(Boom):
                loss_of(model).backward()
            hook.remove()
            if when == "forward":
                hook = model.blocks[1].register_forward_pre_hook(drop_the_first)
            else:
                hook = model.blocks[1].register_forward_hook(drop_in_backward)
            model.zero_grad()
            loss_of(model).backward()
            hook.remove()
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                assert torch.equal(parameter.grad.to_local(), gradient)
            held.clear()
            assert_at_rest(model)


def test_the_search_for_split_backwards_keeps_no_locals_of_its_callers() -> None:
    importlib.import_module("torch.distributed.pipelining._backward")

    def caller() -> weakref.ref[torch.Tensor]:
        gradient = torch.ones(1)
        assert not runs_split_backward(threading.get_ident())
        return weakref.ref(gradient)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
