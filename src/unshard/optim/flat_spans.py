"""Flat spans: adjacent parameters that a flat optimizer steps as one tensor, and their state.

    shard      [ weight weight weight .. | bias | norm ]     dots are padding, always zero
    spans      [ decayed                ][ not decayed ]     one tensor each, gradients at the same distances

A parameter outside any shard (rebound, or a DTensor made elsewhere) is a span of its own.

The state of a span is flat as well. `optimizer.state` and state dicts hold one entry per parameter, as if the optimizer
had stepped every parameter separately. State with a value per element is a DTensor there, over a view of the flat
state; all other values (mostly counters) are those that the step created.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from ..engine.api import GradRange, ShardedGrad, ShardRange, shard_ranges_of
from ..errors import ParameterError
from ..torch_private import contiguous_stride, foreach_copy, local_of, make_dtensor, spec_of

State = MutableMapping[Any, Any]


@dataclass(frozen=True)
class SpanParam:
    """A parameter, the number of its optimizer group, and its range in a shard if it is in one."""

    parameter: DTensor
    group: int
    shard_range: ShardRange | None

    @property
    def local(self) -> torch.Tensor:
        return local_of(self.parameter)

    @property
    def begin(self) -> int:
        return 0 if self.shard_range is None else self.shard_range.begin


Joined = Callable[[SpanParam, SpanParam], bool]
"""Returns True if two parameters can be in one span."""


class FlatSpan:
    """Adjacent parameters, and the tensor `flat` that is stepped in their place.

    `flat` has the shape (1, 1, n), so only state with a value per element has its shape: a counter of shape (1,) is not
    mistaken for the state of a single element.
    """

    def __init__(self, params: Sequence[SpanParam]):
        self.params = list(params)
        first, last = params[0].shard_range, params[-1].shard_range
        self.group = params[0].group
        self.outside_shard = first is None
        self.state_offload = None if first is None else first.states
        """Holds the state on the host, if it is copied to the device for a step."""
        flat = params[0].local.detach()
        self.starts = [0]
        """The elements of `flat` where the parameters begin."""
        if first is not None and last is not None:
            self.starts = [(each.begin - first.begin) // flat.element_size() for each in params]
            flat = first.shard.flat(flat.dtype, first.begin, (last.end - first.begin) // flat.element_size())
        self._is_subclass = type(flat) is not torch.Tensor
        """Subclasses may not support views; `flat` is then the local tensor itself."""
        self.flat = self.to_flat_shape(flat)
        self._in_entries: dict[str, Any] | None = None
        """The flat state that the parameters' entries were last made from."""

    def to_flat_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        """From (n,) to (1, 1, n)."""
        return tensor if self._is_subclass else tensor[None, None]

    def from_flat_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        """From (1, 1, n) to (n,)."""
        return tensor if self._is_subclass else tensor[0, 0]

    def gradient(self, ranges: dict[int, GradRange]) -> tuple[ShardedGrad, torch.Tensor] | None:
        """The flat gradient and the sharded gradient around it, or None if gradients are not laid out like `flat`."""
        found = [ranges.get(id(each.parameter.grad)) for each in self.params]
        first = found[0]
        if self.outside_shard or first is None:
            return None
        for number, other in enumerate(found):
            if other is None or not _same_distance(self.params[0], self.params[number], first, other, number):
                return None
        return first.shard, first.shard.flat(self.flat.dtype, first.begin, *self.flat.shape)

    def collected_gradient(self) -> torch.Tensor:
        """A flat gradient, copied from the parameters' own gradients."""
        gradients = [_local(cast(torch.Tensor, each.parameter.grad), each) for each in self.params]
        if self.outside_shard:
            return self.to_flat_shape(gradients[0])
        flat = torch.zeros_like(self.flat)
        foreach_copy(self._views(flat), gradients)
        return flat

    def _views(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A view for each parameter, of a tensor like `flat`."""
        flat, locals_ = self.from_flat_shape(tensor), [each.local for each in self.params]
        starts = zip(self.starts, locals_, strict=True)
        return [flat[start : start + local.numel()].view(local.shape) for start, local in starts]

    # -- state ----------------------------------------------------------------------------------------------

    def is_per_element(self, value: Any) -> bool:
        """Return True if flat state has a value for each element of `flat`."""
        return isinstance(value, torch.Tensor) and value.shape == self.flat.shape

    def new_state(self, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in the shape of `flat`, on the host if the state is offloaded."""
        if self.state_offload is None:
            return torch.zeros_like(self.flat, dtype=dtype)
        nbytes = self.flat.numel() * dtype.itemsize
        return self.to_flat_shape(self.state_offload.memory(nbytes, "optimizer state").view(dtype))

    def flat_state(self, state: State) -> dict[str, Any] | None:
        """The flat state, copied from the entries of the parameters."""
        if self.params[0].parameter not in state:
            return None
        entries: list[dict[str, Any]] = [state[each.parameter] for each in self.params]
        flat: dict[str, Any] = {}
        for key, value in entries[0].items():
            if isinstance(value, DTensor):
                values = [_local_state(entry[key], key, each) for entry, each in zip(entries, self.params, strict=True)]
                flat[key] = self._joined(values)
            else:
                flat[key] = _own_copy(value)  # steps must not change a state dict that the user keeps
        return flat

    def _joined(self, values: list[torch.Tensor]) -> torch.Tensor:
        if self.outside_shard:
            return self.to_flat_shape(values[0].to(self.flat.device))
        flat = self.new_state(values[0].dtype)
        foreach_copy(self._views(flat), values)
        return flat

    def state_of_part(self, values: dict[str, Any], part: FlatSpan) -> dict[str, Any]:
        """The flat state of a span that this one was split into: the same memory, but its own counters."""
        first = (part.params[0].begin - self.params[0].begin) // self.flat.element_size()
        last = first + part.flat.numel()
        return {
            key: part.to_flat_shape(self.from_flat_shape(value)[first:last])
            if self.is_per_element(value)
            else _own_copy(value)
            for key, value in values.items()
        }

    def update_entries(self, values: dict[str, Any], state: State) -> bool:
        """Make the parameters' entries agree with the flat state `values`. Return True if any entry has changed."""
        before = self._in_entries
        if before is not None and before.keys() == values.keys() and all(map(is_, before.values(), values.values())):
            return False
        self._in_entries = dict(values)
        entries = [state.setdefault(each.parameter, {}) for each in self.params]
        for key, value in values.items():
            if before is not None and before.get(key, self) is value:
                continue
            for number, entry in enumerate(entries):
                entry[key] = self._entry_value(number, value)
        for entry in entries:
            for key in entry.keys() - values.keys():
                del entry[key]
        return True

    def _entry_value(self, number: int, value: Any) -> Any:
        if not self.is_per_element(value):
            return value
        param, local = self.params[number], self.from_flat_shape(value)
        if not self.outside_shard:
            local = _on_storage_slice(local, self.starts[number], param.local.shape)
        spec = spec_of(param.parameter)
        return make_dtensor(local, spec.mesh, spec.placements, param.parameter.shape)


def _same_distance(a: SpanParam, b: SpanParam, a_grad: GradRange, b_grad: GradRange, number: int) -> bool:
    """Return True if the gradients of `a`, and of `b` `number` parameters later, are as far apart as `a` and `b`."""
    in_order = b_grad.shard is a_grad.shard and b_grad.order == a_grad.order + number
    return in_order and b_grad.begin - a_grad.begin == b.begin - a.begin


def _local(value: torch.Tensor, param: SpanParam) -> torch.Tensor:
    """The local tensor of a gradient or of state, in the parameter's placements."""
    if not isinstance(value, DTensor):
        return value
    placements = spec_of(param.parameter).placements
    if spec_of(value).placements != placements:
        # On the parameter's device: the mesh may not support tensors on the host.
        value = cast(DTensor, value.to(param.local.device)).redistribute(placements=placements)
    return local_of(value)


def _local_state(value: torch.Tensor, key: str, param: SpanParam) -> torch.Tensor:
    value = _local(value, param)
    if value.shape != param.local.shape:
        raise ParameterError(
            f"The optimizer's state {key!r} of a parameter of shape {tuple(param.parameter.shape)} should have the "
            f"shape {tuple(param.local.shape)} on this rank, but has {tuple(value.shape)}. To load state that was "
            "saved for another number of ranks, use torch.distributed.checkpoint."
        )
    return value


def _on_storage_slice(flat: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Elements of `flat` on a slice of its storage: a tensor with an offset could not be saved inside a DTensor."""
    if not shape.numel():
        return flat.new_empty(shape)
    first, size = flat.storage_offset() + start, flat.element_size()
    storage = flat.untyped_storage()[first * size : (first + shape.numel()) * size]
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, 0, shape, contiguous_stride(shape))


def _own_copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


# -- which parameters can be in one span ----------------------------------------------------------------------


def runs_of(params: Iterable[SpanParam], joined: Joined) -> list[list[SpanParam]]:
    """The longest runs in which each parameter is joined to the previous one."""
    runs: list[list[SpanParam]] = []
    for param in params:
        if runs and joined(runs[-1][-1], param):
            runs[-1].append(param)
        else:
            runs.append([param])
    return runs


def params_in_memory_order(groups: Sequence[dict[str, Any]]) -> list[SpanParam]:
    """The DTensors among the parameters: shard by shard in the order of their ranges, those outside shards last."""
    numbered = [(number, each) for number, group in enumerate(groups) for each in group["params"]]
    ranges = shard_ranges_of(each for _, each in numbered)
    params = [SpanParam(each, number, ranges.get(id(each))) for number, each in numbered if isinstance(each, DTensor)]
    inside = [(each.shard_range, each) for each in params if each.shard_range is not None]
    shards = {id(place.shard): number for number, (place, _) in enumerate(inside)}
    ordered = sorted(inside, key=lambda each: (shards[id(each[0].shard)], each[0].order))
    return [each for _, each in ordered] + [each for each in params if each.shard_range is None]


def adjacent(groups: Sequence[dict[str, Any]], state: State) -> Joined:
    """Memory, optimizer groups and state allow two parameters to be one tensor."""

    def joined(a: SpanParam, b: SpanParam) -> bool:
        one, other = a.shard_range, b.shard_range
        if one is None or other is None or a.group != b.group or a.parameter.dtype != b.parameter.dtype:
            return False
        if one.end < other.begin and _rounds_to_zero(groups[a.group].get("eps"), a.parameter.dtype):
            return False
        return one.precedes(other) and _same_state(state.get(a.parameter), state.get(b.parameter))

    return joined


def _rounds_to_zero(eps: Any, dtype: torch.dtype) -> bool:
    """Return True if the `eps` that optimizers add to a divisor is zero in `dtype`: padding would become NaN."""
    return isinstance(eps, float | int) and dtype.is_floating_point and eps < torch.finfo(dtype).tiny


def _same_state(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Return True if two entries fit one tensor: the same keys and dtypes, and equal counters."""
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(_same_value(one[key], other[key]) for key in one)


def _same_value(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.dtype != other.dtype or isinstance(one, DTensor) != isinstance(other, DTensor):
        return False
    return isinstance(one, DTensor) or (one.device == other.device and torch.equal(one, other))


def adjacent_gradients(ranges: dict[int, GradRange]) -> Joined:
    """Two adjacent parameters can stay one tensor with their present gradients."""

    def joined(a: SpanParam, b: SpanParam) -> bool:
        one, other = a.parameter.grad, b.parameter.grad
        if one is None or other is None:
            return one is other
        a_grad, b_grad = ranges.get(id(one)), ranges.get(id(other))
        # A gradient that the program made is copied into a flat one.
        return a_grad is None or b_grad is None or _same_distance(a, b, a_grad, b_grad, 1)

    return joined
