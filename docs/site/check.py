"""Checks the built site: `python docs/site/check.py build/site`.

Every link leads to a page and an anchor of the site, and no page loads anything from the network.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Contents(HTMLParser):
    """The anchors and links of a page, and what it loads."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[each] for each in ("id", "name") if each in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next", "edit"):
            self.loads.append(given["href"])
        if LOADS.get(tag) in given:
            self.loads.append(given[LOADS[tag]])


def problems(site: Path) -> list[str]:
    pages = {path.resolve(): Contents(path.read_text()) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site} has no pages"]
    found = []
    for path, contents in pages.items():
        name = path.relative_to(site.resolve())
        if name == Path("404.html"):  # its links are relative to the root of a server
            continue
        for link in (*contents.links, *contents.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in contents.loads and parts.scheme != "data":
                    found.append(f"{name} loads {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists():
                found.append(f"{name}: there is no {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                found.append(f"{name}: there is no anchor {link}")
    for style in site.rglob("*.css"):
        text = style.read_text()
        found += [f"{style.name} loads {each}" for each in ("url(http", "url(//", "@import") if each in text]
    return found


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]))
    print("\n".join(wrong) or f"{len(list(Path(sys.argv[1]).rglob('*.html')))} pages: all links are valid.")
    sys.exit(bool(wrong))
