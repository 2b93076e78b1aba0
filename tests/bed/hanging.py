"""What can keep the last rank from joining a collective. Each cause runs on every rank, until the table has been made.

The ranks then end at once (`ENDED`), because they cannot get back in step. A test starts them in a pool of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
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
from unshard.tools import explain_hangs

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


def run(cause: Callable[..., None], file: str, seconds: float) -> None:
    """Three steps on all ranks; then `cause` on the last one, while the others take further steps."""
    threading.Thread(target=_leave, args=(Path(file),), daemon=True).start()
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
