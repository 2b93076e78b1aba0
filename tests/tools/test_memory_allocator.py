"""The allocator of the memory plan, beside the rules of PyTorch's CUDA allocator."""

from __future__ import annotations

from unshard.tools.memory_allocator import Allocator

MIB = 2**20


def test_sizes_are_rounded() -> None:
    allocator = Allocator()
    assert allocator.take(1).size == 512 and allocator.take(513).size == 1024
    assert allocator.take(3 * MIB).size == 3 * MIB  # the rest of the segment of 20 MiB is split off


def test_a_rest_of_one_mib_is_not_split_off() -> None:
    allocator = Allocator()
    first = allocator.take(30 * MIB)
    allocator.free(first)
    assert allocator.take(29 * MIB).size == 30 * MIB
    second = Allocator()
    second.free(second.take(30 * MIB))
    assert second.take(29 * MIB - 512).size == 29 * MIB - 512


def test_free_neighbors_are_joined_within_a_segment() -> None:
    allocator = Allocator()
    blocks = [allocator.take(5 * MIB) for _ in range(4)]  # one segment of 20 MiB
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    whole = allocator.take(14 * MIB + 512)
    assert whole.size == 15 * MIB and whole.after is blocks[3]


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = Allocator()
    large, small = allocator.take(40 * MIB), allocator.take(30 * MIB)
    for block in (large, small):
        allocator.free(block)
    assert allocator.take(30 * MIB) is small
    assert allocator.take(30 * MIB, stream=1) is not large  # blocks stay with their stream


def test_the_cache_is_emptied_of_whole_segments() -> None:
    allocator = Allocator()
    kept, freed = allocator.take(12 * MIB), allocator.take(30 * MIB)
    part = allocator.take(2 * MIB)
    allocator.free(freed)
    allocator.empty_cache()
    assert allocator.take(30 * MIB) is not freed
    allocator.free(part)
    allocator.free(kept)
    assert allocator.take(12 * MIB) is kept
