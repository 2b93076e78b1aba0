"""Gradient scaling of sharded models: which ranks see an overflow, and what all of them do then."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.errors import ArgumentError
from unshard.optim import GradScaler

INF = float("inf")
KINDS = {"torch": torch.amp.GradScaler, "unshard": GradScaler}
both = pytest.mark.parametrize("kind", list(KINDS))


def make(kind: str = "unshard", **options: object) -> torch.amp.GradScaler:
    return KINDS[kind]("cpu", **{"init_scale": 2.0, **options})


class Pair(nn.Module):
    """In and out, as tensor parallelism cuts them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def layers() -> tuple[nn.Module, torch.Tensor]:
    """Two layers, each a unit, over all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model), torch.randn(4, 4)


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def pairs(mesh: DeviceMesh | None = None, count: int = 3) -> tuple[nn.Module, torch.Tensor]:
    """Three pairs over data and tensor parallelism."""
    mesh = mesh or grid()
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair(2) for _ in range(count)))
    for pair in model:
        parallelize_module(pair, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(pair, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), torch.randn(2)


def local(parameter: nn.Parameter) -> torch.Tensor:
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def backward(scaler: torch.amp.GradScaler, model: nn.Module, x: torch.Tensor) -> None:
    scaler.scale(model(x).sum()).backward()


def found(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    values = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    assert values
    return any(value.item() for value in values)


def everywhere(value: object) -> list:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def snapshot(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of this rank's parameters and state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = parameters + [each for p in parameters for each in optimizer.state.get(p, {}).values()]
    return [(each.to_local() if isinstance(each, DTensor) else each).detach().clone() for each in tensors]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    assert before
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# --- what torch's own scaler does well, and ours too -----------------------------------------------------------------


@pytest.mark.parametrize("has_inf", [True, False])
@pytest.mark.parametrize("build", [layers, pairs])
@both
@world(4)
def test_a_step_with_and_without_overflow(kind: str, build: Callable, has_inf: bool) -> None:
    """Contract GS-20, GS-23, GS-30, GS-31, GS-32, GS-33: one rank's overflow is every rank's."""
    model, x = build()
    scaler, optimizer = make(kind), torch.optim.Adam(model.parameters(), lr=1e-2)
    backward(scaler, model, x)
    first = optimizer.param_groups[0]["params"][0]
    assert isinstance(first.grad, DTensor) and first.grad._local_tensor.numel()
    if has_inf and dist.get_rank() == 1:
        first.grad._local_tensor[0, 0].fill_(INF)
    scaled = first.grad.to_local().clone()
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert {value.item() for value in state["found_inf_per_device"].values()} == {float(has_inf)}
    assert state["stage"] is OptState.UNSCALED
    torch.testing.assert_close(first.grad.to_local(), scaled * 0.5, rtol=0, atol=0)
    before = snapshot(optimizer)
    scaler.step(optimizer)
    assert same(before, snapshot(optimizer)) == has_inf
    assert bool(optimizer.state) != has_inf
    scaler.update()
    assert scaler.get_scale() == (1.0 if has_inf else 2.0)


@both
@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
@world(2, 3, 4)
def test_an_overflow_on_any_rank_is_seen_by_all(kind: str, bad: float) -> None:
    """Contract GS-22, GS-28: of three ranks and more, the last ones hold nothing of the single row."""
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(3, size, bias=False), nn.Linear(size, 1, bias=False)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert rank == 0 or not model[1].weight.to_local().numel()
    for where in range(size + 1):
        scaler = make(kind)
        optimizer.zero_grad()
        backward(scaler, model, torch.ones(2, 3))
        if rank == where:
            local(model[0].weight)[0, 1] = bad
        before = snapshot(optimizer)
        scaler.step(optimizer)
        assert everywhere(found(scaler, optimizer)) == [where < size] * size
        assert everywhere(same(before, snapshot(optimizer))) == [where < size] * size
        scaler.update()
        assert everywhere(scaler.get_scale()) == [1.0 if where < size else 2.0] * size


@pytest.mark.parametrize("optimizer_of", [torch.optim.Adam, torch.optim.AdamW])
@both
@world(2)
def test_fused_optimizers(kind: str, optimizer_of: type) -> None:
    """Contract GS-29: skipped inside the optimizer's own kernel, on all ranks."""
    model, x = layers()
    optimizer = optimizer_of(model.parameters(), lr=0.1, fused=True)
    reference, _ = layers()
    plain = optimizer_of(reference.parameters(), lr=0.1)
    scaler = make(kind)
    for step in range(4):
        optimizer.zero_grad()
        backward(scaler, model, x)
        if step == 2 and dist.get_rank() == 1:
            local(model[1].weight)[0, 0] = INF
        before = snapshot(optimizer)
        scaler.step(optimizer)
        assert found(scaler, optimizer) == (step == 2)
        assert same(before, snapshot(optimizer)) == (step == 2)
        scaler.update()
        if step != 2:
            plain.zero_grad()
            reference(x).sum().backward()
            plain.step()
    assert scaler.get_scale() == 1.0
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.to_local(), theirs.to_local())


