"""Saving and loading checkpoints: time that training is blocked, total time, host memory; beside PyTorch's DCP.

    python -m benchmarks.checkpoint --place gloo --cases 10m:1x32:fp32 --bound 16

A model with AdamW after two steps. `save` and `saver` are unshard's (`unshard.checkpoint.save`, `Saver`), `bounded` is
a saver with `host_bytes`; `dcp` and `dcp-async` are `torch.distributed.checkpoint.save` and `async_save` of FSDP2's
model, with `get_state_dict`. `first` is how long the first save blocks training, `blocked` the others, `total` until
the checkpoint is published, `load` a load of it, mostly from the page cache. `host` is the peak of the process's memory
over all saves less what it had before; drivers may keep pinned memory outside of it. Times are of the slowest rank.
It has run on a CPU only.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from . import measure, places, sides, tables
from .command import ParamGroup, parser_for
from .places import Place
from .sides import Training
from .tables import Row

COLUMNS = {"case": "case", "side": "how", "mib": "MiB", "first": "first s", "blocked": "blocked s", "total": "total s"}
COLUMNS |= {"host_mib": "host MiB", "load": "load s"}
HOWS = {"save": "unshard", "saver": "unshard", "bounded": "unshard", "dcp": "fsdp2", "dcp-async": "fsdp2"}


def arguments() -> argparse.ArgumentParser:
    parser = parser_for(__doc__, cases="1b:1x1024", cpu_cases="10m:1x32:fp32", one_rank=True)
    parser.add_argument("--hows", default=",".join(HOWS), help="which of them")
    parser.add_argument("--rounds", type=int, default=3, help="saves, of which the first is shown on its own")
    parser.add_argument("--bound", type=int, default=1024, help="host memory of a bounded save on each rank, in MiB")
    parser.add_argument("--folder", help="save there; by default to a temporary folder")
    return parser


class Unshard:
    """`unshard.checkpoint.save`, or a saver."""

    def __init__(self, how: str, training: Training, path: Path, bound: int):
        from unshard import checkpoint

        self._checkpoint, self._path = checkpoint, path
        self._parts: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
        host_bytes = bound * measure.MIB if how == "bounded" else None
        self._saver = None if how == "save" else checkpoint.Saver(path, keep_last=1, host_bytes=host_bytes)

    def save(self, step: int) -> None:
        if self._saver is None:
            self._checkpoint.save(self._path, step=step, keep_last=1, **self._parts)
        else:
            self._saver.save(step=step, **self._parts)

    def wait(self) -> None:
        if self._saver is not None:
            self._saver.wait()

    def load(self) -> None:
        self._checkpoint.load(self._path, **self._parts)


class Dcp:
    """`torch.distributed.checkpoint`, as its documentation has it."""

    def __init__(self, how: str, training: Training, path: Path, bound: int):
        self._training, self._path, self._asynchronous = training, path, how == "dcp-async"
        # async_save needs a process group of the CPU.
        self._group = dist.new_group(backend="gloo") if self._asynchronous else None
        self._under_way: Any = None

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._training.model, self._training.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int) -> None:
        folder = self._path / f"{step}"
        if self._asynchronous:
            self._under_way = dcp.async_save(self._state(), checkpoint_id=folder, process_group=self._group)
        else:
            dcp.save(self._state(), checkpoint_id=folder)

    def wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def load(self) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=max(self._path.iterdir(), key=lambda each: int(each.name)))
        set_state_dict(
            *(self._training.model, self._training.optimizer),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def compare(place: Place, options: argparse.Namespace) -> dict[str, list[Row]]:
    hows = [each for each in options.hows.split(",") if each]
    if unknown := [each for each in hows if each not in HOWS]:
        raise ValueError(f"--hows {','.join(unknown)}: there are {', '.join(HOWS)}")
    rows: list[Row] = []
    for case in options.cases:
        found = []
        for how in hows:
            part = ParamGroup(case, how)
            with part.attempt(), _folder(place, options) as path, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                part.row |= _measure(how, sides.start(HOWS[how], case, place), path, place, options)
            measure.release(place)
            found.append(part.row)
        tables.show(place, f"{case}, {place}", found, COLUMNS)
        rows += found
    return {"rows": rows}


def _measure(how: str, training: Training, path: Path, place: Place, options: argparse.Namespace) -> Row:
    for _ in range(2):
        training.step()
    kind = Dcp if HOWS[how] == "fsdp2" else Unshard
    subject = kind(how, training, path, options.bound)
    blocked, total, peak, memory = [], [], 0, _reset_peak()
    for step in range(1, options.rounds + 1):
        _reset_peak()  # without the step of training in between
        place.meet()
        began = time.perf_counter()
        subject.save(step)
        saved = time.perf_counter()
        subject.wait()
        ended = time.perf_counter()
        peak = max(peak, _peak())
        blocked.append(place.slowest(saved - began))
        total.append(place.slowest(ended - began))
        place.meet()
        if place.speaks and kind is Dcp and step > 1:
            shutil.rmtree(path / f"{step - 1}")
        training.step()
    row = {"mib": _bytes_in(path) / measure.MIB, "first": blocked[0], "blocked": statistics.median(blocked[1:])}
    row |= {"total": statistics.median(total[1:]), "host_mib": (peak - memory) / measure.MIB}
    return {**row, "load": _timed(subject.load, place)}


def _timed(work: Callable[[], None], place: Place) -> float:
    """The shorter one of two times."""
    times = []
    for _ in range(2):
        place.meet()
        began = time.perf_counter()
        work()
        place.synchronize()
        times.append(place.slowest(time.perf_counter() - began))
    return min(times)


@contextlib.contextmanager
def _folder(place: Place, options: argparse.Namespace) -> Iterator[Path]:
    """The same new one on all ranks."""
    found = [tempfile.mkdtemp(prefix="unshard_checkpoint_", dir=options.folder) if place.speaks else None]
    if place.has_other_ranks:
        dist.broadcast_object_list(found)
    try:
        yield Path(str(found[0]))
    finally:
        place.meet()
        if place.speaks:
            shutil.rmtree(str(found[0]), ignore_errors=True)


def _bytes_in(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def _reset_peak() -> int:
    """Bytes that the process has in memory now, from which its peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    place = places.chosen(options)
    tables.save(options.json, place, options, **places.run(place, compare, options))


if __name__ == "__main__":
    main()
