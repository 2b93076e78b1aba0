"""All-gathers and reduce-scatters as a user would bring them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from unshard import AllGather, ReduceScatter


class Counting:
    """Allocates from a pool of its own and notes what it was asked for."""

    def __init__(self) -> None:
        self.allocated: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append((tuple(size), dtype))
        poison = float("nan") if dtype.is_floating_point else 99
        return torch.full(tuple(size), poison, dtype=dtype, device=device)


class ToyGather(Counting, AllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        size = output_tensor.numel() // dist.get_world_size(group)
        start = output_tensor.data_ptr() + dist.get_rank(group) * size * output_tensor.element_size()
        assert input_tensor.data_ptr() == start and input_tensor.numel() == size
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class ToyReduceScatter(Counting, ReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
        return None  # done at once


class ToyMany(ToyGather):
    def gather_many(self, outputs, inputs, group):
        self.calls += 1
        for output, piece in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, piece.clone(), group=group)


ignore_old_names = pytest.mark.filterwarnings("ignore:.*(all_gather_into_tensor|reduce_scatter_tensor).*:FutureWarning")
