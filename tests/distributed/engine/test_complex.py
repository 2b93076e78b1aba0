"""Complex parameters: sent as pairs of reals, trained as the unsharded model is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bed import world
from bed.stack import mesh as replica_mesh
from bed.wrapped import full_parameters, wrap
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard

from unshard import FullyShardedDataParallel as FSDP
from unshard import MixedPrecisionPolicy, fully_shard
from unshard.optim import clip_grad_norm_, flat
from unshard.tools import precision_audit

STEPS = 3
Build = Callable[[nn.Module], nn.Module]


class Filter(nn.Module):
    """`wide` is not packed with the others; `rows` is uneven in every world but one."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, real: bool = True):
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(rows, columns, dtype=dtype) * 0.3)
        self.shift = nn.Parameter(torch.randn(rows, dtype=dtype) * 0.3)
        self.wide = nn.Parameter(torch.randn(rows, 1200, dtype=dtype) * 0.1)
        self.unused = nn.Parameter(torch.randn(3, dtype=dtype))
        self.gain = nn.Parameter(torch.rand(rows, dtype=torch.float32 if real else dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.spectrum @ x.to(self.spectrum.dtype) + self.shift[:, None]
        y = (y * self.wide.mean(1).conj()[:, None] * self.gain[:, None]).conj()
        return (y.real + y.imag.square()).float()


class Net(nn.Module):
    def __init__(self, real: bool = True):
        super().__init__()
        self.first = Filter(7, 5, torch.complex64, real)
        self.second = Filter(5, 7, torch.complex128, real)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def net(real: bool = True) -> Net:
    torch.manual_seed(3)
    return Net(real)


def adamw(parameters: Iterable[nn.Parameter], lr: float) -> optim.AdamW:
    return optim.AdamW(parameters, lr, eps=1e-2)  # small, it would amplify the rounding of small gradients


def sharded(model: Net, **options: Any) -> nn.Module:
    fully_shard(model.first, **options)
    fully_shard(model.second, **options)
    return fully_shard(model, **options)


def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(5, 3, generator=generator)).square().mean()


def backward_of_all(model: nn.Module, step: int) -> None:
    ranks = dist.get_world_size()
    for rank in range(ranks):
        (loss(model, step, rank) / ranks).backward()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(
        torch.view_as_real(found) if found.is_complex() else found,
        torch.view_as_real(expected) if found.is_complex() else expected,
        rtol=2e-5,
        atol=2e-6,
    )


def trained(model: nn.Module, optimizer: optim.Optimizer, steps: int = STEPS) -> nn.Module:
    for step in range(steps):
        loss(model, step, dist.get_rank()).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


def reference(make: Callable[..., optim.Optimizer], steps: int = STEPS) -> Net:
    model = net()
    optimizer = make(model.parameters(), lr=0.01)
    for step in range(steps):
        backward_of_all(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["reshard", "keep"])
@world(1, 2, 3, 4)
def test_training(options: dict[str, Any]) -> None:
    """Real and complex parameters in one unit; clipping, and two optimizers, one of them flat."""
    expected, of_sgd = reference(adamw), reference(optim.SGD)
    model, other, third = (sharded(net(), **options) for _ in range(3))
    trained(model, adamw(model.parameters(), lr=0.01))
    trained(other, flat(adamw(other.parameters(), lr=0.01)))
    trained(third, optim.SGD(third.parameters(), lr=0.01))
    for found, as_expected in ((model, expected), (other, expected), (third, of_sgd)):
        for one, two in zip(found.parameters(), as_expected.parameters(), strict=True):
            assert_close(full(one), two)


@world(4)
def test_ways_to_shard_and_to_accumulate() -> None:
    """Replicas, slices, another dimension, and backwards that are not synchronised."""
    expected = net()
    for step in range(2):
        backward_of_all(expected, step)
    for options in (
        {"mesh": replica_mesh(2)},
        {"reshard_after_forward": 2},
        {"shard_placement_fn": lambda each: Shard(1) if each.shape[-1] == 1200 else None},
        {"mesh": replica_mesh(4)},
    ):
        model = sharded(net(), **options)
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            loss(model, step, dist.get_rank()).backward()
        for one, two in zip(model.parameters(), expected.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None)
            if one.grad is not None:
                assert_close(full(one.grad), two.grad)


@world(2)
def test_a_policy_casts_real_parameters_only() -> None:
    seen: dict[str, torch.dtype] = {}
    model = net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded(model, mp_policy=policy)
    model.first.register_forward_pre_hook(lambda each, _: seen.update({n: p.dtype for n, p in each.named_parameters()}))
    with precision_audit(model) as audit:
        loss(model, 0, dist.get_rank()).backward()
    assert audit is not None
    assert seen["gain"] == torch.bfloat16 and seen["spectrum"] == seen["shift"] == torch.complex64
    rounded = net()
    for each in (rounded.first, rounded.second):
        each.gain.data = each.gain.data.bfloat16().float()
        each.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
    backward_of_all(rounded, 0)
    assert model.first.spectrum.grad.dtype == torch.complex64
    assert model.first.spectrum.grad.full_tensor().imag.abs().sum() > 0
    torch.testing.assert_close(model.second.shift.grad.full_tensor(), rounded.second.shift.grad, rtol=0.02, atol=0.001)


@world(2, 3)
def test_state_dicts(tmp_path: Path) -> None:
    """Sharded ones through a checkpoint, full ones both ways."""
    source, target, last = sharded(net()), net(), sharded(net())
    trained(source, optim.SGD(source.parameters(), lr=0.01), steps=1)
    whole = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
    target.load_state_dict(whole) if whole else None
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder, 0)
    state = {"model": source.state_dict()}
    dcp.save(state, checkpoint_id=folder[0])
    for each in last.parameters():
        each.data.zero_()
    state = {"model": last.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    last.load_state_dict(state["model"])
    other = sharded(net())
    set_model_state_dict(other, whole, options=StateDictOptions(full_state_dict=True))
    for one, two, three, four in zip(*(each.parameters() for each in (source, last, other, target)), strict=True):
        assert_close(full(two), full(one))
        assert_close(full(three), full(one))
        assert_close(four, full(one))


@pytest.mark.parametrize("originals", [True, False], ids=["originals", "flat"])
@world(1, 2, 3, 4)
def test_the_wrapper(originals: bool) -> None:
    """Units of one complex dtype; what it clips, trains, saves and loads."""
    expected = net(real=False)
    plain = adamw(expected.parameters(), lr=0.01)
    model = net(real=False)
    model = wrap(model, [model.first, model.second, model], use_orig_params=originals)
    optimizer = adamw(model.parameters(), lr=0.01)
    for step in range(STEPS):
        backward_of_all(expected, step)
        norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
        loss(model, step, dist.get_rank()).backward()
        torch.testing.assert_close(model.clip_grad_norm_(0.5).double(), norm.double(), rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    found = {name.replace("_fsdp_wrapped_module.", ""): each for name, each in full_parameters(model).items()}
    for name, each in expected.named_parameters():
        if not name.endswith("unused"):
            assert_close(found[name], each)
    state = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        moments = state["state"]["first.spectrum"]["exp_avg"]
        assert_close(moments, plain.state[expected.first.spectrum]["exp_avg"])
    whole = copy.deepcopy(model.state_dict())
    for name, each in expected.named_parameters():
        if not name.endswith("unused"):
            assert_close(whole[name], each.detach())