def add_group(optimizer: torch.optim.Optimizer, layer: nn.Module) -> None:
    optimizer.add_param_group({"params": list(layer.parameters())})


def load_early_state(optimizer: torch.optim.Optimizer, layer: nn.Module) -> None:
    optimizer.load_state_dict(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, fused=True).state_dict())


@pytest.mark.parametrize("change", [add_group, load_early_state], ids=lambda each: each.__name__)
@world(1)
def test_fused_sgd_without_momentum_yet(change: Callable[[torch.optim.Optimizer, nn.Module], None]) -> None:
    """A step that is skipped makes no momentum: torch would take memory for it, and write nothing there."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler = make()
    scaler.scale(first(torch.ones(4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    change(optimizer, second)
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(second(first(torch.ones(4))).sum()).backward()
        if bad:
            first.weight.grad[0, 0] = INF
        scaler.step(optimizer)
        scaler.update()
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        made = [optimizer.state[each]["momentum_buffer"] for each in trained if optimizer.state.get(each)]
        assert len(made) == (2 if bad and change is add_group else 0 if bad else len(trained))
    for each in trained[-2:]:
        assert torch.equal(optimizer.state[each]["momentum_buffer"], each.grad)


@both
@world(4)
def test_reductions_in_float16(kind: str) -> None:
    """Contract GS-35, GS-36: the sum of four is halved before it is taken; what overflows all the same is found."""
    layer = nn.Linear(1, 4, bias=False)
    model = fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    for value, overflows in ((3e4, False), (4e4, True)):
        scaler, optimizer = make(kind), torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) * torch.tensor([value, 1.0, 1.0, 1.0]).half()).sum().backward()
        expected = [INF if overflows else value, 1.0, 1.0, 1.0]
        assert everywhere(local(layer.weight).item()) == expected
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        assert everywhere(found(scaler, optimizer)) == [overflows] * 4


# --- where torch's own scaler lets ranks disagree --------------------------------------------------------------------


def disagreement(optimizer: torch.optim.Optimizer, spoil: Callable[[], None]) -> tuple[list[bool], list[bool]]:
    """Who sees an overflow, with torch's scaler and with ours; the gradients are the same."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    seen = []
    for kind in ("torch", "unshard"):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        spoil()
        scaler = make(kind)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        seen.append(everywhere(found(scaler, optimizer)))
        if kind == "unshard":  # with torch's, ranks of one process group would take different steps, which is refused
            before = snapshot(optimizer)
            scaler.step(optimizer)
            assert same(before, snapshot(optimizer)) == found(scaler, optimizer)
        scaler.update()
        assert scaler.get_scale() == (1.0 if seen[-1][dist.get_rank()] else 2.0)
    return seen[0], seen[1]


