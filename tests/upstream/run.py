"""Run PyTorch's own FSDP tests with its FSDP and with unshard, and count.

    python tests/upstream/run.py PYTORCH [--files PATTERN ...] [--json FILE]

PYTORCH is a source checkout. Its tests run on the CPU with Gloo (`as_cpu.py`): first with PyTorch's FSDP, then with
unshard in its place (`unshard.dropin`). Tests that PyTorch's FSDP does not pass there say nothing and are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = {
    "expects another message": r'^AssertionError: ".*" does not match "',
    "uses private names": r"is not available: unshard replaces|^AttributeError: (type |.*no attribute '_)",
    "fails otherwise": "",
}
"""Why a test fails with unshard only, and what the reason matches. The first match counts."""

PATTERNS = ("test/distributed/_composable/fsdp/test_*.py", "test/distributed/fsdp/test_*.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pytorch", type=Path)
    parser.add_argument("--files", nargs="+", default=PATTERNS, metavar="PATTERN", help="relative to PYTORCH")
    parser.add_argument("--ranks", type=int, default=4, help="number of GPUs that the tests see")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each test")
    parser.add_argument("--json", type=Path, help="write the outcome of each test")
    args = parser.parse_args()
    found = {file for pattern in args.files for file in args.pytorch.glob(pattern)}
    files = sorted(file for file in found if "compile" not in file.name)  # these need a GPU's compiler
    if not files:
        parser.error(f"{args.pytorch} has no files {' '.join(args.files)}")
    total: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    for file in files:
        torch, ours = (outcomes(file, engine, args.ranks, args.timeout) for engine in ("torch", "unshard"))
        valid = {test for test, (outcome, _) in torch.items() if outcome == "passed"}
        passed = {test for test in valid if ours.get(test, ("",))[0] == "passed"}
        count = {"tests": len(torch), "torch": len(valid), "unshard": len(passed)}
        total.update(count)
        print(f"{file.name:44} {show(count)}", flush=True)
        for test in sorted(valid - passed):
            outcome, reason = ours.get(test, ("lost", ""))
            kind = next(name for name, pattern in KINDS.items() if re.search(pattern, reason))
            kinds[kind] += 1
            print(f"    {outcome}, {kind}: {test}: {reason}", flush=True)
        rows.append({"file": str(file.relative_to(args.pytorch)), "torch": torch, "unshard": ours})
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    print(f"{'total':44} {show(total)}")
    print(*(f"    {number:4} {kind}" for kind, number in kinds.items()), sep="\n")
    return 0 if total["torch"] else 1


def show(count: Any) -> str:
    return f"{count['tests']:4} tests, {count['torch']:4} pass with torch, {count['unshard']:4} of these with unshard"


def outcomes(file: Path, engine: str, ranks: int, timeout: float) -> dict[str, tuple[str, str]]:
    """Run the tests of a file in a process of its own, and return the outcome of each and why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "outcomes")
        arguments = ["--worker", file.resolve(), engine, ranks, timeout, out]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with Path(folder, "log").open("w+") as log:
            command = [sys.executable, __file__, *map(str, arguments)]
            status = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
            log.seek(0)
            why = "" if status == 0 else last_error(log.read())
        lines = out.read_text().splitlines() if out.exists() else []
    found = {test: (outcome, reason) for test, outcome, reason in map(json.loads, lines)}
    return found if status == 0 else {**found, "<file>": ("failed", why)}


def last_error(text: str) -> str:
    """Return the last line that names an exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].split(".")[-1].endswith(("Error", "Exception"))]
    own = [line for line in named if not line.startswith(("RuntimeError: Process ", "RuntimeError: Exception in"))]
    return (own or named or lines or [""])[-1][:300]


# -- in the process of one file -----------------------------------------------------------------------------------


def worker(file: str, engine: str, ranks: str, timeout: str, out: str) -> None:
    import as_cpu

    if engine == "unshard":
        import unshard.dropin

        unshard.dropin.install()
    else:
        as_cpu.let_torch_use_the_cpu()
    as_cpu.pretend(os.path.dirname(file), int(ranks))
    module = importlib.import_module(Path(file).stem)
    with open(out, "a") as sink:
        for test in tests_in(unittest.defaultTestLoader.loadTestsFromModule(module)):
            outcome, reason = run(test, float(timeout), out + ".log")
            print(json.dumps([test.id().partition(".")[2], outcome, reason]), file=sink, flush=True)


def tests_in(suite: Any) -> Iterator[unittest.TestCase]:
    for each in suite:
        yield from tests_in(each) if isinstance(each, unittest.TestSuite) else [each]


def run(test: unittest.TestCase, timeout: float, log: str) -> tuple[str, str]:
    """Run one test in a forked process group, which is killed at the end."""
    child = os.fork()
    if child == 0:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        result = unittest.TestResult()
        try:
            unittest.TestSuite([test]).run(result)
            print(*(text for _, text in result.errors + result.failures), flush=True)
        finally:
            good = result.testsRun and not result.errors and not result.failures and not result.unexpectedSuccesses
            os._exit(1 if not good else 2 if result.skipped else 0)
    deadline, status = time.monotonic() + timeout, None
    while status is None and time.monotonic() < deadline:
        done, found = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(found) if done else None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # ranks that outlive their test
    if status is None:
        os.waitpid(child, 0)
        return "timeout", f"more than {timeout:.0f} s"
    outcome = {0: "passed", 1: "failed", 2: "skipped"}.get(status, f"ended with {status}")
    return outcome, "" if status in (0, 2) else last_error(Path(log).read_text(errors="replace"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main())
