"""Spans of shards. Each span covers adjacent parameters of a shard, and a flat optimizer steps it as one tensor.

    shard      [ weight weight weight .. | bias | norm ]     dots are padding, always zero
    spans      [ decayed                ][ not decayed ]     one tensor each; gradients have the same layout

A parameter that is not in a shard is a span of its own. An example is a DTensor that `fully_shard` did not create.

The state of a span is flat as well. `optimizer.state` and state dicts hold one entry per parameter, as if the optimizer
had stepped every parameter separately. In these entries, state with a value per element is a DTensor over a view of the
flat state. All other values are mostly counters. The parameters of a span share them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from ..engine.api import GradRange, ShardedGrad, ShardRange, grad_ranges, gradient_of, shard_ranges_of
from ..errors import ParameterError, StateError
from ..torch_private import contiguous_stride, foreach_copy, local_of, make_dtensor, spec_of

State = MutableMapping[Any, Any]


@dataclass(frozen=True)
class SpanParam:
    """A parameter, the index of its optimizer group, and its range in a shard, or None if it is not in a shard."""

    parameter: DTensor
    group: int
    shard_range: ShardRange | None

    @property
    def local(self) -> torch.Tensor:
        return local_of(self.parameter)

    @property
    def begin(self) -> int:
        return 0 if self.shard_range is None else self.shard_range.begin


class FlatSpan:
    """Adjacent parameters, and the tensor `flat` that the optimizer steps in their place.

    `flat` has the shape (1, 1, n), so that only state with a value per element has the same shape. For example, a
    counter of shape (1,) is not mistaken for the state of a single element.
    """

    def __init__(self, params: Sequence[SpanParam]):
        self.params = list(params)
        first, last = params[0].shard_range, params[-1].shard_range
        self.group = params[0].group
        self.outside_shard = first is None
        self.state_offload = None if first is None else first.states
        """Set if the span's state is on the host and each step copies that state to the device. Otherwise None."""
        flat = params[0].local.detach()
        self.starts = [0]
        """For each parameter, the index of its first element in `flat`."""
        if first is not None and last is not None:
            self.starts = [(each.begin - first.begin) // flat.element_size() for each in params]
            flat = first.shard.flat(flat.dtype, first.begin, (last.end - first.begin) // flat.element_size())
        self._is_subclass = type(flat) is not torch.Tensor
        """True for tensor subclasses, which may not support views. `flat` then keeps the shape of the local tensor."""
        self.flat = self.to_flat_shape(flat)
        self._in_entries: dict[str, Any] | None = None
        """The flat state that `update_entries` last wrote to the parameters' entries."""

    def to_flat_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._is_subclass else tensor[None, None]

    def from_flat_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._is_subclass else tensor[0, 0]

    def gradient(self, ranges: dict[int, GradRange]) -> tuple[ShardedGrad, torch.Tensor] | None:
        """Return the sharded gradient and the part of it that belongs to this span.

        Return None if the span is not in a shard, or if the program created any of the gradients. Gradients that the
        engine created have the layout of `flat`, because `_split` has split spans with other layouts.
        """
        found = [ranges.get(id(each.parameter.grad)) for each in self.params]
        first = found[0]
        if self.outside_shard or first is None or None in found:
            return None
        return first.shard, first.shard.flat(self.flat.dtype, first.begin, *self.flat.shape)

    def collected_gradient(self) -> torch.Tensor:
        """Return the gradients of the parameters as one flat tensor."""
        gradients = [_local(cast(torch.Tensor, each.parameter.grad), each) for each in self.params]
        if self.outside_shard:
            return self.to_flat_shape(gradients[0])
        return self._filled(torch.zeros_like(self.flat), gradients)

    def _filled(self, flat: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
        row = self.from_flat_shape(flat)
        places = zip(self.starts, values, strict=True)
        foreach_copy([row[start : start + each.numel()].view(each.shape) for start, each in places], values)
        return flat

    # -- state ----------------------------------------------------------------------------------------------

    def is_per_element(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.flat.shape

    def new_state(self, dtype: torch.dtype) -> torch.Tensor:
        if self.state_offload is None:
            return torch.zeros_like(self.flat, dtype=dtype)
        nbytes = self.flat.numel() * dtype.itemsize
        return self.to_flat_shape(self.state_offload.memory(nbytes, "optimizer state").view(dtype))

    def flat_state(self, state: State) -> dict[str, Any] | None:
        """Return new flat state with copies of the parameters' entries in `state`, or None if there are no entries."""
        if self.params[0].parameter not in state:
            return None
        entries: list[dict[str, Any]] = [state[each.parameter] for each in self.params]
        flat: dict[str, Any] = {}
        for key, value in entries[0].items():
            if isinstance(value, DTensor):
                flat[key] = self._joined(key, [entry[key] for entry in entries])
            else:
                flat[key] = own_copy(value)  # steps must not change a state dict that the user keeps
        return flat

    def _joined(self, key: str, values: list[torch.Tensor]) -> torch.Tensor:
        values = list(map(_local, values, self.params))
        for value, param in zip(values, self.params, strict=True):
            if value.shape != param.local.shape:
                raise ParameterError(
                    f"The optimizer's state {key!r} of a parameter of shape {tuple(param.parameter.shape)} should have "
                    f"the shape {tuple(param.local.shape)} on this rank, but has {tuple(value.shape)}. To load state "
                    "that was saved for another number of ranks, use torch.distributed.checkpoint."
                )
        if self.outside_shard:
            return self.to_flat_shape(values[0].to(self.flat.device))
        return self._filled(self.new_state(values[0].dtype), values)

    def state_of_part(self, values: dict[str, Any], part: FlatSpan) -> dict[str, Any]:
        """Return the flat state of `part`: views of the per-element tensors in `values`, and copies of the counters."""
        first = (part.params[0].begin - self.params[0].begin) // self.flat.element_size()
        last = first + part.flat.numel()
        return {
            key: part.to_flat_shape(self.from_flat_shape(value)[first:last])
            if self.is_per_element(value)
            else own_copy(value)
            for key, value in values.items()
        }

    def update_entries(self, values: dict[str, Any], state: State) -> bool:
        """Update the entries in `state` from the flat state `values`. Return True if any entry has changed."""
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


def _local(value: torch.Tensor, param: SpanParam) -> torch.Tensor:
    """Return the local tensor of a gradient or state tensor, redistributed to the placements of the parameter."""
    if not isinstance(value, DTensor):
        return value
    placements = spec_of(param.parameter).placements
    if spec_of(value).placements != placements:
        # On the parameter's device: the mesh may not support tensors on the host.
        value = cast(DTensor, value.to(param.local.device)).redistribute(placements=placements)
    return local_of(value)


def _on_storage_slice(flat: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Return a view of `flat` from index `start`, with storage offset 0. DTensors with an offset cannot be saved."""
    if not shape.numel():
        return flat.new_empty(shape)
    first, size = flat.storage_offset() + start, flat.element_size()
    storage = flat.untyped_storage()[first * size : (first + shape.numel()) * size]
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(storage, 0, shape, contiguous_stride(shape))


def own_copy(value: Any) -> Any:
    """Return `value`, or a clone if `value` is a plain tensor (a counter), which steps change in place."""
    return value.clone() if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else value


# -- which parameters can be in one span ----------------------------------------------------------------------


def _runs_of(params: Iterable[SpanParam], joined: Callable[[SpanParam, SpanParam], bool]) -> list[list[SpanParam]]:
    """Split `params` into the longest runs in which `joined(previous, next)` is true for all neighbors."""
    runs: list[list[SpanParam]] = []
    for param in params:
        if runs and joined(runs[-1][-1], param):
            runs[-1].append(param)
        else:
            runs.append([param])
    return runs


def _in_memory_order(numbered: list[tuple[int, torch.Tensor]]) -> list[SpanParam]:
    """Return the DTensors among the parameters in memory order. DTensors that are not in a shard come last."""
    ranges = shard_ranges_of(each for _, each in numbered)
    params = [SpanParam(each, number, ranges.get(id(each))) for number, each in numbered if isinstance(each, DTensor)]
    inside = [(each.shard_range, each) for each in params if each.shard_range is not None]
    shards = {id(place.shard): number for number, (place, _) in enumerate(inside)}
    ordered = sorted(inside, key=lambda each: (shards[id(each[0].shard)], each[0].order))
    return [each for _, each in ordered] + [each for each in params if each.shard_range is None]


def _adjacent(groups: Sequence[dict[str, Any]], state: State, a: SpanParam, b: SpanParam) -> bool:
    """Return True if the memory, optimizer groups and state of `a` and `b` allow both to be in one span."""
    one, other, dtype = a.shard_range, b.shard_range, a.parameter.dtype
    if one is None or other is None or a.group != b.group or dtype != b.parameter.dtype:
        return False
    eps = groups[a.group].get("eps")
    rounds_to_zero = isinstance(eps, float | int) and dtype.is_floating_point and eps < torch.finfo(dtype).tiny
    if one.end < other.begin and rounds_to_zero:
        return False  # optimizers add `eps` to a divisor: if `eps` rounds to zero, padding becomes NaN
    return one.precedes(other) and _same_state(state.get(a.parameter), state.get(b.parameter))


def _same_state(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
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


def _adjacent_gradients(ranges: dict[int, GradRange], a: SpanParam, b: SpanParam) -> bool:
    one, other = a.parameter.grad, b.parameter.grad
    if one is None or other is None:
        return one is other
    a_grad, b_grad = ranges.get(id(one)), ranges.get(id(other))
    if a_grad is None or b_grad is None:
        return True  # a gradient that the program made is copied into a flat one
    return a_grad.precedes(b_grad) and b_grad.begin - a_grad.begin == b.begin - a.begin


# -- the optimizer groups of a step ---------------------------------------------------------------------------

FlatGrads = list[tuple[FlatSpan, torch.Tensor]]
"""Spans with their flat gradients, which are views of sharded gradients."""


class FlatGroups:
    """The spans of an optimizer's parameters and their flat state.

    Spans depend on the parameters and their memory, the optimizer's state and the gradients. If none of these has
    changed, a step reuses the previous spans. Such a step makes a few comparisons per parameter and at most one torch
    call per span.
    """

    def __init__(self) -> None:
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.spans: list[FlatSpan] = []
        self.streamed: list[FlatSpan] = []
        """Spans of the current step whose state is on the host."""
        self._plain: list[tuple[int, torch.Tensor]] = []
        self._other_state: dict[Any, Any] = {}
        self._parameters: list[DTensor] = []
        self._locals: list[torch.Tensor] = []
        self._layout: list[Any] = []
        self._entries: list[Any] = []
        self._optimizer_state: Any = None
        self._gradients: list[int] | None = None
        self._flat_grads: FlatGrads = []
        self.flat_grads_by_shard: list[tuple[weakref.ref[ShardedGrad], FlatGrads]] = []
        """The contents of `_flat_grads`, grouped by sharded gradient."""
        self._collected: list[FlatSpan] = []
        """Spans for which the program created a gradient. Each step copies their gradients into new flat gradients."""

    def begin_step(self, optimizer: Any, done: Sequence[FlatSpan] = ()) -> list[dict[str, Any]]:
        """Return optimizer groups for one step, with flat tensors whose gradients are set. Call `end_step` afterwards.

        Backward has already stepped the spans in `done`. The groups contain neither these nor the spans in `streamed`.
        """
        if not self.is_current(optimizer):
            if done:
                raise StateError(
                    "The optimizer's parameters, groups or state were changed between backward and step(). With "
                    "step_in_backward=True, backward has already stepped some of them. Make such changes after step()."
                )
            self._rebuild(optimizer)
        self._find_gradients(optimizer.state)
        skipped = set(map(id, done))
        if not skipped <= {id(span) for span, _ in self._flat_grads}:
            raise StateError(
                "Gradients were replaced or cleared between backward and step(). With step_in_backward=True, backward "
                "has already stepped them, and these steps are kept. Leave gradients unchanged, or leave out "
                "step_in_backward=True."
            )
        # The step sees the current state of plain parameters, and of all other keys.
        self._other_state = {key: value for key, value in optimizer.state.items() if not isinstance(key, DTensor)}
        own = {span.flat: self.state[span.flat] for span in self.spans if span.flat in self.state}
        self.state = defaultdict(dict, {**self._other_state, **own})
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        for number, parameter in self._plain:
            groups[number]["params"].append(parameter)
        for span, gradient in self._flat_grads:
            span.flat.grad = gradient
        for span in self._collected:
            span.flat.grad = span.collected_gradient()
        stepped = [span for span in self._with_gradient() if id(span) not in skipped]
        self.streamed = [span for span in stepped if span.state_offload is not None]
        for span in stepped:
            if span.state_offload is None:
                groups[span.group]["params"].append(span.flat)
        return groups

    @torch.no_grad()
    def follow_changes(self, optimizer: Any) -> None:
        """Rebuild spans and flat state if parameters, optimizer groups or state have changed since the last step."""
        if not self.is_current(optimizer):
            self._rebuild(optimizer)

    def end_step(self, optimizer: Any, groups: list[dict[str, Any]]) -> None:
        """Drop the flat gradients. Update the optimizer with the state and options that the step has changed."""
        for param_group, group in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = param_group["params"]
            param_group.update(group)
        self.update_entries(self._with_gradient(), optimizer.state)
        own = {id(span.flat) for span in self.spans}
        others = {key: value for key, value in self.state.items() if id(key) not in own}
        for key in self._other_state.keys() - others.keys():
            del optimizer.state[key]
        optimizer.state.update(others)
        self._other_state = {}

    def update_entries(self, spans: Sequence[FlatSpan], state: Any) -> None:
        """Drop the flat gradients of `spans`, and update the entries in `state` from their flat state."""
        changed = False
        for span in spans:
            span.flat.grad = None
            if span.flat in self.state:
                changed |= span.update_entries(self.state[span.flat], state)
        if changed:
            self._entries = _entries(state)

    def _with_gradient(self) -> list[FlatSpan]:
        return [*(span for span, _ in self._flat_grads), *self._collected]

    def is_current(self, optimizer: Any) -> bool:
        """Return True if parameters, their memory, optimizer groups and state have not changed since `_rebuild`."""
        if _layout(optimizer.param_groups) != self._layout or optimizer.state is not self._optimizer_state:
            return False
        entries = _entries(optimizer.state)
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        return all(map(is_, map(local_of, self._parameters), self._locals))

    def _rebuild(self, optimizer: Any) -> None:
        """Create the longest spans that `_adjacent` allows. Copy their flat state from the parameters' entries."""
        groups, state = optimizer.param_groups, optimizer.state
        numbered = [(number, each) for number, group in enumerate(groups) for each in group["params"]]
        params = _in_memory_order(numbered)
        self.spans = [FlatSpan(run) for run in _runs_of(params, partial(_adjacent, groups, state))]
        self._plain = [(number, each) for number, each in numbered if not isinstance(each, DTensor)]
        self._parameters = [each.parameter for each in params]
        self._locals = [each.local for each in params]
        # One span after the other, so that there are never two copies of all state.
        self.state = defaultdict(dict)
        for span in self.spans:
            if (flat := span.flat_state(state)) is not None:
                self.state[span.flat] = flat
                span.update_entries(flat, state)
        self._layout, self._optimizer_state, self._entries = _layout(groups), state, _entries(state)
        self._gradients = None

    def _find_gradients(self, state: Any) -> None:
        """Find the flat gradient of each span. Split spans for good if only some of their parameters have gradients."""
        gradients = list(map(id, map(gradient_of, self._parameters)))
        known = gradients == self._gradients and None not in [shard() for shard, _ in self.flat_grads_by_shard]
        if known and not self._collected:
            return
        self._gradients = gradients
        ranges = grad_ranges(self._parameters)
        self._split(ranges, state)
        self._flat_grads, self._collected = [], []
        by_shard: dict[int, tuple[weakref.ref[ShardedGrad], FlatGrads]] = {}
        for span in self.spans:
            if span.params[0].parameter.grad is None:
                continue
            found = span.gradient(ranges)
            if found is None:
                self._collected.append(span)
            else:
                shard, flat_grad = found
                self._flat_grads.append((span, flat_grad))
                by_shard.setdefault(id(shard), (weakref.ref(shard), []))[1].append((span, flat_grad))
        self.flat_grads_by_shard = list(by_shard.values())

    def _split(self, ranges: dict[int, GradRange], state: Any) -> None:
        spans: list[FlatSpan] = []
        for span in self.spans:
            runs = _runs_of(span.params, partial(_adjacent_gradients, ranges))
            parts = [span] if len(runs) == 1 else [FlatSpan(run) for run in runs]
            spans += parts
            if len(parts) > 1 and (values := self.state.pop(span.flat, None)) is not None:
                for part in parts:
                    own = self.state[part.flat] = span.state_of_part(values, part)
                    part.update_entries(own, state)
        if len(spans) > len(self.spans):
            self.spans = spans
            self._entries = _entries(state)


def _layout(groups: list[dict[str, Any]]) -> list[Any]:
    # `eps` limits how long spans may be, see `_adjacent`.
    return [(group.get("eps"), list(map(id, group["params"]))) for group in groups]


def _entries(state: Any) -> list[Any]:
    """Return the state values of all DTensors. Comparing ids instead would be wrong, because Python reuses ids."""
    return [value for key, entry in state.items() if isinstance(key, DTensor) for value in entry.values()]
