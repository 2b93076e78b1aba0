"""`verify` finds planted faults, names the parameter and the cause, and finds nothing in models that are right."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed.world import mostly_slow
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from unshard import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    dropin,
    fully_shard,
    sync_module_states,
)
from unshard.errors import ArgumentError, StateError
from unshard.tools import verification, verify
from unshard.tools.program import Program, default_optimizer, shard_blocks

WIDTH = 6


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 5))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def floats(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


class Language(nn.Module):
    """Tied embeddings around transformer layers."""

    def __init__(self, tied: bool = True, layers: int = 1):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), x.roll(-1, 1).flatten())


def checked(program: Program, ranks: Any = 2, **options: Any) -> Any:
    """Return the only run, after checks that every result must pass."""
    if program.optimizer is default_optimizer:
        program = replace(program, optimizer=sgd)  # quicker
    found = verify(program, ranks=ranks, **{"steps": 2, **options})
    assert str(found)
    (run,) = found.runs
    assert found.agree == run.agree == (run.differs is None)
    return run


def causes(run: Any) -> str:
    return " ".join(run.causes)


# -- planted faults -----------------------------------------------------------------------------------------


def untie(model: nn.Module) -> nn.Module:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return shard_blocks(model)


def test_a_weight_that_sharding_unties() -> None:
    run = checked(Program(partial(Language, True, 0), shard=untie))
    assert (run.differs.what, run.differs.name, run.differs.step) == ("gradient", "embedding.weight", 1)
    assert "embedding.weight and head.weight are one tied parameter" in causes(run)


def test_different_values_at_the_start() -> None:
    def build() -> nn.Module:
        model = mlp()
        with torch.no_grad():
            model[2].weight += float(os.environ["RANK"])
        return model

    run = checked(Program(build, batch=floats))
    assert (run.differs.what, run.differs.name, run.differs.step) == ("parameter", "2.weight", 0)
    assert "Rank 1 initializes 2.weight with other values than rank 0" in causes(run)
    assert len(run.causes) == 1


def test_values_that_are_different_only_before_they_are_broadcast_agree() -> None:
    def build() -> nn.Module:
        torch.manual_seed(os.getpid())
        return mlp()

    def shard(model: nn.Module) -> nn.Module:
        sync_module_states(model)
        return shard_blocks(model)

    assert checked(Program(build, batch=floats, shard=shard)).agree


class Unseeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unseeded = torch.Generator()
        unseeded.seed()
        return self.linear(x) * (torch.rand(len(x), 3, generator=unseeded) > 0.3)


def test_dropout_without_a_seed() -> None:
    run = checked(Program(Unseeded, batch=floats))
    assert (run.differs.what, run.differs.name, run.differs.step) == ("loss", "linear.weight", 1)
    assert "forward draws random numbers without a seed" in causes(run)


def test_batch_norm() -> None:
    model = partial(nn.Sequential, nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    run = checked(Program(model, batch=floats))
    assert (run.differs.what, run.differs.name, run.differs.step) == ("gradient", "0.weight", 1)
    assert "Batch norm (1) computes statistics of the local batch only" in causes(run)


def test_a_sum_instead_of_a_mean() -> None:
    run = checked(Program(mlp, batch=floats, loss=lambda model, x: model(x).square().sum()))
    assert (run.differs.what, run.differs.name) == ("gradient", "0.weight")
    assert run.differs.difference == pytest.approx(1, rel=1e-3)  # twice the mean over two ranks
    assert "The loss is a sum over samples" in causes(run)


@pytest.mark.slow
def test_batch_norm_is_not_blamed_for_a_sum() -> None:
    model = partial(nn.Sequential, nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    run = checked(Program(model, batch=floats, loss=lambda model, x: model(x).square().sum()))
    assert run.differs.name == "0.weight"
    assert "Batch norm" not in causes(run)
    assert "The loss is a sum over samples" in causes(run)


@pytest.mark.slow
def test_a_mean_over_uneven_numbers() -> None:
    def batch(rank: int, step: int) -> torch.Tensor:
        return torch.randn(2 + 4 * rank, WIDTH)

    run = checked(Program(mlp, batch=batch))
    assert (run.differs.what, run.differs.name) == ("gradient", "0.weight")
    assert "the weights (0.25, 0.75), but sharding gives 0.5 to each" in causes(run)


@pytest.mark.slow
def test_even_weights_are_no_cause() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x + x.mean())

    run = checked(Program(Mixing, batch=floats))
    assert run.agree
    assert "Not compared with one batch of all ranks" in str(run.notes)


def test_a_parameter_whose_gradients_nobody_reduces() -> None:
    def shard(model: nn.Module) -> nn.Module:
        return fully_shard(model, ignored_params={model[2].weight})

    run = checked(Program(mlp, batch=floats, shard=shard, optimizer=sgd))
    assert (run.differs.what, run.differs.name, run.differs.step) == ("gradient", "2.weight", 1)
    assert "2.weight belong to no unit" in causes(run)
    assert "nobody reduces it" in causes(run)


def test_a_hook_that_drops_the_gradient_of_one_rank() -> None:
    class Dropping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * (dist.get_rank() == 0)

    def shard(model: nn.Module) -> nn.Module:
        model[0].register_forward_hook(lambda module, args, output: Dropping.apply(output))
        return shard_blocks(model)

    run = checked(Program(mlp, batch=floats, shard=shard), ranks=3)
    assert (run.differs.what, run.differs.name, run.differs.step) == ("gradient", "0.weight", 1)
    assert "ranks have the weights (0.333, 0, 0) instead of 0.333" in causes(run)
    assert "Nothing of rank 1, 2 arrives" in causes(run)


def test_a_loss_that_depends_on_the_rank() -> None:
    run = checked(Program(mlp, batch=floats, loss=lambda m, x: m(x).square().mean() * (1 + dist.get_rank())))
    assert (run.differs.what, run.differs.name, run.differs.step) == ("loss", "0.weight", 1)
    assert "2 times as large on rank 1" in causes(run)
    assert "ranks have the weights (0.5, 1) instead of 0.5" in causes(run)


class Centered(nn.Module):
    def __init__(self, constant: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3, bias=False)
        self.constant = constant
        self.register_buffer("center", torch.ones(WIDTH) + constant * float(os.environ["RANK"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x * self.center)
        if not self.constant:
            self.center += x.mean() / 10
        return output


@pytest.mark.parametrize("constant", [False, True])
def test_a_buffer_that_differs_between_ranks(constant: bool) -> None:
    run = checked(Program(partial(Centered, constant), batch=floats), ranks=3)
    assert (run.differs.what, run.differs.name, run.differs.step) == ("loss", "linear.weight", 1 if constant else 2)
    said = (
        "Ranks build buffers center with different" if constant else "Buffers center differ between ranks, because each"
    )
    assert run.causes[-1].startswith(said) and len(run.causes) == 1 + constant


@pytest.mark.filterwarnings("ignore:Unsharded parameters of unit")
@pytest.mark.slow
def test_forward_writes_to_a_parameter() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
            return self.linear(x)

    run = checked(Program(Writing, batch=floats))
    assert "Forward writes to linear.weight in place" in causes(run)


@pytest.mark.slow
def test_sharding_freezes_a_parameter() -> None:
    def shard(model: nn.Module) -> nn.Module:
        model[2].weight.requires_grad_(False)
        return shard_blocks(model)

    run = checked(Program(mlp, batch=floats, shard=shard))
    assert (run.differs.what, run.differs.name, run.differs.step) == ("gradient", "2.weight", 1)
    assert "requires_grad of 2.weight differs" in causes(run)
    assert "The gradient of 2.weight is missing" in causes(run)


@pytest.mark.slow
def test_gradients_are_summed_instead_of_averaged() -> None:
    def shard(model: nn.Module) -> nn.Module:
        model = fully_shard(model)
        model.set_gradient_divide_factor(1.0)
        return model

    run = checked(Program(mlp, batch=floats, shard=shard, optimizer=sgd))
    assert (run.differs.what, run.differs.name) == ("gradient", "0.weight")
    assert "is 2 times the mean over ranks" in causes(run)


@pytest.mark.slow
def test_the_optimizer_is_built_differently() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size())

    run = checked(Program(mlp, batch=floats, optimizer=optimizer))
    assert (run.differs.what, run.differs.name, run.differs.step) == ("parameter", "0.weight", 1)
    assert "Losses and gradients agree" in causes(run)


# -- right models -------------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self, unused: bool):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4 if unused else 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                output = output.index_add(0, rows, expert(x[rows]) * weights[rows, number : number + 1])
        return output


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2)  # the batch is the second dimension
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][-1])


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(13, 5, mode="mean")
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return (self.bag(x, offsets) * self.scale * self.phase).abs()


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def recomputing() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2)]
    return nn.Sequential(*map(checkpoint_wrapper, layers), nn.Linear(WIDTH, 1))


def wrapped(model: nn.Module) -> nn.Module:
    model[0] = FullyShardedDataParallel(model[0], use_orig_params=True)
    return FullyShardedDataParallel(model, use_orig_params=True)


def in_bf16(model: nn.Module) -> nn.Module:
    return shard_blocks(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def as_one_unit(model: nn.Module) -> nn.Module:
    fully_shard(model).set_reduce_scatter_unused_params(True)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return mlp()


def materialized(model: nn.Module) -> nn.Module:
    model = shard_blocks(model)
    model.to_empty(device="cpu")
    for number, each in enumerate(model.parameters()):
        nn.init.constant_(each, 0.1 * number)
    return model


def bags(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(13, (7,)), torch.tensor([0, 2, 3])


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))


def rounded(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1 + 2.0**-23 * torch.randint(-1, 2, each.shape, generator=generator))
    return shard_blocks(model)


def sensitive(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A rounding error of a parameter changes this loss a lot."""
    return torch.sin(3e3 * model(x)).mean()


