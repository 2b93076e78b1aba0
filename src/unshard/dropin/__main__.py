"""Runs `python -m unshard.dropin script.py ...` like `unshard run script.py ...`. `torchrun -m` works, too."""

import sys

from ..cli import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
