"""Tells what to do where torch's gradient scaler refuses gradients in float16.

Its refusal names neither a parameter nor a way out, and comes for every model whose parameters are stored in float16.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import ScalerError
from .faces import Slot

_SHOWN = 5  # parameters named in an error

_in_half: weakref.WeakSet[Slot] = weakref.WeakSet()


def watch_scalers(slots: Iterable[Slot]) -> None:
    """Call it with the parameters of a unit; the scaler is touched only once one of them is stored in float16."""
    half = [slot for slot in slots if slot.sharded.dtype == torch.float16]
    if half:
        _in_half.update(half)
        _wrap()


@functools.cache
def _wrap() -> None:
    """Once per process."""
    torch.amp.GradScaler.unscale_ = _explaining(torch.amp.GradScaler.unscale_)  # type: ignore[method-assign]


def _explaining(unscale: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: Any) -> None:
        try:
            unscale(self, optimizer)
        except ValueError as error:
            names = _names(optimizer) if "FP16" in str(error) else []
            if not names:
                raise
            raise ScalerError(_message(names)) from error

    return unscale_


def _names(optimizer: Any) -> list[str]:
    """The sharded parameters of the optimizer that have gradients in float16."""
    known = {id(slot.sharded): slot.name for slot in _in_half}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    half = [each for each in parameters if each.grad is not None and each.grad.dtype == torch.float16]
    return [known[id(each)] for each in half if id(each) in known]


def _message(names: list[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return (
        f"torch.amp.GradScaler does not unscale gradients in float16, and {len(names)} parameters are stored in it: "
        f"{listed}. Either use unshard.optim.GradScaler instead, or keep the parameters in float32 and compute in "
        "float16: fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))."
    )
