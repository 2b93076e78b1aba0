"""What programs and the host do between two calls of a captured step; recordings are simulated on the CPU."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.captured_steps import RATE, assert_equal
from bed.simulated_recorder import simulated_recorder
from bed.stack import WIDTH, Stack, batch, sharded
from bed.wrapped import wrap
from torch import nn

from unshard import MixedPrecisionPolicy, capture
from unshard.optim import GradScaler

# -- casts of buffers ----------------------------------------------------------------------------------------


class Shifted(nn.Module):
    """Has a buffer, and keeps the tensors that forward sees in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()
        self.blocks = self.stack.blocks
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.shift)
        return self.stack(x + self.shift)

    def casts(self) -> list[torch.Tensor]:
        """Seen since the last time, each once."""
        found = list({id(each): each for each in self.seen}.values())
        self.seen.clear()
        assert found and {each.dtype for each in found} == {torch.bfloat16}
        return found


def shifted() -> tuple[Any, Any]:
    """A model with a buffer in bfloat16, and a captured evaluation of it."""
    model: Any = sharded(Shifted(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, buffer_dtype=torch.bfloat16))

    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    return model, capture(evaluate, model, warmup=2)


@world(1, 2)
def test_a_recording_casts_buffers_itself() -> None:
    """A replay then casts what the buffer holds, and nobody else reads or frees the recording's cast."""
    with simulated_recorder() as happened:
        model, evaluate = shifted()
        evaluate(batch())
        evaluate(batch())
        (before,) = model.casts()
        evaluate(batch())
        assert happened == ["run", "run", "record", "replay"]
        recorded = model.casts()
        assert not any(each is before for each in recorded)
        with torch.no_grad():
            model(batch())
        (after,) = model.casts()
        assert not any(after is each for each in recorded)


@world(2)
def test_a_failed_recording_leaves_no_cast_of_buffers() -> None:
    """On a device it would never have been made."""
    with simulated_recorder() as happened:
        model, evaluate = shifted()
        model.stack.run = lambda block, x: block(x) if "record" not in happened else 1 // 0
        evaluate(batch())
        evaluate(batch())
        model.casts()
        with pytest.warns(UserWarning, match="ZeroDivisionError"), pytest.raises(ZeroDivisionError):
            evaluate(batch())
        recorded, afterwards = model.casts()
        assert recorded is not afterwards


@world(1, 2)
def test_buffers_that_a_replay_writes() -> None:
    """No version of the buffer counts that. What runs after the replay sees it."""
    with simulated_recorder() as happened, torch.no_grad():
        model, evaluate = shifted()
        for _ in range(3):
            evaluate(batch())
        model(batch())
        version = model.shift._version
        model.shift.data.fill_(2.0)  # as if the recorded step did
        assert model.shift._version == version
        evaluate(batch())
        assert happened[-1] == "replay"
        model.casts()
        model(batch())
        (cast,) = model.casts()
        assert torch.equal(cast, torch.full((WIDTH,), 2.0, dtype=torch.bfloat16))


# -- parameters that are given other memory ------------------------------------------------------------------


def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data / 2


def wrapped() -> Any:
    stack = Stack()
    return wrap(stack, list(stack.blocks), use_orig_params=True)


@world(2, 3, slow=(3,))
def test_other_memory_before_a_recording_that_fails() -> None:
    """The values are copied into the shards before anything is recorded: they are there if the recording fails."""
    model, reference = wrapped(), wrapped()
    fails = []

    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        if fails and happened[-1] == "record":
            raise RuntimeError("cannot be recorded")
        return model(x).sum()

    with simulated_recorder() as happened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured = capture(evaluate, model, warmup=2)
        fails.append(True)
        for _ in range(4):
            captured(batch())
        assert happened == ["run", "run", "record", "run", "run"]
        halve(model)
        halve(reference)
        happened.clear()
        found = [captured(batch()).clone() for _ in range(4)]
        assert happened == ["run", "run", "record", "run", "run"]  # with its first calls as they are
    with torch.no_grad():
        expected = reference(batch()).sum()
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("takes_over", ["the call", "a forward before it"])
@world(2, 3, slow=(3,))
def test_other_memory_and_recordings(takes_over: str) -> None:
    """The values are copied to where they were. But units make anew what gradients are reduced with, and the recording
    refers to the memory of that."""
    model, reference = wrapped(), wrapped()

    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    with simulated_recorder() as happened:
        captured = capture(evaluate, model, warmup=2)
        for _ in range(3):
            captured(batch())
        addresses = [each.data_ptr() for each in model.parameters()]
        halve(model)
        halve(reference)
        if takes_over != "the call":
            with torch.no_grad():
                model(batch())
        happened.clear()
        found = [captured(batch()).clone() for _ in range(4)]
        assert [each.data_ptr() for each in model.parameters()] == addresses
        assert happened == ["drop", "run", "run", "record", "replay", "replay"]
    with torch.no_grad():
        expected = reference(batch()).sum()
    assert all(torch.equal(each, expected) for each in found)


# -- the scaler ----------------------------------------------------------------------------------------------


@world(1, 2)
def test_gradients_that_are_unscaled_before_the_call() -> None:
    """A recording that unscales them would do it again."""
    with simulated_recorder() as happened:
        expected = unscaled_in_the_sixth_step(lambda step, *unused, **options: step, happened)
        found = unscaled_in_the_sixth_step(partial(capture, warmup=2), happened)
        assert happened.pop() == "replay"
    assert_equal(expected, found)


def unscaled_in_the_sixth_step(captured: Callable[..., Any], happened: list[str]) -> list[torch.Tensor]:
    """The parameters after eight steps in two parts each."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)

    def backward(x: torch.Tensor) -> None:
        scaler.scale(model(x).square().mean()).backward()

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    train = captured(backward, model, scaler=scaler)
    end = captured(update, model, optimizer, scaler=scaler)
    for number in range(8):
        train(batch(number))
        if number != 6:
            end()
            continue
        assert end is update or happened[-2:] == ["replay", "replay"]
        scaler.unscale_(optimizer)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            end()
        reasons = ["begins or ends between scaler.unscale_()" in str(each.message) for each in found]
        assert reasons == ([] if end is update else [True])
        assert end is update or happened[-1] == "run"
    return [each.to_local().detach().clone() for each in model.parameters()]


# -- ranks ---------------------------------------------------------------------------------------------------


@world(2, 3, 4, slow=(3, 4))
def test_a_rank_that_refuses_tells_the_others() -> None:
    """They do not wait for it, nor ask again."""
    with simulated_recorder() as happened, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = sharded()

        def step(x: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() == 0:
                random.random()
            loss = model(x).square().mean()
            loss.backward()
            model.zero_grad()
            return loss.detach()

        captured = capture(step, model, warmup=2)
        for number in range(8):
            captured(batch(number))
        assert happened == ["run"] * 8
        assert not captured._late
        reason = "draws random numbers on the host" if dist.get_rank() == 0 else "another rank cannot record it"
        assert [reason in str(each.message) for each in found] == [True]
