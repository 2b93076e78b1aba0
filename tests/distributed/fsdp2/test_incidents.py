"""What has gone wrong for users of sharded training elsewhere; docs/incidents.md lists the public threads."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bed import world
from bed.models import case
from bed.recorders import Collectives
from bed.stack import WIDTH, Stack, assert_at_rest, assert_gradients, batch, loss_of, mesh, sharded, units
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from unshard import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

B16, F32 = torch.bfloat16, torch.float32
POLICIES = {
    "param": MixedPrecisionPolicy(param_dtype=B16),
    "param, reduce, output": MixedPrecisionPolicy(param_dtype=B16, reduce_dtype=F32, output_dtype=F32),
    "no cast of inputs": MixedPrecisionPolicy(param_dtype=B16, cast_forward_inputs=False, output_dtype=B16),
}


def mixed(policy: MixedPrecisionPolicy, order: str, reentrant: bool) -> tuple[Stack, list[torch.dtype]]:
    """Blocks that are sharded in low precision and recomputed in backward; and the dtypes their layers saw."""
    model, seen = Stack(2), []
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    for number, block in enumerate(model.blocks):
        block.first.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
        if order == "sharded inside":
            fully_shard(block, mp_policy=policy)
            model.blocks[number] = checkpoint_wrapper(block, kind)
        elif order == "sharded outside":
            model.blocks[number] = fully_shard(checkpoint_wrapper(block, kind), mp_policy=policy)
        else:
            fully_shard(block, mp_policy=policy)
            if order == "layers":
                block.first, block.second = (
                    checkpoint_wrapper(block.first, kind),
                    checkpoint_wrapper(block.second, kind),
                )
    fully_shard(model.head, mp_policy=POLICIES["param"])
    return fully_shard(model), seen


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", ["sharded inside", "sharded outside", "layers"])
@pytest.mark.parametrize("reentrant", [True, False])
@world(2)
def test_recomputation_sees_the_dtypes_of_forward(reentrant: bool, order: str, policy: str) -> None:
    """pytorch #159359, #148831: every order of wrapping; bit by bit the gradients without checkpointing. INT-02."""
    model, seen = mixed(POLICIES[policy], order, reentrant)
    plain, _ = mixed(POLICIES[policy], "none", reentrant)
    for seed in range(2):
        for each in (model, plain):
            x = batch(seed).to(B16).requires_grad_()
            each(x).float().square().mean().backward()
    assert len(seen) == 2 * 2 * 2  # two blocks, forward and recomputation, two steps
    assert set(seen) == {(B16, B16)}
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == F32 and mine.grad.to_local().abs().sum() > 0
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())
    assert_at_rest(model)


@pytest.mark.parametrize("where", ["meta", "whole"])
@world(1, 2, 3, 4)
def test_tied_weights_stay_tied_and_are_trained(where: str) -> None:
    """pytorch #176076: 29 rows on up to four ranks, through `to_empty`, a load, and three steps. SHP-01, SHP-03."""
    tied = case("tied")
    reference = tied.build()
    with torch.device("meta" if where == "meta" else "cpu"):
        model = tied.build()
    for layer in model.hidden:
        fully_shard(layer)
    fully_shard(model)
    if where == "meta":
        model.to_empty(device="cpu")
    where_to = model.head.bias.device_mesh
    state = {name: distribute_tensor(value, where_to, (Shard(0),)) for name, value in reference.state_dict().items()}
    model.load_state_dict(state)
    before = model.tokens.weight.detach().full_tensor().clone()
    _train_tied(model, reference)
    assert model.head.weight is model.tokens.weight
    assert sum(1 for name, _ in model.named_parameters() if name.endswith("weight")) == 3
    assert not torch.equal(model.tokens.weight.detach().full_tensor(), before)


def _train_tied(model: nn.Module, reference: nn.Module) -> None:
    tied = case("tied")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    for step in range(3):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            tied.loss(each, tied.batch(step)).backward()
            optimizer.step()
    assert_gradients(model, reference)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reshard", [None, True])
@world(1, 2, 3)
def test_weights_that_are_tied_after_sharding(reshard: bool | None) -> None:
    """verl #7834, accelerate #4171: `tie_weights()` of a program that materialised its model from meta."""
    tied = case("tied")
    # In float32 the references of two ranks may differ by the tolerance: on a CPU without bfloat16, torch turns oneDNN
    # off in a process where it has failed, and that process multiplies matrices in another way from then on.
    model, reference = tied.build().double(), tied.build().double()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    fully_shard(model, reshard_after_forward=reshard)
    model.head.weight = model.tokens.weight
    _train_tied(model, reference)
    assert model.head.weight is model.tokens.weight
    model.zero_grad()
    reference.zero_grad()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        for each in (model, reference):
            tied.loss(each, tied.batch(step)).backward()
    assert_gradients(model, reference)
    (unit,) = units(model)
    assert len(unit.params) == len(list(model.parameters())) == 6


