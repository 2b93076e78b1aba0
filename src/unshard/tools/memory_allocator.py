"""How PyTorch's CUDA allocator rounds sizes.

A freed block is split only if more than 1 MiB would remain, or 512 bytes in segments of small blocks. So an allocation
often takes more than its size, which `torch.cuda.max_memory_allocated` counts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_MIB = 2**20
_ROUND = 512
_SMALL = _MIB
_SMALL_SEGMENT, _SEGMENT, _ALIGN = 2 * _MIB, 20 * _MIB, 2 * _MIB
_MIN_LARGE = 10 * _MIB


@dataclass
class Block:
    """A part of a segment. `before` and `after` are its neighbors."""

    size: int
    pool: tuple[bool, int]
    number: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class Allocator:
    """The blocks and segments of one device. Each stream has pools of its own."""

    def __init__(self) -> None:
        self._free: dict[tuple[bool, int], list[tuple[int, int]]] = {}
        self._blocks: dict[int, Block] = {}
        self._count = 0

    def take(self, nbytes: int, stream: int = 0) -> Block:
        """Return the smallest free block that is large enough, or a part of a new segment."""
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        pool = size <= _SMALL, stream
        free = self._free.setdefault(pool, [])
        place = bisect_left(free, (size, 0))
        block = self._blocks.pop(free.pop(place)[1]) if place < len(free) else self._segment(size, pool)
        block.free = False
        rest = block.size - size
        if rest >= _ROUND if pool[0] else rest > _SMALL:
            other = self._new(rest, pool)
            other.before, other.after, block.size = block, block.after, size
            if block.after is not None:
                block.after.before = other
            block.after = other
            self._give(other)
        return block

    def free(self, block: Block) -> None:
        """Free a block, and join it with free neighbors."""
        before, after = block.before, block.after
        if after is not None and after.free:
            self._remove(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        if before is not None and before.free:
            self._remove(before)
            before.size += block.size
            before.after = block.after
            if block.after is not None:
                block.after.before = before
            block = before
        self._give(block)

    def empty_cache(self) -> None:
        """Give back all segments without a block in use."""
        for block in list(self._blocks.values()):
            if block.before is None and block.after is None:
                self._remove(block)

    def _segment(self, size: int, pool: tuple[bool, int]) -> Block:
        whole = _SMALL_SEGMENT if pool[0] else _SEGMENT if size < _MIN_LARGE else -(-size // _ALIGN) * _ALIGN
        return self._new(whole, pool)

    def _new(self, size: int, pool: tuple[bool, int]) -> Block:
        self._count += 1
        return Block(size, pool, self._count)

    def _give(self, block: Block) -> None:
        block.free = True
        self._blocks[block.number] = block
        insort(self._free.setdefault(block.pool, []), (block.size, block.number))

    def _remove(self, block: Block) -> None:
        del self._blocks[block.number]
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.number))]
