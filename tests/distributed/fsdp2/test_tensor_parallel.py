"""Parameters that are DTensors before they are sharded: tensor parallelism, and meshes of all parallelisms."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, units
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from unshard import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from unshard.engine.gradients import local_gradient


def mesh_of(dp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "tp"))


def parallel(whole: DeviceMesh, **options: object) -> Stack:
    """Column-wise, then row-wise in every block; the head stays plain."""
    model = Stack()
    for block in model.blocks:
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(block, whole["tp"], plan)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, reference: nn.Module, steps: int = 3, rtol: float = 1e-4) -> None:
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=True) for each in (model, reference)]
    for seed in range(steps):
        for each in (model, reference):
            loss_of(each, seed).backward()
        assert_gradients(model, reference, rtol=rtol, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach(), rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("dp", [1, 2, 4])
@world(4)
def test_parity_in_two_dimensions(dp: int, reshard: bool | None) -> None:
    """Contract TPX-01, TPX-06, TPX-07, TPX-10: all splits of four ranks."""
    mesh = mesh_of(dp)
    model = parallel(mesh, mesh=mesh["dp"], reshard_after_forward=reshard)
    train(model, Stack())
    assert_at_rest(model)


@world(4)
def test_placements_and_collectives() -> None:
    """Contract TPX-01 to TPX-03, TPX-06, CM-25: cut within the tensor-parallel shard, gathered over dp only."""
    mesh = mesh_of(2)
    model = parallel(mesh, mesh=mesh["dp"], reshard_after_forward=True)
    first, second = model.blocks[0].first, model.blocks[0].second
    assert first.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert second.weight.placements == (Shard(0), Shard(1))
    assert second.bias.placements == (Shard(0), Replicate())
    assert model.head.weight.placements == (Shard(0),)
    assert first.weight.device_mesh == mesh
    assert first.weight.to_local().shape == (33, 132) and second.weight.to_local().shape == (66, 66)
    seen: list[nn.Parameter] = []
    first.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    with Collectives() as calls:
        loss = loss_of(model)
    assert isinstance(seen[0], DTensor) and seen[0].placements == (Shard(0),) and seen[0].device_mesh == mesh["tp"]
    elements = (132 * 132 + 132) // 2 + 132 * 132 // 2 + 132
    assert max(call.bytes_in for call in calls.of("gather")) == 4 * elements // 2
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad.placements == parameter.placements
    assert_gradients_of_both_kinds(model)


def assert_gradients_of_both_kinds(model: nn.Module) -> None:
    reference = Stack()
    loss_of(reference).backward()
    assert_gradients(model, reference, rtol=1e-4, atol=1e-6)


@world(4)
def test_another_dimension_avoids_the_stride() -> None:
    """Contract TPX-05."""
    mesh = mesh_of(2)

    def choose(parameter: nn.Parameter) -> Shard | None:
        columns = isinstance(parameter, DTensor) and parameter.ndim == 2 and parameter.placements == (Shard(0),)
        return Shard(1) if columns else None

    model = parallel(mesh, mesh=mesh["dp"], shard_placement_fn=choose)
    assert model.blocks[0].first.weight.placements == (Shard(1), Shard(0))
    train(model, Stack())


@world(4)
def test_replicas_shards_and_tensor_parallelism() -> None:
    """Contract TPX-04: a mesh of three dimensions."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = parallel(mesh, mesh=mesh["replicate", "shard"])
    weight = model.blocks[0].first.weight
    assert weight.placements == (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
    assert weight.device_mesh == mesh
    train(model, Stack())


class Odd(nn.Module):
    """Sizes that two ranks times two do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(27, 27, bias=False), nn.Linear(27, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@world(4)
def test_uneven_sizes_in_two_dimensions() -> None:
    """Contract TPX-10. Torch's linear refuses activations cut unevenly, so inputs and outputs stay replicated."""
    mesh = mesh_of(2)
    model, reference = Odd(), Odd()
    model.first = distribute_module(model.first, mesh["tp"], _rows)
    whole_in = lambda module, args: tuple(  # noqa: E731
        each if isinstance(each, DTensor) else DTensor.from_local(each, mesh["tp"], [Replicate()]) for each in args
    )
    model.first.register_forward_pre_hook(whole_in)
    model.first.register_forward_hook(lambda module, args, output: output.full_tensor())
    fully_shard(model, mesh=mesh["dp"])
    assert model.first.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    x = torch.randn(4, 27, generator=torch.Generator().manual_seed(1))
    for each in (model, reference):
        each(x).square().mean().backward()
    assert_gradients(model, reference, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.first.weight.detach().full_tensor(), reference.first.weight.detach())


def _rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))


