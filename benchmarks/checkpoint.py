"""Saving and loading checkpoints: time that training is blocked, total time, host memory; beside PyTorch's DCP.

    python -m benchmarks.checkpoint --place gloo --world 2 --cases 100m:1x32:fp32 --bound 256

A model with the state of AdamW. `save` and `saver` are unshard's (`unshard.checkpoint.save`, `Saver` with `prepare`);
`unprepared` is a saver without `prepare`, `bounded` one with `host_bytes`. `dcp` and `dcp-async` are
`torch.distributed.checkpoint.save` and `async_save` of FSDP2's model, with `get_state_dict`. They save in turn, in
every round. `first` is how long the first save blocks training, `blocked` the others, `total` until the checkpoint is
published, `load` a load of it, mostly from the page cache. All of them wait until the bytes are on the disk (DCP's
`sync_files`, its default); DCP has no checksums. `host` is the peak of the process's memory in a save, with what
earlier ones have kept; drivers may keep pinned memory outside of it. Times are medians, of the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from . import measure, places, sides, tables
from .command import ParamGroup, parser_for
from .models import Case
from .places import Place
from .sides import Training
from .tables import Row

COLUMNS = {"case": "case", "side": "how", "mib": "MiB", "first": "first s", "blocked": "blocked s", "total": "total s"}
COLUMNS |= {"host_mib": "host MiB", "load": "load s"}
HOWS = dict.fromkeys(("save", "saver", "unprepared", "bounded"), "unshard")
HOWS |= dict.fromkeys(("dcp", "dcp-async"), "fsdp2")


def arguments() -> argparse.ArgumentParser:
    parser = parser_for(__doc__, cases="1b:1x1024", cpu_cases="10m:1x32:fp32", one_rank=True)
    parser.add_argument("--hows", default=",".join(HOWS), help="which of them")
    parser.add_argument("--rounds", type=int, default=3, help="saves, of which the first is shown on its own")
    parser.add_argument("--repeats", type=int, default=1, help="build everything and save so many times; medians")
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
        self._saver = None if how == "save" else checkpoint.Saver(path, host_bytes=host_bytes)
        if self._saver is not None and how != "unprepared":
            self._saver.prepare(**self._parts)
            self._saver.wait()

    def save(self, step: int) -> None:
        if self._saver is None:
            self._checkpoint.save(self._path, step=step, **self._parts)
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
        dcp.load(state, checkpoint_id=next(self._path.iterdir()))
        set_state_dict(
            *(self._training.model, self._training.optimizer),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class Subject:
    """One way to save, its folder, and what was measured of it."""

    def __init__(self, how: str, training: Training, path: Path, bound: int):
        self._path, memory = path, _reset_peak()
        self._saves = (Dcp if HOWS[how] == "fsdp2" else Unshard)(how, training, path, bound)
        self._blocked: list[float] = []
        self._total: list[float] = []
        self._kept, self._peak = _status("VmRSS") - memory, 0

    def save(self, step: int, place: Place) -> None:
        place.meet()
        memory, began = _reset_peak(), time.perf_counter()
        self._saves.save(step)
        saved = time.perf_counter()
        self._saves.wait()
        ended = time.perf_counter()
        self._peak = max(self._peak, self._kept + _status("VmHWM") - memory)
        self._kept += _status("VmRSS") - memory
        self._blocked.append(place.slowest(saved - began))
        self._total.append(place.slowest(ended - began))
        if place.speaks:  # large checkpoints take minutes
            last = f"blocked {self._blocked[-1]:.3f} s, total {self._total[-1]:.3f} s"
            print(f"  {self._path.name} {step}: {last}", file=sys.stderr, flush=True)

    def load(self, place: Place) -> Row:
        """Load, and return everything that was measured."""
        mib = sum(each.stat().st_size for each in self._path.rglob("*") if each.is_file()) / measure.MIB
        first, blocked, total = self._blocked[0], statistics.median(self._blocked[1:]), self._total[1:]
        row = {"mib": mib, "first": first, "blocked": blocked, "total": statistics.median(total)}
        return {**row, "host_mib": self._peak / measure.MIB, "load": _timed(self._saves.load, place)}

    def delete(self, place: Place) -> None:
        """Outside of the time: to delete may take as long as to save."""
        place.meet()
        if place.speaks:
            for each in self._path.iterdir():
                shutil.rmtree(each)
            os.sync()


def compare(place: Place, options: argparse.Namespace) -> dict[str, list[Row]]:
    hows = [each for each in options.hows.split(",") if each]
    if unknown := [each for each in hows if each not in HOWS]:
        raise ValueError(f"--hows {','.join(unknown)}: there are {', '.join(HOWS)}")
    if options.rounds < 2:
        raise ValueError("--rounds must be at least 2: the first is shown on its own")
    rows: list[Row] = []
    for case in options.cases:
        with _folder(place, options) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            repeats = [_rows(case, hows, folder / str(each), place, options) for each in range(options.repeats)]
        found = [_median(each) for each in zip(*repeats, strict=True)]
        tables.show(place, f"{case}, {place}", found, COLUMNS)
        rows += found
    return {"rows": rows}


def _rows(case: Case, hows: list[str], folder: Path, place: Place, options: argparse.Namespace) -> list[Row]:
    trainings = {side: sides.start(side, case, place) for side in sorted({HOWS[how] for how in hows})}
    parts = [ParamGroup(case, how) for how in hows]
    subjects: dict[str, Subject] = {}
    for number in range(options.rounds):
        for training in trainings.values():
            _change(training)
        for part in parts:
            if part.failed:
                continue
            with part.attempt():
                if not number:
                    path = folder / part.side
                    path.mkdir(parents=True, exist_ok=True)
                    subjects[part.side] = Subject(part.side, trainings[HOWS[part.side]], path, options.bound)
                subjects[part.side].save(number, place)
                if number == options.rounds - 1:
                    part.row |= subjects[part.side].load(place)
                subjects[part.side].delete(place)
    subjects.clear()
    trainings.clear()
    measure.release(place)
    return [part.row for part in parts]


def _median(rows: tuple[Row, ...]) -> Row:
    """Of all figures; or the row that has failed."""
    failed = [row for row in rows if "error" in row]
    figures = {key for key, value in rows[0].items() if isinstance(value, float)}
    return failed[0] if failed else rows[0] | {key: statistics.median(row[key] for row in rows) for key in figures}


@torch.no_grad()
def _change(training: Training) -> None:
    """Change the model and the optimizer's state; a forward and backward over Gloo would take longer than all saves."""
    for parameter in training.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    training.update()


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


def _reset_peak() -> int:
    """Bytes that the process has in memory now, from which its peak is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    place = places.chosen(options)
    tables.save(options.json, place, options, **places.run(place, compare, options))


if __name__ == "__main__":
    main()
