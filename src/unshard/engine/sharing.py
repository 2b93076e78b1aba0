"""Param groups that several units use, because their modules share parameters.

The unit that sharded the parameters owns the group. The owner reduces the gradients of the group at the end of
backward. The first unit that needs the group issues the all-gather, and the last unit that reshards frees the group's
memory. `ParamGroup.holders` contains the units that have all-gathered the group and have not resharded it yet.
`ParamGroup.users` lists all units that use the group, and is empty if only the owner uses the group.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from ..errors import ArgumentError, StateError, listed
from ..policies import MixedPrecisionPolicy
from ..torch_private import inside_backward
from .param_group import ParamGroup, param_group_of
from .params.param import ManagedParam, ParamLocation, mark_dropped
from .states import ParamState, Phase, Precision

if TYPE_CHECKING:
    from .unit import Unit


def users_of(group: ParamGroup) -> list[Unit]:
    """Return the units that use a shared group and still exist."""
    return [unit for ref in group.users if (unit := ref()) is not None]


class SharedGroup:
    """A shared group as seen by one of its units. It has the methods of `ParamGroup` that a unit calls."""

    def __init__(self, group: ParamGroup, unit: Unit):
        self.group, self.sharded = group, group.sharded
        self._unit = weakref.ref(unit)  # the unit owns this object and calls its methods

    @property
    def _me(self) -> Unit:
        unit = self._unit()
        assert unit is not None
        return unit

    @property
    def in_flight(self) -> bool:
        """True if the unit has issued the all-gather, or joined another unit's, and has not resharded since."""
        return self._me in self.group.holders

    @property
    def tensors_of_memory(self) -> int:
        return self.group.tensors_of_memory

    def _other_holders(self) -> list[Unit]:
        me = self._me
        return [each for each in users_of(self.group) if each is not me and each in self.group.holders]

    def all_gather(self, from_slices: bool) -> None:
        """Issue the all-gather, unless another unit already has. Shared groups are never gathered from slices."""
        group, unit = self.group, self._me
        if not inside_backward():
            for other in self._other_holders():
                if other.phase is Phase.IDLE and other.stale:
                    other.reshard()
        if group.precision is not unit.precision:
            for other in self._other_holders():
                if other.phase is not Phase.IDLE:
                    raise StateError(
                        f"{other} and {unit} share parameters, and one runs in train() mode inside the other in eval() "
                        "mode. With full_precision_in_eval both must be in the same mode."
                    )
                other.reshard()
            self.select(unit.precision)
        if not group.holders:
            group.all_gather(from_slices=False)
        group.holders.add(unit)

    def wait_for_all_gather(self) -> None:
        """Wait for the all-gather and put the unsharded parameters on the modules of all users.

        If another unit has already waited, this method does not wait.
        """
        if self.group.in_flight:
            self.group.viewers.add(self._me)
            self.group.wait_for_all_gather()
        else:
            self.show_unsharded()

    def reshard(self) -> None:
        """Reshard for this unit. The unsharded buffer is freed if no other unit needs the group unsharded."""
        self.group.holders.discard(self._me)
        if self.group.holders:
            self.show_sharded()
        else:
            self.group.viewers.discard(self._me)
            self.group.reshard()

    keep_slice = reshard

    def show_unsharded(self) -> None:
        if not self.group.viewers:
            self.group.show_unsharded()
        self.group.viewers.add(self._me)

    def show_sharded(self) -> None:
        self.group.viewers.discard(self._me)
        if not self.group.viewers:
            self.group.show_sharded()

    def upload_early(self) -> None:
        """Upload the shard early if this unit owns the group. For other units, this method is a no-op.

        Only the owner knows if all parameters have been stepped.
        """
        if self.group.unit() is self._me and not self._other_holders():
            self.group.upload_early()

    def select(self, precision: Precision) -> None:
        """Select the precision of the next all-gathers.

        While another unit needs the group unsharded, this method is a no-op, and `all_gather` selects the precision
        later.
        """
        if self.group.precision is not precision and not self._other_holders():
            self.group.holders.discard(self._me)
            self.group.select(precision)


# -- how a group comes to be shared ------------------------------------------------------------------------