@world(4)
def test_a_replicated_gradient_first() -> None:
    """Contract GS-24, GS-40: the bias of a row-wise layer is replicated on the ranks of tensor parallelism."""
    model, _ = pairs()
    second, first = model[0].second, model[0].first
    assert second.bias.placements[1] == Replicate() and first.weight.placements[1] == Shard(0)

    def spoil() -> None:
        if dist.get_rank() == 1:
            local(first.weight)[0, 0] = INF

    torchs, ours = disagreement(torch.optim.SGD([second.bias, first.weight], lr=0.1), spoil)
    assert torchs == [False, True, False, True]
    assert ours == [True] * 4


@world(4)
def test_an_overflow_in_one_replica() -> None:
    """Contract GS-25, GS-40."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)

    def spoil() -> None:
        if dist.get_rank() == 3:
            local(model.weight)[0, 0] = float("nan")

    torchs, ours = disagreement(torch.optim.SGD(model.parameters(), lr=0.1), spoil)
    assert torchs == [False, False, True, True]
    assert ours == [True] * 4


@pytest.mark.parametrize("where", range(4))
@world(4)
def test_gradients_on_several_meshes(where: int) -> None:
    """Contract GS-26, GS-40: one layer is sharded over two ranks, the others over four."""
    mesh = grid()
    model, _ = pairs(mesh)
    head = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])

    def spoil() -> None:
        if dist.get_rank() == where:
            local(model[0].first.weight)[0, 0] = INF

    torchs, ours = disagreement(torch.optim.SGD([head.weight, *model.parameters()], lr=0.1), spoil)
    assert torchs == [rank % 2 == where % 2 for rank in range(4)]
    assert ours == [True] * 4


@world(4)
def test_slices_that_cross() -> None:
    """Contract GS-40: no mesh holds all ranks, the one they were sliced from does."""
    mesh = grid()
    rows, columns = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"]), fully_shard(nn.Linear(4, 4), mesh=mesh["tp"])
    optimizer = torch.optim.SGD([*rows.parameters(), *columns.parameters()], lr=0.1)

    def spoil() -> None:
        if dist.get_rank() == 3:
            local(rows.weight)[0, 0] = INF

    torchs, ours = disagreement(optimizer, spoil)
    assert torchs == [False, True, False, True] and ours == [True] * 4


@world(3)
def test_meshes_that_have_nothing_in_common() -> None:
    """Contract GS-40: a group that the user names; without one, an error that says so."""
    chain = [DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",)), DeviceMesh("cpu", [1, 2], mesh_dim_names=("b",))]
    rank = dist.get_rank()
    held = [mesh for mesh in chain if mesh.get_coordinate() is not None]
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for mesh in held]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, INF if rank == 2 else 1.0)
    if rank == 1:
        with pytest.raises(ArgumentError, match=r"on rank 1 .*\[0, 1\], \[1, 2\].*process_group="):
            make().unscale_(optimizer)
    part = dist.new_group([0, 1])
    scaler = make(process_group=dist.group.WORLD)
    scaler.unscale_(optimizer)
    assert found(scaler, optimizer)
    if rank == 1:
        with pytest.raises(ArgumentError, match=r"process_group has the ranks \[0, 1\].*over the ranks \[1, 2\]"):
            make(process_group=part).unscale_(optimizer)
    with pytest.raises(ArgumentError, match=f"that rank {rank} belongs to"):
        make(process_group="world").unscale_(optimizer)


@world(4)
def test_a_mesh_of_some_ranks_and_two_dimensions() -> None:
    """Contract GS-40: only its ranks are asked, in a group made for them."""
    ranks = list(range(4))
    mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(4, 1)[:2], mesh_dim_names=("replicate", "shard"))
    if dist.get_rank() > 1:
        return
    model = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model.weight.grad = torch.full_like(model.weight, INF if step == dist.get_rank() else 1.0)
        scaler = make()
        with Collectives() as calls:
            scaler.unscale_(optimizer)
        assert found(scaler, optimizer) and [call.ranks for call in calls.calls] == [2]


@world(2)
def test_plain_gradients_among_sharded_ones() -> None:
    """Contract GS-27, GS-41: torch's scaler cannot take them together; ours hears of an overflow in either."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(model, ignored_params={model[1].weight})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for spoilt in (None, 0, 1):
        optimizer.zero_grad()
        scaler = make()
        backward(scaler, model, torch.ones(2, 4))
        expected = [local(parameter) * 0.5 for parameter in model.parameters()]
        if spoilt is None:
            with pytest.raises(RuntimeError, match="mixed"):
                refused = make("torch")
                refused.scale(torch.ones(()))
                refused.unscale_(optimizer)
        elif dist.get_rank() == 1:
            local(model[spoilt].weight)[0, 0] = INF
        scaler.unscale_(optimizer)
        assert found(scaler, optimizer) == (spoilt is not None)
        if spoilt is None:
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                assert torch.equal(local(parameter), gradient)
        before = snapshot(optimizer)
        scaler.step(optimizer)
        assert same(before, snapshot(optimizer)) == (spoilt is not None)


