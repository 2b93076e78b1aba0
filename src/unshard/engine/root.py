"""The root: decides when all units of a model are gathered, resharded and reduced."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Set
from operator import attrgetter
from threading import RLock, get_ident

import torch
from torch.autograd.graph import increment_version

from ..comm.order.peers import first_line_of
from ..errors import CollectiveError, OrderError, ThreadError, listed
from ..torch_private import (
    any_thread_in_backward,
    current_graph_task,
    inside_backward,
    queue_backward_callback,
    runs_split_backward,
    traced_by_make_fx,
)
from .backward_end import BackwardEnd
from .checks.root_checks import (
    refuse_gradients_of_resharded,
    refuse_gradients_past_outputs,
    refuse_graph_of_emptied,
    refuse_split_backward,
)
from .checks.shared_parameters import refuse_shared_with_others, warn_of_untied
from .checks.threads import refuse_thread, refuse_two_threads
from .checks.unmanaged import Unmanaged
from .dtype_rules import Precision
from .reduce.sharded_grad import LISTENERS, finish_steps, listeners
from .states import ParamState, Phase
from .trace import traced
from .unit import Unit
from .unit_order import BackwardOrder, ForwardOrder


class Root:
    """Owns the order of units, prefetch, and the end of backward. `units[0]` is the root's own unit."""

    def __init__(self, units: list[Unit]):
        self.units = units
        self.unit = units[0]
        """The unit of the root module."""
        for unit in units:
            unit.refuse_assigned_data()
            unit.adopt_tied()
        for unit in units:
            unit.drop_empty()
            unit.root = weakref.ref(self)
        refuse_shared_with_others(units)
        self._number = {unit: number for number, unit in enumerate(units)}
        self._forward_order = ForwardOrder()
        self._backward_order = BackwardOrder(limit=8 * len(units))
        self._awaited_before = 0
        self._prefetched: set[Unit] = set()
        self._in_this_backward: set[Unit] = set()
        """Units whose pre-backward hook ran in this backward."""
        self._repeated: set[Unit] = set()
        """Ran more than once since the last backward, so that gradients may come in several parts."""
        self._makes_graph = False
        """Whether this backward does (create_graph=True)."""
        self._made_graph = False
        """Whether the last one did. A second backward runs through its graph, and needs units in any order."""
        self._reducing: deque[Unit] = deque()
        self._all_reducing: deque[Unit] = deque()
        self._reduce_buffers = max(unit.options.reduce_buffers for unit in units)
        offloads = (group.sharded.offload for unit in units for group in unit.param_groups)
        self._copy_streams = {offload.copy_streams for offload in offloads if offload.copy_streams is not None}
        self.unmanaged = Unmanaged()
        self._last_checked = 0
        self.in_forward = False
        self.in_backward = False
        self.gave_up_units = False
        """Whether another root has taken over units. The next forward makes this one anew, and takes them back."""
        self._thread = 0
        """The one that ran the last forward. Backward may run in threads of autograd."""
        self._forwards = 0
        self._backwards = 0
        self._open_graphs = 0
        """Forwards with a graph, less backwards, since the last step of an optimizer."""
        self._evaluated = False
        """Whether the last forward or backward was a forward without a graph."""
        self._recovering = RLock()
        self._failed: tuple[int, Unit] = 0, self.unit
        warn_of_untied(units)

    # -- forward --------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit, precision: Precision) -> None:
        """Unshard `unit`, with the all-gather of the next one already issued."""
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
            expected = self._backward_order.visit(self._number[unit])
        else:
            chosen = unit.options.forward_prefetch
            expected = self._forward_order.visit(self._number[unit]) if self.in_forward else None
        if chosen is not None:
            self._prefetch_chosen(chosen, recomputing)
        elif expected is not None and self._can_prefetch(other := self.units[expected], recomputing):
            other.all_gather()
        if self._reducing or self._all_reducing:
            self._finish_reduction_of(unit)
        unit.unshard()
        self._prefetched.discard(unit)
        unit.phase = Phase.FORWARD
        if recomputing:
            self._prefetched.add(
                unit
            )  # resharded at the end if its backward never comes: a checkpoint may recompute more

    def recover(self) -> None:
        """Notice, before a forward that finds a backward or the root's forward under way, that it has been left."""
        if not inside_backward():
            if self._thread != get_ident():
                refuse_two_threads(self.unit, self._thread)
            with self._recovering:
                self.reset()

    def _change_precision(self, unit: Unit, precision: Precision) -> None:
        """With the root, switch all units that follow `eval()`: they are prefetched before their own forward."""
        unit.select(precision)
        if unit is self.unit:
            for other in self.units:
                if other.param_state is ParamState.SHARDED and other.policy.full_precision_in_eval:
                    other.select(precision)

    @traced("root_pre_forward")
    def _begin_forward(self) -> None:
        thread = get_ident()
        if self.in_forward and self._thread != thread:
            refuse_thread(self.unit)  # it began after `recover` looked
        if traced_by_make_fx():
            refuse_graph_of_emptied(self.units)
        self.in_forward = True
        self._thread = thread
        self._forwards += 1
        event, self.unit.options.post_optim_event = self.unit.options.post_optim_event, None
        if event is not None:
            event.wait()
        if LISTENERS:
            finish_steps()
        self._awaited_before = len(self._backward_order)
        self._forward_order.begin()
        for unit in self.units:
            for group in unit.param_groups:
                group.gradients.release_idle()
        # One unit per forward, in turn: reading storages costs several times all other work per parameter, and a
        # program that assigns to `.data` mostly does so for all parameters.
        self._last_checked = (self._last_checked + 1) % len(self.units)
        self.units[self._last_checked].refuse_assigned_data()

    def after_forward(self, unit: Unit, graph: bool, returns: bool = True, unwatched: bool = False) -> None:
        """Reshard `unit` unless it is kept, or recomputed for the backward that follows at once.

        `graph`: grad mode was on in this forward, so a backward may come. `returns`: it may come through this unit,
        which is not so where everything up to here is frozen. `unwatched`: it may, but no hook tells when it begins.
        """
        unit.phase = Phase.IDLE
        if current_graph_task() != -1:
            return
        if unit is self.unit and not returns and not unwatched:
            graph = any(param.sharded.requires_grad for each in self.units for param in each.params)
        if returns and (graph or self.in_forward):
            if LISTENERS and self._backward_order.awaits(self._number[unit]):
                self._repeated.add(unit)
            self._backward_order.push(self._number[unit])
        options = unit.options
        unit.kept_for_forward = not graph
        if unwatched:
            unit.watch_writes()  # stays unsharded: no hook would gather it before its backward
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
            return True  # it costs little, and programs that write parameters next write the sharded ones
        if chosen is not None:
            return chosen
        # By default the root is kept for the backward that begins with it. Without a graph none follows, and a program
        # that looks at its parameters next should find the sharded ones.
        return unit is not self.unit or not graph

    def _end_forward(self, graph: bool) -> None:
        for unit in reversed(self.units):
            if unit.phase is Phase.FORWARD:
                self.after_forward(unit, graph)  # of a list of modules, some of which did not run
        self.in_forward = False
        self._forward_order.end()
        self._evaluated = not graph
        if graph:
            self._open_graphs += 1
        else:
            self._backward_order.drop_to(self._awaited_before)
        self._reshard_prefetched()
        if not graph:
            self.wait_for_uploads()  # the program may write parameters next; with a graph, after backward

    def fail_forward(self, unit: Unit, error: BaseException | None) -> None:
        """`error` left the forward of `unit`. Inside backward it may be a recomputation that ends early."""
        if inside_backward() or isinstance(error, ThreadError):
            return
        if self._failed[0] != id(error):
            self._failed = id(error), unit  # the innermost unit that it leaves
        if unit is self.unit or not self.in_forward:
            self._announce(error, f"in forward, unit {self._failed[1].name!r}")
        if unit is self.unit:
            self.reset()
        else:
            unit.reshard()
            unit.phase = Phase.IDLE

    def _announce(self, error: BaseException | None, where: str) -> None:
        """Tell the other ranks of an exception: they wait for this one's next collective, or get an unexpected one."""
        if isinstance(error, (OrderError, CollectiveError)):
            return  # all ranks are told of these by what raises them
        what = "an exception" if error is None else first_line_of(error)
        for unit in self.units:
            for group in unit.param_groups:
                for transport in (group.shards, group.replicas):
                    if transport.raised(f"{what} ({where}; forward number {self._forwards})"):
                        return

    # -- backward -------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, precision: Precision) -> None:
        """The first gradient reached an output of `unit`, whose forward ran in `precision`."""
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
        expected = self._backward_order.visit(self._number[unit])
        if options.backward_prefetch is not None:
            self._prefetch_chosen(options.backward_prefetch, backward=True)
        elif expected is not None and self._can_prefetch(other := self.units[expected], backward=True):
            other.all_gather()
        if gathers:
            if self._reducing or self._all_reducing:
                self._finish_reduction_of(unit)
            unit.unshard()
            self._prefetched.discard(unit)
        unit.phase = Phase.BACKWARD
        self._in_this_backward.add(unit)

    def after_backward(self, unit: Unit, at_end: bool = False) -> None:
        """Reshard `unit` and issue the reduction of its gradients, once those of its inputs are done.

        `at_end`: the whole backward is over.
        """
        if not at_end:
            if unit.phase is not Phase.BACKWARD:
                self.queue_end_of_backward()  # no pre-backward hook ran for it: it is reduced at the end
                return
            if self._made_graph:
                return  # it is reduced at the end: the graph of the last backward may use it again
        unit.phase = Phase.IDLE
        if self._all_reducing:
            self._finish_reductions(self._all_reducing)
        # Few reduce-scatter inputs at a time: the last reduction overlapped with this unit's backward.
        while len(self._reducing) >= self._reduce_buffers or unit in self._reducing:
            oldest = self._reducing.popleft()
            if not oldest.advance_reduction():
                self._all_reducing.append(oldest)
            elif LISTENERS:
                self._tell_listeners(oldest)
        if unit in self._all_reducing:
            self._finish_reductions(self._all_reducing)
        options = unit.options
        if options.reshard_after_backward and not self._makes_graph:
            unit.reshard()  # before its gradients are packed: the reduce-scatter input can reuse the memory
        else:
            unit.kept_for_forward = not self._makes_graph
            unit.watch_writes()
            if options.show_sharded_after_backward:
                unit.show_sharded()
        if unit.lends and not at_end:
            return  # it is reduced at the end: units that use its parameters may come later in this backward
        for group in unit.param_groups:
            group.gradients.reduce(options, at_end)
        self._reducing.append(unit)

    def _finish_reductions(self, units: deque[Unit]) -> None:
        while units:
            unit = units.popleft()
            while not unit.advance_reduction():
                pass
            if LISTENERS:
                self._tell_listeners(unit)

    def _finish_reduction_of(self, unit: Unit) -> None:
        """Backward reaches `unit` again: finish its reduction before the modules hold unsharded parameters."""
        for under_way in (self._reducing, self._all_reducing):
            if unit in under_way:
                under_way.remove(unit)
                self._finish_reductions(deque([unit]))

    def _tell_listeners(self, unit: Unit) -> None:
        """The parameters of `unit` have their gradients. They are complete, unless it, or a unit that uses them, ran
        more than once."""
        if not self.unit.options.last_backward or unit in self._repeated or unit.lends:
            return
        for listener in listeners():
            listener.gradients_ready([each for group in unit.param_groups for each in group.gradients.sharded_grads()])

    def queue_end_of_backward(self) -> None:
        """Let autograd call `end_backward` when the whole backward is over, once."""
        if not self.in_backward:
            if self.in_forward and self._thread != get_ident():
                refuse_two_threads(self.unit, self._thread, forward_only=True)
            self.in_backward = True
            self._backwards += 1
            queue_backward_callback(BackwardEnd(self, self._backwards))
            if runs_split_backward(self._thread):
                refuse_split_backward([unit for unit in self.units if self.awaits_backward(unit)])

    @traced("root_post_backward")
    def end_backward(self) -> None:
        # Units whose parameters others use come last: then all of these are resharded, and their gradients are there.
        ordered = self.units[::-1]
        ordered.sort(key=_lends)
        for unit in ordered:
            if unit.phase is Phase.BACKWARD:
                self.after_backward(unit, at_end=True)
            elif unit.has_gradients_to_reduce or (unit.lends and self._came_to(unit)):
                if not self._came_to(unit):
                    refuse_gradients_of_resharded(unit)
                self.after_backward(unit, at_end=True)
        self._finish_reductions(self._all_reducing)
        self._finish_reductions(self._reducing)
        if self.unit.options.last_backward:
            self._reshard_prefetched()
            if not self.in_forward:
                self._reshard_unused()
            self._backward_order.clear()
            self._repeated.clear()
        self._in_this_backward.clear()
        self._wait_for_copies()
        self._made_graph, self._makes_graph = self._makes_graph, False
        self._open_graphs -= 1
        self._evaluated = self.in_backward = False

    def fail_backward(self, error: BaseException | None) -> None:
        """An exception left backward; autograd does not say which."""
        units = [repr(unit.name) for unit in self.units if unit.phase is Phase.BACKWARD]
        self._announce(error, "in backward" + (f", units {listed(units)}" if units else ""))
        self.reset()

    def drop_backward(self, number: int) -> None:
        """An exception left the backward of this number, if it has not ended and no other has begun.

        Of a backward on a GPU, autograd's own thread may be the last to let go, while the program is in its next
        forward, which has recovered already.
        """
        with self._recovering:
            if self.in_backward and self._backwards == number:
                self.fail_backward(None)

    def before_listing(self) -> None:
        """To be called when the program lists parameters.

        After an evaluation these are the sharded ones, which have the gradients, also if units are kept. After a failed
        backward the program may come before autograd's thread, which would end it.
        """
        if self.in_backward and self._thread == get_ident() and not inside_backward() and not any_thread_in_backward():
            self.drop_backward(self._backwards)
        if self._evaluated and not self.in_backward and not self.in_forward:
            for unit in self.units:
                if unit.shown is not None and unit.kept_for_forward:
                    unit.show_sharded()

    def _came_to(self, unit: Unit) -> bool:
        """Whether this backward came to `unit`, or to one that uses its parameters."""
        return not self._in_this_backward.isdisjoint([unit, *unit.sharers] if unit.lends else [unit])

    def _reshard_unused(self) -> None:
        """What this backward did not come through: frozen units, all-gathers that nobody waited for."""
        for unit in self.units:
            if unit.param_state is ParamState.SHARDED or unit.phase is not Phase.IDLE:
                continue
            kept = self._makes_graph or not unit.options.reshard_after_backward
            if unit.param_state is ParamState.GATHERING or not kept:
                unit.reshard()

    def before_step(self, stepped: Callable[[], set[int]]) -> None:
        """To be called before an optimizer's step; `stepped` gives the ids of its parameters."""
        if self.in_backward or self.in_forward:
            return
        if any(map(_shown, self.units)):  # a loop in C: asked in every step
            for unit in self.units:
                unit.show_sharded()  # what the program reads next are the stepped parameters
        if self._backward_order:
            self._refuse_unreduced_gradients(stepped())
        if self._open_graphs:
            self._outdate_graphs(stepped())

    def _refuse_unreduced_gradients(self, stepped: Set[int]) -> None:
        """A loss of parameters alone, of a unit that is kept unsharded, gives gradients without any of our hooks, so
        they are not reduced. If another backward follows before the step, it reduces them as well.
        """
        for unit in self.units:
            if unit.has_untaken_gradients and not stepped.isdisjoint(id(param.sharded) for param in unit.params):
                self.reset()
                refuse_gradients_past_outputs(unit)

    def _outdate_graphs(self, stepped: Set[int]) -> None:
        """Count the step as a write to the unsharded parameters.

        Autograd then refuses the backward of a graph that has saved them, as it does without sharding. All-gathers do
        not count as writes, so such a backward would silently use the new values.
        """
        self._open_graphs = 0
        for group in [group for unit in self.units for group in unit.param_groups]:
            for param in group.params:
                if param.unsharded is not None and id(param.sharded) in stepped and group.sharded.is_stepped(param):
                    increment_version(param.unsharded)

    @property
    def awaited(self) -> int:
        """How many forwards of units wait for their backward."""
        return len(self._backward_order)

    def awaits_backward(self, unit: Unit) -> bool:
        """Whether a graph of `unit` waits for its backward, as far as is known."""
        return self._backward_order.awaits(self._number[unit])

    def wait_for_uploads(self) -> None:
        """To be called before offloaded parameters are written: copies to the device must be done."""
        for streams in self._copy_streams:
            streams.up.synchronize()

    def _wait_for_copies(self) -> None:
        """The host reads gradients and writes parameters next."""
        for streams in self._copy_streams:
            streams.synchronize()

    # -- prefetch and recovery ------------------------------------------------------------------------------

    def _can_prefetch(self, unit: Unit, backward: bool) -> bool:
        """Whether `unit` is not gathered yet and will be used; notes that it is prefetched then."""
        state = unit.param_state
        if state is ParamState.SLICED:
            if not backward and unit.stale:
                unit.reshard()
        elif state is not ParamState.SHARDED:
            return False
        if backward and not unit.options.unshard_in_backward:
            return False
        self._prefetched.add(unit)
        return True

    def _prefetch_chosen(self, chosen: list[weakref.ref[Unit]], backward: bool) -> None:
        """Gather the units a user chose, instead of the one that the learned order expects next."""
        for ref in chosen:
            unit = ref()
            if unit is not None and self._can_prefetch(unit, backward):
                unit.all_gather()

    def upload_first_units(self, stepped: Set[int], news: Set[int] | None = None) -> None:
        """Copy the offloaded shards that the next forward begins with to the device, before it asks for them.

        Two are enough: the copy of the third unit overlaps with the first one's computation. `stepped` are the
        parameters that have been stepped, by their ids, and `news` those of them that were not at the last call. A
        unit with other parameters, which are stepped later or by another optimizer, is not copied.
        """
        if self._copy_streams and not self.in_forward and not self.in_backward:
            for number in self._forward_order.first(2):
                unit = self.units[number]
                trained = {id(param.sharded) for param in unit.params if param.sharded.requires_grad}
                if trained <= stepped and (news is None or not trained.isdisjoint(news)):
                    unit.upload_early()

    def _reshard_prefetched(self) -> None:
        """Units that were prefetched and not used."""
        for unit in self._prefetched:
            unit.reshard()
        self._prefetched.clear()

    def give_up_units(self) -> None:
        """Another root takes over some units or all. Only at rest; graphs that wait for their backward stay valid."""
        self._reshard_prefetched()
        self.gave_up_units = True

    def abandon(self) -> None:
        """Return every unit to rest after a recording that failed: nothing of it has run, so nothing is waited for."""
        for unit in self.units:
            unit.forget_in_flight()
        self.reset()

    def reset(self) -> None:
        """Return every unit to rest, waiting for what is in flight."""
        for unit in self.units:
            unit.reset()
        self._reducing.clear()
        self._all_reducing.clear()
        self._prefetched.clear()
        self._backward_order.clear()
        self._repeated.clear()
        self._in_this_backward.clear()
        self._wait_for_copies()
        self.in_forward = self.in_backward = self._makes_graph = self._made_graph = False


_lends = attrgetter("lends")
_shown = attrgetter("shown")
