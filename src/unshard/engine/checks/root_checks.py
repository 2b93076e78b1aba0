"""What a root refuses: gradients that nobody expected, parameters of two units, a root above a root."""

from __future__ import annotations

from typing import Any

from ...errors import StateError, UnsupportedError
from ...torch_private import moves_to_shared_memory
from ..states import ParamState
from ..unit import Unit

_REMEDY = (
    "Return the tensor that the loss is computed from, or assign it to an attribute of the module that computes it"
)


def refuse_shared_memory(unit: Unit, function: Any) -> None:
    """`Module.share_memory` gives each parameter other memory, which then ends the process in the next step."""
    if moves_to_shared_memory(function):
        raise UnsupportedError(
            f"share_memory() of {unit}: its parameters are parts of a shard, whose memory cannot be moved to shared "
            "memory. Call share_memory() before the module is sharded, which has no effect on the shards, or share a "
            "full state dict with the other processes."
        )


def refuse_gradients_of_resharded(unit: Unit) -> None:
    """Gradients that were computed with whatever was in the memory of a unit that was not gathered."""
    if unit.has_untaken_gradients and unit.param_state is not ParamState.UNSHARDED and not unit.unsharded_is_shard:
        raise StateError(
            f"Backward came into {unit} past everything its forward returned or left on its modules, so that it was "
            f"not gathered, and its gradients cannot be trusted. {_REMEDY}; or keep the unit unsharded until backward "
            "(reshard_after_forward=False, ShardingStrategy.SHARD_GRAD_OP)."
        )


def refuse_gradients_past_outputs(unit: Unit) -> None:
    raise StateError(
        f"{unit} has gradients of a backward that came past everything its forward returned or left on its modules, so "
        f"that they were not reduced over the ranks. {_REMEDY}. A loss of parameters alone is computed inside forward, "
        "or before it, or with the sharded parameters after reshard()."
    )


def refuse_split_backward(units: list[Unit]) -> None:
    """A pipeline schedule computes gradients of inputs and of parameters in two backwards, and takes the parameters
    that the modules hold for those of the graph. If they hold sharded ones, it finds no parameters, and says nothing.
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
    """A graph that `make_fx` writes refers to unsharded parameters, and is run when their memory is empty."""
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
