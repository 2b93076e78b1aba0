"""The parameters of a module as one unit that is laid end to end."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm.agreement import require_agreement
from ..comm.interface import Transport
from ..engine.faces import Home, Slot, hidden_home_of, home_of
from ..engine.flat_sharded import FlatSharded
from ..engine.hooks import state_of
from ..engine.options import Options
from ..engine.part import Part
from ..engine.residence import Residence
from ..engine.unit import Unit
from ..errors import ArgumentError, UnsupportedError
from ..layout.flat import Flat, FlatCut, is_dense, lay_end_to_end
from ..policies import MixedPrecisionPolicy
from ..torch_private import contiguous_stride, is_replicated, own_parameters

FLAT_PARAM = "_flat_param"
_MARK = "unshard_sharded_by"


@dataclass
class Managed:
    """What a call takes of a module: the modules, and each distinct parameter with its places, first use first."""

    modules: list[nn.Module] = field(default_factory=list)
    prefixes: dict[nn.Module, str] = field(default_factory=dict)
    parameters: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = field(default_factory=dict)


def managed_by(module: nn.Module, ignored_modules: Collection[nn.Module], ignored: Collection[nn.Parameter]) -> Managed:
    """Parents before children, as `named_parameters` goes; nothing below another unit or inside an ignored module."""
    found = Managed()

    def visit(each: nn.Module, prefix: str) -> None:
        if each in found.prefixes or each in ignored_modules or state_of(each) is not None or is_replicated(each):
            return
        found.modules.append(each)
        found.prefixes[each] = prefix
        for name, parameter in own_parameters(each).items():
            if parameter is not None and parameter not in ignored:
                found.parameters.setdefault(parameter, []).append((prefix + name, each, name))
        for name, child in each.named_children():
            visit(child, f"{prefix}{name}.")

    visit(module, "")
    return found


def check_parameters(title: str, parameters: dict[nn.Parameter, list[tuple[str, nn.Module, str]]], one: bool) -> None:
    """What can be laid end to end; `one`: as one parameter, so that all must be trained or none."""
    named = {places[0][0]: parameter for parameter, places in parameters.items()}
    for name, parameter in named.items():
        if isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"Parameter {name!r} of {title} is a DTensor. Use fully_shard to shard tensor-parallel parameters."
            )
        owner = getattr(parameter, _MARK, None)
        if owner is not None:
            raise ArgumentError(
                f"Parameter {name!r} of {title} belongs to another wrapped module already ({owner}). Parameters "
                "that modules share have to be in one unit: wrap a module that contains both."
            )
        if parameter.ndim == 0:
            raise ArgumentError(
                f"Parameter {name!r} of {title} is a scalar; make it a tensor of one element: "
                "nn.Parameter(value.reshape(1))."
            )
        if not parameter.is_floating_point():
            raise ArgumentError(
                f"Parameter {name!r} of {title} is {parameter.dtype}; only floating-point parameters can be laid end "
                "to end. Pass it in ignored_states."
            )
    _require_one("dtype", {name: each.dtype for name, each in named.items()}, title, "Wrap the modules separately")
    if one:
        trained = {name: each.requires_grad for name, each in named.items()}
        _require_one("requires_grad", trained, title, "Wrap them separately, or pass use_orig_params=True")


def _require_one(what: str, values: dict[str, Any], title: str, remedy: str) -> None:
    if len(set(values.values())) > 1:
        (first, usual), *others = values.items()
        name, other = next((name, value) for name, value in others if value != usual)
        raise ArgumentError(
            f"The parameters of {title} become one unit and must have the same {what}, but {first!r} has {usual} and "
            f"{name!r} has {other}. {remedy}."
        )


@dataclass(frozen=True)
class Where:
    """Over which ranks, on which device, and where the shards rest."""

    shards: Transport
    replicas: Transport
    device: torch.device
    residence: Residence


def flat_unit(
    module: nn.Module, managed: Managed, where: Where, policy: MixedPrecisionPolicy, options: Options, originals: bool
) -> tuple[Unit, Flat | None]:
    """A unit of the managed parameters, and how they lie in it; `originals`: users see them, not the unit's one."""
    title = type(module).__name__
    if not managed.parameters:
        return Unit([], where.device, policy, options), None
    dtype = next(iter(managed.parameters)).dtype
    compute = policy.param_dtype or dtype
    numels = [parameter.numel() for parameter in managed.parameters]
    flat = lay_end_to_end(numels, where.shards.world, compute.itemsize, aligned=originals)
    facts = [f"parameter {p[0][0]!r} of shape {tuple(each.shape)}" for each, p in managed.parameters.items()]
    for transport in (where.shards, where.replicas):
        require_agreement(transport, where.device, f"the wrapped module {title}", [f"{title} in {dtype}", *facts])
    slots = []
    for (parameter, places), begin in zip(managed.parameters.items(), flat.begins, strict=True):
        slots.append(_slot(parameter, places, begin, flat.share, where.shards, policy, originals))
        if originals:
            setattr(parameter, _MARK, title)
    homes: list[Home] = [] if originals else [home_of(module, FLAT_PARAM)]
    keep = partial(FlatSharded, homes=homes, length=flat.length, originals=originals)
    with torch.no_grad(), torch.inference_mode(False):
        serial = where.shards.serial()
        part = Part(slots, where.shards, where.replicas, None, where.device, where.residence, None, serial, keep)
    part.hide()
    if not originals:
        for places in managed.parameters.values():
            for _, owner, name in places:
                del own_parameters(owner)[name]
        own_parameters(module)[FLAT_PARAM] = _flat_of(part).flat.sharded
    unit = Unit([part], where.device, policy, options)
    unit.name = title
    return unit, flat


def _flat_of(part: Part) -> FlatSharded:
    assert isinstance(part.sharded, FlatSharded)
    return part.sharded


def flat_sharded_of(unit: Unit) -> FlatSharded | None:
    """The shards of a unit that is laid end to end; none if it has no parameters."""
    return _flat_of(unit.parts[0]) if unit.parts else None


def _slot(
    parameter: nn.Parameter,
    places: list[tuple[str, nn.Module, str]],
    begin: int,
    share: int,
    shards: Transport,
    policy: MixedPrecisionPolicy,
    originals: bool,
) -> Slot:
    whole = parameter.detach()
    if not is_dense(whole.shape, whole.stride()):
        whole = whole.contiguous()
    stride = whole.stride() if whole.numel() else contiguous_stride(whole.shape)
    cut = FlatCut(tuple(whole.shape), tuple(stride), begin, share, shards.world)
    first, count = cut.elements(shards.rank)
    local = whole if shards.world == 1 else whole.as_strided((count,), (1,), whole.storage_offset() + first)
    make = home_of if originals else hidden_home_of
    homes = [make(owner, name) for _, owner, name in places]
    return Slot(places[0][0], homes, cut, weakref.ref(parameter), parameter, local, policy)
