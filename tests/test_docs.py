"""The tests and pages that the documents name exist, the site has every page, and the README stays short."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    for page in (*pages, *sorted(DOCS.rglob("*.md"))):
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


def test_the_list_of_pages_is_complete() -> None:
    """The nav of the site is made from it."""
    listed = re.findall(r"^\| \[.+?\]\((\S+?)\)", (DOCS / "README.md").read_text(), flags=re.MULTILINE)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert len(pages) > 20 and len(set(listed)) == len(listed)
    assert {each for each in listed if not each.startswith("..")} == pages


def test_broken_links_of_the_site_are_found(tmp_path: Path) -> None:
    problems = runpy.run_path(str(DOCS / "site" / "check.py"))["problems"]
    assert problems(tmp_path)
    (tmp_path / "a.html").write_text('<h1 id="title"></h1><a href="b.html#there">b</a><a href="https://x">x</a>')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="a.html#title">a</a><link href="site.css">')
    (tmp_path / "site.css").write_text("p { color: red }")
    assert problems(tmp_path) == []
    (tmp_path / "b.html").write_text('<a href="a.html#missing">a</a><a href="c.html">c</a><script src="//cdn/x.js">')
    (tmp_path / "site.css").write_text("p { background: url(https://x) }")
    assert problems(tmp_path) == [
        "a.html: there is no anchor b.html#there",
        "b.html: there is no anchor a.html#missing",
        "b.html: there is no c.html",
        "b.html loads //cdn/x.js",
        "site.css loads url(http",
    ]


@pytest.mark.parametrize("name", ["parameter", "streams", "meshes", pytest.param("memory", marks=pytest.mark.slow)])
def test_pictures_are_those_that_the_script_draws(name: str) -> None:
    pictures = runpy.run_path(str(DOCS / "site" / "pictures.py"))["PICTURES"]
    assert set(pictures) >= {name} and f"images/{name}.svg" in (DOCS / "concepts.md").read_text()
    drawn = (DOCS / "images" / f"{name}.svg").read_text()
    assert pictures[name]().svg() == drawn, "PYTHONPATH=src python docs/site/pictures.py draws it again"
