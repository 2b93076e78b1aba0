"""Trains a program on several ranks and unsharded. Both note losses, gradients and parameters for `verify`."""

from __future__ import annotations

import hashlib
import importlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.api import state_of
from ..errors import ArgumentError
from ..names import ALL_PREFIXES, behind_data_parallel, clean_tensor_name
from ..state.boxes import Box
from ..state.model import model_state
from ..torch_private import as_plain, local_part
from .precision_plan import plan_of
from .program import Program, example_batch, load_program

Pieces = dict[str, list[tuple[Box, torch.Tensor]]]
"""Parts of the unsharded tensors, by name."""
Tensors = dict[str, torch.Tensor]

COLLECTIVE_LIMIT_S = 300
_DEFAULT_SEED = 67280421310721  # torch's own, in a new process


@dataclass(frozen=True)
class Job:
    """What a worker process needs to know."""

    program: Program | str
    batch: Any
    steps: int
    device: str
    folder: Path
    tolerance: float | None = None
    threads: int = 1

    def load(self) -> Program:
        return load_program(self.program) if isinstance(self.program, str) else self.program

    def file(self, world: int, what: str, rank: int) -> Path:
        return self.folder / f"{world}-{what}-{rank}.pt"

    def batch_of(self, program: Program, model: nn.Module, rank: int, step: int) -> Any:
        batch = self.batch
        seed(rank, step)
        if batch is None and program.batch is not None:
            batch = program.batch
        if batch is None or is_shape(batch):
            batch = example_batch(model, batch)
        return to_device(batch(rank, step) if callable(batch) else batch, self.device)


def is_shape(batch: Any) -> bool:
    return isinstance(batch, str) or (isinstance(batch, list | tuple) and all(isinstance(each, int) for each in batch))


def to_device(batch: Any, device: str) -> Any:
    return map_tensors(lambda each: each.to(device), batch)


def map_tensors(function: Any, *batches: Any) -> Any:
    """Apply `function` to the tensors at the same place in all `batches`. Other values must be equal."""
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return function(*batches)
    if isinstance(first, Mapping):
        found = {key: map_tensors(function, *(each[key] for each in batches)) for key in first}
        return found if type(first) is dict else type(first)(found)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        rows = [map_tensors(function, *row) for row in zip(*batches, strict=True)]
        return type(first)(*rows) if hasattr(first, "_fields") else type(first)(rows)
    if any(each != first for each in batches[1:]):
        raise ValueError(f"{first!r} differs between ranks")
    return first


def seed(*numbers: int) -> None:
    """Seed the generators of Python, NumPy and torch. Equal `numbers` give equal random numbers in all runs."""
    value = int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "big")
    random.seed(value)
    torch.manual_seed(value)
    with suppress(ImportError):
        importlib.import_module("numpy").random.seed(value)


