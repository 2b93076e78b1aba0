"""Whole programs on ranks of NCCL that share a CUDA device, compared with the unsharded model on that device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bed import world
from bed.boom import Boom, boom, boom_in_backward
from bed.cuda import rows_of_rank
from bed.packing import path
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, sharded
from bed.tied_units import shard_tied, tied_case
from bed.user_collectives import ToyGather, ToyReduceScatter, ignore_old_names
from bed.wrapped import full_parameters
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from unshard import CPUOffloadPolicy, FSDPModule, FullStateDictConfig, ShardingStrategy, StateDictType
from unshard import FullyShardedDataParallel as FSDP
from unshard.checkpoint import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from unshard.composable import fully_shard as legacy_fully_shard
from unshard.optim import clip_grad_norm_, flat
from unshard.torch_private import local_part

S = ShardingStrategy
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}

Loss = Callable[[nn.Module, int], torch.Tensor]


def loss_of_rank(rank: int, model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(10 * step + rank).cuda()).square().mean()


def local_loss(model: nn.Module, step: int) -> torch.Tensor:
    return loss_of_rank(dist.get_rank(), model, step)


def mean_loss(model: nn.Module, step: int, ranks: int | None = None) -> torch.Tensor:
    ranks = dist.get_world_size() if ranks is None else ranks
    return torch.stack([loss_of_rank(rank, model, step) for rank in range(ranks)]).mean()


def plain(model: Any, loss: Loss) -> None:
    loss(model, 0).backward()


def accumulate(model: Any, loss: Loss) -> None:
    """Two micro-batches of one rank are reduced together, and a third on top."""
    for step, last in enumerate((False, True, True)):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        loss(model, step).backward()


def recompute(model: Any, loss: Loss) -> None:
    model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)
    loss(model, 0).backward()
    loss(model, 1).backward()


def two_forwards(model: Any, loss: Loss) -> None:
    (loss(model, 0) + loss(model, 1)).backward()


def evaluate_in_between(model: Any, loss: Loss) -> None:
    first = loss(model, 0)
    with torch.no_grad():
        loss(model, 1)
    first.backward()


def raise_in_between(model: Any, loss: Loss) -> None:
    """All ranks raise in forward, then in backward, and go on."""
    block = model.blocks[1]
    for register, hook in (
        (block.register_forward_pre_hook, boom),
        (block.register_forward_hook, boom_in_backward),
    ):
        handle = register(hook)
        with pytest.raises(Boom):
            loss(model, 0).backward()
        handle.remove()
        model.zero_grad()
    loss(model, 1).backward()


PROGRAMS = (plain, accumulate, recompute, two_forwards, evaluate_in_between, raise_in_between)


def slices() -> dict[str, Any]:
    return {"reshard_after_forward": 2} if dist.get_world_size() == 4 else {"reshard_after_forward": True}


def replicas() -> dict[str, Any]:
    shape = (2, 2) if dist.get_world_size() == 4 else (dist.get_world_size(), 1)
    return {"mesh": init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard"))}


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "resharded": lambda: {"reshard_after_forward": True},
    "kept": lambda: {"reshard_after_forward": False},
    "slices": slices,
    "replicas": replicas,
    "offloaded": lambda: {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("options", OPTIONS)
@world(2, 3, 4, backend="nccl")
@path("mixed")
def test_programs(options: str) -> None:
    for program in PROGRAMS:
        model, reference = sharded(Stack().cuda(), **OPTIONS[options]()), Stack().cuda()
        for _ in range(2):
            program(model, local_loss)
            program(reference, mean_loss)
            if options == "offloaded":
                assert_gradients_on_host(model, reference)
            else:
                assert_gradients(model, reference, **TOLERANCE)
            for each in (model, reference):
                each.zero_grad()
        assert_at_rest(model)


def assert_gradients_on_host(model: nn.Module, reference: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.to_local().device.type == "cpu"
        torch.testing.assert_close(mine.grad.to_local().cuda(), rows_of_rank(theirs.grad), **TOLERANCE)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Its steps show a wrong scale of gradients, which Adam's do not."""
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(
    model: nn.Module, optimizer: Any, loss: Loss, steps: range, clip: Callable[..., torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Returns the norms of the gradients, if they are clipped."""
    norms = []
    for step in steps:
        loss(model, step).backward()
        if clip is not None:
            norms.append(clip(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def assert_parameters(model: nn.Module, reference: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach(), rtol=1e-3, atol=1e-5)


@world(2, 3, 4, backend="nccl")
@path("mixed")
def test_clipping_and_flat_optimizers() -> None:
    for make in (lambda optimizer: optimizer, flat):
        model, reference = sharded(Stack().cuda()), Stack().cuda()
        norms = train(model, make(sgd(model)), local_loss, range(4), clip_grad_norm_)
        expected = train(reference, sgd(reference), mean_loss, range(4), nn.utils.clip_grad_norm_)
        torch.testing.assert_close(torch.stack(norms), torch.stack(expected), **TOLERANCE)
        assert_parameters(model, reference)


@world(2, 3, 4, backend="nccl")
@path("mixed")
def test_steps_in_backward_of_offloaded_units() -> None:
    """The same bits as with a step of its own."""
    results = []
    for ahead in (False, True):
        model = sharded(Stack().cuda(), offload_policy=CPUOffloadPolicy())
        optimizer = flat(torch.optim.AdamW(model.parameters(), 1e-2, fused=True), step_in_backward=ahead)
        train(model, optimizer, local_loss, range(4))
        results.append([each.detach().to_local().clone() for each in model.parameters()])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@world(2, 3, 4, backend="nccl")
@path("mixed")
def test_tied_units() -> None:
    for order in ("tokens head", "head tokens"):
        case, rank, size = tied_case(), dist.get_rank(), dist.get_world_size()
        model, reference = shard_tied(case.build().cuda(), order), case.build().cuda()
        for step in range(3):
            inputs, targets = (each.cuda() for each in case.batch(step))
            cut = slice(rank * len(inputs) // size, (rank + 1) * len(inputs) // size)
            case.loss(model, (inputs[cut], targets[cut])).backward()
            case.loss(reference, (inputs, targets)).backward()
        assert_gradients(model, reference, **TOLERANCE)


@ignore_old_names
@world(2, 3, 4, backend="nccl")
@path("mixed")
def test_collectives_of_the_user() -> None:
    model, reference = sharded(Stack().cuda(), reshard_after_forward=True), Stack().cuda()
    gather, scatter = ToyGather(), ToyReduceScatter()
    model.blocks[0].set_custom_all_gather(gather)
    model.blocks[1].set_custom_reduce_scatter(scatter)
    for step in range(3):
        local_loss(model, step).backward()
        mean_loss(reference, step).backward()
    assert_gradients(model, reference, **TOLERANCE)
    assert gather.calls and scatter.calls


@world(2, 3, 4, backend="nccl")
@path("mixed")
def test_a_checkpoint(tmp_path: Path) -> None:
    """Parameters and optimizer state that another model loads are the same, bit by bit."""
    saved = sharded(Stack().cuda())
    optimizer = torch.optim.AdamW(saved.parameters(), 1e-2)
    train(saved, optimizer, local_loss, range(2))
    weights, state = get_state_dict(saved, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    loaded = sharded(Stack().cuda())
    with torch.no_grad():
        for each in loaded.parameters():
            each.zero_()
    other = torch.optim.AdamW(loaded.parameters(), 1e-2)
    weights, state = get_state_dict(loaded, other)
    into = {"model": weights, "optimizer": state}
    dcp.load(into, checkpoint_id=tmp_path)
    set_state_dict(loaded, other, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    for model, stepper in ((saved, optimizer), (loaded, other)):
        train(model, stepper, local_loss, range(2, 4))
    for mine, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["fully_shard", "offload", "wrapper"])
@world(2, 3, backend="nccl")
def test_full_state_dicts(kind: str) -> None:
    """Tensors go through the device, also those that are in host memory; `cpu_offload` says where they end."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        if kind == "wrapper":
            model: nn.Module = FSDP(Stack().cuda(), use_orig_params=True)
        else:
            options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if kind == "offload" else {}
            model = sharded(Stack() if options else Stack().cuda(), **options)
        return model, torch.optim.AdamW(model.parameters(), 1e-2)

    (saved, optimizer), (loaded, other) = build(), build()
    train(saved, optimizer, local_loss, range(2))
    state = full_state_dict(saved)
    states = full_optimizer_state_dict(saved, optimizer)
    assert all(each.device.type == "cpu" for each in state.values()) and bool(state) == (dist.get_rank() == 0)
    load_full_state_dict(loaded, state)
    load_full_optimizer_state_dict(loaded, other, states)
    everywhere = full_state_dict(loaded, rank0_only=False, cpu_offload=False)
    home = "cpu" if kind == "offload" else "cuda"
    assert len(everywhere) == len(Stack().state_dict()) and {each.device.type for each in everywhere.values()} == {home}
    for name, value in state.items():
        assert torch.equal(everywhere[name].cpu(), value)
    for model, stepper in ((saved, optimizer), (loaded, other)):
        train(model, stepper, local_loss, range(2, 4))
    for mine, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(local_part(mine), local_part(theirs))


# --- two dimensions ------------------------------------------------------------------------------------------------


def parallel(model: Stack, mesh: DeviceMesh) -> Stack:
    for block in model.blocks:
        parallelize_module(block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return model


@world(4, backend="nccl")
@path("mixed")
def test_tensor_parallelism() -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference = parallel(Stack().cuda(), mesh["tp"]), Stack().cuda()
    sharded(model, mesh=mesh["dp"])
    optimizer, other = sgd(model), sgd(reference)
    for step in range(3):
        loss_of_rank(mesh["dp"].get_local_rank(), model, step).backward()
        mean_loss(reference, step, ranks=2).backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1), **TOLERANCE)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    assert_parameters(model, reference)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(4, backend="nccl")
@path("mixed")
def test_a_wrapper_with_tensor_parallelism(originals: bool) -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = Stack().cuda()
    inner = parallel(Stack().cuda(), mesh["tp"])
    for number, block in enumerate(inner.blocks):
        inner.blocks[number] = FSDP(block, device_mesh=mesh["dp"], use_orig_params=originals)
    model = FSDP(inner, device_mesh=mesh["dp"], use_orig_params=originals)
    optimizer, other = sgd(model), sgd(reference)
    for step in range(3):
        loss_of_rank(mesh["dp"].get_local_rank(), model, step).backward()
        mean_loss(reference, step, ranks=2).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        state = model.state_dict()
    for name, theirs in reference.state_dict().items():
        torch.testing.assert_close(state[name], theirs, rtol=1e-4, atol=1e-6)


# --- the other front-ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2], ids=lambda each: each.name)
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(4, backend="nccl")
@path("mixed")
def test_a_wrapper_with_replicas(originals: bool, strategy: ShardingStrategy) -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"device_mesh": mesh, "sharding_strategy": strategy, "use_orig_params": originals}
    inner, reference = Stack().cuda(), Stack().cuda()
    for number, block in enumerate(inner.blocks):
        inner.blocks[number] = FSDP(block, **options)
    model = FSDP(inner, **options)
    train(model, sgd(model), local_loss, range(3))
    train(reference, sgd(reference), mean_loss, range(3))
    for name, mine in full_parameters(model).items():
        torch.testing.assert_close(mine, reference.get_parameter(name).detach(), rtol=1e-3, atol=1e-5)


@world(2, 3, 4, backend="nccl")
@path("mixed")
def test_the_legacy_call() -> None:
    model, reference = Stack().cuda(), Stack().cuda()
    for block in model.blocks:
        legacy_fully_shard(block)
    legacy_fully_shard(model)
    optimizer, other = sgd(model), sgd(reference)
    for step in range(4):
        mine, theirs = local_loss(model, step), mean_loss(reference, step)
        for loss, stepper in ((mine, optimizer), (theirs, other)):
            loss.backward()
            stepper.step()
            stepper.zero_grad()
        mean = mine.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / dist.get_world_size(), theirs.detach(), **TOLERANCE)
