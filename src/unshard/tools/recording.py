"""Records a run: losses, step times, memory, the gradient scale, and what the sharded model consists of."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .. import __version__
from ..errors import ArgumentError, StateError
from ..torch_private import scale_of
from .precision_plan import ModelPlan, plan_of
from .precision_report import PrecisionReport, surprises_of

RECORDING = "recording"
_SUMMARY = "summary.json"
_NOT_GIVEN = object()
_RESERVED = {"seconds", "scale", "skipped", "why", "allocated", "peak"}


def record(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scaler: Any = None,
) -> Recording:
    """Return a context manager that records a run of the sharded `model` in `folder`. Use it on all ranks.

    Call `step` on the result after each optimizer step. Rank 0 records the loss, the learning rate, the scale and
    memory; the other ranks record their step time and memory. Recording never waits for the device or for other ranks.
    `unshard.tools.report(path, folder)` draws the recording.

    `scaler` is the gradient scaler, whose scale and skipped steps are recorded. Raises an ArgumentError if `model` is
    not sharded.

    Example::

        with record("report", model, optimizer) as recording:
            recording.step(train(model))
    """
    return Recording(folder, model, optimizer, scaler)


class Recording:
    """The result of `record`. Rank `r` writes `folder/rank<r>.jsonl`. At the end, rank 0 writes `summary.json`."""

    def __init__(self, folder: str | os.PathLike[str], model: nn.Module, optimizer: Any, scaler: Any):
        plan = plan_of(model, optimizer)  # raises an error if the model is not sharded
        self.folder = Path(folder)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.device: torch.device = plan.units[0].state.unit.device
        self._model, self._optimizer, self._scaler = model, optimizer, scaler
        self._results: list[Any] = []
        self._pending: deque[_Line] = deque()
        self._file: Any = None
        self._steps, self._clock, self._started = 0, 0.0, ""
        self._scale: float | None = None
        self._is_open = False

    def __enter__(self) -> Recording:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            (self.folder / _SUMMARY).unlink(missing_ok=True)
            scale = None if self._scaler is None else scale_of(self._scaler)
            self._scale = None if scale is None else float(scale)
        self._started = time.strftime("%Y-%m-%d %H:%M")
        self._clock = time.perf_counter()
        self._is_open = True
        return self

    def step(self, loss: Any = _NOT_GIVEN, *, step: int | None = None, **values: Any) -> None:
        """Record the end of a step. Call this once per step, after the optimizer's step and `scaler.update()`.

        `loss` and `values` are numbers or one-element tensors; rank 0 records them. `step` is the number of the step,
        and defaults to the number after the last one. A run that resumes in the same folder passes it.
        """
        if not self._is_open:
            raise StateError("This recording is not open. Call step() inside `with record(...) as recording`.")
        if wrong := _RESERVED & values.keys():
            raise ArgumentError(f"record writes {', '.join(sorted(wrong))} itself. Use other names.")
        # Every rank checks what rank 0 writes, so that a mistake does not stop rank 0 alone.
        values |= {} if loss is _NOT_GIVEN else {"loss": loss}
        values = {name: _plain(name, each) for name, each in values.items()}
        if step is not None:
            has_steps = self._file is not None or bool(self._pending)
            if not isinstance(step, int) or step < 0 or (has_steps and step <= self._steps):
                after = f" after step {self._steps}" if has_steps else ""
                raise ArgumentError(f"step must be a non-negative integer that increases, got {step!r}{after}.")
        now = time.perf_counter()
        self._steps = self._steps + 1 if step is None else step
        line: dict[str, Any] = {"step": self._steps, "seconds": now - self._clock}
        self._clock = now
        if self.rank == 0:
            line |= {"loss": values.pop("loss")} if "loss" in values else {}
            line |= {"lr": self._optimizer.param_groups[0]["lr"]} if self._optimizer is not None else {}
            line |= values
            if self._scaler is not None:
                line["scale"] = scale_of(self._scaler)
        line |= self._memory()
        self._pending.append(_Line(line))
        self._write(wait=False)

    def add(self, result: Any) -> None:
        """Add the result of another tool to the recording: an object with `to_dict()`, or such a dict."""
        if not hasattr(result, "to_dict") and not isinstance(result, dict):
            raise ArgumentError(f"Expected a result of a tool or a dict, got {type(result).__name__}.")
        self._results.append(result)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        self._write(wait=error is None)  # after an error, the device may never finish
        if self._file is not None:
            self._file.close()
            self._file = None
        if self.rank == 0:
            text = json.dumps(self._summary(error))
            (self.folder / _SUMMARY).write_text(text, encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return what all ranks have written to the folder so far."""
        return read_recording(self.folder)

    def __str__(self) -> str:
        return f"Recording in {self.folder}; rank {self.rank} is at step {self._steps}."

    def _memory(self) -> dict[str, int]:
        if self.device.type in ("cpu", "meta"):
            return {}
        stats = torch.get_device_module(self.device).memory_stats(self.device)
        return {
            "allocated": stats.get("allocated_bytes.all.current", 0),
            "peak": stats.get("allocated_bytes.all.peak", 0),
        }

    def _write(self, wait: bool) -> None:
        while self._pending and (wait or self._pending[0].is_ready()):
            line = self._pending.popleft().read()
            if (scale := line.get("scale")) is not None:
                # Only a skipped step makes the scale smaller.
                if self._scale is not None and scale < self._scale:
                    line |= {"skipped": True, "why": f"gradients overflowed: scale {self._scale:g} to {scale:g}"}
                self._scale = scale
            if self._file is None:
                self._file = self._open(line["step"])
            self._file.write(json.dumps(line) + "\n")

    def _open(self, first: int) -> Any:
        """Open this rank's file. Keep the steps before `first`, which an earlier part of the run has written."""
        path = self.folder / f"rank{self.rank}.jsonl"
        before = [line for line in _lines(path) if line["step"] < first] if path.is_file() else []
        file = path.open("w", encoding="utf-8", buffering=1)
        file.writelines(json.dumps(line) + "\n" for line in before)
        return file

    def _summary(self, error: BaseException | None) -> dict[str, Any]:
        plan = plan_of(self._model, self._optimizer)
        precision = PrecisionReport(plan, surprises_of(plan, self._optimizer))
        device = str(self.device)
        if self.device.type == "cuda":
            device = torch.cuda.get_device_name(self.device)
        return {
            "kind": RECORDING,
            "unshard": __version__,
            "model": _class_name(self._model),
            "world": dist.get_world_size() if dist.is_initialized() else 1,
            "torch": f"torch {torch.__version__}",
            "device": device,
            "started": self._started,
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "units": sharding_map(plan),
            "results": [
                each.to_dict() if hasattr(each, "to_dict") else each for each in chain([precision], self._results)
            ],
        }