def share(group: ParamGroup, unit: Unit) -> None:
    """Make `unit` a user of `group`, so that `group` is all-gathered together with `unit`.

    No-op if `unit` is already a user.
    """
    if unit in users_of(group):
        return
    group.users.append(weakref.ref(unit))
    shared = SharedGroup(group, unit)
    if group not in unit.gathers:
        unit.gathers.append(shared)
        return
    unit.gathers[unit.gathers.index(group)] = shared
    unit.lends = True
    if unit.param_state in (ParamState.GATHERING, ParamState.UNSHARDED):
        group.holders.add(unit)
    if unit.shows_unsharded:
        group.viewers.add(unit)


def lend(group: ParamGroup, param: ManagedParam, locations: list[ParamLocation], reader: Unit) -> None:
    """Let modules of the unit `reader` hold `param` at `locations`. `param` belongs to `group`."""
    owner = group.unit()
    assert owner is not None
    share(group, owner)
    share(group, reader)
    reader.borrowed += [(param, location) for location in locations]
    group.add_locations(param, locations)


def give_up_tied(group: ParamGroup, reader: Unit) -> bool:
    """Drop params of `group` that the program has replaced by params of other units, for example in `tie_weights()`.

    The other units still own these parameters. `reader`, the unit of `group`, becomes a user of them. Returns True if
    any param was dropped.
    """
    found = []
    for param, current in group.sharded.replaced():
        other = param_group_of(current)
        theirs = None if other is None or other is group else other.param_of(current)
        if other is not None and theirs is not None:
            found.append((param, other, theirs))
    for param, other, theirs in found:
        mesh = getattr(param.sharded, "device_mesh", None)
        refuse_different_units(other, theirs, reader, param.name, param.policy, group.sharded.kind, mesh)
    if found:
        group.drop([param for param, *_ in found], started=reader.root is not None)
    for param, other, theirs in found:
        for each in (param.sharded, param.origin()):
            if each is not None:
                mark_dropped(each, f"{param.name!r}", f"{theirs.name!r} of unit {other.unit_name!r}")
        lend(other, theirs, param.locations, reader)
    return bool(found)


_SAME = ("param_dtype", "reduce_dtype", "wire_dtype", "full_precision_in_eval")


def refuse_different_units(
    group: ParamGroup,
    param: ManagedParam,
    reader: Unit,
    name: str,
    policy: MixedPrecisionPolicy,
    kind: str,
    mesh: Any = None,
) -> None:
    """Raise an error if `reader` cannot use `param` of another unit instead of its own parameter `name`.

    `policy`, `kind` and `mesh` describe how `reader` would shard its own parameter. `mesh` is None if there is no mesh.
    """
    owner = group.unit()
    differences = []
    if kind != group.sharded.kind:
        differences.append(f"the first is sharded by {group.sharded.kind}, the second by {kind}")
    differences += [
        f"{field} is {getattr(param.policy, field)} in the first and {getattr(policy, field)} in the second"
        for field in _SAME
        if getattr(param.policy, field) != getattr(policy, field)
    ]
    if isinstance(param.sharded, DTensor) and mesh is not None and mesh != param.sharded.device_mesh:
        differences.append(f"the first is sharded over {param.sharded.device_mesh}, the second over {mesh}")
    if owner is not None and owner.device != reader.device:
        differences.append(f"the first computes on {owner.device}, the second on {reader.device}")
    if owner is None or differences:
        raise ArgumentError(
            f"Parameters {param.name!r} (unit {group.unit_name!r}) and {name!r} (unit {reader.name!r}) are one and the "
            f"same, but the units differ: {'; '.join(differences) or 'the first was deleted'}. Shard both with the "
            "same arguments, or as one unit."
        )


def refuse_shared_with_others(units: list[Unit]) -> None:
    """Raise an error if `units` share parameters with a unit of another root, because roots run separately.

    All of `units` must belong to one root.
    """
    for unit in units:
        for other in unit.sharers:
            if other not in units:
                shared = {
                    param.name for group in unit.used_groups if group in other.used_groups for param in group.params
                }
                raise ArgumentError(
                    f"Units {unit.name!r} and {other.name!r} share parameters ({listed(sorted(shared))}) and are not "
                    "below one root. Apply fully_shard, or FullyShardedDataParallel, to a module that contains both, "
                    "and run that one; or give each its own parameters."
                )
