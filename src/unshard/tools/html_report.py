"""Writes one self-contained HTML page about a run or a plan."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from .. import __version__
from ..errors import ArgumentError
from .recording import RECORDING, read_recording
from .report_parts import Charts, Found, Section, count
from .report_sections import sections_of

KINDS = ("plan", "ledger", "timeline", "watch", "verify", "precision", "doctor", "hang", RECORDING)
_PAGE = Path(__file__).parent / "report_page"
_FILE = "report.html"


def report(path: str | os.PathLike[str], *results: Any) -> Path:
    """Write an HTML page of `results` to `path`, and return the path. The page needs no network.

    A result is an object of one of the tools, its `to_dict()`, a JSON file with one or more such dicts, or a folder
    that `record` wrote. If `path` is a folder, the page is its `report.html`.

    Raises:
        ArgumentError: a result cannot be drawn, or there is none.

    Example::

        report("report.html", precision(model))
    """
    found: Found = {}
    for result in results:
        for each in _dicts_of(result):
            found.setdefault(each["kind"], []).append(each)
    if not found:
        raise ArgumentError("A report needs at least one result: an object of a tool, a dict, a JSON file or a folder.")
    path = Path(path)
    path = path / _FILE if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page_of(found), encoding="utf-8")
    return path


def page_of(found: Found) -> str:
    """Return the page of results, which are sorted by their kind."""
    charts = Charts()
    sections = sections_of(found, charts)
    library, script = _file("uplot.js"), _file("page.js")
    library = f"/*!\n{_file('uplot.LICENSE')}*/\n{library}"
    # Only these two scripts run, even if text of a result got into the page without being escaped.
    hashes = " ".join(f"'sha256-{_sha256(each)}'" for each in (library, script))
    return Template(_file("template.html")).substitute(
        title=escape(_title(found)),
        facts=escape(_facts(found)),
        findings=_findings(sections),
        sections="\n".join(map(_html, sections)),
        css=_file("uplot.css") + "\n" + _file("page.css"),
        data=_json(charts.data),
        library=library,
        script=script,
        hashes=hashes,
    )


# -- results -----------------------------------------------------------------------------------------------------


def _dicts_of(result: Any) -> Iterator[dict[str, Any]]:
    if hasattr(result, "to_dict"):
        result = result.to_dict()
    if isinstance(result, str | os.PathLike):
        result = _read(Path(result))
    for each in result if isinstance(result, list | tuple) else [result]:
        if not isinstance(each, dict) or each.get("kind") not in KINDS:
            kind = f"a dict of kind {each.get('kind')!r}" if isinstance(each, dict) else type(each).__name__
            raise ArgumentError(f"Cannot report {kind}. Known kinds: {', '.join(KINDS)}.")
        yield each
        if each["kind"] == RECORDING:
            for inner in each.get("results", []):
                yield from _dicts_of(inner)


def _read(path: Path) -> Any:
    if path.is_dir():
        return read_recording(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"Cannot read {str(path)!r}: {error.strerror or error}.") from error
    except ValueError as error:
        raise ArgumentError(f"{str(path)!r} is not JSON: {error}. Write it with --json or to_dict().") from error


# -- the page ----------------------------------------------------------------------------------------------------


def _title(found: Found) -> str:
    for each in found.get(RECORDING, []):
        ranks = f" on {count(each['world'], 'rank')}" if each.get("world") else ""
        return f"{each.get('model') or 'Run'}: {count(len(each.get('steps', [])), 'step')}{ranks}"
    if set(found) == {"plan"}:
        return f"Memory plan for {count(found['plan'][0].get('world', 1), 'rank')}"
    return "Report of unshard: " + ", ".join(found)


def _facts(found: Found) -> str:
    first = next(iter(found.values()))[0]
    facts = [f"unshard {first.get('unshard') or __version__}"]
    for each in found.get(RECORDING, []):
        facts += [str(each[key]) for key in ("torch", "device", "started") if each.get(key)]
    return " · ".join(facts)


def _findings(sections: list[Section]) -> str:
    found = [(good, text, section.name) for section in sections for good, text in section.findings]
    found.sort(key=lambda each: {False: 0, True: 1, None: 2}[each[0]])
    words = {False: ("bad", "Problem"), True: ("ok", "OK"), None: ("note", "Note")}
    items = (
        f'<li><span class="tag {words[good][0]}">{words[good][1]}</span><a href="#{name}">{escape(text)}</a></li>'
        for good, text, name in found
    )
    return f'<ul class="findings" aria-label="Findings">{"".join(items)}</ul>'


def _html(section: Section) -> str:
    parts = "\n".join(section.parts)
    return f'<section id="{section.name}"><h2>{escape(section.title)}</h2>\n{parts}\n</section>'


def _json(data: Any) -> str:
    """Return JSON that cannot end the script element around it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