@world(2)
def test_weights_of_two_units_that_are_tied_after_sharding() -> None:
    """accelerate #4171: one unit owns the weight, the other uses it. LZY-09, SHP-02."""
    model, reference = case("tied").build(), case("tied").build()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    fully_shard(model.head)
    fully_shard(model)
    model.head.weight = model.tokens.weight
    _train_tied(model, reference)
    assert model.head.weight is model.tokens.weight


class Outside(nn.Module):
    """The last layer's weight is used by a loss outside the layer's forward, as fused cross-entropies do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self(x), self.head.weight, self.head.bias).square().mean()


@pytest.mark.parametrize("way", ["method", "unshard"])
@world(1, 2, 3)
def test_a_weight_that_is_used_outside_its_forward(way: str) -> None:
    """ml-cross-entropy #31, torchtune #2800: gathered by hand or a registered method, it is unsharded and trained."""
    model, reference = Outside(), Outside()
    fully_shard(model.body)
    fully_shard(model.head)
    fully_shard(model)
    with pytest.raises(RuntimeError, match="DTensor"):  # without it torch raises
        model.loss(batch())
    model.reset_iter_state()
    for seed in range(2):
        if way == "method":
            model.head.project = lambda x: F.linear(x, model.head.weight, model.head.bias)
            register_fsdp_forward_method(model.head, "project")
            model.head.project(model(batch(seed))).square().mean().backward()
        else:
            model.head.unshard()
            model.loss(batch(seed)).backward()
        reference.loss(batch(seed)).backward()
        assert_gradients(model, reference)
        assert_at_rest(model)


@world(2, 3, 4)
def test_an_average_of_uneven_shards_sends_nothing() -> None:
    """pytorch #149138, miles-credit #414: copy once, then average shard by shard; ranks without rows included."""
    uneven = case("uneven")
    model, reference = uneven.build(), uneven.build()
    for unit in uneven.units(model):
        fully_shard(unit)
    average, theirs = copy.deepcopy(model), copy.deepcopy(reference)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for step in range(3):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            uneven.loss(each, uneven.batch(step)).backward()
            optimizer.step()
        with torch.no_grad(), Collectives() as calls:
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        assert calls.calls == []
        with torch.no_grad():
            for old, new in zip(theirs.parameters(), reference.parameters(), strict=True):
                old.lerp_(new, 0.1)
    with torch.no_grad():
        inputs = uneven.batch(9)[0]
        torch.testing.assert_close(average(inputs), theirs(inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")  # DDP about its own buckets
@world(4)
def test_the_scale_of_gradients_is_that_of_data_parallelism() -> None:
    """torchtitan #2318, pytorch #155903: DDP, shards, replicas and both: the mean over the ranks, the same number."""
    plain = DistributedDataParallel(Stack())
    kinds = {"shards": sharded(), **{f"{n} replicas": sharded(mesh=mesh(n)) for n in (1, 2, 4)}}
    for model in (plain, *kinds.values()):
        loss_of(model, dist.get_rank()).backward()
    whole = Stack()
    for rank in range(4):
        (loss_of(whole, rank) / 4).backward()
    for model in kinds.values():
        assert_gradients(model, plain.module)
        assert_gradients(model, whole)


@world(2)
def test_optimizers_beside_ignored_and_frozen_parameters() -> None:
    """ktransformers #2145, accelerate #4219: plain, frozen and sharded parameters in one optimizer."""
    model, reference = Stack(2), Stack(2)
    for each in (model, reference):
        each.blocks[1].requires_grad_(False)
    ignored = {model.head.bias}
    for block in model.blocks:
        fully_shard(block, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in (model, reference)]
    for seed in range(2):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each, seed).backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        value = mine.detach().full_tensor() if isinstance(mine, DTensor) else mine.detach()
        torch.testing.assert_close(value, theirs.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
@world(2)
def test_one_step_with_everything_at_once(reentrant: bool) -> None:
    """verl #7493, cosmos #162: other data on every rank, checkpointing, accumulation: gradients are synchronised."""
    model, reference = Stack(), Stack()
    model.run = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
    sharded(model)
    size = dist.get_world_size()
    for seed in range(2):
        model.set_requires_gradient_sync(seed == 1)
        model(batch(10 * seed + dist.get_rank(), requires_grad=True)).square().mean().backward()
        for rank in range(size):
            (loss_of(reference, 10 * seed + rank) / size).backward()
    assert_gradients(model, reference)
