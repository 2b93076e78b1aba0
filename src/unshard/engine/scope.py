"""Scopes are the `with` blocks of `unshard.step` and `unshard.inference`, in which ranks may do different things.

Kept units are all-gathered when the scope begins. They issue no collectives inside, so ranks may run them
independently. Followed units stay sharded and issue their collectives in rounds, which `rounds.py` describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, NoReturn, TypeVar

import torch

from ..errors import StateError, UnsupportedError
from . import side_stream
from .root import Root
from .shard_lookup import orders_of_groups
from .states import Options, ParamState, Precision
from .unit import Unit

_Scope = TypeVar("_Scope", bound="Scope")


class ScopeOptions(Options):
    """The options of a unit inside a scope. Programs cannot change them, because all ranks must agree on them."""

    @classmethod
    def of(cls, options: Options, **changes: Any) -> ScopeOptions:
        own = cls(**{field.name: getattr(options, field.name) for field in fields(options)})
        own.change(**changes, _fixed=True)
        return own

    def change(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_fixed" in vars(self) and name != "post_optim_event":
            raise StateError(
                f"`{name}` of a unit cannot be changed inside unshard.step or unshard.inference, which decide when "
                "units are gathered, reduced and resharded. Remove no_sync() and set_...() calls from the block."
            )
        object.__setattr__(self, name, value)


class Scope:
    """A `with` block that changes how the units of a model are all-gathered and reduced."""

    name = "unshard.inference"
    _active: ClassVar[list[Scope]] = []

    def __init__(self, root: Root, precisions: Mapping[Unit, Precision]):
        """`precisions` has the precision of each unit's next forward."""
        self._root, self._precisions = root, precisions
        self._followed: list[Unit] = []
        self._kept = root.units
        self._options: list[tuple[Unit, Options]] = []
        self._failed = self._ended = False

    def __enter__(self: _Scope) -> _Scope:
        root = self._root
        if self._ended or self._options:
            raise StateError(f"This {self.name} has been entered before. Call {self.name}() again for each block.")
        self._refuse()
        for order in orders_of_groups(root.param_groups):
            order.compare_call(self._begins)
        for unit in root.units:
            unit.reshard()  # the same state on all ranks, whatever they ran before
        root.scope = self
        self._active.append(self)
        try:
            self._prepare()
            for unit in root.units:
                self._change_options(unit)
            for unit in self._kept:
                unit.select(self._precisions[unit])
                unit.all_gather()
                vars(unit).update(all_gather=partial(self._refuse_all_gather, unit))
            self._begin()
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                if self._failed:
                    raise StateError(self._why_failed())
                self._end()
        except BaseException as found:
            error = found
            raise
        finally:
            self._leave(error)

    @property
    def _begins(self) -> str:
        """Return the text that completes "rank 0 wants to ...". Ranks compare this text when the scope begins."""
        return f"begin {self.name}"

    def refuse(self, call: str, why: str) -> NoReturn:
        raise StateError(f"{call} was called inside {self.name}. {why}. Call it outside of the block.")

    def before_backward(self) -> None:
        """The root calls this when a backward begins."""
        raise StateError("backward() inside unshard.inference is not possible: use unshard.step(model) for training.")

    def fail(self) -> None:
        """The root calls this when it is reset, for example after an exception that the program has caught."""
        self._failed = True

    def _refuse(self) -> None:
        root = self._root
        if root.scope is not None:
            raise StateError(
                f"{self.name} was entered inside {root.scope.name} of the same model. End the first block before the "
                "second one begins. Inside unshard.step with kept units, forwards without gradients need no block."
            )
        if root.in_forward or root.in_backward:
            raise StateError(f"{self.name} was entered inside a forward or backward of the model. Enter it before.")
        if side_stream.recording:
            raise UnsupportedError(f"{self.name} cannot be captured, because ranks may run different work inside it.")

    def _change_options(self, unit: Unit) -> None:
        options = unit.options
        self._options.append((unit, options))
        keeps = unit in self._kept
        unit.options = ScopeOptions.of(
            options,
            reshard_after_forward=not keeps,
            reshard_after_backward=not keeps,
            slice_after_forward=False,
            synchronize=False,
            all_reduce=True,
            hold=True,
            reduce_unused=True,
            divide_factor=1.0,
            last_backward=False,
            forward_prefetch=[],
            backward_prefetch=[],
        )
        options.post_optim_event = None  # the scope's options have it now

    def _refuse_all_gather(self, unit: Unit) -> None:
        if unit.param_state is not ParamState.SHARDED:
            return
        if all(group.shards.world == 1 for group in unit.used_groups):
            Unit.all_gather(unit)  # sends nothing
            return
        if self._failed:
            raise StateError(self._why_failed())
        raise StateError(
            f"{unit} would have to be all-gathered inside {self.name}, where other ranks do not take part. It was "
            "resharded, or the program wrote or replaced its parameters, or changed between train() and eval() with "
            f"full_precision_in_eval. Do that before or after the block, not inside."
        )

    def _why_failed(self) -> str:
        return (
            f"{self.name} cannot go on: an exception left a forward or backward inside the block, or the model was "
            "reset. Gradients of this block were dropped. Leave the block on all ranks and begin another one."
        )

    def _prepare(self) -> None:
        """Called when all units are sharded, before any unit is all-gathered."""

    def _begin(self) -> None:
        """Called when the all-gathers of all kept units have been issued."""

    def _end(self) -> None:
        """Called when the program leaves the scope without an exception."""

    def _leave(self, error: BaseException | None) -> None:
        root = self._root
        for unit in self._kept:
            vars(unit).pop("all_gather", None)
        if error is not None:
            root.announce(error, f"inside {self.name}", left=True)
            root.reset()
        root.scope = None
        self._active.remove(self)
        for unit, options in self._options:
            unit.reshard()
            unit.options = options
        self._ended = True


def refuse_in_scope(parameters: Iterable[torch.Tensor], call: str, why: str) -> None:
    """Raise an error if any of `parameters` is a sharded or unsharded parameter of a model inside a scope."""
    for scope in Scope._active:
        params = [param for group in scope._root.param_groups for param in group.params]
        known = {id(each) for param in params for each in (param.sharded, param.unsharded)}
        if not known.isdisjoint(map(id, parameters)):
            scope.refuse(call, why)
