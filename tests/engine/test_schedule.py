"""Order and prefetch, without any tensor."""

from __future__ import annotations

from unshard.engine.schedule import BackwardOrder, ForwardOrder


def run(order: ForwardOrder, units: list[int]) -> list[int | None]:
    order.begin()
    forecasts = [order.visit(unit) for unit in units]
    order.end()
    return forecasts


def test_the_second_forward_is_predicted() -> None:
    order = ForwardOrder()
    assert run(order, [0, 1, 2]) == [None, None, None]
    assert run(order, [0, 1, 2]) == [1, 2, None]


def test_a_unit_used_twice() -> None:
    order = ForwardOrder()
    run(order, [0, 1, 1, 2])
    assert run(order, [0, 1, 1, 2]) == [1, 1, 2, None]


def test_leaving_the_order_ends_predictions_and_the_new_one_is_learned() -> None:
    order = ForwardOrder()
    run(order, [0, 1, 2, 3])
    assert run(order, [0, 2, 1, 3]) == [1, None, None, None]
    assert run(order, [0, 2, 1, 3]) == [2, 1, 3, None]


def test_backward_goes_back() -> None:
    order = BackwardOrder(maxlen=10)
    for unit in (1, 2, 3, 0):
        order.append(unit)
    assert [order.visit(unit) for unit in (0, 3, 2, 1)] == [3, 2, 1, None]


def test_two_forwards_are_undone_one_after_the_other() -> None:
    order = BackwardOrder(maxlen=10)
    for unit in (1, 2, 1, 2):
        order.append(unit)
    assert [order.visit(unit) for unit in (2, 1, 2, 1)] == [1, 2, 1, None]


def test_skipped_and_unknown_units() -> None:
    order = BackwardOrder(maxlen=10)
    for unit in (1, 2, 3):
        order.append(unit)
    assert order.visit(2) == 1  # 3 had no backward
    assert order.visit(7) is None
    assert order.visit(1) is None
    assert len(order) == 0


def test_forwards_without_backward_do_not_pile_up() -> None:
    order = BackwardOrder(maxlen=4)
    for unit in range(100):
        order.append(unit)
    assert len(order) == 4
    order.drop_to(1)
    assert len(order) == 1
    order.clear()
    assert order.visit(99) is None
