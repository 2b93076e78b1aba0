"""`prove_resume`: save a run, continue it, load it into fresh objects, and compare the repeated steps bitwise."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ArgumentError
from ..names import ALL_PREFIXES, clean_tensor_name
from ..state.model import ModelState, model_state
from .files import PIECE_ELEMENTS
from .load import load
from .optimizer import SHARDED, optimizer_state, tensor_name
from .ranks import on_first_rank, rank_and_size, together
from .reports import TensorDifference
from .save import save
from .unsaved import PARTS, leaves, unsaved_state
from .values import decode, rng_state

_WHAT = "prove_resume"
_MOST = 20
"""Number of differences that a rank reports."""
_SHOWN = 5
"""Number of differences of a kind that are printed."""
_ABSENT = object()


@dataclass(frozen=True)
class ResumeDifference:
    """A tensor or value that differs in the resumed run."""

    name: str
    """`loss`, a name in the checkpoint (`model/head.weight`, `rng.torch`, `data.position`), or, for unsaved state, its
    place in the run (`model.blocks.0.calls`)."""
    step: int
    """Number of steps after which it differs; the step of the checkpoint if it differs right after loading."""
    rank: int
    text: str
    """Both values, or how much they differ."""


@dataclass(frozen=True)
class ResumeReport:
    """The result of `prove_resume`, the same on all ranks. `str()` formats it as a report."""

    before: int
    steps: int
    ranks: int
    compared: int
    """Number of tensors and values compared after each step on rank 0."""
    differences: list[ResumeDifference] = field(default_factory=list)
    """All differences after the first step after which any rank has one."""
    unsaved: list[ResumeDifference] = field(default_factory=list)
    """State that a checkpoint does not hold and that differs after loading: a possible cause, or without effect."""
    repeatable: bool = True
    """False if a second resumed run differs from the first one."""

    @property
    def equal(self) -> bool:
        """True if losses and saved state are bitwise equal after each step on all ranks."""
        return not self.differences

    @property
    def first(self) -> ResumeDifference | None:
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'' if self.ranks == 1 else 's'}"
        if self.first is None:
            text = f"The resumed run is bitwise equal: {self.steps} steps after step {self.before}, with {ranks}; the "
            lines = [text + f"losses, and after each step {self.compared} tensors and values on rank 0."]
            return "\n".join([*lines, *_lines("Not saved and different, without effect on these steps:", self.unsaved)])
        first = self.first
        at_once = [each for each in self.differences if each.name == first.name]
        others = [each for each in self.differences if each.name != first.name]
        when = f"step {first.step}" if first.step > self.before else "after loading, before the first step"
        lines = [f"The resumed run differs from the run that went on after step {self.before}, with {ranks}."]
        lines += _lines(f"First, {when}:", at_once) + _lines("At the same time:", others)
        lines += _lines("Not saved, and different after loading, so it may be the cause:", self.unsaved)
        if not self.repeatable:
            lines.append("A second resumed run differs from the first one, too. So the steps are not deterministic, or")
            lines.append("they use state that is neither saved nor rebuilt by make(): a global variable, a file.")
        elif not self.unsaved:
            lines.append(
                "The cause is not in an attribute of the run's objects. Check state that functions and iterators"
            )
            lines.append("hold, and state outside the dict that make() returns.")
        return "\n".join(lines)


def _lines(title: str, differences: list[ResumeDifference]) -> list[str]:
    """One line per name, with the first rank that has it."""
    by_name: dict[str, list[ResumeDifference]] = {}
    for each in differences:
        by_name.setdefault(each.name, []).append(each)
    lines = []
    for name, (first, *others) in list(by_name.items())[:_SHOWN]:
        also = f" (and {len(others)} other{'' if len(others) == 1 else 's'})" if others else ""
        lines.append(f"  {name} on rank {first.rank}{also}: {first.text}")
    more = [f"  and {len(by_name) - _SHOWN} more"] if len(by_name) > _SHOWN else []
    return [title, *lines, *more] if lines else []


def prove_resume(
    make: Callable[[], Mapping[str, Any]],
    train_step: Callable[[Any], Any],
    *,
    steps: int = 3,
    before: int = 2,
    path: str | os.PathLike[str] | None = None,
) -> ResumeReport:
    """Save a run, continue for `steps` steps, load it into fresh objects, repeat the steps, and compare bitwise.

    All ranks must call it. `make()` builds a run: a dict with `model` and, optionally, `optimizer`, `scheduler`,
    `scaler` and `data`, as `save` takes them. Other entries are for `train_step` and are not saved. `train_step(run)`
    trains one step and returns its loss, which may differ between ranks. `before`: number of steps before the save.

    Each rank compares the loss and everything that a checkpoint holds after each step. All ranks stop after the first
    step that differs on any of them. `path`: a folder that all ranks see, where the checkpoint is written and kept. By
    default, rank 0 creates a temporary folder and deletes it at the end. It takes up to `steps` + 3 times the size of a
    checkpoint.
    """
    for name, value, least in (("steps", steps, 1), ("before", before, 0)):
        if type(value) is not int or value < least:
            raise ArgumentError(f"{name} must be an integer of at least {least}, got {value!r}.")
    folder = Path(on_first_rank(_WHAT, lambda: _temporary(path)))
    try:
        proof = _Proof(make, train_step, folder)
        proof.go_on(before, steps, folder if path is None else Path(path))
        return proof.resume(before, steps)
    finally:
        if rank_and_size()[0] == 0:  # without a collective: other ranks may have failed
            shutil.rmtree(folder, ignore_errors=True)


def _temporary(path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        os.makedirs(path, exist_ok=True)
    return tempfile.mkdtemp(prefix=".prove_resume_", dir=path)


class _Proof:
    """One proof on one rank.

    Each rank compares its own state. Comparing checkpoints instead would miss buffers that differ between ranks, of
    which a checkpoint holds rank 0's copy.
    """

    def __init__(self, make: Callable[[], Any], train_step: Callable[[Any], Any], folder: Path):
        self._make, self._train_step, self._folder = make, train_step, folder
        self._rank, self._size = rank_and_size()
        self._checkpoint = Path()
        self._kept: dict[str, dict[str, Any]] = {}
        """State by moment and name. Tensors are in a file of this rank, and None here."""

    def go_on(self, before: int, steps: int, target: Path) -> None:
        """Train the run that is not interrupted."""
        run = self._made()
        for _ in range(before):
            self._train_step(run)
        self._checkpoint = save(target, step=before, **_parts(run))
        self._keep("unsaved", partial(unsaved_state, run))
        self._keep(_moment(before), partial(saved_state, run))
        for step in range(before + 1, before + steps + 1):
            loss = self._train_step(run)
            self._keep(_moment(step), partial(_state_and_loss, loss, run))

    def resume(self, before: int, steps: int) -> ResumeReport:
        """Load the run and repeat the steps."""
        run, step = self._loaded(), before
        unsaved = self._compare("unsaved", partial(unsaved_state, run), step)
        differences = self._compare(_moment(step), partial(saved_state, run), step)
        loss = None
        while not differences and step < before + steps:
            step += 1
            loss = self._train_step(run)
            differences = self._compare(_moment(step), partial(_state_and_loss, loss, run), step)
        repeatable = True
        if differences and step > before:
            self._keep("resumed", partial(_state_and_loss, loss, run))
            del run
            repeatable = self._repeats(step - before)
        if not differences:  # without effect: most programs clear gradients first
            unsaved = [each for each in unsaved if each.name != "gradients"]
        compared = on_first_rank(_WHAT, lambda: len(self._kept[_moment(before)]))
        return ResumeReport(before, steps, self._size, compared, differences, unsaved, repeatable)

    def _repeats(self, steps: int) -> bool:
        """Return True if another resumed run ends in the same state."""
        run, loss = self._loaded(), None
        for _ in range(steps):
            loss = self._train_step(run)
        return not self._compare("resumed", partial(_state_and_loss, loss, run), 0)

    def _made(self) -> Mapping[str, Any]:
        run = self._make()
        if not isinstance(run, Mapping) or "model" not in run:
            raise ArgumentError(f"make() must return a dict with a model, and returned a {type(run).__name__}.")
        return run

    def _loaded(self) -> Mapping[str, Any]:
        gc.collect()  # frees the previous run if it is in a cycle: only one run is in memory
        run = self._made()
        load(self._checkpoint, **_parts(run))
        return run

    def _keep(self, moment: str, observe: Callable[[], dict[str, Any]]) -> None:
        def work() -> None:
            state = observe()
            tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            torch.save(tensors, self._file(moment))
            self._kept[moment] = {name: None if name in tensors else value for name, value in state.items()}

        together(_WHAT, work)

    def _file(self, moment: str) -> Path:
        return self._folder / f"{moment}_rank_{self._rank:05d}.pt"

    def _compare(self, moment: str, observe: Callable[[], dict[str, Any]], step: int) -> list[ResumeDifference]:
        """Differences from the state that `_keep` kept, on any rank; the same list on all ranks."""

        def work() -> list[ResumeDifference]:
            tensors = torch.load(self._file(moment), mmap=True, map_location="cpu", weights_only=True)
            kept, state = {**self._kept[moment], **tensors}, observe()
            texts = ((name, _difference(name, kept, state)) for name in [*state, *(kept.keys() - state.keys())])
            found = (ResumeDifference(name, step, self._rank, text) for name, text in texts if text)
            return list(islice(found, _MOST))

        found = [each for of_rank in together(_WHAT, work) for each in of_rank]
        return sorted(found, key=lambda each: not each.name.startswith("loss"))  # stable, and losses first


@torch.no_grad()
def saved_state(run: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that `save` saves, and the plain tensors of all ranks; tensors are not copied."""
    model = model_state(run["model"])
    found: dict[str, Any] = dict(_of_model(run["model"], model))
    for name, module in model.extra.items():
        found.update(leaves(module.get_extra_state(), f"extra/{name}"))
    if run.get("optimizer") is not None:
        found.update(_of_optimizer(run["optimizer"], model))
    for name in ("scheduler", "scaler", "data"):
        if run.get(name) is not None:
            found.update(leaves(run[name].state_dict(), name))
    found.update(leaves(rng_state(), "rng"))
    return found