RIGHT: dict[str, Program] = {
    "mlp": Program(mlp, optimizer=partial(default_optimizer)),
    "experts with Adam": Program(
        partial(Experts, True), batch=floats, shard=as_one_unit, optimizer=partial(default_optimizer)
    ),
    "transformer": Program(partial(Language, False, 2)),
    "tied embeddings": Program(Language),
    "lstm": Program(Recurrent, batch=lambda rank, step: torch.randn(4, 3, WIDTH)),
    "group norm": Program(convolution, batch=lambda rank, step: torch.randn(2, 3, 6, 6)),
    "experts": Program(partial(Experts, False), batch=floats, shard=as_one_unit),
    "unused expert": Program(partial(Experts, True), batch=floats, shard=as_one_unit),
    "frozen backbone": Program(frozen),
    "bf16": Program(mlp, shard=in_bf16),
    "recomputing": Program(recomputing),
    "wrapper": Program(mlp, shard=wrapped),
    "bags, complex and one element": Program(Bags, batch=bags, shard=fully_shard, optimizer=sgd),
    "sensitive": Program(mlp, batch=floats, shard=rounded, loss=sensitive),
    "meta device": Program(on_meta, shard=materialized),
}


@pytest.mark.parametrize("name", mostly_slow(RIGHT, quick=["tied embeddings", "unused expert", "wrapper"]))
def test_finds_nothing_in_right_models(name: str) -> None:
    run = checked(RIGHT[name], ranks=3)
    assert run.agree, (run.differs, run.causes)
    assert run.causes == []
    not_compared = any("Not compared with one batch" in each for each in run.notes)
    assert not_compared == (name == "bags, complex and one element")  # its offsets cannot be joined


