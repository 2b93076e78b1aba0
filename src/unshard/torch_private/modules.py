"""What modules keep their parameters, buffers and children in, and what some of them are."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The dict a module registers its own parameters in: an assignment there is far cheaper than `setattr`."""
    return module._parameters


def put_in_weights(module: nn.Module, name: str, weight: torch.Tensor) -> None:
    """Into the list that a recurrent layer computes with, which its `__setattr__` keeps. All versions."""
    names: Any = getattr(module, "_flat_weights_names", ())
    weights: Any = getattr(module, "_flat_weights", [])
    if name in names:
        weights[names.index(name)] = weight


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """The dict a module registers its own buffers in, likewise."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict a module registers its children in; `named_children` leaves out second names of a child."""
    return module._modules


BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._NormBase
"""What all batch and instance norms derive from. All versions."""
BATCH_NORM_BASE: type[nn.Module] = nn.modules.batchnorm._BatchNorm
"""What batch norms derive from; the class that FSDP1 names in its defaults. All versions."""


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` was applied to this very module, which then keeps its parameters whole.

    Looked up, not imported: where nobody imported it, nobody applied it. All versions.
    """
    contract = sys.modules.get("torch.distributed._composable.contract")
    return contract is not None and "replicate" in (contract._get_registry(module) or ())
