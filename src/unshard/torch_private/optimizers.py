"""Private APIs of torch's gradient scaler, optimizers and learning rate schedulers."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


class OpenGradScaler(torch.amp.GradScaler):
    """Torch's gradient scaler, with public names for the private methods and attributes that subclasses need."""

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients of `optimizer` by `inverse`. Subclasses implement this method.

        Return one tensor per device. The tensor is 1 if any gradient on the device is not finite, and 0 otherwise.
        """
        raise NotImplementedError

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool = True) -> Any:
        return self.unscale_gradients(optimizer, inv_scale)

    def _check_scale_growth_tracker(self, funcname: str) -> Any:
        # A rank without a loss never calls `scale`, but unscales with the other ranks. So the scale may not exist yet.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def scale_on(self, device: torch.device) -> torch.Tensor:
        """Return the scale as a tensor on `device`. Create the scale if it does not exist yet."""
        scale, _ = self._check_scale_growth_tracker("scale")
        return scale.to(device, non_blocking=device.type != "cpu")

    def stage_of(self, optimizer: torch.optim.Optimizer) -> OptState:
        """Return the stage that `optimizer` has reached since the last update: ready, unscaled or stepped."""
        return self._per_optimizer_states[id(optimizer)]["stage"]

    def set_stage(self, optimizer: torch.optim.Optimizer, stage: OptState) -> None:
        self._per_optimizer_states[id(optimizer)]["stage"] = stage

    def found(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return one tensor per device with the result of the last check for non-finite gradients of `optimizer`.

        The tensor is positive if the check found a non-finite gradient, and 0 otherwise.
        """
        return list(self._found_inf_per_device(optimizer).values())

    @property
    def device_type(self) -> str:
        return self._device

    @property
    def scale_device(self) -> torch.device | None:
        return None if self._scale is None else self._scale.device

    @staticmethod
    def skips_itself(optimizer: torch.optim.Optimizer) -> bool:
        """Return True if `optimizer` receives the result of the scaler's check and skips non-finite steps itself."""
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    @staticmethod
    def handles_scale(optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the kernels of `optimizer` unscale gradients and skip steps, as in fused optimizers."""
        if not OpenGradScaler.skips_itself(optimizer) or hasattr(optimizer, "grad_scale"):
            return False
        return "grad_scaler" not in inspect.signature(optimizer.step).parameters


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | float | None:
    """Return the scale without waiting for the device, unlike `get_scale`. Return None if `scaler` is disabled."""
    scale = getattr(scaler, "_scale", None)
    return getattr(scaler, "_init_scale", None) if scale is None else scale


def scaler_stages(scaler: torch.amp.GradScaler) -> tuple[tuple[int, OptState], ...]:
    """Return the id and the stage of each optimizer that `scaler` has unscaled or stepped since its last update."""
    stages = ((number, state["stage"]) for number, state in scaler._per_optimizer_states.items())
    return tuple([(number, stage) for number, stage in stages if stage is not OptState.READY])


def forget_scaler_stages(scaler: torch.amp.GradScaler) -> None:
    """Make `scaler` forget which optimizers it has unscaled or stepped since its last update."""
    scaler._per_optimizer_states.clear()


def round_of(scaler: torch.amp.GradScaler) -> object:
    """Return an object that `scaler.update()` replaces."""
    return scaler._per_optimizer_states


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a learning rate scheduler has wrapped the `step` of this optimizer."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


hooks_of_step: Callable[[torch.optim.Optimizer], tuple[dict[int, Any], ...]]
hooks_of_step = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Return the dicts of hooks that run before and after an optimizer's step."""


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning rate schedulers that `optimizer` has stepped.

    Call this after a step that runs none of the optimizer's Python code.
    """
    vars(optimizer)["_opt_called"] = True


def rewrap_scheduled_step(optimizer: torch.optim.Optimizer) -> None:
    """Wrap the `step` of a scheduled optimizer whose class has been changed.

    The wrapper of the learning rate scheduler still calls the `step` of the old class. The new wrapper calls the `step`
    of the new class. It also sets `_opt_called`, with which the scheduler checks that optimizer steps come before
    `scheduler.step()`.
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
    """Run the `step` of the optimizer's class, without any hooks and without the wrapper of a scheduler.

    Torch wraps the `step` of every optimizer class in a function that calls the hooks. So this function removes all
    step hooks, calls `step`, and adds the hooks again.
    """
    registered = [*hooks_of_step(optimizer), _global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [dict(hooks) for hooks in registered]
    try:
        for hooks in registered:
            hooks.clear()
        type(optimizer).step(optimizer)
    finally:
        for hooks, before in zip(registered, kept, strict=True):
            hooks.update(before)
