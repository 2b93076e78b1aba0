"""Tensors that enter and leave forward: arguments, results, and side outputs.

Side outputs are tensors that forward stores on its modules.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import StateError
from ..torch_private import parts_of, sequence_nr_of, storage_key
from . import side_stream
from .params.buffers import EMPTIED
from .params.param import unsharded_name

_DEEPEST = 128
_CONTAINERS = (dict, list, tuple, set)  # `torch.compile` traces casts inside a unit, and does not know `dict | list`


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any, depth: int = 0) -> Any:
    """Return a copy of `value` in which `fn` is applied to every tensor. Values of other types are not changed."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        # `batch_sizes` must stay on the host, uncast.
        named = {name: getattr(value, name) for name in ("data", "sorted_indices", "unsorted_indices")}
        return value._replace(**{name: fn(each) for name, each in named.items() if each is not None})
    if not _is_container(value):
        return value
    if depth >= _DEEPEST:
        raise StateError(
            f"Arguments or results of forward are nested more than {_DEEPEST} levels deep. Do they contain themselves?"
        )
    if dataclasses.is_dataclass(value):  # first: the outputs of some libraries are also dicts
        fields = [field for field in dataclasses.fields(value) if field.init]
        new = {f.name: map_tensors(fn, getattr(value, f.name), depth + 1) for f in fields}
        return dataclasses.replace(value, **new)  # type: ignore[type-var]
    if isinstance(value, dict):
        items = ((key, map_tensors(fn, item, depth + 1)) for key, item in value.items())
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    mapped = [map_tensors(fn, item, depth + 1) for item in value]
    if hasattr(value, "_fields"):
        return type(value)(*mapped)
    return type(value)(mapped)


def moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    # While a step is recorded, the copy blocks, which ends the recording. A graph with a non-blocking copy would keep
    # the address of host memory that is freed after this call.
    return tensor.to(device, non_blocking=not side_stream.recording)


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield every tensor in `value`. The order of the tensors in a set may differ between ranks."""
    if isinstance(value, torch.Tensor):
        yield value
    elif _is_container(value):
        if depth >= _DEEPEST:
            raise StateError(f"Results of forward are nested more than {_DEEPEST} levels deep.")
        if dataclasses.is_dataclass(value):
            value = [getattr(value, field.name) for field in dataclasses.fields(value)]
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from tensors_in(item, depth + 1)


def _is_container(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def cast_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Cast the floating-point tensors among the arguments of forward to `dtype`, unless `dtype` is None.

    This function is faster than `cast_floats` if forward receives a single tensor, as most forwards do.
    """
    if dtype is None:
        return args, kwargs
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
        only = args[0]
        return (args if only.dtype == dtype or not only.is_floating_point() else (only.to(dtype),)), kwargs
    return map_tensors(partial(_cast, dtype), (args, kwargs))


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors in `value` to `dtype`, unless `dtype` is None. The casts are differentiable."""
    return value if dtype is None else map_tensors(partial(_cast, dtype), value)


# -- tensors that outlive forward -------------------------------------------------------------------------

# A loss may be computed from side outputs, so backward may begin at them. Tensors that share memory with unsharded
# parameters (a weight, a view of one) are copied, because `reshard` frees that memory.

_OWN = frozenset(vars(nn.Module()))
_MOST = 1000
"""The maximum number of items that a search looks at in each container, counted from the end of the container."""


def shares_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if any of `tensors` is in memory that `reshard` frees.

    This function is on the hot path of forward.
    """
    try:
        for tensor in tensors:
            if storage_key(tensor.untyped_storage()) in EMPTIED or type(tensor) is not torch.Tensor:
                return any(map(_is_in_emptied, tensors))
    except NotImplementedError:  # no storage: a function transform wraps the tensor, or it is sparse
        return any(map(_is_in_emptied, tensors))
    return False


def with_own_memory(value: Any) -> Any:
    """Return `value` with copies of all tensors in memory that `reshard` frees. The copies are differentiable."""
    return map_tensors(lambda tensor: tensor.clone() if _is_in_emptied(tensor) else tensor, value)


def _is_in_emptied(tensor: torch.Tensor) -> bool:
    parts = parts_of(tensor)
    if parts:
        return any(map(_is_in_emptied, parts))
    try:
        return storage_key(tensor.untyped_storage()) in EMPTIED
    except NotImplementedError:
        return False  # sparse: its indices and values are new


