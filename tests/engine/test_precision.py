"""Which dtype is used where, and how the mean over the ranks is taken."""

from __future__ import annotations

import pytest
import torch

from unshard import MixedPrecisionPolicy
from unshard.engine.states import Division, Segments, division, dtypes_for

F32, F16, B16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


@pytest.mark.parametrize("original", [F32, B16, F16])
@pytest.mark.parametrize("param", [None, F32, B16, F16])
@pytest.mark.parametrize("reduce", [None, F32, B16, F16])
def test_dtypes_follow_the_contract(
    original: torch.dtype, param: torch.dtype | None, reduce: torch.dtype | None
) -> None:
    """Contract MP-04 to MP-07 and the columns AG and RS of the table MPT-01 to MPT-48."""
    dtypes = dtypes_for(original, MixedPrecisionPolicy(param, reduce))
    assert dtypes.original == original
    assert dtypes.compute == (param or original)
    assert dtypes.reduce == (reduce or param or original)


def test_reduce_dtype_equal_to_param_dtype_never_widens() -> None:
    """Contract MP-06."""
    assert dtypes_for(F64, MixedPrecisionPolicy(B16, B16)).reduce == B16


def test_integers_are_never_cast() -> None:
    """Contract MP-33."""
    dtypes = dtypes_for(torch.int64, MixedPrecisionPolicy(B16, F32))
    assert (dtypes.compute, dtypes.reduce) == (torch.int64, torch.int64)


def test_segments_gather_parameters_of_equal_dtypes() -> None:
    segments = Segments([F32, B16, F32, torch.int64], [MixedPrecisionPolicy(param_dtype=B16)] * 4)
    assert segments.of == [0, 1, 0, 2]
    assert segments.itemsizes("original") == [4, 2, 8]
    assert segments.itemsizes("compute") == [2, 2, 8]


@pytest.mark.parametrize(
    ("world", "before", "after"),
    [(1, 1, 1), (2, 2, 1), (3, 2, 1.5), (4, 2, 2), (5, 2, 2.5), (6, 4, 1.5), (8, 4, 2), (12, 4, 3)]
    + [(16, 4, 4), (32, 8, 4), (64, 8, 8)],
)
def test_division(world: int, before: float, after: float) -> None:
    """Contract DIV-01 to DIV-03."""
    for dtypes in (frozenset({F16}), frozenset({F32, F64})):
        assert division(world, 1, dtypes, None, False) == Division(False, False, before, after)
        assert division(1, world, dtypes, None, False) == Division(False, False, before, after)
        assert division(2, 2, dtypes, world, False) == Division(False, False, before, after)
    assert division(world, 2, frozenset({F32, B16}), None, False) == Division(True, True, 1.0, 1.0)


def test_division_by_another_factor() -> None:
    """Contract DIV-06, DIV-07, DIV-09, DIV-12."""
    both = frozenset({F32, B16})
    assert division(4, 2, both, 4, False) == Division(True, False, 1.0, 1.0)
    assert division(4, 2, both, 3, False) == Division(False, False, 1.0, 3)
    assert division(4, 2, both, None, True) == Division(False, False, 1.0, 8)
    assert division(4, 2, both, 3, True) == Division(False, False, 1.0, 3)
    assert division(4, 1, frozenset({F16}), 0.5, False) == Division(False, False, 1.0, 0.5)
