"""The command `unshard`."""

from __future__ import annotations

import argparse
import sys

from . import checkpoint
from .dropin.running import USAGE, run
from .errors import ArgumentError

CHECKPOINT_USAGE = """usage: unshard checkpoint verify PATH
       unshard checkpoint inspect PATH
       unshard checkpoint diff PATH PATH

PATH is a checkpoint that unshard.checkpoint.save wrote, or the folder with several, of which the latest is taken.
verify reads all of it and compares all checksums; the exit status is 1 if it is damaged. inspect prints a table of its
tensors. diff prints what differs between two; the exit status is 0 if they are equal, else 1. None of them needs the
other ranks or a GPU."""

EXPORT_USAGE = """usage: unshard export CHECKPOINT FOLDER [--dtype DTYPE] [--max-file-size SIZE] [--prefix PREFIX]
                      [--tied-name NAME]... [--overwrite]

Writes the model of a checkpoint as safetensors files. --dtype: of floating-point tensors, such as bfloat16.
--max-file-size: such as 5GB, which is the default. --prefix: put before all names. --tied-name: the name to write a
tied tensor under, instead of the first one. --overwrite: replace the files of an earlier export."""

_PATHS = {"verify": 1, "inspect": 1, "diff": 2}


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        return run(arguments[1:])
    if arguments[:1] == ["checkpoint"]:
        return _checkpoint(arguments[1:])
    if arguments[:1] == ["export"]:
        return _export(arguments[1:])
    asked = arguments[:1] in (["-h"], ["--help"])
    print(f"{USAGE}\n\n{CHECKPOINT_USAGE}\n\n{EXPORT_USAGE}", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _checkpoint(arguments: list[str]) -> int:
    asked = arguments[:1] in (["-h"], ["--help"])
    if asked or not arguments or _PATHS.get(arguments[0]) != len(arguments) - 1:
        print(CHECKPOINT_USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    command, *paths = arguments
    try:
        if command == "diff":
            found = checkpoint.diff(*paths)
            print(found)
            return 0 if found.equal else 1
        if command == "inspect":
            print(checkpoint.inspect(*paths))
        else:
            print(f"{checkpoint.verify(*paths)} is whole: all checksums agree.")
    except checkpoint.CheckpointError as error:
        print(f"unshard checkpoint {command}: {error}", file=sys.stderr)
        return 1
    return 0


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        return f"{EXPORT_USAGE}\n"

    format_usage = format_help


def _export(arguments: list[str]) -> int:
    parser = _Parser("unshard export")
    parser.add_argument("checkpoint")
    parser.add_argument("folder")
    parser.add_argument("--dtype")
    parser.add_argument("--max-file-size", default="5GB")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--tied-name", action="append", default=[], dest="tied_names")
    parser.add_argument("--overwrite", action="store_true")
    given = vars(parser.parse_args(arguments))
    try:
        files = checkpoint.export(given.pop("checkpoint"), given.pop("folder"), **given)
    except (checkpoint.CheckpointError, ArgumentError) as error:
        print(f"unshard export: {error}", file=sys.stderr)
        return 1
    print(*files, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
