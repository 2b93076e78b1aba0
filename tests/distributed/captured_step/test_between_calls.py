"""Changes by the program between two calls of a captured step; recordings are simulated on the CPU."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.captured_steps import RATE, assert_equal
from bed.simulated_recorder import simulated_recorder
from bed.stack import WIDTH, Stack, batch, sharded, units
from bed.wrapped import wrap
from torch import nn

from unshard import FullyShardedDataParallel, MixedPrecisionPolicy, capture
from unshard.captured_step.recording import Answer
from unshard.optim import GradScaler, flat

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


@world(1, 2, 3, slow=(3,))
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
@world(1, 2, 3, slow=(3,))
def test_other_memory_and_recordings(takes_over: str) -> None:
    """Units rebuild shards and reduction buffers; the recording refers to memory of both."""
    model, reference = wrapped(), wrapped()

    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    with simulated_recorder() as happened:
        captured = capture(evaluate, model, warmup=2)
        for _ in range(3):
            captured(batch())
        halve(model)
        halve(reference)
        if takes_over != "the call":
            with torch.no_grad():
                model(batch())
        happened.clear()
        found = [captured(batch()).clone() for _ in range(4)]
        assert happened == ["drop", "run", "run", "record", "replay", "replay"]
    with torch.no_grad():
        expected = reference(batch()).sum()
    assert all(torch.equal(each, expected) for each in found)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(x))


@pytest.mark.parametrize("use_orig_params", [False, True])
@world(1, 2)
def test_weights_that_are_tied_after_wrapping(use_orig_params: bool) -> None:
    """The first call comes before the root has given up what the head had."""
    results = []
    for captured in (lambda step, *unused, **options: step, capture):
        with simulated_recorder() as happened, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one rank
            model: Any = Tied()
            model.tokens = FullyShardedDataParallel(model.tokens, use_orig_params=use_orig_params)
            model.head = FullyShardedDataParallel(model.head, use_orig_params=use_orig_params)
            model.head.module.weight = model.tokens.module.weight
            model = FullyShardedDataParallel(model, use_orig_params=use_orig_params)
            optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
            step = captured(micro_batch(model, optimizer), model, optimizer, warmup=2)
            numbers = torch.arange(7).view(1, 7)
            losses = [step((numbers + number) % 7, True).clone() for number in range(6)]
            results.append([*losses, *(each.detach().clone() for each in model.parameters())])
    assert_equal(*results)
    assert happened[-1] == "replay"


# -- memory of gradients -------------------------------------------------------------------------------------


def micro_batch(model: Any, optimizer: Any) -> Any:
    def step(x: torch.Tensor, last: bool) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


@world(1, 2, 3, slow=(3,))
def test_memory_of_gradients_that_an_eager_step_left() -> None:
    """A recording does not write there, also if gradients of a micro-batch before it are not reduced yet."""
    results = []
    for captured in (lambda step, *unused, **options: step, capture):
        with simulated_recorder() as happened:
            model: Any = sharded()
            optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
            step = captured(micro_batch(model, optimizer), model, optimizer, warmup=1)
            losses = []
            for number in range(8):
                first, last = batch(number), batch(number)[: 3 if number else 6]
                model.set_requires_gradient_sync(False)
                losses.append(step(first, False).clone())
                model.set_requires_gradient_sync(True)
                losses.append(step(last, True).clone())
                if number >= 2:  # both are recorded; a forward gives memory of gradients back
                    with torch.no_grad():
                        model(batch())
            results.append([*losses, *(each.to_local().detach().clone() for each in model.parameters())])
    assert happened.count("record") == 2 and happened[-2:] == ["replay", "replay"]
    assert_equal(*results)


@world(1, 2)
def test_memory_of_gradients_after_a_recording_that_failed() -> None:
    """It is in the memory of the recording, where the zeros of its gaps were never written."""
    with simulated_recorder() as happened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
        held = []

        def step(x: torch.Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if happened[-1] == "record":
                raise RuntimeError("cannot be recorded")

        captured = capture(step, model, optimizer, warmup=1)
        run = captured._run

        def look_and_run(*args: Any) -> Any:
            groups = [group for unit in units(model) for group in unit.param_groups]
            grads = [grad for group in groups for each in group.gradients.reductions.values() for grad in each.grads]
            held.append([grad.buffer.held for grad in grads])
            return run(*args)

        captured._run = look_and_run
        captured(batch())
        captured(batch())
        assert happened == ["run", "record", "run"]
        assert held[-1] and not any(held[-1])


@world(1, 2)
def test_gradients_that_a_program_holds_and_another_step_writes() -> None:
    with simulated_recorder() as happened:
        model = sharded()
        optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)

        def part(x: torch.Tensor) -> None:
            model(x).square().mean().backward()

        def whole(x: torch.Tensor) -> None:
            part(x)
            optimizer.step()
            optimizer.zero_grad()

        captured_part = capture(part, model, warmup=1)
        captured_whole = capture(whole, model, optimizer, warmup=1)
        for _ in range(3):
            captured_part(batch())
            optimizer.zero_grad()
        for _ in range(3):
            captured_whole(batch())
        assert happened[-1] == "replay"
        captured_part(batch(1))
        kept = [parameter.grad for parameter in model.parameters()]
        values = [each.to_local().clone() for each in kept]
        optimizer.zero_grad()
        happened.clear()
        captured_whole(batch(2))
        assert happened == ["drop", "run"]
        assert all(torch.equal(each.to_local(), value) for each, value in zip(kept, values, strict=True))


@pytest.mark.parametrize("buffer", ["staging", "buffer"])
@world(2)
def test_memory_of_an_all_gather_that_found_no_more(buffer: str) -> None:
    """The program goes on after the error, with a call that is recorded."""
    with simulated_recorder() as happened:
        model: Any = sharded()
        step = capture(lambda x: model(x).square().mean().backward(), model, warmup=1)
        step(batch())
        model.zero_grad()
        (group,) = units(model)[1].param_groups
        plan = group._unsharded.plan
        take = getattr(plan, buffer).take

        def take_and_fail() -> None:
            take()
            raise torch.OutOfMemoryError("no more memory")

        with patch.object(getattr(plan, buffer), "take", take_and_fail), pytest.raises(torch.OutOfMemoryError):
            model(batch())
        step(batch())
        assert happened == ["run", "record", "replay"]


# -- modules that become units -------------------------------------------------------------------------------


@world(2)
def test_modules_that_are_wrapped_later() -> None:
    """The parameters are the same objects, and the units are found."""
    with simulated_recorder():
        model = Stack()
        captured = capture(lambda x: model(x).square().mean().backward(), model, warmup=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            captured(batch())
            model.zero_grad()
            before = list(model.parameters())
            model.blocks[0] = FullyShardedDataParallel(model.blocks[0], use_orig_params=True)
            assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
            captured(batch())
        assert len(captured._trained.units) == 1


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


def trains_in_parts(captured: Callable[..., Any]) -> None:
    """Unscales in the captured step and updates outside of it; the optimizer is not passed."""
    model, scaler = sharded(), GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)

    def backward(x: torch.Tensor) -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)

    step = captured(backward, model, scaler=scaler)
    for number in range(5):
        step(batch(number))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def trains_two(captured: Callable[..., Any]) -> None:
    """The captured step updates the scale for another optimizer as well."""
    first, second, scaler = sharded(), sharded(), GradScaler("cpu", init_scale=8.0)
    optimizers = [torch.optim.AdamW(each.parameters(), RATE, fused=True) for each in (first, second)]

    def update_second(x: torch.Tensor) -> None:
        scaler.scale(second(x).square().mean()).backward()
        scaler.step(optimizers[1])
        scaler.update()
        optimizers[1].zero_grad()

    step = captured(update_second, second, optimizers[1], scaler=scaler)
    for number in range(5):
        scaler.scale(first(batch(number)).square().mean()).backward()
        scaler.step(optimizers[0])
        optimizers[0].zero_grad()
        step(batch(number))


def trains_behind(captured: Callable[..., Any]) -> None:
    """Each call ends what the one before has begun."""
    model, scaler = sharded(), GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)

    def begin(x: torch.Tensor) -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)

    def end_and_begin(x: torch.Tensor) -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        begin(x)

    begin(batch())
    step = captured(end_and_begin, model, optimizer, scaler=scaler)
    for number in range(5):
        step(batch(number))


@pytest.mark.parametrize("train", [trains_in_parts, trains_two, trains_behind], ids=lambda each: each.__name__)
@world(2)
def test_parts_of_what_a_scaler_does(train: Callable[[Any], None]) -> None:
    """The host knows how far the scaler is, and what it found. A replay does not follow that."""
    with simulated_recorder() as happened:
        with pytest.warns(UserWarning, match=r"begins or ends between scaler.unscale_\(\) and scaler.update\(\)"):
            train(partial(capture, warmup=1))
        assert set(happened) == {"run"}


@world(1, 2)
def test_a_scaler_that_was_given_up() -> None:
    """It has skipped the first step. Later ones do without it, and are recorded."""
    with simulated_recorder() as happened:
        model, scaler = sharded(), GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
        scaler.scale(model(batch() * float("inf")).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert not optimizer.state
        step = capture(lambda x: micro_batch(model, optimizer)(x, True), model, optimizer, warmup=2)
        for number in range(5):
            step(batch(number))
        assert happened.count("record") == 1


# -- optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 2, 5])
@world(1, 2)
def test_state_that_is_loaded_into_flat_optimizers(when: int) -> None:
    """It is made flat before the call, which then replaces nothing."""
    with simulated_recorder() as happened:
        model = sharded()
        optimizer = flat(torch.optim.AdamW(model.parameters(), RATE, fused=True))
        micro_batch(model, optimizer)(batch(), True)
        state = copy.deepcopy(optimizer.state_dict())
        if not when:
            optimizer = flat(torch.optim.AdamW(model.parameters(), RATE, fused=True))
        step = capture(micro_batch(model, optimizer), model, optimizer, warmup=2)
        for number in range(10):
            if number == when:
                optimizer.load_state_dict(copy.deepcopy(state))
            step(batch(number), True)  # a warning would be an error
        assert happened.count("record") == (2 if when == 5 else 1)


class Counted(torch.optim.SGD):
    """Keeps a counter in a tensor of its own."""

    def __init__(self, parameters: Any, replaces: bool) -> None:
        super().__init__(parameters, RATE)
        self.count, self.replaces = torch.zeros(()), replaces

    def step(self, closure: Any = None) -> Any:
        if self.replaces:
            self.count = self.count + 1
        else:
            self.count.add_(1)
        return super().step(closure)


@pytest.mark.parametrize("replaces", [False, True])
@world(1, 2)
def test_tensors_that_are_attributes_of_optimizers(replaces: bool) -> None:
    with simulated_recorder() as happened, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = sharded()
        optimizer = Counted(model.parameters(), replaces)
        step = capture(micro_batch(model, optimizer), model, optimizer, warmup=2)
        for number in range(5):
            step(batch(number), True)
        assert ("record" in happened) == (not replaces)
        assert any("a tensor of an optimizer" in str(each.message) for each in found) == replaces
        assert not replaces or optimizer.count == 5


# -- ranks ---------------------------------------------------------------------------------------------------


@world(2, 3, 4, slow=(3, 4))
def test_a_rank_that_refuses_tells_the_others() -> None:
    """They do not wait for it, and at last do not ask again."""
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
        for number in range(12):
            captured(batch(number))
        assert happened == ["run"] * 12
        assert not captured._answers[Answer.LATE] and captured._refused
        told = "3 times another rank could not record a call"
        reason = "draws random numbers on the host" if dist.get_rank() == 0 else told
        assert [reason in str(each.message) for each in found] == [True]


@world(2, 3, slow=(3,))
def test_a_rank_that_refuses_another_signature() -> None:
    """The others record theirs later: when that rank has one that can be recorded."""
    with simulated_recorder() as happened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = sharded()

        def step(x: torch.Tensor) -> None:
            if len(x) == 3:
                random.random()
            model(x).square().mean().backward()
            model.zero_grad()

        captured = capture(step, model, warmup=4)
        for number in range(20):
            refused = dist.get_rank() == 0 and number in (1, 5)
            captured(batch(number)[: 3 if refused else 6])
        assert happened.count("record") == 1 and happened[-1] == "replay"


@world(2)
def test_a_scaler_that_skips_first_and_tensors_in_the_state() -> None:
    """Some optimizers have tensors there that belong to no parameter."""
    with simulated_recorder() as happened:
        model, scaler = sharded(), GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
        optimizer.state["shared"] = torch.zeros(3)

        def step(x: torch.Tensor) -> None:
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        captured = capture(step, model, optimizer, scaler=scaler, warmup=2)
        captured(batch() * float("inf"))
        for number in range(5):
            captured(batch(number))
        assert happened.count("record") == 1
