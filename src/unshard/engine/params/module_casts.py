"""Dtype casts during forward.

This module casts the buffers of a unit's modules, and the inputs and outputs of modules with a dtype override.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...policies import DtypeOverride, MixedPrecisionPolicy
from ...torch_private import BATCH_NORM, own_buffers, own_parameters, version_of
from ..forward_tensors import cast_floats
from ..states import Precision
from .param import ManagedParam

_log = logging.getLogger("unshard")


@dataclass
class Entry:
    """A buffer of a module, and a cast copy of the buffer. The copy is valid until the stored buffer changes."""

    buffers: dict[str, Any]
    name: str
    path: str
    written_unseen: bool
    """True for the running statistics of batch norm. Batch norm writes them without changing their version counters."""
    stored: torch.Tensor | None = None
    cast: torch.Tensor | None = None
    version: int | None = None
    cast_version: int | None = None
    address: int = 0


class ModuleBuffers:
    """Casts the buffers of a unit's modules to the policy's `buffer_dtype` during forward.

    Examples of such buffers are rotary tables and running statistics. Outside forward, modules hold the stored buffers
    in their own dtypes, so saving and loading are not affected. Values that forward writes to a cast buffer are copied
    to the stored buffer when forward ends.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Module]], policy: MixedPrecisionPolicy, title: str):
        """Collect the buffers of the modules in `named`, pairs of a name prefix and a module.

        `title` names the unit in warnings.
        """
        named = list(named)
        self._named = [(prefix, weakref.ref(module)) for prefix, module in named]
        self._policy, self._dtype, self._title = policy, policy.buffer_dtype, title
        self._entries = [
            Entry(own_buffers(module), name, prefix + name, isinstance(module, BATCH_NORM))
            for prefix, module in named
            for name, buffer in own_buffers(module).items()
            if buffer is not None and buffer.is_floating_point() and not policy.keeps_buffer(prefix + name)
        ]
        self._shown: list[bool] = []

    def of_copies(self, copies: Callable[[nn.Module], nn.Module]) -> ModuleBuffers:
        """Return the `ModuleBuffers` of a copied model. `copies` maps a module to its copy."""
        alive = [(prefix, module) for prefix, ref in self._named if (module := ref()) is not None]
        return ModuleBuffers([(prefix, copies(module)) for prefix, module in alive], self._policy, self._title)

    def covers(self, module: nn.Module, name: str) -> bool:
        """Return True if forward sees this buffer in the policy's `buffer_dtype`."""
        return any(entry.buffers is own_buffers(module) and entry.name == name for entry in self._entries)

    def enter(self, cast: bool) -> None:
        """Put the cast buffers on the modules if `cast` is True. Call this method when a forward begins.

        If forwards are nested, only the outermost forward with `cast` puts them there.
        """
        if cast and True not in self._shown:
            with torch.no_grad(), torch.inference_mode(False):
                for entry in self._entries:
                    self._show(entry)
        self._shown.append(cast)

    def leave(self) -> None:
        """Put the stored buffers back on the modules. Call this method when a forward ends or raises an exception."""
        if self._shown.pop() and True not in self._shown:
            with torch.no_grad(), torch.inference_mode(False):
                for entry in self._entries:
                    self._restore(entry)

    def forget_casts(self) -> None:
        """Delete the cast copies, because stored buffers may change undetected.

        Do not call this method during a forward.
        """
        for entry in self._entries:
            entry.stored = entry.cast = None

    def _show(self, entry: Entry) -> None:
        stored = entry.buffers.get(entry.name)
        if stored is None or not stored.is_floating_point() or stored.dtype == self._dtype:
            entry.stored = entry.cast = None
            return
        version = _version(stored)
        cast = entry.cast
        if cast is None or entry.stored is not stored or entry.version != version or version is None:
            cast = stored.to(self._dtype)
        entry.stored, entry.version = stored, version
        entry.cast, entry.cast_version, entry.address = cast, _version(cast), cast.data_ptr()
        entry.buffers[entry.name] = cast

    def _restore(self, entry: Entry) -> None:
        stored, cast = entry.stored, entry.cast
        now = entry.buffers.get(entry.name)
        if stored is None or cast is None or now is None:
            return
        if now is not cast or cast.shape != stored.shape:  # forward registered another buffer, or resized it
            entry.buffers[entry.name] = now.to(stored.dtype) if now.is_floating_point() else now
            entry.cast = None
            return
        entry.buffers[entry.name] = stored
        written = _version(cast) != entry.cast_version or cast.data_ptr() != entry.address
        if written and self._dtype is not None and self._dtype.itemsize < stored.dtype.itemsize:
            _warn(
                f"Forward of {self._title} writes to buffer {entry.path!r}, which it sees in {self._dtype}: small "
                "changes are rounded away. Name the buffer in MixedPrecisionPolicy.keep_buffers."
            )
        if written or entry.written_unseen:
            with torch.inference_mode(stored.is_inference()):
                # Elements that forward did not write keep their full precision.
                stored.copy_(torch.where(cast == stored.to(cast.dtype), stored, cast.to(stored.dtype)))
            entry.version = _version(stored)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else version_of(tensor)  # inference tensors have no version counter


