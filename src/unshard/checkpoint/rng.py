"""The states of the random number generators of a rank: torch on the host and the device, Python, NumPy."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

from ..errors import CheckpointError


def rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()  # of this rank's device
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss]
    return state


def check_rng_state(state: Any) -> None:
    """Raise if `set_rng_state` could not set it."""
    try:
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(state["python"])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"The state of the random number generators is malformed: {error}.") from error


def set_rng_state(state: dict[str, Any]) -> None:
    """What a process has and the checkpoint lacks stays as it is."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        kind, keys, *others = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *others))


def seed_new_rank(step: int, rank: int) -> None:
    """For a rank that the saving job did not have: the same seed each time, and another one than any other rank's."""
    seed = int.from_bytes(hashlib.sha256(f"unshard {step} {rank}".encode()).digest()[:8], "big")
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
