"""What can keep the last rank from joining a collective. Each cause runs on every rank, until the table has been made.

The ranks then end at once (`ENDED`), because they cannot get back in step. A test starts them in a pool of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bed.branches import Branches, sharded
from bed.stack import batch
from torch import nn
from torch.utils.data import DataLoader

from unshard import checkpoint
from unshard.errors import UnshardError
from unshard.tools import explain_hangs, hangs

ENDED = 7
LONG = 600.0
SOON = 1.5  # long enough for an announcement


def device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def step(model: nn.Module, which: list[int], rows: int = 1) -> None:
    for _ in range(rows):
        outputs = model(batch().to(device()), which)
        sum(outputs[number].square().mean() for number in which).backward()


def raises(model: nn.Module, *unused: object) -> None:
    handle = model.blocks[1].register_forward_pre_hook(bad_data)
    with contextlib.suppress(ValueError):
        step(model, [0, 1, 2])
    handle.remove()
    time.sleep(LONG)


def bad_data(*unused: object) -> None:
    raise ValueError("bad data")


def sleeps(*unused: object) -> None:
    time.sleep(LONG)


def takes_another_branch(*unused: object) -> None:
    evaluates()


def evaluates() -> None:
    limit, values = time.monotonic() + LONG, torch.ones(64)
    while time.monotonic() < limit:
        values = values.cos()


def is_killed(*unused: object) -> None:
    threading.Timer(SOON, os.kill, (os.getpid(), signal.SIGKILL)).start()
    time.sleep(LONG)


def exits_early(*unused: object) -> None:
    atexit._run_exitfuncs()
    os._exit(0)


class SlowData:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LONG)
        return torch.zeros(1)


def loads_data(*unused: object) -> None:
    for _ in DataLoader(SlowData()):  # type: ignore[arg-type]
        pass


def is_stopped(*unused: object) -> None:
    threading.Timer(SOON, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    time.sleep(LONG)


def deadlocks(*unused: object) -> None:
    lock, held = threading.Lock(), threading.Event()

    def keeps_the_lock() -> None:
        with lock:
            held.set()
            time.sleep(LONG)

    threading.Thread(target=keeps_the_lock, name="keeper", daemon=True).start()
    held.wait()
    with lock:
        pass


def holds_the_global_lock(*unused: object) -> None:
    time.sleep(SOON)
    ctypes.PyDLL(None).sleep(60)


def runs_another_model(model: nn.Module, other: nn.Module, *unused: object) -> None:
    step(other, [0, 1, 2])


def gets_longer_batches(model: nn.Module, other: nn.Module, optimizer: Any) -> None:
    """Which it cuts into more parts."""
    step(model, [0, 1, 2], rows=2)
    optimizer.step()


def skips_a_unit(model: nn.Module, *unused: object) -> None:
    step(model, [0, 2])


class Reader:
    """The state of a data loader, during whose call the process is killed."""

    def state_dict(self) -> dict[str, int]:
        if is_last():
            time.sleep(SOON)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"row": 0}


def crashes_while_saving(model: nn.Module, *unused: object) -> None:
    checkpoint.save(sys.argv[-1], model=model, step=1, data=Reader())


# What the table says about the last rank: its state, its line, and the unit that the others wait for.
CAUSES: list[tuple[Callable[..., None], str, str, str]] = [
    (sleeps, "sleeping, at the same line", "in sleeps", r"\(root\)"),
    (takes_another_branch, "computing|its line changes", "in evaluates", r"\(root\)"),
    (raises, "raised ValueError: bad data", "in raises", r"blocks\.[12]"),
    (is_killed, r"dead: .*(SIGKILL|is gone)", "in is_killed", r"\(root\)"),
    (exits_early, "has ended", "in exits_early", r"\(root\)"),
    (loads_data, "in its data loader, at the same line", "in __getitem__", r"\(root\)"),
    (is_stopped, r"stopped \(SIGSTOP\)", "in is_stopped", r"\(root\)"),
    (deadlocks, "deadlocked.*lock", "in deadlocks", r"\(root\)"),
    (holds_the_global_lock, "silent .*global lock", "in holds_the_global_lock", r"\(root\)"),
    (runs_another_model, "", "", r"\(root\)"),
    (gets_longer_batches, "", "", ""),
    (skips_a_unit, "", "", "blocks"),
    (crashes_while_saving, "dead: .* it was saving a checkpoint", "in state_dict", ""),
]


def check_report(report: dict[str, Any], cause: Callable[..., None], size: int) -> None:
    """The report names the last rank, its state and its line."""
    _, state, line, unit = next(each for each in CAUSES if each[0] is cause)
    assert report["kind"] == "hang" and report["missing"] == [size - 1], report["finding"]
    assert [row["rank"] for row in report["rows"]] == list(range(size))
    last, first = report["rows"][-1], report["rows"][0]
    assert re.search(state, last["state"]), last
    assert re.search(rf"(hanging|branches).py:\d+ {line}", last["line"]), last
    assert re.search(unit, report["unit"]), report["finding"]
    assert first["pid"] != last["pid"] > 0 and first["host"] == last["host"] != ""


def run(cause: Callable[..., None], file: str, seconds: float, hosts: bool = False) -> None:
    """Three steps on all ranks; then `cause` on the last one, while the others take further steps.

    `hosts`: rank 0 seems to be on another host than the others.
    """
    threading.Thread(target=_leave, args=(Path(file),), daemon=True).start()
    if hosts:
        hangs.kernel = lambda: f"kernel {dist.get_rank() > 0}"  # type: ignore[assignment]
    explain_hangs(seconds, file)
    model, other = (sharded(Branches().to(device())) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters())
    for each in (model, model, model, other):
        step(each, [0, 1, 2])
        optimizer.step()
    dist.barrier()
    try:
        if cause is crashes_while_saving:
            sys.argv.append(f"{file}.checkpoints")
            cause(model)
        elif is_last():
            cause(model, other, optimizer)
        for _ in range(3):
            step(model, [0, 1, 2])
            optimizer.step()
            if device().type == "cuda":
                torch.cuda.synchronize()
    except UnshardError as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
    time.sleep(LONG)


def _leave(file: Path) -> None:
    while not file.exists():
        time.sleep(0.1)
    time.sleep(0.3)  # for what the reporting rank prints
    report = json.loads(file.read_text())
    for row in report["rows"]:
        if row["rank"] in report["missing"]:  # it may be unable to end by itself
            with contextlib.suppress(ProcessLookupError):
                os.kill(row["pid"], signal.SIGKILL)
    os._exit(ENDED)


def main() -> None:
    """Run one rank in a program of its own: `python -m bed.hanging CAUSE FILE SECONDS`, with torchrun's variables."""
    name, file, seconds = sys.argv[1:]
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    run(globals()[name], file, float(seconds))


if __name__ == "__main__":
    main()
