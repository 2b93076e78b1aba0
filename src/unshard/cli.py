"""The command `unshard`."""

from __future__ import annotations

import sys

from .dropin.running import USAGE, run


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        return run(arguments[1:])
    asked = arguments[:1] in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
