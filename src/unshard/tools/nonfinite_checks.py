"""Checks of the tensors of one step for non-finite values, which the host reads a step late."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..engine.api import StreamEvent, pack_kernel_on
from ..torch_private import foreach_norm, local_part, tree_map
from .nonfinite import Seen, Stage, clean
from .precision_report import short

_log = logging.getLogger("unshard")
_MOST_LAYOUTS = 16  # steps with different numbers of forwards have different checks
_LARGE = 320 * 65536
"""Elements of a tensor that is checked alone. `foreach_norm` reads so many in a kernel, with 320 blocks at most.
`vector_norm` reads a whole tensor in one kernel."""
CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True)
class Check:
    """What one check covers: tensors of one stage and unit. Equal checks of different steps can be compared."""

    stage: Stage
    unit: str
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    indices: tuple[int, ...]
    """The order in which the program computed the tensors, among those that were checked together."""

    @property
    def is_module(self) -> bool:
        """True for outputs of a module inside the unit, and False for outputs of the unit itself."""
        return self.stage is Stage.FORWARD and any(self.names)


Place = tuple[str, str, torch.dtype]
"""A unit, a parameter or (for outputs) a module inside the unit, if any, and the dtype to report."""
PlaceOf = Callable[[int], Place | None]


@dataclass(eq=False)
class Batch:
    """Tensors of one dtype and device, by index, which one call of torch checks. Steps with equal checks share it."""

    device: torch.device
    wide: torch.dtype
    """The dtype of the results."""
    indices: list[int] | None
    """None if all tensors are in this batch, in their order."""
    checks: list[Check]
    is_large: bool = False

    def members(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors if self.indices is None else [tensors[index] for index in self.indices]

    def maxima(self, members: list[torch.Tensor]) -> torch.Tensor:
        """Return a vector with the largest absolute value of each tensor, which is NaN if any value is NaN."""
        kernel = pack_kernel_on(self.device)
        if kernel is not None and (found := kernel.largest_values(members)) is not None:
            return found
        if self.is_large:
            return torch.linalg.vector_norm(members[0], math.inf, dtype=self.wide).reshape(1)
        return torch.stack(foreach_norm(members, math.inf, self.wide))


@dataclass
class Layout:
    """What steps with the same batches share."""

    largest: torch.Tensor | None = None
    """The largest finite value of each tensor in earlier steps."""


def packed_batch(device: torch.device, places: Sequence[Place]) -> Batch:
    """Return the batch of local gradients whose largest absolute values the engine has found while it packed them."""
    unit, names, dtypes = places[0][0], *zip(*((name, dtype) for _, name, dtype in places), strict=True)
    check = Check(Stage.LOCAL, unit, names, dtypes, tuple(range(len(places))))
    return Batch(device, torch.float32, None, [check])


def batches_of(stage: Stage, tensors: Sequence[torch.Tensor], place_of: PlaceOf) -> list[Batch]:
    """Group `tensors` into batches. Large tensors are alone.

    Skip tensors without a place, without elements, or of dtypes without checks.
    """
    groups: dict[Any, dict[str, list[tuple[int, Place]]]] = {}
    for index, tensor in enumerate(tensors):
        place = place_of(index)
        if place is not None and tensor.numel() and tensor.dtype in CHECKED:
            alone = index if tensor.numel() >= _LARGE else None
            units = groups.setdefault((tensor.device, tensor.dtype, alone), {})
            units.setdefault(place[0], []).append((index, place))
    batches = []
    for (device, dtype, alone), units in groups.items():
        indices = [index for members in units.values() for index, _ in members]
        is_all = indices == list(range(len(tensors)))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        checks = [
            Check(
                stage,
                unit,
                tuple(place[1] for _, place in members),
                tuple(place[2] for _, place in members),
                tuple(index for index, _ in members),
            )
            for unit, members in units.items()
        ]
        batches.append(Batch(device, wide, None if is_all else indices, checks, alone is not None))
    return batches


@dataclass
class Record:
    """The checks of one step, and the largest absolute value of every tensor, which the host reads a step late."""

    step: int
    batches: list[Batch] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """For each batch, the number of tensors that were checked before."""
    maxima: list[torch.Tensor] = field(default_factory=list)
    """A vector per batch, on the device of its tensors."""
    _count: int = 0
    exact: dict[tuple[int, int], int] = field(default_factory=dict)
    """The number of non-finite elements, by numbers of check and tensor."""
    _values: torch.Tensor | None = None
    _copied: StreamEvent | None = None
    _has_scale: bool = False
    layout: Layout = field(default_factory=Layout)

    def add(self, batch: Batch, maxima: torch.Tensor) -> None:
        self.batches.append(batch)
        self.starts.append(self._count)
        self._count += len(maxima)
        self.maxima.append(maxima)

    def count_exactly(self, first: int, checks: Sequence[Check], tensors: list[torch.Tensor]) -> None:
        """Count the non-finite elements of `tensors`, which `checks` cover. The first check has the number `first`."""
        numbers = [(first + number, index) for number, check in enumerate(checks) for index in range(len(check.names))]
        for key, tensor in zip(numbers, tensors, strict=True):
            count = int(tensor.numel() - tensor.isfinite().sum())
            if count:
                self.exact[key] = count

    @property
    def has_checks(self) -> bool:
        return any(check.stage is not Stage.INPUT for batch in self.batches for check in batch.checks)

    @property
    def checks(self) -> list[tuple[int, Check]]:
        """Each check with the number of tensors that were checked before."""
        pairs = zip(self.starts, self.batches, strict=True)
        return [(start, check) for start, batch in pairs for check in batch.checks]

    def pack(self, scale: object, layouts: dict[tuple[Batch, ...], Layout]) -> bool:
        """Queue the copy of all values to the host. Return False if there are none."""
        self.layout = layouts.setdefault(tuple(self.batches), Layout())
        if len(layouts) > _MOST_LAYOUTS:
            del layouts[next(iter(layouts))]
        vectors = self.maxima
        if has_scale := isinstance(scale, torch.Tensor):
            vectors = [*vectors, scale.detach().reshape(1)]
        if not vectors:
            return False
        device = next((each.device for each in vectors if each.device.type != "cpu"), vectors[0].device)
        values = torch.cat([each.to(device, non_blocking=True) for each in vectors])
        if device.type != "cpu":
            values = values.to("cpu", non_blocking=True)  # into page-locked memory
            self._copied = StreamEvent(device).record()
        self._values, self._has_scale, self.maxima = values, has_scale, []
        return True

    def read(self) -> tuple[torch.Tensor, float | None]:
        """Wait for the copy, and return the values and the scale of the gradient scaler."""
        assert self._values is not None
        if self._copied is not None:
            self._copied.synchronize()
        return (self._values[:-1], float(self._values[-1])) if self._has_scale else (self._values, None)

    def seen(self, values: list[float], before: list[float] | None) -> Iterator[Seen]:
        """Yield the non-finite values. `before` are the largest finite ones of earlier steps."""
        number, local = 0, dict[str, float]()
        for place, (start, check) in enumerate(self.checks):
            for index, (name, dtype) in enumerate(zip(check.names, check.dtypes, strict=True)):
                value, largest = values[number], None if before is None else before[number]
                number += 1
                if check.stage is Stage.LOCAL:
                    local[name] = value
                if math.isfinite(value):
                    continue
                count = self.exact.get((place, index))
                position = start + check.indices[index]
                if check.stage is Stage.REDUCED:
                    largest = local.get(name)
                nan = math.isnan(value)
                where = check.stage, position, check.unit, clean(name), short(dtype)
                yield Seen(*where, nan, count, largest, start=start)


def save_first(
    folder: Path,
    rank: int,
    step: int,
    checks: Sequence[Check],
    tensors: Sequence[torch.Tensor],
    inputs: dict[str, Any],
) -> None:
    """Save the tensors of the first bad check, and the inputs of its unit."""
    number = 0
    for check in checks:
        mine = tensors[number : number + len(check.names)]
        number += len(check.names)
        if not all(bool(each.isfinite().all()) for each in mine):
            key = "outputs" if check.stage is Stage.FORWARD else "gradients"
            names = [clean(name) or str(i) for i, name in enumerate(check.names)]
            content = {"step": step, "unit": check.unit, "inputs": inputs.get(check.unit, [])}
            content[key] = dict(zip(names, mine, strict=True))
            try:
                _save_tensors(folder, f"rank{rank}-step{step}-{check.unit}", content)
            except (OSError, RuntimeError) as error:  # a full disk does not end the training
                _log.warning("watch could not save tensors in %s: %s", folder, error)
            return


def _save_tensors(folder: Path, name: str, content: dict[str, Any]) -> None:
    """Save copies of the tensors in `content` as plain tensors on the host."""

    def saved(value: Any) -> Any:
        return local_part(value).detach().cpu().clone() if isinstance(value, torch.Tensor) else value

    folder.mkdir(parents=True, exist_ok=True)
    name = name.replace("(root)", "root").replace("/", "_").replace(", ", "+")
    torch.save(tree_map(saved, content), folder / f"{name}.pt")
