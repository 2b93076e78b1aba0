"""Prepares the pages of the site in build/docs: the nav, reference pages, and links that leave `docs/`.

No plugin of one site generator does this, so another generator that reads Markdown and `mkdocs.yml` can build the site.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from docstrings import PublicNames, exported

REPOSITORY = Path(__file__).parents[2]
OUTPUT = REPOSITORY / "build"
ONLINE = "https://github.com/unshard/unshard"

# Pages of the site that are not in docs/.
OUTSIDE = {"tests/contract.md": "contract.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

# Title, guide, and the modules that define the names of a page. The first prefix that matches wins.
REFERENCE = {
    "fully_shard": ("`fully_shard` and policies", "concepts", ("fsdp2", "policies", "engine", "comm.agreement")),
    "wrapper": ("`FullyShardedDataParallel`", "migrating", ("fsdp1", "wrap", "composable")),
    "step": ("Uneven steps and inference", "uneven_steps", ("uneven",)),
    "capture": ("Captured steps", "captured_steps", ("captured_step",)),
    "optim": ("`unshard.optim`", "optimizers", ("optim",)),
    "checkpoint": ("`unshard.checkpoint`", "checkpoints", ("checkpoint",)),
    "tools": ("`unshard.tools`", "debugging", ("tools",)),
    "collectives": ("Custom collectives", "custom_collectives", ("comm.interface",)),
    "errors": ("Errors", "errors", ("errors",)),
    "dropin": ("`unshard.dropin`", "dropin", ("dropin",)),
}
MODULES = ("wrap", "optim", "checkpoint", "tools", "errors", "dropin", "composable")
"""Modules with public names of their own."""


def main() -> None:
    shutil.rmtree(OUTPUT / "docs", ignore_errors=True)
    shutil.copytree(REPOSITORY / "docs", OUTPUT / "docs", ignore=shutil.ignore_patterns("*.md", "*.py", "*.yml"))
    pages = {str(each.relative_to(REPOSITORY)): "" for each in sorted((REPOSITORY / "docs").rglob("*.md"))}
    for source in [*pages, *OUTSIDE]:
        write(place(source), linked((REPOSITORY / source).read_text(), source))
    generated = [*reference(), ("command_line", "The command unshard", commands())]
    for name, _, text in generated:
        write(f"reference/{name}.md", text)
    nav = list(sections([{title.replace("`", ""): f"reference/{name}.md"} for name, title, _ in generated]))
    settings = (REPOSITORY / "docs/site/mkdocs.yml").read_text()
    (OUTPUT / "mkdocs.yml").write_text(f"{settings}\nnav: {json.dumps(nav)}\n")


def write(name: str, text: str) -> None:
    path = OUTPUT / "docs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def place(source: str) -> str:
    """Return the path of a page inside the site."""
    return OUTSIDE.get(source, os.path.relpath(source, "docs"))


def linked(text: str, source: str) -> str:
    """Make links to files outside `docs/` lead to their page, or to the repository."""

    def moved(match: re.Match[str]) -> str:
        path, mark, anchor = match[1].partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if not path or path.startswith(("http", "mailto")) or not (REPOSITORY / target).exists():
            return match[0]
        if place(target).startswith(".."):
            kind = "tree" if (REPOSITORY / target).is_dir() else "blob"
            return f"]({ONLINE}/{kind}/main/{target}{mark}{anchor})"
        return f"]({os.path.relpath(place(target), os.path.dirname(place(source)))}{mark}{anchor})"

    text = re.sub(r"\]\(([^)\s]+)\)", moved, text)
    # GitHub needs `\|` in the code of a table, and MkDocs would show the backslash.
    return re.sub(
        r"^\|.*$", lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]), text, flags=re.M
    )


# -- nav -----------------------------------------------------------------------------------------------------------


def sections(generated: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the nav: the headings of docs/README.md, and the page of each row below them."""
    text = (REPOSITORY / "docs" / "README.md").read_text()
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, rest = section.partition("\n")
        first, *parts = re.split(r"^### ", rest, flags=re.MULTILINE)
        pages: list[Any] = rows(first)
        for part in parts:
            name, _, below = part.partition("\n")
            pages.append({name: rows(below)})
        if title == "Start":
            pages.insert(0, {"Overview": "README.md"})
        yield {title: pages + generated if title == "Reference" else pages}


