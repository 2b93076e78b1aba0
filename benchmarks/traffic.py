"""What a step sends and copies, as the dispatcher sees it: counts and bytes, the same on every device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from .loopback import METER, Call
from .sides import Training

# Operations that move bytes without computing anything. `fsdp` is PyTorch's namespace for its own.
COPIES = frozenset(
    ("copy_", "_foreach_copy_", "_foreach_copy", "_to_copy", "clone", "cat", "stack", "_chunk_cat", "chunk_cat")
    + ("split_with_sizes_copy", "split_copy", "all_gather_copy_in", "constant_pad_nd", "contiguous", "index_copy_")
)
_WAITS = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "barrier", "monitored_barrier_")
_KINDS = {
    "gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter", "alltoall_base"),
    "all_reduce": ("reduce",),
}


class Traffic(TorchDispatchMode):
    """Records what is dispatched inside: collectives of real process groups, and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.copies: Counter[str] = Counter()
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass(each) for each in _tensors((args, kwargs))):
            return NotImplemented  # a DTensor: what it does to its local tensors is seen instead
        result = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            if func._opname not in _WAITS:
                # The whole tensor: the output of a gather, the input of a reduction.
                self.calls.append(Call(kind_of(func._opname), max(map(_bytes, (*args, result)))))
        elif func._opname in COPIES:
            self.copies[func._opname] += 1
            self.copied += _written(func, args, kwargs, result)
        return result


def kind_of(operation: str) -> str:
    for kind, spellings in _KINDS.items():
        if any(spelling in operation for spelling in spellings):
            return kind
    return "other"


def of_step(training: Training) -> Traffic:
    """What forward and backward of one step do, whatever kind of process group they use."""
    with METER.listening() as simulated, Traffic() as traffic:
        training.forward().backward()
    traffic.calls += simulated
    training.update()
    return traffic


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that a copy writes: into what it changes, or what it returns."""
    if func._opname == "all_gather_copy_in":  # returns its input's place and all of its output
        return _bytes(args[0])
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    changed = [named[each.name] for each in func._schema.arguments if each.is_write and each.name in named]
    return _bytes(changed or result)


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
