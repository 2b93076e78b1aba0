"""Captured steps with autocast, random state, buffers, replaced memory, and inside other captured steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from bed import world
from bed.captured_steps import accumulated, adamw, assert_equal, locals_of, loss_of, plain
from bed.stack import WIDTH, Stack, batch, sharded
from bed.wrapped import wrap
from torch import nn

from unshard import MixedPrecisionPolicy, ShardingStrategy, capture
from unshard.captured_step.recording import Recorder

CALLS = 6
SECOND = 2 * 10**9
"""About so many cycles."""


def build(is_sharded: bool) -> nn.Module:
    torch.manual_seed(5)
    model = Stack().cuda()
    return sharded(model) if is_sharded else model


def same_with_capture(run: Callable[[Callable[..., Any]], list[torch.Tensor]]) -> None:
    """Call `run` with a function that captures a step, and with one that returns it unchanged; compare."""
    expected, found = run(lambda step, *unused: step), run(capture)
    assert len(expected) > 2
    assert_equal(expected, found)


def trained(
    captured: Callable[..., Any], model: nn.Module, loss_of_batch: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """The losses of `CALLS` calls, and the parameters after them."""
    optimizer = adamw(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of_batch(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = captured(step, model, optimizer)
    losses = [train(batch(number).cuda()).clone() for number in range(CALLS)]
    if captured is capture:
        assert train.recordings == 1
    return [*losses, *locals_of(model)]


# -- transforms ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@world(1, 2, backend="nccl")
def test_forward_mode_in_a_step() -> None:
    """The loss contains a tangent and is differentiated, through casts of the parameters."""

    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = sharded(Stack().cuda(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

        def loss(x: torch.Tensor) -> torch.Tensor:
            output, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
            return output.float().square().mean() + tangent.float().square().mean()

        return trained(captured, model, loss)

    same_with_capture(run)


# -- autocast keeps casts of weights -------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["nothing", "a forward"])
@pytest.mark.parametrize("is_sharded", [False, True])
@world(1, 2, backend="nccl")
def test_one_autocast_around_several_calls(is_sharded: bool, before: str) -> None:
    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        model = build(is_sharded)
        evaluate = captured(lambda x: loss_of(model, x), model)
        losses = []
        for _ in range(3):
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                if before == "a forward":
                    losses.append(loss_of(model, batch(7).cuda()))
                losses += [evaluate(batch(number).cuda()).clone() for number in range(CALLS)]
            with torch.no_grad():
                for each in locals_of_live(model):
                    each.mul_(0.5)
        if captured is capture:
            assert evaluate.recordings == 1
        return losses

    same_with_capture(run)


def locals_of_live(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(each, "_local_tensor", each) for each in model.parameters()]


@world(2, backend="nccl")
def test_micro_batches_in_one_autocast() -> None:
    """The first one gets another shape, so that it runs eagerly while the others are replayed."""

    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        model = build(is_sharded=True)
        optimizer = adamw(model)

        step = captured(accumulated("nothing")(model, optimizer, None).captured, model, optimizer)
        losses = []
        for number in range(10):
            with torch.autocast("cuda", torch.bfloat16):
                rows = 6 if number < CALLS else number - 3
                losses.append(step(torch.ones(rows, WIDTH, device="cuda") * number, False).clone())
                losses += [step(batch(each).cuda(), each == 2).clone() for each in (1, 2)]
        if captured is capture:
            assert step.recordings == 3
        return losses + locals_of(model)

    same_with_capture(run)


# -- random state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sharded", [False, True])
@world(1, 2, backend="nccl")
def test_a_device_that_comes_late(is_sharded: bool) -> None:
    """CUDA writes the seed when a recording begins. That comes before the replay, however busy the device is.

    The seed is written late, and the replay draws its numbers later than that: without the wait between the two, it
    writes its own seed first and draws from the other.
    """
    give_back = Recorder._give_back

    def give_back_and_wait(recorder: Recorder) -> int:
        nbytes = give_back(recorder)
        with torch.cuda.stream(recorder._stream):
            torch.cuda._sleep(SECOND)
        return nbytes

    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        model = build(is_sharded)

        def loss(x: torch.Tensor) -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing():
                torch.cuda._sleep(SECOND)
            return nn.functional.dropout(model(x), 0.5).square().mean()

        return trained(captured, model, loss)

    with mock.patch.object(Recorder, "_give_back", give_back_and_wait):
        same_with_capture(run)


def seed() -> None:
    torch.cuda.manual_seed(5)


def fork() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        torch.rand(1, device="cuda")


def set_state() -> None:
    torch.cuda.set_rng_state(torch.tensor([5, *[0] * 15], dtype=torch.uint8))


@pytest.mark.parametrize("change", [seed, fork, set_state], ids=lambda each: each.__name__)
@world(1, 2, backend="nccl")
def test_a_step_that_sets_the_random_state(change: Callable[[], None]) -> None:
    """It runs eagerly, even if it sets the seed that the program has set."""

    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        model = build(is_sharded=True)
        optimizer = adamw(model)

        def step(x: torch.Tensor) -> torch.Tensor:
            change()
            x = nn.functional.dropout(x, 0.2)
            return plain(model, optimizer)(x + torch.randn_like(x))

        torch.manual_seed(5)
        train = captured(step, model, optimizer)
        losses = [train(batch(number).cuda()) for number in range(3)]
        if captured is capture:
            with pytest.warns(UserWarning, match="cannot be recorded") as found:
                losses.append(train(batch(3).cuda()))
            assert len(found) == 1
        else:
            losses.append(train(batch(3).cuda()))
        losses += [train(batch(number).cuda()) for number in range(4, 8)]
        return [*losses, torch.rand(3, device="cuda"), *locals_of(model)]

    same_with_capture(run)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


@world(1, backend="nccl")
def test_dropout_of_cudnn() -> None:
    """Its state depends on the seed and must not be rebuilt in a recording."""

    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = Recurrent().cuda()
        optimizer = adamw(model)
        step = captured(plain(model, optimizer), model, optimizer)
        losses = [step(batch(number).cuda()).clone() for number in range(8)]
        if captured is capture:
            assert step.recordings == 1
        return losses + locals_of(model)

    same_with_capture(run)


# -- buffers and parameters ----------------------------------------------------------------------------------


class Shifted(nn.Module):
    """Reads one buffer and writes another one."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()
        self.blocks = self.stack.blocks
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.mul_(0.5).add_(x.detach().mean(0))
        return self.stack(x + self.shift + self.average)


