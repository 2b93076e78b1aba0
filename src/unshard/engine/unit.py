"""A unit consists of the parameters that are all-gathered and reduced together."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import ParameterError, listed
from ..policies import MixedPrecisionPolicy
from ..torch_private import stack_level_of_program, version_of
from .param_group import ParamGroup
from .params.param import ManagedParam, ParamLocation
from .params.unsharded import ShownParams
from .sharing import SharedGroup, give_up_tied, users_of
from .states import Options, ParamState, Phase, Precision, checked_move

if TYPE_CHECKING:
    from .root import Root

ROOT = "(root)"
"""The name of the root's unit, whose module path is empty."""
STATE_KEY = "_unshard_state"
"""The key under which the `__dict__` of a unit's modules stores the hooks of the unit (`FSDPState`)."""


class Unit:
    """Parameters that are all-gathered and reduced together, with their buffers and states.

    The root decides when the methods are called. A unit usually has one param group. It has several if a user shards
    some of its parameters over other meshes. A unit uses its root only to list all units, for errors that concern all
    of them.
    """

    built = 0
    """The number of units that this process has built. `unshard run` prints this number at the end."""

    def __init__(
        self, param_groups: list[ParamGroup], device: torch.device, policy: MixedPrecisionPolicy, options: Options
    ):
        Unit.built += 1
        self.name = ""
        self.param_groups = param_groups
        self.gathers: list[ParamGroup | SharedGroup] = list(param_groups)
        """The param groups that are all-gathered with this unit: its own groups, and groups of other units."""
        self.borrowed: list[tuple[ManagedParam, ParamLocation]] = []
        """Params of other units that modules of this unit hold, each with its location on these modules."""
        self.lends = False
        """True if other units use parameters of this unit. Their gradients are then reduced at the end of backward."""
        self.device, self.policy, self.options = device, policy, options
        self.phase = Phase.IDLE
        self.param_state = ParamState.SHARDED
        self.precision = Precision.POLICY
        self.root: weakref.ref[Root] | None = None
        """The root of this unit. The first forward sets this attribute."""
        self._writes_before: list[tuple[int, int]] | None = None
        self.kept_for_forward = False
        """True if the unit stays unsharded for the next forward, and not for a backward."""
        self._shows_sharded = False
        self.shown: list[ShownParams] | None = None
        """Detects changes to the tensors of each param group. None unless the unit stays unsharded or sliced."""
        for group in param_groups:
            group.unit = weakref.ref(self)

    def __str__(self) -> str:
        rank = self.param_groups[0].shards.rank if self.param_groups else 0
        return f"Unit {self.name!r} on rank {rank}"

    @property
    def params(self) -> list[ManagedParam]:
        return [param for group in self.param_groups for param in group.params]

    @property
    def unsharded(self) -> list[torch.Tensor]:
        """The unsharded parameters that modules hold while the unit computes."""
        return [param.unsharded for param in self.used_params if param.unsharded is not None]

    @property
    def used_params(self) -> list[ManagedParam]:
        """The params that are all-gathered with this unit: its own, and shared params of other units."""
        return [param for each in self.gathers for param in each.sharded.params]

    @property
    def used_groups(self) -> list[ParamGroup]:
        """The param groups that are all-gathered with this unit: its own, and shared param groups of other units."""
        return [each.group if isinstance(each, SharedGroup) else each for each in self.gathers]

    @property
    def sharers(self) -> list[Unit]:
        """The other units that use a param group that this unit also uses."""
        users = [unit for group in self.used_groups for unit in users_of(group)]
        return [unit for unit in dict.fromkeys(users) if unit is not self]

    @property
    def borrows_from(self) -> list[Unit]:
        """The other units that own parameters that this unit uses."""
        owners = [owner for group in self.used_groups if (owner := group.unit()) is not None]
        return [unit for unit in dict.fromkeys(owners) if unit is not self]

    # -- parameters -----------------------------------------------------------------------------------------

    def all_gather(self) -> None:
        """Issue the all-gather if the unit is sharded or sliced.

        Nothing may use the buffers before `unshard` returns.
        """
        state, sliced = self.param_state, False
        if state is ParamState.SHARDED:
            self._writes_before = None
        elif state is not ParamState.SLICED:
            return
        else:
            sliced = True
            if lost := self._follow_changes():
                self._refuse_lost_writes(lost)
        try:
            for group in self.gathers:
                group.all_gather(sliced)
        except BaseException:
            for group in self.gathers:
                if group.in_flight:
                    group.reshard()
            raise
        self.param_state = ParamState.GATHERING

    def refresh(self) -> None:
        """Issue the all-gather for a forward.

        If the unit stayed unsharded or sliced, and the program has changed parameters since, the unit is resharded
        first.
        """
        if self.param_state is not ParamState.SHARDED:
            self._refuse_replaced()
            if self.stale:
                self.reshard()
            self.shown = None  # from now on forward writes, not the program
        self.all_gather()

    def upload_early(self) -> None:
        """Start to copy offloaded shards to the device before the next all-gather is issued."""
        if self.param_state is ParamState.SHARDED:
            for group in self.gathers:
                group.upload_early()

    def unshard(self) -> None:
        """Wait for the all-gather and put the unsharded parameters on the modules.

        If no all-gather has been issued, this method issues it.
        """
        if self.param_state is ParamState.UNSHARDED:
            if self._shows_sharded:
                self._shows_sharded = False
                for group in self.gathers:
                    group.show_unsharded()
            return
        if self.param_state is not ParamState.GATHERING:
            self.all_gather()
        for group in self.gathers:
            group.wait_for_all_gather()
        self.param_state = ParamState.UNSHARDED

    def show_sharded(self) -> None:
        """Put the sharded parameters on the modules.

        If the unit is unsharded, the unsharded parameters stay in memory for the next `unshard`. Slices are freed.
        """
        if self.param_state is ParamState.SLICED:
            self.reshard()
        elif self.param_state is ParamState.UNSHARDED:
            lost = self._follow_changes()
            self._shows_sharded = True
            for group in self.gathers:
                group.show_sharded()
            if lost:
                self._refuse_lost_writes(lost)

    @property
    def shows_unsharded(self) -> bool:
        """True if the modules hold the unsharded parameters."""
        return self.param_state is ParamState.UNSHARDED and not self._shows_sharded

    def reshard(self) -> None:
        """Put the sharded parameters on the modules and free the unsharded parameters."""
        if self.param_state is ParamState.SHARDED:
            return
        if self.shown is not None:
            lost = self._follow_changes()
            self.reshard()
            if lost:
                self._refuse_lost_writes(lost)
            return
        for group in self.gathers:
            group.reshard()
        self._shows_sharded = False
        self.param_state = ParamState.SHARDED

    def keep_slice(self) -> None:
        """Keep a slice of the unsharded parameters until backward. An integer `reshard_after_forward` requests this."""
        if self.precision is not Precision.POLICY:
            self.reshard()  # slices exist in the policy's precision only
            return
        lost = self._follow_changes()
        for group in self.gathers:
            group.keep_slice()
        self.param_state = checked_move(self, self.param_state, ParamState.SLICED)
        if lost:
            self._refuse_lost_writes(lost)

    def precision_in(self, training: bool) -> Precision:
        """Return the precision of a forward in training mode or in evaluation mode."""
        full = self.policy.full_precision_in_eval and not training
        return Precision.STORED if full else Precision.POLICY

    def compute_dtype_in(self, precision: Precision) -> torch.dtype | None:
        """Return the dtype to which forward inputs are cast, or None if they are not cast.

        Inputs are not cast if the policy has no `param_dtype`. With `Precision.STORED`, they are also not cast if the
        parameters are stored in several dtypes.
        """
        if precision is Precision.POLICY or self.policy.param_dtype is None:
            return self.policy.param_dtype
        stored = {param.local.dtype for param in self.used_params if param.local.is_floating_point()}
        return stored.pop() if len(stored) == 1 else None

    def select(self, precision: Precision) -> None:
        """Use `precision` from the next all-gather on."""
        if precision is self.precision:
            return
        if self.phase is Phase.BACKWARD and self.param_state is not ParamState.SHARDED:
            # Marked SHARDED but not freed: a graph of the other precision may still read that buffer in this backward.
            # The next `reshard` frees it.
            self.unshard()
            self.param_state = checked_move(self, self.param_state, ParamState.SHARDED)
        else:
            self.reshard()
        for group in self.gathers:
            group.select(precision)
        self.precision = precision

    def watch_writes(self) -> None:
        """Start to detect the program's writes to sharded parameters and to the tensors that replace them on modules.

        Call this method only for a unit that stays unsharded or sliced. Counting writes costs as much as an all-gather.
        """
        if self._writes_before is None:
            self._writes_before = self.writes()
        sliced = self.param_state is ParamState.SLICED
        if self.shown is None and (sliced or self.shows_unsharded):
            self.shown = [group.shown(sliced) for group in self.param_groups]

    @property
    def stale(self) -> bool:
        """True if the program has written, frozen or unfrozen a parameter since `watch_writes` was called."""
        held = self.param_state is ParamState.UNSHARDED or self.param_state is ParamState.SLICED
        if not held or self._writes_before is None:
            return False
        return self._writes_before != self.writes() or any(each.touched for each in self.shown or ())

    def _follow_changes(self) -> list[str]:
        """Apply changes that the program made to unsharded parameters or slices to the sharded parameters.

        Return the names of parameters whose writes are lost. If any writes are lost, callers must reshard before they
        raise an error. Otherwise, the error would leave the unit half resharded.
        """
        shown, self.shown = self.shown, None
        return [name for each in shown or () for name in each.follow()]

    def _refuse_replaced(self) -> None:
        """Raise an error if the program replaced parameters while the unit stayed unsharded or sliced.

        Resharding would silently remove the new parameters from the modules.
        """
        groups = [group for group in self.param_groups if group.sharded.one_parameter_each]
        names = [repr(param.name) for group in groups for param in group.params if param.is_replaced]
        if names:
            raise ParameterError(
                f"{self}: parameters were replaced while the unit was kept for a later forward or backward: "
                f"{listed(names)}. Gradients would not reach the new ones. Write values in place under "
                "torch.no_grad(), or call reshard() of the unit before you assign parameters. "
                "torch.func.functional_call cannot replace sharded parameters."
            )

    def _refuse_lost_writes(self, lost: list[str]) -> None:
        for unit in self._units_of_model():  # one error for all units, because most programs write all parameters
            if unit.shown is not None and unit.phase is Phase.IDLE:
                lost += unit._follow_changes()
                unit.reshard()
        raise ParameterError(
            f"{self}: the program wrote {listed(map(repr, lost))} while the unit was kept for a later forward or "
            "backward. Modules then hold copies in the compute dtype, or slices, which cannot be copied back to the "
            "sharded parameters without losing precision. The writes are dropped, and the model stays usable. Write "
            "parameters while they are sharded: before forward, after backward, or after reshard() of the unit; with "
            "FullyShardedDataParallel, inside summon_full_params()."
        )

    def versions(self) -> dict[ManagedParam, tuple[int, bool]]:
        """Return the version counter of each unsharded parameter, and True if the parameter was given other memory.

        If the shard is also the unsharded buffer, the version is always 0, because writes are not lost.
        """
        kept = self.unsharded_is_shard
        return {
            param: (0 if kept else version_of(param.unsharded), param.is_outside_buffer)
            for param in self.params
            if param.unsharded is not None
            and not param.unsharded.is_inference()
            and not isinstance(param.locations[0].module(), nn.RNNBase)  # replaces memory in forward, on a GPU
        }

    def writes(self) -> list[tuple[int, int]]:
        return [group.sharded.writes() for group in self.gathers]

    def rebind_params(self) -> None:
        """Copy parameters into the shards if the program has replaced them or given them other memory.

        Call this method only outside forward and backward, while the unit is sharded.
        """
        self.refuse_assigned_data()
        for group in self.param_groups:
            group.rebind_params()

    def adopt_tied(self) -> None:
        """Use parameters of other units if the program has registered them in place of this unit's own parameters."""
        if self.param_state is ParamState.SHARDED:
            for group in self.param_groups:
                if self.give_up_tied(group) and group.params:
                    group.rebind(fewer=True)

    def give_up_tied(self, group: ParamGroup) -> bool:
        return give_up_tied(group, self)

    def drop_empty(self) -> None:
        """Remove param groups without params. All params of such a group were tied to params of other units."""
        if self.param_state is ParamState.SHARDED:
            empty = [group.sharded for group in self.param_groups if not group.params]
            self.param_groups = [group for group in self.param_groups if group.params]
            self.gathers = [each for each in self.gathers if each.sharded not in empty]

    def refuse_assigned_data(self) -> None:
        """Undo assignments to `.data` of parameters, which DTensors ignore. Raise an error if there were any."""
        for group in self.param_groups:
            group.sharded.warn_of_hooks(self.name)
        names = [name for group in self.param_groups for name in group.sharded.undo_assigned_data()]
        if not names:
            return
        for unit in self._units_of_model():  # most programs assign to all parameters
            names += [name for group in unit.param_groups for name in group.sharded.undo_assigned_data()]
        raise ParameterError(
            f"`parameter.data = tensor` was used for {listed(map(repr, names))} ({self}). A sharded parameter, which "
            "is a DTensor, ignores it, so the values have not changed. The assignment has been undone and the model "
            "stays usable. To write values, use parameter.copy_(tensor) with a DTensor, or "
            "parameter.to_local().copy_(tensor) with this rank's rows, under torch.no_grad()."
        )

    def _units_of_model(self) -> list[Unit]:
        root = None if self.root is None else self.root()
        return [] if root is None else root.units

    def rest(self) -> None:
        """Reshard this unit and all units that share parameters with it. Modules then hold the sharded parameters."""
        self.reshard()
        for unit in self.sharers:
            unit.reshard()

    @property
    def tensors_of_memory(self) -> int:
        """The number of tensors and other objects that share memory with the unsharded parameters."""
        return sum([each.tensors_of_memory for each in self.gathers])

    @property
    def unsharded_is_shard(self) -> bool:
        """True if the shard of every param group is also its unsharded buffer."""
        return all(group.unsharded_is_shard for group in self.param_groups)

    # -- gradients ------------------------------------------------------------------------------------------

    @property
    def has_gradients_to_reduce(self) -> bool:
        """True if there are gradients that can be reduced now.

        Autograd has just computed them, or earlier backwards without synchronization have stored them.
        """
        for group in self.param_groups:
            if group.gradients.any_new or group.gradients.has_sums_to_reduce(self.options):
                return True
        return False

    @property
    def has_untaken_gradients(self) -> bool:
        """True if autograd has computed gradients that no reduction has used yet."""
        return any(group.gradients.any_new for group in self.param_groups)

    def clear_gradients(self, set_to_none: bool) -> None:
        """Clear the gradients of the sharded parameters, as `zero_grad` does."""
        for param in self.params:
            if set_to_none:
                param.sharded.grad = None
            elif param.sharded.grad is not None:
                param.sharded.grad.zero_()

    def drop_unreduced(self) -> None:
        """Delete gradients that earlier backwards have not reduced, or have reduced only over the ranks that shard."""
        root = None if self.root is None else self.root()
        if root is not None and root.scope is not None:
            root.scope.refuse("zero_grad()", "It would drop gradients, but not their weights")
        for group in self.param_groups:
            group.gradients.drop_unreduced()

    def reset(self) -> None:
        """Reshard after a forward or backward that did not finish, and delete gradients that have not been reduced."""
        for group in self.param_groups:
            group.gradients.drop()
        lost = self._follow_changes()
        self.reshard()
        self.phase = Phase.IDLE
        if lost:
            warn_of_lost_writes(self.name, lost)  # not an error, which would prevent the reset of other units

    @property
    def at_rest(self) -> bool:
        """True if the unit is sharded and outside forward and backward."""
        return self.phase is Phase.IDLE and self.param_state is ParamState.SHARDED


def warn_of_lost_writes(unit_name: str, written: list[str]) -> None:
    warnings.warn(
        f"Unsharded parameters of unit {unit_name!r} were written ({listed(written)}), and the writes are lost: the "
        "next all-gather overwrites them with the sharded parameters. Write parameters while they are sharded: before "
        "forward, after a backward that reshards, or after reshard() of the unit. A parameter that forward itself "
        "writes, as nn.Embedding(max_norm=...) does, must be excluded from sharding.",
        stacklevel=stack_level_of_program(),
    )