@contextmanager
def process_group(job: Job, name: str, rank: int, world: int) -> Iterator[None]:
    """Create the default process group as `torchrun` does, including its environment variables."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(job.folder / f"store-{name}"), world)
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_LIMIT_S),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(program: Program, device: str) -> nn.Module:
    torch.manual_seed(_DEFAULT_SEED)
    random.seed(0)
    model = program.model()
    return model if on_meta(model) else model.to(device)


def on_meta(model: nn.Module) -> bool:
    return any(each.is_meta for each in (*model.parameters(), *model.buffers()))


# -- names --------------------------------------------------------------------------------------------------


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Map every name of each parameter to its alphabetically first name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean_tensor_name(name, ALL_PREFIXES))
    return {name: min(group) for group in names.values() for name in group}


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    aliases = aliases_of(model)
    named = model.named_parameters(remove_duplicate=False)
    return {aliases[clean_tensor_name(name, ALL_PREFIXES)]: parameter for name, parameter in named}


def buffers_of(model: nn.Module) -> Tensors:
    return {
        clean_tensor_name(name, ALL_PREFIXES): as_plain(local_part(each)).detach().clone()
        for name, each in behind_data_parallel(model).named_buffers()
    }


# -- sharded ------------------------------------------------------------------------------------------------


@dataclass
class Start:
    """What a rank has before the first step."""

    digests: dict[str, str]
    """Hashes of the values that `build` gave to parameters and buffers."""
    values: Tensors
    """These values, on rank 0. If the model was on the meta device, the values after sharding."""
    pieces: Pieces
    """The parameters after sharding."""
    aliases: dict[str, str]
    """Maps the names of tied parameters of the sharded model to their first name."""
    trained: dict[str, bool]
    unmanaged: list[str]
    """Parameters in no unit, if there are units."""
    narrowest: torch.dtype
    """The narrowest dtype that the sharded model computes in."""


@dataclass
class Step:
    loss: float
    gradients: Pieces
    parameters: Pieces
    buffers: Tensors
    batch_digest: str


def run_rank(job: Job, rank: int, world: int) -> None:
    """Train the sharded model, and write what this rank has before and after each step to files."""
    with process_group(job, f"{world}", rank, world):
        program = job.load()
        model = build(program, job.device)
        values = {} if on_meta(model) else _values(model)
        sharded = program.sharded(model)
        optimizer = program.optimizer_of(sharded)
        torch.save(_start(values, sharded, rank), job.file(world, "start", rank))
        for step in range(1, job.steps + 1):
            batch = job.batch_of(program, sharded, rank, step)
            seed(rank, step)
            loss = program.loss(sharded, batch)
            loss.backward()
            gradients = _pieces(sharded, gradients=True)
            optimizer.step()
            sharded.zero_grad()
            noted = Step(loss.item(), gradients, _pieces(sharded), _on_host(buffers_of(sharded)), digest_of(batch))
            torch.save(noted, job.file(world, f"step{step}", rank))


def _start(values: Tensors, sharded: nn.Module, rank: int) -> Start:
    state = model_state(sharded)
    full = [each.name for found in state.optimized.values() for each in found if not each.plain]
    plain = [each.name for found in state.optimized.values() for each in found if each.plain]
    digests = {name: digest_of(each) for name, each in values.items()}
    dtypes = [each.dtype for each in sharded.parameters() if each.is_floating_point()] or [torch.float32]
    if any(state_of(each) for each in sharded.modules()):
        dtypes += [each.dtypes.compute for each in plan_of(sharded).params]
    narrowest = min(
        dtypes, key=lambda each: (each.itemsize, -torch.finfo(each).eps) if each.is_floating_point else (9, 0)
    )
    aliases = {name.removeprefix("model/"): of.removeprefix("model/") for name, of in state.aliases.items()}
    trained = {
        each.name: parameter.requires_grad
        for parameter in sharded.parameters()
        for each in state.optimized.get(id(parameter), ())
    }
    buffers = _on_host(buffers_of(sharded)) if not values else {}
    kept = (_on_host(values) or buffers) if rank == 0 else {}
    return Start(digests, kept, _pieces(sharded), aliases, trained, plain if full else [], narrowest)


def _values(model: nn.Module) -> Tensors:
    return {**{name: each.detach().clone() for name, each in parameters_of(model).items()}, **buffers_of(model)}


def _on_host(tensors: Tensors) -> Tensors:
    return {name: each.cpu() for name, each in tensors.items()}


def digest_of(value: Any) -> str:
    """Return a hash of the tensors in `value`."""
    digest = hashlib.sha256()

    def add(tensor: torch.Tensor) -> torch.Tensor:
        plain = as_plain(local_part(tensor.detach())).cpu().contiguous().reshape(-1)
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        return tensor

    map_tensors(add, value)
    return digest.hexdigest()


def _pieces(model: nn.Module, gradients: bool = False) -> Pieces:
    """Return copies of this rank's parts of all parameters, or of their gradients."""
    found: Pieces = {}
    state = model_state(model)
    for parameter in behind_data_parallel(model).parameters():
        value = parameter.grad if gradients else parameter
        if value is None:
            continue
        for each in state.optimized.get(id(parameter), ()):
            local = as_plain(each.local_of(value.detach()))
            views = each.box_map.views(local)
            found[each.name] = [(b, v.cpu().clone()) for b, v in zip(each.box_map.boxes, views, strict=True)]
    return found


# -- unsharded ----------------------------------------------------------------------------------------------


