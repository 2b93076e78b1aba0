"""Runs a program on memory that is never touched, and records when each storage is taken and freed.

Tensors are real CPU tensors, so views, storages and autograd work as usual. Kernels do not run: a tensor is allocated
for each result, and its pages stay untouched, so they take no memory of the host. Integers are computed, because
indices and counts decide the shapes of other tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from ..errors import ArgumentError
from ..torch_private import FakeTensor, TorchDispatchMode, is_composite, schema_of, storage_key

_REAL = frozenset(
    f"aten::{name}"
    for name in ("_unsafe_view", "lift_fresh", "detach", "alias", "_reshape_alias", "set_", "resize_")
    + ("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
)
"""Operators that run, because they only make views, although most of their schemas do not say so."""
_ONEDNN_LSTM = 15.5
"""Numbers that oneDNN keeps for backward, per element of the output of an LSTM layer. Measured for several sizes."""
_FALSE = frozenset(f"aten::{name}" for name in ("isnan", "isinf", "isposinf", "isneginf"))


@dataclass
class Block:
    """A storage that was allocated while the recording ran."""

    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: str
    in_forward: bool
    """True if gradients were recorded, or would have been, when the storage was allocated."""
    host: bool = False
    kind: str = ""
    what: str = ""


class Recording:
    """The sizes of all storages over time. `events` are pairs of a block's number and its new size in bytes."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.events: list[tuple[int, int]] = []
        self.marks: list[tuple[int, str]] = []
        """The positions in `events` at which stages begin."""
        self.stage = "build"
        self.in_forward = True
        self.sources: list[tuple[int, list[int]]] = []
        """For each list of tensors that was copied into another: the block of the first target, and the sources."""
        self._numbers: dict[int, int] = {}
        self._watched: dict[int, Any] = {}

    def enter(self, stage: str) -> None:
        self.stage = stage
        self.marks.append((len(self.events), stage))

    def number(self, storage: torch.UntypedStorage) -> int | None:
        return self._numbers.get(storage_key(storage))

    def add(self, operator: str, tensor: torch.Tensor, host: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._numbers:
            return
        number = self._numbers[key] = len(self.blocks)
        in_forward = self.in_forward or torch.is_grad_enabled()
        self.blocks.append(Block(operator, tuple(tensor.shape), tensor.dtype, self.stage, in_forward, host))
        self.events.append((number, storage.nbytes()))
        self._watched[key] = weakref.ref(storage, lambda _: self._freed(key))

    def _freed(self, key: int) -> None:
        self.events.append((self._numbers.pop(key), 0))
        del self._watched[key]

    def alias(self, storage: torch.UntypedStorage, part: torch.UntypedStorage) -> None:
        """Record that `part` is a slice of the memory of `storage`."""
        number, key = self.number(storage), storage_key(part)
        if number is not None:
            self._numbers[key] = number
            self._watched[key] = weakref.ref(part, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        del self._numbers[key], self._watched[key]

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        number = self.number(storage)
        if number is not None:
            self.events.append((number, nbytes))

    def transient(self, operator: str, nbytes: int) -> None:
        """Record memory that a kernel takes and frees."""
        number = len(self.blocks)
        self.blocks.append(Block(operator, (nbytes,), torch.uint8, self.stage, False, what=f"workspace of {operator}"))
        self.events += [(number, nbytes), (number, 0)]


def _is_number(dtype: torch.dtype) -> bool:
    """Return True for dtypes whose values are not computed. Bytes are among them: the engine's buffers are bytes."""
    return dtype.is_floating_point or dtype.is_complex or dtype == torch.uint8


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [each for each in value if isinstance(each, torch.Tensor)]
    return found


class VirtualMemory(TorchDispatchMode):
    """Replaces kernels by allocations, and records the allocations."""

    def __init__(self, recording: Recording):
        super().__init__()
        self.recording = recording
        self._kinds: dict[Any, str] = {}
        self._results: dict[Any, Any] = {}
        self.guessed = False
        """True if some integers are not those of a run, because they depend on floating point values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **kwargs)  # DTensor computes shapes with them
        if any(each not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for each in types):
            return NotImplemented  # a subclass such as DTensor runs first, and calls operators on plain tensors
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func)
        tensors = _tensors((*args, *kwargs.values()))
        if kind == "composite":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if any(each.device.type == "meta" for each in tensors) or _device(kwargs) == "meta":
            return func(*args, **kwargs)
        special = _SPECIAL.get(schema_of(func).name)
        if special is not None and (result := special(self, func, tensors, args, kwargs)) is not NotImplemented:
            return result
        if kind == "view":
            return func(*args, **kwargs)
        known = bool(tensors) and not any(_is_number(each.dtype) for each in tensors)
        if kind == "in place":
            if known:
                return func(*args, **kwargs)
            self._note(func, args)
            return _mutated(func, args, kwargs)
        host = self._on_host(tensors) or bool(kwargs.get("pin_memory"))
        return self._virtual(func, tensors, known, host, args, _without_device(kwargs))

    # -- results ---------------------------------------------------------------------------------------------

    def _virtual(self, func: Any, tensors: list[torch.Tensor], known: bool, host: bool, args: Any, kwargs: Any) -> Any:
        key = _key(func, args, kwargs)
        metas = self._results.get(key) if key is not None else None
        if metas is None:
            metas = self._meta(func, args, kwargs)
            if key is not None:
                self._results[key] = metas
        outputs = _tensors(metas if isinstance(metas, list | tuple) else [metas])
        if (known or not tensors) and outputs and not any(_is_number(each.dtype) for each in outputs):
            return self._seen(func, func(*args, **kwargs))

        def make(meta: Any) -> Any:
            return self._make(func, meta, tensors, host) if isinstance(meta, torch.Tensor) else meta

        if isinstance(metas, list | tuple):
            return type(metas)(
                [make(each) for each in meta] if isinstance(meta, list | tuple) else make(meta) for meta in metas
            )
        return make(metas)

    def _meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        def meta(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.dtype == torch.bool and schema_of(func).name.startswith("aten::index"):
                    value = value.nonzero()  # only the number of rows matters
                    return torch.empty(value.shape[0], dtype=torch.int64, device="meta")
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            if isinstance(value, list | tuple):
                return type(value)(meta(each) for each in value)
            return value

        if not _tensors((*args, *kwargs.values())):
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            return func(*map(meta, args), **{name: meta(value) for name, value in kwargs.items()})
        except NotImplementedError as error:
            raise ArgumentError(
                f"The operator {schema_of(func).name} has no implementation for the meta device, so its result is "
                f"unknown: {str(error).splitlines()[0]}"
            ) from error

    def _make(self, func: Any, meta: torch.Tensor, inputs: list[torch.Tensor], host: bool) -> torch.Tensor:
        try:
            made = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
        except RuntimeError as error:
            size = f"{meta.numel() * meta.dtype.itemsize / 2**30:.1f} GiB"
            raise ArgumentError(
                f"The host refused to reserve address space for a tensor of {size} ({schema_of(func).name}). The pages "
                "are never used. Allow overcommitting: sysctl vm.overcommit_memory=1."
            ) from error
        if not _is_number(meta.dtype):
            self.guessed |= meta.dtype != torch.bool
            _fill(func, made, inputs)
        self.recording.add(schema_of(func).name, made, host)
        return made

    def _seen(self, func: Any, result: Any) -> Any:
        for each in _tensors(result if isinstance(result, list | tuple) else [result]):
            self.recording.add(schema_of(func).name, each, False)
        return result

    def _on_host(self, tensors: list[torch.Tensor]) -> bool:
        numbers = [self.recording.number(each.untyped_storage()) for each in tensors if each.dim()]
        return bool(numbers) and all(n is not None and self.recording.blocks[n].host for n in numbers)

    def _note(self, func: Any, args: Any) -> None:
        if schema_of(func).name == "aten::_foreach_copy_":
            targets, sources = args[0], args[1]
        elif schema_of(func).name == "aten::copy_":
            targets, sources = [args[0]], [args[1]]
        else:
            return
        self.note(targets, sources)

    def note(self, targets: Any, sources: Any) -> None:
        number = self.recording.number
        target = number(targets[0].untyped_storage()) if targets else None
        if target is not None:
            found = [n for each in sources if (n := number(each.untyped_storage())) is not None]
            self.recording.sources.append((target, found))


@contextmanager
def virtual_memory() -> Iterator[Recording]:
    """Run operators on plain tensors in the context without their kernels, and record the storages."""
    recording = Recording()
    resize, part = torch.UntypedStorage.resize_, torch.UntypedStorage.__getitem__

    def resized(self: Any, nbytes: int) -> Any:
        result = resize(self, nbytes)
        recording.resized(self, nbytes)
        return result

    def sliced(self: Any, index: Any) -> Any:
        result = part(self, index)
        if isinstance(index, slice):
            recording.alias(self, result)
        return result

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
        mock.patch.object(torch.UntypedStorage, "__getitem__", sliced),
        VirtualMemory(recording),
    ):
        yield recording


def _kind_of(func: Any) -> str:
    schema = schema_of(func)
    name = schema.name
    if is_composite(func):
        return "composite"
    if not any("Tensor" in str(each.type) for each in (*schema.returns, *schema.arguments)):
        return "view"
    if func.is_view or name in _REAL or torch.Tag.inplace_view in func.tags:
        return "view"
    if schema.is_mutable and all(each.alias_info is not None for each in schema.returns):
        return "in place"
    return "functional"


def _device(kwargs: Any) -> str:
    device = kwargs.get("device")
    return "" if device is None else torch.device(device).type


def _without_device(kwargs: Any) -> Any:
    return {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}


def _mutated(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments that an operator in place returns."""
    returned = []
    schema = schema_of(func)
    for each in schema.returns:
        if each.alias_info is None:
            continue
        aliases = each.alias_info.before_set
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.before_set & aliases:
                returned.append(kwargs[argument.name] if argument.name in kwargs else args[position])
                break
    return None if not schema.returns else returned[0] if len(returned) == 1 else tuple(returned)


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype == torch.bool and schema_of(func).name.startswith("aten::index"):
                raise TypeError
            return (tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, list | tuple):
            return tuple(map(part, value))
        return type(value), value

    try:
        key = (func, *map(part, args), *((name, part(value)) for name, value in kwargs.items()))
        hash(key)
    except TypeError:
        return None
    return key


def _fill(func: Any, made: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Give indices and masks that depend on unknown values some value: all indices equally often, and True."""
    if made.dtype == torch.bool:
        made.fill_(schema_of(func).name not in _FALSE)
        return
    size = inputs[0].shape[-1] if inputs and inputs[0].dim() else 1
    made.copy_(torch.arange(made.numel()).remainder_(max(1, size)).view(made.shape))


# -- operators whose results depend on values ---------------------------------------------------------------------


def _item(mode: VirtualMemory, func: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
    return 1.0 if _is_number(args[0].dtype) else func(*args)


def _embedding(mode: VirtualMemory, func: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
    rows, indices = args[0].shape[0], args[1]
    if not mode.guessed and indices.numel() and not 0 <= indices.min() <= indices.max() < rows:
        raise IndexError(f"token {int(indices.max())} in a table of {rows} rows (smallest: {int(indices.min())})")
    return NotImplemented


def _equal(mode: VirtualMemory, func: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
    return args[0].shape == args[1].shape


def _nonzero(mode: VirtualMemory, func: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
    if _is_number(args[0].dtype):
        args = (torch.ones(args[0].shape, dtype=torch.bool),)
    return mode._seen(func, func(*args))


def _masked_select(mode: VirtualMemory, func: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
    source, mask = args
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    meta = torch.empty(int(mask.expand(shape).sum()), dtype=source.dtype, device="meta")
    return mode._make(func, meta, tensors, mode._on_host([source]))


def _is_pinned(mode: VirtualMemory, func: Any, tensors: Any, args: Any, kwargs: Any) -> bool:
    return mode._on_host(tensors)


def _chunk_cat(mode: VirtualMemory, func: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
    if "out" not in kwargs:
        return NotImplemented
    mode.note([kwargs["out"]], args[0])
    return kwargs["out"]


def _flash_backward(mode: VirtualMemory, func: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
    # The kernel adds up the gradient of the queries in float32, padded to whole tiles.
    batch, heads, length, width = args[1].shape
    rounded = -(-length // 128) * 128
    mode.recording.transient("flash attention", batch * heads * rounded * (-(-width // 32) * 32 + 1) * 4)
    return NotImplemented


def _onednn_lstm(mode: VirtualMemory, func: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
    output, hidden, cell, _ = mode._virtual(func, tensors, False, mode._on_host(tensors), args, kwargs)
    size = int(output.numel() * _ONEDNN_LSTM * output.element_size())
    kept = torch.empty(size if args[-1] else 0, dtype=torch.uint8, device="meta")
    return output, hidden, cell, mode._make(func, kept, tensors, False)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::_local_scalar_dense": _item,
    "aten::embedding": _embedding,
    "aten::equal": _equal,
    "aten::nonzero": _nonzero,
    "aten::masked_select": _masked_select,
    "aten::is_pinned": _is_pinned,
    "aten::_chunk_cat": _chunk_cat,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::mkldnn_rnn_layer": _onednn_lstm,
}
