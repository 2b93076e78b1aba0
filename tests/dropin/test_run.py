"""Programs that are started with `unshard run`: what they see, and that they compute what they would on our own API."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from bed import pool
from bed.programs import DROPIN, TORCHRUN, python
from bed.world import mostly_slow
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from unshard import cli
from unshard.comm.process_group import EXIT_DELAY

SCRIPTS = Path(__file__).parent / "scripts"


class Outcome:
    """The files that a run of a training program left in its folder."""

    def __init__(self, out: Path):
        told = json.loads((out / "losses.json").read_text())
        self.engine, self.losses = told["engine"], told["losses"]
        self.full = torch.load(out / "full.pt")
        dcp_to_torch_save(out / "checkpoint", out / "whole.pt")
        self.saved = flat(torch.load(out / "whole.pt"))

    def assert_equal(self, other: Outcome) -> None:
        """Bit by bit: the same engine did the same."""
        assert self.losses == other.losses
        for mine, theirs in ((self.full, other.full), (self.saved, other.saved)):
            assert mine.keys() == theirs.keys() and len(mine) > 10
            for key in mine:
                assert torch.equal(mine[key], theirs[key]) if torch.is_tensor(mine[key]) else mine[key] == theirs[key]

    def assert_close(self, other: Outcome) -> None:
        for mine, theirs in zip(self.losses, other.losses, strict=True):
            assert mine == pytest.approx(theirs, rel=5e-3)
        for mine, theirs in ((self.full, other.full), (self.saved, other.saved)):
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                if torch.is_tensor(value):
                    torch.testing.assert_close(value, theirs[key], rtol=5e-2, atol=2e-3)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {key: value for name, each in items for key, value in flat(each, f"{prefix}{name}/").items()}
    return {prefix: tree}


# What PyTorch's helpers do for its own wrapper, with ours: without the drop-in they do not know it.
OWN_STATES = """
def states_of(model, optimizer):
    if not optimizer.state:
        train(model, optimizer, range(1))  # to have states that can be loaded
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


def restore(model, optimizer, states):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states["optim"]))