class SideOutputs:
    """Finds the side outputs of a unit's modules. Most forwards have none.

    A search through all attributes takes longer than all other work for a unit. Therefore, a full search runs only
    after the 1st, 2nd, 4th, 8th, ... forward. After the other forwards, only the attributes in `places` are read.
    """

    def __init__(self) -> None:
        self._forwards, self._next_search = 0, 1
        self.places: dict[tuple[weakref.ref[nn.Module], str], None] = {}
        """Attributes in which a search has found a side output or an alias of unsharded parameters."""
        self.aliases: list[_LeftAlias] = []
        """Tensors that share memory with unsharded parameters. Copies replace these tensors until the next forward."""

    def expected(self) -> bool:
        """Count a forward and return True if `tensors` may find side outputs.

        Call this method once after every forward.
        """
        self._forwards += 1
        return self._forwards >= self._next_search or bool(self.places)

    def tensors(self, modules: Iterable[nn.Module], since: int) -> list[torch.Tensor]:
        """Replace aliases by copies, and return the side outputs of `modules` that the latest forward computed.

        `since` is the sequence number of the first graph node that this forward could create. Tensors with older graph
        nodes are not returned.
        """
        search = self._forwards >= self._next_search
        self.copy_aliases(modules, search)
        if search:
            self._next_search *= 2
            for module, name, value in _attributes(modules):
                if next(_grown(value, since), None) is not None:
                    self.places[weakref.ref(module), name] = None
        return [each for ref, name in self.places for each in _grown(getattr(ref(), name, None), since)]

    def copy_aliases(self, modules: Iterable[nn.Module], search: bool) -> None:
        """Replace aliases of unsharded parameters by copies.

        If `search` is True, this method looks at all attributes of `modules`. Otherwise, it looks only at those in
        `places`.
        """
        if search:
            for module, name, value in _attributes(modules):
                if next(_aliases_in(module, name, value), None) is not None:
                    self.places[weakref.ref(module), name] = None
        for ref, name in self.places:
            if (owner := ref()) is not None:
                self.aliases += _aliases_in(owner, name, getattr(owner, name, None))
        for alias in self.aliases:
            alias.copy()

    def restore_aliases(self) -> None:
        """Undo `copy_aliases`. Call this method before every forward, which may read aliases of an earlier forward."""
        aliases, self.aliases = self.aliases, []
        for alias in aliases:
            alias.restore()


class _LeftAlias:
    """A tensor or tuple that forward stored on a module, in a list or in a dict.

    It is or contains an alias of unsharded parameters. Between forwards, a copy replaces the tensor or tuple.
    """

    def __init__(self, container: Any, key: Any, value: Any):
        # There are no weak references to lists, but a list does not keep its module alive.
        self._container = weakref.ref(container) if isinstance(container, nn.Module) else lambda: container
        self._key, self._value, self._copy = key, value, None

    def copy(self) -> None:
        if self._copy is None:
            self._copy = with_own_memory(self._value)
            self._put(self._copy)

    def restore(self) -> None:
        """Undo `copy`, unless the program has replaced the copy, or the memory of the original is no longer in use."""
        if self._now() is self._copy and any(map(_is_in_emptied, tensors_in(self._value))):
            self._put(self._value)

    def _now(self) -> Any:
        container: Any = self._container()
        if isinstance(container, nn.Module):
            return getattr(container, self._key, None)
        if container is None or isinstance(container, dict):
            return container and container.get(self._key)
        return container[self._key] if self._key < len(container) else None

    def _put(self, value: Any) -> None:
        container: Any = self._container()
        if isinstance(container, nn.Module):
            setattr(container, self._key, value)
        else:
            container[self._key] = value


def _aliases_in(container: Any, key: Any, value: Any, levels: int = 3) -> Iterator[_LeftAlias]:
    """Yield aliases of unsharded parameters in `value`, which `container` (a module, list or dict) stores under `key`.

    The unsharded parameters themselves are skipped. Recurrent layers store unsharded parameters in a list, and modules
    of flat units store them as attributes.
    """
    if isinstance(value, torch.Tensor | tuple):
        tensors = [value] if isinstance(value, torch.Tensor) else [each for each in value if torch.is_tensor(each)]
        if any(unsharded_name(each) is None and _is_in_emptied(each) for each in tensors):
            yield _LeftAlias(container, key, value)
    elif levels and isinstance(value, dict):
        for name, item in list(value.items())[-_MOST:]:
            yield from _aliases_in(value, name, item, levels - 1)
    elif levels and isinstance(value, list | deque):
        for number in range(max(len(value) - _MOST, 0), len(value)):
            yield from _aliases_in(value, number, value[number], levels - 1)


def _attributes(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
    for top in modules:
        for module in top.modules():
            for name, value in vars(module).items():
                if name not in _OWN:
                    yield module, name, value
            for name, buffer in module.named_buffers(recurse=False):
                yield module, name, buffer


def _grown(value: Any, since: int, levels: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value` whose graph nodes have sequence numbers of at least `since`."""
    if isinstance(value, torch.Tensor):
        with suppress(RuntimeError):  # a view that was overwritten in place: no backward can run through it either
            if value.requires_grad and value.grad_fn is not None and sequence_nr_of(value) >= since:
                yield value
    elif levels and isinstance(value, dict | list | tuple | deque):
        items = value.values() if isinstance(value, dict) else value
        for item in islice(reversed(items), _MOST):
            yield from _grown(item, since, levels - 1)
