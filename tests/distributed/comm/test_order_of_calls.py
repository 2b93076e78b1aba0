"""Ranks that step, clip, scale or save between different forwards: an error names what each of them wants to do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.branches import quick
from bed.stack import assert_at_rest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import unshard
from unshard import FullyShardedDataParallel, checkpoint, fully_shard
from unshard.comm.order import check
from unshard.errors import OrderError
from unshard.optim import GradScaler, ShardedGradScaler

WIDTH = 4


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def sharded(**options: Any) -> nn.Module:
    model = layers()
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def wrapped() -> nn.Module:
    model = layers()
    for number in (0, 2):
        model[number] = FullyShardedDataParallel(model[number], use_orig_params=True)
    return FullyShardedDataParallel(model, use_orig_params=True)


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


class Training:
    """Optimizer steps after numbers of micro-batches that the caller says; gradients are reduced in each backward."""

    def __init__(self, kind: str = "step") -> None:
        self.model = wrapped() if kind.startswith("wrapper") else sharded()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self._kind = kind
        scaler = ShardedGradScaler if kind.startswith("wrapper") else GradScaler
        self._scaler = scaler("cpu", init_scale=2.0, enabled=kind.endswith("scale"))

    def window(self, micro_batches: int) -> None:
        for number in range(micro_batches):
            torch.manual_seed(number)
            self._scaler.scale(self.model(torch.randn(2, WIDTH)).square().sum()).backward()
        if self._kind == "clip":
            unshard.optim.clip_grad_norm_(self.model.parameters(), 1.0)
        elif self._kind == "wrapper, clip":
            self.model.clip_grad_norm_(1.0)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()


# --- optimizer steps -----------------------------------------------------------------------------------------------


WANTED = {
    "step": "step its optimizer",
    "clip": r"clip gradients \(clip_grad_norm_\)",
    "scale": r"unscale gradients \(GradScaler\)",
}


@pytest.mark.parametrize("good", [0, 3])
@pytest.mark.parametrize("kind", ["step", "clip", "scale", "wrapper, step", "wrapper, clip", "wrapper, scale"])
@world(2, 3)
def test_different_numbers_of_micro_batches(kind: str, good: int) -> None:
    """All ranks run four, so that collectives match; weights would be wrong, or clipping would hang."""
    with quick():
        training = Training(kind)
        for _ in range(good):
            training.window(2)
        call = WANTED[kind.split()[-1]]
        expected = rf"rank \d wants to (all-gather unit .*, rank \d to {call}|{call}, rank \d to all-gather unit)"
        with pytest.raises(OrderError, match=expected) as caught:
            for count in [1, 3, 2] if is_last() else [3, 1, 2]:
                training.window(count)
        text = str(caught.value)
        advice = "different numbers of micro-batches" in text and "Every rank must make the same calls" in text
        assert advice or (dist.get_rank() and "The error of rank 0 says what to do." in text), text
        assert "dummy" not in text and "unused_params" not in text, text
        if not kind.startswith("wrapper"):
            assert_at_rest(training.model)


@pytest.mark.parametrize("kind", ["step", "clip"])
@world(3)
def test_a_rank_without_micro_batches(kind: str) -> None:
    with quick():
        training = Training(kind)
        for _ in range(3):
            training.window(1)
        with pytest.raises(OrderError, match=f"{WANTED[kind]}.*all-gather unit|all-gather unit.*{WANTED[kind]}"):
            for count in ([3, 1], [1, 1, 1], [0, 1, 1, 1])[dist.get_rank()]:
                training.window(count)


@world(4)
def test_replicas_that_step_at_different_times() -> None:
    """Ranks that shard the parameters together agree with each other."""
    with quick():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(OrderError, match=r"(?s)step its optimizer.* of ranks [01], [23]\."):
            for count in [1, 3] if dist.get_rank() > 1 else [3, 1]:
                for _ in range(count):
                    model(torch.randn(2, WIDTH)).sum().backward()
                optimizer.step()
            model(torch.randn(2, WIDTH)).sum().backward()


@world(2)
def test_irregular_programs_are_refused_too() -> None:
    """Also if comparisons have become too many: nothing else would notice that a step comes at another point."""
    with quick(CHECKS_PER_LABEL=0, EXTRA_CHECK_EVERY=10**9):
        training = Training()
        for count in [1, 2, 1, 1, 3, 2, 1, 3]:
            training.window(count)
        with pytest.raises(OrderError, match=r"step its optimizer"):
            for count in [1, 3, 2] if is_last() else [3, 1, 2]:
                training.window(count)


@world(2)
def test_a_scaler_with_which_ranks_skip_different_steps() -> None:
    """Torch's looks at the shard of each rank. Without an overflow it works as before."""
    with quick(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.amp.GradScaler looks")
        model = wrapped()
        optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0)
        with pytest.raises(OrderError, match="step its optimizer"):
            for number in range(4):
                scaler.scale(model(torch.ones(1, WIDTH)).sum()).backward()
                if is_last() and number == 2:
                    next(each for each in model.parameters() if each.numel()).grad.fill_(torch.inf)
                scaler.step(optimizer)
                scaler.update()


