"""What a gradient scaler does in one process: ours does it as torch's own, but for the cases that are named."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
from bed import loopback
from torch import nn
from torch.amp.grad_scaler import OptState

from unshard.optim import GradScaler

INF = float("inf")
KINDS = {"torch": torch.amp.GradScaler, "unshard": GradScaler}
both = pytest.mark.parametrize("kind", list(KINDS))


def make(kind: str, **options: object) -> torch.amp.GradScaler:
    return KINDS[kind]("cpu", **options)


def weights(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def sgd(*parameters: nn.Parameter, **options: object) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=1.0, **options)


def scaled_backward(scaler: torch.amp.GradScaler, parameter: nn.Parameter, *gradient: float) -> None:
    parameter.grad = None
    scaler.scale((parameter * torch.tensor(gradient)).sum()).backward()


@both
def test_arguments(kind: str) -> None:
    """Contract GS-01, GS-02."""
    scaler = make(kind)
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (65536.0, 2.0, 0.5)
    assert scaler.get_growth_interval() == 2000 and scaler.is_enabled()
    positional = KINDS[kind]("cpu", 8.0, 3.0, 0.25, 7, True)
    assert positional.state_dict() == {
        "scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
    }
    for wrong in ({"growth_factor": 1.0}, {"backoff_factor": 1.0}):
        with pytest.raises(AssertionError, match="factor must be"):
            make(kind, **wrong)
    assert scaler._scale is None
    scaler.scale(torch.ones(3))
    for number, dtype in ((scaler._scale, torch.float32), (scaler._growth_tracker, torch.int32)):
        assert (number.shape, number.dtype) == ((), dtype)


@both
def test_stages(kind: str) -> None:
    """Contract GS-03, GS-08: each call once between updates, and in order."""
    scaler, weight = make(kind), weights(1.0)
    optimizer = sgd(weight)
    with pytest.raises(AssertionError):
        scaler.update()
    scaled_backward(scaler, weight, 1.0)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    scaler.unscale_(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="Closure"):
        scaler.step(optimizer, closure=lambda: None)
    scaler.update()
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


@both
def test_unscaling(kind: str) -> None:
    """Contract GS-04: by the reciprocal in float32, in place, and what is not finite is found."""
    scaler, weight = make(kind, init_scale=3.0), weights(1.0, 1.0)
    optimizer = sgd(weight)
    for bad in (None, INF, -INF, float("nan")):
        scaled_backward(scaler, weight, 0.7, 0.3)
        before = weight.grad
        expected = before * torch.tensor(1 / 3.0, dtype=torch.float64).float()
        if bad is not None:
            before[0] = bad
        scaler.unscale_(optimizer)
        assert weight.grad is before and torch.equal(before[1], expected[1])
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert {device: value.item() for device, value in found.items()} == {
            torch.device("cpu"): float(bad is not None)
        }
        scaler.update(3.0)


@both
def test_steps_are_taken_or_skipped(kind: str) -> None:
    """Contract GS-05: the result of the optimizer's step, or None and nothing changed."""
    scaler, weight = make(kind, init_scale=4.0), weights(1.0)
    optimizer = sgd(weight, momentum=0.9)
    optimizer.step = mock.Mock(wraps=optimizer.step, return_value=17)
    scaled_backward(scaler, weight, 2.0)
    assert scaler.step(optimizer) == 17
    scaler.update()
    scaled_backward(scaler, weight, INF)
    assert scaler.step(optimizer) is None
    assert optimizer.step.call_count == 1


