"""Models wrapped by `FullyShardedDataParallel`, read as full tensors and compared with the unsharded model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bed import models, parity
from bed.models import Case
from bed.parity import Record, adamw, assert_close
from torch import Tensor, nn

from unshard import FullyShardedDataParallel as FSDP


def wrap(model: nn.Module, units: list[nn.Module], **options: Any) -> FSDP:
    """Each of `units` wrapped, innermost first; the last one is the model itself."""
    inner = [unit for unit in units if unit is not model]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank, or NO_SHARD
        _wrap_inside(model, inner, options)
        return FSDP(model, **options)


def _wrap_inside(module: nn.Module, units: list[nn.Module], options: dict[str, Any]) -> None:
    for name, child in module.named_children():
        _wrap_inside(child, units, options)
        if any(child is unit for unit in units):
            setattr(module, name, FSDP(child, **options))


def wrap_case(case: Case, **options: Any) -> FSDP:
    model = case.build()
    return wrap(model, case.units(model), **options)


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def full_gradients(model: FSDP) -> dict[str, Tensor]:
    """From the flat gradients of all units, whose pieces are gathered here."""
    found: dict[str, Tensor] = {}
    for module in FSDP.fsdp_modules(model):
        handle = module._handle
        if handle is None or handle.flat_param.grad is None:
            continue
        flat = handle.flat_param
        pieces = [torch.empty_like(flat.grad) for _ in range(handle.world_size)]
        if handle.world_size > 1:
            dist.all_gather(pieces, flat.grad, group=module.process_group)
        else:
            pieces = [flat.grad]
        whole = torch.cat(pieces)
        for param in handle._sharded.params:
            cut = param.sharding
            found[param.name] = whole.as_strided(cut.shape, cut.stride, cut.begin).clone()
    return found


def train(model: FSDP, case: Case, steps: int, optimizer: parity.Optimizer = adamw) -> Record:
    """As `parity.train`, with the wrapper's ways of looking at full tensors."""
    record, stepper = Record(), optimizer(model.parameters())
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        loss = case.loss(model, models.shard(case.batch(step), rank, size))
        loss.backward()
        record.losses.append(parity._mean_over_ranks(loss, size))
        record.grads.append(full_gradients(model))
        stepper.step()
        stepper.zero_grad()
    record.params = full_parameters(model)
    return record


def check_wrapped(
    case: Case,
    steps: int = 4,
    tolerance: float = 1e-5,
    build: Callable[..., FSDP] = wrap_case,
    **options: Any,
) -> FSDP:
    """Train wrapped with all ranks of the default group and unsharded on this rank alone, and compare."""
    reference = copy.deepcopy(parity._reference(case, steps, adamw, "cpu"))
    model = build(case, **options)
    assert_close(train(model, case, steps), reference, tolerance)
    return model
