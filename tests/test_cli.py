"""The command `unshard` answers at once, says what is wrong, and ends quietly when its reader or its user leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bed.programs import DROPIN, PACKAGES, python
from torch import nn

from unshard import __version__, checkpoint, cli

# Help, the version and mistakes: arguments, exit status, stream, and what is said.
ANSWERS = [
    ("--help", 0, "out", "usage: unshard COMMAND"),
    ("--version", 0, "out", f"unshard {__version__} (torch "),
    ("run --help", 0, "out", "usage: unshard run [--explain-hangs SECONDS|off] script.py"),
    ("plan --help", 0, "out", "usage: unshard plan "),
    ("checkpoint --help", 0, "out", "usage: unshard checkpoint "),
    ("checkpoint diff --help", 0, "out", "usage: unshard checkpoint diff "),
    ("export --help", 0, "out", "usage: unshard export "),
    ("", 2, "err", "usage: unshard COMMAND"),
    ("run", 2, "err", "usage: unshard run "),
    ("run --explain-hangs 5", 2, "err", "usage: unshard run "),
    ("run --explain-hangs soon x.py", 2, "err", "unshard run: --explain-hangs expects a number of seconds or `off`, "),
    ("checkpoint", 2, "err", "usage: unshard checkpoint "),
    ("walk", 2, "err", "unshard: unknown command 'walk'. Known: run, plan, verify, precision, checkpoint, export, "),
    ("chekpoint x", 2, "err", "unshard: unknown command 'chekpoint'. Did you mean `unshard checkpoint`?"),
    ("train.py", 2, "err", "unshard: unknown command 'train.py'. Did you mean `unshard run train.py`?"),
    ("--verison", 2, "err", "unshard: unknown option '--verison'. Did you mean `unshard --version`?"),
    (
        "checkpoint inspct x",
        2,
        "err",
        "unshard checkpoint: unknown command 'inspct'. Did you mean `unshard checkpoint ",
    ),
    ("checkpoint verify", 2, "err", "unshard checkpoint verify: the following arguments are required: PATH."),
    ("checkpoint diff a", 2, "err", "unshard checkpoint diff: the following arguments are required: PATH."),
    ("checkpoint verify a --x", 2, "err", "unshard checkpoint verify: unknown option '--x'. Known: --help, --json, "),
    ("export a", 2, "err", "unshard export: the following arguments are required: FOLDER."),
    (
        "export a b --datatype=x",
        2,
        "err",
        "unshard export: unknown option '--datatype'. Did you mean `unshard expo",
    ),
    ("plan a:b", 2, "err", "unshard plan: the following arguments are required: --world."),
    ("plan a:b --world 0", 2, "err", "unshard plan: argument --world: expected a positive integer, got '0'."),
    ("plan a:b --world 4 --mesh 2x", 2, "err", "unshard plan: argument --mesh: expected a positive integer, got ''."),
    (
        "plan a:b --world 4 --device-memory 80GX",
        2,
        "err",
        "unshard plan: argument --device-memory: expected a size",
    ),
    ("verify a:b --ranks 2,two", 2, "err", "unshard verify: argument --ranks: expected a positive integer, got 'two'."),
    ("verify a:b --batch 4x-1", 2, "err", "unshard verify: argument --batch: expected a positive integer, got '-1'."),
    ("report", 2, "err", "unshard report: the following arguments are required: PATH."),
    (
        "doctor --nproc-per-node none",
        2,
        "err",
        "unshard doctor: argument --nproc-per-node: expected a positive integer",
    ),
]

WITHOUT_TORCH = """
import sys
from unshard.cli import main
for arguments in {arguments!r}:
    sys.argv = ["unshard", *arguments.split()]
    try:
        main()
    except SystemExit:
        pass
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(("arguments", "status", "stream", "said"), ANSWERS)
def test_answers(
    arguments: str,
    status: int,
    stream: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["unshard", *arguments.split()])
    try:
        found: object = cli.main()
    except SystemExit as end:
        found = end.code or 0
    told = capsys.readouterr()
    assert found == status
    assert getattr(told, stream).startswith(said) and not getattr(told, "err" if stream == "out" else "out")
    assert said.startswith("usage") or len(getattr(told, stream).splitlines()) == 1


def test_answers_do_not_import_torch() -> None:
    """Its import takes seconds."""
    done = python("-c", WITHOUT_TORCH.format(arguments=[each for each, *_ in ANSWERS]))
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("command", ["verify", "inspect", "diff", "export"])
def test_missing_paths(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export"] if command == "export" else ["checkpoint", command]
    paths = [str(tmp_path / "nowhere")] * (2 if command in ("diff", "export") else 1)
    monkeypatch.setattr(sys, "argv", ["unshard", *words, *paths])
    assert cli.main() == 2
    assert capsys.readouterr().err.startswith(f"unshard {' '.join(words)}: There is no checkpoint in {paths[0]}")


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    """As `head` does: no traceback, and the status of a program that SIGPIPE ended."""
    checkpoint.save(tmp_path, model=nn.Linear(2, 2), step=1)
    for words in (["checkpoint", "inspect", tmp_path], ["--help"]):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "unshard", *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": PACKAGES}
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=900, env=environment)
        os.close(writing)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(path: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "verify", stopped)
    monkeypatch.setattr(sys, "argv", ["unshard", "checkpoint", "verify", "x"])
    assert cli.main() == 128 + signal.SIGINT
    assert capsys.readouterr().err == "unshard checkpoint: interrupted.\n"


SHARDS = """
import sys
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if "two" in sys.argv:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
elif "wrapper" in sys.argv:
    FullyShardedDataParallel(nn.Linear(2, 2))
dist.destroy_process_group()
if "exit" in sys.argv:
    sys.exit()
if "fail" in sys.argv:
    sys.exit("failed")
"""


@pytest.mark.parametrize(
    ("options", "status", "last"),
    [
        ("two exit", 0, "unshard sharded 2 units."),
        pytest.param("wrapper", 0, "unshard sharded 1 unit.", marks=pytest.mark.slow),
        (
            "nothing",
            0,
            "unshard sharded nothing: this process called neither fully_shard nor Fully",
        ),
        pytest.param("fail", 1, "failed", marks=pytest.mark.slow),
    ],
)
def test_run_says_what_was_sharded(options: str, status: int, last: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHARDS)
    lines = python("-W", "ignore", *DROPIN, program, *options.split(), status=status).stderr.splitlines()
    assert lines[0].startswith(f"unshard {__version__} replaces torch.distributed.fsdp")
    assert lines[-1].startswith(last)
