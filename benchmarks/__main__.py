"""`python -m benchmarks`: which commands there are."""

from importlib import import_module

COMMANDS = (
    "step",
    "uneven",
    "exposed",
    "replay",
    "collectives",
    "optimizer",
    "memory",
    "memory_plan",
    "endurance",
    "checkpoint",
    "bytecodes",
    "scaling",
    "convergence",
    "trace",
    "picture",
)

if __name__ == "__main__":
    for name in COMMANDS:
        summary = (import_module(f"benchmarks.{name}").__doc__ or "").splitlines()[0]
        print(f"python -m benchmarks.{name:12s} {summary}")
