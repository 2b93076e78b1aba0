"""The class that `fully_shard` mixes into the modules it is applied to."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..engine.hooks import ShardState, state_of
from ..engine.states import ParamState
from ..errors import ArgumentError, UnsupportedError

_MIXED: dict[type, type] = {}


class FSDPModule:
    """Methods of a sharded module. Its class is `FSDP<Original>` and derives from this and the original class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing through the mixed class gives the original: a slice of a Sequential is a Sequential."""
        original = cls.__mro__[2]
        instance = original.__new__(original, *args, **kwargs)
        instance.__init__(*args, **kwargs)
        return instance

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters, not its children's.

        With `async_op` the gather is only issued; `wait()` of the handle, or the module's forward, waits for it.
        """
        state = _state(self)
        state.unit.gather()
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the gathered parameters; the module holds the sharded ones again."""
        _state(self).unit.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the following backwards reduce gradients. If not, they are summed up, whole, on each rank."""
        if not isinstance(requires_gradient_sync, bool):
            raise ArgumentError(f"requires_gradient_sync must be a bool, got {requires_gradient_sync!r}.")
        assert isinstance(self, nn.Module)
        for module in self.modules() if recurse else (self,):
            state = state_of(module)
            if state is not None:
                state.unit.options.synchronise = requires_gradient_sync

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`.to()`, `.half()`, `to_empty()`: they convert the sharded parameters."""
        state = _state(self)
        state.unit.reshard()
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        state.unit.settle()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(
            f"A sharded {type(self).__name__} cannot be deep-copied. Build the model again, apply fully_shard and load "
            "this one's state_dict()."
        )


class UnshardHandle:
    """A gather that `unshard(async_op=True)` issued."""

    def __init__(self, state: ShardState):
        self._state: ShardState | None = state

    def wait(self) -> None:
        """Wait for the gather and put the full parameters on the module. A second call does nothing."""
        state, self._state = self._state, None
        if state is not None and state.unit.params is not ParamState.SHARDED:
            state.unit.use()


def _state(module: Any) -> ShardState:
    state = state_of(module)
    assert state is not None, "FSDPModule without state"
    return state


def mix_in(module: nn.Module) -> None:
    """Give `module` its mixed class, one per original class."""
    cls = type(module)
    if cls not in _MIXED:
        _MIXED[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    module.__class__ = _MIXED[cls]
