"""Optimizers that step units on the host while the backward of the others goes on."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.late import late_host
from bed.models import CASES, Case, case, shard
from bed.parity import each_unit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from unshard import CPUOffloadPolicy, fully_shard
from unshard.engine.params.offload import Upload
from unshard.engine.params.sharded import ShardedParams
from unshard.errors import PolicyError, StateError
from unshard.optim import GradScaler, clip_grad_norm_, flat
from unshard.optim import offload as host

HOST = CPUOffloadPolicy(pin_memory=False)
MAKERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 1e-2),
}


def offloaded(each: Case, build: Callable[[], nn.Module] | None = None) -> nn.Module:
    model = (build or each.build)()
    each_unit(each, fully_shard, offload_policy=HOST)(model)
    return model


def grouped(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Biases and the like have a rate of their own."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim == 1]
    return make([{"params": matrices}, {"params": others, "lr": 0.05}])


def loss_of(model: nn.Module, each: Case, step: int) -> torch.Tensor:
    return each.loss(model, shard(each.batch(step), dist.get_rank(), dist.get_world_size()))


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().to_local().clone() for each in model.parameters()]  # type: ignore[attr-defined]


def changed(before: list[torch.Tensor], after: list[torch.Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def run(model: nn.Module, each: Case, optimizer: torch.optim.Optimizer, ahead: bool, steps: int = 4) -> list[Any]:
    """Losses, parameters and state. Looks whether backward has stepped."""
    losses = []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        before = locals_of(model)
        loss = loss_of(model, each, step)
        loss.backward()
        losses.append(loss.item())
        for taken in vars(optimizer)["unshard_step_in_backward"]._steps if ahead else ():
            taken.future.result()
        moved, all_of_them = changed(before, locals_of(model)), sum(each.numel() > 0 for each in before)
        assert moved == (all_of_them if ahead and step else 0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    states = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    states = [each.to_local() if hasattr(each, "to_local") else torch.as_tensor(each) for each in states]
    return [*map(torch.tensor, losses), *locals_of(model), *states]


@pytest.mark.parametrize("each", CASES, ids=str)
@world(1, 2, 3, 4)
def test_same_numbers(each: Case) -> None:
    for name, make in MAKERS.items():
        if name != "adamw" and (each.name != "transformer" or dist.get_world_size() != 2):
            continue
        with late_host():
            results = []
            for ahead in (False, True):
                model = offloaded(each)
                results.append(run(model, each, flat(grouped(model, make), step_in_backward=ahead), ahead))
        assert len(results[0]) == len(results[1]) > 10
        assert changed(*results) == 0, name


@world(2)
def test_units_of_both_kinds() -> None:
    each = case("transformer")

    def built(ahead: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = each.build()
        for number, unit in enumerate(each.units(model)):
            fully_shard(unit, **({"offload_policy": HOST} if number % 2 else {}))
        return model, flat(torch.optim.AdamW(model.parameters(), 1e-2, fused=True), step_in_backward=ahead)

    with late_host():
        results = []
        for ahead in (False, True):
            model, optimizer = built(ahead)
            for step in range(3):
                loss_of(model, each, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(locals_of(model))
    assert changed(*results) == 0


def fresh_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() * 0.5 for name, each in model.state_dict().items()}


def write_shards(model: nn.Module) -> None:
    for each in model.parameters():
        each.to_local().mul_(0.5)  # type: ignore[attr-defined]


def write_parameters(model: nn.Module) -> None:
    for each in model.parameters():
        each.mul_(0.5)


def write_data(model: nn.Module) -> None:
    for each in model.parameters():
        each.data.copy_(each.data * 0.5)


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "parameters": write_parameters,
    "shards": write_shards,
    "data": write_data,
    "loaded": lambda model: model.load_state_dict(fresh_values(model)),
    "assigned": lambda model: model.load_state_dict(fresh_values(model), assign=True),
    "replaced": lambda model: model.double().float().apply(write_parameters),
    "an evaluation": lambda model: loss_of(model, case("transformer"), 7),
    "rounded": lambda model: model.half().float(),
}


@pytest.mark.parametrize("how", WRITES)
@world(2, 3)
def test_writes_after_the_step(how: str) -> None:
    """The shards that the next forward begins with are on their way by then."""
    check_writes(how)


@world(2)
def test_other_parameters_after_the_step() -> None:
    """They are noticed even if their counts of writes are, by chance, those of the old ones."""
    with mock.patch.object(ShardedParams, "writes", lambda self: 0):
        check_writes("assigned")


def check_writes(how: str) -> None:
    each, results, sent = case("transformer"), [], []
    with late_host(prompt=True), mock.patch.object(Upload, "_copy_early", noting(sent, Upload._copy_early)):
        for ahead in (False, True):
            model = offloaded(each)
            optimizer, losses = flat(torch.optim.SGD(model.parameters(), 0.1), step_in_backward=ahead), []
            steps = 1 if how == "assigned" else 4  # an optimizer does not step parameters that were assigned later
            for step in range(steps):
                loss = loss_of(model, each, step)
                loss.backward()
                losses.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    WRITES[how](model)
            with torch.no_grad():
                losses.append(loss_of(model, each, steps))
            results.append([*losses, *locals_of(model)])
            assert len(sent) == 2 * steps * ahead  # the root's and the first block's, after every step
    assert changed(*results) == 0


@world(2)
def test_early_copies_are_not_made_again() -> None:
    each, copies = case("transformer"), []
    counts = []
    with late_host(), mock.patch.object(Upload, "_copy", noting(copies, Upload._copy)):
        for ahead in (False, True):
            model = offloaded(each)
            optimizer = flat(torch.optim.SGD(model.parameters(), 0.1), step_in_backward=ahead)
            for step in range(3):
                loss_of(model, each, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            loss_of(model, each, 3)
            counts.append(len(copies))
            copies.clear()
    assert counts[0] == counts[1] > 0


@world(2)
def test_writes_of_a_hook_after_the_step() -> None:
    """The shards are on their way before it is called."""
    each, results, sent = case("transformer"), [], []
    with late_host(prompt=True), mock.patch.object(Upload, "_copy_early", noting(sent, Upload._copy_early)):
        for ahead in (False, True):
            model = offloaded(each)
            optimizer, before = flat(torch.optim.SGD(model.parameters(), 0.1), step_in_backward=ahead), []

            def write(*unused: object, model: nn.Module = model, before: list[int] = before) -> None:
                before.append(len(sent))
                sent.clear()
                with torch.no_grad():
                    write_data(model)

            optimizer.register_step_post_hook(write)
            for step in range(4):
                loss_of(model, each, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                results.append([loss_of(model, each, 4), *locals_of(model)])
        # Two after the hook and two in the next step; the first step is an ordinary one.
        assert before == [0, 4, 4, 4]
    assert changed(*results) == 0


@world(2)
def test_units_that_are_still_unsharded_are_gathered_again() -> None:
    """After an ordinary step, one that backward has taken, and `zero_grad` instead of that one."""
    each = case("transformer")
    with late_host():
        model, again = offloaded(each), offloaded(each)
        model.set_reshard_after_backward(False)  # type: ignore[operator]
        optimizer = flat(torch.optim.SGD(model.parameters(), 0.1), step_in_backward=True)
        for step, stepped in enumerate((True, True, False)):
            loss_of(model, each, step).backward()
            with nullcontext() if stepped else pytest.warns(UserWarning, match="counts as a step"):
                if stepped:
                    optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                loss = loss_of(model, each, 7)
                again.load_state_dict(model.state_dict())
                assert torch.equal(loss, loss_of(again, each, 7))


@pytest.mark.parametrize(("missing", "frozen", "expected"), [("", "", 2), ("norm", "", 1), ("", "blocks.0", 2)])
@world(2)
def test_which_units_are_copied_early(missing: str, frozen: str, expected: int) -> None:
    """A unit all of whose parameters the optimizer has stepped, if they learn at all."""
    each, sent = case("transformer"), []
    with late_host(), mock.patch.object(Upload, "_copy_early", noting(sent, Upload._copy_early)):
        model = offloaded(each)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))
        parameters = [one for name, one in model.named_parameters() if not (missing and name.startswith(missing))]
        optimizer = flat(torch.optim.SGD(parameters, 0.1), step_in_backward=True)
        for step in range(3):
            loss_of(model, each, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert len(sent) == expected * (step + 1)


def noting(calls: list[Any], method: Callable[[Any], None]) -> Callable[[Any], None]:
    def noted(self: Any) -> None:
        calls.append(self)
        method(self)

    return noted


class Twice(nn.Module):
    """A block that runs twice, plainly or in checkpoints. With reentrant ones its gradient comes in two parts."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]):
            x = block(x) if self._reentrant is None else checkpoint(block, x, use_reentrant=self._reentrant)
        return x


