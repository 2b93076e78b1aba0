"""What a plan holds that its author probably did not mean: each a sentence with the names and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ..engine.faces import full_name
from ..policies import MixedPrecisionPolicy, matches
from ..torch_private import BATCH_NORM
from .plan import Member, ModelPlan, UnitPlan, listed, owned_modules
from .state import parameters_of, state_tensors
from .words import quoted, short, shorts, unit_title

MANY_RANKS = 8
"""A bf16 number has 8 bits: the sum over more ranks than this loses digits of nearly every summand."""
TABLES = ("*inv_freq*", "*freqs*")
"""Position tables: in 16 bits, far positions become one and the same."""
_DEFAULT_KEPT = next(f.default for f in fields(MixedPrecisionPolicy) if f.name == "keep_buffers")


def surprises(plan: ModelPlan, optimizer: Any = None) -> list[str]:
    found: list[str] = []
    for look in (
        _parameters,
        _doubles,
        _state,
        _strangers,
        _loose,
        _reductions,
        _halves,
        _buffers,
        _statistics,
        _output,
    ):
        found += look(plan, optimizer)
    for search in (_unmatched, _uncovered, _eval):
        found += search(plan.units)
    return found


def is_half(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize <= 2


def _members(plan: ModelPlan, wanted: Callable[[Member], bool]) -> list[Member]:
    return [each for unit in plan.units for each in unit.members if each.trainable and wanted(each)]


def _names(members: Iterable[Member]) -> str:
    listed = [each.name for each in members]
    return ("parameter " if len(listed) == 1 else "parameters ") + quoted(listed)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _parameters(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    stored = _members(plan, lambda each: is_half(each.dtypes.original))
    if stored:
        dtypes = shorts(each.dtypes.original for each in stored)
        narrow = stored[0].dtypes.original
        yield _sentence(
            f"{_names(stored)}: stored in {dtypes}, so the optimizer updates in 16 bits and small updates are lost; "
            f"keep them in fp32 and set param_dtype={narrow} to compute in {short(narrow)}."
        )


def _doubles(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    double = (torch.float64, torch.complex128)
    names = [each.name for unit in plan.units for each in unit.members if each.dtypes.original in double]
    names += [name for name, parameter in plan.loose if parameter.dtype in double]
    buffers = [buffer.name for unit in plan.units for buffer in unit.buffers if buffer.stored in double]
    for kind, found in (("parameters", names), ("buffers", buffers)):
        if found:
            yield _sentence(
                f"{kind} {quoted(found)}: stored in fp64, which costs twice the memory and spreads to what is computed "
                "with them; build them with dtype=torch.float32, from Python numbers or torch tensors."
            )


def _state(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    if optimizer is None:
        return
    narrow: dict[tuple[str, torch.dtype], list[Member]] = {}
    for each in _members(plan, lambda each: not is_half(each.dtypes.original)):
        for name, tensor in state_tensors(optimizer, each.parameter):
            if tensor.dtype.itemsize < 4:
                narrow.setdefault((name, tensor.dtype), []).append(each)
    for (name, dtype), members in narrow.items():
        yield (
            f"{type(optimizer).__name__} keeps {name!r} of {_names(members)} in {short(dtype)}, narrower than fp32: "
            "averages over many steps stop moving; keep its state in fp32."
        )


def _strangers(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    if optimizer is None:
        return
    members = [each for unit in plan.units for each in unit.members]
    before = {id(origin): each.name for each in members if (origin := each.slot.origin()) is not None}
    others = [each for each in parameters_of(optimizer) if id(each) not in plan.own and each.requires_grad]
    known = [before.get(id(each)) or full_name(each) for each in others]
    if not others:
        return
    names = [name for name in known if name]
    which = f" ({quoted(names)} as they were before sharding, or gathered)" if names else ""
    yield (
        f"{type(optimizer).__name__} holds {len(others)} parameters that are not the model's{which}, so its steps do "
        "not change the model: build the optimizer after fully_shard, from model.parameters() at rest."
    )


def _loose(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    if plan.loose:
        names = quoted([name for name, _ in plan.loose])
        yield (
            f"Parameters {names}: in no unit (ignored, or added after sharding), so their gradients are not reduced "
            "and the ranks drift apart; leave them out of ignored_params, add them before fully_shard, or reduce "
            "their gradients yourself."
        )


def _reductions(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    rounded = _members(plan, lambda each: each.dtypes.reduce.itemsize < each.dtypes.compute.itemsize)
    if rounded:
        dtypes = rounded[0].dtypes
        yield _sentence(
            f"{_names(rounded)}: gradients come in {short(dtypes.compute)} and are reduced in {short(dtypes.reduce)}, "
            f"which rounds them; set reduce_dtype={dtypes.compute}, or leave it None."
        )
    sent = _members(
        plan,
        lambda each: each.dtypes.wire.itemsize < min(each.dtypes.compute.itemsize, each.dtypes.reduce.itemsize),
    )
    if sent:
        dtypes = sent[0].dtypes
        yield _sentence(
            f"{_names(sent)}: gradients come in {short(dtypes.compute)} and wire_dtype rounds them to "
            f"{short(dtypes.wire)}; nothing is lost only where the wire is as wide as param_dtype, so leave wire_dtype "
            "None or compute in it."
        )
    crowded = [unit for unit in plan.units if unit.ranks > MANY_RANKS and _sums_in_16_bits(unit)]
    if crowded:
        yield _sentence(
            f"{listed(crowded)}: gradients are added up in 16 bits over {max(unit.ranks for unit in crowded)} ranks, "
            "which loses digits of most summands; set reduce_dtype=torch.float32, with wire_dtype=torch.bfloat16 if "
            "the bytes matter."
        )


def _sums_in_16_bits(unit: UnitPlan) -> bool:
    return any(each.trainable and is_half(each.dtypes.reduce) for each in unit.members)


def _halves(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    half = torch.float16
    users = [
        unit
        for unit in plan.units
        if any(half in (each.dtypes.compute, each.dtypes.reduce) and each.trainable for each in unit.members)
    ]
    if users:
        yield _sentence(
            f"{listed(users)}: computed or reduced in fp16, where gradients below 6e-8 vanish and sums above 65504 "
            "overflow; train with unshard.optim.GradScaler, or use torch.bfloat16."
        )


def _buffers(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    every = [each for unit in plan.units for each in unit.buffers]
    tables = [each for each in every if any(matches(each.alias, pattern) for pattern in TABLES)]
    rounded = [e for e in every if e.was is not None and _rounds(e.was, e.stored)]
    stored = [each for each in tables if is_half(each.stored) and each not in rounded]
    seen = [each for each in tables if is_half(each.seen) and each not in rounded + stored]
    if rounded:
        was, now = shorts(each.was for each in rounded if each.was), shorts(each.stored for each in rounded)
        yield (
            f"Buffers {quoted([each.name for each in rounded])}: {was} when they were sharded and {now} now, so a "
            ".to() or .half() of the model rounded them; set param_dtype in the policy instead of converting the "
            "model, and compute the buffers anew."
        )
    if stored:
        yield (
            f"Buffers {quoted([each.name for each in stored])}: stored in {shorts(each.stored for each in stored)}, in "
            "which far positions look the same; compute them in fp32, after the last conversion of the model."
        )
    if seen:
        yield (
            f"Buffers {quoted([each.name for each in seen])}: forward sees them in "
            f"{shorts(each.seen for each in seen)} because of buffer_dtype, and far positions look the same; "
            "name them in keep_buffers."
        )


def _rounds(was: torch.dtype, now: torch.dtype) -> bool:
    return was != now and now.itemsize <= was.itemsize


def _statistics(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    narrow = [
        buffer
        for unit in plan.units
        for buffer in unit.buffers
        if isinstance(buffer.module, BATCH_NORM) and buffer.seen.itemsize < buffer.stored.itemsize
    ]
    if narrow:
        yield (
            f"Statistics {quoted([buffer.name for buffer in narrow])} add up in {shorts(b.seen for b in narrow)} "
            "(buffer_dtype), where small changes vanish; compute these norms as they are stored, with overrides."
        )


def _output(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    for unit in plan.units:
        policy = unit.policy
        stored = {each.dtypes.original for each in unit.members if each.dtypes.original.is_floating_point}
        computed = {policy.param_dtype} if policy.param_dtype is not None else stored
        returned = {policy.output_dtype} if policy.output_dtype is not None else computed
        if unit.outermost and returned and all(is_half(dtype) for dtype in returned):
            dtypes = shorts(dtype for dtype in returned if dtype is not None)
            yield (
                f"Unit {unit_title(unit.name)!r}: the model returns {dtypes}, so a loss of its output is computed in "
                "16 bits; set output_dtype=torch.float32 in its policy, or call .float() on the output."
            )


def _unmatched(units: tuple[UnitPlan, ...]) -> Iterator[str]:
    """Units that were given the same patterns count as one: a model is often sharded with one policy for all."""
    overriding: dict[tuple[str, ...], list[UnitPlan]] = {}
    keeping: dict[tuple[str, ...], list[UnitPlan]] = {}
    for unit in units:
        overriding.setdefault(tuple(override[0] for override in unit.policy.overrides), []).append(unit)
        if unit.policy.keep_buffers != _DEFAULT_KEPT:
            keeping.setdefault(tuple(unit.policy.keep_buffers), []).append(unit)
    for patterns, users in overriding.items():
        names = [alias for unit in users for each in unit.members for alias in each.aliases]
        yield from _matching_nothing("overrides", patterns, users, "parameter", names)
    for patterns, users in keeping.items():
        if patterns and all(unit.policy.buffer_dtype is None for unit in users):
            yield (
                f"Patterns {quoted(patterns)} in keep_buffers of {listed(users)} have no effect: buffers are seen as "
                "they are stored; set buffer_dtype, or take them out."
            )
        names = [buffer.alias for unit in users for buffer in unit.buffers]
        yield from _matching_nothing("keep_buffers", patterns, users, "floating-point buffer", names)


def _matching_nothing(
    field: str, patterns: tuple[str, ...], users: list[UnitPlan], thing: str, names: list[str]
) -> Iterator[str]:
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            yield (
                f"Pattern {pattern!r} in {field} matches no {thing} of {listed(users)}: names are those inside the "
                "module that was sharded, without its own path, and units inside it have policies of their own; "
                "correct the pattern or take it out."
            )


def _uncovered(units: tuple[UnitPlan, ...]) -> Iterator[str]:
    """Overrides that reach parameters of a module, but not all below it: nobody casts at its door."""
    found: dict[tuple[str, tuple[str, ...], str], list[UnitPlan]] = {}
    for unit in units:
        inside = {module: prefix for _, prefix, module in owned_modules(unit.state)}
        for module, members in _without_border(unit).items():
            path, names = inside.get(module, "").removesuffix("."), tuple(each.aliases[0] for each in members)
            found.setdefault((path, names, shorts(each.dtypes.compute for each in members)), []).append(unit)
    for (path, names, dtype), users in found.items():
        module_name = f"module {path!r}" if path else "the sharded module itself"
        yield _sentence(
            f"{listed(users)}: an override puts {quoted(names)} in {dtype}, but not all parameters of {module_name}, "
            f"so nothing is cast at its door; match all of them ({path + '.*' if path else '*'!r}), or cast in its "
            "forward."
        )


def _without_border(unit: UnitPlan) -> dict[nn.Module, list[Member]]:
    covered = {inner for module in unit.borders for inner in module.modules()}
    found: dict[nn.Module, list[Member]] = {}
    for each in unit.members:
        own = each.slot.policy
        if own is not unit.policy and own.param_dtype != unit.policy.param_dtype:
            for home in each.slot.homes:
                module = home.module()
                if module is not None and module not in covered:
                    found.setdefault(module, []).append(each)
    return found


def _eval(units: tuple[UnitPlan, ...]) -> Iterator[str]:
    cast = [unit for unit in units if any(e.dtypes.compute != e.dtypes.original for e in unit.members)]
    full = [unit for unit in cast if unit.policy.full_precision_in_eval]
    if full and len(full) < len(cast):
        yield _sentence(
            f"{listed(full)}: computed as stored in eval() (full_precision_in_eval), but the other units are not, so "
            "dtypes may not fit where they meet; set it in all policies, or in none."
        )
