"""`python -m unshard.dropin script.py ...` is the same as `unshard run`. torchrun also takes `-m unshard.dropin`."""

import sys

from ..cli import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