@world(2)
def test_plain_gradients_alone() -> None:
    """Contract GS-41: ranks that share nothing are not asked, unless the user names them."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for group in (None, dist.group.WORLD):
        weight.grad = torch.full((2,), INF if dist.get_rank() else 1.0)
        scaler = make(process_group=group)
        with Collectives() as calls:
            scaler.step(optimizer)
        assert len(calls.calls) == (group is not None)
        assert everywhere(found(scaler, optimizer)) == [group is not None, True]


# --- what ours adds --------------------------------------------------------------------------------------------------


@world(1, 2, 4)
def test_one_reduction_of_one_number() -> None:
    """Contract GS-44, GS-21: torch's needs one for each bucket and dimension; ours one, fused optimizers too."""
    size = dist.get_world_size()
    model, x = pairs() if size == 4 else layers()
    counts = {}
    for kind in KINDS:
        for fused in (False, True):
            optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
            scaler = make(kind)
            for _ in range(2):  # the first step of a fused optimizer goes another way
                optimizer.zero_grad()
                backward(scaler, model, x)
                with Collectives() as calls:
                    if not fused:
                        scaler.unscale_(optimizer)
                        assert len(calls.calls) == len(calls.of("all_reduce"))
                    scaler.step(optimizer)
                    scaler.update()
                assert all(call.outputs[0][1] == 1 for call in calls.calls)
                counts[kind] = len(calls.calls)
                if kind == "unshard":
                    assert counts[kind] == (0 if size == 1 else 1)
    if size > 1:
        assert counts["torch"] == (2 if size == 4 else 1)


@world(4)
def test_ranks_without_gradients() -> None:
    """Contract GS-42: a rank that had no loss, no gradients, no scaling; it steps and skips with the others."""
    model, x = layers()
    rank = dist.get_rank()
    idle = rank == 2
    scaler = make(growth_interval=1)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        if idle:
            model(x).sum().backward()
            optimizer.zero_grad()
        else:
            backward(scaler, model, x)
        if step == 1 and rank == 0:
            local(model[0].weight)[0, 0] = INF
        scaler.unscale_(optimizer)
        assert everywhere(found(scaler, optimizer)) == [step == 1] * 4
        scaler.step(optimizer)
        scaler.update()
        assert everywhere(scaler.get_scale()) == [[4.0, 2.0, 4.0][step]] * 4


@world(2)
def test_parameters_in_float16() -> None:
    """Contract GS-09, GS-40: ours unscales them; torch's refusal says which they are and what to do."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    reference = copy.deepcopy(model).half()
    fully_shard(model[0])
    fully_shard(model)
    model.half()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    backward(make(), model, x)
    refused = make("torch")
    refused.scale(torch.ones(()))
    with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$"):
        refused.step(optimizer)
    scaler = make()
    scaler.scale(torch.ones(()))
    reference(x).sum().backward()
    scaler.unscale_(optimizer)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype == torch.float16
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=0, atol=0)
    if dist.get_rank() == 1:
        local(model[0].weight)[0, 0] = INF
    scaler.update()
    before = snapshot(optimizer)
    scaler.step(optimizer)
    assert found(scaler, optimizer) and same(before, snapshot(optimizer))


# --- training --------------------------------------------------------------------------------------------------------

STEPS, SPOILT = 200, 57


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 18), nn.Tanh(), nn.Linear(18, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 6, generator=dice)
    return x, x[:, :2].sin() * 3


def loss_of(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - target).square().mean()


def training_options() -> dict:
    """A scale that overflows at first, and again whenever it has grown."""
    return {"init_scale": 2.0**20, "growth_interval": 15}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)


def in_halves(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The unsharded model with parameters in float32 that computes in float16."""
    halves = {name: parameter.half() for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, halves, (x.half(),))