@pytest.mark.slow
def test_adam_does_not_step_complex_shards() -> None:
    """A bug of torch 2.11 to 2.13, also with its own `fully_shard`."""
    adam = partial(default_optimizer)
    run = checked(Program(Bags, batch=bags, shard=fully_shard, optimizer=adam))
    assert (run.differs.what, run.differs.name, run.differs.step) == ("parameter", "phase", 1)
    assert "phase is complex" in causes(run)


# -- results and bad input ----------------------------------------------------------------------------------


def test_the_result_is_a_table_and_a_dict() -> None:
    found = verify(Program(mlp, batch=floats, loss=lambda m, x: m(x).sum(), name="build"), ranks=(1, 2), steps=1)
    kept = json.loads(json.dumps(found.to_dict()))
    assert list(kept)[:2] == ["kind", "unshard"]
    assert (kept["kind"], kept["agree"], kept["steps"]) == ("verify", False, 1)
    one, two = kept["runs"]
    assert (one["ranks"], one["agree"], one["differs"], one["causes"]) == (1, True, None, [])
    assert (two["ranks"], two["agree"], len(two["causes"])) == (2, False, 1)
    assert set(two["differs"]) == {"what", "name", "step", "difference", "tolerance"}
    assert "gradient of 0.weight     1     1.0e+00    1.0e-03" in str(found)
    assert str(found).endswith("The sharded model trains differently.")


@pytest.mark.slow
def test_low_precision_is_compared_loosely_and_says_so() -> None:
    run = checked(Program(mlp, shard=in_bf16, batch=floats), steps=1)
    assert "computes in torch.bfloat16, so differences below 0.05" in run.notes[0]
    run = checked(Program(mlp, shard=in_bf16, batch=floats), steps=1, tolerance=1e-6)
    assert not run.agree


def test_the_same_batch_on_all_ranks_is_noted() -> None:
    run = checked(Program(mlp, batch=torch.ones(3, WIDTH)), steps=1)
    assert run.agree
    assert "All ranks had the same batch" in " ".join(run.notes)


