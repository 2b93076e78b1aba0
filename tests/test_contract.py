"""What tests cite as "Contract MESH-02" can be read in `contract.md`, which names the tests of every statement."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"^\| ([A-Z][A-Z0-9]*-\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall((HERE / "contract.md").read_text())
PARTS = {each.split("-")[0] for each, _, _ in ROWS}


def cited(text: str) -> set[str]:
    """Also those between the ends of "ARG-01 to ARG-08" and "D-20..D-36"."""
    found = set()
    for part, first, last in re.findall(r"\b([A-Z][A-Z0-9]*)-(\d+)(?:(?: to |\.\.)\1-(\d+))?", text):
        if part in PARTS:
            between = range(int(first), int(last or first) + 1)
            found |= {f"{part}-{number:0{len(first)}d}" for number in between}
    return found


def named(cell: str) -> list[tuple[str, str]]:
    """File and name of the tests in a cell; `::name` alone is in the file before."""
    found: list[tuple[str, str]] = []
    for file, name in re.findall(r"`([\w/]*(?:\.py)?)::(test_\w+)`", cell):
        found.append((file or found[-1][0], name))
    return found


def test_ranges_and_lists_are_read() -> None:
    assert cited("Contract ARG-01 to ARG-03, UTF-8, MESH-02: x; D-20..D-22") == {
        *("ARG-01", "ARG-02", "ARG-03", "MESH-02", "D-20", "D-21", "D-22")
    }
    assert named("`a/b.py::test_c`, `::test_d`; why") == [("a/b.py", "test_c"), ("a/b.py", "test_d")]


def test_every_statement_has_one_row() -> None:
    ids = [each for each, _, _ in ROWS]
    assert len(ids) == len(set(ids)) > 700


def test_every_id_that_a_test_cites_can_be_read() -> None:
    known = {each for each, _, _ in ROWS}
    for file in sorted(HERE.rglob("test_*.py")):
        if file != Path(__file__):
            assert cited(file.read_text()) <= known, file.relative_to(HERE)


def test_every_statement_names_tests_that_exist_or_says_why_not() -> None:
    for each, _, cell in ROWS:
        tests = named(cell)
        assert tests or "not tested: " in cell, f"{each} names no test"
        for file, name in tests:
            assert f"\ndef {name}(" in (HERE / file).read_text(), f"{each}: {file} has no {name}"
