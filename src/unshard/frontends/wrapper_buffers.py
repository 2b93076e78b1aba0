"""The buffers of a wrapped module, which are cast at its first forward and stay so."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..torch_private import own_buffers


class CastBuffers:
    """Floating-point buffers of a unit's own modules, and the dtypes they had when it was wrapped."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype | None):
        self.dtype = dtype
        self._buffers = [
            (own_buffers(module), name, buffer.dtype)
            for module in modules
            for name, buffer in own_buffers(module).items()
            if buffer is not None and buffer.is_floating_point()
        ]

    def lower(self) -> None:
        """To the dtype of the policy, if there is one."""
        if self.dtype is not None:
            for buffers, name, _ in self._buffers:
                _cast(buffers, name, self.dtype)

    def restore(self) -> None:
        if self.dtype is not None:
            for buffers, name, original in self._buffers:
                _cast(buffers, name, original)

    def originals(self) -> dict[int, torch.dtype]:
        """The original dtype of each buffer that there is now, by its id."""
        found = ((buffers.get(name), original) for buffers, name, original in self._buffers)
        return {id(buffer): original for buffer, original in found if buffer is not None}


def _cast(buffers: dict[str, torch.Tensor | None], name: str, dtype: torch.dtype) -> None:
    buffer = buffers.get(name)
    if buffer is not None and buffer.dtype != dtype and buffer.is_floating_point():
        with torch.no_grad():
            buffers[name] = buffer.to(dtype)