def train_sharded(kind: str, ranks: Callable[[int], int]) -> list[tuple[float, float, bool]]:
    """Loss, scale, and whether the step was skipped; `ranks` says whose data a rank sees."""
    model = Small()
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    scaler, optimizer = make(kind, **training_options()), sgd(model)
    record = []
    for step in range(STEPS):
        x, target = data(step, ranks(dist.get_rank()))
        loss = loss_of(model(x), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step == SPOILT and dist.get_rank() == dist.get_world_size() - 1:
            local(model.layers[0].weight)[0, 0] = INF
        scaler.unscale_(optimizer)
        skipped = found(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        record.append((loss.item(), scaler.get_scale(), skipped))
    return record


def train_unsharded(ranks: list[int]) -> list[tuple[list[float], float, bool]]:
    """The same without sharding, on the mean of the gradients on these ranks' data; with the losses of each."""
    model = Small()
    scaler, optimizer = make("torch", **training_options()), sgd(model)
    record = []
    for step in range(STEPS):
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        losses = []
        for rank in ranks:
            x, target = data(step, rank)
            loss = loss_of(in_halves(model, x), target)
            torch._foreach_add_(sums, torch.autograd.grad(scaler.scale(loss), list(model.parameters())))
            losses.append(loss.item())
        torch._foreach_div_(sums, len(ranks))
        for parameter, gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = gradient
        if step == SPOILT:
            model.layers[0].weight.grad[0, 0] = INF
        scaler.unscale_(optimizer)
        skipped = found(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        record.append((losses, scaler.get_scale(), skipped))
    return record


def reference(ranks: list[int], own: int) -> list[tuple[float, float, bool]]:
    """What `train_unsharded` did, with the losses on the data of one rank; computed once for all ranks."""
    box = [train_unsharded(ranks) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return [(losses[own], scale, skipped) for losses, scale, skipped in box[0]]


def check_training(mine: list, theirs: list) -> None:
    assert len(mine) == len(theirs) == STEPS
    skips = [step for step, (_, _, skipped) in enumerate(mine) if skipped]
    assert skips == [step for step, (_, _, skipped) in enumerate(theirs) if skipped]
    assert skips[0] == 0 and SPOILT in skips and 5 < len(skips) < STEPS / 4
    assert [scale for _, scale, _ in mine] == [scale for _, scale, _ in theirs]
    assert theirs[-1][0] < theirs[0][0] / 2
    assert everywhere([each[1:] for each in mine]) == [[each[1:] for each in mine]] * dist.get_world_size()


@world(2, 4, slow=(4,))
def test_training_on_the_same_data() -> None:
    """Contract GS-06, GS-22, GS-36: bit for bit the unsharded run in float16, with its skips and scales."""
    theirs = reference([0], 0)
    for kind in KINDS if dist.get_world_size() == 2 else ["unshard"]:
        mine = train_sharded(kind, lambda rank: 0)
        check_training(mine, theirs)
        assert mine == theirs


@world(2, 4, slow=(2,))
def test_training_on_different_data() -> None:
    """Contract GS-06, GS-36, GS-40: overflows that one rank's data cause are skipped by all."""
    ranks = list(range(dist.get_world_size()))
    mine = train_sharded("unshard", lambda rank: rank)
    theirs = reference(ranks, dist.get_rank())
    check_training(mine, theirs)
    torch.testing.assert_close(
        torch.tensor([loss for loss, _, _ in mine]), torch.tensor([loss for loss, _, _ in theirs]), rtol=2e-3, atol=1e-4
    )
