"""The wrapper around tensor-parallel parameters: training, gradients, state dicts and optimizer state on two meshes."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bed import world
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unshard import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from unshard import FullyShardedDataParallel as FSDP
from unshard.optim import ShardedGradScaler

S, T = ShardingStrategy, StateDictType
both = pytest.mark.parametrize("originals", [True, False], ids=["originals", "flat"])
quiet = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:There is one rank", "ignore:NO_SHARD")


class Net(nn.Module):
    """Sizes that two ranks divide and sizes that they do not; of `one` the second tensor-parallel rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)
        self.norm = nn.LayerNorm(5)
        self.odd, self.one = nn.Linear(5, 7), nn.Linear(7, 1, bias=False)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.second(torch.tanh(self.first(x))))
        return self.one(torch.tanh(self.odd(x))) * self.scale.to(x.dtype)


def rows_over(module: nn.Module, mesh: DeviceMesh) -> None:
    """Rows of any number over the mesh, inputs and outputs on all ranks: torch's styles refuse uneven activations."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    module.register_forward_pre_hook(lambda module, args: (DTensor.from_local(args[0], mesh, [Replicate()]),))
    module.register_forward_hook(lambda module, args, output: output.full_tensor())


def parallel(tp: DeviceMesh) -> Net:
    model = Net()
    parallelize_module(model, tp, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    rows_over(model.odd, tp)
    rows_over(model.one, tp)
    return model


def mesh_of(dp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "tp"))


def wrap(model: Net, nested: bool = True, **options: Any) -> FSDP:
    if nested:
        model.second, model.one = FSDP(model.second, **options), FSDP(model.one, **options)
    return FSDP(model, **options)


def wrapped(dp: int = 2, **options: Any) -> tuple[FSDP, DeviceMesh]:
    mesh = mesh_of(dp)
    return wrap(parallel(mesh["tp"]), device_mesh=mesh["dp"], **options), mesh


def batch(step: int, part: int, parts: int) -> torch.Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x.chunk(parts)[part]


def backward(model: nn.Module, step: int, mesh: DeviceMesh | None = None, scale: float = 1.0) -> None:
    """Without a mesh, of all samples."""
    part, parts = (0, 1) if mesh is None else (mesh.get_local_rank("dp"), mesh.size(mesh.mesh_dim_names.index("dp")))
    (model(batch(step, part, parts)).square().mean() * scale).backward()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, steps: range, mesh: DeviceMesh | None = None, optimizer: Any = None) -> Any:
    optimizer = optimizer or adam(model)
    for step in steps:
        backward(model, step, mesh)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_parameters(model: FSDP) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return {name: full(each.detach()).clone() for name, each in model.named_parameters()}


def assert_parameters(model: FSDP, reference: nn.Module, tolerance: float = 1e-9) -> None:
    found, expected = full_parameters(model), dict(reference.named_parameters())
    assert list(found) == list(expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=tolerance, atol=tolerance, msg=name)


@contextlib.contextmanager
def state_dicts(model: nn.Module, kind: StateDictType, *configs: Any) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with FSDP.state_dict_type(model, kind, *configs):
            yield


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one_unit": (2, {"nested": False}),
    "units": (2, {}),
    "grad_op": (2, {"sharding_strategy": S.SHARD_GRAD_OP}),
    "only_tp": (1, {}),
    "only_dp": (4, {}),
    "offload": (2, {"cpu_offload": CPUOffload(True)}),
}


@quiet
@both
@pytest.mark.parametrize("name", CASES)
@world(4)
def test_training_equals_the_unsharded_model(name: str, originals: bool) -> None:
    dp, options = CASES[name]
    model, mesh = wrapped(dp, use_orig_params=originals, **options)
    reference = Net()
    train(model, range(3), mesh)
    train(reference, range(3))
    assert_parameters(model, reference)
    x = batch(9, 0, 1)
    torch.testing.assert_close(model(x), reference(x))


@both
@world(4)
def test_mixed_precision_and_accumulation(originals: bool) -> None:
    precision = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
    model, mesh = wrapped(use_orig_params=originals, mixed_precision=precision)
    reference = Net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    seen: list[torch.Tensor] = []
    model.module.first.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    with model.no_sync():
        backward(model, 0, mesh)
    backward(model, 1, mesh)
    for step in range(2):
        backward(reference, step)
    for optimizer in optimizers:
        optimizer.step()
    assert isinstance(seen[0], DTensor) and seen[0].dtype == torch.float32 and seen[0].device_mesh == mesh["tp"]
    assert seen[0].placements == (Shard(0),)
    assert_parameters(model, reference, 1e-5)


@both
@pytest.mark.parametrize("order", [2.0, float("inf"), 1.0])
@world(4)
def test_clipping_counts_every_element_once(order: float, originals: bool) -> None:
    """Of parameters that tensor parallelism cuts, replicates and leaves alone."""
    model, mesh = wrapped(use_orig_params=originals)
    reference = Net()
    backward(model, 0, mesh, scale=100)
    backward(reference, 0, scale=100)
    mine = model.clip_grad_norm_(0.5, order)
    theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.5, order)
    torch.testing.assert_close(mine, theirs, check_dtype=False, rtol=1e-6, atol=0)
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    assert_parameters(model, reference, 1e-6)


@both
@world(4)
def test_scaler_skips_on_all_ranks(originals: bool) -> None:
    """An overflow in the part of one tensor-parallel rank."""
    model, _ = wrapped(use_orig_params=originals)
    scaler, optimizer = ShardedGradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), lr=1.0)
    before = full_parameters(model)
    scaler.scale(model(batch(0, 0, 1)).sum()).backward()
    if dist.get_rank() == 3:
        next(each.grad for each in model.parameters() if each.grad is not None)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@quiet
@both
@pytest.mark.parametrize("dp", [2, 1])
@world(4)
def test_full_state_dict(dp: int, originals: bool) -> None:
    """It is the unsharded model's, loads into that, and from that, at any number of ranks."""
    model, mesh = wrapped(dp, use_orig_params=originals)
    reference = Net()
    train(reference, range(2))
    with state_dicts(model, T.FULL_STATE_DICT):
        model.load_state_dict(copy.deepcopy(reference.state_dict()))
        found = model.state_dict()
    assert_parameters(model, reference, 0)
    unsharded = Net()
    unsharded.load_state_dict(found)
    assert list(found) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        assert type(found[name]) is torch.Tensor
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    with state_dicts(model, T.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        assert set(model.state_dict()) == (set(found) if dist.get_rank() == 0 else set())
    other = wrap(Net(), use_orig_params=originals)
    other.load_state_dict(copy.deepcopy(found))
    assert_parameters(other, reference, 0)
    with pytest.raises(RuntimeError, match=r"size mismatch for .*first.weight"):
        model.load_state_dict({**found, "first.weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match=r"Missing key.*odd.weight"):
        model.load_state_dict({name: value for name, value in found.items() if name != "odd.weight"})
    optimizer = adam(model)
    train(model, range(2), mesh, optimizer)  # loading left nothing behind
    train(reference, range(2))
    assert_parameters(model, reference)


@both
@world(4)
def test_sharded_state_dict(originals: bool, tmp_path: Path) -> None:
    """DTensors on both meshes, data parallelism first; also through a checkpoint, and into another mesh."""
    model, mesh = wrapped(use_orig_params=originals)
    reference = Net()
    train(model, range(2), mesh)
    train(reference, range(2))
    with state_dicts(model, T.SHARDED_STATE_DICT):
        found = model.state_dict()
    expected = reference.state_dict()
    assert list(found) == list(expected)
    for name, value in found.items():
        torch.testing.assert_close(full(value), expected[name], rtol=1e-9, atol=1e-9, msg=name)
        if name != "scale":
            assert value.device_mesh == mesh and value.placements[0] == Shard(0), name
    assert found["first.weight"].placements == (Shard(0), Shard(0))
    assert found["second.weight"].placements == (Shard(0), Shard(1))
    assert found["second.bias"].placements == found["norm.weight"].placements == (Shard(0), Replicate())
    assert found["odd.weight"].to_local().shape[0] == [2, 2, 2, 1][dist.get_rank()]
    dcp.save(found, checkpoint_id=tmp_path)
    fresh, _ = wrapped(use_orig_params=originals)
    with state_dicts(fresh, T.SHARDED_STATE_DICT):
        fresh.load_state_dict(copy.deepcopy(found))
        assert_parameters(fresh, reference)
    others = [wrapped(use_orig_params=not originals)[0], wrap(Net(), device_mesh=init_device_mesh("cpu", (4,)))]
    for other in others:
        with state_dicts(other, T.SHARDED_STATE_DICT):
            place = other.state_dict()
            dcp.load(place, checkpoint_id=tmp_path)
            other.load_state_dict(place)
        assert_parameters(other, reference)


@both
@world(4)
def test_local_state_dict_and_process_groups(originals: bool) -> None:
    """With a group instead of a mesh; with a mesh it is refused, as in torch."""
    mesh = mesh_of(2)
    models = [
        wrap(parallel(mesh["tp"]), process_group=mesh.get_group("dp"), use_orig_params=originals) for _ in range(2)
    ]
    reference = Net()
    train(models[0], range(2), mesh)
    train(reference, range(2))
    for kind in (T.LOCAL_STATE_DICT, T.FULL_STATE_DICT):
        fresh = wrap(parallel(mesh["tp"]), process_group=mesh.get_group("dp"), use_orig_params=originals)
        with state_dicts(models[0], kind), state_dicts(fresh, kind):
            fresh.load_state_dict(models[0].state_dict())
        assert_parameters(fresh, reference)
    with state_dicts(models[0], T.SHARDED_STATE_DICT), pytest.raises(NotImplementedError, match="device_mesh"):
        models[0].state_dict()
    model, _ = wrapped(use_orig_params=originals)
    with state_dicts(model, T.LOCAL_STATE_DICT), pytest.raises(RuntimeError, match="LOCAL_STATE_DICT does not support"):
        model.state_dict()


# -- optimizer state ---------------------------------------------------------------------------------------------------


def assert_states(found: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """`found`: by name, of any kind; the unsharded model's optimizer state."""
    expected = {name: optimizer.state[each] for name, each in model.named_parameters()}
    assert found["state"].keys() == expected.keys()
    for name, states in expected.items():
        for key, value in states.items():
            mine = full(found["state"][name][key])
            torch.testing.assert_close(mine, value, rtol=1e-9, atol=1e-12, msg=f"{name} {key}")


@both
@world(4)
def test_full_optimizer_state(originals: bool) -> None:
    """Saved, loaded into a fresh wrapper and into an unsharded model's optimizer, and from it."""
    model, mesh = wrapped(use_orig_params=originals)
    reference = Net()
    optimizer, plain = train(model, range(2), mesh), train(reference, range(2))
    found = FSDP.optim_state_dict(model, optimizer)
    assert_states(found, reference, plain)
    assert all(type(each) is torch.Tensor for states in found["state"].values() for each in states.values())
    config = FullOptimStateDictConfig(rank0_only=True)
    with state_dicts(model, T.FULL_STATE_DICT, FullStateDictConfig(), config):
        on_first = FSDP.optim_state_dict(model, optimizer)
        assert bool(on_first) == (dist.get_rank() == 0)
        weights = model.state_dict()
        fresh, _ = wrapped(use_orig_params=not originals)
        fresh.load_state_dict(weights)
        resumed = adam(fresh)
        with state_dicts(fresh, T.FULL_STATE_DICT, FullStateDictConfig(), config):
            resumed.load_state_dict(FSDP.optim_state_dict_to_load(fresh, resumed, on_first))
    unsharded = Net()
    unsharded.load_state_dict(weights)
    numbers = {name: number for number, (name, _) in enumerate(unsharded.named_parameters())}
    whole = adam(unsharded)
    groups = [{**each, "params": sorted(numbers[name] for name in each["params"])} for each in found["param_groups"]]
    whole.load_state_dict({"state": {numbers[k]: v for k, v in found["state"].items()}, "param_groups": groups})
    train(fresh, range(2, 4), mesh, resumed)
    train(unsharded, range(2, 4), None, whole)
    train(reference, range(2, 4), None, plain)
    assert_parameters(fresh, reference)
    assert_parameters(fresh, unsharded)


@both
@world(4)
def test_sharded_optimizer_state(originals: bool, tmp_path: Path) -> None:
    """Through `torch.distributed.checkpoint`, into an optimizer that has taken no step."""
    model, mesh = wrapped(use_orig_params=originals)
    reference = Net()
    optimizer, plain = train(model, range(2), mesh), train(reference, range(2))
    with state_dicts(model, T.SHARDED_STATE_DICT):
        found = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    assert_states(found["optim"], reference, plain)
    for name, value in found["model"].items():
        if name != "scale":
            state = found["optim"]["state"][name]["exp_avg"]
            assert (state.device_mesh, state.placements) == (value.device_mesh, value.placements), name
    dcp.save(found, checkpoint_id=tmp_path)
    fresh, _ = wrapped(use_orig_params=originals)
    resumed = adam(fresh)
    with state_dicts(fresh, T.SHARDED_STATE_DICT):
        place = {"model": fresh.state_dict(), "optim": FSDP.optim_state_dict(fresh, resumed, for_loading=True)}
        dcp.load(place, checkpoint_id=tmp_path)
        fresh.load_state_dict(place["model"])
        FSDP.optim_state_dict_to_load(fresh, resumed, place["optim"], load_directly=True)
    train(fresh, range(2, 4), mesh, resumed)
    train(reference, range(2, 4), None, plain)
    assert_parameters(fresh, reference)


# -- unsharded parameters, arguments -----------------------------------------------------------------------------------


@both
@world(4)
def test_summon_full_params(originals: bool) -> None:
    """DTensors on the tensor-parallel mesh; what is written to them, and what is assigned, is kept."""
    model, mesh = wrapped(use_orig_params=originals)
    reference = Net()
    backward(model, 0, mesh)
    backward(reference, 0)
    with FSDP.summon_full_params(model, with_grads=originals):
        weight = model.module.first.weight
        assert type(weight) is DTensor and weight.device_mesh == mesh["tp"] and weight.placements == (Shard(0),)
        if originals:
            for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(full(mine.grad), theirs.grad, rtol=1e-9, atol=1e-12, msg=name)
        with torch.no_grad():
            weight.mul_(2)
            model.module.norm.weight.fill_(3)
            model.module.second.weight.to_local().add_(1)
        model.module.odd.weight = nn.Parameter(distribute_tensor(torch.ones(7, 5).double(), mesh["tp"], [Shard(0)]))
        model.module.odd.bias = nn.Parameter(torch.arange(7).double())
    with torch.no_grad():
        reference.first.weight.mul_(2)
        reference.norm.weight.fill_(3)
        reference.second.weight.add_(1)
        reference.odd.weight.fill_(1)
        reference.odd.bias.copy_(torch.arange(7))
    assert_parameters(model, reference, 0)


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # torch 2.11, on a CPU mesh
@both
@world(4)
def test_values_of_the_first_rank_and_meta(originals: bool) -> None:
    mesh = mesh_of(2)
    model = parallel(mesh["tp"])
    if mesh.get_local_rank("dp"):
        with torch.no_grad():
            for each in (*model.parameters(), *model.buffers()):
                each.zero_()
    synced = wrap(model, device_mesh=mesh["dp"], use_orig_params=originals, sync_module_states=True)
    assert_parameters(synced, Net(), 0)
    assert synced.module.scale.item() == 2
    with torch.device("meta"):
        layer = nn.Linear(6, 8)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    made = FSDP(layer, device_mesh=mesh["dp"], use_orig_params=originals, device_id=torch.device("cpu"))
    assert made(torch.ones(2, 6)).isfinite().all()


@quiet
@both
@world(4)
def test_meshes(originals: bool) -> None:
    """A mesh with the tensor-parallel dimension in it, also one with replicas; and meshes that do not fit."""
    reference = Net()
    train(reference, range(2))
    mesh = mesh_of(2)
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "shard", "tp"))
    for whole, options in ((mesh, {}), (three, {"sharding_strategy": S.HYBRID_SHARD})):
        model = wrap(parallel(whole["tp"]), device_mesh=whole, use_orig_params=originals, **options)
        assert model._device_mesh.mesh_dim_names == whole.mesh_dim_names[:-1]
        train(model, range(2), whole)
        assert_parameters(model, reference)
        with state_dicts(model, T.SHARDED_STATE_DICT):
            found = model.state_dict()
        assert all(value.device_mesh == whole for name, value in found.items() if name != "scale")
        assert found["second.weight"].placements[-2:] == (Shard(0), Shard(1))
    with pytest.raises(ValueError, match="one dimension"):
        FSDP(Net(), device_mesh=three)
    with pytest.raises(NotImplementedError, match=r"'first.weight' of Net is already a DTensor over the ranks"):
        FSDP(parallel(mesh["tp"]), use_orig_params=originals)
    odd = nn.Linear(2, 2)
    odd.weight = nn.Parameter(DTensor.from_local(odd.weight.detach(), mesh["tp"], [Partial()]))
    with pytest.raises(NotImplementedError, match="with the placement P"):
        FSDP(odd, device_mesh=mesh["dp"])
