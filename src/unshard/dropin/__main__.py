"""`python -m unshard.dropin script.py ...`; also `torchrun ... -m unshard.dropin script.py ...`."""

import sys

from .running import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
