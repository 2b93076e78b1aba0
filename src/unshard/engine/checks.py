"""Errors and warnings about forward, backward and state dicts. None of these functions is on the hot path."""

from __future__ import annotations

import copy
import inspect
import re
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import ParameterError, StateError, ThreadError, UnsupportedError, listed
from ..torch_private import (
    BATCH_NORM,
    RUN_BACKWARD,
    ShardedTensor,
    frames,
    moves_to_shared_memory,
    own_buffers,
    own_parameters,
    stack_level_of_program,
)
from .params.param import unsharded_name
from .states import ParamState, Precision
from .unit import ROOT, STATE_KEY, Unit

# -- errors of torch in a user's forward ------------------------------------------------------------------

# If dtypes are mixed, torch's message names neither the module nor the reason, which is nearly always one field of a
# policy. If sharded and plain tensors are mixed, the module used a parameter of another unit.

_ABOUT_DTYPES = re.compile(r"dtype|scalar type|type \(.+\) and .+ type \(.+\)|type promoting", re.IGNORECASE)
# Torch's own messages: these are about dtypes even if the frame shows only one dtype.
_CERTAINLY = re.compile(
    r"same dtype|expected scalar type|expect parameter to have scalar type|type promoting not supported|dtypes? match|"
    r"type \(.+\) and .+ type \(.+\) should be the same",
    re.IGNORECASE,
)
_SHARDED_AND_PLAIN = "got mixed torch.Tensor and DTensor"
_SHOWN = 12
_CALLS = inspect.getfile(nn.Module)  # the file that calls modules; their own code is in other files


NamedDtypes = dict[str, torch.dtype]


def explain(error: BaseException | None, top: nn.Module, unit: Unit) -> None:
    """Append a remedy to `error` if the error is about mixed dtypes, or about mixed sharded and plain tensors.

    `error` is an exception that the forward of `top` has raised.
    """
    if not isinstance(error, RuntimeError | TypeError | ValueError) or _left_a_unit(error.__traceback__):
        return
    text = str(error)
    mixed = _SHARDED_AND_PLAIN in text
    found = _innermost(error.__traceback__, top) if mixed or _ABOUT_DTYPES.search(text) else None
    if found is None:
        return
    module, name, values = found
    path = ".".join(part for part in (unit.name, name) if part and part != ROOT)
    kind = type(module).__name__
    if module is top:
        kind = kind.removeprefix("FSDP")  # as the user wrote it
    where = f"{kind} {path!r}" if path else f"{kind}, the root"
    if mixed:
        error.args = (
            f"{text}\n\nunshard: in {where}. It uses a parameter of another unit, which is sharded now: only that "
            "unit's forward unshards it. Call that unit's module itself; or shard both modules as one unit, "
            "fully_shard([one, other]); or call module.unshard() before and module.reshard() after.",
        )
        return
    dtypes = {"parameters": _parameters(module), "buffers": _dtypes(own_buffers(module).items()), "values": values}
    if len({dtype for named in dtypes.values() for dtype in named.values()}) > 1 or _CERTAINLY.search(text):
        facts = "; ".join(f"{what} {_listed(named)}" for what, named in dtypes.items() if named)
        remedy = _remedy(unit, module, name, **dtypes)
        error.args = (f"{text}\n\nunshard: dtypes do not match in {where}. It has {facts}. {remedy}",)


def _left_a_unit(trace: TracebackType | None) -> bool:
    """Return True if the error was raised in the forward of an inner unit, which has already explained the error.

    By now, the inner unit's parameters are sharded again. The first frame of `trace` belongs to the outer unit.
    """
    while trace is not None and (trace := trace.tb_next) is not None:
        if trace.tb_frame.f_code.co_filename == _CALLS:
            owner = _first_argument(trace.tb_frame)
            if isinstance(owner, nn.Module) and STATE_KEY in owner.__dict__:
                return True
    return False


def _first_argument(frame: FrameType) -> Any:
    arguments = frame.f_code.co_varnames
    return frame.f_locals.get(arguments[0]) if arguments else None


def _innermost(trace: TracebackType | None, top: nn.Module) -> tuple[nn.Module, str, NamedDtypes] | None:
    """Return the innermost module in `trace`, its name in `top`, and the dtypes of its method's local variables."""
    names = {module: name for name, module in top.named_modules()}
    found = None
    while trace is not None:
        frame = trace.tb_frame
        owner = _first_argument(frame)
        if isinstance(owner, nn.Module) and owner in names and frame.f_code.co_filename != _CALLS:
            found = owner, names[owner], _dtypes(frame.f_locals.items())
        trace = trace.tb_next
    return found


def _parameters(module: nn.Module) -> NamedDtypes:
    """Return the dtypes of the module's own parameters.

    If these have one dtype, but the unsharded parameters of the module and its submodules have several, return the
    dtypes of those unsharded parameters instead.
    """
    own = _dtypes(own_parameters(module).items())
    if len(set(own.values())) > 1:
        return own
    unsharded = _dtypes((name, each) for name, each in module.named_parameters() if unsharded_name(each) is not None)
    return unsharded if len(set(unsharded.values())) > 1 else own


