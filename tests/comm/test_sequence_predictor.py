"""Which streams are predicted, without any process group."""

from __future__ import annotations

import gc
import random

import pytest

from unshard.comm.order.sequence import SequencePredictor


def misses(forecast: SequencePredictor, stream: list[int]) -> int:
    return sum(not forecast.step(number) for number in stream)


def test_the_second_round_is_predicted() -> None:
    forecast = SequencePredictor()
    assert misses(forecast, [0, 1, 2, 3]) == 4
    assert misses(forecast, [0]) == 1  # nobody could know that it begins again
    assert misses(forecast, [1, 2, 3] + 5 * [0, 1, 2, 3]) == 0


def test_a_number_with_several_successors_is_no_problem() -> None:
    forecast, round_ = SequencePredictor(), [0, 1, 1, 1, 2, 1, 3, 2]
    misses(forecast, 4 * round_)
    assert misses(forecast, 10 * round_) == 0


@pytest.mark.parametrize("others", [1, 3, 7])
def test_steps_among_other_steps(others: int) -> None:
    """Accumulation: the last of several steps has more events than the others."""
    cycle = others * [0, 1, 2, 2, 1] + [0, 1, 2, 2, 12, 1, 11, 10]
    forecast = SequencePredictor()
    first = misses(forecast, 3 * cycle)
    assert 0 < first < 30
    assert misses(forecast, 10 * cycle) == 0


def test_one_change_is_one_miss_and_then_the_old_order_is_found_again() -> None:
    forecast, step = SequencePredictor(), list(range(50))
    misses(forecast, 3 * step)
    assert misses(forecast, [0, 1, 2, 4, *range(5, 50)]) == 1  # 3 left out
    assert misses(forecast, 6 * step) <= 6
    assert misses(forecast, 6 * step) == 0


def test_memory_is_bounded_and_the_order_survives_that() -> None:
    forecast = SequencePredictor(memory=100)
    assert misses(forecast, 200 * list(range(10))) == 11
    assert forecast.position == 2000
    assert len(forecast._seen) <= 201
    assert len(forecast._before) == len(forecast._seen) and len(forecast._latest) == 10
    assert forecast.last(3) == [(1997, 7), (1998, 8), (1999, 9)]
    misses(forecast, 201 * [99])
    assert forecast.knows(99) and not forecast.knows(3)


def test_the_longest_resemblance_wins_wherever_it_lies() -> None:
    """Against the definition, on short random streams."""
    random.seed(1)
    for _ in range(200):
        stream = [random.randrange(3) for _ in range(40)]
        forecast = SequencePredictor()
        for number in stream:
            forecast.step(number)
        lengths = [_same(stream, place) for place in range(len(stream) - 1)]
        assert _same(stream, forecast._most_similar() - 1) == max(lengths)
        places = [place for place, length in enumerate(lengths) if length]
        assert [forecast._common(place) for place in places] == [lengths[place] for place in places]


def _same(stream: list[int], place: int) -> int:
    length = 0
    while length <= place and stream[place - length] == stream[len(stream) - 1 - length]:
        length += 1
    return length


def test_numbers_leave_no_objects() -> None:
    """Every model that ever was has numbers of its own, and an object for each would stay."""
    predictor = SequencePredictor()
    gc.collect()
    before = len(gc.get_objects())
    for number in range(1000):
        predictor.step(number)
    assert len(gc.get_objects()) - before < 100
