"""Changes of a program that lower its peak. Each change is planned again, so its effect is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..engine.api import ROOT, state_of
from ..errors import UnshardError
from ..fsdp2.fully_shard import fully_shard
from ..fsdp2.module import FSDPModule
from ..optim.flat_optimizer import flat
from ..policies import CPUOffloadPolicy, MixedPrecisionPolicy
from .memory_run import Changes, Run, Setting, run

_LEAST = 0.005
"""A change is advice if it saves at least this part of the peak."""
_LARGE = 0.2
"""A module gets a unit of its own if it has at least this part of the parameters of its unit."""


@dataclass(frozen=True)
class Advice:
    change: str
    peak: int
    fits: bool | None

    def to_dict(self) -> dict[str, Any]:
        return {"change": self.change, "peak": self.peak, "fits": self.fits}


@dataclass
class _Facts:
    """What the unchanged program does."""

    tables: dict[str, Any]
    """The policies of modules that should be units of their own, by name."""
    blocks: list[str]
    kept: list[str]
    offloads: bool
    casts: bool
    is_flat: bool
    wrapped: bool


def advise_on(setting: Setting, found: Run, device_memory: int | None) -> list[Advice]:
    """Return the changes that lower the peak, best first. If no single change fits, also return combinations."""
    facts = _facts(setting)
    tried: list[tuple[int, str, Changes]] = []
    for name, changes in _candidates(setting, facts):
        peak = _peak(setting, changes)
        if peak is not None and peak <= found.peak.total * (1 - _LEAST):
            tried.append((peak, name, changes))
    tried.sort(key=lambda each: each[0])
    advice = [_advice(name, peak, device_memory) for peak, name, _ in tried]
    if device_memory is not None and not any(each.fits for each in advice):
        advice += _combined(setting, tried, device_memory)
    return sorted(advice, key=lambda each: each.peak)


def _combined(setting: Setting, tried: list[tuple[int, str, Changes]], device_memory: int) -> list[Advice]:
    found: list[Advice] = []
    names, changes = [name for _, name, _ in tried[:1]], tried[0][2] if tried else Changes()
    for _, name, more in tried[1:]:
        names.append(name)
        changes = changes + more
        peak = _peak(setting, changes)
        if peak is None:
            break
        found.append(_advice(" + ".join(names), peak, device_memory))
        if found[-1].fits:
            break
    return found[-1:]


def _advice(name: str, peak: int, device_memory: int | None) -> Advice:
    return Advice(name, peak, None if device_memory is None else peak <= device_memory)


def _peak(setting: Setting, changes: Changes) -> int | None:
    try:
        return run(setting, changes).peak.total
    except UnshardError:
        return None  # the change does not suit this program


def _facts(setting: Setting) -> _Facts:
    facts: list[_Facts] = []
    run(setting, look=lambda model: facts.append(_look(model)))
    return facts[0]


def _look(model: nn.Module) -> _Facts:
    facts = _Facts({}, [], [], False, False, False, False)
    for name, module in model.named_modules():
        state = state_of(module)
        if state is None:
            continue
        unit = state.unit
        facts.wrapped |= not isinstance(module, FSDPModule)
        facts.offloads |= any(group.sharded.offload.offloaded for group in unit.param_groups)
        facts.casts |= any(param.policy.param_dtype is not None for param in unit.params)
        if name:
            facts.blocks.append(name)
            if unit.options.reshard_after_forward is False or unit.options.slice_after_forward:
                facts.kept.append(name)
        elements = sum(param.sharding.numel for param in unit.params)
        for param in unit.params:
            owner, _, _ = param.name.rpartition(".")
            full = f"{name}.{owner}" if name and owner else name or owner
            large = param.sharding.numel >= _LARGE * elements and len(unit.params) > 1
            if full and owner and large and unit.name == ROOT:
                facts.tables[full] = param.policy
    return facts


def _candidates(setting: Setting, facts: _Facts) -> Iterator[tuple[str, Changes]]:
    if facts.tables and not facts.wrapped:
        names = " and ".join(facts.tables)
        each = "each " if len(facts.tables) > 1 else ""
        yield f"give {each}large table a unit of its own ({names})", Changes(shard=_with_units(facts.tables))
    if facts.blocks:
        yield "activation checkpointing of each unit", Changes(shard=_with_checkpoints(facts.blocks))
    if facts.kept and not facts.wrapped:
        yield "reshard_after_forward=True", Changes(sharded=_resharding(facts.kept))
    if not facts.offloads and not facts.wrapped and setting.device != "cpu":
        yield "offload_policy=CPUOffloadPolicy()", Changes(options={"offload_policy": CPUOffloadPolicy()})
    if not facts.casts and not facts.wrapped:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        yield "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)", Changes(options={"mp_policy": policy})
    yield "flat optimizer: unshard.optim.flat(optimizer)", Changes(optimizer=flat)
    yield f"{setting.world * 2:,} ranks", Changes(world=2)


def _with_units(tables: dict[str, Any]) -> Any:
    def shard(model: nn.Module) -> None:
        for name, policy in tables.items():
            fully_shard(model.get_submodule(name), mp_policy=policy)

    return shard


def _with_checkpoints(blocks: list[str]) -> Any:
    def shard(model: nn.Module) -> None:
        for name in blocks:
            module = model.get_submodule(name)
            forward = module.forward

            def again(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)

            module.forward = again

    return shard


def _resharding(kept: list[str]) -> Any:
    def sharded(model: nn.Module) -> None:
        for name in kept:
            model.get_submodule(name).set_reshard_after_forward(True)  # type: ignore[operator]

    return sharded
