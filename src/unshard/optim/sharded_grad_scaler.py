"""`ShardedGradScaler`: the scaler that programs written for the wrapper use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ArgumentError, ConflictError
from .grad_scaler import GradScaler
from .peers import Peers


class ShardedGradScaler(GradScaler):
    """A gradient scaler for shards that are plain tensors: all ranks of `process_group` skip the same steps.

    Gradients may be in float16 and on the host, and a rank may have none. `scale` keeps the dtype of what it scales.
    The order of the arguments is that of PyTorch's class of this name. Where there is no CUDA device, the default
    device is the accelerator there is, or the CPU.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        if process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        usable = device if device != "cuda" or torch.cuda.is_available() else None
        super().__init__(
            usable,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            bool(enabled),
            process_group=process_group,
        )
        if self.is_enabled():
            self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """A tensor, or the tensors in nested containers, multiplied by the scale, in the dtypes they have."""
        return self._scaled(outputs) if self.is_enabled() else outputs

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's, whose own check wants a tensor of one element and whose copy wants none of its dimensions."""
        if isinstance(new_scale, torch.Tensor) and new_scale.numel() == 1:
            new_scale = new_scale.reshape(())
        super().update(new_scale)

    def _scaled(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._check_device(value)
            return (value * self.scale_on(value.device)).to(value.dtype)
        if not isinstance(value, Iterable) or isinstance(value, str):
            raise ArgumentError(f"outputs must be a tensor or an iterable of tensors, got {value!r}.")
        scaled = [self._scaled(each) for each in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*scaled)
        return type(value)(scaled) if isinstance(value, list | tuple) else iter(scaled)

    def _check_device(self, tensor: torch.Tensor) -> None:
        expected = torch.device(self.device_type).type
        if tensor.device.type not in (expected, "cpu"):
            raise ConflictError(f"This scaler is for tensors on {expected} or the host, got one on {tensor.device}.")

    def _agree(self, peers: Peers, found: torch.Tensor) -> None:
        peers.sum(found)
