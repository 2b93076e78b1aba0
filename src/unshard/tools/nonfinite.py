"""Findings about non-finite values: what each rank reports, and which rank and place came first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from ..engine.api import StreamEvent
from ..errors import listed
from ..names import ALL_PREFIXES, clean_tensor_name
from ..torch_private import foreach_copy, foreach_norm, local_part, tree_map
from .precision_report import short, table

_MOST_SHOWN = 20
_MOST_LAYOUTS = 16  # steps with different numbers of forwards have different checks
_LARGE = 320 * 65536
"""Elements of a tensor that is checked alone. `foreach_norm` reads so many in a kernel, with 320 blocks at most.
`vector_norm` reads a whole tensor in one kernel."""
CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Stage(IntEnum):
    """Where a value was checked. In a step, a non-finite value of one stage spreads to all later stages."""

    INPUT = -1
    """No stage of its own: inputs may be infinite on purpose, such as masks. A forward output may come from them."""
    FORWARD = 0
    OUTPUT = 1
    LOCAL = 2
    REDUCED = 3


WHAT = {
    Stage.FORWARD: "forward output",
    Stage.OUTPUT: "output gradient",
    Stage.LOCAL: "local gradient",
    Stage.REDUCED: "reduced gradient",
}


@dataclass(frozen=True)
class Seen:
    """A non-finite value at one place, as one rank reports it. `position` orders the checks of a stage in a step."""

    stage: int
    position: int
    unit: str
    parameter: str
    """The parameter whose gradient this is. For forward outputs, the module that computed it, if it is known."""
    dtype: str
    nan: bool
    elements: int | None
    largest_finite: float | None
    input: str = ""
    """For forward outputs: what the input of the model was, if it was not finite either."""

    @property
    def place(self) -> tuple[int, str, str]:
        return self.stage, self.unit, self.parameter


@dataclass(frozen=True)
class Finding:
    """The first non-finite value of one step. `str()` returns `text`."""

    step: int
    what: str
    """`forward output`, `output gradient` (of the loss), `local gradient` or `reduced gradient`."""
    unit: str
    parameter: str | None
    ranks: tuple[int, ...]
    elements: int | None
    """Number of non-finite elements on all of `ranks`, or None if they were not counted."""
    dtype: str
    largest_finite: float | None
    """The largest finite absolute value before. See docs/nonfinite_values.md for what `before` means."""
    text: str
    module: str | None = None
    """The module inside the unit that computed the first non-finite output, if it is known."""

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": list(self.ranks)}


# -- checks of one step -------------------------------------------------------------------------------------------


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
    """The dtype of the results. The device copies results of equal dtypes in one kernel."""
    indices: list[int] | None
    """None if all tensors are in this batch, in their order."""
    checks: list[Check]
    is_large: bool

    def members(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors if self.indices is None else [tensors[index] for index in self.indices]

    def maxima(self, members: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Queue the kernels that find the largest absolute value of each tensor, which is NaN if any value is NaN."""
        if self.is_large:
            return [torch.linalg.vector_norm(members[0], math.inf, dtype=self.wide)]
        return foreach_norm(members, math.inf, self.wide)


@dataclass
class Layout:
    """What steps with the same batches share."""

    largest: torch.Tensor | None = None
    """The largest finite value of each tensor in earlier steps."""
    free: list[Slots] = field(default_factory=list)
    """Memory for the values of a step. Steps return it when the host has read the values."""


