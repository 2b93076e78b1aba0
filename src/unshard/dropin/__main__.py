"""`python -m unshard.dropin script.py ...` is `unshard run`; also `torchrun ... -m unshard.dropin script.py ...`."""

import sys

from ..cli import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
