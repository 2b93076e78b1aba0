"""Which collectives and which operations a piece of code runs, seen at the dispatcher: no engine is patched."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

Shape = tuple[torch.dtype, int]

# An exchange is how the engine reduces where the backend's own reduce-scatter is slow, or the wire narrow.
_KINDS = (("gather", ("allgather", "all_gather")), ("reduce_scatter", ("reduce_scatter", "alltoall_base")))


@dataclass(frozen=True)
class Call:
    """One collective. Tensors are (dtype, number of elements); `ranks` is the size of its group, 0 if unknown.

    `reduce` is the name of the reduction where it can be seen: the dispatcher hides it for the c10d operations.
    """

    kind: str  # gather, reduce_scatter, all_reduce or other
    op: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    grouped: bool
    reduce: str | None = None
    ranks: int = 0

    @property
    def bytes_in(self) -> int:
        return _bytes(self.inputs)

    @property
    def bytes_out(self) -> int:
        return _bytes(self.outputs)

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {dtype for dtype, _ in (*self.inputs, *self.outputs)}


def _bytes(shapes: Iterable[Shape]) -> int:
    return sum(dtype.itemsize * numel for dtype, numel in shapes)


def kind_of(op: str) -> str:
    """The kind of a collective, from any of the names that torch has for it."""
    for kind, spellings in _KINDS:
        if any(spelling in op for spelling in spellings):
            return kind
    return "all_reduce" if "allreduce" in op or "all_reduce" in op else "other"


def describe(
    op: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    reduce: str | None = None,
    ranks: int = 0,
) -> Call:
    return Call(
        kind=kind_of(op),
        op=op,
        inputs=tuple((each.dtype, each.numel()) for each in inputs),
        outputs=tuple((each.dtype, each.numel()) for each in outputs),
        grouped="coalesced" in op,
        reduce=reduce,
        ranks=ranks,
    )


class _Mode(TorchDispatchMode):
    """Sees the operations on plain tensors: one on a DTensor is let through, and its parts are seen instead."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass(each) for each in _tensors((args, tuple(kwargs.values())))):
            return NotImplemented
        result = func(*args, **kwargs)
        self.saw(func, args, kwargs, result)
        return result

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        raise NotImplementedError


class Collectives(_Mode):
    """A context in which every collective is recorded, those of hooks inside the backward pass too.

    Sees what passes the dispatcher, so not the calls on a process group written in Python; those keep a log.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def of(self, kind: str) -> list[Call]:
        return [call for call in self.calls if call.kind == kind]

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in _NO_COLLECTIVES:
            self.calls.append(_read(func, args, kwargs, result))


_NO_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Call:
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    inputs = [t for name, value in named.items() if name.startswith("input") for t in _tensors(value)]
    outputs = [t for name, value in named.items() if name.startswith("output") for t in _tensors(value)]
    both = [t for name in ("tensor", "tensors") for t in _tensors(named.get(name))]  # worked on in place
    if func.namespace == "_c10d_functional":
        outputs = outputs or list(_tensors(result))
    reduce = named.get("reduce_op")
    return describe(
        f"{func.namespace}.{func._opname}",
        inputs + both,
        outputs + both,
        reduce=reduce.upper() if isinstance(reduce, str) else None,
        ranks=_ranks(named),
    )


def _ranks(named: dict[str, Any]) -> int:
    if "process_group" in named:
        return dist.ProcessGroup.unbox(named["process_group"]).size()
    if "group_name" in named:
        return dist.distributed_c10d._resolve_process_group(named["group_name"]).size()
    return 0


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


class TorchCalls(_Mode):
    """A context that counts the operations dispatched, by name; one on a list of tensors (`_foreach`) is one."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.counts[f"{func.namespace}.{func._opname}"] += 1


class LiveBytes(_Mode):
    """A context that counts the bytes of the storages that are made in it; `peak`: the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        before = {each.untyped_storage()._cdata for each in _tensors((args, tuple(kwargs.values())))}
        for each in _tensors(result):
            storage = each.untyped_storage()
            if storage._cdata not in before and storage.nbytes():
                before.add(storage._cdata)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())

    def _add(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)
