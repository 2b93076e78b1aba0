"""Adds to torch's errors in a user's forward: the module, the tensors, and a remedy.

If dtypes are mixed, torch's message names neither the module nor the reason, which is nearly always one field of a
policy. If sharded and plain tensors are mixed, the module used a parameter of another unit.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from ...errors import listed
from ...torch_private import BATCH_NORM, own_buffers, own_parameters
from ..dtype_rules import Precision
from ..params.param import unsharded_name
from ..unit import ROOT, STATE_KEY, Unit

_ABOUT_DTYPES = re.compile(r"dtype|scalar type|type \(.+\) and .+ type \(.+\)|type promoting", re.IGNORECASE)
# Torch's own messages: these are about dtypes even if the frame shows only one.
_CERTAINLY = re.compile(
    r"same dtype|expected scalar type|expect parameter to have scalar type|type promoting not supported|dtypes? match|"
    r"type \(.+\) and .+ type \(.+\) should be the same",
    re.IGNORECASE,
)
_SHARDED_AND_PLAIN = "got mixed torch.Tensor and DTensor"
_SHOWN = 12
_CALLS = inspect.getfile(nn.Module)  # where modules are called; what they compute is elsewhere


@dataclass(frozen=True)
class Place:
    """The innermost frame of a module's own code that an error left, and the dtypes in it."""

    module: nn.Module
    name: str
    parameters: dict[str, torch.dtype]
    buffers: dict[str, torch.dtype]
    values: dict[str, torch.dtype]

    @property
    def dtypes(self) -> set[torch.dtype]:
        return {*self.parameters.values(), *self.buffers.values(), *self.values.values()}


def explain(error: BaseException | None, top: nn.Module, unit: Unit) -> None:
    """Append the place and a remedy to an error about mixed tensors that left the forward of `top`."""
    if not isinstance(error, RuntimeError | TypeError | ValueError) or _left_a_unit(error.__traceback__):
        return
    text = str(error)
    if _SHARDED_AND_PLAIN in text:
        place = _innermost(error.__traceback__, top)
        if place is not None:
            error.args = (f"{text}\n\nunshard: in {_where(place, top, unit)}. {_SHARDED_WEIGHT}",)
        return
    if not _ABOUT_DTYPES.search(text):
        return
    place = _innermost(error.__traceback__, top)
    if place is None or (len(place.dtypes) < 2 and not _CERTAINLY.search(text)):
        return  # it is about something else
    where = _where(place, top, unit)
    facts = "; ".join(
        f"{what} {_listed(dtypes)}"
        for what, dtypes in (("parameters", place.parameters), ("buffers", place.buffers), ("values", place.values))
        if dtypes
    )
    error.args = (f"{text}\n\nunshard: dtypes do not match in {where}. It has {facts}. {_remedy(unit, place)}",)


_SHARDED_WEIGHT = (
    "It uses a parameter of another unit, which is sharded now: only that unit's forward unshards it. Call that unit's "
    "module itself; or shard both modules as one unit, fully_shard([one, other]); or call module.unshard() before and "
    "module.reshard() after."
)


def _where(place: Place, top: nn.Module, unit: Unit) -> str:
    path = ".".join(part for part in (unit.name, place.name) if part and part != ROOT)
    kind = type(place.module).__name__
    if place.module is top:
        kind = kind.removeprefix("FSDP")  # as the user wrote it
    return f"{kind} {path!r}" if path else f"{kind}, the root"


def _left_a_unit(trace: TracebackType | None) -> bool:
    """Return True if the error has left the forward of another unit before, which has explained it.

    When the error reaches the outer units, the parameters of the inner one are sharded. The first frame is this unit's.
    """
    while trace is not None and (trace := trace.tb_next) is not None:
        if trace.tb_frame.f_code.co_filename == _CALLS:
            owner = _first_argument(trace.tb_frame)
            if isinstance(owner, nn.Module) and STATE_KEY in owner.__dict__:
                return True
    return False


def _first_argument(frame: FrameType) -> Any:
    """In a method of a module this is the module, whatever its name."""
    arguments = frame.f_code.co_varnames
    return frame.f_locals.get(arguments[0]) if arguments else None


def _innermost(trace: TracebackType | None, top: nn.Module) -> Place | None:
    names = {module: name for name, module in top.named_modules()}
    found = None
    while trace is not None:
        frame = trace.tb_frame
        owner = _first_argument(frame)
        if isinstance(owner, nn.Module) and owner in names and frame.f_code.co_filename != _CALLS:
            found = owner, frame.f_locals
        trace = trace.tb_next
    if found is None:
        return None
    module, values = found
    return Place(
        module,
        names[module],
        _parameters(module),
        _dtypes(own_buffers(module).items()),
        _dtypes(values.items()),
    )


def _parameters(module: nn.Module) -> dict[str, torch.dtype]:
    """The module's own; if these have one dtype, also unsharded ones of its children, which it may use directly."""
    own = _dtypes(own_parameters(module).items())
    if len(set(own.values())) > 1:
        return own
    unsharded = _dtypes((name, each) for name, each in module.named_parameters() if unsharded_name(each) is not None)
    return unsharded if len(set(unsharded.values())) > 1 else own


def _dtypes(named: Iterable[tuple[str, Any]]) -> dict[str, torch.dtype]:
    floats = [(name, each) for name, each in named if isinstance(each, torch.Tensor) and each.is_floating_point()]
    return {name: each.dtype for name, each in floats}


def _listed(dtypes: dict[str, torch.dtype]) -> str:
    return listed([f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in dtypes.items()], _SHOWN)


def _remedy(unit: Unit, place: Place) -> str:
    policy = unit.policy
    expected = set(place.parameters.values())
    if unit.precision is Precision.STORED:
        return (
            "In eval() this unit computes in the dtypes its parameters are stored in (full_precision_in_eval): cast "
            "tensors that forward creates to the dtype of the other operands."
        )
    if len(expected) > 1:
        return (
            "Its parameters have several dtypes: let a pattern in MixedPrecisionPolicy.overrides match all parameters "
            'of the module ("name.*") or none. A parameter that is used outside its own module gets no casts.'
        )
    if expected and not expected.issuperset(place.buffers.values()):
        kept = _one(dtype for dtype in place.buffers.values() if dtype not in expected)
        override = f'Compute this module in {kept}: overrides={{"{place.name or "*"}.*": {kept}}}.'
        if isinstance(place.module, BATCH_NORM):
            return f"{override} (With buffer_dtype its statistics would add up in {_one(expected)}, and stall.)"
        return (
            f"Set buffer_dtype={_one(expected)} in the unit's policy, so that forward sees such buffers in the dtype "
            f"of the parameters. Or: {override}"
        )
    if policy.param_dtype is None:
        return (
            f"The unit's policy has no param_dtype, so inputs are not cast: set param_dtype={_one(expected)}, or cast "
            "the inputs yourself."
        )
    if not policy.cast_forward_inputs:
        return (
            "The unit's policy has cast_forward_inputs=False: set it to True, or cast the inputs to "
            f"{policy.param_dtype} yourself."
        )
    other = _one(dtype for dtype in place.values.values() if dtype not in expected) if expected else "another dtype"
    inside = f', or compute this module in {other} with overrides={{"{place.name}.*": {other}}}' if place.name else ""
    return (
        f"Inputs of the unit were cast to {policy.param_dtype}, so this was made or widened inside its forward: cast "
        f"it there{inside}. If it is the output of another unit, that unit's output_dtype can be set."
    )


def _one(dtypes: Iterable[torch.dtype]) -> str:
    return str(next(iter(dtypes), "..."))
