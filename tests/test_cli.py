"""The command `unshard`: answers at once, exit codes, JSON, one line for bad input, and what it passes to tools."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed.programs import PACKAGES, python
from torch import nn

from unshard import __version__, checkpoint, cli, tools
from unshard.cli import output
from unshard.tools.program import Program

# Help, the version and mistakes: arguments, exit status, stream, and what is said.
ANSWERS = [
    ("--help", 0, "out", "usage: unshard COMMAND"),
    ("--version", 0, "out", f"unshard {__version__} (torch "),
    ("run --help", 0, "out", "usage: unshard run [--explain-hangs SECONDS[:FILE]|off] script.py"),
    ("plan --help", 0, "out", "usage: unshard plan "),
    ("checkpoint --help", 0, "out", "usage: unshard checkpoint "),
    ("checkpoint diff --help", 0, "out", "usage: unshard checkpoint diff "),
    ("export --help", 0, "out", "usage: unshard export "),
    ("", 2, "err", "usage: unshard COMMAND"),
    ("run", 2, "err", "usage: unshard run "),
    ("run --explain-hangs 5", 2, "err", "usage: unshard run "),
    ("run --explain-hangs soon x.py", 2, "err", "unshard run: --explain-hangs expects SECONDS, SECONDS:FILE "),
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
    ("plan a:b --wrold 4", 2, "err", "unshard plan: unknown option '--wrold'. Did you mean `unshard plan --world`?"),
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


# -- results and exit codes -----------------------------------------------------------------------------------------


def unshard(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["unshard", *map(str, words)])
    return cli.main()


class Found:
    """Stands for the result of a tool."""

    def __init__(self, kind: str, **values: Any):
        self.values = {"kind": kind, "unshard": __version__, **values}
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        return self.values

    def __str__(self) -> str:
        return f"the text of {self.values['kind']}"


PROGRAM = """
print("imported")
from torch import nn
def build_model():
    print("built")
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
def number():
    return 3
"""

CALLS = [
    (
        "plan {} --world 8 --mesh 2x4 --batch 4x16 --device-memory 1.5GiB",
        {"world": 8, "mesh": (2, 4), "batch": "4x16", "device_memory": 3 * 2**29},
        "fits",
    ),
    (
        "plan {} --world 3 --device-memory 80GB",
        {"world": 3, "mesh": None, "batch": None, "device_memory": 80 * 10**9},
        "fits",
    ),
    (
        "verify {} --ranks 2,3 --steps 5 --batch 2x8 --device cuda",
        {"ranks": (2, 3), "steps": 5, "batch": "2x8", "device": "cuda"},
        "agree",
    ),
    ("verify {}", {"ranks": (2, 3), "steps": 3, "batch": None, "device": "cpu"}, "agree"),
]


@pytest.mark.parametrize(("line", "options", "answer"), CALLS)
@pytest.mark.parametrize("value", [True, False])
def test_plan_and_verify(
    line: str,
    options: dict[str, Any],
    answer: str,
    value: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With a stand-in for the tool. The program prints, and with --json its lines are not on stdout."""
    called = []

    def tool(program: Program, **given: Any) -> Found:
        called.append((program.name, given))
        program.model()
        os.write(1, b"of a child process\n")
        return Found(line.split()[0], peak=float("inf"), **{answer: value})

    monkeypatch.setitem(vars(tools), line.split()[0], tool)
    (tmp_path / "train.py").write_text(PROGRAM)
    words = line.format(f"{tmp_path / 'train.py'}:build_model").split()
    assert unshard(monkeypatch, *words) == (0 if value else 1)
    assert called == [("build_model", options)]
    printed = ["imported", "built", "of a child process"]
    assert sorted(capfd.readouterr().out.splitlines()) == sorted([*printed, f"the text of {words[0]}"])
    assert unshard(monkeypatch, *words, "--json") == (0 if value else 1)
    told = capfd.readouterr()
    assert json.loads(told.out) == {"kind": words[0], "unshard": __version__, "peak": None, answer: value}
    assert sorted(told.err.splitlines()) == sorted(printed)


def test_a_plan_without_device_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(vars(tools), "plan", lambda program, **given: Found("plan", fits=None))
    (tmp_path / "train.py").write_text(PROGRAM)
    assert unshard(monkeypatch, "plan", f"{tmp_path / 'train.py'}:build_model", "--world", 2) == 0


