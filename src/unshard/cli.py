"""The `unshard` command. Commands import torch lazily, so that help and usage errors are immediate."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Iterable
from typing import NoReturn

from . import __version__
from .usage import CHECKPOINT, COMMANDS, EXPORT, RUN

_HELP = ("-h", "--help")
_COMMANDS = ("run", "checkpoint", "export")
_OPTIONS = ("--help", "--version")
_PATHS = {"verify": 1, "inspect": 1, "diff": 2}


def main() -> int:
    command, *rest = sys.argv[1:] or [""]
    if command == "run" and rest and rest[0] not in _HELP:
        from .dropin.running import run

        return run(rest)  # outside the `try`: exceptions belong to the program
    try:
        status = _answer(command, rest)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has exited: `unshard checkpoint inspect PATH | head`
        # Python flushes stdout again at exit and would report the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return _refuse(f"unshard {command}: interrupted.", 128 + signal.SIGINT)


def _answer(command: str, rest: list[str]) -> int:
    if command == "checkpoint":
        return _checkpoint(rest)
    if command == "export":
        return _export(rest)
    if command == "run":
        return _show(RUN, asked=bool(rest))
    if command in ("-V", "--version"):
        return _show(_version())
    if command in ("", *_HELP):
        return _show(COMMANDS, asked=bool(command))
    return _unknown("unshard", command, _COMMANDS)


def _version() -> str:
    try:
        return f"unshard {__version__} (torch {importlib.metadata.version('torch')})"
    except importlib.metadata.PackageNotFoundError:  # torch was not installed as a package
        return f"unshard {__version__}"


def _checkpoint(arguments: list[str]) -> int:
    command, *paths = arguments or [""]
    if command in ("", *_HELP) or (paths and paths[0] in _HELP):
        return _show(CHECKPOINT, asked=bool(command))
    if command not in _PATHS:
        return _unknown("unshard checkpoint", command, _PATHS)
    title, count = f"unshard checkpoint {command}", _PATHS[command]
    options = [each for each in paths if each.startswith("-")]
    if options:
        return _refuse(f"{title}: unknown option {options[0]!r}. See `unshard checkpoint --help`.")
    if len(paths) != count:
        return _refuse(f"{title}: expected {count} PATH argument{'s'[: count - 1]}, got {len(paths)}.")
    from . import checkpoint

    try:
        if command == "diff":
            found = checkpoint.diff(*paths)
            print(found)
            return 0 if found.equal else 1
        if command == "inspect":
            print(checkpoint.inspect(*paths))
        else:
            print(f"{checkpoint.verify(*paths)} is complete: all checksums match.")
    except checkpoint.CheckpointError as error:
        return _refuse(f"{title}: {error}", 1)
    return 0


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        return f"{EXPORT}\n"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


def _export(arguments: list[str]) -> int:
    parser = _Parser("unshard export")
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--dtype")
    parser.add_argument("--max-file-size", default="5GB")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--tied-name", action="append", default=[], dest="tied_names")
    parser.add_argument("--overwrite", action="store_true")
    given = vars(parser.parse_args(arguments))
    from . import checkpoint
    from .errors import ArgumentError

    try:
        files = checkpoint.export(given.pop("checkpoint"), given.pop("folder"), **given)
    except (checkpoint.CheckpointError, ArgumentError) as error:
        return _refuse(f"unshard export: {error}", 1)
    print(*files, sep="\n")
    return 0


def _show(text: str, asked: bool = True) -> int:
    """Print help that was asked for; if no command was given, print it as an error."""
    print(text, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _unknown(title: str, command: str, known: Iterable[str]) -> int:
    kind, known = ("option", _OPTIONS) if command.startswith("-") else ("command", tuple(known))
    near = difflib.get_close_matches(command, known, 1)
    if command.endswith(".py"):
        near = [f"run {command}"]
    hint = f"Did you mean `{title} {near[0]}`?" if near else f"Known: {', '.join(known)}."
    return _refuse(f"{title}: unknown {kind} {command!r}. {hint} See `{title} --help`.")


def _refuse(message: str, status: int = 2) -> int:
    print(message, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