def main("""


def on_our_own(source: str) -> str:
    """The program written for unshard instead."""
    own = source.replace("torch.distributed.fsdp", "unshard")
    if "FullyShardedDataParallel" in own:
        own = own.replace("\ndef main(", OWN_STATES)
    assert own != source and "distributed.fsdp" not in own
    return own


def installs_itself(source: str) -> str:
    """The program with everything imported from PyTorch first, and ours put in place after that."""
    before, mark, after = source.partition("# -- the program --\n")
    assert mark
    return f"{before}\nimport unshard.dropin\nunshard.dropin.install()\n{after}"


def ends_slowly(source: str) -> str:
    """The program on PyTorch's engine, which would now and then abort at its end (see `delay_exit`)."""
    return f"import atexit, time\n\natexit.register(time.sleep, {EXIT_DELAY})\n{source}"


def run_main(program: Path, out: Path) -> None:
    """A body of the pool, whose ranks have joined their group already."""
    runpy.run_path(str(program))["main"](out)


def test_same_losses_and_checkpoint_as_on_our_own_api(tmp_path: Path) -> None:
    """The drop-in through torchrun; our own API on ranks of the pool, which have imported everything."""
    path = SCRIPTS / "train_fully_shard.py"
    own, ran = tmp_path / "own", tmp_path / "run"
    joining = '    dist.init_process_group("gloo")\n'
    source = on_our_own(path.read_text())
    assert source.count(joining) == 1
    for each in (own, ran):
        each.mkdir()
    program = own / "program.py"
    program.write_text(source.replace(joining, ""))
    slow_cpu = "ignore:mkldnn_matmul failed:UserWarning"  # one that does not know bfloat16
    pool.shared().run(run_main, 2, {"program": program, "out": own}, filters=[slow_cpu])
    done = python(*TORCHRUN, *DROPIN, path, ran)
    assert done.stderr.count("unshard 0") == 1, done.stderr  # rank 0 says so, on one line
    outcomes = Outcome(own), Outcome(ran)
    assert all(each.engine.startswith("unshard.") for each in outcomes)
    outcomes[1].assert_equal(outcomes[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_fully_shard", "train_wrapper"])
def test_same_losses_and_checkpoint_in_every_way(name: str, tmp_path: Path) -> None:
    """And close to PyTorch's own, for whose API it was written."""
    compare(name, ["torch", "own", "run", "late"], tmp_path)


def compare(name: str, kinds: list[str], tmp_path: Path) -> None:
    path = SCRIPTS / f"{name}.py"
    source = path.read_text()
    outcomes = {}
    ways = {"torch": (ends_slowly(source), []), "own": (on_our_own(source), []), "run": (source, DROPIN)}
    ways["late"] = (installs_itself(source), [])
    for kind in kinds:
        text, through = ways[kind]
        out = tmp_path / kind
        out.mkdir()
        program = path if text is source else out / "program.py"
        if text is not source:
            program.write_text(text)
        done = python(*TORCHRUN, *through, program, out)
        assert done.stderr.count("unshard 0") == len(through) // 2, done.stderr  # rank 0 says so, on one line
        outcomes[kind] = Outcome(out)
    for kind in kinds:
        if kind == "torch":
            assert outcomes[kind].engine.startswith("torch.")
            outcomes["run"].assert_close(outcomes[kind])
        else:
            assert outcomes[kind].engine.startswith("unshard.")
            outcomes[kind].assert_equal(outcomes["own"])


# Torch takes seconds to import, and what Python shows a program does not depend on it.
IMPORTS = """
import sys
engine = "none"
if "unshard" in sys.modules:
    from torch.distributed.fsdp import FSDPModule
    engine = FSDPModule.__module__
"""


def test_the_program_sees_what_python_would_show_it(tmp_path: Path) -> None:
    program = tmp_path / "place" / "program.py"
    program.parent.mkdir()
    (program.parent / "beside.py").write_text(IMPORTS)
    program.write_text(
        "import sys, atexit, json, pickle, beside\n"
        "class Here: pass\n"
        "assert pickle.loads(pickle.dumps(Here())).__class__ is Here\n"
        "main = sys.modules['__main__']\n"
        "@atexit.register\n"
        "def last():\n"
        "    assert main.Here is Here and sys.modules['__main__'] is main\n"
        "    print('last')\n"
        "print(json.dumps([__name__, __file__, sys.argv, sys.path[0], str(__spec__), __package__,\n"
        "    __builtins__.__name__, beside.engine]))\n"
    )

    def shown(*how: Any) -> list[Any]:
        done = python(*how, "place/program.py", "-m", "--flag", cwd=tmp_path)
        first, last = done.stdout.splitlines()
        assert last == "last"
        return json.loads(first)

    *plain, theirs = shown()
    *ours, mine = shown(*DROPIN)
    assert ours == plain
    assert theirs == "none" and mine.startswith("unshard.")


def test_modules(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text(
        f"{IMPORTS}\n"
        "print([__name__, __file__, sys.argv, sys.path[0], __spec__.name, __package__])\n"
        "print(engine)\n"
        "sys.exit(7)\n"
    )
    plain = python("-m", "package.program", "-x", "1", cwd=tmp_path, status=7).stdout.splitlines()
    ours = python(*DROPIN, "-m", "package.program", "-x", "1", cwd=tmp_path, status=7).stdout.splitlines()
    assert ours[0] == plain[0] and ours[1].startswith("unshard.")


def test_errors_are_the_programs_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("def fail():\n    raise ValueError('of the program')\n\nfail()\n")
    done = python(*DROPIN, program, status=1)
    *_, above, mark, last = done.stderr.strip().splitlines()
    assert last == "ValueError: of the program" and "raise ValueError" in above + mark
    assert f'File "{program}", line 4, in <module>' in done.stderr
    assert f'File "{program}", line 2, in fail' in done.stderr
    assert done.stderr.startswith("unshard ")


# Where a process imports PyTorch's FSDP first: by itself, in the middle of other modules of torch, as a submodule.
FIRST_IMPORTS = [
    "from torch.distributed.fsdp import FSDPModule",
    "import torch.distributed.tensor.parallel; from torch.distributed.fsdp import FSDPModule",
    "import torch.distributed.checkpoint.state_dict as s; assert s.FSDP.__module__.startswith('unshard.')\n"
    "from torch.distributed._composable.fsdp.fully_shard import FSDPModule",
]


@pytest.mark.parametrize("first", mostly_slow(range(len(FIRST_IMPORTS)), [0]))
def test_child_processes(first: int, tmp_path: Path) -> None:
    """A launcher that starts Python again, as Lightning's does, gets ours in every process, and grandchildren too."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.customized = True\n")
    child = "import sys; assert sys.customized and 'torch' not in sys.modules; here = list(sys.path)\n{}\n" + (
        "import subprocess; assert not [each for each in here if 'dropin/child_processes' in each]\n"
        "print(FSDPModule.__module__, flush=True)\n"
    )
    started = child.format(FIRST_IMPORTS[first])
    if first == 0:
        started = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {started!r}], check=True)"
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, sys\n"
        f"os.environ['PYTHONPATH'] += os.pathsep + {str(tmp_path)!r}\n"
        f"subprocess.run([sys.executable, '-c', {started!r}], check=True)\n"
    )
    assert python(*DROPIN, program).stdout.split() == ["unshard.fsdp2.module"]


@pytest.mark.slow
def test_several_processes(tmp_path: Path) -> None:
    """Options of torchrun start that many processes; without them there is one."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from torch.distributed.fsdp import FSDPModule\n"
        "print(FSDPModule.__module__, sys.argv[1:], os.environ.get('WORLD_SIZE'), flush=True)\n"
    )
    cli_run = ["-m", "unshard.cli", "run"]
    both = python(*cli_run, "--standalone", "--nproc-per-node", "2", program, "--lr", "-m")
    assert both.stdout.splitlines() == ["unshard.fsdp2.module ['--lr', '-m'] 2"] * 2
    assert both.stderr.count("replaces torch") == 1
    one = python(*cli_run, "--nproc-per-node=1", "--standalone", "-m", "program", "-x", cwd=tmp_path)
    assert one.stdout.splitlines() == ["unshard.fsdp2.module ['-x'] 1"]
    assert python(*cli_run, program).stdout.splitlines() == ["unshard.fsdp2.module [] None"]


def test_what_is_imported(tmp_path: Path) -> None:
    """The drop-in imports no more of PyTorch than its FSDP does, and searches few modules for references."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch.distributed.fsdp\n"
        "before = set(sys.modules)\n"
        "import unshard\n"
        "print(sorted(each for each in set(sys.modules) - before if each.split('.')[0] != 'unshard'))\n"
        "import unshard.dropin\n"
        "unshard.dropin.install()\n"
        "heavy = ['torch._dynamo', 'torch._inductor', 'torch.distributed.checkpoint',\n"
        "    'torch.distributed.pipelining', 'torch.distributed.run']\n"
        "print([each for each in heavy if each in sys.modules])\n"
        "searched = {name.split('.')[0] for name, _ in unshard.dropin._loaded()}\n"
        "print(sorted(searched & {'json', 'logging', 'numpy', 'sympy', 'typing'}))\n"
    )
    assert python(program).stdout.splitlines() == ["[]", "[]", "[]"]


@pytest.mark.slow
def test_processes_that_are_spawned(tmp_path: Path) -> None:
    """They import the main module again, with the drop-in installed."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch.multiprocessing as mp\n"
        "from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy\n"
        "def work(number, policy):\n"
        "    assert type(policy) is MixedPrecisionPolicy\n"
        "    print(FSDPModule.__module__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(work, (MixedPrecisionPolicy(),), nprocs=1)\n"
    )
    done = python(*DROPIN, program)
    assert done.stdout.splitlines() == ["unshard.fsdp2.module"]
    assert done.stderr.count("replaces torch") == 1


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == cli.run(["-m"]) == cli.run(["-m", "-x"]) == 2
    assert "usage: unshard run" in capsys.readouterr().err
    assert cli.run(["--no-python", "program"]) == 2
    assert "--no-python" in capsys.readouterr().err
    assert cli.run(["--no-such-option", "program.py"]) == 2
    assert capsys.readouterr().err.startswith("unshard run: unrecognized arguments: --no-such-option. See ")
    assert cli.run(["no_such_file.py"]) == 2
    assert "no file 'no_such_file.py'" in capsys.readouterr().err
    for count, script in (("2", "no_such_file.py"), ("0", __file__), ("-1", __file__), ("two", __file__)):
        assert cli.run([f"--nproc-per-node={count}", script]) == 2
        error = capsys.readouterr().err
        assert "no file" in error if script != __file__ else f"--nproc-per-node {count}: " in error
        assert len(error.splitlines()) == 1