@pytest.mark.parametrize("reentrant", [None, False, True])
@world(2)
def test_units_that_a_backward_comes_to_again(reentrant: bool | None) -> None:
    results = []
    with late_host():
        for ahead in (False, True):
            model = Twice(reentrant)
            for block in (*model.blocks, model):
                fully_shard(block, offload_policy=HOST)
            optimizer = flat(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), step_in_backward=ahead)
            for step in range(3):
                inputs = torch.full((2, 6), 0.1 * (step + 1 + dist.get_rank()), requires_grad=True)
                model(inputs).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(locals_of(model))
    assert changed(*results) == 0


@world(2)
def test_accumulation() -> None:
    each = case("transformer")
    results = []
    with late_host():
        for ahead in (False, True):
            model = offloaded(each)
            optimizer = flat(torch.optim.SGD(model.parameters(), 0.1), step_in_backward=ahead)
            for step in range(6):
                model.set_requires_gradient_sync(step % 2 == 1)  # type: ignore[operator]
                loss_of(model, each, step).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            results.append(locals_of(model))
    assert changed(*results) == 0


def stepped_once(each: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After that, backward steps."""
    model = offloaded(each)
    optimizer = flat(torch.optim.SGD(model.parameters(), 0.1), step_in_backward=True)
    loss_of(model, each, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@world(2)
def test_what_comes_too_late() -> None:
    each = case("transformer")
    with late_host():
        model, optimizer = stepped_once(each)
        loss_of(model, each, 1).backward()
        with pytest.raises(StateError, match=r"can no longer be clipped or scaled.*step_in_backward=True"):
            clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(StateError, match=r"can no longer be clipped or scaled"):
            scaler = GradScaler("cpu")
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
        with pytest.raises(StateError, match=r"second backward has .*before step\(\).*set_requires_gradient_sync"):
            loss_of(model, each, 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, each, 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, each, 3).backward()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(StateError, match=r"between backward and step\(\)"):
            optimizer.step()


@world(2)
def test_gradients_that_are_replaced_too_late() -> None:
    """They would be stepped twice, or not as the user wants."""
    each = case("transformer")
    with late_host():
        for replace in (lambda p: None, lambda p: torch.zeros_like(p)):
            model, optimizer = stepped_once(each)
            loss_of(model, each, 1).backward()
            after_step = locals_after(model, optimizer)
            first = next(model.parameters())
            first.grad = replace(first)
            with pytest.raises(StateError, match=r"replaced or cleared between backward and step\(\)"):
                optimizer.step()
            assert changed(after_step, locals_of(model)) == 0


@world(2)
def test_gradients_that_are_written_too_late() -> None:
    each = case("transformer")
    scale: dict[str, Callable[[nn.Module], object]] = {
        "gradient": lambda model: next(model.parameters()).grad.mul_(2),  # type: ignore[union-attr]
        "its shard": lambda model: next(model.parameters()).grad.to_local().mul_(2),  # type: ignore[union-attr]
        "values": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3, foreach=False),
    }
    with late_host():
        for write in scale.values():
            model, optimizer = stepped_once(each)
            loss_of(model, each, 1).backward()
            after_step = locals_after(model, optimizer)
            write(model)
            for _ in range(2):
                with pytest.raises(StateError, match=r"were changed between backward and step\(\).*zero_grad\(\)"):
                    optimizer.step()
            assert changed(after_step, locals_of(model)) == 0
            with pytest.warns(UserWarning, match="counts as a step"):
                optimizer.zero_grad()
            loss_of(model, each, 2).backward()
            optimizer.step()
        model, optimizer = stepped_once(each)
        optimizer.register_step_pre_hook(lambda *unused: write(model))
        loss_of(model, each, 1).backward()
        with pytest.raises(StateError, match="were changed"):
            optimizer.step()


@world(4)
def test_all_reduce_only_now_and_then() -> None:
    """Partial sums are nothing that arrives; those of a unit are taken by its next reduction."""
    each, results = case("transformer"), []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    with late_host():
        for ahead in (False, True):
            model = each.build()
            each_unit(each, fully_shard, mesh=mesh, offload_policy=HOST)(model)
            optimizer = flat(torch.optim.SGD(model.parameters(), 0.1), step_in_backward=ahead)
            for step in range(7):
                model.set_requires_all_reduce(step % 3 == 0)  # type: ignore[operator]
                loss_of(model, each, step).backward()
                if step % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            results.append(locals_of(model))
    assert changed(*results) == 0


def locals_after(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What backward has made of the parameters."""
    optimizer.state_dict()  # waits
    return locals_of(model)


@world(2)
def test_state_that_is_loaded_after_a_step() -> None:
    """The next step is an ordinary one, and those after it are ahead again."""
    each = case("transformer")
    results = []
    with late_host():
        for ahead in (False, True):
            model = offloaded(each)
            optimizer = flat(torch.optim.AdamW(model.parameters(), 1e-2, fused=True), step_in_backward=ahead)
            for step in range(6):
                loss_of(model, each, step).backward()
                if ahead:
                    assert bool(vars(optimizer)["unshard_step_in_backward"]._steps) == (step not in (0, 3))
                optimizer.step()
                optimizer.zero_grad()
                if step == 2:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            results.append(locals_of(model))
    assert changed(*results) == 0


class Counting(torch.optim.Optimizer):
    """Keeps its counter beside the states of parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad, alpha=0.1 * self.state["steps"])


@world(2)
def test_state_that_is_no_parameters() -> None:
    """An optimizer that counts for all of them is stepped as a whole."""
    each = case("transformer")
    results = []
    with late_host():
        for ahead in (False, True):
            model = offloaded(each)
            optimizer = flat(Counting(model.parameters()), elementwise=True, step_in_backward=ahead)
            for step in range(4):
                loss_of(model, each, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer.state["steps"] == 4
            results.append(locals_of(model))
    assert changed(*results) == 0


@world(2)
def test_looking_at_parameters_before_the_step() -> None:
    each = case("transformer")
    with late_host():
        model, optimizer = stepped_once(each)
        loss_of(model, each, 1).backward()
        host.submit(lambda: time.sleep(0.2))  # before whatever has not begun yet
        state = {name: value.to_local().clone() for name, value in model.state_dict().items()}
        copied = locals_of(copy.deepcopy(model))
        optimizer.step()
        after = locals_of(model)
        assert changed(list(state.values()), after) == changed(copied, after) == 0


@world(2)
def test_a_batch_that_is_left_out() -> None:
    """It was stepped, and training goes on."""
    each = case("transformer")
    with late_host():
        model, optimizer = stepped_once(each)
        loss_of(model, each, 1).backward()
        with pytest.warns(UserWarning, match=r"zero_grad\(\) was called without step\(\).*counts as a step.*freeze"):
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        before = locals_of(model)
        loss_of(model, each, 2).backward()
        optimizer.zero_grad()  # warns once
        loss_of(model, each, 3).backward()
        optimizer.step()
        assert changed(before, locals_of(model)) == len(before)


@world(2)
def test_another_optimizer_takes_over() -> None:
    each = case("transformer")
    with late_host():
        model, old = stepped_once(each)
        new = flat(torch.optim.SGD(model.parameters(), 0.1))
        loss_of(model, each, 1).backward()
        with pytest.raises(StateError, match=r"Another optimizer, .*step_in_backward=True.*step_in_backward=False"):
            new.step()
        flat(old, step_in_backward=False)
        for optimizer in (new, old):
            optimizer.step()
        new.zero_grad()
        loss_of(model, each, 2).backward()
        del old, optimizer
        new.step()
        model, old = stepped_once(each)
        loss_of(model, each, 1).backward()
        del old  # between backward and its step
        model.zero_grad()
        new = flat(torch.optim.SGD(model.parameters(), 0.1), step_in_backward=True)
        for step in range(3):
            loss_of(model, each, step).backward()
            new.step()
            new.zero_grad()


@world(2)
def test_options_that_are_changed_too_late() -> None:
    each = case("transformer")
    with late_host():
        model, optimizer = stepped_once(each)
        loss_of(model, each, 1).backward()
        optimizer.param_groups[0]["lr"] = 0.2
        with pytest.warns(UserWarning, match=r"between backward and step\(\).*before backward"):
            optimizer.step()


@world(2)
def test_a_rate_that_is_a_tensor() -> None:
    """Changed in place too late, it counts from the next step on, as others do."""
    each, results = case("transformer"), []
    with late_host():
        for late in (False, True):
            model, rate, go = offloaded(each), torch.tensor(0.1), threading.Event()
            optimizer = flat(torch.optim.AdamW(model.parameters(), rate, fused=True), step_in_backward=True)
            loss_of(model, each, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            host.submit(go.wait)  # the steps come after that
            loss_of(model, each, 1).backward()
            rate.fill_(5.0 if late else 0.1)
            go.set()
            with pytest.warns(UserWarning, match=r"between backward and step\(\)") if late else nullcontext():
                optimizer.step()
            results.append(locals_of(model))
    assert changed(*results) == 0


@world(2)
def test_arguments() -> None:
    model = case("transformer").build()
    each_unit(case("transformer"), fully_shard)(model)
    with pytest.raises(ValueError, match="step_in_backward must be True or False"):
        flat(torch.optim.SGD(model.parameters(), 0.1), step_in_backward="yes")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="step_in_backward=True has no effect"):
        flat(torch.optim.SGD(model.parameters(), 0.1), step_in_backward=True)
    with pytest.raises(PolicyError, match=r"CPUOffloadPolicy\.pin_memory must be"):
        CPUOffloadPolicy(pin_memory="no")  # type: ignore[arg-type]


@world(2)
def test_a_forward_before_the_step_finds_unsharded_parameters() -> None:
    each = case("transformer")
    with late_host():
        model, optimizer = stepped_once(each)
        loss_of(model, each, 1).backward()
        with torch.no_grad():
            early = loss_of(model, each, 2)
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(loss_of(model, each, 2), early)


@world(2)
def test_a_step_that_fails() -> None:
    each = case("transformer")
    with late_host():
        model, optimizer = stepped_once(each)
        real, calls = type(optimizer).plain_step, []  # type: ignore[attr-defined]

        def failing(*args: Any, **options: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                raise KeyError("boom")
            return real(*args, **options)

        with mock.patch.object(type(optimizer), "plain_step", staticmethod(failing)):
            loss_of(model, each, 1).backward()
            with pytest.raises(KeyError, match="boom"):
                optimizer.step()
        optimizer.zero_grad()
        before = locals_of(model)
        loss_of(model, each, 2).backward()
        optimizer.step()
        assert changed(before, locals_of(model)) == len(before)


def test_the_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident 23: ranks that share a host do not starve each other of threads."""
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    found = {}
    for ranks in (None, 1, 8, 64, 200):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        found[ranks] = host.cores_of_this_rank()
    assert found == {None: 63, 1: 63, 8: 7, 64: 1, 200: 1}
