"""Boxes of tensors, compared with what indexing itself gives."""

from __future__ import annotations

import itertools

import pytest
import torch

from unshard.state.boxes import Box, boxes_of_intervals, boxes_of_range, chunk, first_overlap, take


def test_the_picture() -> None:
    """The one at the top of the module."""
    found = list(boxes_of_range((4, 5), 3, 10))
    assert found == [(0, Box((0, 3), (1, 2))), (2, Box((1, 0), (1, 5))), (7, Box((2, 0), (1, 3)))]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 4), (1, 5, 1), (2, 1, 3, 2)])
def test_a_range_is_its_boxes(shape: tuple[int, ...]) -> None:
    """Every range of every shape: the elements of the boxes, one after the other, are those of the range."""
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for first, last in itertools.combinations(range(tensor.numel() + 1), 2):
        boxes = list(boxes_of_range(shape, first, last - first))
        elements = [tensor[box.slices_in(Box((0,) * len(shape), shape))].reshape(-1) for _, box in boxes]
        assert torch.equal(torch.cat(elements), torch.arange(first, last))
        starts = [0, *itertools.accumulate(box.numel for _, box in boxes)]
        assert [start for start, _ in boxes] == starts[:-1]
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        assert first_overlap([box for _, box in boxes]) is None


def test_chunks_are_those_of_torch() -> None:
    for length, chunks in itertools.product(range(12), range(1, 6)):
        parts = torch.arange(length).chunk(chunks) if length else ()
        for number in range(chunks):
            found = [
                index for begin, count in chunk([(0, length)], chunks, number) for index in range(begin, begin + count)
            ]
            assert found == (parts[number].tolist() if number < len(parts) else []), (length, chunks, number)


def test_take_of_several_intervals() -> None:
    assert take([(0, 2), (5, 3), (10, 2)], 1, 5) == [(1, 1), (5, 3), (10, 1)]
    assert take([(0, 2), (5, 3)], 5, 1) == []


def test_boxes_of_intervals() -> None:
    found = boxes_of_intervals([[(0, 2), (6, 1)], [(4, 3)]])
    assert found == [
        (Box((0, 4), (2, 3)), (slice(0, 2), slice(0, 3))),
        (Box((6, 4), (1, 3)), (slice(2, 3), slice(0, 3))),
    ]


def test_overlaps_are_found() -> None:
    apart = [Box((row, column), (2, 2)) for row in (0, 2) for column in (0, 2, 4)]
    assert first_overlap(apart) is None
    assert first_overlap([*apart, Box((1, 5), (2, 1))]) is not None
    assert first_overlap([Box((), ()), Box((), ())]) is not None
    assert first_overlap([Box((), ())]) is None
    assert Box((0, 0), (2, 3)).intersection(Box((1, 2), (5, 5))) == Box((1, 2), (1, 1))
    assert Box((0, 0), (2, 3)).intersection(Box((2, 0), (1, 1))) is None
