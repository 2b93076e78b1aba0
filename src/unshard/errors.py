"""Exception types. They derive from the built-in exceptions that programs written for PyTorch's API already catch."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

from torch.distributed import DistBackendError


class UnshardError(Exception):
    """Base class of all errors of this library."""


class PolicyError(UnshardError, TypeError):
    """A policy has invalid values."""


class ArgumentError(UnshardError, ValueError):
    """An argument is invalid."""


class AppliedTwiceError(UnshardError, AssertionError):
    """A module is already sharded."""


class UnnamedMeshError(UnshardError, AssertionError):
    """A mesh has several dimensions, but no names for them."""


class DimensionError(UnshardError, AssertionError):
    """A parameter lacks the dimension that `shard_placement_fn` chose."""


class ConflictError(UnshardError, AssertionError):
    """Two settings cannot be combined."""


class ProtocolError(UnshardError, AssertionError):
    """A tensor subclass violates the gather protocol (`fsdp_pre_all_gather`, ...)."""


class UnsupportedError(UnshardError, NotImplementedError):
    """The requested combination is not supported."""


class PickleError(UnsupportedError, pickle.PicklingError):
    """A sharded model cannot be pickled."""


class StateError(UnshardError, RuntimeError):
    """Methods were called in the wrong order, or while the model is in a state that does not allow the call."""


class ArgumentTypeError(PolicyError, ArgumentError):
    """An argument has the wrong type. PyTorch raises TypeError for some such arguments and ValueError for others."""


class TrainingStateError(ConflictError, StateError, ArgumentError):
    """A method was called in forward, in backward or inside `summon_full_params`, where it is not allowed."""


class OrderError(UnshardError, RuntimeError):
    """The ranks of a process group do not issue the same collectives in the same order."""


class CollectiveError(UnshardError, DistBackendError):
    """A collective failed. The message names the ranks that did not take part in it."""


class ThreadError(StateError):
    """Two threads use the same model at once."""


class ParameterError(UnshardError, RuntimeError):
    """A sharded parameter is on the meta device or another wrong device, or has the wrong shape."""


class GradientError(UnshardError, RuntimeError):
    """Gradients are not finite, and the caller asked for an error in that case."""


class CheckpointError(UnshardError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit the model or optimizer that loads it."""


def listed(names: Iterable[object], most: int = 3) -> str:
    """Format names for a message, for example as "a, b, c and 4 more"."""
    shown = [str(name) for name in names]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
