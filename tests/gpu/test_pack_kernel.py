"""Gradients packed by the Triton kernel have the bits that torch's operations give them. The kernel may be missing."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from bed import world
from bed.packed import LAYOUTS, Packed, compare, compare_largest, filled_by_kernel, largest_of, reading
from bed.stack import Stack, batch, sharded
from torch import Tensor

from unshard import MixedPrecisionPolicy
from unshard.engine import packing
from unshard.engine.side_stream import recording_step

pack_kernel = pytest.importorskip("unshard.engine.pack_kernel")  # Triton comes with torch for CUDA only
BF16 = torch.bfloat16


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_torch(layout: str, ranks: int) -> None:
    compare(pack_kernel, layout, ranks, "cuda")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_at_any_address(layout: str) -> None:
    packed = Packed(layout, 4, BF16, torch.float32, "cuda")
    moved = []
    for number, each in enumerate(packed.gradients):
        memory = torch.empty(each.numel() + 8, dtype=BF16, device="cuda")[number % 9 :]
        moved.append(memory[: each.numel()].view(each.shape).copy_(each))
    expected = packed.by_torch(packed.gradients)
    kernel = packed.by_kernel(pack_kernel)
    packed.fill_with_nan()
    with reading():
        assert filled_by_kernel(kernel, moved)
    assert torch.equal(packed.buffer, expected)
    assert torch.equal(kernel.largest, largest_of(packed.gradients).float())


def test_what_the_kernel_leaves_to_torch() -> None:
    packed = Packed("mixed", 2, BF16, torch.float32, "cuda")
    kernel = packed.by_kernel(pack_kernel)
    transposed, wide, missing = (list(packed.gradients) for _ in range(3))
    transposed[4] = transposed[4].t().contiguous().t()
    wide[0] = wide[0].double()
    for gradients in (transposed, wide, {i: each for i, each in enumerate(missing) if i != 4}):
        with reading():
            assert not filled_by_kernel(kernel, gradients) and kernel.largest is None
    expected = packed.by_torch(packed.gradients)
    packed.fill_with_nan()
    kernel.fill(transposed)
    assert torch.equal(packed.buffer, expected)


def test_a_recording_compiles_nothing() -> None:
    packed = Packed("mixed", 2, torch.float16, torch.float32, "cuda")
    kernel = packed.by_kernel(pack_kernel)
    with recording_step():
        assert not filled_by_kernel(kernel, packed.gradients)
    assert filled_by_kernel(kernel, packed.gradients)
    with recording_step():
        assert filled_by_kernel(kernel, packed.gradients)


def trained(steps: int = 4) -> list[Tensor]:
    model = sharded(Stack().cuda(), mp_policy=MixedPrecisionPolicy(BF16, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        model(batch(step).cuda()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.to_local().clone() for each in model.parameters()]


@world(1, 2, 4, backend="nccl")
def test_training_without_triton() -> None:
    """The same bits. A machine where Triton cannot compile is one without Triton."""
    fills: list[Any] = []
    fill = pack_kernel.KernelPacking.fill

    def counted(self: Any, *arguments: Any) -> Any:
        fills.append(self)
        return fill(self, *arguments)

    with mock.patch.object(pack_kernel.KernelPacking, "fill", counted):
        expected = trained()
    assert fills
    packing.pack_kernel_on.cache_clear()
    try:
        with mock.patch.object(pack_kernel, "try_out", side_effect=RuntimeError("no compiler")):
            assert packing.pack_kernel_on(torch.device("cuda", 0)) is None
            fills.clear()
            with mock.patch.object(pack_kernel.KernelPacking, "fill", counted):
                without = trained()
    finally:
        packing.pack_kernel_on.cache_clear()
    assert not fills and all(map(torch.equal, expected, without))


def test_the_largest_value_may_be_nan() -> None:
    packed = Packed("packed", 2, BF16, BF16, "cuda")
    packed.gradients[4][130, 63] = math.nan
    kernel = packed.by_kernel(pack_kernel)
    with reading():
        kernel.fill(packed.gradients)
    assert kernel.largest.isnan().nonzero().tolist() == [[4]]


def test_largest_values_of_any_tensors() -> None:
    compare_largest(pack_kernel, "cuda")
