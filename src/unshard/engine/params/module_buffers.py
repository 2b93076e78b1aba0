"""The buffers that a unit's modules registered (a rotary table, running statistics), as forward sees them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...policies import MixedPrecisionPolicy
from ...torch_private import BATCH_NORM, own_buffers, version_of

_log = logging.getLogger("unshard")


@dataclass
class Entry:
    """One buffer: where it is registered, and its cast copy while the stored one does not change."""

    buffers: dict[str, Any]
    name: str
    path: str
    written_unseen: bool
    """Batch norm writes its statistics without a trace that autograd would keep."""
    stored: torch.Tensor | None = None
    cast: torch.Tensor | None = None
    version: int | None = None
    cast_version: int | None = None
    address: int = 0


class ModuleBuffers:
    """Shows forward the buffers in the policy's dtype. What is stored, saved and loaded keeps its own.

    A buffer that forward writes to (running statistics) is written back when forward is over.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Module]], policy: MixedPrecisionPolicy, title: str):
        """`named`: the unit's modules with the prefix of their names; `title` says whose they are."""
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
        """The same for a copied model."""
        alive = [(prefix, module) for prefix, ref in self._named if (module := ref()) is not None]
        return ModuleBuffers([(prefix, copies(module)) for prefix, module in alive], self._policy, self._title)

    def covers(self, module: nn.Module, name: str) -> bool:
        """Whether forward sees this buffer in the policy's dtype."""
        return any(entry.buffers is own_buffers(module) and entry.name == name for entry in self._entries)

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

    def forget_casts(self) -> None:
        """Cast anew in the next forward: what is stored may change, or may have changed, unseen. Not in a forward."""
        for entry in self._entries:
            entry.stored = entry.cast = None

    def _warn_of_writes(self, entry: Entry, stored: torch.Tensor) -> None:
        if self._dtype is not None and self._dtype.itemsize < stored.dtype.itemsize:
            _warn(
                f"Forward of {self._title} writes to buffer {entry.path!r}, which it sees in {self._dtype}: what is "
                "too small for its digits is lost. Name it in MixedPrecisionPolicy.keep_buffers."
            )

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
        if now is not cast or cast.shape != stored.shape:  # forward registered, or made of it, another tensor
            entry.buffers[entry.name] = now.to(stored.dtype) if now.is_floating_point() else now
            entry.cast = None
            return
        entry.buffers[entry.name] = stored
        written = _version(cast) != entry.cast_version or cast.data_ptr() != entry.address
        if written:
            self._warn_of_writes(entry, stored)
        if written or entry.written_unseen:
            with torch.inference_mode(stored.is_inference()):
                # Elements that were not written keep their digits.
                stored.copy_(torch.where(cast == stored.to(cast.dtype), stored, cast.to(stored.dtype)))
            entry.version = _version(stored)


def _version(tensor: torch.Tensor) -> int | None:
    """None for tensors made in inference mode: nobody counts what is written to them."""
    return None if tensor.is_inference() else version_of(tensor)


def _warn(message: str) -> None:
    """Once for all blocks alike, and on one rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _warn_once(message)


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def warn_of_rounding(named: Iterable[tuple[str, nn.Module]], policy: MixedPrecisionPolicy, title: str) -> None:
    """Say which buffers lose digits: a position table that does is a model that does not learn positions."""
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
            f"buffer_dtype={dtype} rounds {', '.join(rounded)} of {title}; name those that must keep their digits in "
            "MixedPrecisionPolicy.keep_buffers."
        )
    norms = [prefix.rstrip(".") or title for prefix, module in named if isinstance(module, BATCH_NORM)]
    if norms:
        _warn(
            f"buffer_dtype={dtype} lets the statistics of {', '.join(norms)} add up in that dtype, and small changes "
            'vanish. Compute these norms as they are stored: overrides={"<name>.*": torch.float32}.'
        )
