"""The tests and pages that the documents name exist, and the README stays short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"


def test_every_test_that_is_named_exists() -> None:
    pages = (DOCS / "incidents.md", HERE.parent / "SECURITY.md")
    found = [re.findall(r"`tests/([\w/]+\.py)::(test_\w+)`", page.read_text()) for page in pages]
    named = {each for tests in found for each in tests}
    assert all(found) and len(named) > 20
    for file, name in sorted(named):
        assert f"\ndef {name}(" in (HERE / file).read_text(), f"{file} has no {name}"


def links() -> Iterator[tuple[Path, str]]:
    pages = [HERE.parent / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    for page in (*pages, *sorted(DOCS.glob("*.md"))):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if not target.startswith(("http", "mailto")):
                yield page, target


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere() -> None:
    found = list(links())
    assert len(found) > 20
    for page, target in found:
        path, _, anchor = target.partition("#")
        other = (page.parent / path) if path else page
        assert other.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(other), f"{page.name} links to {target}"


def test_the_readme_is_short() -> None:
    assert len((HERE.parent / "README.md").read_text().splitlines()) <= 150