@dataclass
class _Line:
    """Values of a step. Tensors on a device are copied to the host in the background."""

    values: dict[str, Any]

    def __post_init__(self) -> None:
        tensors = {name: value.detach() for name, value in self.values.items() if isinstance(value, torch.Tensor)}
        self._events = []
        for name, tensor in tensors.items():
            on_device = tensor.device.type != "cpu"
            self.values[name] = tensor.to("cpu", non_blocking=True) if on_device else tensor.item()
        for device in {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._events.append(event)

    def is_ready(self) -> bool:
        return all(event.query() for event in self._events)

    def read(self) -> dict[str, Any]:
        for event in self._events:
            event.synchronize()
        return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in self.values.items()}


def _plain(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, int | float):
            raise ArgumentError(f"Expected a number or a one-element tensor for {name}, got {type(value).__name__}.")
        return value
    if isinstance(value, DTensor):
        if not all(each.is_replicate() for each in value.placements):
            raise ArgumentError(f"{name} is a DTensor that is not replicated. Pass {name}.full_tensor().")
        value = value.to_local()
    if value.numel() != 1:
        raise ArgumentError(f"{name} has {value.numel()} elements. Pass a number or a one-element tensor.")
    return value


def _class_name(model: nn.Module) -> str:
    """Return the name of the program's own class: `fully_shard` prepends FSDP, and the wrapper has the model inside."""
    inner = model.module if type(model).__name__ == "FullyShardedDataParallel" else model
    return type(inner).__name__.removeprefix("FSDP")


def sharding_map(plan: ModelPlan) -> list[dict[str, Any]]:
    """Return the name, the parameters and the ranks of each unit. Elements are those that these ranks share."""
    units = []
    for unit in plan.units:
        elements = [(math.prod(each.param.sharding.shape), each.dtypes.original.itemsize) for each in unit.params]
        groups = unit.state.unit.param_groups
        units.append(
            {
                "name": unit.name,
                "parameters": len(elements),
                "elements": sum(many for many, _ in elements),
                "bytes": sum(many * itemsize for many, itemsize in elements),
                "ranks": sorted({rank for group in groups for rank in _ranks(group)}),
                "replicas": max((group.replicas.world for group in groups), default=1),
            }
        )
    return units


def _ranks(group: Any) -> list[int]:
    if group.shards.world == 1:
        return [dist.get_rank() if dist.is_initialized() else 0]
    known = group.shards.compared_ranks or (group.mesh.mesh.flatten().tolist() if group.mesh is not None else [])
    return known or list(range(group.shards.world))


# -- reading -----------------------------------------------------------------------------------------------------


def read_recording(folder: Path) -> dict[str, Any]:
    """Return the recording in `folder`. It may be incomplete, because the run is not at its end or was killed."""
    files = {int(path.stem[4:]): path for path in folder.glob("rank*.jsonl") if path.stem[4:].isdigit()}
    summary: dict[str, Any] = {"kind": RECORDING, "unshard": __version__, "world": None, "units": [], "results": []}
    if (folder / _SUMMARY).is_file():
        summary = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
    if 0 not in files and "model" not in summary:
        raise ArgumentError(f"{str(folder)!r} has no recording (rank0.jsonl). unshard.tools.record writes one.")
    ranks = []
    for rank, path in sorted(files.items()):
        times = [line["seconds"] for line in _lines(path)]
        if summary["world"] is None or rank < summary["world"]:  # others are from an earlier run with more ranks
            times = sorted(times[1:] or times)  # the first step also builds and allocates
            ranks.append({"rank": rank, "step_ms": 1000 * times[len(times) // 2] if times else 0.0})
    return {**summary, "steps": list(_lines(files[0])) if 0 in files else [], "ranks": ranks}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except ValueError:  # the last line of a run that was killed
            return
