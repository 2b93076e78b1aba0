"""Gradients packed by the Triton kernel, beside the same ones packed by torch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from unshard.engine import observer
from unshard.engine.packing import Packing
from unshard.layout.collective_tensors import (
    FLAT_LAYOUT,
    ROW_LAYOUT,
    Grouping,
    LayoutParam,
    PackingRule,
    Region,
    lay_out,
)
from unshard.layout.shardings import FlatSharding, RowSharding
from unshard.torch_private import contiguous_stride

SHAPES = [(7, 3), (2,), (160, 16, 2), (1, 5), (131, 64), (260,), (0, 4), (97, 151), (64,)] + [(48, 16)] * 14
LAYOUTS = ["packed", "mixed", "rows", "flat"]


class Packed:
    """Random gradients of `SHAPES` for `world` ranks, and a `Packing` for them into a buffer of NaNs."""

    def __init__(self, layout: str, world: int, source: torch.dtype, target: torch.dtype, device: str):
        generator = torch.Generator(device).manual_seed(world)
        self.gradients = [torch.randn(shape, device=device, generator=generator).to(source) for shape in SHAPES]
        self.regions, self.shard = self._regions(layout, world, source)
        ranges = lay_out(self.regions, [target.itemsize], world, 16).ranges
        self.buffer = torch.full((ranges[-1].end // target.itemsize,), torch.nan, dtype=target, device=device)
        starts = [(each.offset // target.itemsize, each.piece * each.copies // target.itemsize) for each in ranges]
        self.tensors = [self.buffer[start : start + numel] for start, numel in starts]
        self.world = world

    @staticmethod
    def _regions(layout: str, world: int, dtype: torch.dtype) -> tuple[tuple[Region, ...], Any]:
        kinds = [SimpleNamespace(original=dtype, compute=dtype, reduce=dtype)]
        if layout == "flat":
            begins, end = [], 16  # with a gap before each
            for shape in SHAPES:
                begins.append(end)
                end = -(-(end + torch.Size(shape).numel()) // 16) * 16
            shard = -(-end // world)
            shardings: list[Any] = [
                FlatSharding(shape, contiguous_stride(shape), begin, shard, world)
                for shape, begin in zip(SHAPES, begins, strict=True)
            ]
        else:
            shardings = [RowSharding(shape, world) for shape in SHAPES]
        items = [LayoutParam(each, 0, dtype.itemsize) for each in shardings]
        rule = PackingRule({"packed": 1 << 40, "mixed": 4000}.get(layout, 0))
        regions = (FLAT_LAYOUT if layout == "flat" else ROW_LAYOUT).collective_regions(
            items, range(len(items)), Grouping.GROUPED, rule
        )
        return regions, SimpleNamespace(shardings=shardings, segments=SimpleNamespace(kinds=kinds))

    def fill_with_nan(self) -> None:
        """Only the regions: nobody reads what is between them."""
        self.buffer.zero_()
        for tensor in self.tensors:
            tensor.fill_(torch.nan)

    def by_torch(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Return the buffer as torch's operations fill it."""
        self.fill_with_nan()
        Packing(self.tensors, self.regions, self.shard, self.world).fill(gradients)
        return self.buffer.clone()

    def by_kernel(self, pack_kernel: Any) -> Any:
        """Return a packing by the kernel of the module `pack_kernel`."""
        assert pack_kernel.supports(self.tensors, self.regions, self.shard)
        return pack_kernel.KernelPacking(self.tensors, self.regions, self.shard, self.world)


def largest_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.float().abs().amax() if each.numel() else torch.zeros(()).to(each) for each in gradients])


DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
]


def reading(on: bool = True) -> Any:
    return mock.patch.object(observer, "reads_gradients", on)


def filled_by_kernel(packing: Any, gradients: Any) -> bool:
    """Fill and return True, or return False if torch would have to."""
    with mock.patch.object(Packing, "fill", side_effect=NotImplementedError):
        try:
            packing.fill(gradients)
        except NotImplementedError:
            return False
        return True


def compare(pack_kernel: Any, layout: str, world: int, device: str) -> None:
    """Assert that the kernel in the module `pack_kernel` fills the buffer as torch does, bit by bit."""
    for source, target in DTYPES:
        if device == "cpu" and target == torch.bfloat16 != source:
            continue  # Triton's interpreter truncates where devices round
        packed = Packed(layout, world, source, target, device)
        packed.gradients[3][0, 2], packed.gradients[5][100] = math.nan, -math.inf
        expected = packed.by_torch(packed.gradients)
        by_kernel = packed.by_kernel(pack_kernel)
        times = 1 if device == "cpu" else 2  # the second time, the kernel is compiled
        for finds_largest in (False, True) * times:
            packed.fill_with_nan()
            with reading(finds_largest):
                assert filled_by_kernel(by_kernel, packed.gradients)
            torch.testing.assert_close(packed.buffer, expected, rtol=0, atol=0, equal_nan=True)
        largest = largest_of(packed.gradients).float()
        torch.testing.assert_close(by_kernel.largest, largest, rtol=0, atol=0, equal_nan=True)


def compare_largest(pack_kernel: Any, device: str) -> None:
    """Assert that the kernel finds the largest values of any number of tensors, at any address, NaN among them."""
    for count in (1, 16, 257):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            sizes = [3 + 977 * number % 9000 for number in range(count)]
            tensors = [
                torch.randn(size + 1, device=device).to(dtype)[number % 2 :] for number, size in enumerate(sizes)
            ]
            tensors[-1][-1], tensors[count // 2][0] = math.nan, -math.inf
            expected = torch.stack([each.float().abs().max() for each in tensors])
            for _ in range(2):
                found = pack_kernel.largest_values(tensors)
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    moved = torch.full((9000,), -3.0, device=device)  # at another address than tensors of the same size
    assert pack_kernel.largest_values([moved]).tolist() == [3]
    assert pack_kernel.largest_values([moved[4000:]]).tolist() == [3]
    assert pack_kernel.largest_values([torch.ones(4, 5, device=device).t()]) is None
    assert pack_kernel.largest_values([torch.ones(4, device=device, dtype=torch.float64)]) is None
    assert pack_kernel.largest_values([moved, moved.half()]) is None


def main() -> None:
    """Run the kernel by Triton's interpreter, on the CPU. Start this with TRITON_INTERPRET=1."""
    from unshard.engine import pack_kernel

    pack_kernel.current_device_index = lambda: None
    for layout, world in zip(LAYOUTS, (3, 8, 2, 3), strict=True):
        compare(pack_kernel, layout, world, "cpu")
    compare_largest(pack_kernel, "cpu")
    print("equal")


if __name__ == "__main__":
    main()
