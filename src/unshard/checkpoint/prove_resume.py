"""Checks that a training run resumes bitwise from a checkpoint.

State is compared by name. Saved state uses its name in the checkpoint (`model/head.weight`, `data.position`). Unsaved
state (attributes, non-persistent buffers, gradients) is named by its location in the run (`model.blocks.0.calls`).
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import ArgumentError
from ..names import ALL_PREFIXES, clean_tensor_name
from ..state.model import ModelState, model_state
from ..torch_private import local_part, non_persistent_buffers, own_buffers
from . import storage
from .files import PIECE_ELEMENTS
from .load import load
from .optimizer import SHARDED, optimizer_state, tensor_name
from .ranks import on_first_rank, rank_and_size, together
from .reports import ResumeDifference, ResumeReport, TensorDifference
from .save import save
from .values import as_plain, decode, rng_state

_WHAT = "prove_resume"
_MOST = 20
"""Maximum number of differences that each rank reports."""
_ABSENT = object()
PARTS = ("model", "optimizer", "scheduler", "scaler", "data")
"""Names of the `save` arguments that hold state."""
_VALUES = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size, range, slice)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, tuple, deque)
_OF_OPTIMIZERS = ("state", "param_groups", "defaults", "_opt_called")
"""Optimizer attributes that do not count as unsaved state. `_opt_called` is a flag that torch's schedulers set."""
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_LONG = 100
"""Sequences of plain values with more elements than this are compared as a whole under one name."""


def prove_resume(
    make: Callable[[], Mapping[str, Any]],
    train_step: Callable[[Any], Any],
    *,
    steps: int = 3,
    before: int = 2,
    path: str | os.PathLike[str] | None = None,
) -> ResumeReport:
    """Check that a run that resumes from a checkpoint is bitwise equal to the uninterrupted run.

    All ranks must call this function. `make()` builds a run and returns it as a dict with `model` and, optionally,
    `optimizer`, `scheduler`, `scaler` and `data`. Other entries of the dict are not saved. `train_step(run)` trains one
    step and returns the loss, which may differ between ranks. The uninterrupted run trains `before` steps, saves a
    checkpoint and trains `steps` more steps. A new run loads the checkpoint and repeats these `steps` steps.

    After loading and after each repeated step, every rank compares the losses and all saved state of the two runs. All
    ranks stop after the first step that differs on any rank. If `path` is given, it must be a folder that all ranks
    see, and the checkpoint stays there. Otherwise, rank 0 creates a temporary folder and deletes it at the end. The
    folder needs up to (`steps` + 3) times the disk space of a checkpoint.

    Raises:
        ArgumentError: `make` returns no `model`, or an argument is invalid.

    Example::

        report = checkpoint.prove_resume(make, train_step, steps=2)
        assert report.equal, report
    """
    for name, value, least in (("steps", steps, 1), ("before", before, 0)):
        if type(value) is not int or value < least:
            raise ArgumentError(f"{name} must be an integer of at least {least}, got {value!r}.")

    def make_folder() -> str:
        if path is not None:
            storage.make_folder(Path(path), exist_ok=True)
        return tempfile.mkdtemp(prefix=".prove_resume_", dir=path)

    folder = Path(on_first_rank(_WHAT, make_folder))
    try:
        proof = _Proof(make, train_step, folder)
        proof.go_on(before, steps, folder if path is None else Path(path))
        return proof.resume(before, steps)
    finally:
        if rank_and_size()[0] == 0:  # without a collective, because other ranks may have failed
            storage.delete(folder)


