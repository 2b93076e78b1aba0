"""`prove_resume`: runs that resume are bitwise equal, and what a run forgets is found and named."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.runs import Run
from torch import Tensor, nn

from unshard import CheckpointError, checkpoint, fully_shard
from unshard.errors import ArgumentError

quiet = pytest.mark.filterwarnings("ignore")


@quiet
@pytest.mark.parametrize("kind", ["fully_shard mixed,flat"])
@world(1, 2, 3, 4)
def test_runs_are_equal(kind: str) -> None:
    prove(kind)


@quiet
@pytest.mark.parametrize("kind", ["flat", "originals", "fully_shard tied,sgd"])
@world(3)
def test_runs_of_other_kinds_are_equal(kind: str) -> None:
    prove(kind)


def prove(kind: str) -> None:
    def make() -> dict[str, Any]:
        run = Run(kind)
        return {**run.parts(), "train": run.train}

    def train_step(run: dict[str, Any]) -> float:
        return run["train"](range(run["data"].position, run["data"].position + 1))[0]

    report = checkpoint.prove_resume(make, train_step, steps=2)
    assert report.equal and not report.unsaved and report.repeatable, str(report)
    assert report.ranks == dist.get_world_size() and report.compared > 20
    assert "bitwise equal: 2 steps after step 2" in str(report)


class Batches:
    def __init__(self) -> None:
        self.position = 0

    def next(self) -> Tensor:
        self.position += 1
        seed = 100 * self.position + dist.get_rank()
        return torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Forgetful(Batches):
    def state_dict(self) -> dict[str, Any]:
        return {"length": 6}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"length": 6}


class Layer(nn.Module):
    """Also the model without a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)  # from torch's generator, which is saved

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x)


class Counter(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls / 10)


class PlainTensor(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class NotPersistent(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.9)
        return x * self.scale


class OwnGenerator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self.generator) > 0.3)


class PythonsGenerator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.chance.random()


class NumpysGenerator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.chance = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.chance.random())


class Warming(torch.optim.SGD):
    """Has a counter outside of its state."""

    taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.taken
        super().step(closure)


def train_step(run: dict[str, Any]) -> Tensor:
    loss = run["model"](run["data"].next()).square().mean()
    scaler = run.get("scaler", run.get("own_scaler"))
    scaler.scale(loss).backward()
    scaler.step(run["optimizer"])
    scaler.update()
    run["optimizer"].zero_grad()
    run.get("scheduler", run.get("decay")).step()
    return loss * scaler.get_scale()


def accumulating_step(run: dict[str, Any]) -> Tensor:
    """Steps the optimizer every third time, so gradients exist when the run is saved."""
    loss = run["model"](run["data"].next()).square().mean()
    loss.backward()
    if run["data"].position % 3 == 0:
        run["optimizer"].step()
        run["optimizer"].zero_grad()
    return loss