def test_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's FSDP is replaced."""
    shard = "from torch.distributed.fsdp import fully_shard\ndef shard(model):\n    fully_shard(model)\n"
    (tmp_path / "train.py").write_text(PROGRAM + shard)
    words = ("precision", f"{tmp_path / 'train.py'}:build_model")
    assert unshard(monkeypatch, *words) == 0
    assert "Precision of 1 unit, 4 parameters, 30 elements" in capsys.readouterr().out
    assert unshard(monkeypatch, *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["kind", "unshard", "units", "findings"] and told["kind"] == "precision"
    (unit,) = told["units"]
    assert (unit["name"], unit["elements"], unit["stored"], unit["state"]) == ("", 30, "fp32", ["fp32"])
    assert unit["parameters"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert not dist.is_initialized()


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    called = []

    def tool(out: str, *paths: str) -> Path:
        called.append((out, *paths))
        return Path(out)

    monkeypatch.setitem(vars(tools), "report", tool)
    assert unshard(monkeypatch, "report", "a.json", "b", "-o", "c.html") == 0
    assert unshard(monkeypatch, "report", "a.json", "--json") == 0
    assert called == [("c.html", "a.json", "b"), ("report.html", "a.json")]
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "c.html" and json.loads("".join(rest))["path"] == "report.html"


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    called = []

    def tool(*given: Any, say: Any, **options: Any) -> Found:
        called.append((given, options))
        return Found("doctor", ok=not options["quick"])

    monkeypatch.setitem(vars(tools), "doctor", tool)
    assert unshard(monkeypatch, "doctor", "--nproc-per-node", 4) == 0
    assert capsys.readouterr().out == "the text of doctor\n"
    monkeypatch.setenv("RANK", "1")  # rank 0 of the job prints
    assert unshard(monkeypatch, "doctor", "--quick") == 1
    assert called == [((4,), {"quick": False}), ((None,), {"quick": True})] and not capsys.readouterr().out
    assert unshard(monkeypatch, "doctor", "--json") == 0
    assert unshard(monkeypatch, "checkpoint", "inspect", "nowhere", "--json") == 2
    assert not capsys.readouterr().out


def test_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    a = checkpoint.save(tmp_path / "a", model=model, step=1)
    with torch.no_grad():
        model.weight[0, 0] += 1
    b = checkpoint.save(tmp_path / "b", model=model, step=1)

    def told(*words: object, status: int = 0) -> Any:
        assert unshard(monkeypatch, *words, "--json") == status
        return json.loads(capsys.readouterr().out)

    assert told("checkpoint", "verify", a)["complete"] is True
    tensors = told("checkpoint", "inspect", a)["tensors"]
    assert [(each["name"], each["shape"], each["bytes"]) for each in tensors] == [
        ("model/bias", [2], 8),
        ("model/weight", [2, 3], 24),
    ]
    assert told("checkpoint", "diff", a, a)["equal"] is True
    found = told("checkpoint", "diff", a, b, status=1)
    assert found["tensors"][0]["name"] == "model/weight" and found["tensors"][0]["differing"] == 1
    assert told("export", a, tmp_path / "out")["files"] == [str(tmp_path / "out" / "model.safetensors")]
    data = next(Path(a).glob("*.bin"))
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    assert told("checkpoint", "verify", a, status=1)["complete"] is False
    assert unshard(monkeypatch, "checkpoint", "verify", a) == 1
    text = capsys.readouterr()
    assert text.err.startswith("unshard checkpoint verify: ") and "weight" in text.err and not text.out
    (tmp_path / "empty").mkdir()
    for command, more in (("checkpoint inspect", []), ("checkpoint diff", [b]), ("export", [tmp_path / "weights"])):
        assert unshard(monkeypatch, *command.split(), tmp_path / "empty", *more) == 2
        assert re.fullmatch(f"unshard {command}: .*empty.*\n", capsys.readouterr().err)


def test_progress_of_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint.save(tmp_path, model=nn.Linear(1024, 1200, bias=False), step=1)  # two blocks
    monkeypatch.setattr("unshard.checkpoint.reports._PROGRESS_BLOCKS", 1)
    said: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        said.append((done, total))

    (data,) = Path(folder).glob("*.bin")
    total = data.stat().st_size
    checkpoint.verify(folder, progress=progress)
    assert said == [(4 * 2**20, total), (total, total)]
    with data.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    for each in (progress, None):
        with pytest.raises(checkpoint.CheckpointError, match="weight"):
            checkpoint.verify(folder, progress=each)


BAD = {
    "exit": ("import sys; sys.exit(4)", "the file called sys.exit(4) when it was imported. "),
    "broken": (
        "raise OSError('gone')",
        'cannot be imported: OSError: gone. Put code that trains under `if __name__ == "__main__":`.',
    ),
    "number": (PROGRAM, "number() returned int. Return the unsharded nn.Module."),
    "absent": (PROGRAM, "has no function 'absent'. It defines: build_model, number."),
    "build_model": (PROGRAM, "RuntimeError: shapes differ. Add --traceback to see where it was raised."),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tool(program: Program, **given: Any) -> None:
        program.model()
        raise RuntimeError("shapes differ.\nException raised from somewhere in C++")

    monkeypatch.setitem(vars(tools), "plan", tool)
    source, said = BAD[name]
    (tmp_path / "train.py").write_text(source)
    words = ("plan", f"{tmp_path / 'train.py'}:{name}", "--world", 2)
    assert unshard(monkeypatch, *words, "--json") == 2
    told = capsys.readouterr()
    *_, last = told.err.splitlines()
    assert not told.out and last.startswith("unshard plan: ") and said in last
    assert set(told.err.splitlines()[:-1]) <= {"imported", "built"}
    with pytest.raises((Exception, SystemExit)):
        unshard(monkeypatch, *words, "--traceback")
    monkeypatch.setenv("UNSHARD_TRACEBACK", "1")
    with pytest.raises((Exception, SystemExit)):
        unshard(monkeypatch, *words)


TEXT = "Title of a report\n\nunit        n  dtype\n------  -----  -----\na       1,000  fp32\nlonger      2\n\nThe end."


def test_tables_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.show(Found("x"), TEXT)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "1,000", "fp32"] in lines and ["longer", "2"] in lines and ["The", "end."] in lines
    assert any(set("".join(line)) == {"─"} for line in lines)
    output.show(Found("x"), TEXT.replace("------  -----  -----", "  ".join(["-" * 20] * 6)))  # wider than the terminal
    assert "longer      2" in capsys.readouterr().out
    monkeypatch.setattr(output, "has_rich", lambda: False)
    output.show(Found("x"), TEXT)
    assert capsys.readouterr().out == f"{TEXT}\n"


# -- programs -------------------------------------------------------------------------------------------------------


class Reached(Exception):
    pass


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ("", None, "30"),
        ("", "7", "7"),
        ("", "off", None),
        ("--explain-hangs 5", "7", "5"),
        ("--explain-hangs=2.5:hangs.json", None, "2.5:hangs.json"),
        ("--explain-hangs off", "7", None),
    ],
)
@pytest.mark.parametrize("launcher", ["", "--nproc-per-node=2 --standalone"])
def test_run_explains_hangs(
    options: str, before: str | None, after: str | None, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process and in those of torchrun, to which the option is not passed on."""
    name, started = "UNSHARD_EXPLAIN_HANGS", []

    def start(*given: Any, **options: Any) -> None:
        started.append((os.environ.get(name), *given))
        raise Reached

    monkeypatch.setenv(name, "x")  # restored at the end
    monkeypatch.setattr("unshard.dropin.install", start)
    monkeypatch.setattr("torch.distributed.run.main", start)
    program = tmp_path / "program.py"
    program.touch()
    for words in ([*options.split(), *launcher.split()], [*launcher.split(), *options.split()]):
        os.environ.pop(name, None)
        os.environ.update({} if before is None else {name: before})
        with pytest.raises(Reached):
            unshard(monkeypatch, "run", *words, program, "--explain-hangs", "mine")
        assert started[-1][0] == after
        if launcher:
            own = ["-m", "unshard.dropin", str(program), "--explain-hangs", "mine"]
            assert started[-1][1] == [*launcher.split(), *own]


def test_only_the_command_explains_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not `python -m unshard.dropin`, which the command starts after it has set the variable or left it out."""

    def start(**options: Any) -> None:
        raise Reached

    monkeypatch.delenv("UNSHARD_EXPLAIN_HANGS", raising=False)
    monkeypatch.setattr("unshard.dropin.install", start)
    (tmp_path / "program.py").touch()
    with pytest.raises(Reached):
        cli.run([str(tmp_path / "program.py")])
    assert "UNSHARD_EXPLAIN_HANGS" not in os.environ


SHARDS = """
import os, signal, sys, time
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if "two" in sys.argv:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model[0])
    fully_shard(model)
    os.kill(os.getpid(), signal.SIGUSR1)  # ends the program, unless hangs are explained
    while not os.path.exists("hang.json"):
        time.sleep(0.02)
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
    """And explains hangs, although the program uses no name of unshard."""
    program = tmp_path / "program.py"
    program.write_text(SHARDS)
    run = ["-W", "ignore", "-m", "unshard", "run", "--explain-hangs=60:hang.json"]
    lines = python(*run, program, *options.split(), status=status, cwd=tmp_path).stderr.splitlines()
    assert lines[0].startswith(f"unshard {__version__} replaces torch.distributed.fsdp")
    assert lines[-1].startswith(last)
