"""A param group holds the parameters of a unit that are sharded over the same ranks. Most units have only one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..comm.interface import Label, Transport, Work
from ..comm.order.waiting import leak
from ..errors import CollectiveError, OrderError, ParameterError, StateError
from ..torch_private import current_graph_task, storage_use_count
from . import observer
from .all_gather import AllGatherPlan, Slicing
from .gradients import GroupGradients
from .params.offload import OffloadPlan
from .params.param import ManagedParam, ParamLocation
from .params.sharded import ShardedParams
from .params.unsharded import ShownParams, UnshardedParams
from .sharded_grad import LISTENERS, finish_steps
from .states import GradState, Precision

if TYPE_CHECKING:
    from .unit import Unit


class _Member:
    """An entry of `_members`, which maps a parameter to its param group.

    Attributes of the parameter would be copied and pickled with it. The param group owns its entries. An entry refers
    weakly to an original or replaced parameter. It refers strongly to a sharded parameter, as the group does, because
    torch does not convert DTensors that have weak references.
    """

    __slots__ = ("__weakref__", "group", "tensor")

    def __init__(self, tensor: torch.Tensor, group: weakref.ref[ParamGroup], weak: bool):
        self.group = group
        self.tensor: Callable[[], torch.Tensor | None] = weakref.ref(tensor) if weak else (lambda: tensor)


_members: weakref.WeakValueDictionary[int, _Member] = weakref.WeakValueDictionary()
"""The entry of each parameter, by the id of the parameter."""


def param_group_of(parameter: torch.Tensor) -> ParamGroup | None:
    """Return the param group of a sharded parameter, or of one that sharding has replaced, and None for others."""
    member = _members.get(id(parameter))
    # Compared, because another object may have the id of a deleted parameter.
    return member.group() if member is not None and member.tensor() is parameter else None


def param_groups_of(parameters: Iterable[torch.Tensor]) -> list[ParamGroup]:
    """Return the param groups of `parameters` without duplicates, in the order of the parameters."""
    return list(dict.fromkeys(group for each in parameters if (group := param_group_of(each)) is not None))


class ParamGroup:
    """Owns the shard, its all-gather and its gradients. The unit decides when to call the methods."""

    def __init__(
        self,
        params: Sequence[ManagedParam],
        shards: Transport,
        replicas: Transport,
        mesh: DeviceMesh | None,
        device: torch.device,
        offload: OffloadPlan,
        slicing: Slicing | None = None,
        number: int = 0,
        make_sharded: Callable[[list[ManagedParam], Transport, OffloadPlan], ShardedParams] = ShardedParams,
    ):
        """`number` is the unit's number in its process group, which is the same on all ranks."""
        self.shards, self.replicas = shards, replicas
        """Transports over the ranks that shard the parameters, and over those that replicate them."""
        self.mesh, self.slicing = mesh, slicing
        """The one-dimensional mesh of the ranks that shard, and the transport and mesh of slices if slices are used."""
        self.sharded = make_sharded(list(params), shards, offload)
        reference = weakref.ref(self)

        def name() -> str:  # called late: the first forward names the unit
            group = reference()
            return "" if group is None else group.unit_name

        self.gradients = GroupGradients(self.sharded, shards, replicas, device, number, name)
        self.number = number
        self.unit: Callable[[], Unit | None] = lambda: None
        """Returns the unit that owns this group. The group refers to this unit only weakly."""
        self.users: list[weakref.ref[Unit]] = []
        """All units that use this group, including the owner. Empty if only the owner does. See `sharing.py`."""
        self.holders: weakref.WeakSet[Unit] = weakref.WeakSet()
        """Users that have all-gathered the group and have not resharded it yet."""
        self.viewers: weakref.WeakSet[Unit] = weakref.WeakSet()
        """Users that need the unsharded parameters on the modules."""
        self._device = device
        self._swap = self.sharded.make_swap()
        self.precision = Precision.POLICY
        """The precision of the last all-gather, and of the next one unless `select` changes it."""
        self._unsharded: UnshardedParams | None = None
        self._by_precision: dict[Precision, UnshardedParams] = {}
        """Unsharded parameters created so far, by precision; `_unsharded` is the active one."""
        self._forgotten_in_graph = False
        """True if a graph that waits for its backward refers to unsharded parameters that this group no longer uses."""
        self._in_flight: tuple[AllGatherPlan, Work] | None = None
        self._labels = {
            Precision.POLICY: Label(lambda: f"all-gather unit {name()!r}", number),
            Precision.STORED: Label(lambda: f"all-gather unit {name()!r} as it is stored (eval)", number),
        }
        self._label = self._labels[Precision.POLICY]
        self._slices_label = Label(lambda: f"all-gather the slices of unit {name()!r}", number)
        self._members: dict[int, _Member] = {}
        self._register()

    def _register(self) -> None:
        """Make `param_group_of` find this group for its sharded, original and replaced parameters."""
        group, held = weakref.ref(self), {id(each): each for each in self.sharded.parameters()}
        for key, member in list(self._members.items()):
            former = member.tensor()
            if former is None:
                del self._members[key]
            elif key not in held:
                member.tensor = weakref.ref(former)
        members = {id(each): _Member(each, group, weak=True) for each in self.sharded.origins()}
        members.update({key: _Member(each, group, weak=False) for key, each in held.items()})
        self._members.update(members)
        _members.update(members)

    @property
    def unit_name(self) -> str:
        unit = self.unit()
        return "" if unit is None else unit.name

    @property
    def params(self) -> list[ManagedParam]:
        return self.sharded.params

    @property
    def held(self) -> bool:
        """True if an unsharded buffer is allocated."""
        return any(unsharded.buffer.held for unsharded in self._by_precision.values())

    @property
    def unsharded_is_shard(self) -> bool:
        """True if the shard is also the unsharded buffer. This needs one rank, equal dtypes and a flat layout."""
        return self._unsharded is not None and self._unsharded.is_shard

    @property
    def tensors_of_memory(self) -> int:
        """Number of tensors and other objects that share the memory of the unsharded buffer."""
        return 0 if self._unsharded is None else storage_use_count(self._unsharded.buffer.storage)

    @property
    def in_flight(self) -> bool:
        """True if an all-gather was issued and has not been waited for yet."""
        return self._in_flight is not None

    # -- all-gather -----------------------------------------------------------------------------------------

    def all_gather(self, from_slices: bool) -> None:
        """Issue the all-gather, from the slices if `from_slices`. The group must be sharded or sliced."""
        sharded = self.sharded
        if from_slices and self._unsharded is not None and self._unsharded.slices is not None:
            plan, label = self._unsharded.slices.plan, self._slices_label
        else:
            if current_graph_task() == -1:
                if LISTENERS:
                    finish_steps()
                if not sharded.is_bound():
                    self.rebind_params()
            elif not sharded.is_registered():
                # Backward needs the values of forward, so only replaced parameter objects are taken over.
                self.rebind_params()
            unsharded = self._unsharded
            if unsharded is None or not sharded.placed:
                unsharded = self._make_unsharded()
            plan, label = unsharded.plan, self._label
        try:
            self._in_flight = plan, plan.start(label)
        except OrderError:  # the ranks disagree, so the all-gather was not issued
            if sharded.offload.copy_streams is not None:
                sharded.offload.copy_streams.up.synchronize()  # an upload may still write the buffers
            plan.staging.release()
            plan.buffer.release()
            raise
        if observer.current is not None:
            observer.current.all_gathering(sharded.params, plan.members, plan.inputs)
            self._in_flight = plan, observer.watched("all-gather", sharded.params, self._in_flight[1])

    def all_gather_again(self) -> None:
        """Take part in an all-gather that other ranks need while this rank is already unsharded.

        The collective writes the values that the unsharded buffer already has.
        """
        assert self._unsharded is not None
        plan = self._unsharded.plan
        plan.start(self._label).wait()
        if plan.copies:
            plan.copy_out()

    def _make_unsharded(self) -> UnshardedParams:
        """Return the unsharded parameters of the active precision. The first all-gather creates them."""
        if self._forgotten_in_graph:
            if current_graph_task() != -1:
                raise StateError(
                    f"Unit {self.unit_name!r} on rank {self.shards.rank} was changed between forward and backward, for "
                    "example by .to(dtype), .half() or set_custom_all_gather(). The graph of that forward refers to "
                    "memory that is no longer used, so its backward cannot run. Change the model before forward or "
                    "after backward; to go on, run forward again."
                )
            self._forgotten_in_graph = False
        if self._unsharded is None and self.sharded.find_extended():
            self.gradients.forget_buffers()
            self._forget_unsharded()
        if not self.sharded.placed:
            self.sharded.refuse_misplaced(self.unit_name)
        if self._unsharded is None:
            self._unsharded = UnshardedParams(
                self.sharded, self.shards, self.mesh, self._device, self.precision, self.slicing
            )
            self._by_precision[self.precision] = self._unsharded
            self._use_params_of(self._unsharded)
        return self._unsharded

    def wait_for_all_gather(self) -> None:
        """Wait for the all-gather and put the unsharded parameters on the modules."""
        self._wait()
        unsharded = self._unsharded
        assert unsharded is not None
        if not unsharded.plain:
            unsharded.finish_special()
            if self.sharded.extended:
                self._refresh_unsharded()  # a gather protocol may create another unsharded parameter each time
        if observer.current is not None:
            observer.current.unsharded(self.sharded.params)
        # Backward uses the parameters of its forward, whether they are frozen now or not.
        self._swap.show_unsharded(follow_requires_grad=current_graph_task() == -1)

    def _wait(self) -> None:
        if self._in_flight is None:
            return
        plan, work = self._in_flight
        self._in_flight = None
        try:
            work.wait()
        except OrderError:
            # The collective is still in flight and will never end, so it keeps its buffers.
            leak(self._unsharded, plan)
            self._forget_unsharded()
            raise
        if plan.copies:
            plan.copy_out()

    def forget_in_flight(self) -> None:
        """Forget collectives that were recorded but never ran, without waiting for them. Call `reshard` next."""
        if self._in_flight is not None:
            self._in_flight[0].forget()
            self._in_flight = None
        for unsharded in self._by_precision.values():
            unsharded.plan.forget()  # an all-gather whose wait has failed is no longer in flight
        self.gradients.forget_in_flight()

    def release_gathered(self) -> None:
        """Free the memory of a failed all-gather, for example if memory ran out. The group must be sharded."""
        for unsharded in self._by_precision.values():
            unsharded.plan.forget()
            unsharded.buffer.release()

    def upload_early(self) -> None:
        """Copy an offloaded shard to the device ahead of the next all-gather. The group must be sharded."""
        if self._unsharded is not None and self.sharded.offload.offloaded and self.sharded.is_bound():
            self._unsharded.plan.upload_early()

    # -- what the modules hold ------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Put the sharded parameters on the modules and free the unsharded buffer."""
        if self._in_flight is not None:
            with suppress(OrderError, CollectiveError):  # nobody needs this all-gather; the next one raises again
                self._wait()
        self._swap.show_sharded()
        for unsharded in self._by_precision.values():
            unsharded.buffer.release()
            if not unsharded.plain:
                unsharded.release_special()

    def show_unsharded(self) -> None:
        """Put the unsharded parameters back on the modules. The unsharded buffer must still be allocated."""
        in_forward = current_graph_task() == -1
        if in_forward and not self.sharded.is_bound():
            raise ParameterError(
                f"Unit {self.unit_name!r} on rank {self.shards.rank} stayed unsharded since the last forward, and its "
                "parameters were given other memory since then, by `parameter.data = tensor`. This forward would "
                "compute with the old values. Write in place under torch.no_grad() instead. To go on, run forward "
                "again: the next one uses the new values."
            )
        self._swap.show_unsharded(follow_requires_grad=in_forward)

    def shown(self, sliced: bool) -> ShownParams:
        """Return a detector of later changes to the unsharded parameters, or to the slices if `sliced`."""
        return ShownParams(self.sharded, self.unsharded_is_shard, sliced)

    def show_sharded(self) -> None:
        """Put the sharded parameters on the modules without freeing the unsharded buffer."""
        self._swap.show_sharded()

    def keep_slice(self) -> None:
        """Keep a slice, put it on the modules as DTensors, and free the unsharded buffer."""
        unsharded = self._unsharded
        assert unsharded is not None and unsharded.slices is not None
        with torch.no_grad():
            unsharded.slices.keep()
        unsharded.buffer.release()
        self._swap.show_sliced()

    def select(self, precision: Precision) -> None:
        """Use `precision` for later all-gathers. Buffers of other precisions stay allocated until `reshard`."""
        self._swap.show_sharded()
        self.precision, self._label = precision, self._labels[precision]
        self._unsharded = self._by_precision.get(precision)
        if self._unsharded is not None:
            self._use_params_of(self._unsharded)

    def _use_params_of(self, unsharded: UnshardedParams) -> None:
        unsharded.enter()
        self._refresh_unsharded()
        numbers = {param: number for number, param in enumerate(self.params)}
        others = [each for each in self._by_precision.values() if each is not unsharded]
        stored = self.precision is Precision.STORED
        gradients, kinds = self.gradients, self.sharded.shard.segments.kinds
        gradients.others = [(numbers[param], parameter) for each in others for param, parameter in each.parameters()]
        gradients.varied = bool(others) or stored
        gradients.as_stored = stored and any(kind.reduce != kind.reduce_stored for kind in kinds)

    def _refresh_unsharded(self) -> None:
        """Switch to the params' current unsharded parameters. Call this after they were created or replaced."""
        self._swap.refresh()
        self.gradients.watch(self._swap.unsharded)

    def _forget_unsharded(self) -> None:
        unit = self.unit()
        root = None if unit is None or unit.root is None else unit.root()
        if self._by_precision and unit is not None and root is not None and root.awaits_backward(unit):
            self._forgotten_in_graph = True
        self._unsharded, self._by_precision = None, {}
        self.gradients.others = []

    # -- changes from outside -------------------------------------------------------------------------------

    def rebind_params(self) -> None:
        """Copy parameters into the shard if the program replaced them or their memory. The group must be sharded."""
        if LISTENERS:
            finish_steps()
        if self.sharded.is_bound():
            return
        unit, fewer = self.unit(), False
        if unit is not None:
            unit.refuse_assigned_data()  # after rebinding, there is no way to detect the assignment
            fewer = unit.give_up_tied(self)
        self.rebind(fewer)

    def rebind(self, fewer: bool) -> None:
        """Copy parameters with memory outside the shard into the shard. `fewer` is True if params were dropped."""
        for unsharded in self._by_precision.values():
            unsharded.plan.forget_upload()
        shard, same_layout = self.sharded.shard, False
        if self.sharded.rebind(self.unit_name, fewer):
            self._forget_unsharded()
            self._swap = self.sharded.make_swap()  # there may be fewer params
        elif self.sharded.shard is not shard:
            same_layout = True
            for unsharded in self._by_precision.values():
                unsharded.use_new_shard()
            if self._unsharded is not None:
                self._unsharded.enter()
        self._register()
        self._refresh_unsharded()
        if not same_layout or self.gradients.state not in (GradState.LOCAL, GradState.PARTIAL):
            # Conversions also change the `.grad` objects, which are then no longer views of the sharded gradients.
            self.gradients.forget_buffers()

    def param_of(self, parameter: torch.Tensor) -> ManagedParam | None:
        """Return the param whose sharded or original parameter is `parameter`, or None."""
        return next((each for each in self.params if self.sharded.shows(each, parameter)), None)

    def drop(self, params: list[ManagedParam], started: bool) -> None:
        """Forget `params`. Call `rebind` next. `started` is True if the unit has run a forward."""
        self.sharded.drop(params, self.unit_name, started)
        for param in params:
            self._members.pop(id(param.sharded), None)
            self._members.pop(id(param.origin()), None)

    def add_locations(self, param: ManagedParam, locations: list[ParamLocation]) -> None:
        """Also register `param` on modules of another unit, at `locations`."""
        param.locations.extend(locations)
        self.sharded.bind_locations()
        self._swap = self.sharded.make_swap()
        self._refresh_unsharded()
        if self.viewers:
            self._swap.show_unsharded()
        else:
            self._swap.show_sharded()

    def change_transport(self, transport: Transport) -> None:
        """Use `transport` from now on. It may need another layout, so the group must be sharded."""
        self.rebind_params()
        self.gradients.forget_buffers()
        self.shards = transport
        self.sharded.change_transport(transport)
        self.gradients.change_transports(transport)
        self._forget_unsharded()

    def wrap_reduce_transport(self, change: Callable[[Transport], Transport]) -> None:
        """Let `change` replace the transport that reduces over the shards, or over the replicas without sharding."""
        self.gradients.forget_buffers()
        if self.shards.world > 1 or self.replicas.world == 1:
            self.gradients.change_transports(self.shards.wrapped(change))
        else:
            self.gradients.change_transports(replicas=self.replicas.wrapped(change))