def inverse(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def halved(optimizer: torch.optim.Optimizer) -> Any:
    """Computes a learning rate from the one before, which the optimizer has."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def build(
    layer: type[nn.Module] = Layer,
    data: type = Batches,
    optimizer: type = torch.optim.SGD,
    schedule: Callable[[Any], Any] = inverse,
    **names: str,
) -> dict[str, Any]:
    """`names`: other names for entries of the run, under which they are not saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), layer(), nn.Linear(4, 3))
    fully_shard(model[0])
    fully_shard(model)
    own = optimizer(model.parameters(), lr=0.1, momentum=0.9)
    run = {"model": model, "optimizer": own, "data": data()}
    run["scheduler"] = schedule(own)
    run["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    return {names.get(name, name): value for name, value in run.items()}


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {  # arguments, the first difference, the cause
    "nothing": ({}, "", ""),
    "data": ({"data": Forgetful}, "loss", "data.position on rank 0 (and 1 other): 2, resumed 0"),
    "counter": ({"layer": Counter}, "loss", "model.1.calls on rank 0 (and 1 other): 2, resumed absent"),
    "plain tensor": ({"layer": PlainTensor}, "loss", "model.1.mean on rank 0 (and 1 other): 4 of 4 elements differ"),
    "buffer": ({"layer": NotPersistent}, "loss", "model.1.scale on rank 0 (and 1 other): 4 of 4 elements differ"),
    "generator": ({"layer": OwnGenerator}, "loss", "model.1.generator on rank 0 (and 1 other): "),
    "Python's generator": ({"layer": PythonsGenerator}, "loss", "model.1.chance[1] on rank 0 (and 1 other): "),
    "NumPy's generator": ({"layer": NumpysGenerator}, "loss", "model.1.chance.state.state on rank 0 (and 1 other): "),
    "optimizer": (
        {"optimizer": Warming},
        "model/0.weight",
        "optimizer.taken on rank 0 (and 1 other): 2, resumed absent",
    ),
    "scheduler": (
        {"scheduler": "decay"},
        "optimizer/param_groups[0].lr",
        "decay.last_epoch on rank 0 (and 1 other): 2, resumed 0",
    ),
    "scheduler that has no effect": (
        {"scheduler": "decay", "schedule": halved},
        "",
        "decay.last_epoch on rank 0 (and 1 other): 2, resumed 0",
    ),
    "scaler": ({"scaler": "own_scaler"}, "loss", "own_scaler.scale on rank 0 (and 1 other): 8.0, resumed 4.0"),
}


@quiet
@pytest.mark.parametrize("fault", FAULTS)
@world(2)
def test_what_a_run_forgets_is_named(fault: str) -> None:
    arguments, first, cause = FAULTS[fault]
    report = checkpoint.prove_resume(lambda: build(**arguments), train_step)
    text = str(report)
    assert cause in text and report.repeatable, text
    if first:
        assert not report.equal and report.first is not None
        assert (report.first.name, report.first.step, report.first.rank) == (first, 3, 0), text
        assert {each.rank for each in report.differences} == set(range(dist.get_world_size()))
        assert "may be the cause:" in text
    else:
        assert report.equal, text
        assert bool(report.unsaved) == bool(cause) == ("without effect on these steps" in text)


@quiet
@world(2)
def test_gradients_are_not_saved() -> None:
    report = checkpoint.prove_resume(build, accumulating_step)
    assert report.first is not None and (report.first.name, report.first.step) == ("model/0.weight", 3)
    assert "gradients on rank 0 (and 1 other): 'of 4 parameters', resumed 'none'" in str(report)


class Wrong(Batches):
    """Only rank 1 forgets."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = 0 if dist.get_rank() == 1 else state["position"]


@quiet
@world(3)
def test_a_difference_on_one_rank_ends_all() -> None:
    report = checkpoint.prove_resume(lambda: build(data=Wrong), train_step)
    assert report.first is not None
    assert (report.first.name, report.first.step, report.first.rank) == ("data.position", 2, 1)
    assert [each.rank for each in report.differences] == [1]
    assert "after loading, before the first step" in str(report) and "data.position on rank 1: 2, resumed 0" in str(
        report
    )
    reports: list[Any] = [None] * 3
    dist.all_gather_object(reports, report)
    assert reports == [report] * 3


@quiet
@world(2)
def test_plain_buffers_that_differ_between_ranks() -> None:
    """They are saved as rank 0 has them."""

    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "data": Batches()}

    def step(run: dict[str, Any]) -> Tensor:
        loss = run["model"](run["data"].next()).square().mean()
        loss.backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        return loss

    report = checkpoint.prove_resume(make, step)
    found = [(each.name, each.rank, each.step) for each in report.differences]
    assert found == [("model/1.running_mean", 1, 2), ("model/1.running_var", 1, 2)]


TIMES = 0


def count_in_a_global(run: dict[str, Any]) -> Tensor:
    global TIMES
    TIMES += 1
    return train_step(run) + TIMES


@quiet
@world(2)
def test_steps_that_cannot_be_repeated() -> None:
    report = checkpoint.prove_resume(build, count_in_a_global, steps=1, before=0)
    assert not report.equal and not report.repeatable and "a global variable" in str(report)


def folders(path: Path) -> list[str]:
    """After all ranks have returned, and before any calls again."""
    dist.barrier()
    found = sorted(each.name for each in path.iterdir())
    dist.barrier()
    return found


def failing(run: dict[str, Any]) -> Tensor:
    if run["data"].position == 3:
        raise ZeroDivisionError("on all ranks")
    return train_step(run)


@quiet
@world(2)
def test_files(tmp_path: Path) -> None:
    temporary, named = tmp_path / "temporary", tmp_path / "named"
    if dist.get_rank() == 0:
        temporary.mkdir()
    dist.barrier()
    tempfile.tempdir = str(temporary)
    try:
        assert checkpoint.prove_resume(build, train_step, steps=1).equal
        with pytest.raises(ZeroDivisionError):
            checkpoint.prove_resume(build, failing)
        assert folders(temporary) == []
        assert checkpoint.prove_resume(build, train_step, steps=1, path=named).equal
        assert folders(temporary) == [] and folders(named) == ["step_00000002"]
        with pytest.raises(CheckpointError, match="exists already"):
            checkpoint.prove_resume(build, train_step, steps=1, path=named)
        assert folders(named) == ["step_00000002"]
    finally:
        tempfile.tempdir = None


@quiet
@world(2)
def test_a_rank_that_cannot_write() -> None:
    original = torch.save

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device", "x")

    if dist.get_rank() == 1:
        torch.save = full
    try:
        with pytest.raises(CheckpointError, match=r"prove_resume failed\. On rank 1: OSError: No space left on device"):
            checkpoint.prove_resume(build, train_step)
    finally:
        torch.save = original


def test_arguments() -> None:
    nothing: Callable[..., Any] = lambda *_: None  # noqa: E731
    for arguments in ({"steps": 0}, {"before": -1}, {"steps": True}, {"steps": 1.0}):
        with pytest.raises(ArgumentError, match="must be an integer of at least"):
            checkpoint.prove_resume(nothing, nothing, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="must return a dict with a model, and returned a NoneType"):
        checkpoint.prove_resume(nothing, nothing)


def test_one_process_without_a_process_group() -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(3, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def step(run: dict[str, Any]) -> Tensor:
        loss = run["model"](torch.randn(4, 3)).square().mean()
        run["optimizer"].zero_grad()
        loss.backward()
        run["optimizer"].step()
        return loss

    report = checkpoint.prove_resume(make, step)
    assert report.equal and not report.unsaved, str(report)