Slots = list[tuple[torch.Tensor, list[torch.Tensor]]]
"""A vector for the values of each run of batches on one device, and a view of each of its elements."""


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
    """One number per tensor, on the device of the tensor."""
    exact: dict[tuple[int, int], int] = field(default_factory=dict)
    """The number of non-finite elements, by numbers of check and tensor."""
    _values: torch.Tensor | None = None
    _copied: StreamEvent | None = None
    _has_scale: bool = False
    layout: Layout = field(default_factory=Layout)
    _slots: Slots = field(default_factory=list)

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
        self.layout = layout = layouts.setdefault(tuple(self.batches), Layout())
        if len(layouts) > _MOST_LAYOUTS:
            del layouts[next(iter(layouts))]
        self._slots = layout.free.pop() if layout.free else self._new_slots()
        start = 0
        for _, places in self._slots:  # one call per device: stacking would make a view of every value
            foreach_copy(places, self.maxima[start : start + len(places)])
            start += len(places)
        vectors = [vector for vector, _ in self._slots]
        if has_scale := isinstance(scale, torch.Tensor):
            vectors.append(scale.detach().reshape(1))
        if not vectors:
            return False
        device = next((each.device for each in vectors if each.device.type != "cpu"), vectors[0].device)
        values = torch.cat([each.to(device, non_blocking=True) for each in vectors])
        if device.type != "cpu":
            values = values.to("cpu", non_blocking=True)  # into page-locked memory
            self._copied = StreamEvent(device).record()
        self._values, self._has_scale, self.maxima = values, has_scale, []
        return True

    def _new_slots(self) -> Slots:
        slots = []
        for device, run in itertools.groupby(self.batches, attrgetter("device")):
            batches = list(run)
            count = sum(len(check.names) for batch in batches for check in batch.checks)
            dtype = max((batch.wide for batch in batches), key=attrgetter("itemsize"))
            vector = torch.empty(count, dtype=dtype, device=device)
            slots.append((vector, list(vector.unbind())))
        return slots

    def read(self) -> tuple[torch.Tensor, float | None]:
        """Wait for the copy, and return the values and the scale of the gradient scaler."""
        assert self._values is not None
        if self._copied is not None:
            self._copied.synchronize()
        self.layout.free.append(self._slots)
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
                yield Seen(check.stage, position, check.unit, clean(name), short(dtype), nan, count, largest)


def first_stage(seen: Iterable[Seen]) -> list[Seen]:
    """Return what was seen in the earliest stage. The rest are consequences."""
    seen = list(seen)
    if not any(each.stage == Stage.FORWARD and not each.parameter for each in seen):
        # All units had finite outputs, so a module inside a unit was infinite on purpose.
        seen = [each for each in seen if each.stage != Stage.FORWARD]
    earliest = min((each.stage for each in seen if each.stage != Stage.INPUT), default=None)
    # Inputs and outputs of modules that were infinite in steps without findings are not the reason.
    seen = [each for each in seen if math.isfinite(each.largest_finite or 0)]
    inputs = [each for each in seen if each.stage == Stage.INPUT]
    what = "NaN" if any(each.nan for each in inputs) else "infinite" if inputs else ""
    found = [each for each in seen if each.stage == earliest]
    return [replace(each, input=what) for each in found] if earliest == Stage.FORWARD else found


def clean(name: str) -> str:
    """Return the name of a module or parameter without the prefixes of wrappers."""
    return clean_tensor_name(f"{name}.", ALL_PREFIXES).rstrip(".")


# -- findings of all ranks ----------------------------------------------------------------------------------------

Reports = dict[int, dict[int, list[Seen]]]
"""What the ranks have seen, by step and rank."""


def findings_of(reports: Reports, world: int, complete: float = math.inf) -> list[Finding]:
    """Return one finding per step. Leave out steps that only repeat the finding of the step before.

    All ranks have reported what they saw up to the step `complete`.
    """
    found: list[Finding] = []
    before: tuple[int, Any] | None = None
    for step in sorted(reports):
        place, finding = _first_of(step, reports[step], world, step <= complete)
        if before is not None and before[0] == step - 1:
            said = f"{finding.text} Values of step {step - 1} may have reached the parameters."
            finding = replace(finding, text=said)
        if before != (step - 1, place):
            found.append(finding)
        before = step, place
    return found


def _first_of(step: int, by_rank: dict[int, list[Seen]], world: int, is_complete: bool) -> tuple[Any, Finding]:
    first = min((each for seen in by_rank.values() for each in seen), key=lambda each: (each.stage, each.position))
    # If a module was called several times, its first call counts.
    by_last = {r: sorted(by_rank[r], key=attrgetter("position"), reverse=True) for r in sorted(by_rank)}
    same = {r: each for r, seen in by_last.items() for each in seen if each.place == first.place}
    ranks, counts = tuple(same), [each.elements for each in same.values()]
    elements = None if None in counts else sum(each or 0 for each in counts)
    finite = [each.largest_finite for each in same.values() if each.largest_finite is not None]
    nan, largest = all(each.nan for each in same.values()), max(finite, default=None)
    stage = Stage(first.stage)
    module = first.parameter if stage is Stage.FORWARD and first.parameter else None
    known = next((each for each in same.values() if each.input), first)
    text = _text(step, known, stage, ranks, world, is_complete, nan, elements, largest)
    parameter = first.parameter if stage in (Stage.LOCAL, Stage.REDUCED) else None
    what = WHAT[stage]
    finding = Finding(step, what, first.unit, parameter, ranks, elements, first.dtype, largest, text, module)
    return first.place, finding