class _Proof:
    """Runs `prove_resume` on one rank.

    Each rank compares its own state. Comparing two checkpoints instead would miss differences in the buffers of other
    ranks, because a checkpoint holds only rank 0's copy of each buffer.
    """

    def __init__(self, make: Callable[[], Any], train_step: Callable[[Any], Any], folder: Path):
        self._make, self._train_step, self._folder = make, train_step, folder
        self._rank, self._size = rank_and_size()
        self._checkpoint = Path()
        self._kept: dict[object, dict[str, Any]] = {}
        """State by moment (a step, `unsaved` or `resumed`) and name. Tensors are None, and are in `_file(moment)`."""

    def go_on(self, before: int, steps: int, target: Path) -> None:
        """Train the uninterrupted run and save it after `before` steps. Record the state then and after later steps."""
        run = self._made()
        for _ in range(before):
            self._train_step(run)
        self._checkpoint = save(target, step=before, **_parts(run))
        self._keep("unsaved", partial(unsaved_state, run))
        self._keep(before, partial(saved_state, run))
        for step in range(before + 1, before + steps + 1):
            self._keep(step, partial(saved_state, run, loss=self._train_step(run)))

    def resume(self, before: int, steps: int) -> ResumeReport:
        """Load the checkpoint into a new run, repeat the steps, and compare each step with the uninterrupted run."""
        run, step, loss = self._loaded(), before, None
        unsaved = self._compare("unsaved", partial(unsaved_state, run), step)
        differences = self._compare(step, partial(saved_state, run), step)
        while not differences and step < before + steps:
            step += 1
            loss = self._train_step(run)
            differences = self._compare(step, partial(saved_state, run, loss=loss), step)
        repeatable = True
        if differences and step > before:  # does another resumed run end in the same state?
            self._keep("resumed", partial(saved_state, run, loss=loss))
            del run
            run = self._loaded()
            for _ in range(step - before):
                loss = self._train_step(run)
            repeatable = not self._compare("resumed", partial(saved_state, run, loss=loss), 0)
        if not differences:  # gradients had no effect, because most programs clear them first
            unsaved = [each for each in unsaved if each.name != "gradients"]
        compared = on_first_rank(_WHAT, lambda: len(self._kept[before]))
        return ResumeReport(before, steps, self._size, compared, differences, unsaved, repeatable)

    def _made(self) -> Mapping[str, Any]:
        run = self._make()
        if not isinstance(run, Mapping) or "model" not in run:
            raise ArgumentError(f"make() must return a dict with a model, and returned a {type(run).__name__}.")
        return run

    def _loaded(self) -> Mapping[str, Any]:
        gc.collect()  # frees the previous run if it is in a cycle, so that only one run is in memory
        run = self._made()
        load(self._checkpoint, **_parts(run))
        return run

    def _file(self, moment: object) -> Path:
        return self._folder / f"{moment}_rank_{self._rank:05d}.pt"

    def _keep(self, moment: object, observe: Callable[[], dict[str, Any]]) -> None:
        def work() -> None:
            state = observe()
            tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            torch.save(tensors, self._file(moment))
            self._kept[moment] = {name: None if name in tensors else value for name, value in state.items()}

        together(_WHAT, work)

    def _compare(self, moment: object, observe: Callable[[], dict[str, Any]], step: int) -> list[ResumeDifference]:
        """Compare this rank's state with what `_keep` recorded for `moment`. Return the differences of all ranks."""

        def work() -> list[ResumeDifference]:
            tensors = torch.load(self._file(moment), mmap=True, map_location="cpu", weights_only=True)
            kept, state = {**self._kept[moment], **tensors}, observe()
            texts = ((name, _difference(name, kept, state)) for name in [*state, *(kept.keys() - state.keys())])
            found = (ResumeDifference(name, step, self._rank, text) for name, text in texts if text)
            return list(islice(found, _MOST))

        found = [each for of_rank in together(_WHAT, work) for each in of_rank]
        return sorted(found, key=lambda each: not each.name.startswith("loss"))  # stable, and losses first


def _parts(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in PARTS if name in run}


def _difference(name: str, kept: dict[str, Any], state: dict[str, Any]) -> str:
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


# -- state by name ------------------------------------------------------------------------------------------