def _of_model(module: nn.Module, model: ModelState) -> list[tuple[str, torch.Tensor]]:
    """The tensors in module order; `model_state` lists those of the root first."""
    paths = (clean_tensor_name(f"{path}.", ALL_PREFIXES) for path, _ in module.named_modules(remove_duplicate=False))
    order = {path.strip("."): number for number, path in reversed(list(enumerate(paths)))}
    found = [(each.name, each.local.detach()) for each in model.tensors]
    return sorted(found, key=lambda item: order.get(item[0].removeprefix("model/").rpartition(".")[0], 0))


def _of_optimizer(optimizer: Optimizer, model: ModelState) -> Iterator[tuple[str, Any]]:
    tensors, values = optimizer_state(optimizer, model)
    stored = {each.name: each.local.detach() for each in tensors}
    yield from stored.items()
    for number, group in enumerate(values["groups"]):
        path = f"optimizer/param_groups[{number}]"
        yield from leaves(decode(group["options"], path, stored.__getitem__), path)
    for name, state in values["state"].items():
        for key, value in state.items():
            if value != SHARDED:
                path = tensor_name(key, name)
                yield from leaves(decode(value, path, stored.__getitem__), path)
    yield from leaves(decode(values["others"], "optimizer/state", stored.__getitem__), "optimizer/state")


