"""Runs the command `unshard` when Python is called as `python -m unshard`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
