"""What users pass: frozen, checked when made, so that nobody has to check them again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import PolicyError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of one unit.

    ``param_dtype``: what parameters are gathered and computed in; ``reduce_dtype``: what gradients are reduced
    in; ``output_dtype``: what floating-point outputs of forward are cast to. ``None`` leaves each as it comes.
    ``cast_forward_inputs`` casts floating-point inputs of forward to ``param_dtype``. Stored parameters,
    gradients and optimizer state keep the original dtype whatever is set here.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, field)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise PolicyError(f"MixedPrecisionPolicy.{field} must be a torch.dtype or None, got {dtype!r}.")
            if not dtype.is_floating_point:
                raise PolicyError(
                    f"MixedPrecisionPolicy.{field} must be a floating-point dtype, got {dtype}. "
                    "Integer parameters are never cast; leave the field None."
                )


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards rest. This base class leaves them on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Parameters, gradients and optimizer state rest on the host; gathers and compute run on the device.

    ``pin_memory`` keeps the shards in page-locked memory, which makes the copies faster; it needs an accelerator.
    """

    pin_memory: bool = True
