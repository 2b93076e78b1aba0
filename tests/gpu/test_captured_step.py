"""Captured steps on a GPU have the losses and parameters of the same steps without capture, bit by bit."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.captured_steps import (
    RATE,
    accumulated,
    adamw,
    assert_equal,
    cleared_first,
    clipped,
    locals_of,
    loss_of,
    plain,
    scaled,
    sgd,
    train,
)
from bed.stack import WIDTH, Stack, assert_at_rest, batch, sharded
from bed.wrapped import wrap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks import loopback
from unshard import CPUOffloadPolicy, MixedPrecisionPolicy, ModuleWrapPolicy, capture, composable
from unshard.optim import GradScaler, ShardedGradScaler, flat

STEPS = 20
FLOAT16 = {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float32)}
BFLOAT16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def usual(model: nn.Module) -> torch.optim.Optimizer:
    """With a learning rate that is a tensor, as captured steps have it: torch then computes in another order."""
    return torch.optim.AdamW(model.parameters(), torch.tensor(RATE, device="cuda"), capturable=True)


def flat_fused(model: nn.Module) -> torch.optim.Optimizer:
    return flat(adamw(model))


def flat_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return flat(sgd(model))


class Dropping(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(self.run(block, x), 0.2, self.training)
        return self.head(x)


class Recomputing(Stack):
    """Activation checkpointing with random numbers inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: nn.functional.dropout(block(y), 0.2), x, use_reentrant=False)
        return self.head(x)


class Compiled(Stack):
    backend = "aot_eager"

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend=self.backend)


class CompiledByInductor(Compiled):
    backend = "inductor"


def by_fully_shard(build: Callable[[], Stack], options: dict[str, Any]) -> nn.Module:
    return sharded(build().cuda(), **options)


def by_wrapper(build: Callable[[], Stack], options: dict[str, Any]) -> nn.Module:
    model = build().cuda()
    return wrap(model, list(model.blocks), **options)


def by_legacy_call(build: Callable[[], Stack], options: dict[str, Any]) -> nn.Module:
    model = build().cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank
        return composable.fully_shard(model, policy=ModuleWrapPolicy({type(model.blocks[0])}), **options)


def by_nothing(build: Callable[[], Stack], options: dict[str, Any]) -> nn.Module:
    return build().cuda()


def assert_bitwise(
    make_step: Callable[..., Any],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    build: Callable[[], Stack] = Stack,
    options: dict[str, Any] | None = None,
    shard: Callable[..., nn.Module] = by_fully_shard,
    make_scaler: Callable[..., Any] = GradScaler,
) -> None:
    expected, found = (
        train(captured, shard(build, options or {}), make_step, make_optimizer, make_scaler, steps=STEPS, device="cuda")
        for captured in (False, True)
    )
    assert_equal(expected, found)


CASES: dict[str, tuple[Any, ...]] = {
    "fused": (plain, adamw),
    "not fused": (plain, usual),
    "sgd": (plain, sgd),
    "flat": (plain, flat_fused),
    "flat sgd": (plain, flat_sgd),
    "clip": (clipped, adamw),
    "cleared first": (cleared_first, adamw),
    "cleared first, flat": (cleared_first, flat_fused),
    # The first five steps or so are skipped, and some of the replays.
    "fp16": (scaled, adamw, Stack, FLOAT16),
    "fp16 not fused": (scaled, sgd, Stack, FLOAT16),
    "fp16 flat": (scaled, flat_fused, Stack, FLOAT16),
    "bf16": (clipped, adamw, Stack, BFLOAT16),
    "bf16, flat": (plain, flat_fused, Stack, BFLOAT16),
    "dropout": (plain, adamw, Dropping),
    "checkpointing": (plain, adamw, Recomputing),
    "compiled": (plain, adamw, Compiled),
    "accumulated": (accumulated("nothing"), adamw),
    "accumulated without synchronisation": (accumulated("synchronise"), adamw),
    "accumulated flat": (accumulated("nothing"), flat_fused),
    "slices": (plain, adamw, Stack, {"reshard_after_forward": 2}),
    "wrapper": (plain, adamw, Stack, {"use_orig_params": True}, by_wrapper),
    "wrapper, flat parameters": (plain, adamw, Stack, {"use_orig_params": False}, by_wrapper),
    "wrapper fp16": (scaled, adamw, Stack, {"use_orig_params": True}, by_wrapper, ShardedGradScaler),
    "legacy call": (plain, adamw, Stack, {}, by_legacy_call),
    "not sharded": (plain, adamw, Dropping, {}, by_nothing),
    "not sharded, scaler": (scaled, adamw, Stack, {}, by_nothing),
}


