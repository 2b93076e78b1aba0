"""A wrapped model trains like the unsharded one: all strategies, both kinds of parameters, nested (contract C6)."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from bed import models, world
from bed.models import CASES, Case
from bed.parity import adamw
from bed.wrapped import check_wrapped, full_gradients, full_parameters, wrap, wrap_case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from unshard import BackwardPrefetch, CPUOffload, ShardingStrategy
from unshard import FullyShardedDataParallel as FSDP
from unshard.wrap import ModuleWrapPolicy

S = ShardingStrategy
PLAIN = (S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@pytest.mark.parametrize("case", CASES, ids=str)
@world(1, 2, 3, 4)
def test_full_shard_matches_the_unsharded_model(case: Case, originals: bool) -> None:
    """F1-57, F1-49..F1-52: losses, gradients and parameters of four steps of AdamW."""
    check_wrapped(case, use_orig_params=originals)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2, 3)
def test_other_strategies_match(originals: bool) -> None:
    """F1-58, F1-59: parameters unsharded from forward to backward, and never sharded at all."""
    for case in (CASES[0], CASES[1], CASES[4]):
        for strategy in PLAIN[1:]:
            check_wrapped(case, steps=3, use_orig_params=originals, sharding_strategy=strategy)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(4)
def test_hybrid_strategies_match(originals: bool) -> None:
    """F1-61, F1-28, F1-14: shards inside pairs, replicas over them, by mesh and by groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = mesh.get_group(1), mesh.get_group(0)
    for strategy in (S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2):
        check_wrapped(CASES[1], steps=3, use_orig_params=originals, sharding_strategy=strategy, device_mesh=mesh)
        check_wrapped(CASES[0], steps=3, use_orig_params=originals, sharding_strategy=strategy, process_group=groups)


@world(4)
def test_hybrid_by_policy_makes_its_groups() -> None:
    """F1-31: with a policy and no groups, those of a node are made, and modules inside share them."""
    case = CASES[0]

    def build(case: Case, **options: object) -> FSDP:
        return FSDP(case.build(), auto_wrap_policy=ModuleWrapPolicy({models.Block}), **options)  # type: ignore[arg-type]

    model = check_wrapped(case, steps=2, build=build, sharding_strategy=S.HYBRID_SHARD)
    assert {id(each.process_group) for each in FSDP.fsdp_modules(model)} == {id(model.process_group)}
    assert len(FSDP.fsdp_modules(model)) == 4


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_offloaded_and_prefetched_otherwise(originals: bool) -> None:
    """F1-16, F1-18, F1-24: parameters on the host; no prefetch in backward, or after it; and in forward."""
    for prefetch in (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST):
        check_wrapped(
            CASES[0],
            steps=2,
            use_orig_params=originals,
            backward_prefetch=prefetch,
            forward_prefetch=True,
            limit_all_gathers=False,
            cpu_offload=CPUOffload(offload_params=True),
        )


PARTS = 3


@functools.cache
def accumulated() -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Of the unsharded model: the gradients of two steps of several backwards each, and the parameters after them."""
    case = CASES[0]
    model = case.build()
    stepper, gradients = adamw(model.parameters()), []
    for step in range(2):
        for part in range(PARTS):
            case.loss(model, case.batch(10 * step + part)).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        stepper.step()
        stepper.zero_grad()
    return gradients, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@pytest.mark.parametrize("strategy", PLAIN, ids=lambda each: each.name)
@world(2, 3)
def test_accumulation_with_and_without_no_sync(strategy: ShardingStrategy, originals: bool) -> None:
    """F1-81, F1-62, F1-58: sums of unsynchronised backwards are those of the full batches."""
    case, rank, size = CASES[0], dist.get_rank(), dist.get_world_size()
    gradients, parameters = accumulated()
    for silent in (True, False):
        model = wrap_case(case, sharding_strategy=strategy, use_orig_params=originals)
        stepper = adamw(model.parameters())
        for step, expected in enumerate(gradients):
            for part in range(PARTS):
                batch = models.shard(case.batch(10 * step + part), rank, size)
                with model.no_sync() if silent and part < PARTS - 1 else nullcontext():
                    case.loss(model, batch).backward()
            found = full_gradients(model)
            assert found.keys() == expected.keys()
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
            stepper.step()
            stepper.zero_grad()
        for name, parameter in full_parameters(model).items():
            torch.testing.assert_close(parameter, parameters[name], rtol=1e-4, atol=1e-5)


class Branches(nn.Module):
    """One layer that only some steps use, one that is frozen, one weight used under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rare = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.second.weight = self.first.weight
        self.use_rare = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return x + self.rare(x) if self.use_rare else x


