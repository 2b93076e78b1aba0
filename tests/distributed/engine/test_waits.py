"""Every wait is there, and every one of them is needed."""

from __future__ import annotations

import pytest
from bed import loopback, simulated
from bed.models import CASES, Case, case
from bed.packing import path
from bed.parity import assert_close, each_unit

from unshard import fully_shard


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("way", ["rows", "packed"])
@pytest.mark.parametrize("each", CASES, ids=str)
def test_parity_with_collectives_as_late_as_they_may_be(each: Case, way: str, reshard: bool | None) -> None:
    with path(way):
        record, _ = simulated.run(each, each_unit(each, fully_shard, reshard_after_forward=reshard), world=2)
    assert_close(record, simulated.reference(each, world=2), tolerance=1e-5)


def middle(model):
    return model.blocks[1].mlp


@pytest.mark.parametrize("world", [2, 3])
def test_parity_after_exceptions_with_collectives_in_flight(world: int) -> None:
    transformer = case("transformer")
    fail = simulated.failing_steps(transformer, middle, "cpu")
    record, _ = simulated.run(transformer, each_unit(transformer, fully_shard), world, fail=fail)
    assert_close(record, simulated.reference(transformer, world), tolerance=1e-5)


@pytest.mark.parametrize(
    "failures", [pytest.param(False, id="parity"), pytest.param(True, id="exceptions", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("way", ["rows", "packed"])
def test_without_any_one_wait_it_fails(way: str, failures: bool) -> None:
    """Each collective in turn is one that nobody waits for: wrong numbers, or memory freed under it."""
    transformer = case("transformer")
    fail = simulated.failing_steps(transformer, middle, "cpu") if failures else None
    shard = each_unit(transformer, fully_shard)
    expected = simulated.reference(transformer, world=2, steps=2)
    with path(way):
        record, collectives = simulated.run(transformer, shard, 2, steps=2, fail=fail)
        assert_close(record, expected)
        assert collectives > 20
        for number in range(collectives):
            with pytest.raises((AssertionError, RuntimeError, ValueError)):
                wrong, _ = simulated.run(transformer, shard, 2, steps=2, fail=fail, skip_wait={number})
                assert_close(wrong, expected)


def test_the_next_gather_is_under_way_while_a_unit_computes() -> None:
    """From the second step on: root and three blocks, one ahead in forward and in backward."""
    transformer = case("transformer")
    with loopback.job(2) as group:
        model = transformer.build()
        each_unit(transformer, fully_shard, reshard_after_forward=True)(model)
        issued: list[int] = []

        def note(*unused: object) -> None:
            issued.append(sum(call.kind == "gather" for call in group.log))

        for block in model.blocks:
            block.norm1.register_forward_pre_hook(note)
            block.mlp.register_full_backward_pre_hook(note)
        for expected in ([2, 3, 4], [3, 4, 4]):
            group.log.clear()
            issued.clear()
            loss = transformer.loss(model, transformer.batch(0))
            assert issued == expected
            issued.clear()
            loss.backward()
            # The root's own gather and that of the last block are the fifth and sixth; then one ahead.
            assert issued == [7, 8, 8]
            assert len(group.log) == 12
