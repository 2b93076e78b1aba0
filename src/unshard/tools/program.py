"""The parts of a user's training program that `plan` and `verify` run: model, sharding, loss, batch and optimizer."""

from __future__ import annotations

import importlib
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.api import state_of
from ..errors import ArgumentError, UnshardError
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
    """Call `model(batch)` and return the loss in its output, an output of one number, or the mean of its square.

    A dict is passed as keyword arguments, a tuple or list as positional arguments. If forward takes only one argument
    and the batch is a pair (input, target), return the cross entropy with integer targets, or the mean squared error.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2 and _most_arguments(model) == 1:
        output, target = _tensor_in(model(batch[0])).float(), batch[1]
        if target.is_floating_point():
            return nn.functional.mse_loss(output, target.reshape(output.shape).float())
        if output.dim() == target.dim() + 1 and output.dim() > 2 and output.shape[:-1] == target.shape:
            output, target = output.flatten(0, -2), target.flatten()  # classes of each token are the last dimension
        return nn.functional.cross_entropy(output, target)
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    if (loss := getattr(output, "loss", None)) is not None:
        return loss
    output = _tensor_in(output)
    return output if output.dim() == 0 else output.float().square().mean()


def _tensor_in(output: Any) -> torch.Tensor:
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


def _most_arguments(model: nn.Module) -> float:
    """Return how many positional arguments forward takes. Wrappers such as DDP do not count."""
    while isinstance(inside := getattr(model, "module", None), nn.Module):
        model = inside
    kinds = [each.kind for each in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return inf
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


def default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    if not trained:
        raise ArgumentError("All parameters are frozen (requires_grad=False), so a step trains nothing. Unfreeze some.")
    return torch.optim.AdamW(trained, lr=1e-3)


@dataclass(frozen=True)
class Program:
    """What a training step consists of. `build` returns the unsharded model; the other parts have defaults.

    `batch` is a function `batch(rank, step)` or a constant batch. `shard` shards the model in place, or returns the
    wrapper. `loss(model, batch)` returns the loss, and `optimizer(model)` the optimizer. `name` appears in reports.

    Example::

        program = Program(Model, shard=shard, loss=loss, batch=tokens("4x2048"))
    """

    build: Callable[[], nn.Module]
    batch: Any = None
    """A function `batch(rank, step)`, or a constant batch."""
    shard: Callable[[nn.Module], nn.Module | None] = shard_blocks
    """Shards the model in place, or returns the wrapper."""
    loss: Callable[[nn.Module, Any], torch.Tensor] = default_loss
    optimizer: Callable[[nn.Module], Any] = default_optimizer
    name: str = ""
    target: str = field(default="", init=False)
    """What `load_program` loaded without changes, so that other processes can load it again. `replace` clears it."""

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

    def sharded(self, model: nn.Module, **options: Any) -> nn.Module:
        """Shard the model. Raise `ArgumentError` if PyTorch's FSDP shards it instead of this library."""
        sharded = self.shard(model, **options) or model
        bases = [base.__module__ for each in sharded.modules() for base in type(each).__mro__]
        if any(each.startswith(f"{dist.__name__}.fsdp") for each in bases) and not is_sharded(sharded):
            raise ArgumentError(
                "shard() calls PyTorch's own FSDP, not unshard's. Import fully_shard or FullyShardedDataParallel from "
                "unshard, or call unshard.dropin.install() before the file is imported, as `unshard COMMAND` does."
            )
        return sharded

    def optimizer_of(self, model: nn.Module) -> Any:
        """Build the optimizer. Raise `ArgumentError` if `optimizer` fails or returns something else."""
        try:
            built = self.optimizer(model)
        except UnshardError:
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise ArgumentError(
                f"optimizer(model) raised {type(error).__name__}: {text}. It gets the sharded model, such as in "
                "lambda model: torch.optim.AdamW(model.parameters())."
            ) from error
        if not callable(getattr(built, "step", None)):
            raise ArgumentError(f"optimizer(model) returned {type(built).__name__}. Return the optimizer.")
        return built

    def batch_of(self, rank: int, step: int) -> Any:
        return self.batch(rank, step) if callable(self.batch) else self.batch