@pytest.mark.parametrize("strategy", PLAIN, ids=lambda each: each.name)
@world(2, 3)
def test_frozen_shared_and_unused_parameters(strategy: ShardingStrategy) -> None:
    """F1-36, F1-49, F1-71: in one unit, with the original parameters; unused and frozen ones have no gradients."""
    torch.manual_seed(5)
    reference = Branches()
    model = wrap(copy.deepcopy(reference), [], sharding_strategy=strategy, use_orig_params=True)
    stepper, other = adamw(model.parameters()), adamw(reference.parameters())
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(4):
        model.module.use_rare = reference.use_rare = step == 2
        whole = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        reference(whole).square().mean().backward()
        model(whole[rank * 12 // size : (rank + 1) * 12 // size]).square().mean().backward()
        assert model.module.frozen.weight.grad is None
        assert step == 2 or model.module.rare.weight.grad is None
        assert model.module.second.weight is model.module.first.weight
        for each in (stepper, other):
            each.step()
            each.zero_grad()
    expected = dict(reference.named_parameters())
    found = full_parameters(model)
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, expected[name].detach(), rtol=1e-4, atol=1e-6)


@world(2, 3)
def test_a_frozen_unit_and_one_frozen_later() -> None:
    """F1-36, F1-70: flat parameters are frozen and unfrozen as one."""
    case, rank, size = CASES[1], dist.get_rank(), dist.get_world_size()
    reference = case.build()
    reference.layers[1].requires_grad_(False)
    built = case.build()
    built.layers[1].requires_grad_(False)
    model = wrap(built, case.units(built))
    stepper, other = adamw(model.parameters()), adamw(reference.parameters())
    for step in range(4):
        if step == 2:
            reference.layers[1].requires_grad_(True)
            model.layers[1].requires_grad_(True)
        batch = case.batch(step)
        case.loss(reference, batch).backward()
        case.loss(model, models.shard(batch, rank, size)).backward()
        assert (model.layers[1].params[0].grad is None) == (step < 2)
        for each in (stepper, other):
            each.step()
            each.zero_grad()
    for name, parameter in full_parameters(model).items():
        torch.testing.assert_close(parameter, reference.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=lambda each: each.name
)
@pytest.mark.parametrize("used", ["ab", "ba"])
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_ranks_may_use_different_parameters_of_a_unit(originals: bool, used: str, strategy: ShardingStrategy) -> None:
    """The unit is reduced as a whole: a rank that did not use a parameter adds zeros, and gets the sum."""
    torch.manual_seed(5)
    reference = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = copy.deepcopy(reference)

        def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
            return self.parts[which](x)

    model = wrap(Choice(), [], use_orig_params=originals, sharding_strategy=strategy)
    x = torch.ones(2, 4)
    for _ in range(2):  # the second time they are added to those of the first
        model(x, used[dist.get_rank()]).sum().backward()
        (reference["a"](x).sum() + reference["b"](x).sum()).backward()
        for name, gradient in full_gradients(model).items():
            expected = reference.get_parameter(name.removeprefix("parts.")).grad
            unused = torch.zeros_like(gradient)  # if one flat parameter has all gradients
            torch.testing.assert_close(gradient, unused if expected is None else expected / 2)
    held = {name: each.grad for name, each in model.named_parameters() if originals and each.numel()}
    assert all((grad is None) == ("parts.c" in name) for name, grad in held.items())
    assert all(torch.equal(grad, torch.full_like(grad, 2.0)) for grad in held.values() if grad is not None)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2, 3)
def test_channels_last_weights_keep_their_strides(originals: bool) -> None:
    """F1-54: in the unit they lie as they did, and modules see them so."""
    torch.manual_seed(2)
    reference = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    model = wrap(copy.deepcopy(reference), [], use_orig_params=originals)
    seen = []
    model.module.register_forward_pre_hook(lambda module, args: seen.append(module.weight.stride()))
    x = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    reference(x).square().mean().backward()
    size, rank = dist.get_world_size(), dist.get_rank()
    model(x[rank * 6 // size : (rank + 1) * 6 // size]).square().mean().backward()
    assert seen == [reference.weight.stride()]
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    for name, parameter in full_parameters(model).items():
        torch.testing.assert_close(parameter, reference.get_parameter(name).detach())


@world(2)
def test_a_wrong_scale_would_be_noticed() -> None:
    """The proof that these tests can fail."""

    def build(case: Case, **options: object) -> FSDP:
        model = wrap_case(case, **options)
        head = model.module.head.forward
        model.module.head.forward = lambda x: head(x) * 1.001
        return model

    with pytest.raises(AssertionError, match="differs by"):
        check_wrapped(CASES[0], steps=1, build=build)