@pytest.mark.parametrize("name", CASES)
@world(1, 2, 4, backend="nccl")
def test_bitwise(name: str) -> None:
    if name == "slices" and dist.get_world_size() == 1:
        return
    if name == "compiled":  # torch's compiler looks at gradients of tensors that are no leaves
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
    assert_bitwise(*CASES[name])


@pytest.mark.filterwarnings("ignore")
@world(1, backend="nccl")
def test_bitwise_compiled_by_inductor() -> None:
    assert_bitwise(plain, adamw, CompiledByInductor)


@world(4, backend="nccl")
def test_bitwise_over_replicas() -> None:
    options = {"mesh": init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))}
    for make_step in (plain, accumulated("synchronise"), accumulated("all-reduce")):
        assert_bitwise(make_step, adamw, Stack, options)


@world(1, backend="nccl")
def test_bitwise_in_a_simulated_job() -> None:
    dist.destroy_process_group()
    loopback.register()
    dist.init_process_group(loopback.NAME, store=dist.HashStore(), rank=0, world_size=8)
    for name in ("fused", "flat", "clip", "dropout", "accumulated"):
        assert_bitwise(*CASES[name])
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


# -- what changes between two replays ------------------------------------------------------------------------


class Trainer:
    def __init__(self, captured: bool, build: Callable[[], Stack] = Dropping, **options: Any):
        self.model = sharded(build().cuda(), **options)
        self.optimizer = adamw(self.model)
        self.step: Any = plain(self.model, self.optimizer)
        if captured:
            self.step = capture(self.step, self.model, self.optimizer)

    def run(self, count: int, rows: int = 6) -> list[torch.Tensor]:
        x = batch(dist.get_rank()).cuda()[:rows]
        return [self.step(x).clone() for _ in range(count)]


def seed(trainer: Trainer) -> None:
    torch.manual_seed(77)


def rate(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] = 2.0**-4


def load(trainer: Trainer) -> None:
    trainer.model.load_state_dict({name: value / 2 for name, value in trainer.model.state_dict().items()})


def assign(trainer: Trainer) -> None:
    trainer.model.load_state_dict({name: value / 2 for name, value in trainer.model.state_dict().items()}, assign=True)
    trainer.optimizer.param_groups[0]["params"] = list(trainer.model.parameters())


def load_optimizer(trainer: Trainer) -> None:
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())


def evaluate(trainer: Trainer) -> None:
    trainer.model.eval()
    with torch.no_grad():
        trainer.model(batch().cuda())
    trainer.model.train()


def unshard_and_reshard(trainer: Trainer) -> None:
    trainer.model.blocks[0].unshard()
    trainer.model.blocks[0].reshard()


def leave_unsharded(trainer: Trainer) -> None:
    trainer.model.blocks[0].unshard()


def another_shape(trainer: Trainer) -> None:
    trainer.run(2, rows=3)


@pytest.mark.parametrize(
    "between",
    [
        seed,
        rate,
        load,
        assign,
        load_optimizer,
        evaluate,
        unshard_and_reshard,
        leave_unsharded,
        another_shape,
    ],
    ids=lambda each: each.__name__,
)
@world(1, 2, backend="nccl")
def test_changes_reach_replays(between: Callable[[Trainer], None]) -> None:
    results = []
    for captured in (False, True):
        torch.manual_seed(3)
        trainer = Trainer(captured)
        losses = trainer.run(6)
        between(trainer)
        losses += trainer.run(6)
        results.append(losses + locals_of(trainer.model))
    assert trainer.step.recordings == 1
    assert_equal(*results)


# -- steps that cannot be recorded ---------------------------------------------------------------------------


@world(1, 2, backend="nccl")
def test_a_step_that_looks_at_its_loss() -> None:
    """It runs eagerly, with its line in the warning; random numbers work afterwards."""
    results = []
    for captured in (False, True):
        torch.manual_seed(3)
        trainer = Trainer(captured=False)
        optimizer, model = trainer.optimizer, trainer.model

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = loss_of(model, x)  # noqa: B023
            loss.backward()
            if loss.item() > 1e9:
                raise RuntimeError
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return loss.detach()

        trainer.step = capture(step, model, optimizer) if captured else step
        losses = trainer.run(3)
        if captured:
            with pytest.warns(UserWarning, match=r"test_captured_step.py:\d+, 'if loss.item\(\) > 1e9:', cannot be"):
                losses += trainer.run(1)
            assert_at_rest(model)
        losses += trainer.run(6 - len(losses))
        results.append(losses + locals_of(trainer.model))
    assert_equal(*results)


