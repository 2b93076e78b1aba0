"""The parts of a user's training program that `plan` and `verify` run: model, sharding, loss, batch and optimizer."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError
from ..fsdp2.fully_shard import fully_shard

_PARTS = ("shard", "loss", "batch", "optimizer")


def shard_blocks(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each block of the longest `nn.ModuleList` or `nn.Sequential` as a unit, and then the model as the root.

    Pass `options` to every `fully_shard` call.
    """
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential) and each is not model]
    for block in max(lists, key=len, default=nn.ModuleList()):
        if any(True for _ in block.parameters()):
            fully_shard(block, **options)
    return fully_shard(model, **options)


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call `model(batch)` and return the loss in its output, or the mean of the squared output.

    A dict is passed as keyword arguments, a tuple as positional arguments.
    """
    output = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, tuple) else model(batch)
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output.float().square().mean()


def default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


@dataclass(frozen=True)
class Program:
    """What a training step consists of. `build` returns the unsharded model; the other parts have defaults."""

    build: Callable[[], nn.Module]
    batch: Any = None
    """A function `batch(rank, step)`, or a constant batch."""
    shard: Callable[[nn.Module], nn.Module | None] = shard_blocks
    """Shards the model in place, or returns the wrapper."""
    loss: Callable[[nn.Module, Any], torch.Tensor] = default_loss
    optimizer: Callable[[nn.Module], Any] = default_optimizer
    name: str = ""

    def model(self) -> nn.Module:
        """Build the unsharded model. Raise `ArgumentError` if `build` fails or returns no module."""
        title = self.name or getattr(self.build, "__qualname__", "build")
        try:
            built = self.build()
        except Exception as error:
            raise ArgumentError(f"{title}() raised {type(error).__name__}: {error}") from error
        if not isinstance(built, nn.Module):
            raise ArgumentError(f"{title}() returned {type(built).__name__}. Return the unsharded nn.Module.")
        return built

    def sharded(self, model: nn.Module) -> nn.Module:
        return self.shard(model) or model

    def batch_of(self, rank: int, step: int) -> Any:
        return self.batch(rank, step) if callable(self.batch) else self.batch


def load_program(target: str, **changed: Any) -> Program:
    """Return the program that `target` names: `FILE:FUNCTION` or `package.module:FUNCTION`.

    The function builds the model. Functions named `shard`, `loss`, `batch` and `optimizer` in the same file replace the
    defaults. Values in `changed` that are not None win over both.
    """
    place, colon, function = target.rpartition(":")
    if not colon or not place or not function:
        raise ArgumentError(f"Expected FILE:FUNCTION, got {target!r}. For example: train.py:build_model.")
    names = _names_in(place)
    if not callable(build := names.get(function)):
        known = ", ".join(each for each, value in names.items() if callable(value) and not each.startswith("_"))
        raise ArgumentError(f"{place} has no function {function!r}. It defines: {known or 'no functions'}.")
    parts = {each: names[each] for each in _PARTS if callable(names.get(each))}
    given = {key: value for key, value in changed.items() if value is not None}
    return replace(Program(build, name=function), **{**parts, **given})


def _names_in(place: str) -> dict[str, Any]:
    if place.endswith(".py") and not Path(place).is_file():
        raise ArgumentError(f"There is no file {place!r}.")
    try:
        if place.endswith(".py"):
            return runpy.run_path(place, run_name=Path(place).stem)
        return vars(importlib.import_module(place))
    except Exception as error:
        raise ArgumentError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def tokens(shape: str, vocabulary: int = 256) -> torch.Tensor:
    """Return random tokens of a shape such as `"4x2048"`."""
    try:
        sizes = [int(each) for each in shape.split("x")]
        if min(sizes) < 1:
            raise ValueError
    except ValueError:
        raise ArgumentError(f"Expected a batch such as 4x2048 (positive integers), got {shape!r}.") from None
    return torch.randint(vocabulary, sizes)
