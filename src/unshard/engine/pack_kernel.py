"""Triton kernels that pack gradients for a reduce-scatter, and find largest absolute values.

`_pack` reads each gradient once, also if it finds the largest value. `torch._chunk_cat` takes twice as long if it
casts, and reads addresses from the host, which a recorded step must not do. Only `packing.py` imports this module, and
only for CUDA: Triton is optional.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.accelerator import current_device_index

from ..layout.collective_tensors import Region
from ..torch_private import contiguous_stride
from . import observer, side_stream
from .packing import Packing
from .params.buffers import Shard

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
_SLOTS = 16  # gradients that one launch copies
_BLOCK = 4096  # elements that one program copies
_SEARCHED = 256  # tensors that one search reads
_SEARCHED_BLOCK = 16384  # elements that one of its programs reads
_UNUSED = 1 << 62  # the first program of an unused slot


@triton.jit
def _keep_largest(largest, values):
    # The bits of positive floats are in the order of the floats, and those of NaN are the largest.
    tl.atomic_max(largest, tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))


# `part` points to a column of a plan. See `_plan` for its rows.
@triton.jit
def _copy_block(table, largest, part, source, block, LARGEST: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip # noqa: E501
    start, numel, length, stride = tl.load(part + 16), tl.load(part + 32), tl.load(part + 48), tl.load(part + 64)
    blocks = tl.cdiv(length, BLOCK)
    chunk = block // blocks
    begin = (block - chunk * blocks) * BLOCK
    source += chunk * length + begin
    table += start + chunk * stride + begin
    written = tl.minimum(length - begin, BLOCK)
    copied = tl.minimum(numel - chunk * length - begin, written)
    if ALIGNED:  # so that the compiler vectorizes
        source, table = tl.multiple_of(source, 16), tl.multiple_of(table, 16)
        written, copied = tl.multiple_of(written, 16), tl.multiple_of(copied, 16)
    at = tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < copied, other=0.0).to(tl.float32)
    tl.store(table + at, values.to(table.dtype.element_ty), mask=at < written)
    if LARGEST:
        _keep_largest(largest + tl.load(part + 80), values)


_ADDRESSES = ["table", "largest", "plan", *(f"s{slot}" for slot in range(_SLOTS))]


# Each program copies one block of one part, and finds out which by its number. The addresses are arguments, so a
# recorded step may launch the kernel. By default, Triton would compile it again for other alignments.
@triton.jit(do_not_specialize_on_alignment=_ADDRESSES)
def _pack(table, largest, plan, s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15, LARGEST: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip # noqa: E501
    block = tl.program_id(0).to(tl.int64)
    slot = tl.sum((tl.load(plan + tl.arange(0, 16)) <= block).to(tl.int32), 0) - 1
    sources = (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)
    source = s0
    for other in tl.static_range(1, 16):
        source = tl.where(slot == other, sources[other], source)
    part = plan + slot
    block -= tl.load(part)
    if (tl.load(part + 96) != 0) & (source.to(tl.int64) % 16 == 0) & (table.to(tl.int64) % 16 == 0):
        _copy_block(table, largest, part, source, block, LARGEST, True, BLOCK)
    else:
        _copy_block(table, largest, part, source, block, LARGEST, False, BLOCK)


# Each program reads one block of one tensor. `rows` has `count` columns, see `_rows_on`, and `like` has their dtype.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["largest", "rows", "like"])
def _search(largest, rows, count, like, MOST: tl.constexpr, BLOCK: tl.constexpr):
    block, columns = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    is_before = tl.load(rows + columns, mask=columns < count, other=1 << 62) <= block
    number = tl.sum(is_before.to(tl.int32), 0) - 1
    row = rows + number
    begin = (block - tl.load(row)) * BLOCK
    rest, source = tl.load(row + count) - begin, tl.load(row + 2 * count).to(like.dtype) + begin
    at = tl.arange(0, BLOCK)
    if (rest >= BLOCK) & (source.to(tl.int64) % 16 == 0):  # so that the compiler vectorizes
        values = tl.load(tl.multiple_of(source, 16) + at).to(tl.float32)
    else:
        values = tl.load(source + at, mask=at < rest, other=0.0).to(tl.float32)
    _keep_largest(largest + number, values)


class Part(NamedTuple):
    """Where one gradient goes: its chunk `i` to element `start + i * stride` of a table, padded with zeros to `length`.

    `param` is the index of the parameter. Without a gradient (`numel` is 0), the part is zeroed.
    """

    param: int
    start: int
    numel: int
    length: int
    chunks: int = 1
    stride: int = 0

    @property
    def blocks(self) -> int:
        return self.chunks * -(-self.length // _BLOCK)


def _plan(parts: Sequence[Part]) -> torch.Tensor:
    """Return 7 rows with a column per part: first program, start, numel, length, stride, param, is aligned."""
    rows, block = list[tuple[int, ...]](), 0
    for each in parts:
        numbers = each.start, each.numel, each.length, each.stride
        rows.append((block, *numbers, each.param, not any(number % 16 for number in numbers)))
        block += each.blocks
    rows += [(_UNUSED, 0, 0, 0, 0, 0, 0)] * (_SLOTS - len(rows))
    return torch.tensor(rows).T.contiguous()


@lru_cache(maxsize=4096)
def _plan_on(device: torch.device, parts: tuple[Part, ...]) -> torch.Tensor:
    """Return the plan on `device`. Equal units share it, on whatever stream, so the host waits for the copy."""
    return _plan(parts).to(device)


def _parts_of(region: Region, tensor: torch.Tensor, offset: int, shard: Shard, world: int) -> Iterator[Part]:
    """Yield the parts of a region, which is `tensor` and begins at element `offset`. They cover all of it."""
    run, width = region.runs[0], tensor.numel() // world
    members: list[tuple[int, int, Any]] = [
        (index, start, shard.shardings[index]) for index, start in zip(run.members, run.starts, strict=True)
    ]
    if region.packed:
        for index, start, sharding in members:
            yield Part(index, offset + start, sharding.numel, sharding.piece, world, width)
        yield Part(0, offset + run.numel, 0, width - run.numel, world, width)
        return
    yield Part(0, offset, 0, members[0][1])
    ends = [start for _, start, _ in members[1:]] + [tensor.numel()]
    for (index, start, sharding), end in zip(members, ends, strict=True):
        yield Part(index, offset + start, sharding.numel, end - start)


class _Launch:
    """One launch of the kernel, for up to 16 parts of a table."""

    def __init__(self, table: torch.Tensor, parts: Sequence[Part], plan: torch.Tensor):
        self._table, self._plan = table, plan
        self._members = [each.param for each in parts]
        self._grid = (sum(each.blocks for each in parts), 1, 1)
        self._compiled: dict[tuple[torch.dtype, bool], Any] = {}

    def arguments(self, gradients: Any, finds_largest: bool) -> list[torch.Tensor] | None:
        """Return an argument for each slot, or None if the kernel cannot take these gradients."""
        try:
            sources = [gradients[param] for param in self._members]
        except KeyError:
            return None  # a missing gradient
        dtype = sources[0].dtype
        if not _are_plain(sources, dtype):
            return None
        if (dtype, finds_largest) not in self._compiled and side_stream.recording:
            return None  # nothing may be compiled during a recording
        return sources + sources[:1] * (_SLOTS - len(sources))

    def run(self, sources: list[torch.Tensor], largest: torch.Tensor | None) -> None:
        variant = sources[0].dtype, largest is not None
        arguments = self._table, self._table if largest is None else largest, self._plan, *sources
        modes = largest is not None, _BLOCK
        compiled = self._compiled.get(variant)
        if compiled is None:
            kernel = _pack[self._grid](*arguments, *modes)
            # Triton's own lookup takes longer than a launch. Its interpreter compiles nothing.
            self._compiled[variant] = kernel and kernel[self._grid]
        else:
            compiled(*arguments, *modes)


def _are_plain(tensors: list[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return True if the kernels can read `tensors`, all as `dtype`."""
    for each in tensors:
        if each.dtype is not dtype or not each.is_contiguous() or each.is_neg():
            return False
    return dtype in _DTYPES


