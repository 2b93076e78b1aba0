"""The buffers that a unit's modules registered (a rotary table, running statistics), as forward sees them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..policies import MixedPrecisionPolicy
from ..torch_private import BATCH_NORM, own_buffers, version_of

_log = logging.getLogger("unshard")


@dataclass
class Entry:
    """One buffer: where it is registered, and its cast copy while the stored one does not change."""

    buffers: dict[str, Any]
    name: str
    written_unseen: bool
    """Batch norm writes its statistics without a trace that autograd would keep."""
    stored: torch.Tensor | None = None
    cast: torch.Tensor | None = None
    version: int | None = None
    cast_version: int | None = None


class ModuleBuffers:
    """Shows forward the buffers in the policy's dtype. What is stored, saved and loaded keeps its own.

    A buffer that forward writes to (running statistics) is written back when forward is over.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Module]], policy: MixedPrecisionPolicy):
        """`named`: the unit's modules with the prefix of their names."""
        named = list(named)
        self._named = [(prefix, weakref.ref(module)) for prefix, module in named]
        self._policy, self._dtype = policy, policy.buffer_dtype
        self._entries = [
            Entry(own_buffers(module), name, isinstance(module, BATCH_NORM))
            for prefix, module in named
            for name, buffer in own_buffers(module).items()
            if buffer is not None and buffer.is_floating_point() and not policy.keeps_buffer(prefix + name)
        ]
        self._shown: list[bool] = []

    def of_copies(self, copies: Callable[[nn.Module], nn.Module]) -> ModuleBuffers:
        """The same for a copied model."""
        alive = [(prefix, module) for prefix, ref in self._named if (module := ref()) is not None]
        return ModuleBuffers([(prefix, copies(module)) for prefix, module in alive], self._policy)

    def enter(self, cast: bool) -> None:
        """Forward begins. Forwards may be nested; the outermost one casts."""
        if cast and True not in self._shown:
            with torch.no_grad(), torch.inference_mode(False):
                for entry in self._entries:
                    self._show(entry)
        self._shown.append(cast)

    def leave(self) -> None:
        """Forward is over, or was left by an exception."""
        if self._shown.pop() and True not in self._shown:
            with torch.no_grad(), torch.inference_mode(False):
                for entry in self._entries:
                    self._restore(entry)

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
        entry.cast, entry.cast_version = cast, _version(cast)
        entry.buffers[entry.name] = cast

    @staticmethod
    def _restore(entry: Entry) -> None:
        stored, cast = entry.stored, entry.cast
        now = entry.buffers.get(entry.name)
        if stored is None or cast is None or now is None:
            return
        if now is not cast:  # forward registered another tensor
            entry.buffers[entry.name] = now.to(stored.dtype) if now.is_floating_point() else now
            return
        entry.buffers[entry.name] = stored
        if entry.written_unseen or _version(cast) != entry.cast_version:
            with torch.inference_mode(stored.is_inference()):
                # Elements that were not written keep their digits.
                stored.copy_(torch.where(cast == stored.to(cast.dtype), stored, cast.to(stored.dtype)))
            entry.version = _version(stored)


def _version(tensor: torch.Tensor) -> int | None:
    """None for tensors made in inference mode: nobody counts what is written to them."""
    return None if tensor.is_inference() else version_of(tensor)


def warn_of_rounding(named: Iterable[tuple[str, nn.Module]], policy: MixedPrecisionPolicy) -> None:
    """Say which buffers lose digits: a position table that does is a model that does not learn positions."""
    dtype = policy.buffer_dtype
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
        _log.warning(
            "buffer_dtype=%s rounds %s; name those that must keep their digits in MixedPrecisionPolicy.keep_buffers.",
            dtype,
            ", ".join(rounded),
        )
