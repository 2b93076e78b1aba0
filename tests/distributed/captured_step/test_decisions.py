"""When a captured step is run, recorded, replayed and dropped; recordings are simulated on the CPU."""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.captured_steps import RATE, assert_equal
from bed.simulated_recorder import SimulatedRecorder, simulated_recorder
from bed.stack import WIDTH, Stack, assert_at_rest, batch, sharded
from bed.wrapped import wrap
from torch import nn

from unshard import ModuleWrapPolicy, capture, composable
from unshard.captured_step import recording
from unshard.captured_step import step as captured_steps
from unshard.captured_step.recording import Agreement, Answer
from unshard.errors import ArgumentError
from unshard.optim import GradScaler


class Training:
    """A model, its optimizer and its step; `extra` runs in the step before forward."""

    def __init__(
        self,
        captured: bool = True,
        model: Any = None,
        extra: Callable[[torch.Tensor], Any] = lambda x: None,
        **options: Any,
    ):
        self.model = sharded() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, fused=True)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.extra = extra
        self.step: Any = self.once
        if captured:
            self.step = capture(self.once, self.model, self.optimizer, **{"warmup": 2} | options)

    def once(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.extra(x)
        loss = scale * self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, count: int, first: int = 0) -> list[torch.Tensor]:
        """Losses of `count` steps."""
        return [self.step(batch(10 * (first + number) + dist.get_rank())).clone() for number in range(count)]

    def values(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in self.model.parameters()]


def compare(between: Callable[[Training], Any], expected: str) -> None:
    """Six steps, `between`, six steps: the same with and without capture. `expected`: what happens in the last six."""
    results = []
    for captured in (False, True):
        with simulated_recorder() as happened:
            training = Training(captured)
            losses = training.run(6)
            between(training)
            happened.clear()
            losses += training.run(6, first=6)
        values = [each.to_local() for each in training.values()]
        results.append([*losses, *values])
    assert_equal(*results)
    assert " ".join(happened) == expected


REPLAYS = " ".join(["replay"] * 6)
ANEW = "drop run run record replay replay replay replay"
"""After a change the recording is dropped, and the step is recorded again."""


def set_rate(training: Training) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] = 2.0**-5


def schedule(training: Training) -> None:
    training.scheduler.step()
    training.scheduler.step()


def load_model(training: Training) -> None:
    training.model.load_state_dict({name: value / 2 for name, value in training.model.state_dict().items()})


def load_optimizer(training: Training) -> None:
    state = copy.deepcopy(training.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"].mul_(2)
    training.optimizer.load_state_dict(state)


def evaluate(training: Training) -> None:
    training.model.eval()
    with torch.no_grad():
        training.model(batch(1))
    training.model.train()


def keep_unsharded(training: Training) -> None:
    training.model.unshard()


def average(training: Training) -> None:
    training.average = copy.deepcopy([each.detach() for each in training.model.parameters()])


def decay(training: Training) -> None:
    for group in training.optimizer.param_groups:
        group["weight_decay"] = 0.25


def add_hook(training: Training) -> None:
    training.model.blocks[0].register_forward_hook(lambda module, args, output: 2 * output)


def hook_parameter(training: Training) -> None:
    training.model.head.weight.register_post_accumulate_grad_hook(lambda each: each.grad.mul_(2))


def hook_optimizer(training: Training) -> None:
    training.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)


def move_state(training: Training) -> None:
    for entry in training.optimizer.state.values():
        entry["step"].data = entry["step"].data.clone()


def freeze(training: Training) -> None:
    training.model.head.weight.requires_grad_(False)


def divide(training: Training) -> None:
    training.model.set_gradient_divide_factor(5.0)


@pytest.mark.parametrize(
    "between", [set_rate, schedule, load_model, evaluate, keep_unsharded, average], ids=lambda each: each.__name__
)
@world(1, 2, 3, slow=(1, 3))
def test_changes_that_reach_a_replay(between: Callable[[Training], Any]) -> None:
    compare(between, REPLAYS)


@pytest.mark.parametrize(
    "between", [load_optimizer, add_hook, hook_parameter, hook_optimizer, move_state], ids=lambda each: each.__name__
)
@world(1, 2, 3, slow=(1, 3))
def test_changes_that_drop_recordings(between: Callable[[Training], Any]) -> None:
    compare(between, ANEW)


