"""Runs the command `unshard` when Python is called as `python -m unshard.cli`."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
