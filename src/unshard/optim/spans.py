"""Spans: parameters that lie side by side and are stepped as one flat tensor.

    master shard    [ weight weight weight .. | bias | norm ]      dots are padding, always zero
    spans           [ decayed                 ][ not decayed ]      one tensor each, gradients at the same distances

A parameter outside the master shard (one that was rebound, or a DTensor made elsewhere) is a span of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..engine.flat import GradSpot, Spot, spots_of
from ..engine.grad_shard import GradShard
from ..torch_private import foreach_copy, local_of, spec_of


@dataclass(frozen=True)
class Piece:
    """One parameter's elements here, which parameter group it is in, and where they lie, if in a master shard."""

    parameter: DTensor
    group: int
    spot: Spot | None

    @property
    def local(self) -> torch.Tensor:
        return local_of(self.parameter)

    def begin(self) -> int:
        return 0 if self.spot is None else self.spot.begin


class Span:
    """Pieces side by side, and the tensor that is stepped in their place.

    `starts` are the elements of `flat` where the pieces begin. A piece that lies in no master shard is alone, and
    `flat` is its local tensor. `flat` has two dimensions of one element in front: state of its shape has an element
    for each of its own then, and all other state is no such thing, be it a counter of shape (1,) beside one element.
    """

    def __init__(self, pieces: Sequence[Piece]):
        self.pieces = list(pieces)
        first, last = pieces[0].spot, pieces[-1].spot
        self.group = pieces[0].group
        self.home = None if first is None else first.states
        """Where its state rests, if it has to be brought here for a step."""
        flat = pieces[0].local.detach()
        self.starts = [0]
        if first is not None and last is not None:
            self.starts = [(piece.begin() - first.begin) // flat.element_size() for piece in pieces]
            flat = first.master.flat(flat.dtype, first.begin, (last.end - first.begin) // flat.element_size())
        self._bare = type(flat) is not torch.Tensor
        """Subclasses may not know views, and stay as they are."""
        self.flat = self.lift(flat)
        self.shown: dict[str, Any] | None = None
        """The state that the pieces' own entries were last made from."""

    @property
    def loose(self) -> bool:
        return self.pieces[0].spot is None

    def lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the shape of `flat`."""
        return tensor if self._bare else tensor[None, None]

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape of `flat` without the dimensions in front."""
        return tensor if self._bare else tensor[0, 0]

    def matches(self, value: Any) -> bool:
        """Whether some flat state has an element for each one of `flat`."""
        return isinstance(value, torch.Tensor) and value.shape == self.flat.shape

    def new_state(self, dtype: torch.dtype) -> torch.Tensor:
        """Zeros with an element for each one of `flat`, where state rests."""
        if self.home is None:
            return torch.zeros_like(self.flat, dtype=dtype)
        nbytes = self.flat.numel() * dtype.itemsize
        return self.lift(self.home.memory(nbytes, "optimizer state").view(dtype))

    def parts_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A tensor as long as `flat`, cut into the pieces."""
        if self.loose:
            return [tensor]
        locals_ = [piece.local for piece in self.pieces]
        starts = zip(self.starts, locals_, strict=True)
        return [tensor[start : start + local.numel()].view(local.shape) for start, local in starts]

    def gradient(self, spots: dict[int, GradSpot]) -> tuple[GradShard, torch.Tensor] | None:
        """The flat gradient and where it is from, if the pieces' gradients lie as the pieces do."""
        found = [spots.get(id(piece.parameter.grad)) for piece in self.pieces]
        first = found[0]
        if self.loose or first is None:
            return None
        for number, spot in enumerate(found):
            if spot is None or not _alike(self.pieces[0], self.pieces[number], first, spot, number):
                return None
        return first.shard, first.shard.flat(self.flat.dtype, first.begin, *self.flat.shape)

    def collected_gradient(self) -> torch.Tensor:
        """A flat gradient made from whatever gradients the pieces have."""
        gradients = [_local_gradient(piece.parameter) for piece in self.pieces]
        if self.loose:
            return self.lift(gradients[0])
        flat = torch.zeros_like(self.flat)
        foreach_copy(self.parts_of(self.lower(flat)), gradients)
        return flat

    def split(self, joined: Callable[[Piece, Piece], bool]) -> list[Span]:
        runs = cut(self.pieces, joined)
        return [self] if len(runs) == 1 else [Span(run) for run in runs]


def _alike(first: Piece, piece: Piece, at: GradSpot, spot: GradSpot, number: int) -> bool:
    """Whether a gradient lies to the first one as their parameters lie."""
    together = spot.shard is at.shard and spot.order == at.order + number
    return together and spot.begin - at.begin == piece.begin() - first.begin()


def _local_gradient(parameter: DTensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    placements = spec_of(parameter).placements
    if spec_of(gradient).placements != placements:
        gradient = gradient.redistribute(placements=placements)
    return local_of(gradient)


def cut(pieces: Iterable[Piece], joined: Callable[[Piece, Piece], bool]) -> list[list[Piece]]:
    """Longest runs in which each piece is joined to the one before."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and joined(runs[-1][-1], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def pieces_of(groups: Sequence[dict[str, Any]]) -> list[Piece]:
    """The DTensors among the parameters, in the order in which they lie."""
    numbered = [(number, each) for number, group in enumerate(groups) for each in group["params"]]
    spots = spots_of(each for _, each in numbered)
    pieces = [Piece(each, number, spots.get(id(each))) for number, each in numbered if isinstance(each, DTensor)]
    masters = {id(piece.spot.master): number for number, piece in enumerate(pieces) if piece.spot is not None}
    loose = [piece for piece in pieces if piece.spot is None]
    placed = [(masters[id(piece.spot.master)], piece.spot.order, piece) for piece in pieces if piece.spot is not None]
    return [piece for *_, piece in sorted(placed, key=lambda each: each[:2])] + loose


def neighbours(groups: Sequence[dict[str, Any]]) -> Callable[[Piece, Piece], bool]:
    """Whether two pieces can be one tensor as far as layout and parameter groups go."""

    def joined(a: Piece, b: Piece) -> bool:
        if a.spot is None or b.spot is None or a.group != b.group or a.parameter.dtype != b.parameter.dtype:
            return False
        if a.spot.end < b.spot.begin and vanishes(groups[a.group].get("eps"), a.parameter.dtype):
            return False
        return a.spot.precedes(b.spot)

    return joined


def vanishes(eps: Any, dtype: torch.dtype) -> bool:
    """Whether what keeps optimizers from dividing by zero is itself nothing in `dtype`: padding would become NaN."""
    return isinstance(eps, float | int) and dtype.is_floating_point and eps < torch.finfo(dtype).tiny


def together(spots: dict[int, GradSpot]) -> Callable[[Piece, Piece], bool]:
    """Whether two neighbours can stay one tensor with the gradients they have now."""

    def joined(a: Piece, b: Piece) -> bool:
        one, other = a.parameter.grad, b.parameter.grad
        if one is None or other is None:
            return one is other
        at, spot = spots.get(id(one)), spots.get(id(other))
        # A gradient that a user made is copied to where it is needed.
        return at is None or spot is None or _alike(a, b, at, spot, 1)

    return joined