@pytest.mark.filterwarnings("ignore:A state dict of shards")
@world(4)
def test_state_dict_copy_and_clip_in_two_dimensions() -> None:
    """Contract TPX-11, TPX-12."""
    mesh = mesh_of(2)
    model, reference = parallel(mesh, mesh=mesh["dp"]), Stack()
    loss_of(model).backward()
    loss_of(reference).backward()
    for (name, value), theirs in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(value.full_tensor(), theirs, msg=name)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(parallel(mesh, mesh=mesh["dp"]))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(file, weights_only=False))
    with torch.no_grad():
        torch.testing.assert_close(other(batch()), reference(batch()))
    mine = torch.nn.utils.clip_grad_norm_([p for b in model.blocks for p in b.parameters()], 1e-3)
    theirs = torch.nn.utils.clip_grad_norm_([p for b in reference.blocks for p in b.parameters()], 1e-3)
    torch.testing.assert_close(mine.full_tensor(), theirs)


@world(4)
def test_mixed_precision_and_accumulation_in_two_dimensions() -> None:
    mesh = mesh_of(2)
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32)
    model, reference = parallel(mesh, mesh=mesh["dp"], mp_policy=policy), Stack()
    for seed in range(3):
        model.set_requires_gradient_sync(seed == 2)
        loss_of(model, seed).backward()
        loss_of(reference, seed).backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert_gradients(model, reference, rtol=1e-4, atol=1e-6)


@world(4)
def test_meshes_that_do_not_fit() -> None:
    """Contract TPX-09, SEL-05, ARG-16: top-down, unrelated meshes, slices of two dimensions."""
    mesh = mesh_of(2)
    model = Stack()
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(NotImplementedError, match="shard bottom-up"):
        fully_shard(model.blocks[0], mesh=mesh["dp"])
    unnamed = init_device_mesh("cpu", (4,))
    layer = distribute_module(nn.Linear(8, 8), unnamed, _rows)
    with pytest.raises(NotImplementedError, match="take both meshes from one"):
        fully_shard(layer, mesh=mesh["dp"])
    wide = init_device_mesh("cpu", (1, 2, 2, 1), mesh_dim_names=("a", "b", "c", "d"))
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), wide["b", "c", "d"], [Shard(0)] * 3))
    with pytest.raises(NotImplementedError, match=r"'weight'.*at most two"):
        fully_shard(layer, mesh=wide["a"])
    big = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "x"))
    layer = nn.Linear(8, 8)
    parallelize_module(layer, big["tp"], ColwiseParallel())
    with pytest.raises(NotImplementedError, match=r"'weight' is already a DTensor.*integer"):
        init = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
        fully_shard(
            parallelize_module(nn.Linear(8, 8), init["tp"], ColwiseParallel()), mesh=init["dp"], reshard_after_forward=2
        )
    assert type(layer) is nn.Linear


@world(2)
def test_gradients_that_arrive_distributed_otherwise() -> None:
    """Contract TPX-08: brought to the placements of the parameter first, whatever autograd made of them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.arange(8.0).reshape(4, 2)
    rank = dist.get_rank()
    kinds = {
        Replicate(): whole,
        Shard(1): whole[:, rank : rank + 1].contiguous(),
        Partial(): whole * (0.25 if rank else 0.75),
    }
    spec = distribute_tensor(whole, mesh, [Shard(0)])._spec
    for placement, local in kinds.items():
        gradient = DTensor.from_local(local, mesh, [placement], run_check=False)
        torch.testing.assert_close(local_gradient(gradient, spec, frozenset()), whole[2 * rank : 2 * rank + 2])
    unsummed = DTensor.from_local(kinds[Partial()], mesh, [Partial()], run_check=False)
    spec = distribute_tensor(whole, mesh, [Replicate()])._spec
    assert torch.equal(local_gradient(unsummed, spec, frozenset({0})), kinds[Partial()])
    assert torch.equal(local_gradient(unsummed, spec, frozenset()), whole)


@world(4)
def test_optimizers_over_several_meshes() -> None:
    """Contract TPX-13: foreach optimizers take parameters of one and of two dimensions together."""
    mesh = mesh_of(2)
    model, reference = parallel(mesh, mesh=mesh["dp"]), Stack()
    assert {parameter.device_mesh.ndim for parameter in model.parameters()} == {1, 2}
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9, foreach=True)
        for seed in range(2):
            optimizer.zero_grad()
            loss_of(each, seed).backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach(), rtol=1e-4, atol=1e-5)


# --- meshes of all parallelisms ------------------------------------------------------------------------------------


def replicated(mesh: DeviceMesh, model: nn.Module | None = None) -> nn.Module:
    """Every parameter a DTensor on the whole mesh, tensor parallel over "tp" where a block's layers are."""
    model = Stack() if model is None else model
    names = mesh.mesh_dim_names or ()
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements: list = [Replicate()] * mesh.ndim
            if "tp" in names and module_name.endswith("first"):
                placements[names.index("tp")] = Shard(0)
            elif "tp" in names and module_name.endswith("second") and name == "weight":
                placements[names.index("tp")] = Shard(1)
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    return model