def _dtypes(named: Iterable[tuple[str, Any]]) -> NamedDtypes:
    floats = [(name, each) for name, each in named if isinstance(each, torch.Tensor) and each.is_floating_point()]
    return {name: each.dtype for name, each in floats}


def _listed(dtypes: NamedDtypes) -> str:
    return listed([f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in dtypes.items()], _SHOWN)


def _remedy(
    unit: Unit, module: nn.Module, name: str, parameters: NamedDtypes, buffers: NamedDtypes, values: NamedDtypes
) -> str:
    policy, expected = unit.policy, set(parameters.values())
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
    if expected and not expected.issuperset(buffers.values()):
        kept = _one(dtype for dtype in buffers.values() if dtype not in expected)
        override = f'Compute this module in {kept}: overrides={{"{name or "*"}.*": {kept}}}.'
        if isinstance(module, BATCH_NORM):
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
    other = _one(dtype for dtype in values.values() if dtype not in expected) if expected else "another dtype"
    inside = f', or compute this module in {other} with overrides={{"{name}.*": {other}}}' if name else ""
    return (
        f"Inputs of the unit were cast to {policy.param_dtype}, so this was made or widened inside its forward: cast "
        f"it there{inside}. If it is the output of another unit, that unit's output_dtype can be set."
    )


def _one(dtypes: Iterable[torch.dtype]) -> str:
    return str(next(iter(dtypes), "..."))


# -- what a root refuses ----------------------------------------------------------------------------------

_REMEDY = (
    "Return the tensor that the loss is computed from, or assign it to an attribute of the module that computes it"
)


def refuse_shared_memory(unit: Unit, function: Any) -> None:
    """Raise an error if `function` comes from `Module.share_memory`. Moving parameters would crash the next step."""
    if moves_to_shared_memory(function):
        raise UnsupportedError(
            f"share_memory() of {unit}: its parameters are views of a shard, whose memory cannot be moved to shared "
            "memory. Call share_memory() before the module is sharded, which has no effect on the shards, or share a "
            "full state dict with the other processes."
        )


def refuse_gradients_of_resharded(unit: Unit) -> None:
    """Raise an error if backward computed gradients of `unit` while the unit was sharded. Such gradients are wrong."""
    if unit.has_untaken_gradients and unit.param_state is not ParamState.UNSHARDED and not unit.unsharded_is_shard:
        raise StateError(
            f"Backward reached {unit} through a tensor that its forward neither returned nor left on its modules, so "
            f"the unit was not unsharded and its gradients are wrong. {_REMEDY}; or keep the unit unsharded until "
            "backward (reshard_after_forward=False, ShardingStrategy.SHARD_GRAD_OP)."
        )


def refuse_gradients_past_outputs(unit: Unit) -> None:
    raise StateError(
        f"{unit} has gradients of a backward through a tensor that its forward neither returned nor left on its "
        f"modules, so they were not reduced over the ranks. {_REMEDY}. Compute a loss of parameters alone inside "
        "forward, or before it, or with the sharded parameters after reshard()."
    )


def refuse_split_backward(units: list[Unit]) -> None:
    """Raise an error if a unit does not stay unsharded between the two backwards of a pipeline schedule.

    Such a schedule runs one backward for inputs and another for parameters. It searches the graph for the parameters of
    the modules. If a unit is sharded at that time, the search does not find its parameters.
    """
    for unit in units:
        kept = unit.shows_unsharded and not unit.options.reshard_after_backward and not unit.options.synchronize
        if not kept and any(param.sharded.requires_grad for param in unit.used_params):
            raise StateError(
                f"The schedule of this pipeline splits backward into one for inputs and one for parameters (ZeroBubble "
                f"schedules do), and {unit} is resharded or reduced between them, so its parameters would get no "
                "gradients. Shard all modules of the stage with reshard_after_forward=False, the stage's module itself "
                "too, and use the drop-in (`unshard run`), with which the pipeline keeps a stage unsharded until the "
                "end of the step. Or use a schedule that does not split backward: GPipe, 1F1B, Interleaved1F1B."
            )


def refuse_graph_of_emptied(units: list[Unit]) -> None:
    """Raise an error if `make_fx` traces a unit that reshards after forward. The graph would read freed memory."""
    for unit in units:
        if unit.options.reshard_after_forward is not False and not unit.unsharded_is_shard:
            raise UnsupportedError(
                f"torch.func.linearize, torch.export and make_fx cannot trace {unit}: their graph refers to the "
                "unsharded parameters, whose memory is freed after forward. Use torch.func.jvp, which computes the "
                "same product, or shard all modules with reshard_after_forward=False and run the graph before the next "
                "backward."
            )


def refuse_second_root(name: str) -> None:
    raise StateError(
        f"Unit {name!r} ran its own forward before its parent's and became a root. Run the outermost module first, or "
        "do not apply fully_shard above it."
    )


