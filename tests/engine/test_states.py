"""The tables of allowed moves."""

from __future__ import annotations

import itertools

import pytest

from unshard.engine.states import GRAD_MOVES, PARAM_MOVES, GradState, ParamState, checked_move
from unshard.errors import StateError


@pytest.mark.parametrize(("states", "moves"), [(ParamState, PARAM_MOVES), (GradState, GRAD_MOVES)])
def test_only_listed_moves_are_allowed(states: type, moves: dict) -> None:
    assert set(moves) == set(states)
    for now, to in itertools.product(states, states):
        if to in moves[now]:
            assert checked_move("unit", now, to) is to
        else:
            with pytest.raises(StateError, match=f"blocks.3.*{now.value}.*{to.value}"):
                checked_move("Unit 'blocks.3' on rank 1", now, to)


def test_unsharded_is_reached_only_through_an_all_gather() -> None:
    assert ParamState.UNSHARDED not in PARAM_MOVES[ParamState.SHARDED]
    assert GradState.REDUCED not in GRAD_MOVES[GradState.EMPTY]