class _Zeros:
    """Vectors of zeros, many of which are allocated and filled at once."""

    def __init__(self, numel: int, device: torch.device):
        self._numel, self._device = numel, device
        self._rest: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(())

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a vector of zeros as int32, and the same memory as float32."""
        for pair in self._rest:
            return pair
        rows = torch.zeros((64, self._numel), dtype=torch.int32, device=self._device)
        self._rest = zip(rows.unbind(), rows.view(torch.float32).unbind(), strict=True)
        return next(self._rest)


@lru_cache(maxsize=1024)
def _rows_on(device: torch.device, stream: int, tensors: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, int]:
    """Return rows with a column per tensor (first program, numel, address), and the number of programs.

    `tensors` are addresses and numbers of elements. Most steps of a training use the same ones. The rows are for
    `stream` only: other streams would not wait for their copy.
    """
    addresses, numels = zip(*tensors, strict=True)
    *firsts, programs = accumulate((-(-numel // _SEARCHED_BLOCK) for numel in numels), initial=0)
    # Tensors may change in every step, so the host must not wait for the copy.
    rows = torch.tensor((*firsts, *numels, *addresses), pin_memory=device.type != "cpu")
    return rows.to(device, non_blocking=True), programs


_searches: dict[tuple[torch.device, torch.dtype], Any] = {}


def largest_values(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the largest absolute value of each tensor, which is NaN if any value is, as a vector of float32.

    Return None if the kernel cannot take the tensors, which must be of one device. Do not call this in a recording.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    if not _are_plain(tensors, dtype):
        return None
    if current_device_index() != device.index:
        with torch.cuda.device(device):
            return largest_values(tensors)
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    largest = torch.zeros(len(tensors), dtype=torch.int32, device=device)
    for begin in range(0, len(tensors), _SEARCHED):
        some = tensors[begin : begin + _SEARCHED]
        rows, programs = _rows_on(device, stream, tuple([(each.data_ptr(), each.numel()) for each in some]))
        arguments = largest[begin:] if begin else largest, rows, len(some), some[0], _SEARCHED, _SEARCHED_BLOCK
        compiled = _searches.get((device, dtype))
        if compiled is None:
            _searches[device, dtype] = _search[programs, 1, 1](*arguments, num_warps=8)
        else:
            compiled[programs, 1, 1](*arguments)
    return largest.view(torch.float32)


class KernelPacking(Packing):
    """Leaves to torch what the kernel cannot do: missing gradients, other dtypes, and other orders of elements."""

    def __init__(self, tensors: list[torch.Tensor], regions: Sequence[Region], shard: Shard, world: int):
        super().__init__(tensors, regions, shard, world)
        self._device = tensors[0].device
        self._zeros, self._launches = _Zeros(len(shard.shardings), self._device), list[_Launch]()
        pairs = zip(regions, tensors, strict=True)
        for _, group in groupby(pairs, lambda pair: pair[0].runs[0].segment):  # of equal dtypes
            same = list(group)
            table, parts = same[0][1], list[Part]()
            for region, tensor in same:
                offset = int(tensor.storage_offset() - table.storage_offset())
                parts += [part for part in _parts_of(region, tensor, offset, shard, world) if part.length]
            for at in range(0, len(parts), _SLOTS):
                some = tuple(parts[at : at + _SLOTS])
                self._launches.append(_Launch(table, some, _plan_on(self._device, some)))

    def fill(self, gradients: Any) -> list[int]:
        if current_device_index() != self._device.index:
            with torch.cuda.device(self._device):
                return self.fill(gradients)
        reads = observer.reads_gradients
        given = [each.arguments(gradients, reads) for each in self._launches]
        if None in given:
            self.largest = None
            return super().fill(gradients)
        # The zeros may belong to a side stream, which waits for all readers before it packs again.
        zeros, self.largest = self._zeros.take() if reads else (None, None)
        for launch, sources in zip(self._launches, given, strict=True):
            launch.run(sources, zeros)  # type: ignore[arg-type]
        return []


def supports(tensors: list[torch.Tensor], regions: Sequence[Region], shard: Shard) -> bool:
    """Return True if the kernel can copy gradients to the regions, which are `tensors`."""
    for region in regions:
        run = region.runs[0]
        shardings = [shard.shardings[index] for index in run.members]
        in_order = all(each.dim == 0 and each.stride in (None, contiguous_stride(each.shape)) for each in shardings)
        if not in_order or shard.segments.kinds[run.segment].original.is_complex:
            return False
    return {each.dtype for each in tensors} <= _DTYPES


def try_out(device: torch.device) -> None:
    """Compile the kernel and run it. Raise an exception if Triton cannot compile for `device`."""
    with torch.cuda.device(device):
        ones, copy = torch.ones(16, device=device), torch.empty(16, device=device)
        parts = (Part(0, 0, 16, 16),)
        launch = _Launch(copy, parts, _plan_on(device, parts))
        for _ in range(2):  # the second run finds it compiled
            launch.run([ones] * _SLOTS, None)
            if not torch.equal(copy, ones):
                raise RuntimeError(f"copying ones wrote {copy.tolist()}")
            copy.zero_()
