"""What one unit asks of a param group that several units use, because their modules share parameters."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ..errors import StateError
from ..torch_private import inside_backward
from .dtype_rules import Precision
from .params.param import ManagedParam, ParamLocation
from .params.sharded import ShardedParams
from .states import Phase

if TYPE_CHECKING:
    from .param_group import ParamGroup
    from .unit import Unit


class GroupUse:
    """Stands for the param group in `Unit.gathers`. The first unit that needs it all-gathers, the last one reshards.

    Gradients are not its matter: the unit that owns the param group reduces them, at the end of backward.
    """

    def __init__(self, unit: Unit, group: ParamGroup, holds: bool, shows: bool):
        self._unit = weakref.ref(unit)
        self.group = group
        self.holds = holds
        """Whether the unit has all-gathered the group and not resharded it since."""
        self.shows = shows
        """Whether the unit wants the modules to hold the unsharded parameters."""
        self.places: list[tuple[ManagedParam, ParamLocation]] = []
        """Where modules of the unit hold params of another unit."""
        group.uses.append(weakref.ref(self))

    @property
    def unit(self) -> Unit | None:
        return self._unit()

    @property
    def params(self) -> list[ManagedParam]:
        return self.group.params

    @property
    def sharded(self) -> ShardedParams:
        return self.group.sharded

    @property
    def tensors_of_memory(self) -> int:
        return self.group.tensors_of_memory

    def others(self) -> list[GroupUse]:
        """The uses by other units that still exist."""
        return [use for use in self.group.users() if use is not self]

    def all_gather(self, from_slices: bool) -> None:
        """Issue the all-gather, unless another unit has. Slices are not kept of parameters that units share."""
        unit = self._unit()
        assert unit is not None
        if not inside_backward():
            for other in self._holding():
                if (theirs := other.unit) is not None and theirs.phase is Phase.IDLE and theirs.stale:
                    theirs.reshard()
        if self.group.precision is not unit.precision:
            self._require(unit.precision)
        if not self.holds and not self._holding():
            self.group.all_gather(from_slices=False)
        self.holds = True

    def cancel_all_gather(self) -> None:
        if not self._holding():
            self.group.cancel_all_gather()

    def wait_for_all_gather(self) -> None:
        """Wait, unless another unit has, and put the unsharded parameters on the modules of all units."""
        if self.group.in_flight:
            self.shows = True
            self.group.wait_for_all_gather()
        else:
            self.show_unsharded()

    def reshard(self) -> None:
        """Empty the unsharded buffer, if no other unit needs it."""
        self.holds = self.shows = False
        if not self._holding():
            self.group.reshard()
        else:
            self._hide()

    def keep_slice(self) -> None:
        self.reshard()

    def show_unsharded(self) -> None:
        if not self.shows and not any(use.shows for use in self.others()):
            self.group.show_unsharded()
        self.shows = True

    def show_sharded(self) -> None:
        self.shows = False
        self._hide()

    def upload_early(self) -> None:
        """Only for the unit whose parameters these are: it knows whether an optimizer has stepped all of them."""
        owner = None if self.group.unit is None else self.group.unit()
        if owner is self._unit() and not self._holding():
            self.group.upload_early()

    def select(self, precision: Precision) -> None:
        """All-gather in `precision` from now on; if another unit holds the group, from the next all-gather on."""
        if self.group.precision is not precision and not self._holding():
            self.holds = False
            self.group.select(precision)

    def _require(self, precision: Precision) -> None:
        """Switch to `precision`, which no other unit may need in another one right now."""
        for other in self._holding():
            unit = other.unit
            assert unit is not None
            if unit.phase is not Phase.IDLE:
                raise StateError(
                    f"{unit} and {self._unit()} share parameters, and one runs in train() mode inside the other in "
                    "eval() mode. With full_precision_in_eval both have to be in the same mode."
                )
            unit.reshard()
        self.select(precision)

    def _holding(self) -> list[GroupUse]:
        return [use for use in self.others() if use.holds]

    def _hide(self) -> None:
        if not any(use.shows for use in self.others()):
            self.group.show_sharded()
