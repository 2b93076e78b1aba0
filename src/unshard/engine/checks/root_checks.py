"""What a root refuses: unexpected gradients, a second root, a second thread."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from ...errors import StateError, ThreadError, UnsupportedError
from ...torch_private import RUN_BACKWARD, frames, moves_to_shared_memory
from ..states import ParamState
from ..unit import STATE_KEY, Unit

_REMEDY = (
    "Return the tensor that the loss is computed from, or assign it to an attribute of the module that computes it"
)


def refuse_shared_memory(unit: Unit, function: Any) -> None:
    """`Module.share_memory` would replace the memory of each parameter, and the next step would crash the process."""
    if moves_to_shared_memory(function):
        raise UnsupportedError(
            f"share_memory() of {unit}: its parameters are views of a shard, whose memory cannot be moved to shared "
            "memory. Call share_memory() before the module is sharded, which has no effect on the shards, or share a "
            "full state dict with the other processes."
        )


def refuse_gradients_of_resharded(unit: Unit) -> None:
    """Raise if a backward ran through a unit while it was sharded, with undefined values of its parameters."""
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
    """Raise if a pipeline schedule computes gradients of inputs and of parameters in two backwards.

    It searches the graph for the parameters that the modules hold. If these are sharded, it silently finds none.
    """
    for unit in units:
        kept = unit.shows_unsharded and not unit.options.reshard_after_backward and not unit.options.synchronise
        if not kept and any(param.sharded.requires_grad for param in unit.used_params):
            raise StateError(
                f"The schedule of this pipeline splits backward into one for inputs and one for parameters (ZeroBubble "
                f"schedules do), and {unit} is resharded or reduced between them, so its parameters would get no "
                "gradients. Shard all modules of the stage with reshard_after_forward=False, the stage's module itself "
                "too, and use the drop-in (`unshard run`), with which the pipeline keeps a stage unsharded until the "
                "end of the step. Or use a schedule that does not split backward: GPipe, 1F1B, Interleaved1F1B."
            )


def refuse_graph_of_emptied(units: list[Unit]) -> None:
    """Raise if `make_fx` traces units: its graph would run after the memory of unsharded parameters is freed."""
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
    """Raise if `thread` is in the forward of `unit`, the root's, or in a backward.

    Only the stack of the thread tells this from a forward that an interrupt left. `forward_only`: the caller is a
    backward inside that forward.
    """
    for frame in frames(sys._current_frames().get(thread)):
        if frame.f_code is RUN_BACKWARD:
            if forward_only:
                return
            refuse_thread(unit)
        if _is_call_of(frame.f_locals.get("self"), unit):
            refuse_thread(unit)


def refuse_thread(unit: Unit) -> None:
    raise ThreadError(
        f"Another thread is in a forward or backward of the model of {unit}. Its units are unsharded and resharded by "
        "one thread at a time: let one thread run the model, or put a lock around forward, backward and the "
        "optimizer's step. Copies of the model (copy.deepcopy) in several threads do not help: the order of their "
        "collectives must be the same on all ranks."
    )


def _is_call_of(module: Any, unit: Unit) -> bool:
    return isinstance(module, nn.Module) and getattr(module.__dict__.get(STATE_KEY), "unit", None) is unit
