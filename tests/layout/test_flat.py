"""Parameters laid end to end: integers only (contract F1-49..F1-53)."""

from __future__ import annotations

import itertools

import pytest

from unshard.layout.flat import END_TO_END, FlatCut, is_dense, lay_end_to_end
from unshard.layout.rows import Grouping, Item, place

NUMELS = (15, 5, 15, 3)


def test_f1_50_aligned_as_the_contract_says() -> None:
    """F1-50: 4 ranks, fp32, each parameter at a multiple of 16 bytes, and a multiple of the ranks in all."""
    flat = lay_end_to_end(NUMELS, 4, itemsize=4, aligned=True)
    assert flat.padded == (15, 1, 5, 3, 15, 1, 3, 1)
    assert (flat.length, flat.share) == (44, 11)
    assert flat.begins == (0, 16, 24, 40)


def test_f1_51_end_to_end_as_the_contract_says() -> None:
    """F1-51: no padding inside; 38 elements become 40, the last rank has 2 of padding."""
    flat = lay_end_to_end(NUMELS, 4, itemsize=4, aligned=False)
    assert flat.padded == NUMELS
    assert (flat.length, flat.share) == (38, 10)
    assert 4 * flat.share - flat.length == 2


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_element_is_on_one_rank(world: int, itemsize: int, aligned: bool) -> None:
    flat = lay_end_to_end(NUMELS, world, itemsize, aligned)
    cuts = [FlatCut((n,), (1,), begin, flat.share, world) for n, begin in zip(NUMELS, flat.begins, strict=True)]
    for cut in cuts:
        if aligned:
            assert cut.begin * itemsize % 16 == 0
        held = [range(first, first + count) for first, count in (cut.elements(rank) for rank in range(world))]
        assert list(itertools.chain(*held)) == list(range(cut.numel))
        assert all(len(each) <= flat.share for each in held)
    items = [Item(cut, 0, itemsize) for cut in cuts]
    (region,) = END_TO_END.arrange(items, (1,), Grouping.GROUPED)
    assert region.members == (0, 1, 2, 3), "the unit is cut as a whole, whichever have gradients"
    assert place([region], [itemsize], world).nbytes == flat.share * world * itemsize
    for rank in range(world):
        for index, begin in region.begins(region.runs[0], rank):
            first, count = cuts[index].elements(rank)
            if count:
                assert rank * flat.share + begin == cuts[index].begin + first
                assert begin + count <= flat.share


def test_a_parameter_beyond_the_pieces_is_refused() -> None:
    with pytest.raises(AssertionError, match="leaves 2 pieces"):
        FlatCut((5,), (1,), 6, 5, 2)


def test_strides_with_gaps_are_refused() -> None:
    with pytest.raises(AssertionError, match="gaps"):
        FlatCut((2, 2), (4, 1), 0, 8, 1)


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
    assert END_TO_END.arrange([], (), Grouping.WHOLE) == ()
