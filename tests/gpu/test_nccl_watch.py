"""`unshard.tools.watch` on a device: nothing waits, reductions keep their side stream, findings name the place."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.stack import Stack, batch, sharded
from torch import Tensor, nn

from unshard import MixedPrecisionPolicy, capture
from unshard.engine.reduction import Reduction
from unshard.optim import GradScaler
from unshard.tools import nonfinite_checks, watch

F16 = torch.float16


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(batch(step).cuda()).float().square().mean()


def plant(model: Stack, number: int) -> dict[str, Any]:
    """The gradient of the output of `blocks.1.first` is multiplied by `factor`, and so are those of its parameters."""
    planted = {"factor": 1.0}

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad and planted["factor"] != 1.0:
            output.register_hook(lambda gradient: gradient * planted["factor"])

    model.blocks[number].first.register_forward_hook(hook)
    return planted


@world(1, 2, 4, backend="nccl")
def test_a_local_gradient_and_the_scaler() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = Stack().cuda()
    planted = plant(model, 1)
    sharded(model, mp_policy=MixedPrecisionPolicy(F16, F16))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), GradScaler("cuda", init_scale=64.0)
    with watch(model, optimizer, scaler=scaler) as watched:
        for step in range(1, 6):
            planted["factor"] = math.inf if step == 3 and rank == last else 1.0
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    first = watched.findings[0]
    assert (first.step, first.what, first.unit, first.ranks) == (3, "local gradient", "blocks.1", (last,))
    assert first.parameter in ("blocks.1.first.weight", "blocks.1.first.bias") and first.dtype == "fp16"
    assert 0 < first.largest_finite < 65504
    assert [(row["step"], row["skipped"], row["why"]) for row in watched.scaler] == [(3, True, first.text)]
    assert len(watched.findings) == 1


@world(1, 2, 4, backend="nccl")
def test_overflow_in_the_reduction_only() -> None:
    model = Stack().cuda()
    planted = plant(model, 2)
    sharded(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=F16))
    with watch(model) as watched:
        for step in range(1, 4):
            planted["factor"] = 1e12 if step == 2 else 1.0
            loss_of(model, step).backward()
            model.zero_grad()
    found = watched.findings[0]
    # The units before get large gradients, too; the last unit is reduced first.
    assert (found.step, found.what, found.unit, found.dtype) == (2, "reduced gradient", "blocks.2", "fp16")
    assert found.largest_finite > 65504 and "only in the fp16 reduction" in found.text


@world(1, 2, backend="nccl")
def test_forward() -> None:
    model, nan = Stack().cuda(), {"on": False}
    model.blocks[1].second.register_forward_hook(lambda m, args, out: out * math.nan if nan["on"] else None)
    sharded(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    last = dist.get_world_size() - 1
    for exact in (False, True):
        with watch(model, exact=exact) as watched:
            for step in range(1, 4):
                nan["on"] = step == 2 and dist.get_rank() == last
                loss_of(model, step).backward()
                model.zero_grad()
        (found,) = watched.findings
        assert (found.step, found.what, found.unit, found.ranks) == (2, "forward output", "blocks.1", (last,))
        assert found.module == ("blocks.1.second" if exact else None) and (found.elements is not None) == exact


def refuse_waits(on: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error" if on else "default")


@pytest.mark.parametrize("large", [nonfinite_checks._LARGE, 1], ids=["together", "alone"])
@world(2, backend="nccl")
def test_the_host_does_not_wait_and_nothing_changes(large: int) -> None:
    """The same numbers, the same collectives, reductions on the side stream, and no call that waits."""
    started, start = [], Reduction._start_on_side_stream

    def counted(self: Reduction, *arguments: Any) -> None:
        started.append(self)
        start(self, *arguments)

    Reduction._start_on_side_stream, default = counted, nonfinite_checks._LARGE  # type: ignore[method-assign]
    nonfinite_checks._LARGE = large
    runs: list[Any] = []
    try:
        for on in (False, True):
            model = sharded(Stack().cuda(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            watched = watch(model, optimizer) if on else None
            for step in range(6):
                inputs = batch(step).cuda()
                if step == 3:
                    started.clear()
                    torch.cuda.synchronize()
                    refuse_waits(True)
                with Collectives() as seen:
                    model(inputs).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                refuse_waits(False)
            runs.append((len(started), seen.calls, [each.to_local().clone() for each in model.parameters()]))
            if watched is not None:
                watched.stop()
                assert watched.findings == [] and watched.steps == 6
    finally:
        Reduction._start_on_side_stream = start  # type: ignore[method-assign]
        nonfinite_checks._LARGE = default
    assert runs[0][0] == runs[1][0] > 0
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][2], runs[1][2], strict=True))


@world(1, 2, 4, backend="nccl")
def test_norms() -> None:
    model, reference = sharded(Stack().cuda()), Stack().cuda()
    loss_of(model, 0).backward()
    loss_of(reference, 0).backward()
    with watch(model) as watched, Collectives() as seen:
        found = watched.norms()
    assert len(seen.calls) == (dist.get_world_size() > 1)
    for name, parameter in reference.named_parameters():
        for kind, tensor in (("gradient", parameter.grad), ("value", parameter.detach())):
            wide = tensor.double()
            wanted = wide.norm().item(), wide.abs().max().item(), wide.mean().item()
            mine = tuple(found[name][kind][key] for key in ("norm", "max", "mean"))
            assert mine == pytest.approx(wanted, rel=1e-3, abs=1e-6), (name, kind)


@world(1, backend="nccl")
def test_a_captured_step_is_not_watched_silently() -> None:
    """Starting a watch ends replays: the step runs eagerly, where its values are checked."""
    model = sharded(Stack().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)

    def train(inputs: Tensor) -> Tensor:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = capture(train, model, optimizer)
    for number in range(6):
        step(batch(number).cuda())
    with warnings.catch_warnings(), watch(model, optimizer) as watched:
        warnings.simplefilter("ignore")  # the step runs without a recording
        for number in range(3):
            step(batch(number).cuda() * (math.nan if number == 2 else 1.0))
    assert [(each.step, each.what) for each in watched.findings] == [(3, "forward output")]