@world(2, 4, backend="nccl")
def test_a_rank_that_cannot_record() -> None:
    """All ranks run the step eagerly."""
    results = []
    for captured in (False, True):
        torch.manual_seed(3)
        trainer = Trainer(captured)
        if captured and dist.get_rank() == 1:

            def refuse(module: nn.Module, args: Any) -> None:
                if torch.cuda.is_current_stream_capturing():
                    raise ValueError("not in a recording")

            trainer.model.blocks[1].register_forward_pre_hook(refuse)
        losses = trainer.run(3)
        if captured:
            reason = "not in a recording" if dist.get_rank() == 1 else "another rank could not record it"
            with pytest.warns(UserWarning, match=reason):
                losses += trainer.run(1)
            assert_at_rest(trainer.model)
            assert trainer.step.recordings == 0
        losses += trainer.run(6 - len(losses))
        results.append(losses + locals_of(trainer.model))
    assert_equal(*results)


@world(1, backend="nccl")
def test_shards_on_the_host() -> None:
    trainer = Trainer(captured=True, offload_policy=CPUOffloadPolicy())
    with pytest.warns(UserWarning, match="CPUOffloadPolicy"):
        trainer.run(1)
    trainer.run(5)
    assert trainer.step.recordings == 0


@world(1, backend="nccl")
def test_arguments_on_the_host() -> None:
    trainer = Trainer(captured=True)
    model, optimizer = trainer.model, trainer.optimizer
    step = capture(lambda x: plain(model, optimizer)(x.cuda()), model, optimizer)
    with pytest.warns(UserWarning, match="is a tensor on 'cpu'. Move it to 'cuda:0' before the call"):
        step(batch())


@world(1, 2, backend="nccl")
def test_an_exception_of_the_step_itself() -> None:
    trainer = Trainer(captured=True)
    trainer.run(3)

    def fail(module: nn.Module, args: Any) -> None:
        raise ValueError("broken")

    handle = trainer.model.head.register_forward_pre_hook(fail)
    with pytest.warns(UserWarning, match="broken"), pytest.raises(ValueError, match="broken"):
        trainer.run(1)
    handle.remove()
    assert_at_rest(trainer.model)
    trainer.run(8)
    assert trainer.step.recordings == 1


@world(1, 2, backend="nccl")
def test_host_memory_belongs_to_others_in_a_replay() -> None:
    """Kernels that read addresses from pinned memory would find other values there, unless torch keeps it for them.

    Torch 2.11 keeps it: there this test passes with such kernels, too.
    """
    results = []
    for captured in (False, True):
        torch.manual_seed(3)
        trainer = Trainer(captured)
        losses = trainer.run(6)
        taken = [
            torch.full((1 << size,), 0xFF, dtype=torch.uint8).pin_memory() for size in range(6, 16) for _ in range(64)
        ]
        losses += trainer.run(3)
        results.append(losses + locals_of(trainer.model))
        del taken
    assert trainer.step.recordings == 1
    assert_equal(*results)


@pytest.mark.parametrize("make_optimizer", [adamw, flat_fused])
@world(1, 2, backend="nccl")
def test_gradients_can_be_read_and_changed_between_calls(make_optimizer: Any) -> None:
    """Each call returns the gradients of the call before, which were doubled in between."""
    results = []
    for captured in (False, True):
        model = sharded(Stack().cuda())
        optimizer = make_optimizer(model)

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.step()
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss.detach()

        run: Any = capture(step, model, optimizer) if captured else step
        results.append([])
        for number in range(10):
            results[-1].append(run(batch(number).cuda()).clone())
            for each in model.parameters():
                # A program that holds a gradient until the next call gets a new one there, and nothing is recorded.
                results[-1].append(each.grad.to_local().clone())
                each.grad.to_local().mul_(2)
        results[-1] += locals_of(model)
    assert run.recordings == 1
    assert_equal(*results)


# -- memory and the end of the job ---------------------------------------------------------------------------


@world(1, 2, backend="nccl")
def test_memory_does_not_grow() -> None:
    trainer = Trainer(captured=True)
    trainer.run(10)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    trainer.run(1000)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@world(1, backend="nccl")
def test_memory_of_many_signatures_is_bounded() -> None:
    trainer = Trainer(captured=True)
    reserved = []
    for rows in range(1, 51):
        x = torch.randn(16 * rows, WIDTH, device="cuda")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*max_graphs")
            for _ in range(5):
                trainer.step(x)
        assert trainer.step.recordings <= 4
        reserved.append(torch.cuda.memory_reserved())
    assert max(reserved[10:]) <= reserved[10] + (64 << 20)
    trainer.step.forget()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved[0] + (64 << 20)


@world(2, backend="nccl")
def test_the_job_ends_with_recordings_alive() -> None:
    """NCCL would wait for them forever."""
    trainer = Trainer(captured=True)
    trainer.run(5)
    assert trainer.step.recordings == 1
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    assert trainer.step.recordings == 0
    dist.init_process_group("nccl", store=dist.PrefixStore("again", store), rank=rank, world_size=size)