class Spread(nn.Module):
    """Feeds a model of DTensors its rank's samples as part of the whole batch, and takes their outputs out again."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        placements = [Replicate() if name == "tp" else Shard(0) for name in self.mesh.mesh_dim_names]
        outputs = self.model(DTensor.from_local(x, self.mesh, placements))
        return outputs.redistribute(placements=placements).to_local(grad_placements=placements)


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")], ids=lambda names: "-".join(names))
@world(4)
def test_parity_on_a_mesh_of_all_parallelisms(names: tuple[str, str]) -> None:
    """Contract SPMD-06, SPMD-10, SPMD-12, SPMD-13: the mesh stays, the data-parallel dimension is cut."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model, reference = replicated(mesh, Stack(1)), Stack(1)
    dims = DataParallelMeshDims(shard="dp")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    weight = model.blocks[0].first.weight
    cut = _StridedShard(0, split_factor=2) if names == ("dp", "tp") else Shard(0)
    assert weight.placements[names.index("dp")] == cut and weight.placements[names.index("tp")] == Shard(0)
    assert weight.device_mesh == mesh
    seen: list[nn.Parameter] = []
    model.blocks[0].first.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    spread = Spread(model, mesh)
    for _ in range(2):
        for each in (spread, reference):
            loss_of(each).backward()
    assert seen[0].placements[names.index("dp")] == Replicate() and seen[0].device_mesh == mesh
    assert_gradients(model, reference, rtol=1e-4, atol=1e-6)
    assert_at_rest(model)


@pytest.mark.parametrize(
    "dims",
    [
        DataParallelMeshDims(shard=("a", "b")),
        DataParallelMeshDims(shard="b", replicate="a"),
        pytest.param(DataParallelMeshDims(replicate=("a", "b")), marks=pytest.mark.slow),
    ],
    ids=["flattened", "hybrid", "replicated"],
)
@world(4)
def test_shards_and_replicas_by_name(dims: DataParallelMeshDims) -> None:
    """Contract SPMD-05, SPMD-06, SPMD-11."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "tp"))
    model, reference = replicated(mesh, Stack(1)), Stack(1)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    weight = model.head.weight
    assert (
        weight.to_local().shape[0] == {("a", "b"): 1 if dist.get_rank() < 2 else 0, ("b",): 1, (): 2}[dims.shard_names]
    )
    if dims.shard_names == ("a", "b"):
        assert weight.device_mesh.mesh_dim_names == ("a_b", "tp") and weight.placements == (Shard(0), Replicate())
    spread = Spread(model, mesh)
    with Collectives() as calls:
        loss_of(spread).backward()
    assert bool(calls.of("all_reduce")) == bool(dims.replicate_names)
    loss_of(reference).backward()
    assert_gradients(model, reference, rtol=1e-4, atol=1e-6)


@world(2)
def test_a_gradient_that_is_not_summed_yet_is_summed_once() -> None:
    """Contract SPMD-14: `Partial` over the data-parallel dimension is what the reduction takes."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2))
    expected = copy.deepcopy(layer)
    (expected(x).square().sum() / 2).backward()
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))
    fully_shard(layer, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    kinds: list[object] = []
    output = layer(distribute_tensor(x, mesh, [Shard(0)]))
    units(layer)[0].params[0].unsharded.register_hook(lambda grad: kinds.append(grad.placements))
    output.square().sum().backward()
    assert kinds == [(Partial(),)]
    torch.testing.assert_close(layer.weight.grad.full_tensor(), expected.weight.grad)


@world(2)
def test_wrong_dimensions() -> None:
    """Contract SPMD-01 to SPMD-04, SPMD-07 to SPMD-09, SPMD-15, SPMD-16."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")
    assert (dims.shard_names, dims.replicate_names) == (("dp",), ())
    with pytest.raises(ValueError, match="needs the name"):
        DataParallelMeshDims()
    plain = nn.Linear(4, 4)
    for kwargs, error, message in (
        ({"mesh": init_device_mesh("cpu", (2,))}, ValueError, "has no names"),
        ({"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="pp")}, ValueError, "names 'pp'.*dp, tp"),
        ({"mesh": mesh}, ValueError, "'weight' is a plain tensor"),
        ({"mesh": mesh, "reshard_after_forward": 2}, NotImplementedError, "integer"),
        (
            {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(replicate="dp"), "shard_placement_fn": lambda p: None},
            ValueError,
            "shard_placement_fn has no effect",
        ),
        ({"mesh": None}, ValueError, "DeviceMesh"),
    ):
        with pytest.raises(error, match=message):
            fully_shard(plain, **{"dp_mesh_dims": dims, **kwargs})
    other = replicated(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"'weight' is a DTensor on.*expected one on"):
        fully_shard(other, mesh=mesh, dp_mesh_dims=dims)
    cut = nn.Linear(4, 4)
    cut.weight = nn.Parameter(distribute_tensor(cut.weight.detach(), mesh, [Shard(0), Replicate()]))
    cut.bias = nn.Parameter(distribute_tensor(cut.bias.detach(), mesh, [Replicate(), Replicate()]))
    with pytest.raises(ValueError, match=r"'weight' has the placement.*on 'dp'"):
        fully_shard(cut, mesh=mesh, dp_mesh_dims=dims)
    assert type(plain) is nn.Linear and type(cut) is nn.Linear
