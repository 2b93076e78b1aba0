"""A step that sets the random state of the device cannot be recorded: a replay would not set it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .trained import Trained

_SEED = 0x2D99787926D46932  # that no program sets


@contextmanager
def refusing_seeds(trained: Trained) -> Iterator[None]:
    """A recording in here raises if the step sets a seed or a state.

    CUDA refuses another seed than the one that is set, and ignores the same one; so there is one in here that no
    program sets.
    """
    device = trained.device
    if device is None or device.type != "cuda" or trained.has_dropout_of_cudnn():
        yield
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state = generator.get_state()
    generator.manual_seed(_SEED)
    try:
        yield
    finally:
        generator.set_state(state)
