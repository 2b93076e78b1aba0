"""The arithmetic of layouts, against `torch.chunk` and against the picture in the module."""

from __future__ import annotations

import pytest
import torch

from unshard.layout import rows
from unshard.layout.rows import ALIGNMENT, Cut, Grouping, Item, Place, Placement, arrange, place


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 7, 8, 12, 13])
def test_cut_is_what_chunk_does(length: int, world: int) -> None:
    """Contract LAY-01."""
    whole = torch.arange(length * 3).view(length, 3)
    chunks = whole.chunk(world) if length else ()
    cut = Cut((length, 3), world)
    for rank in range(world):
        first, count = cut.rows(rank)
        expected = chunks[rank] if rank < len(chunks) else whole[:0]
        assert torch.equal(whole[first : first + count], expected)
        assert cut.local_shape(rank) == tuple(expected.shape)
    assert cut.piece * world >= cut.numel
    assert cut.piece * world - cut.numel < max(world * 3, 1) * max(cut.chunk, 1)


def test_contract_example() -> None:
    """Contract LAY-04: Linear(3, 5) on two ranks: pieces of 9 and 3 elements, 12 in all."""
    weight, bias = Cut((5, 3), 2), Cut((5,), 2)
    assert (weight.local_shape(0), weight.local_shape(1), weight.piece) == ((3, 3), (2, 3), 9)
    assert weight.piece + bias.piece == 12


def items(*shapes: tuple[int, ...], world: int = 2, segments: tuple[int, ...] = (), sizes: tuple[int, ...] = (4,)):
    segments = segments or (0,) * len(shapes)
    return [Item(Cut(shape, world), s, sizes[s]) for shape, s in zip(shapes, segments, strict=True)]


def test_the_picture() -> None:
    """World 2, weight (3, 2) and bias (3,): pieces of 4 and 2 elements, packed end to end."""
    (region,) = arrange(items((3, 2), (3,)), (0, 1), Grouping.GROUPED)
    assert region.packed and region.members == (0, 1)
    assert region.runs[0].starts == (0, 4) and region.runs[0].numel == 6
    whole, shard = place([region], [4], copies=2), place([region], [4], copies=1)
    assert (whole.places[0].piece, whole.nbytes, shard.nbytes) == (24, 48, 24)


def test_large_parameters_have_regions_of_their_own() -> None:
    large, small = (256, 128), (9, 9)
    regions = arrange(items(small, large, small, large), range(4), Grouping.GROUPED)
    assert [(region.members, region.packed) for region in regions] == [((1,), False), ((3,), False), ((0, 2), True)]
    for grouping in (Grouping.BY_SEGMENT, Grouping.WHOLE):
        (region,) = arrange(items(small, large, small, large), range(4), grouping)
        assert region.packed
        assert region.members == (1, 3, 0, 2)  # in the same order, so that flat code finds neighbours in every buffer


def test_small_vectors_lie_behind_small_matrices() -> None:
    (region,) = arrange(items((9, 9), (9,), (3, 3), (5,)), range(4), Grouping.GROUPED)
    assert region.members == (0, 2, 1, 3)


def test_few_small_parameters_are_not_packed() -> None:
    large, small = (256, 128), (9, 9)
    mixed = items(small, large, small)
    assert [region.packed for region in arrange(mixed, range(3), Grouping.GROUPED, few=2)] == [False] * 3
    assert [region.packed for region in arrange(mixed, range(3), Grouping.GROUPED, few=1)] == [False, True]
    assert [region.packed for region in arrange(mixed, range(3), Grouping.WHOLE, few=2)] == [True]
    many = items(small, *[large] * rows.GROUP_LIMIT)  # a place in the group for everybody, or nobody small gets one
    assert [r.packed for r in arrange(many, range(len(many)), Grouping.GROUPED, few=2)].count(True) == 1


def test_a_group_stays_small_unless_a_copy_would_cost_more() -> None:
    medium, huge = (256, 128), (2048, 1024)
    regions = arrange(items(*[medium] * 40, huge), range(41), Grouping.GROUPED)
    alone = [region for region in regions if not region.packed]
    assert len(regions) == rows.GROUP_LIMIT
    assert alone[-1].members == (40,)
    regions = arrange(items(*[huge] * 20), range(20), Grouping.GROUPED)
    assert [region.packed for region in regions] == [False] * 20


def test_packed_dtypes_lie_end_to_end_without_padding() -> None:
    """Contract MP-32: wide elements first, so that no run needs padding."""
    shapes = ((3,), (3,), (3,), (5,))
    parts = items(*shapes, segments=(0, 1, 2, 1), sizes=(2, 8, 1))
    (region,) = arrange(parts, range(4), Grouping.WHOLE)
    assert [run.segment for run in region.runs] == [1, 0, 2]
    spot = place([region], [2, 8, 1], copies=2).places[0]
    assert spot.runs == (0, 40, 44)
    assert spot.piece == 48  # 46 bytes and padding to the widest element
    by_segment = arrange(parts, range(4), Grouping.BY_SEGMENT)
    assert [region.members for region in by_segment] == [(1, 3), (0,), (2,)]


def test_only_packed_pieces_are_padded() -> None:
    alone = arrange(items((255, 129)), (0,), Grouping.GROUPED)
    packed = arrange(items((3, 3)), (0,), Grouping.GROUPED)
    assert place(alone, [4], 2, piece_alignment=16).places[0].piece == 128 * 129 * 4
    assert place(packed, [4], 2, piece_alignment=16).places[0].piece == 32  # 24 bytes of elements


def test_regions_are_aligned_and_apart() -> None:
    regions = arrange(items((255, 129), (301, 77), (7,)), range(3), Grouping.GROUPED)
    placement = place(regions, [4], 2)
    assert len(placement.places) == 3
    end = 0
    for spot in placement.places:
        assert spot.offset % ALIGNMENT == 0 and spot.offset >= end
        end = spot.end
    assert placement.nbytes == end


def test_parameters_without_elements_have_no_region() -> None:
    assert arrange(items((0, 3), (4, 0)), (0, 1), Grouping.GROUPED) == ()
    assert place((), [4], 2).nbytes == 0


def test_a_placement_checks_itself() -> None:
    with pytest.raises(AssertionError, match="overlaps"):
        Placement((Place(0, 300, 1, (0,)), Place(256, 10, 1, (0,))), 400)
    with pytest.raises(AssertionError, match="overlaps"):
        Placement((Place(8, 300, 1, (0,)),), 400)
    with pytest.raises(AssertionError, match="cannot hold"):
        Placement((Place(0, 300, 1, (0,)),), 299)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_another_dimension(world: int) -> None:
    """Contract LAY-06: equal pieces along the dimension, and never a region of their own."""
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    cut = Cut((4, 6, 5), world, dim=1)
    for rank, chunk in enumerate(whole.chunk(world, 1)):
        assert cut.local_shape(rank) == tuple(chunk.shape) and cut.piece == chunk.numel()
        assert torch.equal(whole.narrow(1, *cut.rows(rank)), chunk)
    with pytest.raises(AssertionError, match="not divisible"):
        Cut((4, 6, 5), 4, dim=1)
    large = Item(Cut((256, 600), world, dim=1), 0, 4)
    (region,) = arrange([large], (0,), Grouping.GROUPED)
    assert region.packed
