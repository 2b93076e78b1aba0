"""Gradient scaling for float16 on which all ranks agree."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from ..engine.flat import cut_flat, scalable_gradients
from ..errors import ArgumentError
from ..torch_private import OpenGradScaler, unscale_and_check
from .local import local_gradient
from .peers import Peers, peers_of

# Optimizers that have taken a step, so that their state exists.
_started: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class GradScaler(OpenGradScaler):
    """`torch.amp.GradScaler`, with which all ranks skip the same steps and keep the same scale.

    Torch's own asks the ranks of the mesh dimensions on which the first gradient is cut, so ranks can disagree as soon
    as gradients are distributed in several ways. This one asks, once per `unscale_`, all ranks that hold any part of
    the optimizer's parameters. Gradients may be DTensors on any meshes and plain tensors together, in float16, and on
    the host; ranks may have none. `process_group` names the ranks instead: the stages of a pipeline share no mesh.
    `device` is the accelerator by default, or the CPU where there is none.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: Any = None,
    ) -> None:
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            where = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
            raise ArgumentError(
                f"process_group must be a process group that {where} belongs to, got {process_group!r}."
            )
        if device is None:
            accelerator = torch.accelerator.current_accelerator()
            device = "cpu" if accelerator is None else accelerator.type
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._process_group = process_group

    @torch.no_grad()
    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        parameters = _parameters(optimizer)
        if self._process_group is None and (name := cut_flat(parameters)) is not None:
            raise ArgumentError(
                f"{name!r} is cut flat by FullyShardedDataParallel, so a rank cannot tell from it who has to agree. "
                "Pass process_group, or use ShardedGradScaler."
            )
        peers = peers_of(parameters, self._process_group, otherwise=inverse.device)
        buckets: dict[torch.device, dict[torch.dtype, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))
        stretches, others = scalable_gradients(parameters)
        for gradient in [*(each.tensor for each in stretches), *map(local_gradient, others)]:
            if gradient is not None:
                buckets[gradient.device][gradient.dtype].append(gradient)
        found = {device: torch.zeros((), device=device) for device in buckets or [peers.device]}
        for device, by_dtype in buckets.items():
            factor = _copied(inverse, device)
            for gradients in by_dtype.values():
                unscale_and_check(gradients, found[device], factor)
        flags = [_copied(flag, peers.device) for flag in found.values()]
        worst = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        self._agree(peers, worst)
        return {device: _copied(worst, device) for device in found}

    def _agree(self, peers: Peers, found: torch.Tensor) -> None:
        """Let all ranks know what any of them found."""
        peers.largest(found)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's, and a skipped first step of a fused optimizer leaves no state behind."""
        if not self.is_enabled() or "closure" in kwargs or self._can_skip_by_itself(optimizer):
            return super().step(optimizer, *args, **kwargs)
        if self.stage_of(optimizer) is OptState.READY:
            self.unscale_(optimizer)
        result = None
        if not self.found_any(optimizer):
            result = optimizer.step(*args, **kwargs)
            _started.add(optimizer)
        self.set_stage(optimizer, OptState.STEPPED)
        return result

    def _can_skip_by_itself(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether torch's way is safe for a fused optimizer, whose kernels look at the scale and at what was found.

        Two things go wrong in it (torch 2.13): a first step that is skipped makes the state all the same, and SGD's is
        memory that was never written; and for parameters on the host the optimizer copies both numbers from the device
        without waiting for them.
        """
        if self.stage_of(optimizer) is OptState.STEPPED or not self.leaves_scale_to(optimizer):
            return True  # refused, or skipped by the scaler
        if optimizer not in _started:
            return False
        return all(each.grad is None or each.grad.device == self.scale_device for each in _parameters(optimizer))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copied(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`number` on the device, without waiting; a copy to the host must wait, or garbage would be read."""
    return number.to(device, non_blocking=device.type != "cpu")