def trained(model: nn.Module, make: Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]) -> list[torch.Tensor]:
    optimizers = make(list(model.parameters()))
    for seed in range(4):
        torch.manual_seed(seed)
        model(torch.randn(2, WIDTH)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]


@world(2, 3)
def test_different_numbers_of_optimizers() -> None:
    """Ranks divide their parameters among optimizers as they like, and have others for what is theirs alone."""
    own = nn.Linear(WIDTH, WIDTH)
    alone = torch.optim.SGD(own.parameters(), lr=0.1)

    def make(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        if not is_last():
            return [torch.optim.SGD(parameters, lr=0.1)]
        return [alone, *(torch.optim.SGD([each], lr=0.1) for each in parameters), alone]

    with quick():
        expected = trained(layers(), lambda parameters: [torch.optim.SGD(parameters, lr=0.1)])
        torch.testing.assert_close(trained(sharded(), make), expected)


@world(2)
def test_nothing_is_exchanged_once_steps_are_known() -> None:
    training, calls = Training("clip"), []
    store = check._orders[dist.group.WORLD]["gloo"]._store
    original = store.publish
    store.publish = lambda position, text: calls.append(text) or original(position, text)
    counts = []
    for _ in range(6):
        for micro_batches in (2, 1):
            training.window(micro_batches)
        counts.append(len(calls))
    assert any(WANTED["step"] in text for text in calls)
    assert counts[-1] == counts[-3] > 10


# --- calls outside of steps ----------------------------------------------------------------------------------------


def _summon(model: nn.Module, path: Path) -> None:
    with FullyShardedDataParallel.summon_full_params(model):
        pass


CALLS: dict[str, tuple[Callable[[nn.Module, Path], Any], str]] = {
    "save": (lambda model, path: checkpoint.save(path, model=model, step=1), "save a checkpoint"),
    "saver": (lambda model, path: checkpoint.Saver(path).save(model=model, step=1), r"save a checkpoint \(Saver\)"),
    "load": (lambda model, path: checkpoint.load(path, model=model), "load a checkpoint"),
    "full": (lambda model, path: checkpoint.full_state_dict(model), "gather the full state dict"),
    "load full": (lambda model, path: checkpoint.load_full_state_dict(model, {}), "load a full state dict"),
    "summon": (_summon, r"gather full parameters \(summon_full_params or a state dict\)"),
    "state dict": (
        lambda model, path: model.state_dict(),
        r"gather full parameters \(summon_full_params or a state dict\)",
    ),
    "optimizer": (
        lambda model, path: FullyShardedDataParallel.optim_state_dict(
            model, torch.optim.SGD(model.parameters(), momentum=0.9)
        ),
        r"gather optimizer state \(optim_state_dict\)",
    ),
}


@pytest.mark.parametrize("name", CALLS)
@world(2, 3)
def test_one_rank_makes_a_call_alone(name: str, tmp_path: Path) -> None:
    """The others go on with their training."""
    call, what = CALLS[name]
    with quick():
        training = Training("wrapper, step" if name in ("summon", "state dict", "optimizer") else "step")
        for _ in range(3):
            training.window(1)
        expected = rf"rank \d wants to ({what}, rank \d to all-gather unit|all-gather unit .*, rank \d to {what})"
        with pytest.raises(OrderError, match=expected):
            if is_last():
                call(training.model, tmp_path)
            for _ in range(2):
                training.window(1)


@world(2)
def test_calls_between_steps_are_learned(tmp_path: Path) -> None:
    """Results are those of a run without them, and steps go on without an exchange."""
    with quick():
        training, other = Training(), Training()
        for number in range(1, 5):
            training.window(1)
            checkpoint.save(tmp_path, model=training.model, step=number)
            other.window(1)
        state, expected = (checkpoint.full_state_dict(each.model, rank0_only=False) for each in (training, other))
        assert state.keys() == expected.keys()
        torch.testing.assert_close(state, copy.deepcopy(expected), rtol=0, atol=0)
