"""The `unshard` command. Commands import torch lazily, so that help and usage errors appear at once.

options     defines the arguments of all commands
commands    what each command does
programs    `unshard run`
output      prints results as text, as `rich` tables or as JSON
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable

from .options import HELP, parser, show_version
from .output import only_json
from .programs import EXPLAIN_HANGS_AFTER, run

__all__ = ["main", "run"]


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"] and arguments[1:] and arguments[1] not in HELP:
        return run(arguments[1:], EXPLAIN_HANGS_AFTER)  # outside the `try`: exceptions belong to the program
    try:
        status = _answer(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has exited: `unshard checkpoint inspect PATH | head`
        # Python flushes stdout again at exit and would report the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"unshard {arguments[0]}: interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT


def _answer(arguments: list[str]) -> int:
    if not arguments:
        return _usage(parser())
    try:
        given = parser().parse(arguments)
    except SystemExit as end:  # after --help, or after an error that is already printed
        return int(end.code or 0)
    if given.version:
        return show_version()
    if given.command is None:
        return _usage(given.parser)
    from . import commands

    work: Callable[[argparse.Namespace], int] = getattr(commands, given.command)
    try:
        with only_json(given.json):
            return work(given)
    except BrokenPipeError:
        raise
    except (Exception, SystemExit) as error:
        if given.traceback or os.environ.get("UNSHARD_TRACEBACK", "0") not in ("", "0"):
            raise
        print(f"{given.parser.prog}: {_problem(error)}", file=sys.stderr)
        return 2


def _usage(at: argparse.ArgumentParser) -> int:
    at.print_help(sys.stderr)
    return 2


def _problem(error: BaseException) -> str:
    """Describe an error in one line."""
    from ..errors import UnshardError

    if isinstance(error, UnshardError):
        return " ".join(str(error).split())
    if isinstance(error, SystemExit):
        return (
            f"the file called sys.exit({error.code!r}) when it was imported. Put the code that trains under "
            "`if __name__ == '__main__':`."
        )
    first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{said}. Add --traceback to see where it was raised."
