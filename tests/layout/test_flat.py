"""Parameters laid end to end: integers only (contract F1-49..F1-53)."""

from __future__ import annotations

import itertools

import pytest

from unshard.layout.collective_tensors import FLAT_LAYOUT, Grouping, LayoutParam, lay_out
from unshard.layout.shardings import FlatSharding, flat_offsets, is_dense

NUMELS = (15, 5, 15, 3)


def test_f1_50_aligned_as_the_contract_says() -> None:
    """F1-50: 4 ranks, fp32, each parameter at a multiple of 16 bytes, and a multiple of the ranks in all."""
    flat = flat_offsets(NUMELS, 4, itemsize=4, aligned=True)
    assert flat.padded == (15, 1, 5, 3, 15, 1, 3, 1)
    assert (flat.length, flat.shard_numel) == (44, 11)
    assert flat.begins == (0, 16, 24, 40)


def test_f1_51_end_to_end_as_the_contract_says() -> None:
    """F1-51: no padding inside; 38 elements become 40, the last rank has 2 of padding."""
    flat = flat_offsets(NUMELS, 4, itemsize=4, aligned=False)
    assert flat.padded == NUMELS
    assert (flat.length, flat.shard_numel) == (38, 10)
    assert 4 * flat.shard_numel - flat.length == 2


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_element_is_on_one_rank(world: int, itemsize: int, aligned: bool) -> None:
    flat = flat_offsets(NUMELS, world, itemsize, aligned)
    shardings = [
        FlatSharding((n,), (1,), begin, flat.shard_numel, world) for n, begin in zip(NUMELS, flat.begins, strict=True)
    ]
    for sharding in shardings:
        if aligned:
            assert sharding.begin * itemsize % 16 == 0
        held = [range(first, first + count) for first, count in (sharding.elements(rank) for rank in range(world))]
        assert list(itertools.chain(*held)) == list(range(sharding.numel))
        assert all(len(each) <= flat.shard_numel for each in held)
    items = [LayoutParam(sharding, 0, itemsize) for sharding in shardings]
    (region,) = FLAT_LAYOUT.collective_regions(items, (1,), Grouping.GROUPED)
    assert region.members == (0, 1, 2, 3), "the unit is cut as a whole, whichever have gradients"
    assert lay_out([region], [itemsize], world).nbytes == flat.shard_numel * world * itemsize
    for rank in range(world):
        for index, begin in region.begins(region.runs[0], rank):
            first, count = shardings[index].elements(rank)
            if count:
                assert rank * flat.shard_numel + begin == shardings[index].begin + first
                assert begin + count <= flat.shard_numel


def test_a_parameter_beyond_the_pieces_is_refused() -> None:
    with pytest.raises(AssertionError, match="exceeds 2 shards"):
        FlatSharding((5,), (1,), 6, 5, 2)


def test_strides_with_gaps_are_refused() -> None:
    with pytest.raises(AssertionError, match="gaps"):
        FlatSharding((2, 2), (4, 1), 0, 8, 1)


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((2, 3, 4, 5), (60, 1, 15, 3), True),  # channels last
        ((1, 3), (17, 1), True),  # nobody steps along a dimension of one
    ],
)
def test_what_is_dense(shape: tuple[int, ...], stride: tuple[int, ...], dense: bool) -> None:
    assert is_dense(shape, stride) is dense


def test_nothing_to_arrange() -> None:
    assert FLAT_LAYOUT.collective_regions([], (), Grouping.ONE_REGION) == ()
