"""Optimizer state on the host and parameters on the device, with side streams as late as they may be."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bed import flat_optimizers, world
from bed.checkpoints import quiet
from bed.flat_optimizers import (
    FUSED,
    KINDS,
    OPTIMIZERS,
    WAYS,
    Counting,
    Mirror,
    Net,
    assert_clean,
    assert_equal,
    by_decay,
    local,
    loss_of_some_layers,
    nan_buffer,
    on_the_host,
    optim,
    plain_loss,
    sharded,
    train,
)
from bed.late import late_host
from bed.models import CASES, Case
from bed.tensor_subclass import SplitTensor
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate

from unshard import CPUOffloadPolicy, OffloadPolicy, OptimizerOffloadPolicy, fully_shard
from unshard.engine.shard_lookup import shard_ranges_of
from unshard.engine.side_stream import CopyStreams
from unshard.errors import StateError
from unshard.optim import GradScaler, clip_grad_norm_, flat
from unshard.optim import offload as stream

STATES = OptimizerOffloadPolicy(pin_memory=False)


@contextmanager
def host(up: str = "", down: str = "", small: int = 0) -> Iterator[CopyStreams]:
    """Late side streams, buffers full of NaN, and by default a load for each range."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(stream, "_device_memory", nan_buffer))
        stack.enter_context(mock.patch.object(stream, "BATCH_BYTES", small))
        yield stack.enter_context(late_host(up, down))


def build(policy: OffloadPolicy, kind: Any = optim.AdamW, **options: Any) -> tuple[nn.Module, Any]:
    model = sharded(offload_policy=policy)
    model.odd.bias.requires_grad_(False)
    return model, flat(kind(by_decay(model), **{"lr": 0.01, **options}))


def streamed(optimizer: Any) -> int:
    """How many ranges the last step brought to the device."""
    return len(optimizer.flat_groups().streamed)


