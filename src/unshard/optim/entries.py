"""The state of a flat optimizer: flat tensors for its steps, and an entry per parameter, with views of them.

Entries are what `optimizer.state` and state dicts hold, as if the optimizer had stepped every parameter by itself. What
has an element for each one of the parameter is a DTensor there; all else (counters, above all) is as the step made it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from operator import is_
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from ..errors import ParameterError
from ..torch_private import contiguous_stride, foreach_copy, local_of, make_dtensor, spec_of
from .spans import Piece, Span

State = MutableMapping[Any, Any]


def alike(state: State) -> Callable[[Piece, Piece], bool]:
    """Whether two neighbours have state that one tensor of them can have: the same counters, above all."""

    def joined(a: Piece, b: Piece) -> bool:
        one, other = state.get(a.parameter), state.get(b.parameter)
        if one is None or other is None:
            return one is other
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)

    return joined


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.dtype != other.dtype or isinstance(one, DTensor) != isinstance(other, DTensor):
        return False
    return isinstance(one, DTensor) or (one.device == other.device and torch.equal(one, other))


def absorb(span: Span, state: State) -> dict[str, Any] | None:
    """The flat state of a span, from the entries of its parameters."""
    if span.pieces[0].parameter not in state:
        return None
    entries: list[dict[str, Any]] = [state[piece.parameter] for piece in span.pieces]
    flat: dict[str, Any] = {}
    for key, value in entries[0].items():
        if isinstance(value, DTensor):
            values = [_local(entry[key], key, piece) for entry, piece in zip(entries, span.pieces, strict=True)]
            flat[key] = _joined(span, values)
        else:
            # A copy: a state dict that somebody keeps must not count our steps.
            flat[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return flat


def _joined(span: Span, values: list[torch.Tensor]) -> torch.Tensor:
    if span.loose:
        return span.lift(values[0].to(span.flat.device))
    flat = span.new_state(values[0].dtype)
    foreach_copy(span.parts_of(span.lower(flat)), values)
    return flat


def _local(value: torch.Tensor, key: str, piece: Piece) -> torch.Tensor:
    if isinstance(value, DTensor):
        placements = spec_of(piece.parameter).placements
        if spec_of(value).placements != placements:
            # Through where the parameter is: the mesh may not reach tensors on the host.
            value = cast(DTensor, value.to(piece.local.device)).redistribute(placements=placements)
        value = local_of(value)
    if value.shape != piece.local.shape:
        raise ParameterError(
            f"The optimizer's state {key!r} of a parameter of shape {tuple(piece.parameter.shape)} should have "
            f"{tuple(piece.local.shape)} elements on this rank, and has {tuple(value.shape)}. State that was saved for "
            "another number of ranks is loaded with torch.distributed.checkpoint."
        )
    return value


def divide(span: Span, values: dict[str, Any], parts: list[Span]) -> list[dict[str, Any]]:
    """The flat state of a span for the spans it was split into: the same memory, and counters of their own."""
    divided = []
    for part in parts:
        first = (part.pieces[0].begin() - span.pieces[0].begin()) // span.flat.element_size()
        own: dict[str, Any] = {}
        for key, value in values.items():
            if span.matches(value):
                own[key] = part.lift(span.lower(value)[first : first + part.flat.numel()])
            else:
                own[key] = value.clone() if isinstance(value, torch.Tensor) else value
        divided.append(own)
    return divided


def show(span: Span, values: dict[str, Any], state: State) -> bool:
    """Let the entries of the parameters show what the flat state holds now; true if that took a change."""
    shown = span.shown
    if shown is not None and shown.keys() == values.keys() and all(map(is_, shown.values(), values.values())):
        return False
    span.shown = dict(values)
    entries = [state.setdefault(piece.parameter, {}) for piece in span.pieces]
    for key, value in values.items():
        if shown is not None and shown.get(key, span) is value:
            continue
        for number, entry in enumerate(entries):
            entry[key] = _view(span, number, value)
    for entry in entries:
        for key in [key for key in entry if key not in values]:
            del entry[key]
    return True


def _view(span: Span, number: int, value: Any) -> Any:
    if not span.matches(value):
        return value
    piece, local = span.pieces[number], span.lower(value)
    if not span.loose:
        local = _slice(local, span.starts[number], piece.local.shape)
    spec = spec_of(piece.parameter)
    return make_dtensor(local, spec.mesh, spec.placements, piece.parameter.shape)


def _slice(flat: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Some elements, as a tensor on a slice of the storage: one with an offset could not be saved inside a DTensor."""
    if not shape.numel():
        return flat.new_empty(shape)
    first, size = flat.storage_offset() + start, flat.element_size()
    storage = flat.untyped_storage()[first * size : (first + shape.numel()) * size]
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, 0, shape, contiguous_stride(shape))


def detached(state: State) -> dict[Any, Any]:
    """Entries whose counters are copies: several parameters share one here, and would advance it several times."""
    return {key: _detached(entry) if isinstance(key, DTensor) else entry for key, entry in state.items()}


def _detached(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if _shared(value) else value for key, value in entry.items()}


def _shared(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
