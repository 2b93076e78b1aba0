"""Which parameters and buffers a call takes, and what becomes of those it does not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.stack import WIDTH, Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded, units
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor

from unshard import MixedPrecisionPolicy, fully_shard


@world(2)
def test_a_call_takes_what_earlier_calls_left() -> None:
    """Contract SEL-01 to SEL-03: depth first, children before parents, every parameter once."""
    model = Stack(2)
    model.scale = nn.Parameter(torch.ones(3))
    model.again = model.head
    fully_shard(model.blocks[0].first)
    fully_shard(model.blocks[0])
    fully_shard(model)
    loss_of(model)
    taken = {unit.name: [param.name for param in unit.params] for unit in units(model)}
    assert taken == {
        "(root)": [
            *(f"blocks.1.{part}.{kind}" for part in ("first", "second") for kind in ("weight", "bias")),
            "head.weight",
            "head.bias",
            "scale",
        ],
        "blocks.0": ["blocks.0.second.weight", "blocks.0.second.bias"],
        "blocks.0.first": ["blocks.0.first.weight", "blocks.0.first.bias"],
    }


@world(2)
def test_sharded_parameters_are_new_objects() -> None:
    """Contract SEL-14, SEL-15: optimizers are built afterwards; `requires_grad` is kept."""
    model = Stack(1)
    model.blocks[0].first.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    sharded(model)
    for name, parameter in model.named_parameters():
        assert parameter is not before[name] and not isinstance(before[name], DTensor)
        assert parameter.requires_grad == (name != "blocks.0.first.weight")


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("own_unit", [False, True])
@world(1, 2, 3)
def test_a_module_under_two_names(own_unit: bool) -> None:
    """Contract SEL-16, SHP-01, SHP-04: one parameter, one place in the unit, the same object under every name."""
    model, reference = Twice(), Twice()
    if own_unit:
        fully_shard(model.first)
    fully_shard(model)
    assert model.first.weight is model.last.weight and isinstance(model.last.weight, DTensor)
    assert sum(len(unit.params) for unit in set(units(model))) == 4
    seen = []
    model.last.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    for _ in range(2):
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_gradients(model, reference)
    assert len({id(weight) for weight in seen}) == 1 and not isinstance(seen[0], DTensor)
    assert_at_rest(model)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((8,), 1 / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x).float() * self.scale)


@world(2)
def test_buffers_stay_as_they_are() -> None:
    """Contract SEL-09, CM-08: not sharded, not cast, not sent; every rank has the statistics of its own batches."""
    model, reference = Norms(), Norms()
    fully_shard(model.linear, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model)
    low = reference.linear.weight.detach().bfloat16(), reference.linear.bias.detach().bfloat16()
    for seed in range(2):
        mine = batch(10 * dist.get_rank() + seed)
        with Collectives() as calls:
            model(mine).sum().backward()
        # Two units, gathered and reduced; the last one is freed after forward and gathered again.
        assert [call.kind for call in calls.calls] == ["gather"] * 3 + ["reduce_scatter"] * 2
        reference.norm(nn.functional.linear(mine.bfloat16(), *low).float() * reference.scale)
    for name, buffer in model.named_buffers():
        assert type(buffer) is torch.Tensor
        assert torch.equal(buffer, dict(reference.named_buffers())[name]), name
    other = model.norm.running_mean.clone()
    dist.broadcast(other, 0)
    assert torch.equal(other, model.norm.running_mean) == (dist.get_rank() == 0)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((-2, -1)) @ self.turned


@world(1, 2, 4)
def test_parameters_that_are_not_contiguous() -> None:
    """Contract SEL-11 improved: they are taken; the sharded and the unsharded parameter are contiguous."""
    model, reference = fully_shard(Images()), Images()
    assert not reference.conv.weight.is_contiguous() and not reference.turned.is_contiguous()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(module.turned.is_contiguous()))
    images = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for each in (model, reference):
            each(images).square().mean().backward()
    assert_gradients(model, reference)
    assert seen == [True, True]
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.is_contiguous()
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach(), rtol=0, atol=0)


@world(2)
def test_a_module_whose_parameters_are_all_ignored() -> None:
    """Contract SEL-06, SEL-08: nothing of it is touched, nothing of it is sent."""
    model = Stack(2)
    ignored = set(model.blocks[0].parameters())
    originals = [(each, each.detach().clone()) for each in ignored]
    fully_shard(model, ignored_params=ignored)
    assert set(model.blocks[0].parameters()) == ignored
    with Collectives() as calls:
        loss_of(model).backward()
    piece = sum(parameter.to_local().numel() for parameter in model.parameters() if isinstance(parameter, DTensor))
    assert [call.bytes_in for call in calls.of("gather")] == [4 * piece]
    assert all(torch.equal(each, value) and type(each.grad) is torch.Tensor for each, value in originals)
    reference = Stack(2)
    loss_of(reference).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        torch.testing.assert_close(gradient, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore::UserWarning")  # DDP about its own buckets
@world(2)
def test_replicated_modules_are_left_to_replicate() -> None:
    """Contract SEL-01, INT-03: torch's composable `replicate` reduces them itself."""
    model, reference = Stack(2), Stack(2)
    replicate(model.blocks[0])
    fully_shard(model.blocks[1])
    fully_shard(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.blocks[0].parameters())
    assert isinstance(model.head.weight, DTensor)
    loss_of(model, dist.get_rank()).backward()
    for seed in range(2):
        (loss_of(reference, seed) / 2).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        torch.testing.assert_close(gradient, theirs.grad, rtol=1e-5, atol=1e-7)
