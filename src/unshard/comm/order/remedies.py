"""What to do about ranks that disagree, raise or do not come."""

from __future__ import annotations

REMEDY = (
    "Every rank must run the same forwards and backwards in the same order, and clip, step and save between the same "
    "ones: look for branches, loops and losses that depend on the rank or on its data, for different numbers of "
    "micro-batches, and for exceptions that only one rank catches. If a rank has no data for a unit, run the unit "
    "there on a dummy input (one that requires a gradient if the real one does) and add `0 * output.sum()` to the "
    "loss; or leave the module in a larger unit that every rank runs, and call set_reduce_scatter_unused_params(True) "
    "on that unit. The process group cannot be used any more; end the job."
)
RAISED_REMEDY = (
    "After an exception, training goes on only if all ranks raise one at the same point. Otherwise some ranks have "
    "issued collectives that others never issue, and the process group cannot be used any more: end the job on all "
    "ranks and start it again from a checkpoint. To skip bad data, let all ranks decide together before forward: "
    "all-reduce a flag and skip the step everywhere."
)
FAILED_REMEDY = (
    "Every rank must shard the same modules, run the same forwards and backwards, and end after the same number of "
    "steps. If a rank is only slow, give init_process_group a longer timeout. The process group cannot be used any "
    "more: end the job on all ranks and start it again from a checkpoint."
)
