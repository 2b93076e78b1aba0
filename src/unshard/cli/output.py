"""Prints results: as text, with tables and progress of `rich` on a terminal if it is installed, or as JSON."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .. import __version__

_COLORS = {"ok": "green", "NO": "bold red", "yes": "green", "no": "bold red"}
_WRAPPED_COLUMNS = 3
"""Tables with more columns than this are not wrapped."""
_documents: list[str] | None = None
"""What `show` has to print as JSON, while `only_json` redirects stdout."""


@contextlib.contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """Send everything that is printed to stderr, and print the JSON document of `show` at the end.

    Programs print when they are imported, and child processes inherit the file descriptor.
    """
    global _documents
    if not wanted:
        yield
        return
    documents = _documents = []
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _documents = None
        os.dup2(kept, 1)
        os.close(kept)
    for each in documents:
        print(each)


def show(result: Any, text: str | None = None) -> None:
    """Print a result, or `text` in its place. A result has `to_dict()`, or is a dict."""
    if _documents is not None:
        found = result if isinstance(result, dict) else result.to_dict()
        found = {"kind": found["kind"], "unshard": __version__, **found}
        _documents.append(json.dumps(_strict(found), indent=2, default=str))
    else:
        _print_text(str(result) if text is None else text)


def _strict(value: Any) -> Any:
    """Replace numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def _print_text(text: str) -> None:
    if not text:
        return
    if not (sys.stdout.isatty() and has_rich()):
        print(text)
        return
    console = importlib.import_module("rich.console").Console(highlight=False)
    for part in _parts(text.splitlines()):
        if isinstance(part, str):
            console.print(part, markup=False, soft_wrap=True)
        else:
            console.print(_table(part))


def _parts(lines: list[str]) -> Iterator[str | list[list[str]]]:
    """Yield the lines of a text, and each table in it as a list of rows. A line of dashes follows a table's head.

    Wide tables of many columns stay lines: in narrow cells, they are hard to read.
    """
    number, width = 0, shutil.get_terminal_size().columns
    while number < len(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        too_wide = len(below) + 2 * below.count("  ") > width and below.count("  ") > _WRAPPED_COLUMNS
        if not re.fullmatch(r"-+(  -+)+", below) or too_wide:
            yield lines[number]
            number += 1
            continue
        columns = [match.span() for match in re.finditer("-+", below)]
        columns[-1] = (columns[-1][0], sys.maxsize)
        rows = [lines[number]]
        number += 2
        while number < len(lines) and lines[number].strip():
            rows.append(lines[number])
            number += 1
        yield [[row[start:end] for start, end in columns] for row in rows]


def _table(rows: list[list[str]]) -> Any:
    made = importlib.import_module("rich.table").Table(box=importlib.import_module("rich.box").SIMPLE_HEAD)
    styled = importlib.import_module("rich.text").Text
    for column, title in enumerate(rows[0]):
        right = any(row[column].startswith(" ") and row[column].strip() for row in rows)
        made.add_column(styled(title.strip()), justify="right" if right else "left", overflow="fold")
    for row in rows[1:]:
        made.add_row(*(styled(cell.rstrip(), _COLORS.get(cell.strip(), "")) for cell in row))
    return made


@contextlib.contextmanager
def working(title: str) -> Iterator[Callable[[str], object]]:
    """Show on stderr that a command works, if it is a terminal. The caller gets a function that changes the title."""
    if not sys.stderr.isatty():
        yield lambda text: None
    elif has_rich():
        with _stderr_console().status(title) as status:
            yield status.update
    else:
        _say(title)
        yield _say


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], object] | None]:
    """Show a bar on stderr if it is a terminal and `rich` is installed. The caller passes finished and total bytes."""
    if not (sys.stderr.isatty() and has_rich()):
        yield None
        return
    bars = importlib.import_module("rich.progress")
    columns = [bars.TextColumn(title), bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn()]
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=_stderr_console(), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _stderr_console() -> Any:
    return importlib.import_module("rich.console").Console(stderr=True)
