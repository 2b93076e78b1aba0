"""What happens to a flat optimizer's parameters, gradients and groups between its steps."""

from __future__ import annotations

import copy
import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.flat_optimizers import (
    Mirror,
    Net,
    assert_clean,
    by_decay,
    inputs,
    local,
    optim,
    plain_loss,
    ranges,
    sharded,
    train,
)
from bed.recorders import TorchCalls
from bed.user_collectives import ToyGather
from torch import nn
from torch.distributed.tensor import DTensor

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.comm import process_group
from unshard.engine.hooks import state_of
from unshard.engine.sharded_grad import ShardedGrad
from unshard.optim import GradScaler, clip_grad_norm_, flat
from unshard.torch_private import local_of, set_local_tensor, storage_use_count


def adamw(model: nn.Module, **options: Any) -> Any:
    return flat(optim.AdamW(by_decay(model), lr=0.01, **options))


def shards_of(model: nn.Module) -> list[ShardedGrad]:
    """Not those of other tests: collectives that were given up keep theirs as long as the process lives."""
    mine = set(map(id, model.parameters()))
    alive = [each for each in gc.get_objects() if isinstance(each, ShardedGrad)]
    return [each for each in alive if not mine.isdisjoint(map(id, each.parameters))]


@world(2)
def test_a_kept_unit_is_gathered_again_after_a_step() -> None:
    """Writes through flat tensors raise no version counter of the parameters."""
    model, plain = sharded(reshard_after_forward=False), Net()
    optimizer, reference = adamw(model), optim.AdamW(by_decay(plain), lr=0.01)
    train(model, optimizer)
    train(plain, reference)
    torch.testing.assert_close(model(inputs(9)), plain(inputs(9)))
    assert not torch.allclose(plain(inputs(9)), Net()(inputs(9)))


@world(2)
def test_parameters_that_were_rebound() -> None:
    """Between backward and step, when the engine has not noticed yet; and before backward."""
    model = sharded()
    optimizer = adamw(model)
    mirror = Mirror(optimizer)
    train(model, optimizer, mirror, steps=range(2))
    few = len(ranges(optimizer))
    plain_loss(model, 2).backward()
    for each in (model.odd.weight, model.first.bias):
        set_local_tensor(each, local_of(each).clone())
    mirror.step()
    optimizer.step()
    optimizer.zero_grad()
    mirror.check()
    assert len(ranges(optimizer)) > few
    set_local_tensor(model.extra.weight, local_of(model.extra.weight).clone())
    train(model, optimizer, mirror, steps=range(3, 5))
    mirror.check()
    assert len(ranges(optimizer)) == few  # all in the master shard again
    assert_clean()


@world(2)
def test_a_unit_that_was_laid_out_anew() -> None:
    """By another transport, with all state; and by another dtype."""
    model = sharded()
    optimizer = adamw(model)
    mirror = Mirror(optimizer)
    train(model, optimizer, mirror, steps=range(2))
    model.set_custom_all_gather(ToyGather())
    train(model, optimizer, mirror, steps=range(2, 4))
    mirror.check()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    train(model, optimizer, mirror, steps=range(4, 5))
    mirror.check()
    sgd = flat(optim.SGD(model.parameters(), lr=0.1))
    train(model, sgd, steps=range(2))
    model.double()
    mirror = Mirror(sgd)
    train(model, sgd, mirror, loss=lambda model, step: model(inputs(step).double()).square().mean())
    mirror.check()
    assert all(span.flat.dtype == torch.float64 for span in ranges(sgd))


@world(3)
def test_gradients_that_a_user_made_or_holds() -> None:
    """Replaced for one parameter, for all, held over steps, and added up over two backwards."""
    model = sharded()
    optimizer = adamw(model)
    mirror = Mirror(optimizer)
    train(model, optimizer, mirror, steps=range(2))
    few, held = len(ranges(optimizer)), []
    for step, changed in enumerate(([model.odd.weight], list(model.parameters()), [], [], []), 2):
        for backward in range(2):
            plain_loss(model, 10 * step + backward).backward()
        held += [model.first.weight.grad, local_of(model.odd.bias.grad)] if step == 4 else []
        for each in changed:
            each.grad = each.grad * 2 + 1
        mirror.step()
        optimizer.step()
        optimizer.zero_grad()
    mirror.check()
    assert len(ranges(optimizer)) == few  # nothing of this is a reason to split
    assert len(held) == 2
    assert_clean()


