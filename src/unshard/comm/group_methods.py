"""Chooses the methods of a process group that issue collectives, once, when the transport is made.

Torch's own groups have all methods. A group written in Python overrides some of them. Inherited methods work only if a
backend is registered with the group, and would bypass the overridden ones.

Inherited methods are called on the backend (which has none for several tensors), because the group's own can deadlock.
Torch holds the GIL while it runs a method that a Python class inherits from `ProcessGroup`. Gloo's thread holds the
lock of its queue while it frees a tensor, for which it needs the GIL (torch 2.12 and 2.13, seen without this library).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

from ..errors import UnsupportedError
from ..torch_private import ALL_GATHER, ALL_GATHER_COALESCED, ALL_TO_ALL, REDUCE_SCATTER, REDUCE_SCATTER_COALESCED

Method = Callable[..., Any]


class GroupMethods(NamedTuple):
    """Each method issues a collective and returns its work, or None if it is complete.

    A method that is None does not exist.
    """

    all_gather: Method
    """For one tensor: `(output, input, options)`."""
    all_gather_many: Method | None
    """For several tensors: `(outputs, inputs, options)`."""
    reduce_scatter: Method
    reduce_scatter_many: Method | None
    all_to_all: Method | None
    """`(output, input, output_splits, input_splits)`."""
    all_reduce: Method
    """`([tensor], options)`."""
    gathers: bool = True
    """False if the all-gather is missing, and raises when it is called."""
    own_reduce_scatter: bool = False
    """The reduce-scatter is written in Python, so no other collective may replace it."""


def methods_of(group: Any, backend: Any, gathers_groups: bool, reduces_groups: bool) -> GroupMethods:
    """`backend`: the group's backend for the device, or None.

    `gathers_groups`, `reduces_groups`: the backend takes several tensors in one collective.
    """
    if type(group) is not dist.ProcessGroup:
        return _methods_in_python(group, backend, gathers_groups, reduces_groups)
    return GroupMethods(
        _method(group, ALL_GATHER),
        _method(group, ALL_GATHER_COALESCED) if gathers_groups else None,
        _method(group, REDUCE_SCATTER),
        _method(group, REDUCE_SCATTER_COALESCED) if reduces_groups else None,
        _method(group, ALL_TO_ALL),
        group.allreduce,
    )


def _methods_in_python(group: Any, backend: Any, gathers_groups: bool, reduces_groups: bool) -> GroupMethods:
    gather, gather_many = _own(group, ALL_GATHER), _own(group, ALL_GATHER_COALESCED)
    if gather is None and gather_many is None and backend is not None:
        gather = _method(backend, ALL_GATHER)
        gather_many = _method(group, ALL_GATHER_COALESCED) if gathers_groups else None
    if gather is None:
        gather = _changed(gather_many, _of_many) or _changed(_own(group, ("allgather",)), _all_gather_by_list)

    reduce, reduce_many = _own(group, REDUCE_SCATTER), _own(group, REDUCE_SCATTER_COALESCED)
    own_reduce_scatter = reduce is not None or reduce_many is not None
    if not own_reduce_scatter and backend is not None:
        reduce = _method(backend, REDUCE_SCATTER)
        reduce_many = _method(group, REDUCE_SCATTER_COALESCED) if reduces_groups else None
    if reduce is None:
        reduce = _changed(reduce_many, _of_many) or _changed(_own(group, ("reduce_scatter",)), _reduce_scatter_by_list)

    all_to_all = _own(group, ALL_TO_ALL) or (backend and _method(backend, ALL_TO_ALL))
    all_reduce = _own(group, ("allreduce", "allreduce_coalesced")) or (backend and backend.allreduce)
    return GroupMethods(
        gather or _missing(group, ALL_GATHER),
        gather_many,
        reduce or _missing(group, REDUCE_SCATTER),
        reduce_many,
        all_to_all,
        all_reduce or _missing(group, ("allreduce",)),
        gathers=gather is not None or isinstance(group, dist.ProcessGroup),
        own_reduce_scatter=own_reduce_scatter,
    )


def _method(group: Any, names: tuple[str, ...]) -> Method:
    """The method under the first of `names` that the group has."""
    return next(getattr(group, name) for name in names if hasattr(group, name))


def _own(group: Any, names: tuple[str, ...]) -> Method | None:
    """The method under the first of `names` that the group does not inherit from torch's class."""
    for name in names:
        inherited = getattr(type(group), name, None) is getattr(dist.ProcessGroup, name, None)
        if isinstance(group, dist.ProcessGroup) and inherited and name not in getattr(group, "__dict__", ()):
            continue
        if callable(method := getattr(group, name, None)):
            return method
    return None


def _changed(method: Method | None, change: Callable[[Method], Method]) -> Method | None:
    return None if method is None else change(method)


def _of_many(many: Method) -> Method:
    return lambda output, input, options: many([output], [input], options)


def _all_gather_by_list(method: Method) -> Method:
    return lambda output, input, options: method([list(output.split(input.numel()))], [input], options)


def _reduce_scatter_by_list(method: Method) -> Method:
    return lambda output, input, options: method([output], [list(input.split(output.numel()))], options)


def _missing(group: Any, names: tuple[str, ...]) -> Method:
    """A method that raises when it is called. But a class written in C++ has methods that Python does not see."""
    inherited = _method(group, names) if isinstance(group, dist.ProcessGroup) else None

    def call(*args: Any) -> Any:
        try:
            if inherited is not None:
                return inherited(*args)
        except RuntimeError as error:
            if "No backend type" not in str(error):
                raise
        raise UnsupportedError(
            f"The process group {group!r} has no method {names[0]}. A group written in Python must have "
            "all_gather_single, reduce_scatter_single and allreduce (for torch before 2.13: _allgather_base, "
            "_reduce_scatter_base and allreduce), or a backend for the device of the tensors."
        )

    return call
