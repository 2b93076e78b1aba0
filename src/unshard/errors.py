"""Exception types. Each message says what was expected, what was found, where, and what to do.

The types derive from the built-in exceptions that programs written for PyTorch's API already catch.
"""

from __future__ import annotations


class UnshardError(Exception):
    """Base of every error this library raises on purpose."""


class PolicyError(UnshardError, TypeError):
    """A policy was built from values that make no sense."""


class ArgumentError(UnshardError, ValueError):
    """An argument of a front-end is wrong."""


class AppliedTwiceError(UnshardError, AssertionError):
    """The front-end was applied to a module that already has it."""


class UnnamedMeshError(UnshardError, AssertionError):
    """A mesh of several dimensions does not say which is which."""


class DimensionError(UnshardError, AssertionError):
    """A parameter does not have the dimension it should be cut along."""


class ConflictError(UnshardError, AssertionError):
    """Two settings exclude each other."""


class ProtocolError(UnshardError, AssertionError):
    """A tensor that brings its own gather protocol does not follow it."""


class UnsupportedError(UnshardError, NotImplementedError):
    """The request is understood and not supported."""


class StateError(UnshardError, RuntimeError):
    """Something was called in an order that cannot work."""


class OrderError(UnshardError, RuntimeError):
    """The ranks of a process group do not issue the same collectives in the same order."""


class ParameterError(UnshardError, RuntimeError):
    """A managed parameter is not what it has to be: on meta, on another device, of another shape."""


class GradientError(UnshardError, RuntimeError):
    """Gradients are not what they have to be: not finite where the caller asked for finite ones."""


class ScalerError(UnshardError, ValueError):
    """The gradient scaler cannot handle these gradients."""
