"""Sharded training against the same model unsharded: equal losses, gradients and parameters, step by step.

A comparison that cannot fail proves nothing, so `assert_close` refuses everything it could only pass by accident:
nothing recorded, a tensor that one side lacks, a reference of zeros, a number that is not finite.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from bed import models
from bed.loopback import LoopbackReference, repeat_shards
from bed.models import Case
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)  # one operation: each of a DTensor is slow


@dataclass
class Record:
    """What a training run did: the loss and the gradients of each step, and the parameters at the end."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


Reader = Callable[[list[Tensor]], list[Tensor]]


def full(tensors: list[Tensor]) -> list[Tensor]:
    """The full tensors of equally sharded ones, in one gather (which every rank must join)."""
    first = tensors[0]
    if not isinstance(first, DTensor):
        return tensors
    for each in tensors:
        if (each.placements, each.shape, each.device_mesh) != (first.placements, first.shape, first.device_mesh):
            raise AssertionError(f"sharded as {each._spec}, elsewhere as {first._spec}")
    # Side by side in a new last dimension, which no placement speaks of.
    local = torch.stack([each.to_local() for each in tensors], -1)
    shape = torch.Size((*first.shape, len(tensors)))
    stride = torch.empty(shape, device="meta").stride()
    together = DTensor.from_local(
        local, first.device_mesh, first.placements, run_check=False, shape=shape, stride=stride
    )
    return list(together.full_tensor().unbind(-1))


def local(tensors: list[Tensor]) -> list[Tensor]:
    """This rank's pieces."""
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


# Else cuDNN rounds the factors of convolutions and LSTMs to ten bits, each algorithm in its own way.
@torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
def train(
    model: nn.Module,
    case: Case,
    steps: int,
    optimizer: Optimizer = adamw,
    rank: int = 0,
    size: int = 1,
    read: Reader = full,
    after_step: Callable[[], None] = lambda: None,
    device: str = "cpu",
) -> Record:
    """Train on the rank's slices of the batches. `read` says how to look at the tensors that may be sharded."""
    record = Record()
    stepper = optimizer(model.parameters())
    for step in range(steps):
        inputs, targets = models.shard(case.batch(step), rank, size)
        loss = case.loss(model, (inputs.to(device), targets.to(device)))
        loss.backward()
        record.losses.append(_mean_over_ranks(loss, size))
        named = ((name, parameter.grad) for name, parameter in model.named_parameters())
        record.grads.append({name: grad.detach().clone() for name, grad in named if grad is not None})
        stepper.step()
        stepper.zero_grad()
        after_step()
    record.params = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return _read_all(record, read)


def _read_all(record: Record, read: Reader) -> Record:
    """Read a parameter and its gradients of all steps together: gathers are what takes the time here."""
    for name in list(record.params):
        holders = [record.params, *(grads for grads in record.grads if name in grads)]
        for holder, tensor in zip(holders, read([holder[name] for holder in holders]), strict=True):
            holder[name] = tensor
    return record


def _mean_over_ranks(loss: Tensor, size: int) -> float:
    loss = loss.detach().double()
    if size > 1:
        dist.all_reduce(loss)
    return loss.item() / size


@functools.lru_cache(maxsize=16)
def _reference(case: Case, steps: int, optimizer: Optimizer, device: str) -> Record:
    return train(case.build().to(device), case, steps, optimizer, device=device)


def check_parity(
    case: Case,
    shard: Callable[[nn.Module], object],
    steps: int = 10,
    tolerance: float = 1e-5,
    optimizer: Optimizer = adamw,
    device: str = "cpu",
) -> tuple[Record, Record]:
    """Train sharded with all ranks of the default group and unsharded on this rank alone, and compare."""
    reference = copy.deepcopy(_reference(case, steps, optimizer, device))
    model = case.build().to(device)
    shard(model)
    record = train(model, case, steps, optimizer, dist.get_rank(), dist.get_world_size(), device=device)
    assert_close(record, reference, tolerance)
    return record, reference


