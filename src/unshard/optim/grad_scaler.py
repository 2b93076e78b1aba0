"""Gradient scalers for float16: all ranks skip the same steps and keep the same scale."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from ..comm.groups import is_group
from ..engine.api import cut_flat, scalable_gradients
from ..errors import ArgumentError, ConflictError
from ..names import optimizer_parameters
from ..torch_private import OpenGradScaler, unscale_and_check
from .gradients import ReduceGroup, local_gradient, reduce_group_of
from .masked_step import step_unless

_UNSCALE = "unscale gradients (GradScaler)"

# Optimizers that have taken a step, so that their state exists, and those of which all steps so far were skipped.
_started: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_not_started: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class GradScaler(OpenGradScaler):
    """`torch.amp.GradScaler`, with which all ranks skip the same steps and keep the same scale.

    Torch's scaler asks the ranks of the mesh dimensions over which the first gradient is sharded, so ranks can disagree
    if gradients are distributed in several ways. This one asks, once per `unscale_`, all ranks that hold any part of
    the optimizer's parameters. Gradients may be DTensors on any meshes and plain tensors together, in float16 or
    bfloat16, and on the host; ranks may have none. `process_group` names the ranks instead: the stages of a pipeline
    share no mesh. `device` is the accelerator by default, or the CPU where there is none.
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
        if process_group is not None and not is_group(process_group):
            where = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
            raise ArgumentError(
                f"process_group must be a process group that {where} belongs to, got {process_group!r}."
            )
        if device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device = "cpu" if accelerator is None else accelerator.type
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._process_group = process_group

    @torch.no_grad()
    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        parameters = optimizer_parameters(optimizer)
        if self._process_group is None and (name := cut_flat(parameters)) is not None:
            raise ArgumentError(
                f"{name!r} is a flat shard of FullyShardedDataParallel, so a rank cannot tell from it which ranks have "
                "to agree. Pass process_group, or use ShardedGradScaler."
            )
        ranks = reduce_group_of(parameters, self._process_group, otherwise=inverse.device, what=_UNSCALE)
        buckets: dict[torch.device, dict[torch.dtype, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))
        scalable = scalable_gradients(parameters)
        for gradient in [*(each.tensor for each in scalable.flat_gradients), *map(local_gradient, scalable.others)]:
            if gradient is not None:
                buckets[gradient.device][gradient.dtype].append(gradient)
        found = {device: torch.zeros((), device=device) for device in buckets or [ranks.device]}
        for device, by_dtype in buckets.items():
            factor = _copied(inverse, device)
            for dtype, gradients in by_dtype.items():
                if dtype is torch.bfloat16 and device.type == "cuda":
                    _unscale_widened(gradients, found[device], factor)
                else:
                    unscale_and_check(gradients, found[device], factor)
        scalable.clean()
        flags = [_copied(flag, ranks.device) for flag in found.values()]
        any_found = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        self._all_reduce(ranks, any_found)
        return {device: _copied(any_found, device) for device in found}

    def _all_reduce(self, ranks: ReduceGroup, found: torch.Tensor) -> None:
        """Make `found` positive on all ranks if it is on any."""
        ranks.max(found)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's; in addition, a skipped first step of a fused optimizer makes no state.

        While a step is recorded, the device decides whether it skips.
        """
        if not self.is_enabled() or "closure" in kwargs or self._is_safe_in_torch(optimizer):
            return super().step(optimizer, *args, **kwargs)
        if self.stage_of(optimizer) is OptState.READY:
            self.unscale_(optimizer)
        result = None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            step_unless(optimizer, self.found(optimizer), *args, **kwargs)
        elif not self.found_any(optimizer):
            result = optimizer.step(*args, **kwargs)
            _started.add(optimizer)
            _not_started.discard(optimizer)
        elif optimizer not in _started:
            _not_started.add(optimizer)
        self.set_stage(optimizer, OptState.STEPPED)
        return result

    def _is_safe_in_torch(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether torch's way is safe: that is for fused optimizers, whose kernels read the scale and what was found.

        It has two faults there (torch 2.13): a first step that is skipped makes the state all the same, and SGD's
        state is uninitialized memory; and for parameters on the host the optimizer copies both numbers from the device
        without waiting for them. For other optimizers it always reads on the host what was found.
        """
        if self.stage_of(optimizer) is OptState.STEPPED:
            return True  # torch raises
        if not self.skips_itself(optimizer):
            return False
        if not self.handles_scale(optimizer):
            return True  # by code of the program
        if optimizer not in _started or _lacks_momentum(optimizer):
            return False
        return all(
            each.grad is None or each.grad.device == self.scale_device for each in optimizer_parameters(optimizer)
        )


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
        """As torch's. A tensor of one element may have dimensions: torch's check takes it and torch's copy does not."""
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

    def _all_reduce(self, ranks: ReduceGroup, found: torch.Tensor) -> None:
        ranks.sum(found)


def has_skipped_all(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scaler has skipped all steps of the optimizer so far, so that it has no state yet."""
    return optimizer in _not_started and not any(isinstance(each, dict) and each for each in optimizer.state.values())


def _lacks_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether parameters that were added, or a state that was loaded, have no momentum yet: as in a first step."""
    return any(
        each.grad is not None and optimizer.state.get(each, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if isinstance(optimizer, torch.optim.SGD) and group.get("momentum")
        for each in group["params"]
    )


def _unscale_widened(gradients: Iterable[torch.Tensor], found: torch.Tensor, factor: torch.Tensor) -> None:
    """For dtypes that torch's kernel does not take: bfloat16 on CUDA devices. One by one, as the copies take memory."""
    for gradient in gradients:
        wide = gradient.float()
        unscale_and_check([wide], found, factor)
        gradient.copy_(wide)


def _copied(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`number` on the device, without waiting; a copy to the host waits, or it would be read before it is written."""
    return number.to(device, non_blocking=device.type != "cpu")
