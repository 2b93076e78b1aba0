"""Gradient scalers for float16 that make all ranks skip the same steps and keep the same scale."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from ..comm.agreement import largest_over, sum_over
from ..engine.api import cut_flat, scalable_gradients
from ..errors import ArgumentError, ConflictError
from ..names import optimizer_parameters
from ..torch_private import OpenGradScaler, local_part, unscale_and_check
from .clip import check_process_group, local_gradient, reduce_group_of

_UNSCALE = "unscale gradients (GradScaler)"

_started: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
"""True for optimizers that have taken a step and therefore have state. False if all steps were skipped so far."""


class GradScaler(OpenGradScaler):
    """A `torch.amp.GradScaler` for sharded models. All ranks skip the same steps and keep the same scale.

    PyTorch's scaler reduces the overflow flag over the mesh dimensions that shard the first gradient. Ranks can
    therefore disagree if gradients are distributed in several ways. This scaler reduces the flag over all ranks that
    hold a part of the optimizer's parameters, once per `unscale_`.

    Gradients may be DTensors on any meshes or plain tensors. They may be in float16 or bfloat16, and on the device or
    the host. A rank may have no gradients. If ranks that must skip the same steps share no mesh (for example, the ranks
    of pipeline stages), pass a `process_group` of these ranks. `device` defaults to the accelerator, or to the CPU.
    `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval` and `enabled` are those of PyTorch.

    Example::

        scaler = unshard.optim.GradScaler()
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    _reduced_over = staticmethod(largest_over)
    """The reduction that makes the overflow flag positive on all ranks if the flag is positive on any rank."""

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
        if process_group is not None:
            check_process_group(process_group)
        if device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device = "cpu" if accelerator is None else accelerator.type
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._process_group = process_group

    @torch.no_grad()
    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients of `optimizer` by `inverse`. Return a flag per device, positive after an overflow.

        Raise an ArgumentError for flat shards of the wrapper without a `process_group`.
        """
        parameters = optimizer_parameters(optimizer)
        if self._process_group is None and (name := cut_flat(parameters)) is not None:
            raise ArgumentError(
                f"{name!r} is a flat shard of FullyShardedDataParallel and does not tell which ranks have to agree. "
                "Pass process_group, or use ShardedGradScaler."
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
                if dtype is not torch.bfloat16 or device.type != "cuda":
                    unscale_and_check(gradients, found[device], factor)
                    continue
                for gradient in gradients:  # one at a time to save memory, as torch's kernel does not take bfloat16
                    wide = gradient.float()
                    unscale_and_check([wide], found[device], factor)
                    gradient.copy_(wide)
        scalable.clean()
        flags = [_copied(flag, ranks.device) for flag in found.values()]
        any_found = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        ranks.reduce(self._reduced_over, any_found)
        return {device: _copied(any_found, device) for device in found}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step `optimizer` unless gradients have overflowed, as PyTorch's `GradScaler.step` does.

        Unlike in PyTorch, a skipped first step of a fused optimizer creates no state. In a captured training step, the
        device decides whether to skip the optimizer's step.
        """
        if not self.is_enabled() or "closure" in kwargs or self._is_safe_in_torch(optimizer):
            return super().step(optimizer, *args, **kwargs)
        if self.stage_of(optimizer) is OptState.READY:
            self.unscale_(optimizer)
        result = None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            step_unless(optimizer, self.found(optimizer), *args, **kwargs)
        elif not any(each.item() for each in self.found(optimizer)):
            result = optimizer.step(*args, **kwargs)
            _started[optimizer] = True
        else:
            _started.setdefault(optimizer, False)
        self.set_stage(optimizer, OptState.STEPPED)
        return result

    def _is_safe_in_torch(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if torch's `step` can be used for this optimizer.

        For fused optimizers, torch passes the scale and the overflow flag to the kernels. Torch 2.13 has two bugs here.
        A skipped first step still creates the state, and the state of SGD is then uninitialized memory. If parameters
        are on the host, the optimizer copies the scale and the flag to the host and does not wait for the copies.

        For optimizers that are not fused, torch reads the flag on the host, which a captured step cannot do.
        """
        if self.stage_of(optimizer) is OptState.STEPPED:
            return True  # torch raises an error
        if not self.skips_itself(optimizer):
            return False
        if not self.handles_scale(optimizer):
            return True  # the program's own code handles the scale
        if not _started.get(optimizer) or _lacks_momentum(optimizer):
            return False
        return all(
            each.grad is None or each.grad.device == self.scale_device for each in optimizer_parameters(optimizer)
        )


class ShardedGradScaler(GradScaler):
    """A gradient scaler for shards that are plain tensors. All ranks of `process_group` skip the same steps.

    Gradients may be in float16 or on the host, and a rank may have no gradients. The outputs of `scale` have the
    dtypes of its inputs. The arguments have the same order as in PyTorch's `ShardedGradScaler`. If there is no CUDA
    device, the default `device` is another accelerator, or the CPU.

    `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval` and `enabled` are those of PyTorch.

    Example::

        scaler = unshard.optim.ShardedGradScaler()
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    _reduced_over = staticmethod(sum_over)

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
        """Return `outputs`, a tensor or nested containers of tensors, multiplied by the scale. Dtypes do not change."""
        return self._scaled(outputs) if self.is_enabled() else outputs

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale. Unlike in PyTorch, `new_scale` may be a one-element tensor of any shape."""
        if isinstance(new_scale, torch.Tensor) and new_scale.numel() == 1:
            new_scale = new_scale.reshape(())
        super().update(new_scale)

    def _scaled(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            expected = torch.device(self.device_type).type
            if value.device.type not in (expected, "cpu"):
                raise ConflictError(f"This scaler takes tensors on {expected} or the host, got one on {value.device}.")
            return (value * self.scale_on(value.device)).to(value.dtype)
        if not isinstance(value, Iterable) or isinstance(value, str):
            raise ArgumentError(f"outputs must be a tensor or an iterable of tensors, got {value!r}.")
        scaled = [self._scaled(each) for each in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*scaled)
        return type(value)(scaled) if isinstance(value, list | tuple) else iter(scaled)


def has_skipped_all(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a scaler has skipped all steps of the optimizer, so that the optimizer has no state yet."""
    has_state = any(isinstance(each, dict) and each for each in optimizer.state.values())
    return _started.get(optimizer) is False and not has_state


def _lacks_momentum(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        each.grad is not None and optimizer.state.get(each, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if isinstance(optimizer, torch.optim.SGD) and group.get("momentum")
        for each in group["params"]
    )


def _copied(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Only a copy to the host waits. Otherwise, the host could read the number before the copy is done.
    return number.to(device, non_blocking=device.type != "cpu")


@torch.no_grad()
def step_unless(optimizer: torch.optim.Optimizer, found: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Step the optimizer, then undo the step on the device if any flag in `found` is positive.

    Captured steps use this function, because the host cannot read flags during a recording. To undo the step, the
    function copies parameters and state before it. Fused optimizers do not need this: their kernels skip the step.
    """
    skip = found[0] > 0 if len(found) == 1 else torch.stack([each.to(found[0].device) for each in found]).amax() > 0
    before = [(tensor, tensor.clone()) for tensor in _written(optimizer, skip.device)]
    optimizer.step(*args, **kwargs)
    for tensor, copy in before:
        tensor.copy_(torch.where(skip.to(tensor.device), copy, tensor))


def _written(optimizer: torch.optim.Optimizer, device: torch.device) -> list[torch.Tensor]:
    """Return the local tensors that a step may write, without duplicates.

    For example, parameters of a flat optimizer may share a counter. The result includes tensors that are attributes of
    the optimizer if they are on `device`. A step that writes to such tensors on other devices is never captured.
    """
    dicts = [*optimizer.param_groups, *(entry for entry in optimizer.state.values() if isinstance(entry, dict))]
    tensors = [value for each in dicts for value in each.values() if isinstance(value, torch.Tensor)]
    attributes = [value for value in vars(optimizer).values() if isinstance(value, torch.Tensor)]
    tensors += [value for value in attributes if value.device == device]
    tensors += optimizer_parameters(optimizer)
    return list({id(each): each for each in map(local_part, tensors)}.values())