@both
def test_the_scale_over_time(kind: str) -> None:
    """Contract GS-06, GS-07: grows after steps without overflow, shrinks after one with, never becomes infinite."""
    scaler, weight = make(kind, init_scale=4.0, growth_interval=2), weights(1.0)
    optimizer, seen = sgd(weight), []
    for step in range(5):
        scaled_backward(scaler, weight, float("nan") if step == 2 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    assert seen == [4.0, 8.0, 4.0, 4.0, 8.0]
    largest = make(kind, init_scale=2.0**127, growth_interval=1)
    scaled_backward(largest, weight, 2.0**-127)
    largest.step(optimizer)
    largest.update()
    assert largest.get_scale() == 2.0**127


def test_without_gradients() -> None:
    """Contract GS-08, GS-42: torch's scaler asserts where a rank has no gradients, or never scaled anything."""
    optimizer = sgd(weights(1.0))
    torchs = make("torch")
    with pytest.raises(AssertionError, match="_scale is None"):
        torchs.unscale_(optimizer)
    torchs.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks"):
        torchs.step(optimizer)
    for scales in (False, True):
        scaler = make("unshard", init_scale=4.0, growth_interval=1)
        if scales:
            scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 8.0


def test_gradients_in_half_precision() -> None:
    """Contract GS-09: torch's scaler refuses float16, ours takes it; bfloat16 and float32 are taken by both."""
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            scaler, weight = make(kind, init_scale=8.0), weights(1.0, dtype=dtype)
            optimizer = sgd(weight)
            weight.grad = torch.full((1,), 4.0, dtype=dtype)
            scaler.scale(torch.ones(()))
            if kind == "torch" and dtype == torch.float16:
                with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$"):
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
                assert weight.item() == 0.5


@both
def test_what_is_scaled(kind: str) -> None:
    """Contract GS-10: numbers of half precision become float32, tensors keep their dtype; containers keep theirs."""
    scaler = make(kind, init_scale=2.0)
    for dtype in (torch.float16, torch.bfloat16):
        assert scaler.scale(torch.ones((), dtype=dtype)).dtype == torch.float32
        assert scaler.scale(torch.ones(2, dtype=dtype)).dtype == dtype
    assert scaler.scale([torch.ones(()), (torch.ones(()),)]) == [2.0, (2.0,)]
    with pytest.raises(ValueError, match="Tensor"):
        scaler.scale(1.0)


@both
def test_disabled(kind: str) -> None:
    """Contract GS-11."""
    scaler, weight = make(kind, enabled=False), weights(1.0)
    optimizer, loss = sgd(weight), weight.sum()
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0 and scaler.state_dict() == {}
    loss.backward()
    weight.grad.fill_(INF)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == -INF


@both
def test_saved_and_loaded(kind: str) -> None:
    """Contract GS-12: also by pickle, and before the first scaling."""
    scaler, weight = make(kind, init_scale=4.0, growth_interval=3), weights(1.0)
    optimizer = sgd(weight)
    for _ in range(2):
        scaled_backward(scaler, weight, 1.0)
        scaler.step(optimizer)
        scaler.update()
    state = scaler.state_dict()
    assert state == {
        "scale": 4.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 2,
    }
    other = make(kind)
    other.load_state_dict(state)
    for each in (other, pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert each.state_dict() == state
        scaled_backward(each, weight, 1.0)
        each.step(optimizer)
        each.update()
        assert each.get_scale() == 8.0


@both
def test_sparse_gradients(kind: str) -> None:
    """Contract GS-04: entries of one row are unscaled once, and checked."""
    for bad in (False, True):
        table = nn.Embedding(5, 2, sparse=True)
        start = table.weight.detach().clone()
        scaler, optimizer = make(kind, init_scale=4.0), sgd(table.weight)
        scaler.scale((table(torch.tensor([1, 1, 3])) * (INF if bad else 1.0)).sum()).backward()
        scaler.step(optimizer)
        moved = torch.zeros(5, 2) if bad else torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0])[:, None].expand(5, 2)
        torch.testing.assert_close(table.weight.detach(), start - moved)


def test_entries_that_overflow_together() -> None:
    """Contract GS-04: rows of a sparse gradient add up, in float16 beyond what it holds."""
    table = nn.Embedding(3, 1, sparse=True).half()
    table(torch.tensor([1, 1])).backward(torch.full((2, 1), 4e4).half())
    scaler, optimizer = make("unshard", init_scale=4.0), sgd(table.weight)
    assert scaler.step(optimizer) is None
    scaler.update()
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_optimizer_whose_first_step_is_skipped(make_optimizer: type) -> None:
    """Contract GS-30, GS-29: no state is left behind; torch's scaler leaves momentum that was never written."""
    weight = weights(1.0)
    options = {"momentum": 0.9} if make_optimizer is torch.optim.SGD else {}
    optimizer = make_optimizer([weight], lr=0.5, fused=True, **options)
    scaler = make("unshard", init_scale=4.0)
    for _ in range(2):
        scaled_backward(scaler, weight, INF)
        scaler.step(optimizer)
        scaler.update()
        assert not optimizer.state and weight.item() == 1.0
    reference = weights(1.0)
    plain = make_optimizer([reference], lr=0.5, **options)
    for _ in range(3):
        scaled_backward(scaler, weight, 2.0)
        scaler.step(optimizer)
        scaler.update()
        reference.grad = torch.tensor([2.0])
        plain.step()
    torch.testing.assert_close(weight, reference)
    assert not hasattr(optimizer, "found_inf")


def test_a_group_that_does_not_say_which_devices_it_serves() -> None:
    """One written in Python: the number is sent from where the parameters are."""
    weight = weights(1.0)
    with loopback.job(world=2) as group:
        scaler = GradScaler("cpu", init_scale=2.0, process_group=group)
        optimizer = sgd(weight)
        scaled_backward(scaler, weight, INF)
        scaler.step(optimizer)
        assert weight.tolist() == [1.0]
        assert any("allreduce" in call.op for call in group.log)


def test_unscaling_as_torch_calls_it() -> None:
    """`_unscale_grads_` of PyTorch's sharded scaler has a default, and programs call it with three arguments."""
    scaler, table = GradScaler("cpu"), nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    found = scaler._unscale_grads_(optimizer, torch.tensor([0.5]), torch.zeros(1))
    assert {device: flag.item() for device, flag in found.items()} == {torch.device("cpu"): 0.0}
    assert table.weight.grad.to_dense().tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    table.weight.grad.values().fill_(INF)
    found = scaler._unscale_grads_(optimizer, torch.tensor([0.5]), torch.zeros(1), True)
    assert [flag.item() for flag in found.values()] == [1.0]