def check_loopback(
    case: Case,
    shard: Callable[[nn.Module], object],
    steps: int = 3,
    tolerance: float = 1e-6,
    optimizer: Optimizer = adamw,
    device: str = "cpu",
) -> tuple[Record, Record]:
    """The same inside a loop-back job, where every rank trains on the whole batch: compares the rows of rank 0."""
    reference = LoopbackReference(case.build().to(device), dist.get_world_size())
    expected = train(
        reference.model,
        case,
        steps,
        optimizer,
        read=lambda tensors: [reference.piece(each) for each in tensors],
        after_step=reference.make_shards_equal,
        device=device,
    )
    model = case.build().to(device)
    repeat_shards(model, dist.get_world_size())
    shard(model)
    record = train(model, case, steps, optimizer, read=local, device=device)
    assert_close(record, expected, tolerance)
    return record, expected


def each_unit(case: Case, fully_shard: Callable[..., object], **options: object) -> Callable[[nn.Module], None]:
    """The `shard` of a case: `fully_shard` on each of its units."""

    def shard(model: nn.Module) -> None:
        for unit in case.units(model):
            fully_shard(unit, **options)

    return shard


def assert_close(record: Record, reference: Record, tolerance: float = 1e-5) -> None:
    """Every loss, gradient and parameter agrees: ||a - b|| <= tolerance * ||b||, with b of the reference."""
    if not reference.losses or not reference.params:
        raise AssertionError("the reference recorded nothing: comparing with it would prove nothing")
    _same_length("losses", len(record.losses), len(reference.losses))
    _same_length("gradients", len(record.grads), len(reference.losses))
    _same_length("reference gradients", len(reference.grads), len(reference.losses))
    for step, (mine, theirs) in enumerate(zip(record.losses, reference.losses, strict=True)):
        _close(f"the loss of step {step}", torch.tensor(mine), torch.tensor(theirs), tolerance)
    for step, (mine, theirs) in enumerate(zip(record.grads, reference.grads, strict=True)):
        _all_close(f"the gradient at step {step}", mine, theirs, tolerance)
    _all_close("the parameter after the last step", record.params, reference.params, tolerance)


def _same_length(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise AssertionError(f"{what} of {found} steps, expected {expected}")


def _all_close(what: str, mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    if not theirs:
        raise AssertionError(f"{what}: the reference has none")
    if missing := theirs.keys() - mine.keys():
        raise AssertionError(f"{what} is missing for {sorted(missing)}")
    if surplus := mine.keys() - theirs.keys():
        raise AssertionError(f"{what} exists for {sorted(surplus)}, which the reference does not have")
    for name in theirs:
        _close(f"{what} of {name!r}", mine[name], theirs[name], tolerance)


def _close(what: str, mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    if mine.shape != theirs.shape:
        raise AssertionError(f"{what} has shape {tuple(mine.shape)}, expected {tuple(theirs.shape)}")
    mine, theirs = mine.double().cpu(), theirs.double().cpu()
    for side, tensor in (("here", mine), ("in the reference", theirs)):
        if not tensor.isfinite().all():
            raise AssertionError(f"{what} is not finite {side}: {tensor.flatten()[:8].tolist()}")
    size, difference = theirs.norm().item(), (mine - theirs).norm().item()
    if size == 0.0:
        raise AssertionError(f"{what} is zero in the reference: any multiple of it would agree")
    if not difference <= tolerance * size:
        scale = (mine * theirs).sum().item() / size**2
        hint = f"; it is {scale:.6g} times the expected one" if _parallel(mine, theirs) else ""
        raise AssertionError(
            f"{what} differs by {difference / size:.3g} of its norm (tolerance {tolerance:.3g}): "
            f"norm {mine.norm().item():.8g}, expected {size:.8g}{hint}"
        )


def _parallel(mine: Tensor, theirs: Tensor) -> bool:
    """A wrong scale alone points at a wrong division by the number of ranks: worth saying."""
    dot, sizes = (mine * theirs).sum().item(), mine.norm().item() * theirs.norm().item()
    return sizes > 0 and math.isclose(abs(dot) / sizes, 1.0, rel_tol=1e-9)
