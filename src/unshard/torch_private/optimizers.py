"""Torch's gradient scaler, and steps that a scheduler has wrapped."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


class OpenGradScaler(torch.amp.GradScaler):
    """Torch's scaler, with the parts that have no public names opened to a subclass. All versions."""

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inverse: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by `inverse`; what is found for each device: 1 if any is not finite, else 0."""
        raise NotImplementedError

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return self.unscale_gradients(optimizer, inv_scale)

    def _check_scale_growth_tracker(self, funcname: str) -> Any:
        """A rank that has no loss never calls `scale`, and still must unscale, step and update with the others."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def scale_on(self, device: torch.device) -> torch.Tensor:
        """The scale on a device; made at the first use."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        assert self._scale is not None
        return self._scale.to(device, non_blocking=device.type != "cpu")

    def stage_of(self, optimizer: torch.optim.Optimizer) -> OptState:
        return self._per_optimizer_states[id(optimizer)]["stage"]

    def set_stage(self, optimizer: torch.optim.Optimizer, stage: OptState) -> None:
        self._per_optimizer_states[id(optimizer)]["stage"] = stage

    def found_any(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last check found a gradient that is not finite; waits for the device."""
        return any(found.item() for found in self._found_inf_per_device(optimizer).values())

    @property
    def device_type(self) -> str:
        return self._device

    @property
    def scale_device(self) -> torch.device | None:
        return None if self._scale is None else self._scale.device

    @staticmethod
    def leaves_scale_to(optimizer: torch.optim.Optimizer) -> bool:
        """Whether torch lets the optimizer's own kernels skip a step (fused ones), and nobody else has a say in it."""
        if not getattr(optimizer, "_step_supports_amp_scaling", False) or hasattr(optimizer, "grad_scale"):
            return False
        return "grad_scaler" not in inspect.signature(optimizer.step).parameters


def is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a learning rate scheduler has put its wrapper around the step of this object. All versions."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def schedule_again(optimizer: torch.optim.Optimizer) -> None:
    """Put such a wrapper around the step of the class that the object has now: the old one knows the old step.

    The scheduler looks at the mark that a step leaves, to tell whether it was called too early. All versions.
    """
    del vars(optimizer)["step"]
    reference, step = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(step)
    def marking(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        alive._opt_called = True  # type: ignore[union-attr]
        return step(alive, *args, **kwargs)  # type: ignore[arg-type]

    marking._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marking  # type: ignore[method-assign]


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
