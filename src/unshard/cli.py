"""The command `unshard`."""

from __future__ import annotations

import sys

from . import checkpoint
from .dropin.running import USAGE, run

CHECKPOINT_USAGE = """usage: unshard checkpoint verify PATH
       unshard checkpoint inspect PATH

PATH is a checkpoint that unshard.checkpoint.save wrote, or the folder with several, of which the latest is taken.
verify reads all of it and compares all checksums; the exit status is 1 if it is damaged. inspect prints a table of its
tensors. Neither needs the other ranks or a GPU."""


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        return run(arguments[1:])
    if arguments[:1] == ["checkpoint"]:
        return _checkpoint(arguments[1:])
    asked = arguments[:1] in (["-h"], ["--help"])
    print(f"{USAGE}\n\n{CHECKPOINT_USAGE}", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _checkpoint(arguments: list[str]) -> int:
    asked = arguments[:1] in (["-h"], ["--help"])
    if asked or len(arguments) != 2 or arguments[0] not in ("verify", "inspect"):
        print(CHECKPOINT_USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    command, path = arguments
    try:
        if command == "inspect":
            print(checkpoint.inspect(path))
        else:
            print(f"{checkpoint.verify(path)} is whole: all checksums agree.")
    except checkpoint.CheckpointError as error:
        print(f"unshard checkpoint {command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
