"""The root decides when units are all-gathered and resharded, and when their gradients are reduced."""

from __future__ import annotations

import weakref
from collections.abc import Set
from operator import attrgetter
from threading import RLock, get_ident
from typing import Any

import torch

from ..comm.order.announcing import first_line_of
from ..errors import CollectiveError, OrderError, ThreadError, listed
from ..torch_private import (
    any_thread_in_backward,
    current_graph_task,
    inside_backward,
    queue_backward_callback,
    runs_split_backward,
    traced_by_make_fx,
)
from .backward_hooks import BackwardEnd
from .checks import (
    refuse_gradients_of_resharded,
    refuse_graph_of_emptied,
    refuse_split_backward,
    refuse_thread,
    refuse_two_threads,
)
from .observer import traced
from .param_group import ParamGroup
from .schedule import BackwardOrder, ForwardOrder, Reductions
from .sharded_grad import LISTENERS, finish_steps
from .sharing import refuse_shared_with_others
from .states import ParamState, Phase, Precision
from .unit import Unit
from .unmanaged import Unmanaged, warn_of_untied


class Root:
    """Records the order in which units run, prefetches units, and ends backward."""

    def __init__(self, units: list[Unit]):
        self.units = units
        self.unit = units[0]
        """The root module's own unit."""
        for unit in units:
            unit.refuse_assigned_data()
            unit.adopt_tied()
        for unit in units:
            unit.drop_empty()
            unit.root = weakref.ref(self)
        refuse_shared_with_others(units)
        self._number = {unit: number for number, unit in enumerate(units)}
        self._forward_order = ForwardOrder()
        self.backward_order = BackwardOrder(maxlen=8 * len(units))
        self._awaited_before = 0
        self._prefetched: set[Unit] = set()
        self._in_this_backward: set[Unit] = set()
        """Units whose pre-backward hooks have run in this backward."""
        self.reductions = Reductions(units)
        self._makes_graph = False
        """True if the current backward runs with create_graph=True."""
        self._made_graph = False
        """True if the last backward used create_graph=True. Backward through its graph may need units in any order."""
        streams = {group.sharded.offload.copy_streams for group in self.param_groups}
        self._copy_streams = [each for each in streams if each is not None]
        self.unmanaged = Unmanaged()
        self._last_checked = 0
        self.in_forward = self.in_backward = False
        self.gave_up_units = False
        """True if another root has taken over units. The next forward rebuilds this root and reclaims its units."""
        self._thread = 0
        """Id of the thread that ran the last forward. Backward may run in threads of autograd."""
        self._forwards = self._backwards = 0
        self.open_graphs = 0
        """Number of forwards with a graph minus number of backwards, since the last optimizer step."""
        self._evaluated = False
        """True if the last forward built no graph and no backward has run since."""
        self._recovering = RLock()  # autograd's thread may drop a failed backward while a forward recovers
        self._failed: tuple[int, Unit] = 0, self.unit
        self.scope: Any = None
        """The active `unshard.step` or `unshard.inference` block, if any."""
        warn_of_untied(units)

    @property
    def param_groups(self) -> list[ParamGroup]:
        return [group for unit in self.units for group in unit.param_groups]

    # -- forward --------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit, precision: Precision) -> None:
        """Unshard `unit` before its forward or recomputation. Prefetch the next unit before waiting for this one."""
        recomputing = current_graph_task() != -1
        if recomputing:
            if not self.in_backward:
                self.queue_end_of_backward()
        elif unit is self.unit:
            self._begin_forward()
        if unit.precision is not precision:
            self._change_precision(unit, precision)
        if unit.param_state is not ParamState.GATHERING:  # else it was prefetched
            unit.refresh()
        if recomputing:
            chosen = unit.options.backward_prefetch
            expected = self.backward_order.visit(self._number[unit])
        else:
            chosen = unit.options.forward_prefetch
            expected = self._forward_order.visit(self._number[unit]) if self.in_forward else None
        if chosen is not None:
            self._prefetch_chosen(chosen, recomputing)
        elif expected is not None and self._claim_prefetch(other := self.units[expected], recomputing):
            other.all_gather()
        if recomputing:
            self.reductions.finish_unit(unit)
        unit.unshard()
        self._prefetched.discard(unit)
        unit.phase = Phase.FORWARD
        if recomputing:
            # The end of backward reshards units without a backward of their own: checkpoints may recompute too many.
            self._prefetched.add(unit)

    def recover(self) -> None:
        """Reset after a failed forward or backward that is still marked as active. No-op inside backward."""
        if not inside_backward():
            with self._recovering:
                if self._thread != get_ident():
                    refuse_two_threads(self.unit, self._thread)
                self.reset()

    def _change_precision(self, unit: Unit, precision: Precision) -> None:
        unit.select(precision)
        if unit is self.unit:
            for other in self.units:  # those that follow `eval()` may be prefetched before their own forward
                if other.param_state is ParamState.SHARDED and other.policy.full_precision_in_eval:
                    other.select(precision)

    @traced("root_pre_forward")
    def _begin_forward(self) -> None:
        thread = get_ident()
        with self._recovering:
            if self.in_forward and self._thread != thread:
                refuse_thread(self.unit)  # the other forward began after `recover` looked
            self.in_forward, self._thread = True, thread
        if traced_by_make_fx():
            refuse_graph_of_emptied(self.units)
        self._forwards += 1
        event, self.unit.options.post_optim_event = self.unit.options.post_optim_event, None
        if event is not None:
            event.wait()
        if LISTENERS:
            finish_steps()
        self._awaited_before = len(self.backward_order)
        self._forward_order.begin()
        for group in self.param_groups:
            group.gradients.release_idle()
        # One unit per forward, in turn: reading storages costs several times all other work per parameter, and programs
        # that assign to `.data` mostly do so for all parameters.
        self._last_checked = (self._last_checked + 1) % len(self.units)
        self.units[self._last_checked].refuse_assigned_data()

    def after_forward(self, unit: Unit, graph: bool, returns: bool = True, unwatched: bool = False) -> None:
        """Reshard `unit` after its forward, unless its options keep it unsharded or backward is recomputing it.

        `graph` is True if grad mode was on, so a backward may follow. `returns` is False if everything up to this unit
        is frozen, so backward cannot reach the unit through its outputs. An `unwatched` unit stays unsharded, because
        backward may reach it without running a hook first.
        """
        unit.phase = Phase.IDLE
        if current_graph_task() != -1:
            return
        if unit is self.unit and not returns and not unwatched:
            graph = any(param.sharded.requires_grad for each in self.units for param in each.params)
        if returns and (graph or self.in_forward):
            if LISTENERS and self._number[unit] in self.backward_order:
                self.reductions.repeated.add(unit)
            self.backward_order.append(self._number[unit])
        options = unit.options
        unit.kept_for_forward = not graph
        if unwatched:
            unit.watch_writes()  # stays unsharded: no hook would all-gather it before its backward
            unit.show_sharded()
        elif options.slice_after_forward and graph:
            unit.keep_slice()
            unit.watch_writes()
        elif self._reshards_after_forward(unit, graph):
            unit.reshard()
        else:
            unit.watch_writes()
            if options.show_sharded_after_forward:
                unit.show_sharded()
        if unit is self.unit and self.in_forward:
            self._end_forward(graph)
        elif not graph and not self.in_forward:
            self.wait_for_uploads()

    def _reshards_after_forward(self, unit: Unit, graph: bool) -> bool:
        chosen = unit.options.reshard_after_forward
        if not graph and unit.unsharded_is_shard:
            return True  # costs little, and a program that writes parameters next writes the sharded ones
        if chosen is not None:
            return chosen
        # By default the root stays unsharded for the backward that begins with it. Without a graph no backward follows,
        # and a program that reads parameters next should find the sharded ones.
        return unit is not self.unit or not graph

    def _end_forward(self, graph: bool) -> None:
        for unit in reversed(self.units):
            if unit.phase is Phase.FORWARD:
                self.after_forward(unit, graph)  # a list of modules, some of which did not run
        self._forward_order.end()
        self._evaluated = not graph
        self._reshard_prefetched()
        if graph:
            self.open_graphs += 1
        else:
            self.backward_order.drop_to(self._awaited_before)
            self.wait_for_uploads()  # the program may write parameters next (with a graph: after backward)
        self.in_forward = False  # now another thread may begin

    def fail_forward(self, unit: Unit, error: BaseException | None) -> None:
        """Clean up after `error` ended forward of `unit`. No-op in backward, where a recomputation may stop early."""
        if inside_backward() or isinstance(error, ThreadError):
            return
        if self._failed[0] != id(error):
            self._failed = id(error), unit  # the innermost unit
        if unit is self.unit or not self.in_forward:
            self.announce(error, f"in forward, unit {self._failed[1].name!r}")
        if unit is self.unit:
            self.reset()
        else:
            unit.reshard()
            unit.phase = Phase.IDLE

    def announce(self, error: BaseException | None, where: str, left: bool = False) -> None:
        """Tell the other ranks about an exception. They would otherwise wait for this rank's next collective."""
        if isinstance(error, (OrderError, CollectiveError)):
            return  # raised on all ranks
        what = "an exception" if error is None else first_line_of(error)
        for group in self.param_groups:
            for transport in (group.shards, group.replicas):
                if transport.raised(f"{what} ({where}; forward number {self._forwards})", left):
                    return

    # -- backward -------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, precision: Precision) -> None:
        """Unshard `unit` when a gradient reaches one of its outputs. `precision` is the precision of its forward."""
        if not self.in_backward:
            self.queue_end_of_backward()
        if torch.is_grad_enabled():
            self._makes_graph = True
        if unit.precision is not precision:
            unit.select(precision)
        options = unit.options
        gathers = options.unshard_in_backward
        if unit.phase is Phase.BACKWARD and (unit.param_state is ParamState.UNSHARDED or not gathers):
            return
        if gathers and unit.param_state is not ParamState.GATHERING:  # else it was prefetched
            unit.all_gather()
        expected = self.backward_order.visit(self._number[unit])
        if options.backward_prefetch is not None:
            self._prefetch_chosen(options.backward_prefetch, backward=True)
        elif expected is not None and self._claim_prefetch(other := self.units[expected], backward=True):
            other.all_gather()
        if gathers:
            self.reductions.finish_unit(unit)
            unit.unshard()
            self._prefetched.discard(unit)
        unit.phase = Phase.BACKWARD
        self._in_this_backward.add(unit)

    def after_backward(self, unit: Unit, at_end: bool = False) -> None:
        """Reshard `unit` and issue the reduction of its gradients. `at_end` is True if the whole backward is over."""
        if not at_end:
            if unit.phase is not Phase.BACKWARD:
                self.queue_end_of_backward()  # no pre-backward hook ran: reduce at the end
                return
            if self._made_graph:
                return  # reduce at the end: the graph of the last backward may use the unit again
        unit.phase = Phase.IDLE
        self.reductions.make_room(unit)
        options = unit.options
        if options.reshard_after_backward and not self._makes_graph:
            unit.reshard()  # first, so that the reduce-scatter input can reuse the memory
        else:
            unit.kept_for_forward = not self._makes_graph
            unit.watch_writes()
            if options.show_sharded_after_backward:
                unit.show_sharded()
        if unit.lends and not at_end:
            return  # reduce at the end: units that use its parameters may come later in this backward
        for group in unit.param_groups:
            group.gradients.reduce(options, at_end)
        self.reductions.scattering.append(unit)

    def queue_end_of_backward(self) -> None:
        """Make autograd call `end_backward` once, when the whole backward is over."""
        if not self.in_backward:
            if self.in_forward and self._thread != get_ident():
                refuse_two_threads(self.unit, self._thread, forward_only=True)
            if self.scope is not None:
                self.scope.before_backward()
            self.in_backward = True
            self._backwards += 1
            queue_backward_callback(BackwardEnd(self, self._backwards))
            if runs_split_backward(self._thread):
                refuse_split_backward([unit for unit in self.units if self.awaits_backward(unit)])

    @traced("root_post_backward")
    def end_backward(self) -> None:
        # Units whose parameters others use come last: by then, the others are resharded and all gradients complete.
        ordered = self.units[::-1]
        ordered.sort(key=attrgetter("lends"))
        for unit in ordered:
            if unit.phase is Phase.BACKWARD:
                self.after_backward(unit, at_end=True)
            elif unit.has_gradients_to_reduce or (unit.lends and self._came_to(unit)):
                if not self._came_to(unit):
                    refuse_gradients_of_resharded(unit)
                self.after_backward(unit, at_end=True)
        self.reductions.finish()
        if self.unit.options.last_backward:
            self._reshard_prefetched()
            if not self.in_forward:
                self._reshard_unused()
            self.backward_order.clear()
            self.reductions.repeated.clear()
        self._in_this_backward.clear()
        self.wait_for_copies()
        self._made_graph, self._makes_graph = self._makes_graph, False
        self.open_graphs -= 1
        self._evaluated = self.in_backward = False

    def fail_backward(self, error: BaseException | None) -> None:
        """Clean up after an exception ended backward. `error` is None if autograd does not reveal the exception."""
        units = [repr(unit.name) for unit in self.units if unit.phase is Phase.BACKWARD]
        self.announce(error, "in backward" + (f", units {listed(units)}" if units else ""))
        self.reset()

    def drop_backward(self, number: int) -> None:
        """Clean up after backward `number` failed. No-op if that backward has ended or another one has begun."""
        # On a GPU, autograd's thread may call this after the program's next forward has reset the root.
        with self._recovering:
            if self.in_backward and self._backwards == number:
                self.fail_backward(None)

    def before_listing(self) -> None:
        """Put the sharded parameters, which have the gradients, on the modules before the program lists parameters."""
        # After a failed backward on a GPU, autograd's thread may not have reset the root yet.
        if self.in_backward and self._thread == get_ident() and not inside_backward() and not any_thread_in_backward():
            self.drop_backward(self._backwards)
        if self._evaluated and not self.in_backward and not self.in_forward:
            for unit in self.units:
                if unit.shown is not None and unit.kept_for_forward:
                    unit.show_sharded()

    def _came_to(self, unit: Unit) -> bool:
        """Return True if this backward has reached `unit`, or another unit that uses the parameters of `unit`."""
        return not self._in_this_backward.isdisjoint([unit, *unit.sharers] if unit.lends else [unit])

    def _reshard_unused(self) -> None:
        """Reshard units that this backward did not reach, for example frozen units and needless prefetches."""
        for unit in self.units:
            if unit.param_state is ParamState.SHARDED or unit.phase is not Phase.IDLE:
                continue
            reshards = unit.options.reshard_after_backward and not self._makes_graph
            if reshards or unit.param_state is ParamState.GATHERING:
                unit.reshard()

    def awaits_backward(self, unit: Unit) -> bool:
        """Return True if a forward of `unit` is still waiting for its backward, according to the recorded order."""
        return self._number[unit] in self.backward_order

    def wait_for_uploads(self) -> None:
        """Make the host wait for copies to the device. Call this before writing offloaded parameters."""
        for streams in self._copy_streams:
            streams.up.synchronize()

    def wait_for_copies(self) -> None:
        """Make the host wait for copies in both directions, before gradients are read or parameters written."""
        for streams in self._copy_streams:
            streams.synchronize()

    # -- prefetch and recovery ------------------------------------------------------------------------------

    def _claim_prefetch(self, unit: Unit, backward: bool) -> bool:
        """Mark `unit` as prefetched and return True if it is sharded or sliced and will need an all-gather."""
        if unit.param_state is ParamState.SLICED:
            if not backward and unit.stale:
                unit.reshard()
        elif unit.param_state is not ParamState.SHARDED:
            return False
        if backward and not unit.options.unshard_in_backward:
            return False
        self._prefetched.add(unit)
        return True

    def _prefetch_chosen(self, chosen: list[weakref.ref[Unit]], backward: bool) -> None:
        for ref in chosen:
            unit = ref()
            if unit is not None and self._claim_prefetch(unit, backward):
                unit.all_gather()

    def upload_first_units(self, stepped: Set[int], news: Set[int] | None = None) -> None:
        """Copy the offloaded shards of the first two units of the next forward to the device, ahead of time.

        The copy for the third unit overlaps with the computation of the first. Units with trainable parameters that are
        not stepped yet are skipped. `stepped` has the ids of all parameters stepped so far. `news` has the ids added
        since the last call.
        """
        if self._copy_streams and not self.in_forward and not self.in_backward:
            for number in self._forward_order.first(2):
                unit = self.units[number]
                trained = {id(param.sharded) for param in unit.params if param.sharded.requires_grad}
                if trained <= stepped and (news is None or not trained.isdisjoint(news)):
                    unit.upload_early()

    def _reshard_prefetched(self) -> None:
        for unit in self._prefetched:
            unit.reshard()
        self._prefetched.clear()

    def give_up_units(self) -> None:
        """Prepare for another root to take over units, outside forward and backward. Existing graphs stay valid."""
        self._reshard_prefetched()
        self.gave_up_units = True

    def abandon(self) -> None:
        """Reset after a failed recording, without waiting for the recorded collectives. None of them has run."""
        for group in self.param_groups:
            group.forget_in_flight()
        self.reset()

    def reset(self) -> None:
        """Wait for collectives in flight, reshard every unit, and drop gradients that are not reduced."""
        if self.scope is not None:
            self.scope.fail()
        for unit in self.units:
            unit.reset()
        self.reductions.clear()
        self._prefetched.clear()
        self.backward_order.clear()
        self._in_this_backward.clear()
        self.wait_for_copies()
        self.in_forward = self.in_backward = self._makes_graph = self._made_graph = False
