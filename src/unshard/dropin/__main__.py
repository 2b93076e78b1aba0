"""`python -m unshard.dropin script.py ...`, which torchrun can start, too."""

import sys

from .running import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
