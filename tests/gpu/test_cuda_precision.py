"""Mixed precision on a CUDA device: dtypes, nested policies, and what policies can say beyond PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.cuda import full_on_host, real_collectives
from bed.models import CASES
from bed.parity import each_unit
from bed.recorders import Collectives
from torch import nn

from unshard import MixedPrecisionPolicy, fully_shard

F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16


class Net(nn.Module):
    """One weight is above the packing threshold; norm and router want full precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 600)
        self.router = nn.Sequential(nn.Linear(600, 16), nn.Tanh(), nn.Linear(16, 600))
        self.down = nn.Linear(600, 64)
        self.register_buffer("scale", torch.full((64,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.norm(x * self.scale))
        return self.down(x * self.router(x))


def full_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [full_on_host([parameter.grad])[0].cuda() for parameter in model.parameters()]


def batch(rank: int = 0) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(rank)).cuda()


@pytest.mark.parametrize("param", [F32, F16, B16])
@pytest.mark.parametrize("reduce", [None, F32, B16])
@world(2, backend="nccl")
def test_gradients_of_every_precision(param: torch.dtype, reduce: torch.dtype | None) -> None:
    """The table MPT-05 to MPT-16 on the device; both ranks see the same batch, so the mean is the gradient itself."""
    model = Net().cuda()
    reference = copy.deepcopy(model).to(param)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param, reduce, buffer_dtype=param))
    with Collectives() as calls:
        out = model(batch())
        out.float().square().mean().backward()
    expected = reference(batch().to(param))
    expected.float().square().mean().backward()
    assert out.dtype == param and torch.equal(out, expected)
    assert [call.dtypes for call in calls.calls] == [{param}, {reduce or param}]
    assert all(parameter.dtype == parameter.grad.dtype == F32 for parameter in model.parameters())
    for mine, theirs in zip(full_gradients(model), reference.parameters(), strict=True):
        # fp16 sums are divided before and after, where the smallest numbers lose a bit.
        atol = 1e-7 if (reduce or param) == F16 else 0
        torch.testing.assert_close(mine, theirs.grad.to(reduce or param).float(), rtol=0, atol=atol)


POLICY = MixedPrecisionPolicy(
    B16, F32, overrides={"norm.*": F32, "router.*": F32}, buffer_dtype=B16, full_precision_in_eval=True
)


def check_overrides(rtol: float) -> None:
    model, plain = Net().cuda(), Net().cuda()
    reference = copy.deepcopy(model)
    fully_shard(model, mp_policy=POLICY)
    for part in (reference.up, reference.down):
        part.to(B16)
    for part in (reference.norm, reference.router):
        part.register_forward_pre_hook(lambda module, args: (args[0].float(),))
        part.register_forward_hook(lambda module, args, output: output.to(B16))
    reference.scale = reference.scale.to(B16)
    with torch.no_grad():
        assert torch.equal(model.eval()(batch()), plain(batch()))
    out, expected = model.train()(batch()), reference(batch().to(B16))
    assert torch.equal(out, expected)
    with torch.no_grad():
        assert torch.equal(model.eval()(batch()), plain(batch()))
    model.train()
    out.float().square().mean().backward()
    expected.float().square().mean().backward()
    for mine, theirs in zip(full_gradients(model), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad.float(), rtol=rtol, atol=1e-8)
    assert model.scale.dtype == F32 and torch.equal(model.scale, plain.scale)


@world(2, 3, 4, backend="nccl")
def test_overrides_buffers_and_eval() -> None:
    check_overrides(1e-6)


@world(1, backend="nccl")
def test_overrides_in_one_group_of_nccl() -> None:
    with real_collectives():
        check_overrides(0)


@world(2, 4, backend="nccl")
def test_a_narrow_wire() -> None:
    gradients = []
    for wire in (None, B16):
        model = Net().cuda()
        policy = MixedPrecisionPolicy(B16, F32, wire_dtype=wire, buffer_dtype=B16)
        fully_shard(model.up, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model(batch(dist.get_rank())).float().square().mean().backward()
        gradients.append(full_gradients(model))
    for narrow, wide in zip(*gradients, strict=True):
        torch.testing.assert_close(narrow, wide, rtol=1e-6, atol=1e-9)


@world(1, backend="nccl")
def test_a_narrow_wire_of_nccl() -> None:
    model, reference = Net().cuda(), Net().cuda().to(B16)
    with real_collectives():
        fully_shard(model, mp_policy=MixedPrecisionPolicy(B16, F32, wire_dtype=B16, buffer_dtype=B16))
    for each in (model, reference):
        each(batch().to(B16)).float().square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.float())


@pytest.mark.parametrize("reshard", [True, False])
@world(2, backend="nccl")
def test_eval_between_forward_and_backward(reshard: bool) -> None:
    """On the device memory that is freed too early is reused at once."""
    case = CASES[0]
    policies = [MixedPrecisionPolicy(B16, F32, full_precision_in_eval=full) for full in (True, False)]
    models = [case.build().cuda() for _ in policies]
    inputs = case.batch(0)[0].cuda()
    for model, policy in zip(models, policies, strict=True):
        each_unit(case, fully_shard, mp_policy=policy, reshard_after_forward=reshard)(model)
        for _ in range(3):
            loss = model(inputs).float().square().mean()
            if policy.full_precision_in_eval:
                with torch.no_grad():
                    model.eval()(inputs)
                    model.train()
            loss.backward()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())


@pytest.mark.parametrize("param", [F16, B16])
@pytest.mark.parametrize("features", [1, 2])
@world(2, backend="nccl")
def test_batch_norm(param: torch.dtype, features: int) -> None:
    """Contract MP-38, MP-39: statistics stay fp32 beside weights of low precision, where cuDNN allows it."""
    kind, shape = ((nn.BatchNorm1d, (8, 6)), (nn.BatchNorm2d, (8, 6, 4, 4)))[features - 1]
    model = nn.Sequential(nn.Linear(6, 6) if features == 1 else nn.Conv2d(6, 6, 1), kind(6)).cuda()
    # Over images its backward wants them in the weights' dtype; forward can see them so.
    policy = MixedPrecisionPolicy(param, F32, buffer_dtype=param if features == 2 else None)
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    out = model(torch.randn(shape).cuda())
    out.float().square().sum().backward()
    assert out.dtype == param and model[1].running_mean.dtype == F32 and model[1].running_mean.any()
    assert all(parameter.grad.dtype == F32 for parameter in model.parameters())
    with torch.no_grad():
        assert model.eval()(torch.randn(shape).cuda()).dtype == param