@pytest.mark.parametrize("between", [decay, freeze, divide], ids=lambda each: each.__name__)
@world(1, 2, 3, slow=(1, 3))
def test_changes_of_the_signature(between: Callable[[Training], Any]) -> None:
    """The recording stays: the program may go back."""
    compare(between, ANEW.removeprefix("drop "))


@world(2)
def test_a_batch_of_another_shape_in_the_middle() -> None:
    with simulated_recorder() as happened:
        training, reference = Training(), Training(captured=False)
        for shape in (6, 6, 6, 6, 4, 6, 4, 6):
            x = torch.randn(shape, WIDTH)
            assert torch.equal(training.step(x), reference.step(x))
        assert " ".join(happened) == "run run record replay replay run replay run replay"
        assert training.step.recordings == 1


@world(2)
def test_other_arguments_are_part_of_the_signature() -> None:
    with simulated_recorder() as happened:
        training, reference = Training(), Training(captured=False)
        for number in range(12):
            scale = 2.0 if number % 2 else 1.0
            assert torch.equal(training.step(batch(), scale=scale), reference.step(batch(), scale=scale))
        assert happened.count("record") == 2 and happened.count("replay") == 8


@world(1, 2, slow=(2,))
def test_the_number_of_recordings_is_bounded() -> None:
    with simulated_recorder() as happened, patch.object(captured_steps, "UNUSED_CALLS", 6):
        training = Training(max_graphs=4)
        for shape in range(1, 51):
            for _ in range(4):
                training.step(torch.ones(shape, WIDTH))
            assert training.step.recordings <= 4
        assert happened.count("record") - happened.count("drop") == training.step.recordings == 4
        assert happened.count("record") > 30


@world(2)
def test_recordings_that_are_in_use_stay() -> None:
    with simulated_recorder() as happened:
        training = Training(max_graphs=1)
        with pytest.warns(UserWarning, match=r"1 other signatures are recorded and in use \(max_graphs\)"):
            for _ in range(5):
                training.step(torch.ones(3, WIDTH))
                training.step(torch.ones(4, WIDTH))
        assert happened.count("record") == 1 and "drop" not in happened


@world(1)
def test_every_option_of_a_unit_is_followed() -> None:
    """A new field of `Options` that recordings do not depend on would replay the old behaviour."""
    with simulated_recorder():
        training = Training()
        training.run(1)
        trained: Any = training.step._trained

        def seen() -> Any:
            return trained.signature(None, ()), trained.identity(), trained.obstacle()

        (root,) = trained.roots()
        options = root.unit.options
        names = [each.name for each in fields(options)]
        assert "synchronize" in names and seen() == seen()
        for name in names:
            before = seen()
            with patch.object(options, name, object()):
                assert seen() != before, name


# -- steps that cannot be recorded ---------------------------------------------------------------------------


def write(x: torch.Tensor) -> None:
    x.add_(1)


def draw(x: torch.Tensor) -> None:
    random.random()


