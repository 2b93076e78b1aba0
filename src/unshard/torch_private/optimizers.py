"""Private parts of torch's gradient scaler, of optimizers and of learning rate schedulers."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


class OpenGradScaler(torch.amp.GradScaler):
    """Torch's scaler; its private methods and attributes have public names here, for subclasses. All versions."""

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by `inverse`. Returns for each device 1 if any gradient is not finite, else 0."""
        raise NotImplementedError

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool = True) -> Any:
        return self.unscale_gradients(optimizer, inv_scale)

    def _check_scale_growth_tracker(self, funcname: str) -> Any:
        """A rank without a loss never calls `scale`, but must unscale, step and update with the others."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def scale_on(self, device: torch.device) -> torch.Tensor:
        """The scale, on `device`; made at the first use."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        assert self._scale is not None
        return self._scale.to(device, non_blocking=device.type != "cpu")

    def stage_of(self, optimizer: torch.optim.Optimizer) -> OptState:
        """Whether `optimizer` was unscaled or stepped since the last update."""
        return self._per_optimizer_states[id(optimizer)]["stage"]

    def set_stage(self, optimizer: torch.optim.Optimizer, stage: OptState) -> None:
        self._per_optimizer_states[id(optimizer)]["stage"] = stage

    def found(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """For each device, a positive number if the last check found a gradient that is not finite."""
        return list(self._found_inf_per_device(optimizer).values())

    def found_any(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last check found a gradient that is not finite. Synchronises with the device."""
        return any(found.item() for found in self.found(optimizer))

    @property
    def device_type(self) -> str:
        return self._device

    @property
    def scale_device(self) -> torch.device | None:
        return None if self._scale is None else self._scale.device

    @staticmethod
    def skips_itself(optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer is given what was found, and skips steps by itself, in its kernels or its own code."""
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    @staticmethod
    def handles_scale(optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's own kernels unscale and skip steps (fused ones), and no other code does."""
        if not OpenGradScaler.skips_itself(optimizer) or hasattr(optimizer, "grad_scale"):
            return False
        return "grad_scaler" not in inspect.signature(optimizer.step).parameters


def scaler_stages(scaler: torch.amp.GradScaler) -> tuple[tuple[int, OptState], ...]:
    """Which optimizers, by their ids, a scaler has unscaled or stepped since its last update. All versions."""
    stages = ((number, state["stage"]) for number, state in scaler._per_optimizer_states.items())
    return tuple([(number, stage) for number, stage in stages if stage is not OptState.READY])


def forget_scaler_stages(scaler: torch.amp.GradScaler) -> None:
    """No optimizer was unscaled or stepped since the last update. All versions."""
    scaler._per_optimizer_states.clear()


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a learning rate scheduler has wrapped the step of this object. All versions."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def hooks_of_step(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """The dicts of the hooks around an optimizer's step; no public way to read. All versions."""
    return [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers know that the optimizer steps, although no Python of its step runs. All versions."""
    vars(optimizer)["_opt_called"] = True


def rewrap_scheduled_step(optimizer: torch.optim.Optimizer) -> None:
    """Wrap the step of the optimizer's new class as a scheduler does: its own wrapper calls the old class's step.

    The wrapper sets `_opt_called`, by which the scheduler checks that steps come before `scheduler.step()`. All
    versions.
    """
    del vars(optimizer)["step"]
    reference, step = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        alive._opt_called = True  # type: ignore[union-attr]
        return step(alive, *args, **kwargs)  # type: ignore[arg-type]

    wrapped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = wrapped  # type: ignore[method-assign]


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """The step of the optimizer's class, without anybody's hooks and without a scheduler's wrapper.

    Torch wraps the step of every class in a function that calls hooks, those of base classes too; without hooks it
    does nothing besides. All versions.
    """
    registered: list[dict[int, Any]] = [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    ]
    kept = [dict(hooks) for hooks in registered]
    try:
        for hooks in registered:
            hooks.clear()
        type(optimizer).step(optimizer)
    finally:
        for hooks, before in zip(registered, kept, strict=True):
            hooks.update(before)
