"""Shards on the host, computed with on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import pool, world
from bed.models import Case, case, shard
from bed.parity import each_unit
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from unshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from unshard.engine.side_stream import SideStream, StreamEvent
from unshard.optim import clip_grad_norm_, flat

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
# A power of two: the product with it is exact, so that it does not matter who computes it, and how.
RATE = 2.0**-5


@sdpa_kernel(SDPBackend.MATH)  # the others add up in any order
def trained(
    each: Case,
    policy: OffloadPolicy,
    precision: MixedPrecisionPolicy,
    change: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer,
    steps: int = 4,
) -> list[torch.Tensor]:
    """Losses, gradients of the last step, and parameters."""
    model = each.build().cuda()
    each_unit(each, fully_shard, offload_policy=policy, mp_policy=precision)(model)
    optimizer = change(torch.optim.SGD(model.parameters(), RATE))
    losses = []
    for step in range(steps):
        inputs, targets = shard(each.batch(step), dist.get_rank(), dist.get_world_size())
        loss = each.loss(model, (inputs.cuda(), targets.cuda()))
        loss.backward()
        # Copied before anything else waits for the device: they have to be there by now.
        gradients = [parameter.grad.to_local().clone().cpu() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return [*losses, *gradients, *(parameter.to_local().detach().cpu() for parameter in model.parameters())]


def differing(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@world(1, 2, 3, backend="nccl")
def test_bitwise_as_on_the_device(precision: MixedPrecisionPolicy) -> None:
    # The loss of the other one does not take bf16.
    for each in (case("transformer"), *([case("uneven")] if precision.param_dtype is None else [])):
        here = trained(each, OffloadPolicy(), precision)
        for pin in (True, False):
            assert not differing(trained(each, CPUOffloadPolicy(pin_memory=pin), precision), here)
        there = trained(each, CPUOffloadPolicy(), precision, lambda optimizer: flat(optimizer, step_in_backward=True))
        assert not differing(there, here)


@contextmanager
def slow_side_streams(cycles: int = 3_000_000) -> Iterator[None]:
    """Everything in a side stream happens late."""
    queue = SideStream.queue

    def late(self: SideStream, do: Callable[[], Any], first: Callable[[], Any] | None = None) -> StreamEvent:
        def begin() -> None:
            torch.cuda._sleep(cycles)
            if first is not None:
                first()

        return queue(self, do, begin)

    with mock.patch.object(SideStream, "queue", late):
        yield


def late(without: str) -> int:
    """How many results differ if copies are late and nothing waits for them."""
    each = case("transformer")
    here = trained(each, OffloadPolicy(), BF16)
    kinds: dict[str, Any] = {"events": (StreamEvent, "wait"), "streams": (SideStream, "synchronize")}
    with slow_side_streams(), mock.patch.object(*kinds[without], lambda self: None) if without else nullcontext():
        return differing(trained(each, CPUOffloadPolicy(), BF16), here)


@pytest.mark.nccl_ranks
@pytest.mark.parametrize("size", [1, 2])
def test_copies_that_are_late(size: int) -> None:
    """The computation waits for them, and would not come out right if it did not."""
    assert pool.shared().run(late, size, {"without": ""}, "nccl") == [0] * size
    for without in ("events", "streams"):
        try:
            assert all(pool.shared().run(late, size, {"without": without}, "nccl"))
        except pool.JobFailed as failure:  # memory that is still copied is given back
            assert "illegal memory access" in str(failure) or "SIGABRT" in str(failure)


def step_again(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def load_zeros(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: torch.zeros_like(each) for name, each in state_of(model).items()})


def write_zeros(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.to_local().zero_()  # type: ignore[attr-defined]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return vars(model)["state"]  # taken at rest: taking one waits for what is under way


WRITES: dict[str, tuple[Callable[..., None], str]] = {
    "a step after a forward with a graph": (step_again, "graph"),
    "a load after a forward with a graph": (load_zeros, "graph"),
    "a write after a forward of what is frozen": (write_zeros, "frozen"),
    "a write after a forward without a graph": (write_zeros, "no graph"),
    "a write after a forward of layers alone": (write_zeros, "layers"),
}


@pytest.mark.parametrize("name", WRITES)
@world(1, backend="nccl")
def test_writes_while_shards_are_on_their_way(name: str) -> None:
    """The device is far behind the host, which has issued a forward and writes parameters."""
    write, kind = WRITES[name]
    assert torch.equal(*outputs_around(write, kind))
    with mock.patch.object(SideStream, "synchronize", lambda self: None):
        assert not torch.equal(*outputs_around(write, kind))


def outputs_around(write: Callable[..., None], kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a forward, and of the same forward of a busy device if parameters are written right after it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
    for layer in (*model, model):
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.SGD(model.parameters(), 100.0)
    inputs = torch.randn(8, 64, device="cuda")
    model(inputs).square().mean().backward()
    vars(model)["state"] = model.state_dict()
    if kind == "frozen":
        model.requires_grad_(False)

    def forward() -> torch.Tensor:
        with torch.set_grad_enabled(kind in ("graph", "frozen")):
            if kind != "layers":
                return model(inputs)
            output = inputs
            for layer in model:
                output = layer(output)
            return output

    expected = forward().detach().clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    output = forward()
    with torch.no_grad():
        write(model, optimizer)
    return expected, output.detach()


@world(1, backend="nccl")
def test_clip() -> None:
    """Where torch's own clip fails: gradients on the host, and a process group that knows devices only."""
    each = case("transformer")
    norms = []
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        model = each.build().cuda()
        each_unit(each, fully_shard, offload_policy=policy)(model)
        inputs, targets = each.batch(0)
        each.loss(model, (inputs.cuda(), targets.cuda())).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.1).cpu())
        after = [parameter.grad.to_local().cpu().norm() for parameter in model.parameters()]
        assert torch.stack(after).norm().item() == pytest.approx(0.1, rel=1e-3)
    torch.testing.assert_close(*norms)


def fits(policy: OffloadPolicy, model: nn.Module) -> None:
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.ones(4, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@world(1, backend="nccl")
def test_a_state_that_does_not_fit() -> None:
    """1 GiB of parameters, 3 GiB more of gradients and AdamW's state, in 1.5 GiB of the device."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 1.5 * 2**30) / total)
    try:
        build = lambda: nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16)))  # noqa: E731
        fits(CPUOffloadPolicy(), build())
        with pytest.raises(torch.cuda.OutOfMemoryError):
            fits(OffloadPolicy(), build().cuda())
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
