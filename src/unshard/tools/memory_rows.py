"""The kinds of memory of a sharded model, for the plan before a run and the ledger during a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine.api import FSDPState, ParamGroup, memory_of, state_of
from ..torch_private import local_part, storage_key

KINDS = (
    "parameters",
    "gradients",
    "optimizer state",
    "all-gathers",
    "reductions",
    "activations",
    "buffers",
    "other",
)
PARAMETERS, GRADIENTS, STATE, ALL_GATHERS, REDUCTIONS, ACTIVATIONS, BUFFERS, OTHER = KINDS


@dataclass(frozen=True)
class Held:
    """A storage with a known owner."""

    kind: str
    what: str
    on_host: bool
    storage: torch.UntypedStorage


def units_of(model: nn.Module) -> dict[FSDPState, None]:
    """Return the states of all units, in the order of their modules."""
    return {state: None for module in model.modules() if (state := state_of(module)) is not None}


def groups_of(model: nn.Module) -> list[ParamGroup]:
    return [group for state in units_of(model) for group in state.unit.param_groups]


def held_by(model: nn.Module, optimizer: Any = None) -> Iterator[Held]:
    """Yield the storages of parameters, gradients, optimizer state, collectives and buffers, each of them once."""
    seen: set[int] = set()
    for each in _held_by(model, optimizer):
        key = storage_key(each.storage)
        if key not in seen:
            seen.add(key)
            yield each


def _held_by(model: nn.Module, optimizer: Any) -> Iterator[Held]:
    # The slices of a shard are storages of their own, so the shard counts and the parameters in it do not.
    inside: set[int] = set()
    for state in units_of(model):
        name = state.unit.name
        for group in state.unit.param_groups:
            offloaded = group.sharded.offload.offloaded
            inside.update(id(param.sharded) for param in group.params)
            inside.update(id(each) for each in group.sharded.parameters())
            for param in group.params:
                grad = None if param.unsharded is None else param.unsharded.grad
                if grad is not None:
                    yield Held(
                        GRADIENTS, f"unsharded gradient of {param.name}", False, local_part(grad).untyped_storage()
                    )
            for kind, what, storage in memory_of(group):
                on_host = offloaded and (kind in (PARAMETERS, GRADIENTS)) and what != "unreduced gradients"
                yield Held(kind, f"{what} of {name}", on_host, storage)
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            yield Held(PARAMETERS, name, False, local_part(parameter).untyped_storage())
        if parameter.grad is not None:
            yield Held(GRADIENTS, f"gradient of {name}", False, local_part(parameter.grad).untyped_storage())
    for name, buffer in model.named_buffers():
        yield Held(BUFFERS, name, False, local_part(buffer).untyped_storage())
    yield from _states(model, optimizer)


def _states(model: nn.Module, optimizer: Any) -> Iterator[Held]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hosts = {
        id(parameter)
        for group in groups_of(model)
        if group.sharded.offload.offloaded or group.sharded.offload.states is not None
        for parameter in (*group.sharded.parameters(), *(param.sharded for param in group.params))
    }
    for parameter, state in getattr(optimizer, "state", {}).items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if isinstance(value, torch.Tensor):
                what = f"{key} of {names.get(id(parameter), 'a parameter')}"
                yield Held(STATE, what, id(parameter) in hosts, local_part(value).untyped_storage())


def unit_rows(model: nn.Module, most_ranks: int = 64) -> list[dict[str, Any]]:
    """Return name, size and shards of every unit, with the bytes of each shard if there are at most `most_ranks`."""
    rows = []
    for state in units_of(model):
        params = [(group, param) for group in state.unit.param_groups for param in group.params]
        sizes = [(param.sharding.numel, param.sharded.dtype.itemsize) for _, param in params]
        world = max((group.shards.world for group, _ in params), default=1)
        shards = [0] * (world if world <= most_ranks else 0)
        for group, param in params:
            for rank in range(min(group.shards.world, len(shards))):
                shape = param.sharding.local_shape(rank)
                shards[rank] += torch.Size(shape).numel() * param.sharded.dtype.itemsize
        rows.append(
            {
                "name": state.unit.name,
                "parameters": len(params),
                "elements": sum(numel for numel, _ in sizes),
                "bytes": sum(numel * itemsize for numel, itemsize in sizes),
                "shards": world,
                "bytes_per_shard": shards,
            }
        )
    return rows


def size(nbytes: float) -> str:
    """Format bytes as MiB, as GiB from 1 GiB on, or as KiB below 0.1 MiB."""
    if abs(nbytes) >= 2**30:
        return f"{nbytes / 2**30:,.2f} GiB"
    return f"{nbytes / 2**20:,.1f} MiB" if not nbytes or abs(nbytes) >= 0.1 * 2**20 else f"{nbytes / 2**10:,.1f} KiB"


def total(values: Mapping[str, int], kinds: Iterable[str] = KINDS) -> int:
    return sum(values.get(kind, 0) for kind in kinds)