def rows(text: str) -> list[dict[str, str]]:
    found = re.findall(r"^\| \[(.+?)\]\((\S+?)\)", text, flags=re.MULTILINE)
    return [{title.replace("`", ""): place(os.path.normpath(f"docs/{path}"))} for title, path in found]


# -- reference -----------------------------------------------------------------------------------------------------


def reference() -> Iterator[tuple[str, str, str]]:
    """Yield the name, title and text of each page. mkdocstrings replaces the lines that begin with `:::`."""
    groups: dict[str, list[str]] = {name: [] for name in REFERENCE}
    for name, (defined, results) in public_names().items():
        groups[group_of(defined)] += [name, *results]
    for name, (title, guide, _) in REFERENCE.items():
        # First the subject of the page, then functions, then classes; names of submodules last.
        names = sorted(groups[name], key=lambda each: (each[8:] not in title, each.count("."), is_class(each), each))
        heading = (REPOSITORY / f"docs/{guide}.md").read_text().partition("\n")[0].removeprefix("# ")
        parts = [f"# {title}", f"Guide: [{heading}](../{guide}.md)", *(f"::: {each}" for each in names)]
        yield name, title, "\n\n".join(parts)


def is_class(name: str) -> bool:
    return name.rpartition(".")[2][0].isupper()


def group_of(defined: str) -> str:
    for name, (_, _, prefixes) in REFERENCE.items():
        if defined.removeprefix("unshard.").startswith(prefixes):
            return name
    raise LookupError(f"{defined} is public, but no page of the reference has it. Add its module to REFERENCE.")


def public_names() -> dict[str, tuple[str, list[str]]]:
    """Map each public name to the place that defines it, and to the classes of its results that have no public name.

    A name of two modules is listed once.
    """
    extensions = griffe.load_extensions(PublicNames)
    options: dict[str, Any] = {"allow_inspection": False, "resolve_aliases": True, "extensions": extensions}
    package: Any = griffe.load("unshard", search_paths=[REPOSITORY / "src"], **options)
    found: dict[str, str] = {}
    for module in (package["_public"], *(package[each] for each in MODULES)):
        for name in exported(module):
            member = module[name]
            if not member.is_module and member.canonical_path not in found.values():
                found[f"{module.path.removesuffix('._public')}.{name}"] = member.canonical_path
    known = set(found.values())
    named = {}
    for name, defined in found.items():
        returned = getattr(package[defined.removeprefix("unshard.")], "returns", None)
        paths = [each.canonical_path for each in returned or () if isinstance(each, griffe.ExprName)]
        results = [each for each in paths if re.match(r"unshard\.(\w+\.)+[A-Z]", each) and each not in known]
        known.update(results)
        named[name] = (defined, results)
    return named


def commands() -> str:
    """Describe every command, from the parser of its arguments."""
    sys.path.insert(0, str(REPOSITORY / "src"))
    from unshard.cli.options import parser

    return "\n".join(["# The command `unshard`", "", *described(parser(), 2)])


def described(parser: Any, level: int) -> Iterator[str]:
    notes, _, example = (parser.epilog or "").partition("example:\n")
    yield from ("```text", parser.format_usage().rstrip(), "```", "", parser.description or "", "")
    known = [each for each in parser._actions if not isinstance(each, argparse._SubParsersAction)]
    shown = [each for each in known if each.help != argparse.SUPPRESS and each.dest != "help"]
    if shown:
        yield from ("| argument | meaning |", "|---|---|")
        yield from (f"| {spelled(each)} | {(each.help or '').replace('|', chr(92) + '|')} |" for each in shown)
        yield ""
    yield from (re.sub(r"((?:^  .*\n)+)", r"\n```text\n\1```\n", notes, flags=re.MULTILINE), "")
    if example:
        yield from ("Example:", "", "```sh", *(line.strip() for line in example.splitlines()), "```", "")
    for each in parser.commands.values():
        yield from (f"{'#' * level} `{each.prog}`", "", *described(each, level + 1))


def spelled(action: argparse.Action) -> str:
    value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 else ""
    names = [f"`{name}{value}`" for name in action.option_strings] or [f"`{value.strip()}`"]
    return ", ".join(names)


if __name__ == "__main__":
    main()
