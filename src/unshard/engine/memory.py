"""Lists the memory that units hold, by kind. The tools that report memory use this list."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..torch_private import local_part
from .extension import is_extended
from .param_group import ParamGroup

PARAMETERS, GRADIENTS, ALL_GATHERS, REDUCTIONS = "parameters", "gradients", "all-gathers", "reductions"


def memory_of(group: ParamGroup) -> Iterator[tuple[str, str, torch.UntypedStorage]]:
    """Yield the kind, a description and the storage of everything that `group` has allocated. Storages may be empty."""
    shard = group.sharded.shard
    yield PARAMETERS, "shard", shard.memory.untyped_storage()
    for param in group.params:
        if is_extended(local := local_part(param.sharded), param.name):
            yield PARAMETERS, f"shard of {param.name}", local.untyped_storage()
    for unsharded in group._by_precision.values():
        plan, slices = unsharded.plan, unsharded.slices
        if not unsharded.is_shard:
            yield ALL_GATHERS, "unsharded buffer", unsharded.buffer.storage
        yield ALL_GATHERS, "staging memory", plan.staging.storage
        if plan._upload is not None:
            yield ALL_GATHERS, "copy of the offloaded shard", plan._upload._buffer.storage
        if slices is not None:
            yield ALL_GATHERS, "slice", slices._buffer.storage
            yield ALL_GATHERS, "staging memory", slices.plan.staging.storage
        for extension in [] if unsharded._extensions is None else unsharded._extensions._members:
            for buffer in extension._buffers:
                yield ALL_GATHERS, "unsharded buffer", buffer.storage
            for storage, _ in extension._inner:
                yield ALL_GATHERS, "unsharded parameter", storage
    gradients = group.gradients
    for reduction in gradients.reductions.values():
        yield REDUCTIONS, "reduce-scatter input", reduction._input.storage
        yield REDUCTIONS, "reduced gradient", reduction._reduced.storage
        yield REDUCTIONS, "partial sum", reduction.partial.storage
        for grad in reduction.grads:
            yield GRADIENTS, "sharded gradient", grad.buffer.storage
    if gradients.unreduced is not None:
        yield GRADIENTS, "unreduced gradients", gradients.unreduced.buffer.storage
