"""The memory of a sharded model in a run, by the kinds of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.api import Members, observer
from ..errors import ArgumentError
from ..torch_private import current_graph_task
from .memory_plan import MemoryPlan, memory_table, title_of
from .memory_rows import ACTIVATIONS, KINDS, OTHER, groups_of, held_by, size, total, unit_rows, units_of
from .precision_report import table


class Ledger:
    """The result of `ledger`: what a rank holds now. As a context manager around a step, it also records a timeline.

    `now` and `timeline` have bytes by kind. On a CUDA device, memory that no unit, parameter, optimizer or buffer owns
    counts as "other". Inside the context, what is added to it counts as activations. On the CPU, both are 0.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None):
        if not isinstance(model, nn.Module) or not units_of(model):
            raise ArgumentError(
                f"{type(model).__name__} contains no sharded module. Pass a model that fully_shard or "
                "FullyShardedDataParallel has sharded."
            )
        if optimizer is not None and not hasattr(optimizer, "state"):
            raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
        self._model, self._optimizer = model, optimizer
        self._device = next(iter(units_of(model))).unit.device
        self._groups: dict[int, Any] = {}
        self._watcher: _Watcher | None = None
        self._other: int | None = None
        self.timeline: list[dict[str, Any]] = []
        self.refresh()

    def refresh(self) -> Ledger:
        """Read the sizes again."""
        self.now, self.host = self._read()
        self.allocator = self._read_allocator()
        self._units = unit_rows(self._model)
        return self

    def __enter__(self) -> Ledger:
        self.refresh()
        self.timeline, self._other = [], self.now[OTHER]
        self._groups = {id(param): group for group in groups_of(self._model) for param in group.params}
        self._watcher = _Watcher(self._note)
        observer.add(self._watcher)
        self._record("begin")
        return self

    def __exit__(self, *error: Any) -> None:
        if self._watcher is not None:
            observer.remove(self._watcher)
        self._watcher = None
        self._record("end")
        self.refresh()
        self._other = None

    @property
    def peak(self) -> int:
        """The largest sum on the timeline, or the sum now. The allocator's own peak is in `allocator`."""
        return max((total(point) for point in self.timeline), default=total(self.now))

    @property
    def peak_at(self) -> str:
        """The stage of the peak. Empty if no step was recorded."""
        at = self._at_peak().get("at", "")
        return f"the {at} of the step" if at in ("begin", "end") else title_of(at)

    @property
    def rows(self) -> list[dict[str, Any]]:
        at_peak = self._at_peak()
        return [{"kind": kind, "at_rest": self.now[kind], "at_peak": at_peak.get(kind, 0)} for kind in KINDS]

    def to_dict(self) -> dict[str, Any]:
        from .. import __version__

        return {
            "kind": "ledger",
            "unshard": __version__,
            "world": dist.get_world_size() if dist.is_initialized() else 1,
            "device": self._device.type,
            "device_memory": self.allocator.get("device"),
            "peak": self.peak,
            "peak_at": self.peak_at,
            "fits": None,
            "rows": self.rows,
            "host": {"at_rest": self.host, "at_peak": self.host},
            "allocator": self.allocator,
            "timeline": self.timeline,
            "largest": self._largest(),
            "advice": [],
            "units": self._units,
        }

    def __str__(self) -> str:
        peak = f", peak {size(self.peak)}, in {self.peak_at}" if self.peak_at else ""
        lines = [f"Memory of this rank: {size(total(self.now))} now{peak}.", ""]
        lines += memory_table(self.rows, {"at_rest": self.host, "at_peak": self.host})
        if self.allocator:
            lines += ["", "Allocator: " + ", ".join(f"{name} {size(n)}" for name, n in self.allocator.items())]
        return "\n".join(lines)

    def beside(self, plan: MemoryPlan) -> str:
        """Return a table of this ledger beside `plan`: the most of each kind in a recorded step, else what is at rest.

        On the CPU, activations and other memory are unknown.
        """
        if not isinstance(plan, MemoryPlan):
            raise ArgumentError(f"beside() needs a result of unshard.tools.plan, got {type(plan).__name__}.")
        recorded = bool(self.timeline)
        mine = _most(self.timeline) if recorded else self.now
        planned = plan.run.most if recorded else plan.run.rest
        known = KINDS if self._device.type == "cuda" else [each for each in KINDS if each not in (ACTIVATIONS, OTHER)]
        cells = [[kind, size(planned[kind]), size(mine[kind]), _ratio(mine[kind], planned[kind])] for kind in known]
        if not recorded:
            sums = total(planned, known), total(mine, known)
            cells.append(["total", size(sums[0]), size(sums[1]), _ratio(sums[1], sums[0])])
        if peak := self.allocator.get("peak"):
            cells.append(["allocator's peak", size(plan.peak), size(peak), _ratio(peak, plan.peak)])
        head = ("most in the step" if recorded else "at rest", "planned", "here", "of plan")
        return "\n".join(table(head, cells, numbers=(1, 2, 3)))

    # -- reading ---------------------------------------------------------------------------------------------

    def _read(self) -> tuple[dict[str, int], int]:
        found, host = dict.fromkeys(KINDS, 0), 0
        for each in held_by(self._model, self._optimizer):
            if each.on_host:
                host += each.storage.nbytes()
            else:
                found[each.kind] += each.storage.nbytes()
        if self._device.type == "cuda":
            rest = max(0, torch.cuda.memory_allocated(self._device) - total(found))
            found[OTHER] = rest if self._other is None else min(rest, self._other)
            found[ACTIVATIONS] = rest - found[OTHER]
        return found, host

    def _read_allocator(self) -> dict[str, int]:
        if self._device.type != "cuda":
            return {}
        return {
            "allocated": torch.cuda.memory_allocated(self._device),
            "peak": torch.cuda.max_memory_allocated(self._device),
            "reserved": torch.cuda.memory_reserved(self._device),
            "device": torch.cuda.get_device_properties(self._device).total_memory,
        }

    def _largest(self, most: int = 12) -> list[dict[str, Any]]:
        found = [(each.storage.nbytes(), each.what, each.kind) for each in held_by(self._model, self._optimizer)]
        return [
            {"what": what, "kind": kind, "bytes": nbytes} for nbytes, what, kind in sorted(found, reverse=True)[:most]
        ]

    def _at_peak(self) -> dict[str, Any]:
        return max(self.timeline, key=total, default={**self.now})

    def _note(self, event: str, params: Sequence[Any]) -> None:
        if params and id(params[0]) in self._groups:
            # Units get their names in the first forward.
            self._record(f"{event} {self._groups[id(params[0])].unit_name}")

    def _record(self, at: str) -> None:
        self.timeline.append({"at": at, **self._read()[0]})


class _Watcher(observer.Observer):
    def __init__(self, note: Callable[[str, Any], None]):
        self._note = note

    def unsharded(self, params: Any) -> None:
        self._note("forward" if current_graph_task() == -1 else "backward", params)

    def reducing(self, params: Any, members: Members, gradients: Any, sent: Any, received: Any) -> None:
        self._note("reduce", params)


def _most(points: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {kind: max((point[kind] for point in points), default=0) for kind in KINDS}


def _ratio(mine: int, planned: int) -> str:
    return f"{mine / planned:.2f}" if planned else "-"


def ledger(model: nn.Module, optimizer: Any = None) -> Ledger:
    """Return the memory that this rank holds for `model` and `optimizer` now, by the kinds of `plan`.

    Use the result as a context manager to record a step: `with ledger(model, optimizer) as recorded: ...`. It reads
    sizes only: no collective, no change of the model. While it records, reduce-scatters run on the compute stream, as
    for every observer, so their inputs live a little longer.

    Example::

        with ledger(model, optimizer) as recorded:
            train(model)
        print(recorded)
    """
    return Ledger(model, optimizer)