def assert_alike(mine: tuple[nn.Module, Any], theirs: tuple[nn.Module, Any], has_state: bool = True) -> None:
    """Parameters and state are the same to the last bit."""
    for a, b in zip(mine[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(local(a), local(b))
        one, other = mine[1].state.get(a, {}), theirs[1].state.get(b, {})
        assert one.keys() == other.keys() and (one or not has_state or not a.requires_grad)
        for key, value in one.items():
            assert type(value) is type(other[key]) and torch.equal(local(value), local(other[key])), key


@pytest.mark.parametrize("name", ["momentum", "adamw", "adagrad", "asgd"])
@world(1, 2, 3, 4)
def test_bitwise_as_on_the_device(name: str) -> None:
    """Two groups, a parameter that is frozen, and a layer that only some steps use."""
    kind, options = OPTIMIZERS[name]
    here = build(OffloadPolicy(), kind, **options)
    train(*here, steps=range(6), loss=loss_of_some_layers)
    for small in (0, 400, stream.BATCH_BYTES):
        with host(small=small):
            there = build(STATES, kind, **options)
            train(*there, steps=range(6), loss=loss_of_some_layers)
        assert_alike(there, here)
        assert streamed(there[1]) > 3 and not streamed(here[1])
        assert_clean()


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@world(2)
def test_every_optimizer(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    for way in WAYS if name in FUSED else ("loop", "foreach"):
        with host():
            model, optimizer = build(STATES, kind, **options, **WAYS[way])
            mirror = Mirror(optimizer, **options, **WAYS[way])
            train(model, optimizer, mirror, loss=loss_of_some_layers)
        mirror.check(bitwise=way != "fused")
        assert_clean()


@pytest.mark.parametrize("kind", [each for each in KINDS if each is not on_the_host])
@world(4)
def test_every_kind_of_sharding(kind: Callable[[], nn.Module]) -> None:
    with host(), mock.patch.object(flat_optimizers, "fully_shard", partial(fully_shard, offload_policy=STATES)):
        model = kind()
        optimizer = flat(optim.AdamW(by_decay(model), lr=0.01))
        mirror = Mirror(optimizer)
        train(model, optimizer, mirror)
    mirror.check()
    assert streamed(optimizer)


@pytest.mark.parametrize("each", CASES, ids=str)
@world(1, 3)
def test_every_kind_of_parameter(each: Case) -> None:
    with host():
        model = each.build()
        for unit in each.units(model):
            fully_shard(unit, offload_policy=STATES)
        optimizer = flat(optim.AdamW(by_decay(model), lr=0.01))
        mirror = Mirror(optimizer)
        train(model, optimizer, mirror, steps=range(3), loss=lambda model, step: each.loss(model, each.batch(step)))
    mirror.check()


@pytest.mark.parametrize("up, down", [("wait", ""), ("", "wait"), ("", "synchronize")])
@world(2)
def test_a_wait_left_out_would_be_noticed(up: str, down: str) -> None:
    here = build(OffloadPolicy())
    train(*here)
    with host(up, down), pytest.raises(AssertionError):
        there = build(STATES)
        train(*there)
        assert_alike(there, here)


@world(2)
def test_memory_that_is_given_back_too_early_would_be_noticed() -> None:
    def leave(self: stream.StateBatch) -> None:
        self._on_device = None

    here = build(OffloadPolicy())
    train(*here)
    with host(), mock.patch.object(stream.StateBatch, "release", leave), pytest.raises(AssertionError):
        there = build(STATES)
        train(*there)
        assert_alike(there, here)


@world(2)
def test_no_more_than_three_ranges_are_on_the_device() -> None:
    """Those of the one that is stepped, of the next and of the one before; none after the step."""
    buffers: list[Any] = []
    held: list[int] = []
    both = 2  # moments of a range

    def buffer(resting: torch.Tensor, device: torch.device) -> torch.Tensor:
        made = nan_buffer(resting, device)
        buffers.append(weakref.ref(made))
        return made

    def on_device() -> int:
        return sum(each() is not None for each in buffers)

    with host(), mock.patch.object(stream, "_device_memory", buffer):
        model, optimizer = build(STATES)
        train(model, optimizer, steps=range(1))
        assert not buffers  # the first step makes the state
        step = type(optimizer).plain_step

        def watching(*args: Any, **options: Any) -> Any:
            held.append(on_device())
            return step(*args, **options)

        with mock.patch.object(type(optimizer), "plain_step", staticmethod(watching)):
            train(model, optimizer, steps=range(1, 2))
    spans = streamed(optimizer)
    assert spans > 3 and len(buffers) == both * spans and on_device() == 0
    assert held == [both, both * 2, *[both * 3] * (spans - 2), both * 2]


@world(1, 2)
def test_policies_of_several_kinds_in_one_model() -> None:
    """Only the unit that was given this one is streamed."""

    def shard(*policies: OffloadPolicy) -> tuple[nn.Module, Any]:
        model = Net()
        for part, policy in zip((model.first, model.second, model), policies, strict=True):
            fully_shard(part, offload_policy=policy)
        return model, flat(optim.AdamW(by_decay(model), lr=0.01))

    here = shard(*[OffloadPolicy()] * 3)
    train(*here)
    with host():
        there = shard(CPUOffloadPolicy(pin_memory=False), STATES, OffloadPolicy())
        train(*there)
    assert_equal(there, here)
    assert streamed(there[1]) == 2  # the weight and the bias of one layer


@world(2)
def test_a_plain_optimizer_is_refused() -> None:
    """On a CPU, too, where nothing is copied: the error comes before there is a device."""
    model = sharded(offload_policy=STATES)
    optimizer = optim.AdamW(model.parameters())
    plain_loss(model, 0).backward()
    words = r"AdamW steps 'first.weight', .* of a unit whose OptimizerOffloadPolicy .*unshard\.optim\.flat\(optimizer\)"
    for _ in range(2):
        with pytest.raises(StateError, match=words):
            optimizer.step()
    assert not optimizer.state
    flat(optimizer).step()
    assert len(optimizer.state) == len(list(model.parameters()))
    others = optim.SGD(sharded().parameters())
    others.step()
    others.add_param_group({"params": list(model.parameters())})
    with pytest.raises(StateError, match="SGD steps"):
        others.step()


@world(1)
def test_too_little_page_locked_memory() -> None:
    """State lies in ordinary memory then, and whoever reads the warning learns what for."""
    with host():
        here, there = build(OffloadPolicy()), build(STATES)
        (spot,) = shard_ranges_of([there[0].first.weight]).values()
        assert spot.states is not None and not spot.states.pin
        object.__setattr__(spot.states, "pin", True)
        refusing = partial(refusing_zeros, torch.zeros)
        train(*here, steps=range(2))
        with mock.patch.object(torch, "zeros", refusing), pytest.warns(UserWarning, match="memory for optimizer state"):
            train(*there, steps=range(2))
    assert_alike(there, here)


def refusing_zeros(zeros: Any, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    if pin_memory:
        raise RuntimeError("CUDA error: out of memory")
    return zeros(*args, **options)


@world(2)
def test_where_the_host_computes() -> None:
    """There is nothing to bring."""
    here, there = build(OffloadPolicy()), build(STATES)
    for each in (here, there):
        train(*each)
    assert_alike(there, here)
    assert not streamed(there[1])


@world(2)
def test_from_one_policy_to_another() -> None:
    """Each loads what the other saved and goes on as the first one does by itself."""
    first = build(OffloadPolicy())
    train(*first, steps=range(3), loss=loss_of_some_layers)
    with host():
        second = build(STATES)
        second[0].load_state_dict(first[0].state_dict())
        second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
        train(*second, steps=range(3, 5), loss=loss_of_some_layers)
        third = build(OffloadPolicy())
        third[0].load_state_dict(second[0].state_dict())
        third[1].load_state_dict(copy.deepcopy(second[1].state_dict()))
        plain = sharded()
        plain.odd.bias.requires_grad_(False)
        plain.load_state_dict(second[0].state_dict())
        fourth = plain, optim.AdamW(by_decay(plain), lr=0.01)
        fourth[1].load_state_dict(copy.deepcopy(second[1].state_dict()))
        for each in (second, third, fourth):
            train(*each, steps=range(5, 7), loss=loss_of_some_layers)
    train(*first, steps=range(3, 7), loss=loss_of_some_layers)
    for each in (second, third, fourth):
        assert_alike(each, first)


@quiet
@pytest.mark.parametrize("back", [False, True])
@world(2)
def test_distributed_checkpoints(back: bool, tmp_path: Path) -> None:
    """Also into an optimizer that has taken no step: torch takes one to learn what its state is."""
    with host():
        first, second = build(OffloadPolicy() if back else STATES), build(STATES if back else OffloadPolicy())
        train(*first, steps=range(3))
        dcp.save({"optimizer": get_optimizer_state_dict(*first)}, checkpoint_id=tmp_path)
        second[0].load_state_dict(first[0].state_dict())
        state = {"optimizer": get_optimizer_state_dict(*second)}
        dcp.load(state, checkpoint_id=tmp_path)
        set_optimizer_state_dict(*second, state["optimizer"])
        assert_alike(second, first)
        for each in (first, second):
            train(*each, steps=range(3, 5))
        assert_alike(second, first)


@world(2)
def test_saved_to_a_file_and_copied() -> None:
    with host():
        model, optimizer = build(STATES)
        train(model, optimizer, steps=range(2))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        again = build(STATES)
        again[0].load_state_dict(model.state_dict())
        again[1].load_state_dict(torch.load(file, weights_only=False))
        copied = copy.deepcopy((model, optimizer))
        for each in (again, copied, (model, optimizer)):
            train(*each, steps=range(2, 4))
        for each in (again, copied):
            assert_alike(each, (model, optimizer))
            assert streamed(each[1]) == streamed(optimizer) > 0


@world(1)
def test_a_pickled_optimizer() -> None:
    """No unit manages its parameters: it keeps state where they are."""
    with host():
        model, optimizer = build(STATES)
        train(model, optimizer, steps=range(2))
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        plain_loss(model, 2).backward()
        groups = zip(read.param_groups, optimizer.param_groups, strict=True)
        pairs = [pair for a, b in groups for pair in zip(a["params"], b["params"], strict=True)]
        for mine, theirs in pairs:
            mine.grad = None if theirs.grad is None else theirs.grad.clone()
        read.step()
        optimizer.step()
    assert all(torch.equal(local(mine), local(theirs)) for mine, theirs in pairs)
    assert not streamed(read)


@world(2)
def test_what_is_loaded_is_not_moved_to_the_device() -> None:
    """All of it at once would not fit. Users' hooks see tensors all the same, before and after."""
    moved: list[Any] = []
    seen: list[Any] = []
    cast = optim.Optimizer._process_value_according_to_param_policy

    def watching(parameter: Any, value: Any, *others: Any) -> Any:
        moved.append(value)
        return cast(parameter, value, *others)

    with host():
        first, second = build(STATES), build(STATES)
        train(*first, steps=range(2))
        saved = first[1].state_dict()
        saved["state"] = {
            key: {name: value.double() if isinstance(value, DTensor) else value for name, value in entry.items()}
            for key, entry in saved["state"].items()
        }
        handles = [
            second[1].register_load_state_dict_pre_hook(lambda _, given: seen.extend(given["state"].values())),
            second[1].register_load_state_dict_post_hook(lambda optimizer: seen.extend(optimizer.state.values())),
        ]
        with mock.patch.object(optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(watching)):
            second[1].load_state_dict(saved)
        assert moved and not any(isinstance(each, DTensor) for each in moved)  # counters only
        assert len(seen) == 2 * len(saved["state"]) and all(isinstance(each["exp_avg"], DTensor) for each in seen)
        assert {each["exp_avg"].dtype for each in second[1].state.values()} == {torch.float32}
        for handle in handles:
            handle.remove()
        second[0].load_state_dict(first[0].state_dict())
        for each in (first, second):
            train(*each, steps=range(2, 4))
        assert_alike(second, first)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            second[1].load_state_dict({**saved, "param_groups": saved["param_groups"][:1]})
        assert_alike(second, first)
        assert not second[1]._optimizer_load_state_dict_pre_hooks
        assert len(second[1]._optimizer_load_state_dict_post_hooks) == 1  # of the engine's checks


@world(2)
def test_state_that_was_changed_by_hand() -> None:
    """Written in place, replaced by one that is placed otherwise, and removed."""
    with host():
        model, optimizer = build(STATES)
        mirror = Mirror(optimizer)
        train(model, optimizer, mirror, steps=range(2))
        weight, other = model.odd.weight, model.extra.weight
        entry, copied = optimizer.state[other], mirror.optimizer.state[mirror.copies[other]]
        entry["exp_avg"] = (entry["exp_avg"] * 2).redistribute(placements=[Replicate()])
        copied["exp_avg"] *= 2
        for state, key in ((optimizer.state, weight), (mirror.optimizer.state, mirror.copies[weight])):
            state[key]["exp_avg"].zero_()
        train(model, optimizer, mirror, steps=range(2, 4))
        mirror.check()
        for state, key in ((optimizer.state, weight), (mirror.optimizer.state, mirror.copies[weight])):
            del state[key]
        train(model, optimizer, mirror, steps=range(4, 6))
        mirror.check()


@world(2)
def test_the_same_memory_in_every_step() -> None:
    """What a user, or a state dict, holds of the state is what later steps write; as without the policy."""
    with host():
        model, optimizer = build(STATES)
        train(model, optimizer, steps=range(1))
        kept = {each: optimizer.state[each]["exp_avg"] for each in optimizer.state}
        before = [local(each).clone() for each in kept.values()]
        train(model, optimizer, steps=range(1, 2))
    assert all(optimizer.state[each]["exp_avg"] is value for each, value in kept.items())
    assert not all(torch.equal(a, local(b)) for a, b in zip(before, kept.values(), strict=True))


@world(2)
def test_scaling_clipping_and_gradients_zeroed_in_place() -> None:
    """One step is skipped."""
    results = []
    for policy in (OffloadPolicy(), STATES):
        with host():
            model, optimizer = build(policy)
            scaler = GradScaler("cpu", init_scale=4.0)
            for step in range(5):
                scaler.scale(plain_loss(model, step)).backward()
                if step == 2:
                    local(model.odd.weight.grad).fill_(torch.inf)
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=False)
            results.append((model, optimizer))
    assert_alike(results[1], results[0])
    assert results[1][1].state[model.odd.weight]["step"] == 4


@world(2)
def test_hooks_closures_and_counters_of_a_step() -> None:
    """Once in a step, although the optimizer's code runs once for every load."""
    with host():
        model, optimizer = build(STATES)
        called: list[str] = []
        optimizer.register_step_pre_hook(lambda *unused: called.append("before"))
        optimizer.register_step_post_hook(lambda *unused: called.append("after"))

        def closure() -> float:
            called.append("closure")
            plain_loss(model, 0).backward()
            return 0.5

        assert optimizer.step(closure) == 0.5
        assert called == ["before", "closure", "after"]
        counting, plain = sharded(offload_policy=STATES), sharded()
        one, other = flat(GroupCounting(counting.parameters()), elementwise=True), GroupCounting(plain.parameters())
        train(counting, one)
        train(plain, other)
    assert streamed(one) > 1
    assert one.state["steps"] == other.state["steps"] == 5
    assert one.param_groups[0]["steps"] == other.param_groups[0]["steps"] == 5
    assert one.param_groups[0]["sum"].item() == other.param_groups[0]["sum"].item() == 5
    assert all(map(torch.equal, map(local, counting.parameters()), map(local, plain.parameters())))


@world(2)
def test_shards_that_bring_their_own_gather_protocol() -> None:
    """They lie outside the unit's memory; their state stays with them, that of the others travels."""
    models = []
    for policy in (OffloadPolicy(), STATES):
        with host():
            model = Net()
            model.first.weight = nn.Parameter(SplitTensor(model.first.weight.detach().clone()))
            fully_shard(model, offload_policy=policy)
            optimizer = flat(optim.AdamW(by_decay(model), lr=0.01))
            train(model, optimizer)
        models.append(model)
    assert streamed(optimizer)
    assert torch.equal(local(models[0].first.weight).inner, local(models[1].first.weight).inner)
    for mine, theirs in zip(*(list(each.parameters())[1:] for each in models), strict=True):
        assert torch.equal(local(mine), local(theirs))


class GroupCounting(Counting):
    """Counts in its groups, too, and in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            group.update(steps=0, sum=torch.zeros(()))

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            group["sum"] += 1
        super().step(closure)


class Replacing(optim.Optimizer):
    """Makes its state anew in every step, in another dtype from the third on, and drops what it needs no more."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    count = state["count"] = state.get("count", 0) + 1
                    average = state.get("average", torch.zeros_like(each)) * 0.5 + each.grad
                    state["average"] = average.double() if count > 2 else average
                    state["first"] = each.grad.clone()
                    if count > 3:
                        del state["first"]
                    each.sub_(state["average"], alpha=group["lr"])


@world(2)
def test_an_optimizer_that_makes_its_state_anew() -> None:
    with host():
        results = []
        for policy in (OffloadPolicy(), STATES):
            model = sharded(offload_policy=policy)
            optimizer = flat(Replacing(model.parameters()), elementwise=True)
            for steps in (range(3), range(3, 5)):
                train(model, optimizer, steps=steps)
                results.append((model, copy.deepcopy(dict(optimizer.state)), optimizer))
    for before, after in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, map(local, before[0].parameters()), map(local, after[0].parameters())))
        for one, other in zip(before[1].values(), after[1].values(), strict=True):
            assert one.keys() == other.keys() and one["average"].dtype == other["average"].dtype == torch.float64
            assert torch.equal(local(one["average"]), local(other["average"]))
    assert "first" in results[2][1].popitem()[1] and "first" not in results[3][1].popitem()[1]


@world(2)
def test_a_step_that_raises() -> None:
    """In the middle: the state is on the host, earlier ranges are stepped, and the next step goes on from there."""
    with host() as copy_streams:
        (model, optimizer), here = build(STATES), build(OffloadPolicy())
        train(model, optimizer, steps=range(2))
        train(*here, steps=range(2))
        plain_loss(model, 2).backward()
        step, calls = type(optimizer).plain_step, iter([None, None, None, KeyError("boom")])

        def failing(*args: Any, **options: Any) -> Any:
            error = next(calls)
            if error is not None:
                raise error
            return step(*args, **options)

        groups, state = optimizer.param_groups, optimizer.state
        with mock.patch.object(type(optimizer), "plain_step", staticmethod(failing)), pytest.raises(KeyError):
            optimizer.step()
        assert optimizer.param_groups is groups and optimizer.state is state
        for stream in (copy_streams.up, copy_streams.down):
            assert not stream.steps and not stream.seen_by_host  # type: ignore[attr-defined]
        counts = sorted({float(entry["step"]) for entry in state.values()})
        assert counts == [2.0, 3.0]
        optimizer.zero_grad()
        again = build(STATES)
        again[0].load_state_dict(model.state_dict())
        again[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each in ((model, optimizer), again):
            train(*each, steps=range(3, 5))
        assert_alike(again, (model, optimizer))