@world(1, 2, backend="nccl")
def test_buffers_in_another_dtype() -> None:
    """A replay casts what they hold, and what runs between replays sees what replays have written."""

    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        model: Any = sharded(Shifted().cuda(), mp_policy=policy)
        optimizer = adamw(model)
        step = captured(plain(model, optimizer), model, optimizer)
        results = []
        for number in range(3 * CALLS):
            results.append(step(batch(number).cuda()).clone())
            with torch.no_grad():
                if number >= CALLS and number % 3 == 0:
                    model.shift.add_(1)
                if number >= CALLS and number % 4 == 0:
                    model.load_state_dict({**model.state_dict(), "average": torch.full((WIDTH,), 0.25)})
                if number % 2:
                    results.append(loss_of(model.eval(), batch(number).cuda()))
                    model.train()
        if captured is capture:
            assert step.recordings == 1
        return [*results, model.average.clone(), *locals_of(model)]

    same_with_capture(run)


@world(1, 2, backend="nccl")
def test_other_memory_of_parameters_before_a_recording_that_fails() -> None:
    """Averaged weights are swapped in, and the step cannot be recorded."""

    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        stack = Stack().cuda()
        model = wrap(stack, list(stack.blocks), use_orig_params=True)

        @torch.no_grad()
        def step(x: torch.Tensor) -> float:
            return loss_of(model, x).item()

        evaluate = captured(step, model)
        losses = []
        for number in range(2 * CALLS):
            if number == CALLS:
                for parameter in model.parameters():
                    parameter.data = parameter.data / 2
            losses.append(torch.tensor(evaluate(batch(number).cuda())))
        return losses

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why it is not recorded
        same_with_capture(run)