@world(2)
def test_splits_stay() -> None:
    """Where parameters were once left out, they are never one tensor again: their counters differ."""
    model = sharded()
    optimizer = adamw(model)
    mirror, counts = Mirror(optimizer), []
    for step in range(6):
        extra = step in (0, 1, 4, 5)
        train(model, optimizer, mirror, steps=[step], loss=lambda m, s, e=extra: m(inputs(s), e).square().mean())
        counts.append(len(ranges(optimizer)))
    mirror.check()
    assert counts[0] == counts[1] < counts[2] == counts[3] == counts[4] == counts[5]
    assert optimizer.state[model.extra.weight]["step"] == 4 and optimizer.state[model.odd.weight]["step"] == 6
    assert optimizer.state[model.extra.weight]["step"] is not optimizer.state[model.odd.weight]["step"]


@world(2)
def test_groups_that_are_added_and_rates_that_change() -> None:
    model = sharded()
    rest = [each for name, each in model.named_parameters() if not name.startswith("last")]
    optimizer = optim.AdamW(rest, lr=0.01)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    assert flat(optimizer) is optimizer and flat(optimizer) is optimizer
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(len(optimizer.param_groups[0]["params"])))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    mirror = Mirror(optimizer)
    for step in range(3):
        train(model, optimizer, mirror, steps=[step])
        model.zero_grad()
        before.step()
        after.step()
    mirror.check()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5 * 0.9**3)
    assert calls == [len(rest), "after"] * 3
    assert 0 < len(ranges(optimizer)) < len(rest)  # the scheduler's wrapper was for the step of the class before
    assert isinstance(optimizer, optim.AdamW) and repr(optimizer).startswith("AdamW (")
    optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.5})
    old = {each: optimizer.state[each]["exp_avg"].clone() for each in rest}
    assert optimizer.step(lambda: plain_loss(model, 3).backward() or 7.0) == 7.0  # a closure
    for each in rest:
        assert not torch.equal(local(optimizer.state[each]["exp_avg"]), local(old[each])) or not local(each).numel()
        assert optimizer.state[each]["step"] == 4
    assert optimizer.state[model.last.weight]["step"] == 1


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, GradScaler])
@world(2)
def test_scalers(kind: type, fused: bool) -> None:
    """A fused step gets the scale, and what was found, by attributes of the optimizer."""
    models = [sharded(), sharded()]
    optimizers = [adamw(models[0], fused=fused), optim.AdamW(by_decay(models[1]), lr=0.01, foreach=True)]
    scalers = [kind("cpu", init_scale=4.0, growth_interval=2) for _ in models]
    for step in range(4):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            scaler.scale(plain_loss(model, step)).backward()
            if step == 2 and dist.get_rank() == 0:
                local_of(model.odd.weight.grad)[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(local(mine), local(theirs))
        assert optimizers[0].state[mine]["step"] == optimizers[1].state[theirs]["step"] == 3
    assert_clean()


def reductions_in_groups() -> AbstractContextManager[Any]:
    """Reductions by Gloo itself, as they are where tensors are on a device: large gradients have gaps between them."""
    return mock.patch.object(process_group, "_exchange_is_faster", lambda *unused: False)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
@world(2)
def test_gaps_are_clean_after_gradients_that_are_not_finite(to_none: bool, grouped: bool) -> None:
    """Zero times NaN is NaN: what clipping leaves between the gradients must not be found by the next norm."""
    with reductions_in_groups() if grouped else nullcontext():
        model, x = fully_shard(Block(width=161)), torch.randn(4, 161)
    model(x).sum().backward()
    local_of(model.weights[0].grad)[0, 0] = torch.nan
    assert clip_grad_norm_(model.parameters(), 1.0).isnan()
    (shard,) = shards_of(model)
    assert shard.gaps or dist.get_rank() == 0  # the second rank has fewer rows
    assert not any(gap.any() for gap in shard.gaps)
    loss = model(x).sum()
    model.zero_grad(set_to_none=to_none)  # after forward, so that the memory is never given back
    loss.backward()
    assert clip_grad_norm_(model.parameters(), 1.0).isfinite()
    assert_clean()


@world(2)
def test_scalers_recover_from_gradients_that_are_zeroed_in_place() -> None:
    model, scaler = sharded(), GradScaler("cpu", init_scale=4.0)
    optimizer = adamw(model)
    for step in range(4):
        scaler.scale(plain_loss(model, step)).backward()
        if step == 1 and dist.get_rank() == 0:
            local_of(model.odd.weight.grad)[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        assert clip_grad_norm_(model.parameters(), 1.0).isfinite() == (step != 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    assert scaler.get_scale() == 2.0


@world(1, 2)
def test_zero_grad() -> None:
    model = sharded()
    optimizer = adamw(model)
    plain_loss(model, 0).backward()
    parameters = [each.grad for each in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    assert all(
        each.grad is face and not local(face).any() for each, face in zip(model.parameters(), parameters, strict=True)
    )
    del parameters
    optimizer.zero_grad()
    assert all(each.grad is None for each in model.parameters())


@world(2)
def test_nothing_grows() -> None:
    """The views of gradients that steps make must not make the engine believe that a user holds gradients."""
    model = sharded()
    optimizer = adamw(model)

    def steps() -> tuple[list[ShardedGrad], int]:
        for step in range(20):
            plain_loss(model, step).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return shards_of(model), len(gc.get_objects())

    shards, objects = steps()
    again = [steps(), steps()]
    assert len(shards) == 2 and all(list(map(id, each)) == list(map(id, shards)) for each, _ in again)
    assert min(each[1] for each in again) <= objects + 5


@world(2)
def test_a_model_that_sleeps_on_another_device() -> None:
    """Its shards and its flat state are freed, and it trains on when both are back."""
    model, plain = sharded(), Net()
    optimizer, reference = adamw(model), optim.AdamW(by_decay(plain), lr=0.01)
    train(model, optimizer)
    train(plain, reference)
    state, values = copy.deepcopy(optimizer.state_dict()), [local(each).detach().clone() for each in model.parameters()]
    held = [state_of(each).unit.param_groups[0].sharded.shard.memory for each in (model.first, model)]
    held += [flat for span in ranges(optimizer) for flat in optimizer.flat_groups().state[span.flat].values()]
    storages = [each.untyped_storage() for each in held if each.numel() > 1]
    assert len(storages) == 2 + 2 * len(ranges(optimizer))
    del held

    optimizer.load_state_dict({**state, "state": {}})
    model.to("meta")  # stands for a host, when the shards are on a GPU
    gc.collect()
    assert [storage_use_count(each) for each in storages] == [1] * len(storages)

    model.to_empty(device="cpu")
    for parameter, value in zip(model.parameters(), values, strict=True):
        local(parameter).detach().copy_(value)
    optimizer.load_state_dict(state)
    train(model, optimizer)
    train(plain, reference)
    torch.testing.assert_close(model(inputs(9)), plain(inputs(9)))


@world(2)
def test_shards_that_lie_in_two_ways() -> None:
    """Gathered one by one and reduced in a group: gradients begin at multiples of 256 bytes, parameters do not.

    More tensors, no copies.
    """
    with reductions_in_groups():
        model = fully_shard(Block(width=161))
    optimizer = adamw(model)
    mirror = Mirror(optimizer)
    train(model, optimizer, mirror, loss=lambda model, step: model(torch.ones(2, 161)).square().mean())
    mirror.check()
    assert len(ranges(optimizer)) == 8 and optimizer.flat_groups()._collected == []
    assert_clean()


class Block(nn.Module):
    """Large matrices, small ones, norms, and biases: as blocks of transformers have them."""

    def __init__(self, norms: int = 2, width: int = 160) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, width) / width) for _ in range(7))
        self.norms = nn.ParameterList(nn.Parameter(torch.randn(width + 1)) for _ in range(norms))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        for norm in self.norms:
            x = x * norm[:-1]
        return x


def calls_of(norms: int, size: int, policy: MixedPrecisionPolicy) -> tuple[int, dict[str, int]]:
    with loopback.job(world=size):
        model = nn.Sequential(Block(norms, 161), Block(norms, 161))
        for block in model:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = adamw(model, foreach=True)
        for _ in range(3):
            model(torch.randn(4, 161)).sum().backward()
            with TorchCalls() as calls:
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert all(isinstance(each, DTensor) for each in model.parameters())
        return len(ranges(optimizer)), dict(calls.counts)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(("size", "policy"), [(1, HALF), (2, HALF), (3, MixedPrecisionPolicy())])
def test_few_tensors_and_few_calls(size: int, policy: MixedPrecisionPolicy) -> None:
    """A tensor for the decayed and one for the other parameters of each unit, however many there are.

    A weight may be large in the dtype it is reduced in, and small in that it is gathered in.
    """
    few, many = calls_of(2, size, policy), calls_of(40, size, policy)
    assert few == many
    assert few[0] == 4
    assert sum(few[1].values()) < 50, few
