"""Arguments of the wrapper and of the legacy call that are of the wrong kind, told apart before anything is changed."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import nn

from ..errors import PolicyError
from ..policies import MixedPrecisionPolicy, OffloadPolicy
from .wrapper_api import BackwardPrefetch, CPUOffload, MixedPrecision


def check_module(module: Any, call: str) -> None:
    if not isinstance(module, nn.Module):
        raise PolicyError(f"{call} takes a module, got {_shown(module)}.")


def checked_mixed_precision(given: Any) -> MixedPrecision:
    """By its fields: one of PyTorch's own, made before the drop-in, says the same."""
    if given is None:
        return MixedPrecision()
    if all(hasattr(given, name) for name in ("param_dtype", "buffer_dtype", "cast_root_forward_inputs")):
        return given
    hint = "MixedPrecision(param_dtype=...)"
    if isinstance(given, torch.dtype):
        hint = f"MixedPrecision(param_dtype={given})"
    elif isinstance(given, MixedPrecisionPolicy):
        hint = (
            f"MixedPrecision(param_dtype={given.param_dtype}, ...); a MixedPrecisionPolicy is for unshard.fully_shard"
        )
    raise PolicyError(f"mixed_precision must be a MixedPrecision, got {_shown(given)}. Pass {hint}.")


def checked_cpu_offload(given: Any) -> CPUOffload:
    if given is None:
        return CPUOffload()
    if hasattr(given, "offload_params"):
        return given
    also = "; an OffloadPolicy is for unshard.fully_shard" if isinstance(given, OffloadPolicy) else ""
    raise PolicyError(
        f"cpu_offload must be a CPUOffload, got {_shown(given)}. Pass CPUOffload(offload_params=True){also}."
    )


def checked_prefetch(given: Any) -> BackwardPrefetch | None:
    if given is None or isinstance(given, BackwardPrefetch):
        return given
    if isinstance(given, Enum) and given.name in BackwardPrefetch.__members__:  # PyTorch's own
        return BackwardPrefetch[given.name]
    names = " or ".join(f"BackwardPrefetch.{name}" for name in BackwardPrefetch.__members__)
    raise PolicyError(f"backward_prefetch must be {names} or None, got {_shown(given)}.")


def _shown(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, str | int | torch.dtype) else f"a {type(value).__name__}"
