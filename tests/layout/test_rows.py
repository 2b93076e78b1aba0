"""The arithmetic of layouts, against `torch.chunk` and against the picture in the module."""

from __future__ import annotations

import pytest
import torch

from unshard.layout.collective_tensors import (
    ALIGNMENT,
    ROW_LAYOUT,
    BufferLayout,
    Grouping,
    LayoutParam,
    PackingRule,
    RegionRange,
    lay_out,
)
from unshard.layout.shardings import RowSharding

collective_regions = ROW_LAYOUT.collective_regions


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 7, 8, 12, 13])
def test_cut_is_what_chunk_does(length: int, world: int) -> None:
    """Contract LAY-01."""
    whole = torch.arange(length * 3).view(length, 3)
    chunks = whole.chunk(world) if length else ()
    sharding = RowSharding((length, 3), world)
    for rank in range(world):
        first, count = sharding.rows(rank)
        expected = chunks[rank] if rank < len(chunks) else whole[:0]
        assert torch.equal(whole[first : first + count], expected)
        assert sharding.local_shape(rank) == tuple(expected.shape)
    assert sharding.piece * world >= sharding.numel
    assert sharding.piece * world - sharding.numel < max(world * 3, 1) * max(sharding.chunk, 1)


def test_contract_example() -> None:
    """Contract LAY-04: Linear(3, 5) on two ranks: pieces of 9 and 3 elements, 12 in all."""
    weight, bias = RowSharding((5, 3), 2), RowSharding((5,), 2)
    assert (weight.local_shape(0), weight.local_shape(1), weight.piece) == ((3, 3), (2, 3), 9)
    assert weight.piece + bias.piece == 12


def items(*shapes: tuple[int, ...], world: int = 2, segments: tuple[int, ...] = (), sizes: tuple[int, ...] = (4,)):
    segments = segments or (0,) * len(shapes)
    return [LayoutParam(RowSharding(shape, world), s, sizes[s]) for shape, s in zip(shapes, segments, strict=True)]


def test_the_picture() -> None:
    """World 2, weight (3, 2) and bias (3,): pieces of 4 and 2 elements, packed end to end."""
    (region,) = collective_regions(items((3, 2), (3,)), (0, 1), Grouping.GROUPED)
    assert region.packed and region.members == (0, 1)
    assert region.runs[0].starts == (0, 4) and region.runs[0].numel == 6
    whole, shard = lay_out([region], [4], copies=2), lay_out([region], [4], copies=1)
    assert (whole.ranges[0].piece, whole.nbytes, shard.nbytes) == (24, 48, 24)


def test_large_parameters_have_regions_of_their_own() -> None:
    large, small = (256, 128), (9, 9)
    regions = collective_regions(items(small, large, small, large), range(4), Grouping.GROUPED)
    assert [(region.members, region.packed) for region in regions] == [((1,), False), ((3,), False), ((0, 2), True)]
    for grouping in (Grouping.BY_SEGMENT, Grouping.ONE_REGION):
        (region,) = collective_regions(items(small, large, small, large), range(4), grouping)
        assert region.packed
        assert region.members == (1, 3, 0, 2)  # in the same order, so that flat code finds neighbours in every buffer


def test_small_vectors_lie_behind_small_matrices() -> None:
    (region,) = collective_regions(items((9, 9), (9,), (3, 3), (5,)), range(4), Grouping.GROUPED)
    assert region.members == (0, 2, 1, 3)


def test_few_small_parameters_are_not_packed() -> None:
    large, small = (256, 128), (9, 9)
    mixed = items(small, large, small)

    def packed(grouping: Grouping, least: int) -> list[bool]:
        regions = collective_regions(mixed, range(3), grouping, PackingRule(least=least))
        return [region.packed for region in regions]

    assert packed(Grouping.GROUPED, least=3) == [False] * 3
    assert packed(Grouping.GROUPED, least=2) == [False, True]
    assert packed(Grouping.ONE_REGION, least=3) == [True]


def test_the_rule_says_what_is_small() -> None:
    parts = items((256, 128), (256, 129), (1, 5))
    for below, alone in ((0, 3), (21, 2), (256 * 128 * 4, 2), (256 * 128 * 4 + 1, 1), (10**9, 0)):
        regions = collective_regions(parts, range(3), Grouping.GROUPED, PackingRule(below))
        assert sum(not region.packed for region in regions) == alone, below


def test_packed_dtypes_lie_end_to_end_without_padding() -> None:
    """Contract MP-32: wide elements first, so that no run needs padding."""
    shapes = ((3,), (3,), (3,), (5,))
    parts = items(*shapes, segments=(0, 1, 2, 1), sizes=(2, 8, 1))
    (region,) = collective_regions(parts, range(4), Grouping.ONE_REGION)
    assert [run.segment for run in region.runs] == [1, 0, 2]
    spot = lay_out([region], [2, 8, 1], copies=2).ranges[0]
    assert spot.runs == (0, 40, 44)
    assert spot.piece == 48  # 46 bytes and padding to the widest element
    by_segment = collective_regions(parts, range(4), Grouping.BY_SEGMENT)
    assert [region.members for region in by_segment] == [(1, 3), (0,), (2,)]


def test_only_packed_pieces_are_padded() -> None:
    alone = collective_regions(items((255, 129)), (0,), Grouping.GROUPED)
    packed = collective_regions(items((3, 3)), (0,), Grouping.GROUPED)
    assert lay_out(alone, [4], 2, piece_alignment=16).ranges[0].piece == 128 * 129 * 4
    assert lay_out(packed, [4], 2, piece_alignment=16).ranges[0].piece == 32  # 24 bytes of elements


def test_regions_are_aligned_and_apart() -> None:
    regions = collective_regions(items((255, 129), (301, 77), (7,)), range(3), Grouping.GROUPED)
    buffer_layout = lay_out(regions, [4], 2)
    assert len(buffer_layout.ranges) == 3
    end = 0
    for spot in buffer_layout.ranges:
        assert spot.offset % ALIGNMENT == 0 and spot.offset >= end
        end = spot.end
    assert buffer_layout.nbytes == end


def test_parameters_without_elements_have_no_region() -> None:
    assert collective_regions(items((0, 3), (4, 0)), (0, 1), Grouping.GROUPED) == ()
    assert lay_out((), [4], 2).nbytes == 0


def test_a_placement_checks_itself() -> None:
    with pytest.raises(AssertionError, match="overlaps"):
        BufferLayout((RegionRange(0, 300, 1, (0,)), RegionRange(256, 10, 1, (0,))), 400)
    with pytest.raises(AssertionError, match="overlaps"):
        BufferLayout((RegionRange(8, 300, 1, (0,)),), 400)
    with pytest.raises(AssertionError, match="cannot hold"):
        BufferLayout((RegionRange(0, 300, 1, (0,)),), 299)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_another_dimension(world: int) -> None:
    """Contract LAY-06: equal pieces along the dimension, and never a region of their own."""
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    sharding = RowSharding((4, 6, 5), world, dim=1)
    for rank, chunk in enumerate(whole.chunk(world, 1)):
        assert sharding.local_shape(rank) == tuple(chunk.shape) and sharding.piece == chunk.numel()
        assert torch.equal(whole.narrow(1, *sharding.rows(rank)), chunk)
    with pytest.raises(AssertionError, match="not divisible"):
        RowSharding((4, 6, 5), 4, dim=1)
    large = LayoutParam(RowSharding((256, 600), world, dim=1), 0, 4)
    (region,) = collective_regions([large], (0,), Grouping.GROUPED)
    assert region.packed
