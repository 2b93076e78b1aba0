"""What a user may change on a unit while the model trains."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Options:
    """Read anew at every use, so a change takes effect at once."""

    reshard_after_forward: bool | None = None
    """`None` keeps the root's own unit for its backward and frees the others."""
    slice_after_forward: bool = False
    """Keep a slice between forward and backward: an integer `reshard_after_forward`."""
    reshard_after_backward: bool = True
    show_sharded_after_forward: bool = False
    """Let the modules hold the sharded parameters although the unit is kept unsharded for its backward."""
    show_sharded_after_backward: bool = False
    """The same where it is kept after backward."""
    unshard_in_backward: bool = True
    """False where no gradient depends on the parameters' values: an embedding."""
    synchronise: bool = True
    """Whether backward reduces gradients, or keeps them unsharded on this rank."""
    all_reduce: bool = True
    """Whether gradients are also reduced over replicas, or kept as partial sums."""
    reduce_unused: bool = False
    """Whether trainable parameters without gradient take part with zeros, so that ranks may use different ones."""
    reduce_buffers: int = 1
    """How many reduce-scatter inputs may be alive at once in the model."""
    divide_factor: float | None = None
    """What the sum of gradients is divided by, instead of the number of ranks."""
    force_sum: bool = False
    """Sum in the collectives and divide afterwards, instead of averaging in them."""
    divide_in_halves: bool = False
    """Divide before and after the collectives in every dtype, instead of averaging in them where that is safe."""
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    """Called with the reduced gradients of the unit before they are divided and cast."""
    last_backward: bool = True
    """On the root: whether the end of the next backward ends the iteration."""
    post_optim_event: Any = None
    """On the root: what the next forward waits for, when the optimizer stepped on another stream."""
    forward_prefetch: list[weakref.ref[Any]] | None = None
    """Units to gather with this one, instead of the next one in the learned order."""
    backward_prefetch: list[weakref.ref[Any]] | None = None
