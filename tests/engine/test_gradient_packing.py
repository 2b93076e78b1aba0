"""Gradients packed piece by piece, as recorded steps do it, lie where the one kernel of other steps puts them."""

from __future__ import annotations

import pytest
import torch

from unshard.engine.api import recording_step
from unshard.engine.packing import Pack

SHAPES = [(7, 3), (2,), (8, 2, 2), (1, 5), (131, 2), (260,)]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_and_padding(world: int, dtype: torch.dtype) -> None:
    columns = [torch.randn(shape).to(dtype) for shape in SHAPES]
    width = sum(-(-each.shape[0] // world) * each[:1].numel() for each in columns)
    tables = [torch.full((world, width), torch.nan) for _ in range(2)]
    packs = [Pack(table, tuple(range(len(columns))), {dtype: []}, []) for table in tables]
    packs[0].fill(columns)
    with recording_step():
        packs[1].fill(columns)
    assert not tables[1].isnan().any()
    assert torch.equal(*tables)
