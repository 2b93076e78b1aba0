"""Removes wrapper prefixes from names, and lists the modules of a unit and the parameters of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

FSDP_PREFIX = "_fsdp_wrapped_module."
CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."
COMPILE_PREFIX = "_orig_mod."
ALL_PREFIXES = (CHECKPOINT_PREFIX, COMPILE_PREFIX, FSDP_PREFIX)


def clean_tensor_name(name: str, prefixes: Sequence[str] = (FSDP_PREFIX, CHECKPOINT_PREFIX)) -> str:
    """Remove all occurrences of `prefixes` from `name`.

    By default, this returns the name that a parameter or buffer has in a state dict. `FullyShardedDataParallel` and
    activation checkpointing do not change the keys of a state dict, but `torch.compile` does.
    """
    for prefix in prefixes:
        name = name.replace(prefix, "")
    return name


def behind_checkpoints(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers for activation checkpointing or activation offloading."""
    # Not getattr, which a wrapper forwards to the module that it wraps.
    while (inside := dict(module.named_children()).get(CHECKPOINT_PREFIX.rstrip("."))) is not None:
        module = inside
    return module


def behind_data_parallel(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel`, which prepends `module.` to all names."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def modules_until(
    top: nn.Module, stop: Callable[[nn.Module], bool], prefix: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield `top` and all modules inside it as (name prefix, module). Each module comes once, and parents come first.

    Modules for which `stop` returns True are skipped, and so are modules that are only inside such modules.
    """
    seen = set() if seen is None else seen
    if top not in seen and not stop(top):
        seen.add(top)
        yield prefix, top
        for name, child in top.named_children():
            yield from modules_until(child, stop, f"{prefix}{name}.", seen)


def optimizer_parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