def _warn(message: str) -> None:
    """Log a warning on rank 0. A text is logged only once, even if several units warn with the same text."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _warn_once(message)


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def warn_of_rounding(named: Iterable[tuple[str, nn.Module]], policy: MixedPrecisionPolicy, title: str) -> None:
    """Warn about buffers whose values change when they are cast to `buffer_dtype`.

    For example, a model whose position table is rounded does not learn positions.
    """
    dtype, named = policy.buffer_dtype, list(named)
    rounded = [
        prefix + name
        for prefix, module in named
        for name, buffer in own_buffers(module).items()
        if buffer is not None
        and buffer.is_floating_point()
        and not buffer.is_meta
        and not policy.keeps_buffer(prefix + name)
        and not torch.equal(buffer, buffer.to(dtype).to(buffer.dtype))
    ]
    if rounded:
        _warn(
            f"buffer_dtype={dtype} rounds {', '.join(rounded)} of {title}. Name those that must keep their precision "
            "in MixedPrecisionPolicy.keep_buffers."
        )
    norms = [prefix.rstrip(".") or title for prefix, module in named if isinstance(module, BATCH_NORM)]
    if norms:
        _warn(
            f"buffer_dtype={dtype} accumulates the statistics of {', '.join(norms)} in that dtype, and small changes "
            'vanish. Keep these norms in their stored dtype: overrides={"<name>.*": torch.float32}.'
        )


class CastBoundary:
    """Casts the inputs and outputs of a module with a dtype override.

    Inputs are cast to the dtype of the override, and outputs to the dtype of the surrounding modules.
    """

    def __init__(self, state: Any, policy: MixedPrecisionPolicy):
        """Create the hooks of one module. `state` is the `FSDPState` of the module's unit.

        A reference to the unit would be wrong after a deep copy, because the copied model has another unit.
        """
        self._state, self._policy = state, policy

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._policy.cast_forward_inputs and self._state.unit.precision is Precision.POLICY:
            return cast_floats((args, kwargs), self._policy.param_dtype)
        return None

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        return (
            cast_floats(output, self._policy.output_dtype) if self._state.unit.precision is Precision.POLICY else None
        )


def cast_boundaries(
    tops: Sequence[nn.Module], params: Sequence[ManagedParam], policy: MixedPrecisionPolicy
) -> list[tuple[nn.Module, MixedPrecisionPolicy]]:
    """Return the outermost modules below `tops` whose parameters all have the same override, with that override."""
    if not policy.overrides or len({param.policy for param in params}) == 1:
        return []  # nothing is overridden, or everything: see `boundary_policy`
    surroundings = policy.param_dtype
    if surroundings is None:  # the rest of the unit computes in its stored dtype, if it has only one
        stored = {each.sharded.dtype for each in params if each.policy is policy and each.sharded.is_floating_point()}
        surroundings = stored.pop() if len(stored) == 1 else None
    own = {(id(location.parameters), location.name): param.policy for param in params for location in param.locations}
    found: dict[nn.Module, MixedPrecisionPolicy] = {}
    for top in tops:
        for child in top.children():
            _search(child, own, policy, found)
    return [
        (module, replace(each, output_dtype=surroundings) if isinstance(each, DtypeOverride) else each)
        for module, each in found.items()
    ]


def boundary_policy(params: Sequence[ManagedParam], policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy that applies to the inputs and outputs of a unit.

    If all `params` have the same override, the dtypes of the override apply. Otherwise, `policy` applies.
    """
    policies = {param.policy for param in params}
    if len(policies) != 1 or policy in policies:
        return policy
    override = policies.pop()
    return replace(
        policy,
        param_dtype=override.param_dtype,
        output_dtype=policy.output_dtype or override.output_dtype,
        cast_forward_inputs=override.cast_forward_inputs,
    )


def _search(
    module: nn.Module,
    own: dict[tuple[int, str], MixedPrecisionPolicy],
    usual: MixedPrecisionPolicy,
    found: dict[nn.Module, MixedPrecisionPolicy],
) -> None:
    policies = {
        own.get((id(own_parameters(child)), name), usual)
        for child in module.modules()
        for name, parameter in own_parameters(child).items()
        if parameter is not None
    }
    if len(policies) == 1 and usual not in policies:
        found[module] = policies.pop()
    elif policies - {usual}:
        for child in module.children():
            _search(child, own, usual, found)