def test_the_calling_process_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    before = dict(os.environ)
    verify(mlp, ranks=1, steps=1)
    assert torch.equal(torch.rand(3), expected)
    assert dict(os.environ) == before
    assert not dist.is_initialized()


PROGRAM = """
from torch import nn
from torch.distributed.fsdp import fully_shard

def shard(model):
    return fully_shard(model)

def build():
    return nn.Linear(4, 3)

def nothing():
    return 5

def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.mark.slow  # a new process imports torch
def test_a_file(tmp_path: Path) -> None:
    """The processes of ranks have the drop-in if this one has it. Without it, PyTorch's own FSDP is refused."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    assert "shard() calls PyTorch's own FSDP" in refused(f"{file}:build", ranks=1)
    with dropin.stand_in():
        found = verify(f"{file}:build", ranks=(1, 2), steps=2, batch="5x4")
    assert found.agree
    assert found.name == "build"


def refused(program: Any, **options: Any) -> str:
    with pytest.raises(ArgumentError) as info:
        verify(program, **options)
    text = str(info.value)
    assert "\n" not in text
    return text


def test_bad_arguments(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import nothing_of_this_name")
    assert "cannot be imported: ModuleNotFoundError" in refused(f"{file}:build")
    file.write_text(PROGRAM)
    assert "has no function 'model'" in refused(f"{file}:model")
    assert "There is no file" in refused("missing.py:build")
    assert "got (0,)" in refused(mlp, ranks=(0,))
    assert "got ()" in refused(mlp, ranks=())
    assert "steps must be" in refused(mlp, steps=0)
    assert "'cpu' or 'cuda', got 'tpu'" in refused(mlp, device="tpu")
    assert "got Sequential" in refused(mlp())
    assert "got '4xq'" in refused(mlp, batch="4xq")
    assert "returned int" in refused(lambda: 5)
    assert "build() raised KeyError" in refused(Program(lambda: {}["x"], name="build"))


def test_bad_batches_and_losses() -> None:
    text = refused(mlp, batch="4x5")
    assert text.startswith("The loss of the unsharded model raised RuntimeError: ") and "mat1 and mat2" in text
    assert refused(Program(mlp, batch=lambda: 3)).startswith("batch(rank, step) raised TypeError: ")
    assert "optimizer(model) returned NoneType" in refused(Program(mlp, batch=floats, optimizer=lambda model: None))
    assert "a tensor of shape (4, 5)" in refused(Program(mlp, loss=lambda model, x: model(x)))
    assert "without a graph" in refused(Program(mlp, loss=lambda model, x: model(x).sum().detach()))
    assert "The loss of the unsharded model is nan" in refused(
        Program(mlp, loss=lambda model, x: model(x).sum() * torch.nan)
    )
    draw = random.SystemRandom().random
    other = Program(mlp, batch=lambda rank, step: torch.full((2, WIDTH), draw()))
    assert "batch(rank, step) returned other values in another process" in refused(other, ranks=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA devices")
def test_cuda_needs_devices() -> None:
    assert "2 ranks need 2 CUDA devices, but there are 0" in refused(mlp, ranks=2, device="cuda")


def failing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    if dist.get_world_size() == 2 and dist.get_rank() == 1:
        raise ZeroDivisionError("on purpose")
    return model(batch).square().mean()


def test_an_error_on_one_rank_ends_the_others() -> None:
    begin = time.monotonic()
    with pytest.raises(StateError, match=r"^Rank 1 of 2 failed: ZeroDivisionError: on purpose \(at .*\.py:\d+\)$"):
        verify(Program(mlp, loss=failing), ranks=2)
    assert time.monotonic() - begin < 60  # far less than a collective waits

    def build() -> nn.Module:
        return mlp() if os.environ["RANK"] == "0" else failing.absent  # type: ignore[attr-defined]

    with pytest.raises(
        ArgumentError, match=r"^Rank 1 of 2 failed: build\(\) raised AttributeError: .* \(at .*\.py:\d+\)$"
    ):
        verify(Program(build, name="build"), ranks=2)


def test_a_rank_that_dies() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if dist.get_world_size() == 2 and dist.get_rank() == 1:
            os._exit(3)
        return model(batch).square().mean()

    with pytest.raises(StateError, match=r"Rank 1 of 2 died with exit status 3"):
        verify(Program(mlp, loss=loss), ranks=2)


@pytest.mark.slow
def test_a_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "LIMIT_S", 2)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(600 * (dist.get_world_size() - 1))
        return model(batch).square().mean()

    with pytest.raises(StateError, match=r"Rank 0 of 2 did not finish in 2 s"):
        verify(Program(mlp, loss=loss), ranks=2)
