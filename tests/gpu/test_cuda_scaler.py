"""Gradient scaling and clipping on a CUDA device, also of gradients that lie on the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.cuda import rows_of_rank
from bed.recorders import Collectives
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from unshard.optim import GradScaler, clip_grad_norm_
from unshard.optim.clip import reduce_group_of

INF = float("inf")
KINDS = {"torch": torch.amp.GradScaler, "unshard": GradScaler}


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def layers() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))).cuda()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model), torch.randn(4, 4).cuda()


def pairs() -> tuple[nn.Module, torch.Tensor]:
    mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair(2) for _ in range(3))).cuda()
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    for pair in model:
        # Every rank cuts what it built itself: Gloo does not scatter CUDA tensors.
        parallelize_module(pair, mesh["tp"], plan, src_data_rank=None)
        fully_shard(pair, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), torch.randn(2).cuda()


@pytest.mark.parametrize("has_inf", [True, False])
@pytest.mark.parametrize("layout", ["layers", "pairs"])
@pytest.mark.parametrize("kind", list(KINDS))
@world(2, 4, backend="nccl")
def test_a_step_with_and_without_overflow(kind: str, layout: str, has_inf: bool) -> None:
    """Contract GS-31, GS-32."""
    model, x = {"layers": layers, "pairs": pairs}[layout]()
    scaler, optimizer = KINDS[kind]("cuda", init_scale=2.0), torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler.scale(model(x).sum()).backward()
    first = optimizer.param_groups[0]["params"][0]
    assert isinstance(first.grad, DTensor) and first.grad._local_tensor.is_cuda
    if has_inf and dist.get_rank() == 1:
        first.grad._local_tensor[0, 0].fill_(INF)
    scaled = first.grad.to_local().clone()
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert {value.item() for value in state["found_inf_per_device"].values()} == {float(has_inf)}
    assert state["stage"] is OptState.UNSCALED
    torch.testing.assert_close(first.grad.to_local(), scaled * 0.5, rtol=0, atol=0)
    before = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    scaler.step(optimizer)
    unchanged = [
        torch.equal(a, b.to_local().detach()) for a, b in zip(before, model.parameters(), strict=True) if a.numel()
    ]
    assert all(unchanged) == has_inf and bool(optimizer.state) != has_inf
    scaler.update()
    assert scaler.get_scale() == (1.0 if has_inf else 2.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.odd, self.last = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.odd(torch.tanh(self.first(x)))))


def batch() -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).cuda()


WHERE = pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])


def policy(offload: bool) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()


@WHERE
@pytest.mark.parametrize("order", [1.0, 2.0, INF])
@world(2, 3, 4, backend="nccl")
def test_clip(order: float, offload: bool) -> None:
    """Contract GS-43: one reduction, on the device, wherever the gradients lie."""
    model, reference = fully_shard(Net().cuda(), offload_policy=policy(offload)), Net().cuda()
    for each in (model, reference):
        each(batch()).square().mean().backward()
    assert all(each.grad.to_local().is_cuda != offload for each in model.parameters())
    with Collectives() as calls:
        norm = clip_grad_norm_(model.parameters(), 0.01, order)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, order)
    assert expected > 0.01 and type(norm) is torch.Tensor and norm.is_cuda
    torch.testing.assert_close(norm, expected, rtol=1e-3, atol=0)
    assert [(call.kind, call.outputs[0][1]) for call in calls.calls] == [("all_reduce", 1)]
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local().cuda(), rows_of_rank(theirs.grad), rtol=1e-3, atol=1e-6)


@WHERE
@pytest.mark.parametrize("fused", [False, True], ids=["usual", "fused"])
@world(2, 3, 4, backend="nccl")
def test_scaler(fused: bool, offload: bool) -> None:
    """Contract GS-29, GS-34, GS-43: the overflow of one rank is found on the device and skipped everywhere."""
    model, reference = fully_shard(Net().cuda(), offload_policy=policy(offload)), Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    scaler = GradScaler(init_scale=1024.0)
    assert reduce_group_of(list(model.parameters()), None, torch.device("cpu"), "clip").device.type == "cuda"
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(model(batch()).square().mean()).backward()
        spoilt = step in (0, 3)
        if spoilt and dist.get_rank() == 1:
            model.first.weight.grad.to_local()[0, 0] = INF
        before = [each.to_local().detach().clone() for each in model.parameters()]
        with Collectives() as calls:
            scaler.step(optimizer)
            scaler.update()
        assert [(call.kind, call.outputs[0][1]) for call in calls.calls] == [("all_reduce", 1)]
        after = [each.to_local().detach() for each in model.parameters()]
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.numel()]
        assert all(same) == spoilt and (step > 0 or not optimizer.state)
        if not spoilt:
            plain.zero_grad()
            reference(batch()).square().mean().backward()
            plain.step()
    assert scaler.get_scale() == 256.0
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().to_local().cuda(), rows_of_rank(theirs.detach()), rtol=1e-2, atol=1e-4)


@WHERE
@world(1, backend="nccl")
def test_on_nccl(offload: bool) -> None:
    """Contract GS-43: NCCL reduces nothing on the host, so the number travels through the device."""
    model = fully_shard(Net().cuda(), offload_policy=policy(offload))
    scaler, optimizer = GradScaler(init_scale=4.0), torch.optim.SGD(model.parameters(), lr=0.1)
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale(model(batch()).sum()).backward()
        if bad:
            model.odd.bias.grad.to_local()[0] = INF
        scaler.unscale_(optimizer)
        assert clip_grad_norm_(model.parameters(), 1.0).isfinite() != bad
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if bad else 4.0)


@world(2, 3, 4, backend="nccl")
def test_training_in_float16() -> None:
    """Contract GS-06, GS-40: the scale finds its way down from where everything overflows."""
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = fully_shard(Net().cuda(), mp_policy=half)
    scaler, optimizer = GradScaler(init_scale=2.0**24), torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (model(batch()).float() - 1.0).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[0] == losses[1] and losses[-1] < losses[0] / 4
    assert 1.0 <= scaler.get_scale() < 2.0**24


@pytest.mark.parametrize("fused", [False, True], ids=["usual", "fused"])
@world(1, 2, 3, backend="nccl")
def test_some_gradients_in_bfloat16(fused: bool) -> None:
    """Torch's kernel for scaled gradients does not take them. Powers of two change no digits of the others."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net().cuda()
        model.first.bfloat16()
        model = fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)

    (model, optimizer), (reference, plain) = build(), build()
    scaler = GradScaler(init_scale=1024.0)
    for step in range(5):
        scaler.scale(model(batch()).float().square().mean()).backward()
        assert {each.grad.dtype for each in model.parameters()} == {torch.bfloat16, torch.float32}
        spoilt = step in (0, 3)
        if spoilt and dist.get_rank() == 0:
            model.first.weight.grad.to_local()[0, 0] = INF
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not spoilt:
            reference(batch()).float().square().mean().backward()
            plain.step()
            plain.zero_grad()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local())
    assert scaler.get_scale() == 256.0