def refuse_two_threads(unit: Unit, thread: int, forward_only: bool = False) -> None:
    """Raise an error if `thread` is running a backward, or the forward of `unit`, which is the root's unit.

    The stack of `thread` is the only way to distinguish a running forward from an interrupted one. Set `forward_only`
    if the caller itself runs in a backward. In that case, a backward of `thread` is allowed.
    """
    last, seen = sys._current_frames().get(thread), None
    while last is not seen:  # a function that returns meanwhile cuts off the rest of the stack
        seen = last
        for frame in frames(seen):
            in_backward, module = frame.f_code is RUN_BACKWARD, frame.f_locals.get("self")
            if in_backward and forward_only:
                return
            state = module.__dict__.get(STATE_KEY) if isinstance(module, nn.Module) else None
            if in_backward or getattr(state, "unit", None) is unit:
                refuse_thread(unit)
        last = sys._current_frames().get(thread)


def refuse_thread(unit: Unit) -> None:
    raise ThreadError(
        f"Another thread is in a forward or backward of the model of {unit}. Its units are unsharded and resharded by "
        "one thread at a time: let one thread run the model, or put a lock around forward, backward and the "
        "optimizer's step. Copies of the model (copy.deepcopy) in several threads do not help: the order of their "
        "collectives must be the same on all ranks."
    )


# -- state dicts of shards --------------------------------------------------------------------------------


class _Metadata(OrderedDict[str, Any]):
    """Replaces the metadata of a state dict of shards, in order to warn when the state dict is pickled."""

    def __init__(self, metadata: Any, state_dict: Any, full: str):
        super().__init__(metadata)
        self._state_dict, self._full = weakref.ref(state_dict), full

    def __repr__(self) -> str:
        return repr(OrderedDict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied, metadata = memo.get(id(self._state_dict())), copy.deepcopy(OrderedDict(self), memo)
        return metadata if copied is None else _Metadata(metadata, copied, self._full)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state_dict = self._state_dict()
        if state_dict is None or any(map(_is_cut, state_dict.values())):
            warnings.warn(
                f"A state dict of shards is being pickled by rank {dist.get_rank()}, which holds only its own shards. "
                "That is enough if every rank saves its own file and loads it into a model that is sharded over the "
                f"same number of ranks. For one file that any model can load, call {self._full} on all ranks and save "
                "the result, or save shards with torch.distributed.checkpoint.",
                stacklevel=stack_level_of_program(),
            )
        return OrderedDict(self).__reduce_ex__(protocol)


def warn_when_pickled(state_dict: Any, full: str) -> None:
    """Warn when `state_dict` is pickled. `full` is the call that the warning recommends to get unsharded parameters."""
    metadata = getattr(state_dict, "_metadata", None)  # a user's own dict has no metadata
    if type(metadata) is OrderedDict and isinstance(state_dict, OrderedDict):
        state_dict._metadata = _Metadata(metadata, state_dict, full)  # type: ignore[attr-defined]


def _is_cut(value: Any) -> bool:
    """Return True if `value` contains only this rank's elements of a sharded tensor."""
    if isinstance(value, DTensor):
        sizes = value.device_mesh.mesh.shape
        return any(size > 1 and not each.is_replicate() for size, each in zip(sizes, value.placements, strict=True))
    return isinstance(value, ShardedTensor) and dist.get_world_size() > 1


def refuse_plain_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Raise an error if `state_dict` has plain tensors for sharded parameters. Torch's error would not say so."""
    for name, parameter in module.named_parameters():
        value = state_dict.get(prefix + name)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.numel() == 1:
            continue
        if isinstance(parameter, DTensor):
            raise ParameterError(
                f"The state dict to load on rank {dist.get_rank()} has a plain tensor for {prefix + name!r}, which is "
                f"sharded ({parameter.placements} over {parameter.device_mesh}). Load a full state dict with "
                "unshard.checkpoint.load_full_state_dict(model, state_dict) on all ranks, or make each value a DTensor "
                "first: distribute_tensor(value, parameter.device_mesh, parameter.placements)."
            )


def refuse_shards_of_another_rank(state_dict: dict[str, Any], prefix: str, full: str) -> None:
    """Raise an error if another rank saved the shards in `state_dict`. Torch would load the wrong shards silently."""
    for name, value in state_dict.items():
        other = rank_of_other_shard(value) if name.startswith(prefix) else None
        if other is not None:
            raise ParameterError(
                f"The state dict to load on rank {dist.get_rank()} holds the shards of rank {other} ({name!r}). Each "
                f"rank can load only what it saved itself. For a file that all ranks load, save the result of {full}, "
                "called on all ranks, or use torch.distributed.checkpoint."
            )


def rank_of_other_shard(value: Any) -> int | None:
    """Return the rank that saved `value` if `value` is a DTensor with the rows of another rank, and None otherwise."""
    if not isinstance(value, DTensor):
        return None
    ranks, theirs = value.device_mesh.mesh, value.device_mesh.get_coordinate()
    mine = (ranks == dist.get_rank()).nonzero().flatten().tolist()
    if not theirs or not mine:
        return None  # not a rank of this mesh, for which torch raises
    differ = [a != b and not each.is_replicate() for a, b, each in zip(theirs, mine, value.placements, strict=True)]
    return int(ranks[tuple(theirs)]) if any(differ) else None
