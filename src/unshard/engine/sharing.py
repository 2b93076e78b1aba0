"""Param groups that several units use, because their modules share parameters.

The unit that sharded the parameters owns the group and reduces its gradients, at the end of backward. The first unit
that needs the group all-gathers it, and the last unit that reshards frees it: `ParamGroup.holders` counts them.
`ParamGroup.users` lists all units that use the group; it stays empty for a group that only its owner uses.
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

# -- what a unit does with a shared group ------------------------------------------------------------------


def users_of(group: ParamGroup) -> list[Unit]:
    """The units that use a shared group and still exist."""
    return [unit for ref in group.users if (unit := ref()) is not None]


def _other_holders(group: ParamGroup, unit: Unit) -> list[Unit]:
    return [each for each in users_of(group) if each is not unit and each in group.holders]


def all_gather(group: ParamGroup, unit: Unit) -> None:
    """Issue the all-gather, unless another unit has. Slices of shared parameters are never kept."""
    if not inside_backward():
        for other in _other_holders(group, unit):
            if other.phase is Phase.IDLE and other.stale:
                other.reshard()
    if group.precision is not unit.precision:
        for other in _other_holders(group, unit):
            if other.phase is not Phase.IDLE:
                raise StateError(
                    f"{other} and {unit} share parameters, and one runs in train() mode inside the other in eval() "
                    "mode. With full_precision_in_eval both must be in the same mode."
                )
            other.reshard()
        select(group, unit, unit.precision)
    if not group.holders:
        group.all_gather(from_slices=False)
    group.holders.add(unit)


def wait_for_all_gather(group: ParamGroup, unit: Unit) -> None:
    """Wait, unless another unit has, and put the unsharded parameters on the modules of all units."""
    if group.in_flight:
        group.viewers.add(unit)
        group.wait_for_all_gather()
    else:
        show_unsharded(group, unit)


def reshard(group: ParamGroup, unit: Unit) -> None:
    """Free the unsharded buffer if no other unit needs it."""
    group.holders.discard(unit)
    if group.holders:
        show_sharded(group, unit)
    else:
        group.viewers.discard(unit)
        group.cancel_all_gather()
        group.reshard()


def show_unsharded(group: ParamGroup, unit: Unit) -> None:
    if not group.viewers:
        group.show_unsharded()
    group.viewers.add(unit)


def show_sharded(group: ParamGroup, unit: Unit) -> None:
    group.viewers.discard(unit)
    if not group.viewers:
        group.show_sharded()


def upload_early(group: ParamGroup, unit: Unit) -> None:
    """Only for the owner, which knows whether an optimizer has stepped all of the parameters."""
    if group.unit() is unit and not _other_holders(group, unit):
        group.upload_early()


def select(group: ParamGroup, unit: Unit, precision: Precision) -> None:
    """All-gather in `precision` from now on; if another unit holds the group, from the next all-gather on."""
    if group.precision is not precision and not _other_holders(group, unit):
        group.holders.discard(unit)
        group.select(precision)


# -- how a group comes to be shared ------------------------------------------------------------------------


def share(group: ParamGroup, unit: Unit) -> None:
    """All-gather `group` with `unit` from now on, together with the other units that use it."""
    if unit in users_of(group):
        return
    group.users.append(weakref.ref(unit))
    if group not in unit.gathers:
        unit.gathers.append(group)
        return
    unit.lends = True
    if unit.param_state in (ParamState.GATHERING, ParamState.UNSHARDED):
        group.holders.add(unit)
    if unit.shows_unsharded:
        group.viewers.add(unit)


def lend(group: ParamGroup, param: ManagedParam, locations: list[ParamLocation], reader: Unit) -> None:
    """Let the modules of the unit `reader` hold `param`, which belongs to `group`, at `locations` too."""
    owner = group.unit()
    assert owner is not None
    share(group, owner)
    share(group, reader)
    reader.borrowed += [(param, location) for location in locations]
    group.add_locations(param, locations)


def give_up_tied(group: ParamGroup, reader: Unit) -> bool:
    """Drop params of `group` for which a program registered a sharded parameter of another unit (`tie_weights()`).

    The other unit keeps the parameter, and `reader`, the unit of `group`, uses it. Returns False if there was none.
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
    """Raise if `reader` cannot use `param` of another unit instead of its own parameter `name`.

    `policy`, `kind` and `mesh` (if it has one): how `reader` would shard the parameter itself.
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
    """Raise if `units`, all below one root, share parameters with a unit of another root, which runs at other times."""
    for unit in units:
        for other in unit.sharers:
            if other not in units:
                shared = {param.name for group in unit.gathers if group in other.gathers for param in group.params}
                raise ArgumentError(
                    f"Units {unit.name!r} and {other.name!r} share parameters ({listed(sorted(shared))}) and are not "
                    "below one root. Apply fully_shard, or FullyShardedDataParallel, to a module that contains both, "
                    "and run that one; or give each its own parameters."
                )
