"""The sharded parameters of a param group.

They are views of the shard. If a program replaces or moves them, their values are copied back into the shard.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...comm.interface import Transport
from ...errors import ParameterError, listed
from ...layout.collective_tensors import ROW_LAYOUT, Region, UnitLayout
from ...layout.shardings import RowSharding
from ...torch_private import (
    dtensor_of,
    has_gradient_hooks,
    inside_functional_call,
    local_of,
    set_local_tensor,
    spec_of,
    stack_level_of_program,
    storage_key,
)
from ..extension import is_extended
from ..sharded_grad import ShardedGrad, UnreducedGradients
from ..states import Segments
from .buffers import META, Shard
from .offload import OffloadPlan
from .param import ManagedParam, ParamLocation, ParamSwap, give_attributes, mark_replaced, steps_of_this_rank


class ShardedParams:
    """Keeps the sharded parameters inside the shard, except parameters with a gather protocol."""

    layout: ClassVar[UnitLayout] = ROW_LAYOUT
    kind = "fully_shard"
    """The name of the API that shards parameters this way. Used in error messages."""
    one_parameter_each = True
    """True if every param has its own sharded parameter. False if the program sees one flat parameter."""

    def __init__(self, params: list[ManagedParam], transport: Transport, offload: OffloadPlan):
        self.params = params
        self.offload = offload
        self.placed = False
        """True if no parameter is on the wrong device or on meta, so that the shard can be gathered."""
        self._warned_of_hooks = False
        self.extended: set[int] = set()
        """Indices of the parameters with their own gather protocol. Their memory is outside the shard."""
        self._transport = transport
        self.steps = steps_of_this_rank()
        self.shard = self._lay_out()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that programs see while the unit is sharded."""
        return [param.sharded for param in self.params]

    def origins(self) -> list[nn.Parameter]:
        """Return those original parameters, from before sharding, that still exist."""
        return [origin for param in self.params if (origin := param.origin()) is not None]

    @property
    def flat_parameter(self) -> nn.Parameter | None:
        """The flat parameter that programs see instead of the original parameters, or None."""
        return None

    @property
    def rank(self) -> int:
        """This rank's number in the process group that shards."""
        return self._transport.rank

    @property
    def locations(self) -> list[ParamLocation]:
        """The locations at which parameters are registered while the unit is sharded."""
        return [location for param in self.params for location in param.locations]

    def is_bound(self) -> bool:
        """Return True if modules hold the sharded parameters, and these have their local tensors in the shard."""
        # Loops in C: called before every all-gather.
        if not all(map(is_, map(dict.get, self._dicts, self._names), self._given)):
            return False
        return all(map(is_, map(local_of, self._given), self._locals))

    def is_registered(self) -> bool:
        """Return True if modules hold the sharded parameters, regardless of their local tensors."""
        return all(map(is_, map(dict.get, self._dicts, self._names), self._given))

    def replaced(self) -> list[tuple[ManagedParam, Any]]:
        """Return the params that the program has replaced on modules, each with the parameter in its place."""
        found = []
        for param in self.params:
            registered = (location.parameters.get(location.name) for location in param.locations)
            current = next((each for each in registered if each is not param.sharded), None)
            if current is not None:
                found.append((param, current))
        return found

    def shows(self, param: ManagedParam, parameter: Any) -> bool:
        """Return True if modules hold `parameter` for `param` while the unit is sharded, or held it before sharding."""
        return param.sharded is parameter or param.origin() is parameter

    def drop(self, params: list[ManagedParam], unit: str, started: bool) -> None:
        """Remove `params`, which now belong to other units. Call `rebind` next.

        `unit` is the name of this unit. `started` is True if the unit has run a forward.
        """
        self.params = [param for param in self.params if param not in params]

    def rebind(self, unit: str, fewer: bool = False) -> bool:
        """Copy parameters into the shard if a program moved or replaced them. Return True if the layout changed.

        After `.to()`, `to_empty` or a load with `assign=True`, a parameter has memory outside the shard, and the next
        all-gather would send the old weights. Therefore, the values are copied into the shard and the local tensors are
        bound to the shard again. The parameter objects of the program stay the same. The layout changes if the dtype of
        a parameter changes. `fewer` must be True if params were dropped.
        """
        with torch.no_grad(), torch.inference_mode(False):
            for param in self.params:
                self._take_over(param, unit)
            merged = self._merge_tied()
            dtypes = [param.sharded.dtype for param in self.params]
            moved = self.shard.device != self._device()
            if dtypes == self.shard.segments.originals and not moved and not merged and not fewer:
                self._bind(self.shard)
                return False
            self.shard = self._lay_out()
            return True

    def _merge_tied(self) -> bool:
        """Merge the params of parameters that the program tied after sharding.

        `tie_weights()` does this after `to_empty`. Without the merge, two params would take turns rebinding the same
        parameter, and each rebind would drop its gradients.
        """
        kept: dict[int, ManagedParam] = {}
        for param in self.params:
            first = kept.setdefault(id(param.sharded), param)
            if first is not param:
                first.locations.extend(param.locations)
        merged = len(kept) < len(self.params)
        if merged:
            self.params = list(kept.values())
        return merged

    def find_extended(self) -> bool:
        """Find gather protocols patched onto shards since the last layout. Return True if the layout changed."""
        if self._find_extended() == self.extended:
            return False
        with torch.no_grad(), torch.inference_mode(False):
            self.shard = self._lay_out()
        return True

    def _find_extended(self) -> set[int]:
        return {i for i, param in enumerate(self.params) if is_extended(local_of(param.sharded), param.name)}

    def _misplaced(self, shard: Shard) -> list[str]:
        wrong = []
        for index, (param, inside) in enumerate(zip(self.params, shard.locals, strict=True)):
            here = param.local.device == self.offload.device if index in self.extended else param.local is inside
            if not here or param.local.is_meta:
                wrong.append(f"{param.name} on {local_of(param.sharded).device}")
        return wrong

    def refuse_misplaced(self, unit: str) -> None:
        raise ParameterError(
            f"Unit {unit!r} on rank {self._transport.rank} expects its parameters on {self.offload.device}, found: "
            f"{', '.join(self._misplaced(self.shard))}. {self._what_to_do()}"
        )

    def _what_to_do(self) -> str:
        if self.offload.offloaded:
            return (
                "Its policy keeps them on the host (CPUOffloadPolicy), and the device gets copies by itself: do not "
                "move the model with .cuda() or .to(device), and assign tensors on the CPU only. model.to('cpu') takes "
                "them back."
            )
        return (
            "A model built on meta is materialized with model.to_empty(device=...) and then initialized, or by loading "
            "a state dict with assign=True, before the first forward."
        )

    def change_transport(self, transport: Transport) -> None:
        self._transport = transport
        with torch.no_grad(), torch.inference_mode(False):
            self.shard = self._lay_out()

    def make_swap(self) -> ParamSwap:
        return ParamSwap(self.params)

    def make_sharded_grad(self, shard: Shard, regions: Sequence[Region], transport: Transport) -> ShardedGrad:
        return ShardedGrad(shard, regions, self.params, transport, self.offload)

    def members_to_reduce(self, gradients: Mapping[int, torch.Tensor]) -> tuple[int, ...]:
        """Return the indices of the parameters to reduce. `gradients` maps indices of parameters to their gradients."""
        return tuple(gradients)

    def show_unreduced(self, sums: UnreducedGradients) -> None:
        """Show users the unreduced sums as `.grad`. This method is a no-op except in flat units."""

    @property
    def shows_unreduced(self) -> bool:
        return False

    def hide_unreduced(self) -> list[int]:
        """Undo `show_unreduced`. Return the indices of the parameters whose sums a user has cleared."""
        return []

    def writes(self) -> tuple[int, int]:
        """Return a value that changes with every write to a sharded parameter or to its local tensor."""
        return self.steps.count_writes(self._written)

    def is_stepped(self, param: ManagedParam) -> bool:
        """Return True if an optimizer step would now write this parameter. The result is the same on all ranks."""
        return param.sharded.grad is not None

    def copy_unsharded(self, param: ManagedParam) -> bool:
        """Copy this rank's elements of an unsharded parameter into the shard. Return False if the dtypes differ."""
        source = param.unsharded if param.tp_spec is None else param.unsharded_view
        if source is None or param.unsharded_view is None or source.dtype != param.local.dtype:
            return False
        param.local.copy_(self._own_elements(param, source))
        return True

    def _own_elements(self, param: ManagedParam, unsharded: torch.Tensor) -> torch.Tensor:
        sharding = param.sharding
        assert isinstance(sharding, RowSharding)
        return unsharded.narrow(sharding.dim, *sharding.rows(self._transport.rank))

    def copy_flat(self) -> bool:
        """Copy this rank's elements of the unsharded flat parameter into the shard. Return False if they do not fit.

        Call this method only if programs see a flat parameter.
        """
        return False

    def _lay_out(self) -> Shard:
        shardings = [param.sharding for param in self.params]
        segments = Segments([param.sharded.dtype for param in self.params], [param.policy for param in self.params])
        before, self.extended = self.extended, self._find_extended()
        members = [index for index in range(len(shardings)) if index not in self.extended]
        shard = Shard(shardings, segments, self._transport, members, self._device(), self.offload.memory)
        for index in self.extended - before:
            self._move_out(local_of(self.params[index].sharded))
        self._bind(shard)
        return shard

    @staticmethod
    def _move_out(local: torch.Tensor) -> None:
        """Move the memory of a tensor with patched methods out of the shard. The tensor object stays the same."""
        if type(local) is torch.Tensor and not local.is_meta and local.numel():
            local.set_(local.clone().untyped_storage(), 0, local.shape, local.stride())

    def _device(self) -> torch.device:
        """Return the device of the shard.

        The shard is on meta, where it takes no memory, while no parameter is on its own device. Parameters are on meta
        before they are materialized, and on the host after `model.to("cpu")`, which programs call to free a GPU.
        """
        devices = {local_of(param.sharded).device.type for param in self.params}
        return META if devices and self.offload.device.type not in devices else self.offload.device

    def _bind(self, shard: Shard) -> None:
        """Copy parameters with memory outside the shard into it. Parameters on meta or another device are skipped."""
        for index, (param, inside) in enumerate(zip(self.params, shard.locals, strict=True)):
            outside = local_of(param.sharded)
            if index not in self.extended and outside is not inside and outside.device == inside.device:
                if not inside.is_meta:
                    inside.copy_(outside)
                set_local_tensor(param.sharded, inside)
            param.local = local_of(param.sharded)
            give_attributes(param.sharded, param.attributes, None)
        self.placed = not self._misplaced(shard)
        self.bind_locations()
        self._written = [tensor for param in self.params for tensor in (param.sharded, param.local)]
        self._storages = [storage_key(param.sharded.untyped_storage()) for param in self.params]

    def bind_locations(self) -> None:
        """Rebuild the lists that `is_bound` reads. Call this method after the locations of any param have changed."""
        names = [(location.parameters, location.name, param) for param in self.params for location in param.locations]
        self._dicts, self._names = [each for each, *_ in names], [name for _, name, _ in names]
        self._given, self._locals = [param.sharded for *_, param in names], [param.local for *_, param in names]

    @torch.no_grad()
    def widen_tied(self) -> None:
        """Apply `Shard.widen` to tied parameters. Call this method before creating a state dict."""
        for param, local in zip(self.params, self.shard.locals, strict=True):
            if len(param.locations) > 1 and param.local is local:
                self.shard.widen(local)

    def undo_assigned_data(self) -> list[str]:
        """Undo assignments `parameter.data = tensor`, and return the names of the parameters that were assigned to.

        After such an assignment, a DTensor has another storage but still uses the same local tensor.
        """
        names = []
        for index, (param, storage) in enumerate(zip(self.params, self._storages, strict=True)):
            sharded, local = param.sharded, local_of(param.sharded)
            if storage_key(sharded.untyped_storage()) != storage and local is param.local and not param.is_replaced:
                sharded.data = dtensor_of(local, spec_of(sharded))
                self._storages[index] = storage_key(sharded.untyped_storage())
                names.append(param.name)
        return names

    def warn_of_hooks(self, unit: str) -> None:
        """Warn about `register_hook` on sharded parameters. These hooks never run: graphs use unsharded parameters."""
        names = [param.name for param in self.params if has_gradient_hooks(param.sharded)]
        if names and not self._warned_of_hooks:
            self._warned_of_hooks = True
            warnings.warn(
                f"Hooks of parameter.register_hook are never called for sharded parameters: {listed(map(repr, names))} "
                f"of unit {unit!r}. Use register_post_accumulate_grad_hook, whose hook finds the reduced, sharded "
                "gradient in parameter.grad.",
                stacklevel=stack_level_of_program(),
            )

    def _take_over(self, param: ManagedParam, unit: str) -> None:
        """Use the parameter that a module now holds as the sharded parameter of `param`, at all its locations."""
        registered: list[Any] = [location.parameters.get(location.name) for location in param.locations]
        # `functional_call` restores an unsharded parameter, if modules held that when the call began.
        own = (param.sharded, param.unsharded)
        current = next((p for p in registered if all(p is not each for each in own)), param.sharded)
        if current is not param.sharded and inside_functional_call():
            raise ParameterError(
                f"torch.func.functional_call replaces parameter {param.name!r} of unit {unit!r} on rank "
                f"{self._transport.rank}, which is sharded: the unit would keep the new values for good, and gradients "
                "would not reach them. Write the values into the parameters in place, or call functional_call with a "
                "model that is not sharded. Parameters that are not replaced, and buffers, can be passed."
            )
        where = f"Parameter {param.name!r} of unit {unit!r} on rank {self._transport.rank}"
        if current is None:
            raise ParameterError(f"{where} was removed from its module. Remove it before sharding, or freeze it.")
        self._check_replacement(param, current, where)
        if current is not param.sharded:
            mark_replaced(param.sharded, param.name, current)
        param.sharded = current
        for location in param.locations:
            if location.parameters[location.name] is not current:
                location.put(current)

    def _check_replacement(self, param: ManagedParam, current: Any, where: str) -> None:
        if not isinstance(current, DTensor):
            raise ParameterError(
                f"{where} was replaced by a {type(current).__name__} that is not a DTensor. Write into the existing "
                "parameter, or assign one made with torch.distributed.tensor.distribute_tensor. If torch's composable "
                "replicate() did it: import it before fully_shard is called, or pass it the sharded modules as "
                "ignored_modules."
            )
        expected = param.sharding.local_shape(self._transport.rank)
        found = tuple(local_of(current).shape)
        if current.shape != param.sharded.shape or found != expected:
            raise ParameterError(
                f"{where} was replaced by one of shape {tuple(current.shape)} (local {found}); expected "
                f"{tuple(param.sharded.shape)} (local {expected}). Shapes cannot change after fully_shard."
            )
