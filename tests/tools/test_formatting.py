"""How reports name dtypes and units, and lay out tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from unshard.tools.precision_report import _units, quoted, shared_title, short, shorts, table


def test_dtypes_are_short() -> None:
    names = [short(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)]
    assert names == ["fp32", "bf16", "fp16", "fp64", "int64"]
    assert short(torch.float8_e4m3fn) == "fp8_e4m3fn" and short(None) == "-" and short(None, "none") == "none"
    assert shorts([torch.float32, torch.bfloat16, torch.float32]) == "bf16+fp32" and shorts([]) == "-"


def test_names_are_few() -> None:
    assert quoted(["a", "b", "a"]) == "'a', 'b'"
    assert quoted(list("abcde")) == "'a', 'b', 'c' and 2 more"
    units: list[Any] = [SimpleNamespace(name=name) for name in ("", "a", "b", "c", "d")]
    assert _units(units[:1]) == "unit '(root)'" and _units(units) == "units '(root)', 'a', 'b' and 2 more"
    assert shared_title([""]) == "(root)" and shared_title(["a", "b"]) == "a and b"
    assert shared_title([f"blocks.{number}" for number in range(16)]) == "blocks.0 … blocks.15 (16 units)"


def test_tables_are_aligned() -> None:
    lines = table(("unit", "n", "dtype"), [("a", "1,000", "fp32"), ("longer", "2", "")], numbers=(1,))
    assert lines == [
        "unit        n  dtype",
        "------  -----  -----",
        "a       1,000  fp32",
        "longer      2",
    ]
