"""Memory, collectives and bytes of a rank and step as formulas of the number of ranks: those of docs/scaling.md.

Tests compare the formulas with what a rank of a simulated job of 2 to 8 ranks counts, and `benchmarks.scaling` with
larger jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from .loopback import Call

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """How a model is sharded: `world` ranks, of which `world / replicas` shard it. 0 slices: no slices are kept."""

    world: int
    replicas: int = 1
    slices: int = 0
    flat: bool = False
    """True for the wrapper, whose units are flat."""
    compute: int = 4
    """Bytes of an element in the compute dtype."""
    reduce: int = 4
    """Bytes of an element in the dtype in which gradients are reduced."""
    stored: int = 4
    """Bytes of an element of a parameter."""

    @property
    def shards(self) -> int:
        return self.world // self.replicas

    def padded(self, shapes: Sequence[Shape], ranks: int) -> int:
        """Elements of a unit that `ranks` ranks gather or reduce together."""
        if not self.flat:
            return sum(ranks * -(-shape[0] // ranks) * prod(shape[1:]) for shape in shapes)
        step, end = 16 // self.stored, 0  # parameters of a flat unit begin at multiples of 16 bytes
        for shape in shapes:
            end = -(-end // step) * step + prod(shape)
        return ranks * -(-end // ranks)

    def shard(self, shapes: Sequence[Shape]) -> int:
        """Elements of a unit's shard."""
        return self.padded(shapes, self.shards) // self.shards

    def gather(self, shapes: Sequence[Shape], ranks: int) -> Call:
        return Call("gather", self.padded(shapes, ranks) * self.compute, ranks)

    def reductions(self, shapes: Sequence[Shape]) -> list[Call]:
        whole = self.padded(shapes, self.shards) * self.reduce
        calls = [Call("reduce_scatter", whole, self.shards)]
        return calls + [Call("all_reduce", whole // self.shards, self.replicas)] * (self.replicas > 1)

    def collectives(self, units: Sequence[Sequence[Shape]], root: Sequence[Shape]) -> list[Call]:
        """The collectives of a step, in no order. `root` has the parameters of the root that are in no other unit."""
        calls = [self.gather(root, self.shards), *self.reductions(root)]
        for unit in units:
            calls += [self.gather(unit, self.shards), self.gather(unit, self.slices or self.shards)]
            calls += self.reductions(unit)
        return calls

    def at_rest(self, units: Sequence[Sequence[Shape]], root: Sequence[Shape]) -> int:
        """Bytes of the shards. Sharded gradients take as many, and Adam's state twice as many."""
        return sum(self.shard(unit) for unit in (*units, root)) * self.stored

    def gathered(self, units: Sequence[Sequence[Shape]], root: Sequence[Shape]) -> int:
        """The most bytes of unsharded parameters: the root's, those of two units, and slices of the other units."""
        two = 2 * max(self.padded(unit, self.shards) for unit in units)
        kept = sum(self.padded(unit, self.slices) // self.slices for unit in units[1:]) if self.slices else 0
        return (self.padded(root, self.shards) + two + kept) * self.compute

    def reduced(self, units: Sequence[Sequence[Shape]], root: Sequence[Shape]) -> int:
        """The most bytes of reduce-scatter inputs: those of one unit."""
        return max(self.padded(unit, self.shards) for unit in (*units, root)) * self.reduce


def sent(call: Call) -> float:
    """Bytes that a rank sends in a collective, with an algorithm that sends the least, such as a ring."""
    rounds = 2 if call.kind == "all_reduce" else 1
    return rounds * call.size * (call.ranks - 1) / call.ranks