class Reference:
    """The unsharded model. A step trains on the batches of all ranks, with the mean of their losses."""

    def __init__(self, job: Job, program: Program, world: int, start: Start, full: Tensors):
        self.job, self.program, self.world = job, program, world
        self.model = build(program, job.device)
        if on_meta(self.model):
            self.model.to_empty(device=job.device)
        self.load({**full, **start.values})
        self.optimizer = program.optimizer_of(self.model)

    def load(self, values: Tensors) -> None:
        with torch.no_grad():
            for name, parameter in parameters_of(self.model).items():
                if name in values:
                    parameter.copy_(values[name])
        self.set_buffers({name: each for name, each in values.items() if name in buffers_of(self.model)})

    def perturb(self) -> None:
        """Change each element of the parameters by about the rounding error of its dtype."""
        torch.manual_seed(1)
        with torch.no_grad():
            for each in self.model.parameters():
                if each.is_floating_point() or each.is_complex():
                    signs = torch.randint(2, each.shape, device=each.device) * 2 - 1
                    each.add_(each.abs() * signs * torch.finfo(each.dtype).eps)

    def set_buffers(self, values: Tensors) -> None:
        for name, value in values.items():
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, value.clone().to(self.job.device))

    def batch(self, rank: int, step: int) -> Any:
        return self.job.batch_of(self.program, self.model, rank, step)

    def loss(self, batch: Any, rank: int, step: int) -> torch.Tensor:
        seed(rank, step)
        return self.program.loss(self.model, batch)

    def gradients(self, batch: Any, rank: int, step: int) -> tuple[float, Tensors]:
        """Return the loss of one batch and its gradients, which are not kept in the model."""
        self.model.zero_grad()
        loss = self.loss(batch, rank, step)
        loss.backward()
        found = {name: each.grad for name, each in parameters_of(self.model).items() if each.grad is not None}
        self.model.zero_grad()
        return loss.item(), found

    def backward(self, step: int) -> tuple[list[float], list[Tensors]]:
        """Return losses and gradients by rank. Every rank starts with the same buffers, which are averaged after."""
        before, losses, gradients, after = buffers_of(self.model), [], [], []
        for rank in range(self.world):
            self.set_buffers(before)
            loss, own = self.gradients(self.batch(rank, step), rank, step)
            losses.append(loss)
            gradients.append(own)
            after.append(buffers_of(self.model))
        self.set_buffers(
            {
                name: torch.stack([each[name] for each in after]).mean(0) if first.is_floating_point() else first
                for name, first in after[0].items()
            }
        )
        return losses, gradients

    def step(self, gradients: Tensors) -> None:
        for name, parameter in parameters_of(self.model).items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)
        self.optimizer.step()
        self.model.zero_grad()

    def parameters(self) -> Tensors:
        return {name: each.detach() for name, each in parameters_of(self.model).items()}


def mean_of(gradients: Sequence[Tensors]) -> Tensors:
    """Return the mean over ranks. A rank without a gradient counts as zero."""
    names = dict.fromkeys(name for each in gradients for name in each)
    return {
        name: torch.stack(
            [each[name].float() if each[name].dtype.itemsize < 4 else each[name] for each in gradients if name in each]
        ).sum(0)
        / len(gradients)
        for name in names
    }


def probe(job: Job) -> None:
    """Compute one loss of the unsharded model. Raise `ArgumentError` if that fails."""
    with process_group(job, "probe", 0, 1):
        program = job.load()
        model = build(program, job.device)
        if on_meta(model):
            return  # has no values before sharding
        failed = "batch(rank, step)"
        try:
            batch = job.batch_of(program, model, 0, 1)
            failed = "The loss of the unsharded model"
            loss = program.loss(model, batch)
        except ArgumentError:
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise ArgumentError(
                f"{failed} raised {type(error).__name__}: {text}. Pass a batch that fits the "
                "model, or define functions batch(rank, step) and loss(model, batch)."
            ) from error
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ArgumentError(
                f"The loss must be one number that requires a gradient, got {_described(loss)}. Define a function "
                "loss(model, batch) that returns such a tensor."
            )
        if not loss.isfinite():
            raise ArgumentError(f"The loss of the unsharded model is {loss.item()} in the first step.")


def _described(loss: Any) -> str:
    if not isinstance(loss, torch.Tensor):
        return type(loss).__name__
    return f"a tensor of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without a graph")