def _moment(step: int) -> str:
    return f"step_{step:08d}"


def _parts(run: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `save` and `load`."""
    return {name: run[name] for name in PARTS if name in run}


def _state_and_loss(loss: Any, run: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(leaves(loss, "loss")), **saved_state(run)}


def _difference(name: str, kept: dict[str, Any], state: dict[str, Any]) -> str:
    """Describe a difference; empty if there is none."""
    mine, theirs = kept.get(name, _ABSENT), state.get(name, _ABSENT)
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype):
            return _tensor_difference(name, mine, theirs)
    elif repr(mine) == repr(theirs):  # distinguishes 0.0 and -0.0, and equates NaNs
        return ""
    return f"{_shown(mine)}, resumed {_shown(theirs)}"


def _tensor_difference(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> str:
    found = TensorDifference(name, mine.numel())
    pieces = (each.reshape(-1).split(PIECE_ELEMENTS) for each in (mine, theirs))
    for a, b in zip(*pieces, strict=True):
        found.add(a, b.cpu())
    if not found.differing:
        return ""
    if mine.numel() == 1:
        return f"{mine.item()!r}, resumed {theirs.item()!r}"
    counts = f"{found.differing:,} of {found.elements:,} elements differ"
    return f"{counts}, |a-b| up to {found.absolute:.3g}, relative up to {found.relative:.3g}"


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
