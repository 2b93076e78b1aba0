"""The tests that the documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"


@pytest.mark.parametrize("document", ["proofs.md", "proofs_wrapper.md", "incidents.md"])
def test_every_test_that_is_named_exists(document: str) -> None:
    named = set(re.findall(r"`tests/([\w/]+\.py)::(test_\w+)`", (DOCS / document).read_text()))
    assert len(named) > 20
    for file, name in sorted(named):
        assert f"\ndef {name}(" in (HERE / file).read_text(), f"{file} has no {name}"


def test_every_statement_has_one_row() -> None:
    ids = re.findall(r"^\| ([A-Z]+-\d+) \|", (DOCS / "proofs.md").read_text(), re.MULTILINE)
    assert len(ids) == len(set(ids)) == 534


def test_every_statement_about_the_wrapper_has_one_row() -> None:
    ids = re.findall(r"^\| ((?:F1|FI|D|LG)-\d+) \|", (DOCS / "proofs_wrapper.md").read_text(), re.MULTILINE)
    assert len(ids) == len(set(ids))
    assert set(ids) >= {f"F1-{number:02d}" for number in range(1, 115)} | {
        f"LG-{number:02d}" for number in range(1, 22)
    }
