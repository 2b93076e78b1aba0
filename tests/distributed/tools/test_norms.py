"""`watch.norms()`: the numbers of the unsharded model, for any sharding, in one collective."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import models, world
from bed.recorders import Collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unshard import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from unshard.tools import watch
from unshard.tools.watching import Watch

UNEVEN, TRANSFORMER = models.case("uneven"), models.case("transformer")


def statistics(tensor: Tensor | None) -> dict[str, float] | None:
    if tensor is None:
        return None
    wide = tensor.detach().double()
    return {"norm": wide.norm().item(), "max": wide.abs().max().item(), "mean": wide.mean().item()}


def expected(case: models.Case, unused: str = "") -> dict[str, Any]:
    model = case.build()
    if unused:
        model.get_submodule(unused).requires_grad_(False)
    case.loss(model, case.batch(0)).backward()
    found = dict(model.named_parameters())
    return {name: {"gradient": statistics(each.grad), "value": statistics(each)} for name, each in found.items()}


def check(case: models.Case, model: nn.Module, share: tuple[int, int] | None = None, **options: Any) -> Watch:
    """`share` is this rank's share of the batch, and how many there are."""
    rank, size = share or (dist.get_rank(), dist.get_world_size())
    case.loss(model, models.shard(case.batch(0), rank, size)).backward()
    with watch(model) as watched:
        with Collectives() as seen, warnings.catch_warnings():
            warnings.simplefilter("error")  # the suite ignores those of torch
            found = watched.norms()
        assert len(seen.calls) == (dist.get_world_size() > 1), seen.calls
    wanted = expected(case, **options)
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        for kind in ("gradient", "value"):
            assert (found[name][kind] is None) == (each[kind] is None), (name, kind)
            for key, value in (each[kind] or {}).items():
                assert found[name][kind][key] == pytest.approx(value, rel=1e-4, abs=1e-7), (name, kind, key)
    rows = watched.to_dict()["norms"]
    assert [row["name"] for row in rows] == list(found) and rows[0]["step"] == 1
    assert rows[0]["gradient"] == found[rows[0]["name"]]["gradient"]
    return watched


def rows(case: models.Case, **options: Any) -> nn.Module:
    model = case.build()
    for unit in case.units(model):
        fully_shard(unit, **options)
    return model


def wrapper(case: models.Case, **options: Any) -> nn.Module:
    model, units = case.build(), []
    units = [unit for unit in case.units(model) if unit is not model]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if any(child is unit for unit in units):
                    setattr(parent, name, FullyShardedDataParallel(child, **options))
        return FullyShardedDataParallel(model, **options)


@pytest.mark.parametrize("case", [UNEVEN, pytest.param(TRANSFORMER, marks=pytest.mark.slow)], ids=str)
@world(1, 2, 3, 4)
def test_rows(case: models.Case) -> None:
    check(case, rows(case))


@pytest.mark.parametrize("originals", [True, False])
@pytest.mark.parametrize("case", [UNEVEN, pytest.param(TRANSFORMER, marks=pytest.mark.slow)], ids=str)
@world(1, 3, 4, slow=(1, 4))
def test_wrapper(case: models.Case, originals: bool) -> None:
    check(case, wrapper(case, use_orig_params=originals))


def hybrid_rows() -> nn.Module:
    return rows(TRANSFORMER, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def hybrid_wrapper() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    return wrapper(TRANSFORMER, device_mesh=mesh, sharding_strategy=strategy, use_orig_params=True)


def replicated_wrapper() -> nn.Module:
    return wrapper(TRANSFORMER, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=False)


def offloaded() -> nn.Module:
    return rows(TRANSFORMER, offload_policy=CPUOffloadPolicy(pin_memory=False))


def offloaded_wrapper() -> nn.Module:
    return wrapper(TRANSFORMER, cpu_offload=CPUOffload(True), use_orig_params=True)


def two_meshes() -> nn.Module:
    """One block is sharded over two ranks of a mesh, and replicated by the other dimension of the other block."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = TRANSFORMER.build()
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model.blocks[1], mesh=init_device_mesh("cpu", (4,)))
    return fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


@pytest.mark.parametrize(
    "build",
    [hybrid_rows, hybrid_wrapper, replicated_wrapper, offloaded, offloaded_wrapper, two_meshes],
    ids=lambda build: build.__name__,
)
@world(4)
def test_meshes(build: Callable[[], nn.Module]) -> None:
    check(TRANSFORMER, build())


@world(4)
def test_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = TRANSFORMER.build()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    check(TRANSFORMER, model, share=(mesh["dp"].get_local_rank(), 2))


@world(3)
def test_frozen_and_plain_parameters() -> None:
    """Frozen ones have no gradient; those outside of units are equal on all ranks and count once."""
    model = TRANSFORMER.build()
    model.blocks[1].requires_grad_(False)
    for block in model.blocks:
        fully_shard(block)
    model = check_plain(model)


def check_plain(model: nn.Module) -> nn.Module:
    # Without a root, the whole batch on every rank gives the gradients of the unsharded model.
    check(TRANSFORMER, model, share=(0, 1), unused="blocks.1")
    return model


@world(2)
def test_mixed_precision_and_nan() -> None:
    model = rows(UNEVEN, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    UNEVEN.loss(model, models.shard(UNEVEN.batch(0), dist.get_rank(), 2)).float().backward()
    with watch(model) as watched:
        found = watched.norms()
        norms = [each["gradient"]["norm"] for each in found.values()]
        wanted = [parameter.grad.full_tensor().double().norm().item() for parameter in model.parameters()]
        assert norms == pytest.approx(wanted, rel=1e-6)
        if dist.get_rank() == 0:
            next(model.parameters()).grad.to_local().fill_(float("nan"))
        name, first = next(iter(watched.norms().items()))
    assert name == next(iter(dict(model.named_parameters())))
    assert all(value != value for value in first["gradient"].values())
    assert first["value"]["norm"] > 0
