"""The outermost unit's view of all others: order, prefetch, and the end of backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Set
from contextlib import suppress
from typing import ClassVar

import torch

from ..torch_private import current_backward, inside_backward, on_backward_end
from .arrivals import REFS, listeners, settle
from .living import Living
from .precision import Precision
from .refusals import refuse_gradients_of_nothing, refuse_gradients_past_outputs, refuse_shared_parameters
from .schedule import BackwardOrder, ForwardOrder
from .states import ParamState, Phase
from .trace import traced
from .unit import Unit
from .unmanaged import Unmanaged, warn_of_untied


class Root:
    """Decides when its units are gathered, freed and reduced. `units[0]` is the root's own unit."""

    living: ClassVar[Living[Root]] = Living()

    def __init__(self, units: list[Unit]):
        Root.living.add(self)
        self.units = units
        self.unit = units[0]
        """The root's own."""
        self._number = {unit: number for number, unit in enumerate(units)}
        self._forward_order = ForwardOrder()
        self._backward_order = BackwardOrder(limit=8 * len(units))
        self._waiting_before = 0
        self._ahead: set[Unit] = set()
        self._begun: set[Unit] = set()
        """Those whose outputs this backward has come through."""
        self._repeated: set[Unit] = set()
        """Ran more than once since the last backward, so that gradients may come in parts."""
        self._makes_graph = False
        """Whether this backward does (create_graph=True)."""
        self._made_graph = False
        """Whether the last one did. The next may lead through it, and then it uses parameters in any order."""
        self._reducing: deque[Unit] = deque()
        self._all_reducing: deque[Unit] = deque()
        self._reduce_buffers = max(unit.options.reduce_buffers for unit in units)
        self._lanes = {lanes for unit in units for part in unit.parts if (lanes := part.sharded.residence.lanes)}
        self.unmanaged = Unmanaged()
        self._looked_at = 0
        self.in_forward = False
        self.in_backward = False
        refuse_shared_parameters(units)
        for unit in units:
            unit.refuse_assigned_data()
        warn_of_untied(units)

    # -- forward --------------------------------------------------------------------------------------------

    def recover(self, unit: Unit) -> None:
        """Notice, before a forward, that the last backward or forward was left by an exception."""
        if (self.in_backward or (self.in_forward and unit is self.unit)) and not inside_backward():
            self.reset()

    def before_forward(self, unit: Unit, precision: Precision) -> None:
        """Make `unit` whole, with the gather of the next one already under way."""
        recomputing = current_backward() != -1
        if recomputing:
            self.expect_end_of_backward()
        elif unit is self.unit:
            self._begin_forward()
        if unit.precision is not precision:
            self._change_precision(unit, precision)
        if unit.params is not ParamState.GATHERING:  # foretold: under way since the unit before
            if unit.stale:
                unit.reshard()
            unit.gather()
        if recomputing:
            self._prefetch(unit.options.backward_prefetch, self._backward_order.visit(self._number[unit]))
        else:
            expected = self._forward_order.visit(self._number[unit]) if self.in_forward else None
            self._prefetch(unit.options.forward_prefetch, expected)
        self._use(unit)
        unit.phase = Phase.FORWARD
        if recomputing:
            self._ahead.add(unit)  # its backward need not come: a checkpoint recomputes more than it uses

    def _change_precision(self, unit: Unit, precision: Precision) -> None:
        """The root's is what the units after it will want, most likely; else they would be gathered ahead in vain."""
        unit.select(precision)
        if unit is self.unit:
            for other in self.units:
                if other.params is ParamState.SHARDED and other.policy.full_precision_in_eval:
                    other.select(precision)

    @traced("root_pre_forward")
    def _begin_forward(self) -> None:
        self.in_forward = True
        event, self.unit.options.post_optim_event = self.unit.options.post_optim_event, None
        if event is not None:
            event.wait()
        if REFS:
            settle()
        self._waiting_before = len(self._backward_order)
        self._forward_order.begin()
        for unit in self.units:
            unit.release_gradients()
        # One unit at each forward: a look at a storage costs several times what is done for a parameter besides, and
        # a program that assigns to `.data` mostly does so for all parameters.
        self._looked_at = (self._looked_at + 1) % len(self.units)
        self.units[self._looked_at].refuse_assigned_data()

    def after_forward(self, unit: Unit, graph: bool, returns: bool = True, blind: bool = False) -> None:
        """Free `unit` unless it is kept, or recomputed for the backward that follows at once.

        `graph`: the root's forward builds a graph, so a backward may come. `returns`: it may come through this unit,
        which is not so where everything up to here is frozen. `blind`: it may, but nobody will tell when it begins.
        """
        unit.phase = Phase.IDLE
        if current_backward() != -1:
            return
        if unit is self.unit and not returns and not blind:
            graph = any(slot.sharded.requires_grad for each in self.units for slot in each.slots)
        if returns:
            if REFS and self._backward_order.waits_for(self._number[unit]):
                self._repeated.add(unit)
            self._backward_order.push(self._number[unit])
        if blind:
            unit.keep()  # nothing would gather it in time
            unit.hide()
        elif unit.options.slice_after_forward and graph:
            unit.slice()
            unit.keep()
        elif self._frees_after_forward(unit, graph):
            unit.reshard()
        else:
            unit.keep()
            if unit.options.hide_after_forward:
                unit.hide()
        if unit is self.unit and self.in_forward:
            self._end_forward(graph)
        elif not graph and not self.in_forward:
            self.wait_for_uploads()

    def _frees_after_forward(self, unit: Unit, graph: bool) -> bool:
        chosen = unit.options.reshard_after_forward
        if chosen is not None:
            return chosen
        # By default the root is kept for the backward that begins with it; without a graph there will be none, and a
        # program that looks at its parameters next should meet the sharded ones.
        return unit is not self.unit or not graph

    def _end_forward(self, graph: bool) -> None:
        for unit in reversed(self.units):
            if unit.phase is Phase.FORWARD:
                self.after_forward(unit, graph)  # a list of modules not all of which have run
        self.in_forward = False
        self._forward_order.end()
        if not graph:
            self._backward_order.drop_to(self._waiting_before)
        self._drop_ahead()
        if not graph:
            self.wait_for_uploads()  # the program may write parameters next; with a graph, after backward

    def fail_forward(self, unit: Unit) -> None:
        """An exception left the forward of `unit`. Inside backward it may be a recomputation that ends early."""
        if inside_backward():
            return
        if unit is self.unit:
            self.reset()
        else:
            unit.reshard()
            unit.phase = Phase.IDLE

    # -- backward -------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, precision: Precision) -> None:
        """The first gradient reached an output of `unit`, whose forward ran in `precision`."""
        self.expect_end_of_backward()
        if torch.is_grad_enabled():
            self._makes_graph = True
        if unit.precision is not precision:
            unit.select(precision)
        if unit.phase is Phase.BACKWARD and (unit.params is ParamState.FULL or not unit.options.unshard_in_backward):
            return
        if unit.options.unshard_in_backward:
            unit.gather()
        self._prefetch(unit.options.backward_prefetch, self._backward_order.visit(self._number[unit]))
        if unit.options.unshard_in_backward:
            self._use(unit)
        unit.phase = Phase.BACKWARD
        self._begun.add(unit)

    def after_backward(self, unit: Unit) -> None:
        """The gradients of the inputs of `unit` are done, so its own are."""
        if unit.phase is Phase.BACKWARD:
            if not self._made_graph:  # else at the end: the graph of the last backward may come back to it
                self._close(unit, last=False)
        else:
            self.expect_end_of_backward()  # it came past the outputs, where nobody was told

    def _close(self, unit: Unit, last: bool) -> None:
        unit.phase = Phase.IDLE
        if self._all_reducing:
            self._complete(self._all_reducing)
        # Few reduce buffers alive at a time: the last reduction had this unit's backward to complete in.
        while len(self._reducing) >= self._reduce_buffers or unit in self._reducing:
            oldest = self._reducing.popleft()
            if not oldest.advance_reduce():
                self._all_reducing.append(oldest)
            elif REFS:
                self._arrived(oldest)
        if unit in self._all_reducing:
            self._complete(self._all_reducing)
        if unit.options.reshard_after_backward and not self._makes_graph:
            unit.reshard()  # before its gradients are packed: the reduce buffer can have the memory
        else:
            unit.keep()
            if unit.options.hide_after_backward:
                unit.hide()
        unit.reduce(last)
        self._reducing.append(unit)

    def _complete(self, units: deque[Unit]) -> None:
        while units:
            unit = units.popleft()
            while not unit.advance_reduce():
                pass
            if REFS:
                self._arrived(unit)

    def _arrived(self, unit: Unit) -> None:
        """The gradients of `unit` have been handed out. They are complete, unless it ran more than once."""
        if not self.unit.options.last_backward or unit in self._repeated:
            return
        for listener in listeners():
            listener.arrived([shard for part in unit.parts for shard in part.gradients.shards()])

    def expect_end_of_backward(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            on_backward_end(BackwardEnd(self))

    @traced("root_post_backward")
    def end_backward(self) -> None:
        for unit in reversed(self.units):
            if unit.phase is Phase.BACKWARD:
                self._close(unit, last=True)
            elif unit.has_gradients:
                if unit not in self._begun:
                    refuse_gradients_of_nothing(unit)
                self._close(unit, last=True)
        self._complete(self._all_reducing)
        self._complete(self._reducing)
        if self.unit.options.last_backward:
            self._drop_ahead()
            if not self.in_forward:
                self._rest()
            self._backward_order.clear()
            self._repeated.clear()
        self._begun.clear()
        self._wait_for_lanes()
        self._made_graph, self._makes_graph = self._makes_graph, False
        self.in_backward = False

    def refuse_unseen_backward(self, stepped: Callable[[], set[int]]) -> None:
        """To be called before an optimizer's step, which would go on without its gradients. `stepped`: what it steps.

        Of a unit that is kept whole a backward may use nothing but parameters, past everything that is watched. That
        is right if another backward follows, which takes these gradients with its own.
        """
        if not self._backward_order or self.in_backward or self.in_forward:
            return
        for unit in self.units:
            if unit.gradients_arrived and not stepped().isdisjoint(id(slot.sharded) for slot in unit.slots):
                self.reset()
                refuse_gradients_past_outputs(unit)

    def wait_for_uploads(self) -> None:
        """To be called before parameters are written on the host: what is on its way is to arrive as it was."""
        for lanes in self._lanes:
            lanes.up.synchronize()

    def _wait_for_lanes(self) -> None:
        """The host reads gradients and writes parameters next."""
        for lanes in self._lanes:
            lanes.synchronize()

    def _rest(self) -> None:
        """Free what this backward did not come through: frozen units, gathers that nobody waited for."""
        for unit in self.units:
            kept = self._makes_graph or not unit.options.reshard_after_backward
            unwanted = unit.params is ParamState.GATHERING or not kept
            if unwanted and unit.phase is Phase.IDLE:
                unit.reshard()

    # -- between the steps ----------------------------------------------------------------------------------

    def send_first(self, stepped: Set[int], news: Set[int] | None = None) -> None:
        """Let the shards that the next forward begins with set out from the host, before it asks for them.

        Two units': the copy of a third one has the first one's computation to hide behind. `stepped` are the
        parameters that have been stepped, by their ids, and `news` those of them that were not at the last call. A
        unit with other parameters, which are stepped later or by another optimizer, is not sent.
        """
        if self._lanes and not self.in_forward and not self.in_backward:
            for number in self._forward_order.first(2):
                unit = self.units[number]
                trained = {id(slot.sharded) for slot in unit.slots if slot.sharded.requires_grad}
                if trained <= stepped and (news is None or not trained.isdisjoint(news)):
                    unit.send()

    # -- prefetch and recovery ------------------------------------------------------------------------------

    def _prefetch(self, chosen: list[weakref.ref[Unit]] | None, expected: int | None) -> None:
        """Issue the gathers of the units a user chose, or of the one that the learned order expects next."""
        if chosen is not None:
            for ref in chosen:
                if (unit := ref()) is not None:
                    self._gather_ahead(unit)
        elif expected is not None:
            self._gather_ahead(self.units[expected])

    def _gather_ahead(self, unit: Unit) -> None:
        if unit.params is not ParamState.SHARDED and unit.params is not ParamState.SLICED:
            return
        backward = current_backward() != -1
        if unit.params is ParamState.SLICED and not backward and unit.stale:
            unit.reshard()
        if not backward or unit.options.unshard_in_backward:
            unit.gather()
            self._ahead.add(unit)

    def _use(self, unit: Unit) -> None:
        for under_way in (self._reducing, self._all_reducing):
            if unit in under_way:
                # Backward comes to it again. What was reduced is handed out while the parameters are cut as it is.
                under_way.remove(unit)
                self._complete(deque([unit]))
        unit.use()
        self._ahead.discard(unit)

    def _drop_ahead(self) -> None:
        """Units that were foretold and not used."""
        for unit in self._ahead:
            unit.reshard()
        self._ahead.clear()

    def reset(self) -> None:
        """Return every unit to rest, waiting for what is in flight."""
        for unit in self.units:
            unit.reset()
        self._reducing.clear()
        self._all_reducing.clear()
        self._ahead.clear()
        self._backward_order.clear()
        self._repeated.clear()
        self._begun.clear()
        self._wait_for_lanes()
        self.in_forward = self.in_backward = self._makes_graph = self._made_graph = False


class BackwardEnd:
    """Called at the end of a backward; dropped uncalled by a backward that an exception left."""

    def __init__(self, root: Root):
        self._root = weakref.ref(root)
        self._came = False

    def __call__(self) -> None:
        self._came = True
        root = self._root()
        if root is not None:
            try:
                root.end_backward()
            except BaseException:
                root.reset()
                raise

    def __del__(self) -> None:
        root = self._root()
        # A backward inside another one may be dropped while the outer one still unwinds: see `recover`.
        if not self._came and root is not None and not inside_backward():
            # What left the backward is on its way to the user. If the reset fails too, because another rank is gone, a
            # second traceback helps nobody; the next forward tries again.
            with suppress(Exception):
                root.reset()