@torch.no_grad()
def saved_state(run: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return, by name, everything that `save` would save for this rank, and also `others`. Tensors are not cloned."""
    found: dict[str, Any] = {}
    for name, value in others.items():
        found.update(leaves(value, name))
    model = model_state(run["model"])
    found.update(_of_model(run["model"], model))
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
    # Sort by module, because `model_state` lists the root's tensors first.
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


@torch.no_grad()
def unsaved_state(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return state that `save` does not save: attributes, non-persistent buffers, gradients, other entries of `run`.

    Attributes of torch's own schedulers, scalers and optimizers are skipped, because their state dicts are complete.
    """
    found: dict[str, Any] = {}
    for path, module in run["model"].named_modules():
        found.update(_of_module(module, f"model.{path}" if path else "model"))
    gradients = sum(parameter.grad is not None for parameter in run["model"].parameters())
    found["gradients"] = f"of {gradients} parameters" if gradients else "none"
    for name, value in run.items():
        if name not in PARTS and callable(getattr(value, "state_dict", None)) and not isinstance(value, nn.Module):
            found.update(leaves(value.state_dict(), name))
        if not _is_of_torch(value):
            own = value
            if isinstance(value, Optimizer):
                own = {key: each for key, each in vars(value).items() if key not in _OF_OPTIMIZERS}
            found.update(leaves(own, name, inside_objects=True))
    return found


def _of_module(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    skipped = non_persistent_buffers(module)
    for name, buffer in own_buffers(module).items():
        if name in skipped and buffer is not None:
            yield from leaves(buffer, f"{path}.{name}")
    own = set(vars(nn.Module())) - {"training"}
    attributes = {name: value for name, value in vars(module).items() if name not in own}
    for name, value in attributes.items():
        yield from leaves(value, f"{path}.{name}", inside_objects=True)


def leaves(
    value: Any, path: str, inside_objects: bool = False, seen: dict[int, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each tensor and plain value in nested containers.

    If `inside_objects` is True, attributes of objects are included. Functions, iterators and most torch objects are
    skipped, because their state cannot be compared.
    """
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        if _has_memory(value):
            yield path, local_part(value).detach()
        return
    if isinstance(value, _VALUES):
        yield path, as_plain(value)
        return
    if id(value) in seen or isinstance(value, _CODE):
        return
    if not inside_objects:
        seen = {**seen}  # skip only cycles, because loading turns a list with two names into two lists
    seen[id(value)] = value  # keeps the object alive, so that its id is not reused
    inner: dict[str, Any] = {}
    if type(value) in _MAPPINGS:
        inner = {f"{path}.{key}": each for key, each in value.items()}
    elif type(value) in _SEQUENCES:
        if len(value) > _LONG and all(isinstance(each, _VALUES) for each in value):
            yield path, _long(value)
        elif len(value) > _LONG and inside_objects:
            yield path, f"{len(value)} items"
        else:
            inner = {f"{path}[{number}]": each for number, each in enumerate(value)}
    elif isinstance(value, set | frozenset):
        yield path, sorted(map(repr, value)) if len(value) <= _LONG else f"{len(value)} items"
    elif isinstance(value, torch.Generator):
        yield path, value.get_state()
    elif isinstance(value, random.Random):
        inner = {path: value.getstate()}
    elif type(value).__module__.partition(".")[0] == "numpy":
        inner = {path: _of_numpy(value)}
    elif inside_objects and _may_look_inside(value):
        inner = {f"{path}.{name}": each for name, each in vars(value).items()}
    for name, each in inner.items():
        yield from leaves(each, name, inside_objects, seen)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return False if the tensor's values cannot be read. Examples: meta tensors, views of freed unsharded buffers."""
    if not isinstance(tensor, DTensor) and type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return False
    local = local_part(tensor)
    if local.is_meta or local.layout is not torch.strided:
        return False
    last = sum((length - 1) * stride for length, stride in zip(local.shape, local.stride(), strict=True))
    end = (local.storage_offset() + last + 1) * local.itemsize
    return local.numel() == 0 or local.untyped_storage().nbytes() >= end


def _long(values: Any) -> Any:
    if all(isinstance(each, bool | int | float) for each in values):
        try:
            return torch.tensor(list(values))
        except (RuntimeError, ValueError, OverflowError):  # integers of more than 64 bits
            pass
    return repr([as_plain(each) for each in values])


def _of_numpy(value: Any) -> Any:
    bit_generator = getattr(value, "bit_generator", None)  # a Generator
    if bit_generator is not None:
        return dict(bit_generator.state)
    if hasattr(value, "get_state"):  # a RandomState
        return list(value.get_state())
    return value.tolist() if hasattr(value, "tolist") else None


def _is_of_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("torch", "unshard")


def _may_look_inside(value: Any) -> bool:
    if isinstance(value, nn.Module | Optimizer) or not hasattr(value, "__dict__"):
        return False
    return not _is_of_torch(value) or type(value).__module__.startswith("torch.utils.data")