def load_program(target: str, **changed: Any) -> Program:
    """Return the program that `target` names: `FILE:FUNCTION` or `package.module:FUNCTION`.

    The function builds the model. Functions named `shard`, `loss`, `batch` and `optimizer` in the same file replace the
    defaults, and so does a constant `batch`. Values in `changed` that are not None win over both.
    """
    place, colon, function = target.rpartition(":")
    if not colon or not place or not function:
        raise ArgumentError(f"Expected FILE:FUNCTION, got {target!r}. For example: train.py:build_model.")
    names = _names_in(place)
    if not callable(build := names.get(function)):
        own = (each for each, value in names.items() if getattr(value, "__module__", None) == names["__name__"])
        known = ", ".join(each for each in own if callable(names[each]) and not each.startswith("_"))
        raise ArgumentError(f"{place} has no function {function!r}. It defines: {known or 'no functions'}.")
    parts = {each: names[each] for each in _PARTS if callable(names.get(each))}
    if "batch" not in parts and names.get("batch") is not None:
        parts["batch"] = names["batch"]  # a constant
    given = {key: value for key, value in changed.items() if value is not None}
    program = replace(Program(build, name=function), **{**parts, **given})
    if not given:
        object.__setattr__(program, "target", target)
    return program


def _names_in(place: str) -> dict[str, Any]:
    if place.endswith(".py") and not Path(place).is_file():
        raise ArgumentError(f"There is no file {place!r}.")
    folder = str(Path(place).resolve().parent) if place.endswith(".py") else os.getcwd()
    if folder not in sys.path:  # as for `python FILE` and `python -m MODULE`
        sys.path.insert(0, folder)
    try:
        if place.endswith(".py"):
            return runpy.run_path(place, run_name=Path(place).stem)
        return vars(importlib.import_module(place))
    except Exception as error:
        text = f"{place} cannot be imported: {type(error).__name__}: {error}"
        if not isinstance(error, ImportError | SyntaxError):
            text = f'{text.rstrip(".")}. Put code that trains under `if __name__ == "__main__":`.'
        raise ArgumentError(text) from error


def is_sharded(model: nn.Module) -> bool:
    """Return True if a module of the model is a unit."""
    return any(state_of(each) is not None for each in model.modules())


def tokens(shape: str | Sequence[int], vocabulary: int = 256) -> torch.Tensor:
    """Return random tokens of a shape such as `"4x2048"`."""
    return torch.randint(vocabulary, sizes_in(shape))


def sizes_in(shape: str | Sequence[int]) -> list[int]:
    try:
        sizes = [int(each) for each in (shape.split("x") if isinstance(shape, str) else shape)]
        if not sizes or min(sizes) < 1:
            raise ValueError
    except ValueError:
        raise ArgumentError(f"Expected a batch such as 4x2048 (positive integers), got {shape!r}.") from None
    return sizes


def example_batch(model: nn.Module, shape: str | Sequence[int] | None = None) -> Any:
    """Return a random batch of `shape`: tokens if `model` begins with an embedding, floats otherwise.

    Without a shape, the first layer determines it. Hugging Face models that compute a loss get a dict with labels.
    """
    first = first_layer(model)
    if shape is None:
        shape = _example_shape(first)
    if shape is None:
        raise ArgumentError(
            f"No batch is given, and none can be derived from the first layer of {type(model).__name__}. Pass a shape "
            "such as 4x16, or define a function batch(rank, step)."
        )
    if not isinstance(first, nn.Embedding | nn.EmbeddingBag):
        return torch.randn(sizes_in(shape))
    drawn = tokens(shape, first.num_embeddings)
    if hasattr(model, "config") and "labels" in inspect.signature(model.forward).parameters:
        return {"input_ids": drawn, "labels": drawn.clone()}
    return drawn


def first_layer(model: nn.Module) -> nn.Module | None:
    """Return the first layer whose input is known."""
    return next((each for each in model.modules() if isinstance(each, _KNOWN_FIRST)), None)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
_KNOWN_FIRST = (nn.Embedding, nn.EmbeddingBag, nn.Linear, *_CONVOLUTIONS, *_RECURRENT)


def _example_shape(first: nn.Module | None) -> Sequence[int] | None:
    if isinstance(first, nn.Embedding | nn.EmbeddingBag):
        return (2, 16)
    if isinstance(first, nn.Linear):
        return (4, first.in_features)
    if isinstance(first, _CONVOLUTIONS):
        return (2, first.in_channels, *[32] * len(first.kernel_size))
    return (4, 8, first.input_size) if isinstance(first, _RECURRENT) else None