def draw_with_torch(x: torch.Tensor) -> None:
    torch.rand(1)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (write, "it writes to its arguments"),
        (draw, "draws random numbers on the host, from random"),
        (draw_with_torch, r"draws random numbers on the host, from torch \(a CPU generator\)"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@world(2)
def test_effects_on_the_host(extra: Callable[[torch.Tensor], Any], reason: str) -> None:
    with simulated_recorder() as happened:
        training = Training(extra=extra)
        with pytest.warns(UserWarning, match=f"step Training.once runs without a recording: .*{reason}") as found:
            training.step(batch())
        assert found[0].filename == __file__
        training.run(5)
        assert set(happened) == {"run"}


def turn_to_eval(training: Training) -> None:
    training.model.eval()


def stop_synchronising(training: Training) -> None:
    training.model.set_requires_gradient_sync(False)


@pytest.mark.parametrize("change", [turn_to_eval, freeze, stop_synchronising], ids=lambda each: each.__name__)
@world(2)
def test_modes_that_the_step_changes(change: Callable[[Training], Any]) -> None:
    with simulated_recorder() as happened:
        training = Training()
        training.extra = lambda x: change(training)
        with pytest.warns(UserWarning, match="it changes train or eval mode, requires_grad, or settings of units"):
            training.step(batch())
        assert happened == ["run"]


@world(2)
def test_a_forward_without_backward() -> None:
    with simulated_recorder() as happened:
        training = Training(captured=False)
        captured = capture(lambda x: training.model(x).mean().detach(), training.model, warmup=1)
        with pytest.warns(
            UserWarning, match=r"leaves unit '.*' unsharded, after a forward without backward \(use torch"
        ):
            captured(batch())
        with torch.no_grad():
            for _ in range(3):
                captured(batch())
        assert happened == ["run", "run", "record", "replay", "replay"]


@world(2)
def test_an_optimizer_that_was_not_passed() -> None:
    with simulated_recorder() as happened:
        training = Training(captured=False)
        captured = capture(training.once, training.model)
        with pytest.warns(UserWarning, match=r"steps an optimizer \(AdamW\) that was not passed to capture"):
            for number in range(4):
                captured(batch(number))
        assert set(happened) == {"run"}


@world(2)
def test_torch_scalers_that_are_updated_outside() -> None:
    with simulated_recorder() as happened:
        training, scaler = Training(captured=False), torch.amp.GradScaler("cpu")

        def step(x: torch.Tensor) -> None:
            scaler.scale(training.model(x).square().mean()).backward()
            scaler.step(training.optimizer)
            training.optimizer.zero_grad()

        captured = capture(step, training.model, training.optimizer, scaler=scaler)
        with pytest.warns(UserWarning, match="begins or ends between"):
            captured(batch())
        scaler.update()
        captured(batch())
        scaler.update()
        assert set(happened) == {"run"}


@world(2)
def test_a_scheduler_in_the_step() -> None:
    with simulated_recorder() as happened:
        training, reference = Training(), Training(captured=False)
        training.optimizer.step()
        reference.optimizer.step()
        training.extra = lambda x: training.scheduler.step()
        reference.extra = lambda x: reference.scheduler.step()
        with pytest.warns(UserWarning, match="sets learning rates .* Do that after it"):
            losses = training.run(1)
        losses += training.run(5, first=1)
        assert set(happened) == {"run"}
        for mine, theirs in zip(losses, reference.run(6), strict=True):
            assert torch.equal(mine, theirs)
        assert training.optimizer.param_groups[0]["lr"] == reference.optimizer.param_groups[0]["lr"]


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["number"] = self.state[each].get("number", 0) + 1
        return result


@world(2)
def test_an_optimizer_that_counts_on_the_host() -> None:
    with simulated_recorder() as happened:
        model = sharded()
        optimizer = Counting(model.parameters(), RATE)

        def step(x: torch.Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        captured = capture(step, model, optimizer, warmup=2)
        captured(batch())
        with pytest.warns(UserWarning, match="Counting keeps 'number' on the host"):
            captured(batch())
        captured(batch())
        assert set(happened) == {"run"}


class Averaging(nn.Module):
    """Keeps a buffer, and writes it in the one way or in the other."""

    def __init__(self, rebinds: bool) -> None:
        super().__init__()
        self.stack, self.rebinds = Stack(), rebinds
        self.blocks = self.stack.blocks
        self.register_buffer("average", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stack(x)
        if self.rebinds:
            self.average = 0.5 * self.average + y.detach().mean(0)
        else:
            self.average.mul_(0.5).add_(y.detach().mean(0))
        return y


@pytest.mark.parametrize("rebinds", [False, True])
@world(2)
def test_buffers(rebinds: bool) -> None:
    averages = []
    for is_captured in (False, True):
        with simulated_recorder() as happened, warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            training = Training(is_captured, model=sharded(Averaging(rebinds)))
            training.run(6)
            averages.append(training.model.average)
    assert torch.equal(*averages)
    assert ("record" in happened) != rebinds
    assert any("it replaces a buffer" in str(each.message) for each in found) == rebinds


@world(2)
def test_a_scaler_that_is_updated_outside() -> None:
    with simulated_recorder() as happened:
        training = Training(captured=False)
        scaler = GradScaler("cpu", init_scale=8.0)

        def step(x: torch.Tensor) -> None:
            scaler.scale(training.model(x).square().mean()).backward()
            scaler.step(training.optimizer)
            training.optimizer.zero_grad()

        captured = capture(step, training.model, training.optimizer, scaler=scaler, warmup=1)
        with pytest.warns(UserWarning, match="begins or ends between scaler.unscale_.. and scaler.update"):
            captured(batch())
        for _ in range(4):
            scaler.update()
            captured(batch())
        assert set(happened) == {"run"}


@world(2)
def test_gradients_that_a_program_holds() -> None:
    """A replay would write over them: the step runs instead."""
    with simulated_recorder() as happened:
        model = sharded()

        def step(x: torch.Tensor) -> None:
            model(x).square().mean().backward()

        captured = capture(step, model, warmup=2)
        for _ in range(5):
            captured(batch(dist.get_rank()))
            model.zero_grad()
        assert happened[-1] == "replay"
        captured(batch(dist.get_rank()))
        held = [parameter.grad for parameter in model.parameters()]
        values = [each.to_local().clone() for each in held]
        model.zero_grad()
        captured(batch(100))
        assert happened[-1] == "run"
        for mine, value in zip(held, values, strict=True):
            assert torch.equal(mine.to_local(), value)


@world(2)
def test_what_is_refused_is_not_remembered_for_ever() -> None:
    with simulated_recorder(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        training = Training(extra=write)
        for number in range(80):
            training.step(batch(), scale=float(number))
        assert len(training.step._refused) <= captured_steps.SIGNATURES
        assert len(found) == 1


@world(2)
def test_state_of_optimizers_that_is_not_by_parameter() -> None:
    with simulated_recorder() as happened:
        training = Training()
        training.optimizer.state["seen"] = 3
        training.run(4)
        assert happened.count("replay") == 2


@world(2)
def test_learning_rates_that_are_tensors_on_the_host() -> None:
    """They are read on the host: another value is another signature."""
    with simulated_recorder() as happened:
        training = Training(captured=False)
        rate = torch.tensor(RATE)
        training.optimizer = torch.optim.SGD(training.model.parameters(), rate)
        training.step = capture(training.once, training.model, training.optimizer, warmup=2)
        training.run(4)
        rate.fill_(RATE / 2)
        training.run(4)
        assert " ".join(happened) == "run run record replay replay run run record replay replay"


@world(2)
def test_learning_rates_that_are_read_on_the_host() -> None:
    """SGD without fused=True: a recording repeats the learning rate, so another one is another signature."""
    results = []
    for is_captured in (False, True):
        with simulated_recorder() as happened:
            training = Training(captured=False)
            training.optimizer = torch.optim.SGD(training.model.parameters(), RATE)
            if is_captured:
                training.step = capture(training.once, training.model, training.optimizer, warmup=2)
            losses = training.run(4)
            set_rate(training)
            losses += training.run(4, first=4)
        results.append([*losses, *(each.to_local() for each in training.values())])
    assert_equal(*results)
    assert " ".join(happened) == "run run record replay replay run run record replay replay"


@pytest.mark.parametrize("micro_batches", [1, 2])
@world(2)
def test_schedules_that_recordings_cannot_follow_are_named(micro_batches: int) -> None:
    """After three values, once, with the optimizer and the remedy; with accumulation, too."""
    with simulated_recorder() as happened:
        model = sharded()
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x: torch.Tensor, last: bool) -> None:
            model(x).square().mean().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

        captured, said = capture(step, model, optimizer), []
        for number in range(8):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                for micro_batch in range(micro_batches):
                    captured(batch(), micro_batch == micro_batches - 1)
            rates.step()
            said += [(number, str(each.message)) for each in found]
        assert len(said) == 1 and said[0][0] == (3 if micro_batches == 1 else 2)
        assert "only the learning rate was new" in said[0][1] and "SGD reads it on the host" in said[0][1]
        assert "Pass fused=True to SGD, and call unshard.optim.flat(optimizer)" in said[0][1]
        assert set(happened) == {"run"}


@world(2)
def test_learning_rates_that_change_seldom_are_recorded_in_silence() -> None:
    with simulated_recorder() as happened:
        training = Training(captured=False)
        training.optimizer = torch.optim.SGD(training.model.parameters(), RATE)
        training.step = capture(training.once, training.model, training.optimizer, warmup=1, max_graphs=8)
        for number in range(6):
            training.optimizer.param_groups[0]["lr"] = RATE / (1 + number)
            training.run(3)
        assert happened.count("record") == 6


@world(2)
def test_exceptions_while_recording() -> None:
    """An exception that only a recording meets: the step runs, and the model is at rest."""
    with simulated_recorder() as happened:
        training, reference = Training(), Training(captured=False)

        def fail_in_block(module: nn.Module, args: Any) -> None:
            if happened and happened[-1] == "record":
                raise ValueError("not while recording")

        training.model.blocks[1].first.register_forward_pre_hook(fail_in_block)
        losses = training.run(2)
        with pytest.warns(UserWarning, match=r"test_decisions.py:\d+, 'raise ValueError.*not while recording"):
            losses += training.run(1, first=2)
        assert_at_rest(training.model)
        losses += training.run(3, first=3)
        assert " ".join(happened) == "run run record run run run run"
        for mine, theirs in zip(losses, reference.run(6), strict=True):
            assert torch.equal(mine, theirs)


@world(2)
def test_exceptions_in_the_optimizer_while_recording() -> None:
    """The scaler is between unscale_ and update then, a buffer was replaced, and state of the optimizer was made."""
    results = []
    for is_captured in (False, True):
        with simulated_recorder() as happened:
            training = Training(captured=False, model=sharded(Averaging(rebinds=False)))
            model, optimizer = training.model, training.optimizer
            scaler = GradScaler("cpu", init_scale=8.0)

            def fail(*unused: Any) -> None:
                if happened and happened[-1] == "record":
                    model.average = torch.full((2,), 7.0)  # noqa: B023
                    optimizer.state[model.stack.head.weight]["new"] = torch.ones(2)  # noqa: B023
                    raise ValueError("not while recording")

            optimizer.register_step_pre_hook(fail)

            def step(x: torch.Tensor) -> torch.Tensor:
                loss = model(x).square().mean()  # noqa: B023
                scaler.scale(loss).backward()  # noqa: B023
                scaler.step(optimizer)  # noqa: B023
                scaler.update()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023
                return loss.detach()

            training.step = capture(step, model, optimizer, scaler=scaler, warmup=2) if is_captured else step
            losses = training.run(2)
            with pytest.warns(UserWarning, match="not while recording") if is_captured else nullcontext():
                losses += training.run(1, first=2)
            losses += training.run(3, first=3)
            assert "new" not in optimizer.state[model.stack.head.weight]
            assert not hasattr(optimizer, "grad_scale")
            # The simulated recording has run forward, so the average is one forward ahead: what matters is which it is.
            assert (model.average != 7.0).all()
        results.append([*losses, *(each.to_local() for each in training.values())])
    assert_equal(*results)
    assert happened.count("record") == 1


@world(2)
def test_exceptions_of_the_step_itself() -> None:
    with simulated_recorder() as happened:
        training = Training()
        training.run(2)
        with (
            patch.object(training.model.head, "forward", side_effect=ValueError("broken")),
            pytest.warns(UserWarning, match="broken"),
            pytest.raises(ValueError, match="broken"),
        ):
            training.run(1)
        assert_at_rest(training.model)
        training.run(2)
        assert happened[:4] == ["run", "run", "record", "run"]


@world(2)
def test_arguments_on_another_device() -> None:
    with simulated_recorder() as happened:
        training = Training()
        training.step = capture(lambda x: training.once(batch()), training.model, training.optimizer)
        with pytest.warns(UserWarning, match=r"an argument of shape \(3,\) is a tensor on 'meta'. Move it to 'cpu'"):
            training.step(torch.ones(3, device="meta"))
        assert happened == []


@world(2)
def test_arguments_that_cannot_be_compared() -> None:
    with simulated_recorder() as happened:
        training = Training()
        step = capture(lambda x, other: training.once(x), training.model, training.optimizer)
        with pytest.warns(UserWarning, match="an argument is a set, and a replay would not see changes in it"):
            step(batch(), {1, 2})
        with torch.inference_mode():
            made = torch.ones(2, WIDTH)
        with pytest.warns(UserWarning, match="an argument is a nested, sparse or inference tensor"):
            step(batch(), made)
        step(batch(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
        step(batch(), torch.ones(2, 2).to_sparse())
        with pytest.warns(UserWarning, match=r"under torch.inference_mode\(\). Use torch.no_grad"):
            with torch.inference_mode():
                evaluation = capture(lambda x: training.model(x), training.model)
                evaluation(batch())
        with pytest.warns(UserWarning, match="an argument is a list_iterator"):
            step(batch(), iter([1]))
        assert happened == []


@world(2)
def test_parts_of_the_training_as_arguments() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = loss(model(x), torch.zeros(6, 2))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    with simulated_recorder() as happened:
        training = Training(captured=False)
        captured = capture(step, training.model, training.optimizer, warmup=1)
        for _ in range(4):
            captured(training.model, training.optimizer, nn.MSELoss(), batch())
        assert happened.count("replay") == 0  # another loss module each time
        loss = nn.MSELoss()
        for _ in range(4):
            captured(training.model, training.optimizer, loss, batch())
        assert happened.count("replay") == 3


# -- ranks ---------------------------------------------------------------------------------------------------


@world(2, 3, 4, slow=(3, 4))
def test_ranks_with_different_shapes() -> None:
    """A rank that does not want to record says so: nobody waits, and all record when all of them want to."""
    with simulated_recorder() as happened:
        training = Training()
        for number in range(5):
            rows = 3 if dist.get_rank() == 0 and number % 2 else 4
            training.step(torch.ones(rows, WIDTH))
        assert happened == ["run"] * 4 + ["record", "replay"]
        answers = training.step._answers
        assert not answers[Answer.LATE] and bool(answers[Answer.NO]) == (dist.get_rank() > 0)


@world(2, 3, slow=(3,))
def test_ranks_that_come_late() -> None:
    """All of them try again later; at last they give up."""
    with patch.object(recording, "PATIENCE", 0.1):
        with simulated_recorder() as happened:
            training = Training()
            for number in range(8):
                if number == 2 and dist.get_rank() == 0:
                    time.sleep(1.0)
                training.step(batch())
            assert happened.count("record") == 1
        with simulated_recorder() as happened, warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            training = Training()
            for number in range(12):
                dist.barrier()
                if dist.get_rank() == 0 and number and number % 2 == 0:
                    time.sleep(1.0)
                training.step(batch())
            assert "record" not in happened
            late = [str(each.message) for each in found if "did not join a recording" in str(each.message)]
            assert len(late) == 1


@world(2, 3, 4, slow=(3, 4))
def test_decisions() -> None:
    sharded()  # collectives are compared
    decisions = Agreement(list(range(dist.get_world_size())), 1000)
    rank = dist.get_rank()
    assert decisions.decide(1, "all", True) is Answer.YES
    assert decisions.decide(1, "one does not want", rank != 1) is Answer.NO
    assert decisions.decide(1, "nobody wants", False) is Answer.NO
    if rank:
        assert decisions.decide(1, "one does not come", True, patience=0.2) is Answer.LATE
    dist.barrier()
    assert decisions.decide(1, "one does not come", True) is Answer.LATE
    assert Agreement([], 1001).decide(1, "alone", True) is Answer.YES


@world(2)
def test_answers_do_not_stay_in_the_store() -> None:
    with simulated_recorder(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training()
        for number in range(2 * recording.KEPT):
            training.step(batch(), scale=float(number))
        store = training.step._agreement._store
        assert store.check([f"{2 * recording.KEPT} begin"])
        dist.barrier()
        assert not store.check(["2 begin"])


@world(2)
def test_the_end_of_the_job_drops_recordings() -> None:
    with simulated_recorder() as happened:
        training = Training()
        training.run(4)
        assert "drop" not in happened
        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        assert happened[-1] == "drop"
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)


@world(2)
def test_memory_of_cleared_gradients_is_free_before_a_recording() -> None:
    """Else it keeps the memory around it from being given back to the device."""
    held: list[bool] = []

    def record(self: SimulatedRecorder, *args: Any) -> Any:
        groups = [group for unit in training.step._trained.units for group in unit.param_groups]
        reductions = [each for group in groups for each in group.gradients.reductions.values()]
        held.extend(grad.buffer.held for each in reductions for grad in each.grads)
        return original(self, *args)

    original = SimulatedRecorder.record
    with simulated_recorder(), patch.object(SimulatedRecorder, "record", record):
        training = Training()
        training.run(4)
    assert held and not any(held)


# -- models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_orig_params", [False, True])
@world(1, 2, 3, slow=(1, 3))
def test_the_wrapper(use_orig_params: bool) -> None:
    results = []
    for captured in (False, True):
        with simulated_recorder() as happened:
            stack = Stack()
            model = wrap(stack, list(stack.blocks), use_orig_params=use_orig_params)
            training = Training(captured, model=model)
            losses = training.run(6)
        results.append([*losses, *training.values()])
    assert_equal(*results)
    assert happened.count("replay") == 4


@world(2, 3, slow=(3,))
def test_the_legacy_call() -> None:
    results = []
    for captured in (False, True):
        with simulated_recorder() as happened:
            model = composable.fully_shard(Stack(), policy=ModuleWrapPolicy({type(Stack().blocks[0])}))
            training = Training(captured, model=model)
            losses = training.run(6)
        results.append([*losses, *training.values()])
    assert_equal(*results)
    assert happened.count("replay") == 4


@world(2)
def test_no_sync_of_the_wrapper() -> None:
    stack = Stack()
    model: Any = wrap(stack, list(stack.blocks), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    with simulated_recorder() as happened:
        captured = capture(step, model, optimizer, warmup=1)
        with model.no_sync(), pytest.warns(UserWarning, match=r"unreduced gradients \(no_sync\(\)"):
            captured(batch())
        captured(batch())
        assert set(happened) == {"run"}


def test_models_that_are_not_sharded() -> None:
    results = []
    for captured in (False, True):
        with simulated_recorder() as happened:
            training = Training(captured=False, model=Stack())
            step = capture(training.once, training.model, training.optimizer) if captured else training.once
            losses = [step(batch(number)).clone() for number in range(6)]
        results.append([*losses, *training.values()])
    assert_equal(*results)
    assert happened.count("replay") == 3


@world(2)
def test_a_cpu_runs_in_silence() -> None:
    training, reference = Training(), Training(captured=False)
    for mine, theirs in zip(training.run(5), reference.run(5), strict=True):
        assert torch.equal(mine, theirs)
    assert training.step.recordings == 0
    assert training.step.__name__ == "once"


def test_arguments_of_capture() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ArgumentError, match="function of a training step, got 3"):
        capture(3, model)
    with pytest.raises(ArgumentError, match="model must be the module"):
        capture(print, [optimizer])
    with pytest.raises(ArgumentError, match="model must be the module"):
        capture(print, [])
    for wrong in (None, 3, "model"):
        with pytest.raises(ArgumentError, match="model must be the module"):
            capture(print, wrong)
    for wrong in ([model], None, 3):
        with pytest.raises(ArgumentError, match=r"optimizer must be a torch.optim.Optimizer"):
            capture(print, model, wrong)
    with pytest.raises(ArgumentError, match="scaler must be a gradient scaler"):
        capture(print, model, optimizer, scaler=optimizer)
    for name in ("warmup", "max_graphs"):
        for value in (0, -1, True, 1.5):
            with pytest.raises(ArgumentError, match=f"{name} must be an integer of at least 1"):
                capture(print, model, optimizer, **{name: value})


@world(2)
def test_a_call_inside_forward() -> None:
    """The inner step neither records nor replays, because it would record half a forward."""
    with simulated_recorder() as happened:
        training = Training(captured=False)
        inner = capture(lambda x: x.sum(), training.model, training.optimizer, warmup=1)
        training.model.blocks[0].register_forward_hook(lambda module, args, output: inner(torch.ones(2)) and None)
        with pytest.warns(UserWarning, match="it is called inside forward or backward of the model"):
            losses = training.run(4)
        assert inner.recordings == 0 and "record" not in happened
        for mine, theirs in zip(losses, Training(captured=False).run(4), strict=True):
            assert torch.equal(mine, theirs)


@world(2)
def test_gradients_that_are_not_reduced_before_a_call() -> None:
    results = []
    for is_captured in (False, True):
        warns = pytest.warns(UserWarning, match="unreduced gradients") if is_captured else nullcontext()
        with simulated_recorder(), warns:
            training = Training(is_captured, wrap(Stack(), [], use_orig_params=True))
            losses = []
            for number in range(4):
                with training.model.no_sync():
                    training.model(batch()).square().mean().backward()
                losses += training.run(1, first=number)
            results.append(torch.stack(losses))
            assert not is_captured or training.step.recordings == 0
    assert torch.equal(*results)