def kept(kind: str) -> Any:
    """A model whose units stay unsharded after a forward."""
    if kind == "fully_shard":
        return sharded(Stack().cuda(), reshard_after_forward=False)
    stack = Stack().cuda()
    return wrap(stack, list(stack.blocks), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


@pytest.mark.parametrize("kind", ["fully_shard", "wrapper"])
@world(1, 2, 4, backend="nccl")
def test_units_that_stay_unsharded(kind: str) -> None:
    """After an evaluation. Training steps and other forwards come between its calls."""

    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        model = kept(kind)
        optimizer = adamw(model)

        @torch.no_grad()
        def evaluate(x: torch.Tensor) -> torch.Tensor:
            return loss_of(model, x)

        evaluation, train = captured(evaluate, model), captured(plain(model, optimizer), model, optimizer)
        losses = []
        for number in range(2 * CALLS):
            losses.append(evaluation(batch(number).cuda()).clone())
            if number % 3 == 2:
                losses.append(evaluate(batch(number).cuda()))
            losses.append(train(batch(number).cuda()).clone())
        if captured is capture:
            assert (evaluation.recordings, train.recordings) == (1, 1)
        return losses + locals_of(model)

    same_with_capture(run)


# -- what cannot be recorded ---------------------------------------------------------------------------------


class Ordered(Stack):
    def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return super().forward(x[order])


@world(1, 2, backend="nccl")
def test_tensors_that_the_step_makes_on_the_host() -> None:
    """The root moves them to the device. A replay would read host memory that is free by then."""

    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = sharded(Ordered().cuda())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x, torch.arange(len(x)).flip(0)).square().mean()
            loss.backward()
            model.zero_grad()
            return loss.detach()

        train = captured(step, model)
        losses = [train(batch(number).cuda()) for number in range(3)]
        if captured is capture:
            with pytest.warns(UserWarning, match="runs without a recording"):
                losses.append(train(batch(3).cuda()))
        else:
            losses.append(train(batch(3).cuda()))
        return [*losses, *(train(batch(number).cuda()) for number in range(4, 8))]

    same_with_capture(run)


@world(1, 2, backend="nccl")
def test_a_step_that_goes_on_after_the_error() -> None:
    """All-gathers that were prefetched are waited for after the recording has failed."""

    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        model = build(is_sharded=True)
        optimizer = adamw(model)

        def read_and_run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with suppress(RuntimeError):
                x.sum().item()
            return block(x)

        model.run = read_and_run
        step = captured(plain(model, optimizer), model, optimizer)
        losses = [step(batch(number).cuda()).clone() for number in range(2 * CALLS)]
        if captured is capture:
            assert not step.recordings
        return losses + locals_of(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_with_capture(run)


# -- the rest ------------------------------------------------------------------------------------------------


class Scaled(Stack):
    """The buffer is a number on the CPU, as if it was registered after `.cuda()`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


@world(1, backend="nccl")
def test_numbers_in_buffers_on_the_host() -> None:
    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = sharded(Scaled().cuda())
        model.register_buffer("factor", torch.tensor(1.0))
        optimizer = adamw(model)
        step = captured(plain(model, optimizer), model, optimizer)
        losses = []
        for number in range(8):
            if captured is capture and number == 0:
                with pytest.warns(UserWarning, match=r"buffer 'factor' is a number on cpu, .* Move it to cuda:0"):
                    losses.append(step(batch(number).cuda()).clone())
            else:
                losses.append(step(batch(number).cuda()).clone())
            model.factor.add_(1)
        return losses + locals_of(model)

    same_with_capture(run)


@world(1, 2, backend="nccl")
def test_a_captured_step_inside_another() -> None:
    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        model = build(is_sharded=True)
        optimizer = adamw(model)
        inner = captured(plain(model, optimizer), model, optimizer)
        outer = captured(lambda x: inner(x) + 1, model, optimizer)
        losses = [outer(batch(number).cuda()).clone() for number in range(10)]
        if captured is capture:
            assert outer.recordings == 1
        return losses + locals_of(model)

    same_with_capture(run)


@world(1, backend="nccl")
def test_programs_may_change_what_a_step_returns() -> None:
    def run(captured: Callable[..., Any]) -> list[torch.Tensor]:
        model = build(is_sharded=True)
        optimizer = adamw(model)
        train = plain(model, optimizer)
        step = captured(lambda x: {"loss": train(x), "list": [x.sum()]}, model, optimizer)
        losses = []
        for number in range(8):
            told = step(batch(number).cuda())
            assert len(told["list"]) == 1
            told["list"].append(None)
            told["loss"] = told["loss"].item()
            losses.append(torch.tensor(told.pop("loss")))
        if captured is capture:
            assert step.recordings == 1
        return losses + locals_of(model)

    same_with_capture(run)
