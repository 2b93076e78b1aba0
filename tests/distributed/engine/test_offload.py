"""Shards that rest on the host, with side streams that do their work as late as they may."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.late import late_host
from bed.models import CASES, Case, case
from bed.parity import Record, each_unit, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from unshard import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from unshard.engine.params.offload import OffloadPlan

HOST = CPUOffloadPolicy(pin_memory=False)
CAST = MixedPrecisionPolicy(torch.float64, torch.float32)  # bf16 is slow on many a CPU


def trained(each: Case, shard: Callable[[nn.Module], Any], steps: int = 3, **options: Any) -> Record:
    model = each.build()
    model = shard(model) or model
    return train(model, each, steps, rank=dist.get_rank(), size=dist.get_world_size(), **options)


def assert_identical(mine: Record, theirs: Record) -> None:
    assert mine.losses == theirs.losses
    for one, other in zip([mine.params, *mine.grads], [theirs.params, *theirs.grads], strict=True):
        assert one.keys() == other.keys() and one
        for name in one:
            assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("each", CASES, ids=str)
@world(1, 2, 3, 4)
def test_bitwise_as_on_the_device(each: Case) -> None:
    """Contract OFF-02, OFF-03."""
    for policy in (CAST, MixedPrecisionPolicy()) if each.name == "transformer" else (CAST,):
        here = trained(each, each_unit(each, fully_shard, mp_policy=policy))
        with late_host():
            there = trained(each, each_unit(each, fully_shard, mp_policy=policy, offload_policy=HOST))
        assert_identical(there, here)


@pytest.mark.parametrize("up, down", [("wait", ""), ("", "wait"), ("", "synchronize")])
@world(2)
def test_a_wait_left_out_would_be_noticed(up: str, down: str) -> None:
    each = case("transformer")
    here = trained(each, each_unit(each, fully_shard))
    with late_host(up, down), pytest.raises(AssertionError):
        assert_identical(trained(each, each_unit(each, fully_shard, offload_policy=HOST)), here)


@world(1, 2, 4)
def test_some_units_only() -> None:
    each = case("transformer")

    def shard(model: nn.Module) -> None:
        for number, unit in enumerate(each.units(model)):
            fully_shard(unit, mp_policy=CAST, **({"offload_policy": HOST} if number % 2 else {}))

    with late_host():
        some = trained(each, shard)
    assert_identical(some, trained(each, each_unit(each, fully_shard, mp_policy=CAST)))


@world(4)
def test_replicas() -> None:
    each = case("uneven")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    here = trained(each, each_unit(each, fully_shard, mesh=mesh))
    with late_host():
        there = trained(each, each_unit(each, fully_shard, mesh=mesh, offload_policy=HOST))
    assert_identical(there, here)


@pytest.mark.parametrize("originals", [True, False])
@world(2, 3)
def test_wrapper(originals: bool) -> None:
    each = case("transformer")
    options: dict[str, Any] = {"use_orig_params": originals, "mixed_precision": MixedPrecision(torch.float64)}

    def shard(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, **options)

    here = trained(each, shard, read=list)
    options["cpu_offload"] = CPUOffload(offload_params=True)
    with late_host():
        assert_identical(trained(each, shard, read=list), here)


def two_backwards(each: Case, seen: list[Any], **options: Any) -> list[torch.Tensor]:
    """Two synchronised backwards in a row, with a hook on every parameter; the gradients."""
    model = each.build()
    each_unit(each, fully_shard, **options)(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    for step in range(2):
        each.loss(model, each.batch(step)).backward()
    return [parameter.grad.to_local() for parameter in model.parameters()]


@world(1, 2)
def test_gradients_that_are_added_and_hooks_that_look() -> None:
    """Contract OFF-04: then the numbers have to be there at once."""
    each = case("transformer")
    here: list[torch.Tensor] = []
    there: list[torch.Tensor] = []
    expected = two_backwards(each, here)
    with late_host():
        found = two_backwards(each, there, offload_policy=HOST)
    assert len(there) == len(here) > 10
    for mine, theirs in zip([*found, *there], [*expected, *here], strict=True):
        assert torch.equal(mine, theirs)


@world(2)
def test_without_a_graph_the_program_may_write_next() -> None:
    each = case("transformer")
    model, plain = each.build(), each.build()
    inputs, _ = each.batch(0)
    with late_host() as copy_streams, torch.no_grad():
        each_unit(each, fully_shard, offload_policy=HOST)(model)
        for _ in range(2):
            torch.testing.assert_close(model(inputs), plain(inputs))
            assert not copy_streams.up.steps  # type: ignore[attr-defined]
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(1.5)


@pytest.mark.parametrize("where", ["forward", "backward"])
@world(2)
def test_after_a_failure(where: str) -> None:
    each = case("transformer")
    model, reference = each.build(), each.build()

    def fail(*unused: Any) -> None:
        raise KeyError("boom")

    with late_host():
        each_unit(each, fully_shard, offload_policy=HOST)(model)
        each_unit(each, fully_shard)(reference)
        block = list(each.units(model))[1]
        attach = block.register_forward_hook if where == "forward" else block.register_full_backward_hook
        handle = attach(fail)
        with pytest.raises(KeyError, match="boom"):
            each.loss(model, each.batch(0)).backward()
        handle.remove()
        for parameter in model.parameters():
            parameter.grad = None
        for each_model in (model, reference):
            each.loss(each_model, each.batch(1)).backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())


def test_too_little_page_locked_memory() -> None:
    real = torch.zeros

    def zeros(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")
        return real(*args, **options)

    with mock.patch.object(torch, "zeros", zeros):
        with pytest.warns(UserWarning, match=r"3\.0 MiB of page-locked .*\(CUDA error: out of memory\).*ulimit"):
            memory = OffloadPlan(torch.device("cpu"), pin=True).memory(3 << 20)
    assert memory.numel() == 3 << 20 and not memory.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OffloadPlan(torch.device("cpu"), pin=False).memory(8)


WAITS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "step": lambda model, optimizer: optimizer.step(),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "load_state_dict": lambda model, optimizer: model.load_state_dict(vars(model)["state"]),
    "without a graph": lambda model, optimizer: torch.no_grad()(model)(torch.ones(2, 4)),
    "frozen": lambda model, optimizer: model.requires_grad_(False)(torch.ones(2, 4)),
    "layers alone": lambda model, optimizer: torch.no_grad()(model[0])(torch.ones(2, 4)),
}


@pytest.mark.parametrize("how", WAITS)
@world(2)
def test_what_waits_for_uploads(how: str) -> None:
    """Before parameters are written; a forward that a backward may follow does not. tests/gpu shows what it is for."""
    with late_host() as copy_streams:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in (*model, model):
            fully_shard(layer, offload_policy=HOST)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(2, 4)).sum().backward()
        vars(model)["state"] = model.state_dict()
        with mock.patch.object(copy_streams.up, "synchronize", wraps=copy_streams.up.synchronize) as wait:
            model(torch.ones(2, 4))
            assert wait.call_count == 0
            WAITS[how](model, optimizer)
            assert wait.call_count > 0


@pytest.mark.parametrize("pinned", [True, False])
@world(1)
def test_one_rank_sends_its_gradients_at_once(pinned: bool) -> None:
    """They have no sum to wait for. To memory that is not page-locked the host would have to wait for the copy."""
    with late_host() as copy_streams, mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: pinned):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for layer in (*model, model):
            fully_shard(layer, offload_policy=HOST)
        sent: list[int] = []
        with mock.patch.object(copy_streams.down, "copy", wraps=copy_streams.down.copy) as carry:
            hidden = model[1](model[0](torch.ones(2, 4)))
            hidden.register_hook(lambda gradient: sent.append(carry.call_count))
            model[2](hidden).sum().backward()
        assert sent == [1 if pinned else 0]
        assert carry.call_count == 3


@world(2)
def test_pieces_are_loaded_when_no_shard_is_on_its_way() -> None:
    with late_host() as copy_streams:
        model = FullyShardedDataParallel(nn.Linear(4, 4), cpu_offload=CPUOffload(offload_params=True))
        with pytest.warns(FutureWarning, match="deprecated"):
            FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
        pieces = model.state_dict()
        model(torch.ones(2, 4))
        with mock.patch.object(copy_streams.up, "synchronize", wraps=copy_streams.up.synchronize) as wait:
            model.load_state_dict(pieces)
            assert wait.call_count > 0