def _text(
    step: int,
    first: Seen,
    stage: Stage,
    ranks: tuple[int, ...],
    world: int,
    is_complete: bool,
    nan: bool,
    elements: int | None,
    largest: float | None,
) -> str:
    who = "all ranks" if len(ranks) == world > 1 else f"ranks {listed(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"
    alone = " alone" if len(ranks) == 1 < world and is_complete else ""
    count = "" if elements is None else f", {elements} {'element' if elements == 1 else 'elements'}"
    did = "got NaN" if nan else "became infinite"
    if stage is Stage.FORWARD:
        where = f"module {first.parameter!r} of unit {first.unit!r}" if first.parameter else f"unit {first.unit!r}"
        text = f"{who}{alone} {did} in forward: output of {where} ({first.dtype}{count})"
        text += f"; an input of the model was {first.input}" if first.input else ""
        before = "largest finite output there in earlier steps"
    elif stage is Stage.OUTPUT:
        text = f"{who}{alone} {did} in the loss: gradient of the output of unit {first.unit!r} ({first.dtype}{count})"
        before = "largest finite gradient there in earlier steps"
    elif stage is Stage.LOCAL:
        text = f"{who}{alone} {did} in {first.parameter}: local gradient of unit {first.unit!r} ({first.dtype}{count})"
        before = "largest finite gradient there in earlier steps"
    else:
        verb = "NaN" if nan else "overflow"
        only, them = (" only", "all ranks") if is_complete else ("", who)
        text = f"{verb}{only} in the {first.dtype} reduction of {first.parameter} (unit {first.unit!r}{count} on {who})"
        text += f": local gradients of {them} were finite"
        before = "largest of them on these ranks"
    text += "" if is_complete else "; not all ranks have reported"
    return f"Step {step}: {text}" + ("." if largest is None else f"; {before}: {largest:.4g}.")


def changes_of(scales: Sequence[tuple[int, float]], findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the steps that changed the scale of the gradient scaler. `scales` has the scale after each step."""
    texts = {each.step: each.text for each in findings}
    rows: list[dict[str, Any]] = []
    for (_, before), (step, scale) in itertools.pairwise(scales):
        if scale != before:
            why = texts.get(step, "No watched value was non-finite in this step.") if scale < before else ""
            rows.append({"step": step, "scale": scale, "skipped": scale < before, "why": why})
    return rows


def text_of(steps: int, findings: list[Finding], scaler: list[dict[str, Any]]) -> str:
    """Return the text of a watch."""
    if not steps:
        return "No step was watched. A step is a forward and a backward of the model between watch() and stop()."
    lines = [f"Steps watched: {steps}.", ""]
    lines += ["Non-finite values:", *(f"- {each.text}" for each in findings[:_MOST_SHOWN])] if findings else []
    if len(findings) > _MOST_SHOWN:
        lines.append(f"- and {len(findings) - _MOST_SHOWN} more, all of them in `findings`")
    lines += [] if findings else ["All values were finite."]
    if scaler:
        rows = [[str(x["step"]), f"{x['scale']:g}", "skipped" if x["skipped"] else "", x["why"]] for x in scaler]
        lines += ["", *table(["step", "scale after", "", "why"], rows, numbers=(0, 1))]
    return "\n".join(lines)


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
            _save_tensors(folder, f"rank{rank}-step{step}-{check.unit}", content)
            return


def _save_tensors(folder: Path, name: str, content: dict[str, Any]) -> None:
    """Save copies of the tensors in `content` as plain tensors on the host."""

    def saved(value: Any) -> Any:
        return local_part(value).detach().cpu().clone() if isinstance(value, torch.Tensor) else value

    folder.mkdir(parents=True, exist_ok=True)
    name = name.replace("(root)", "root").replace("/", "_").replace(", ", "+")
    torch.save(tree_map(saved, content), folder / f"{name}.pt")
