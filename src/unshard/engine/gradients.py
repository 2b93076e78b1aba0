"""The gradients of a param group, from autograd through accumulation and reduction to the parameters."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from operator import attrgetter, is_not

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm.interface import Label, Transport
from ..comm.order.waiting import leak
from ..errors import CollectiveError, OrderError, listed
from ..torch_private import DTensorSpec
from . import observer
from .params.buffers import Shard
from .params.param import ManagedParam
from .params.sharded import ShardedParams
from .reduction import Reduction, ReductionInFlight, Stage
from .sharded_grad import ShardedGrad, UnreducedGradients, gradient_of
from .states import GradState, Options, checked_move

_is_trained: Callable[[ManagedParam], bool] = attrgetter("sharded.requires_grad")  # in C: on the hot path


class GroupGradients:
    """Takes gradients from autograd, decides which to reduce together, and stores those that are not reduced yet."""

    def __init__(
        self,
        sharded: ShardedParams,
        shards: Transport,
        replicas: Transport,
        device: torch.device,
        number: int,
        unit_name: Callable[[], str],
    ):
        self.state = GradState.EMPTY
        self._sharded = sharded
        self._transport, self._replicas = shards, replicas
        self._device = device
        self._number, self._unit_name = number, unit_name
        self.reductions: dict[tuple[tuple[int, ...], bool], Reduction] = {}
        """Reductions by set of parameters. To rebuild them, assign a new dict: recorded steps use the old one."""
        # Labels outlive the reductions: a rank may change its layout when others do not.
        self._labels: dict[tuple[tuple[int, ...], bool], tuple[Label, Label]] = {}
        self.unreduced: UnreducedGradients | None = None
        self._in_flight: list[ReductionInFlight] = []
        self._unsharded: list[nn.Parameter] = []
        self._all: tuple[int, ...] = ()
        self._special: list[int] = []
        """Indices of tensor-parallel and empty parameters, whose gradients need extra work before a reduction."""
        self.others: list[tuple[int, nn.Parameter]] = []
        """Unsharded parameters of inactive precisions. Graphs of earlier forwards may still give them gradients."""
        self.varied = False
        """True if gradients may have dtypes that differ from the policy's."""
        self.as_stored = False
        """True if gradients are reduced in the stored dtypes, because the unit computes in those dtypes."""

    def __str__(self) -> str:
        return f"The gradient of unit {self._unit_name()!r} on rank {self._transport.rank}"

    @property
    def _params(self) -> list[ManagedParam]:
        return self._sharded.params

    def watch(self, unsharded: list[nn.Parameter]) -> None:
        """From now on, take gradients from the parameters in `unsharded`, which has one entry per param."""
        self._unsharded, params = unsharded, self._params
        self._all = tuple(range(len(unsharded)))
        self._special = [i for i, param in enumerate(params) if param.tp_spec is not None or not param.sharding.numel]

    def change_transports(self, shards: Transport | None = None, replicas: Transport | None = None) -> None:
        self._transport, self._replicas = shards or self._transport, replicas or self._replicas
        self._labels = {}  # labels are numbered per process group

    @property
    def divided_by_transport(self) -> bool:
        """True if a user's communication hook divides the gradients."""
        return self._transport.divides or self._replicas.divides

    @property
    def any_new(self) -> bool:
        """True if autograd has produced a gradient that `reduce` has not taken yet."""
        if any(map(is_not, map(gradient_of, self._unsharded), repeat(None))):  # a loop in C: called in every step
            return True
        return self.varied and any(parameter.grad is not None for _, parameter in self.others)

    def has_sums_to_reduce(self, options: Options) -> bool:
        """Return True if the end of this backward must reduce sums of earlier backwards."""
        if self.state is GradState.LOCAL or not options.synchronize:
            return options.synchronize
        if self._replicas.world == 1 or not options.all_reduce:
            return False
        under_way = [each.reduction for each in self._in_flight]
        return any(each.has_partial and each not in under_way for each in self.reductions.values())

    def present(self) -> list[ManagedParam]:
        """Return the params that have an unreduced gradient from this backward or an earlier one."""
        found = {index for index, grad in enumerate(map(gradient_of, self._unsharded)) if grad is not None}
        found |= {index for index, parameter in self.others if parameter.grad is not None}
        found |= self.unreduced.present if self.unreduced is not None else set()
        return [self._params[index] for index in sorted(found) if _is_trained(self._params[index])]

    # -- taking and reducing --------------------------------------------------------------------------------

    def reduce(self, options: Options, last: bool) -> None:
        """Issue the reduction of new gradients. Without synchronization, only add them to the sums on this rank.

        `last` is True if backward is over. Sums of earlier backwards are then reduced even without new gradients.
        """
        gradients = list(map(gradient_of, self._unsharded))
        plain = not (self._special or self.varied or self._sharded.extended or self.state is GradState.LOCAL)
        if (
            plain
            and gradients
            and options.synchronize
            and all(map(is_not, gradients, repeat(None)))
            and all(map(_is_trained, self._params))
            and not torch.is_grad_enabled()
        ):
            deque(map(setattr, self._unsharded, repeat("grad"), repeat(None)), maxlen=0)
            if self.state is GradState.REDUCING:
                checked_move(self, self.state, GradState.REDUCING)  # raises: a reduction is in flight
            reduction = self.reductions.get((self._all, self.as_stored)) or self._make_reduction(self._all)
            self._in_flight.append(reduction.start(gradients, options, last))  # type: ignore[arg-type]
            self.state = GradState.REDUCING
            if last and options.all_reduce and self._replicas.world > 1:
                self._resume_partial(self._all, options)
        else:
            self._reduce_some(options, last)

    def _reduce_some(self, options: Options, last: bool) -> None:
        """Slow path of `reduce` for gradients that are missing, unsynchronized, tensor-parallel or of mixed dtypes."""
        gradients = self._take()
        if options.reduce_unused and options.synchronize:
            gradients = self._with_unused(gradients)
        if self._sharded.extended and not self.varied:
            self._cast_to_one_dtype(gradients)
        if not gradients and not ((last or options.hold) and self.has_sums_to_reduce(options)):
            return
        with torch.no_grad():  # a backward may build a graph
            if self.state is GradState.LOCAL and self.unreduced is not None:
                self.unreduced.forget(self._sharded.hide_unreduced())
            if self.state is GradState.LOCAL or (gradients and not options.synchronize):
                gradients = self._keep(gradients, options)
            if not options.synchronize:
                if self.unreduced is not None and not options.hold:
                    self._sharded.show_unreduced(self.unreduced)
                return
            members = self._sharded.members_to_reduce(gradients)
            state = checked_move(self, self.state, GradState.REDUCING)
            if members:
                reduction = self.reductions.get((members, self.as_stored)) or self._make_reduction(members)
                self._in_flight.append(reduction.start(gradients, options, last))
            self.state = state
            if last and options.all_reduce:
                self._resume_partial(members, options)
            self._clear_unreduced()

    def _resume_partial(self, members: tuple[int, ...], options: Options) -> None:
        """Start the all-reduce of partial sums that earlier backwards left for other sets of parameters."""
        mine = members, self.as_stored
        others = [each for key, each in self.reductions.items() if key != mine and each.has_partial]
        self._in_flight += [each.resume(options) for each in others]

    def _make_reduction(self, members: tuple[int, ...]) -> Reduction:
        """Create the reduction of the parameters `members`. These are all parameters unless some were unused."""
        key = members, self.as_stored
        labels = self._labels.get(key)
        if labels is None:
            names, mine = [param.name for param in self._params], [self._params[index].name for index in members]
            unit_name = self._unit_name
            labels = self._labels[key] = (
                Label(lambda: f"reduce-scatter {_described(unit_name(), names, mine)}", self._number),
                Label(lambda: f"all-reduce over the replicas {_described(unit_name(), names, mine)}", self._number),
            )
        reduction = Reduction(
            self._sharded, self._shard(), members, self._transport, self._replicas, self._device, labels
        )
        self.reductions[key] = reduction
        return reduction

    def _shard(self) -> Shard:
        return self._sharded.shard.stored() if self.as_stored else self._sharded.shard

    def _take(self) -> dict[int, torch.Tensor]:
        """Return the gradients by parameter index, and clear `.grad` of the unsharded parameters."""
        found = enumerate(map(gradient_of, self._unsharded))
        params = self._params  # parameters that were frozen after forward get no gradient
        gradients = {index: grad for index, grad in found if grad is not None and _is_trained(params[index])}
        for index in self._special:
            if index in gradients:
                param = self._params[index]
                if param.tp_spec is not None:  # even without elements here: the redistribution is a collective
                    gradients[index] = local_gradient(gradients[index], param.tp_spec, param.partial_dims)
                if not param.sharding.numel:
                    del gradients[index]
        deque(map(setattr, self._unsharded, repeat("grad"), repeat(None)), maxlen=0)
        return self._with_others(gradients) if self.varied else gradients

    def _with_others(self, gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Add the gradients of `others`, and cast all gradients to the reduce dtype because packing needs one dtype."""
        for index, parameter in self.others:
            if (grad := parameter.grad) is not None and _is_trained(param := self._params[index]):
                if param.tp_spec is not None:
                    grad = local_gradient(grad, param.tp_spec, param.partial_dims)
                if param.sharding.numel:
                    both = index in gradients
                    gradients[index] = self._to_reduce(index, gradients[index]) + grad if both else grad
            parameter.grad = None
        for index in gradients:  # one by one, which frees each gradient after its cast
            gradients[index] = self._to_reduce(index, gradients[index])
        return dict(sorted(gradients.items()))  # the order of members must be the same on every rank

    def _to_reduce(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(self._shard().segments.dtypes(index).reduce)

    @torch.no_grad()
    def _cast_to_one_dtype(self, gradients: dict[int, torch.Tensor]) -> None:
        """Cast the gradients of each segment to one dtype, because they are packed together.

        Use the reduce dtype if the gradient of any parameter with a gather protocol has it, else the compute dtype.
        """
        segments, extended = self._sharded.shard.segments, self._sharded.extended & gradients.keys()
        precise = {segments.of[i] for i in extended if gradients[i].dtype == segments.dtypes(i).reduce}
        for index, gradient in gradients.items():
            kinds = segments.dtypes(index)
            gradients[index] = gradient.to(kinds.reduce if segments.of[index] in precise else kinds.compute)

    def _with_unused(self, gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Add zeros for trainable parameters that this rank did not use, because another rank may have used them."""
        kept = self.unreduced.sums() if self.unreduced is not None else {}
        for index, param in enumerate(self._params):
            trained = param.unsharded is not None and param.unsharded.requires_grad and _is_trained(param)
            if index not in gradients and index not in kept and param.sharding.numel and trained:
                kinds = self._sharded.shard.segments.dtypes(index)
                dtype = kinds.reduce if self.varied else kinds.compute
                gradients[index] = torch.zeros(param.sharding.shape, dtype=dtype, device=self._device)
        return dict(sorted(gradients.items()))

    def resume_held(self, options: Options) -> None:
        """Finish the reductions that `Options.hold` stopped: all-reduce their partial sums, and deliver the results."""
        held = [each for each in self.reductions.values() if each.has_partial]
        if held:
            state = checked_move(self, self.state, GradState.REDUCING)
            self._in_flight += [each.resume(options) for each in held]
            self.state = state

    # -- gradients that are not reduced yet -----------------------------------------------------------------

    def _keep(self, gradients: dict[int, torch.Tensor], options: Options) -> dict[int, torch.Tensor]:
        if self.unreduced is None:
            self.unreduced = UnreducedGradients(self._sharded.shard, self._device, options.hold)
        self.unreduced.add(gradients)
        self.state = checked_move(self, self.state, GradState.LOCAL)
        sums = self.unreduced.sums()
        if observer.current is not None:
            observer.current.keeping(self._params, sums)
        return sums

    def _clear_unreduced(self) -> None:
        if self.unreduced is not None and not self.unreduced.clear():
            self.unreduced = None  # a user holds the sums, and owns them from now on

    def drop_unreduced(self) -> None:
        """Drop unreduced and partially reduced gradients of earlier backwards."""
        if self.state in (GradState.LOCAL, GradState.PARTIAL):
            self.drop()

    # -- reductions in flight -------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Wait for the operations in flight and start the next ones. Return True if nothing remains in flight."""
        if self.state is not GradState.REDUCING:
            return True
        if torch.is_grad_enabled():  # only if backward builds a graph: entering `no_grad` takes host time
            with torch.no_grad():
                return self.advance()
        partial, under_way = False, []
        for each in self._in_flight:
            stage = each.reduction.advance(each)
            if stage is Stage.PARTIAL:
                partial = True
            elif stage is not Stage.DELIVERED:
                under_way.append(each)
        self._in_flight = under_way
        if under_way:
            return False
        self.state = GradState.PARTIAL if partial else GradState.REDUCED
        return True

    def sharded_grads(self) -> list[ShardedGrad]:
        """Return the sharded gradients that are set as `.grad` of parameters."""
        return [grad for reduction in self.reductions.values() for grad in reduction.grads if grad.attached]

    def release_idle(self) -> None:
        """Free the memory of unused sharded gradients, for example after `zero_grad`."""
        if self.state is not GradState.REDUCING:
            for reduction in self.reductions.values():
                for grad in reduction.grads:
                    if grad.idle:
                        grad.buffer.release()

    def drop(self) -> None:
        """Wait for reductions in flight, and drop all gradients that are not the `.grad` of a sharded parameter."""
        for each in self._in_flight:
            try:
                with suppress(CollectiveError):  # the collective has ended, and nobody wants its result
                    each.work.wait()
                    if each.grad.idle:
                        each.grad.buffer.release()
            except OrderError:
                # The collective stays in flight and may still write, so its buffers must never be freed or used again.
                leak(each)
                kept = self.reductions.items()
                self.reductions = {key: reduction for key, reduction in kept if reduction is not each.reduction}
        self._in_flight = []
        for reduction in self.reductions.values():
            reduction.release()
        self._sharded.hide_unreduced()
        self._clear_unreduced()
        if self.state not in (GradState.EMPTY, GradState.REDUCED):
            self.state = checked_move(self, self.state, GradState.EMPTY)
        for param in self._params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        for _, parameter in self.others:
            parameter.grad = None

    # -- recorded steps -------------------------------------------------------------------------------------

    def all_grads(self) -> list[ShardedGrad]:
        """Return all sharded gradients, including those that are not set as `.grad`."""
        return [grad for reduction in self.reductions.values() for grad in reduction.grads]

    def forget_in_flight(self) -> None:
        """Forget reductions that were recorded but never ran, without waiting for them."""
        self._in_flight = []

    def forget_buffers(self) -> None:
        """Drop all buffers and unreduced gradients. Call this after a layout change or a conversion of gradients."""
        self.drop()
        self.reductions = {}
        self.unreduced = None


def _described(unit_name: str, names: list[str], members: list[str]) -> str:
    """Describe a set of parameters in a label. Different sets get different descriptions."""
    others = [name for name in names if name not in members]
    unit = f"the gradients of unit {unit_name!r}"
    if not others:
        return unit
    return f"{unit} without {_few(others)}" if len(others) <= len(members) else f"{unit}, only {_few(members)}"


def _few(names: list[str]) -> str:
    return listed(names) + (f" (checksum {zlib.crc32(repr(names).encode()):08x})" if len(names) > 3 else "")


def local_gradient(gradient: torch.Tensor, spec: DTensorSpec, summed: frozenset[int]) -> torch.Tensor:
    """Return the local gradient of a tensor-parallel parameter, redistributed to the parameter's placements.

    The gradient stays partial over the mesh dimensions in `summed`, because the reduction later sums over those ranks.
    """
    if not isinstance(gradient, DTensor):
        return gradient
    pairs = zip(gradient.placements, spec.placements, strict=True)
    wanted = tuple(g if dim in summed and g.is_partial() else p for dim, (g, p) in enumerate(pairs))
    if gradient.placements != wanted:
        gradient = gradient.redistribute(placements=wanted)
    local = gradient.to_local()
    # Functional collectives return a tensor that may still be in flight.
    return local.wait() if hasattr(local, "wait") else local
