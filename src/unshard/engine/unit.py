"""A unit: the parameters that are all-gathered and reduced together."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..comm.interface import Transport
from ..errors import ParameterError, StateError, listed
from ..policies import MixedPrecisionPolicy
from ..torch_private import version_of
from .checks.lost_writes import refuse_lost_writes, warn_of_lost_writes
from .dtype_rules import Precision
from .group_use import GroupUse
from .options import Options
from .param_group import ParamGroup
from .params.param import ManagedParam, ParamLocation
from .params.unsharded import ShownParams
from .states import GradState, ParamState, Phase, checked_move

if TYPE_CHECKING:
    from .root import Root

ROOT = "(root)"
STATE_KEY = "_unshard_state"  # of a module's `__dict__`: the hooks of its unit
"""Shown as the name of the root's unit, whose path is empty."""


class Unit:
    """Parameters, their buffers and their state. Never calls its root, nor other units than those that it shares with.

    It has a param group for every set of ranks that its parameters are sharded over: one, unless a user chooses other
    meshes for some of them.
    """

    built = 0
    """Units that this process has built, for the last line of `unshard run`."""

    def __init__(
        self, param_groups: list[ParamGroup], device: torch.device, policy: MixedPrecisionPolicy, options: Options
    ):
        Unit.built += 1
        self.name = ""
        self.param_groups = param_groups
        self.gathers: list[ParamGroup | GroupUse] = list(param_groups)
        """What is all-gathered with the unit: its param groups, and those of units that it shares parameters with."""
        self.lends = False
        """Whether other units use its parameters. They are then reduced at the end of backward."""
        self.device, self.policy, self.options = device, policy, options
        self.phase = Phase.IDLE
        self.param_state = ParamState.SHARDED
        self.precision = Precision.POLICY
        self.root: weakref.ref[Root] | None = None
        """Known from the first forward on."""
        self._writes_before: list[tuple[int, int]] | None = None
        self.kept_for_forward = False
        """Whether it is kept for the next forward, if it is kept: not for a backward."""
        self._shows_sharded = False
        self.shown: list[ShownParams] | None = None
        """What the program can touch while the unit is kept unsharded or sliced, for each group; None if nothing."""
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
        """The unsharded parameters that modules hold while they compute."""
        return [param.unsharded for param in self.used_params if param.unsharded is not None]

    @property
    def used_params(self) -> list[ManagedParam]:
        """The same with the parameters of other units that are all-gathered with it."""
        return [param for each in self.gathers for param in each.params]

    @property
    def sharers(self) -> list[Unit]:
        """The other units that use one of its param groups, or whose param groups it uses."""
        uses = [other for each in self.gathers if isinstance(each, GroupUse) for other in each.others()]
        return list(dict.fromkeys(unit for use in uses if (unit := use.unit) is not None))

    @property
    def borrows_from(self) -> list[Unit]:
        """The units whose parameters it uses."""
        groups = [each.group for each in self.gathers if isinstance(each, GroupUse)]
        owners = [unit for group in groups if group.unit is not None and (unit := group.unit()) is not None]
        return [unit for unit in dict.fromkeys(owners) if unit is not self]

    @property
    def borrowed(self) -> list[tuple[ManagedParam, ParamLocation]]:
        """Where its modules hold params of other units."""
        return [place for each in self.gathers if isinstance(each, GroupUse) for place in each.places]

    def use(self, group: ParamGroup) -> GroupUse:
        """All-gather `group` with this unit from now on, together with the other units that do."""
        for each in self.gathers:
            if isinstance(each, GroupUse) and each.group is group:
                return each
        if group not in self.gathers:
            use = GroupUse(self, group, holds=False, shows=False)
            self.gathers.append(use)
            return use
        held = self.param_state is ParamState.UNSHARDED
        use = GroupUse(self, group, held or self.param_state is ParamState.GATHERING, held and not self._shows_sharded)
        self.gathers[self.gathers.index(group)] = use
        self.lends = True
        return use

    # -- parameters -----------------------------------------------------------------------------------------

    def all_gather(self) -> None:
        """Issue the all-gather if the unit is sharded or sliced; its buffers are in flight until `unshard`."""
        state = self.param_state
        if state is ParamState.SHARDED:
            self._writes_before = None
        elif state is not ParamState.SLICED:
            return
        elif lost := self._follow_changes():
            self._refuse_lost_writes(lost)
        started = 0
        try:
            for group in self.gathers:
                group.all_gather(state is ParamState.SLICED)
                started += 1
        except BaseException:
            for group in self.gathers[:started]:
                group.cancel_all_gather()
                group.reshard()
            raise
        self.param_state = ParamState.GATHERING

    def refresh(self) -> None:
        """All-gather before a forward; if the unit was kept, only if the program has changed parameters since."""
        if self.param_state is not ParamState.SHARDED:
            self._refuse_replaced()
            if self.stale:
                self.reshard()
            self.shown = None  # what forward itself writes is not the program's
        self.all_gather()

    def upload_early(self) -> None:
        """Copy offloaded shards to the device, because an all-gather follows soon."""
        if self.param_state is ParamState.SHARDED:
            for group in self.gathers:
                group.upload_early()

    def unshard(self) -> None:
        """Let the modules hold the unsharded parameters; waits for the all-gather."""
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
        """Keep the unsharded parameters, while the modules hold the sharded ones until the next `unshard`.

        Slices are dropped.
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
        """Whether the modules hold the unsharded parameters."""
        return self.param_state is ParamState.UNSHARDED and not self._shows_sharded

    def reshard(self) -> None:
        """Empty the unsharded buffer; the modules hold the sharded parameters."""
        state = self.param_state
        if state is ParamState.SHARDED:
            return
        if self.shown is not None:
            lost = self._follow_changes()
            self.reshard()
            if lost:
                self._refuse_lost_writes(lost)
            return
        for group in self.gathers:
            if state is ParamState.GATHERING:
                group.cancel_all_gather()
            group.reshard()
        self._shows_sharded = False
        self.param_state = ParamState.SHARDED

    def keep_slice(self) -> None:
        """Keep a slice of the unsharded parameters until backward, as an integer `reshard_after_forward` asks."""
        if self.precision is not Precision.POLICY:
            self.reshard()  # slices exist in the policy's precision only
            return
        lost = self._follow_changes()
        for group in self.gathers:
            group.keep_slice()
        self._move(ParamState.SLICED)
        if lost:
            self._refuse_lost_writes(lost)

    def precision_in(self, training: bool) -> Precision:
        """What a forward in training or evaluation mode computes in."""
        full = self.policy.full_precision_in_eval and not training
        return Precision.STORED if full else Precision.POLICY

    def compute_dtype_in(self, precision: Precision) -> torch.dtype | None:
        """The dtype that forward inputs are cast to; None: they are not (no param_dtype, or several stored dtypes)."""
        if precision is Precision.POLICY or self.policy.param_dtype is None:
            return self.policy.param_dtype
        stored = {param.local.dtype for param in self.used_params if param.local.is_floating_point()}
        return stored.pop() if len(stored) == 1 else None

    def select(self, precision: Precision) -> None:
        """Compute in `precision` from now on, which takes another all-gather."""
        if precision is self.precision:
            return
        if self.phase is Phase.BACKWARD and self.param_state is not ParamState.SHARDED:
            # Marked SHARDED and not freed: a graph of the other precision may still read that buffer in this backward.
            # The next `reshard` frees it.
            self.unshard()
            self._move(ParamState.SHARDED)
        else:
            self.reshard()
        for group in self.gathers:
            group.select(precision)
        self.precision = precision

    def watch_writes(self) -> None:
        """Notice from now on that the program writes parameters, sharded ones or those that it can see instead.

        Only while the unit is kept: counting the writes costs as much as the rest of an all-gather.
        """
        if self._writes_before is None:
            self._writes_before = self._writes()
        sliced = self.param_state is ParamState.SLICED
        if self.shown is None and (sliced or self.shows_unsharded):
            self.shown = [group.shown(sliced) for group in self.param_groups]

    @property
    def stale(self) -> bool:
        """Whether the program wrote, froze or unfroze a parameter while the unit was kept."""
        held = self.param_state is ParamState.UNSHARDED or self.param_state is ParamState.SLICED
        if not held or self._writes_before is None:
            return False
        return self._writes_before != self._writes() or any(each.touched for each in self.shown or ())

    def _follow_changes(self) -> list[str]:
        """Take over what the program did to unsharded parameters or slices; returns the writes that cannot be kept.

        Callers raise the error last: before that it would leave the unit half resharded.
        """
        shown, self.shown = self.shown, None
        return [name for each in shown or () for name in each.follow()]

    def _refuse_replaced(self) -> None:
        """Raise if modules hold other parameters than those of a unit that is kept: a reshard would drop them."""
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
        """Raise for all units at once: most programs write all parameters."""
        root = None if self.root is None else self.root()
        for unit in () if root is None else root.units:
            if unit.shown is not None and unit.phase is Phase.IDLE:
                lost += unit._follow_changes()
                unit.reshard()
        refuse_lost_writes(self, lost)

    def versions(self) -> dict[ManagedParam, tuple[int, bool]]:
        """How often unsharded parameters have been written, if those writes are lost, and whether they lie elsewhere.

        On a GPU, recurrent layers move theirs in forward.
        """
        kept = self.unsharded_is_shard
        return {
            param: (0 if kept else version_of(param.unsharded), param.lies_elsewhere)
            for param in self.params
            if param.unsharded is not None
            and not param.unsharded.is_inference()
            and not isinstance(param.locations[0].module(), nn.RNNBase)
        }

    def _writes(self) -> list[tuple[int, int]]:
        return [group.sharded.writes() for group in self.gathers]

    def rebind_params(self) -> None:
        """Copy parameters that a program replaced, or gave other memory, into the shards. Only at rest."""
        self.refuse_assigned_data()
        for group in self.param_groups:
            group.rebind_params()

    def adopt_tied(self) -> None:
        """Use the parameters of other units that a program has registered in the place of this unit's."""
        if self.param_state is ParamState.SHARDED:
            for group in self.param_groups:
                group.adopt_tied()

    def drop_empty(self) -> None:
        """Forget param groups all of whose parameters were tied to those of other units."""
        if self.param_state is ParamState.SHARDED:
            empty = [group for group in self.param_groups if not group.params]
            for group in empty:
                self.param_groups.remove(group)
                self.gathers.remove(group)

    def refuse_assigned_data(self) -> None:
        """Raise if a program assigned to `.data` of a parameter, which has no effect, and undo that."""
        for group in self.param_groups:
            group.sharded.warn_of_hooks(self.name)
        names = [name for group in self.param_groups for name in group.sharded.undo_assigned_data()]
        if not names:
            return
        root = None if self.root is None else self.root()
        for unit in () if root is None else root.units:  # most programs do it to all parameters
            names += [name for group in unit.param_groups for name in group.sharded.undo_assigned_data()]
        raise ParameterError(
            f"`parameter.data = tensor` was used for {listed(map(repr, names))} ({self}). A sharded parameter, which "
            "is a DTensor, ignores it, so the values are as they were before. The assignment has been undone and the "
            "model can be used. To write values, use parameter.copy_(tensor) with a DTensor, or "
            "parameter.to_local().copy_(tensor) with this rank's rows, under torch.no_grad()."
        )

    def refuse_another_transport(self) -> None:
        """Gradients that wait for their reduction lie in buffers of the transport there is."""
        if any(group.gradients.state in (GradState.LOCAL, GradState.PARTIAL) for group in self.param_groups):
            raise StateError(
                f"{self} has gradients of backwards that did not synchronise them "
                "(set_requires_gradient_sync(False), set_requires_all_reduce(False)), and how it sends is changed. "
                "Change that after a backward that synchronises them, or after zero_grad()."
            )

    def change_transport(self, change: Callable[[ParamGroup], Transport]) -> None:
        """Send each param group through another transport from now on."""
        self.rest()
        for group in self.param_groups:
            group.change_transport(change(group))

    def rest(self) -> None:
        """Reshard it and the units that it shares parameters with: modules then hold the sharded parameters."""
        self.reshard()
        for unit in self.sharers:
            unit.reshard()

    @property
    def tensors_of_memory(self) -> int:
        """How many tensors and other objects share memory with the unsharded parameters, as far as is known."""
        return sum([each.tensors_of_memory for each in self.gathers])

    @property
    def unsharded_is_shard(self) -> bool:
        """Whether the shards are the unsharded parameters themselves."""
        return all(group.unsharded_is_shard for group in self.param_groups)

    # -- gradients ------------------------------------------------------------------------------------------

    @property
    def has_gradients_to_reduce(self) -> bool:
        """Whether autograd, or backwards without synchronisation, left gradients that can be reduced now."""
        for group in self.param_groups:
            if group.gradients.any_new or group.gradients.has_sums_to_reduce(self.options):
                return True
        return False

    @property
    def has_untaken_gradients(self) -> bool:
        """Whether autograd left gradients that no reduction has taken."""
        return any(group.gradients.any_new for group in self.param_groups)

    def advance_reduction(self) -> bool:
        """Take the next step of the reduction in flight, waiting for it; true when no step is left."""
        done = True
        for group in self.param_groups:
            done = group.gradients.advance() and done
        return done

    def clear_gradients(self, set_to_none: bool) -> None:
        """`zero_grad` for the sharded parameters."""
        for parameter in (param.sharded for param in self.params):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def drop_unreduced(self) -> None:
        """Drop what backwards without synchronisation have summed up."""
        for group in self.param_groups:
            group.gradients.drop_unreduced()

    def reset(self) -> None:
        """Return to rest after a forward or backward that did not end; drops gradients that no parameter has yet."""
        for group in self.param_groups:
            group.gradients.drop()
        lost = self._follow_changes()
        self.reshard()
        self.phase = Phase.IDLE
        if lost:
            warn_of_lost_writes(self.name, lost)  # an error would keep the other units from being reset

    def forget_in_flight(self) -> None:
        """Of collectives that were recorded and never ran; `reset` follows."""
        for group in self.param_groups:
            group.forget_in_flight()

    @property
    def at_rest(self) -> bool:
        """Whether it is sharded, and nothing is in flight."""
        return self.phase is Phase.IDLE and self.param_state is ParamState.SHARDED

    def _move(self, to: ParamState) -> None:
        self.param_state = checked_move(self, self.param_state, to)
