"""The sharded parameters of a flat unit. All parameters are concatenated and then cut into equal shards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...comm.interface import Transport
from ...errors import ArgumentError, ParameterError, StateError
from ...layout.collective_tensors import FLAT_LAYOUT, Region, UnitLayout
from ...layout.shardings import FlatSharding
from ...torch_private import no_transforms
from ..forward_tensors import tensors_in
from ..sharded_grad import FlatShardedGrad, ShardedGrad, UnreducedGradients
from ..states import Segments
from .buffers import Shard
from .offload import OffloadPlan
from .param import ManagedParam, ParamLocation, ParamSwap, give_attributes
from .sharded import ShardedParams


class PlaceholderParam(torch.Tensor):
    """A stand-in with the shape, dtype and device of a sharded parameter. Operations on it raise a helpful error.

    Without `use_orig_params`, modules hold placeholders while the unit is sharded. They cannot hold the unsharded
    parameters, because reading a freed parameter would crash the process. Code that reads the memory of a placeholder
    without calling torch reads NaN.
    """

    _param: weakref.ref[ManagedParam]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        placeholder = next((each for each in tensors_in((args, kwargs)) if isinstance(each, PlaceholderParam)), None)
        if getattr(func, "__name__", "") not in _ALLOWED:
            param = None if placeholder is None else placeholder._param()
            name = "" if param is None else f" {param.name!r}"
            raise StateError(
                f"Parameter{name} is sharded; it is unsharded only while its wrapped module computes. Call the module "
                "that FullyShardedDataParallel returned, model(x) instead of model.module(x), or whatever uses it "
                "inside FullyShardedDataParallel.summon_full_params(model)."
            )
        result = super().__torch_function__(func, types, args, kwargs or {})
        if placeholder is not None and isinstance(result, PlaceholderParam):
            result._param = placeholder._param
        return result

    def data_ptr(self) -> int:
        """Return 0, because recurrent layers move weights with an address into one allocation."""
        return 0

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PlaceholderParam(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


# Allowed functions; properties are read with `__get__`.
_ALLOWED = {
    *("__get__", "__set__", "__delete__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "stride"),
    *("storage_offset", "element_size", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_pinned"),
    *("is_shared", "is_inference", "get_device", "untyped_storage", "detach", "requires_grad_"),
}


def placeholder_for(param: ManagedParam, dtype: torch.dtype, device: torch.device) -> PlaceholderParam:
    scalar = torch.zeros((), dtype=dtype, device=device)
    numbers = (scalar.fill_(torch.nan) if dtype.is_floating_point else scalar).expand(param.sharding.shape)
    placeholder = numbers.as_subclass(PlaceholderParam)
    placeholder._param = weakref.ref(param)  # weak: the param refers to the dict that holds the placeholder
    return placeholder


@dataclass(eq=False)
class FlatParam:
    """All parameters of a unit as one 1-D parameter.

    The parameter has the elements of this rank's shard while the unit is sharded, and all elements while the unit
    computes. It is registered on a module instead of the original parameters, except with `use_orig_params`.
    """

    locations: list[ParamLocation]
    sharded: nn.Parameter
    local: torch.Tensor
    length: int
    """Number of elements, excluding the padding at the end."""
    name: str = "_flat_param"
    unsharded: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    """The unsharded buffer with padding. `unsharded` is the same buffer without padding. Both are None at first."""
    _of: Any = None
    _shows_unsharded: bool = False
    _assigned: torch.Tensor | None = None
    """A tensor that the program assigned to `sharded.data`. The next forward uses its values."""

    def show_unsharded(self, view: torch.Tensor) -> None:
        # The unsharded buffer must be allocated. `view` is any tensor in the buffer.
        if self._of is not view:
            with torch.no_grad(), torch.inference_mode(False), no_transforms():
                storage, empty = view.untyped_storage(), torch.empty(0, dtype=view.dtype, device=view.device)
                self.padded = empty.set_(storage, 0, (storage.nbytes() // view.dtype.itemsize,), (1,))
                self.unsharded = torch.empty_like(empty[:0]).set_(storage, 0, (self.length,), (1,))
            self._of = view
        assert self.unsharded is not None
        if not self._shows_unsharded and self.sharded.data_ptr() != self.local.data_ptr():
            # Assigned between forward and backward; this backward needs the values of its forward.
            self._assigned = self.sharded.data
        self.sharded.data = self.unsharded
        self._shows_unsharded = True

    def show_sharded(self) -> None:
        if self._shows_unsharded:
            self.sharded.data = self.local if self._assigned is None else self._assigned
            self._shows_unsharded, self._assigned = False, None


class FlatParamSwap(ParamSwap):
    """Swaps the parameters on modules, and switches the flat parameter between the shard and the unsharded buffer.

    `placeholders` maps params to their placeholders, which modules hold while the unit is sharded.
    """

    def __init__(self, params: Iterable[ManagedParam], flat: Any, placeholders: Mapping[ManagedParam, torch.Tensor]):
        self._placeholders = placeholders
        super().__init__(params)
        self._flat = flat
        self._first_param = next((param for param in self._params if param.sharding.numel), None)

    def refresh(self) -> None:
        super().refresh()
        if self._placeholders:
            self._sharded_values = [self._placeholders[param] for param in self._plain]

    def _at_rest_of(self, param: ManagedParam) -> Any:
        return self._placeholders.get(param, param.sharded)

    def show_unsharded(self, follow_requires_grad: bool = False) -> None:
        super().show_unsharded(follow_requires_grad)
        if self._first_param is not None and self._first_param.unsharded_view is not None:
            self._flat.show_unsharded(self._first_param.unsharded_view)

    def show_sharded(self) -> None:
        super().show_sharded()
        self._flat.show_sharded()


class FlatShardedParams(ShardedParams):
    """Sharded parameters that are plain tensors.

    Programs see either one flat parameter, or the original parameters with this rank's elements. Before this object is
    constructed, the caller must set `local` of each param to this rank's elements.
    """

    layout: ClassVar[UnitLayout] = FLAT_LAYOUT

    def __init__(
        self,
        params: list[ManagedParam],
        transport: Transport,
        offload: OffloadPlan,
        *,
        locations: list[ParamLocation],
        length: int,
        originals: bool,
    ):
        """Register the flat parameter at `locations`. If `originals` is True, programs see the original parameters."""
        self.originals = self.one_parameter_each = originals
        self.kind = self.kind_of(originals)
        nothing = torch.empty(0, dtype=params[0].sharded.dtype, device=offload.device)
        needed = any(param.sharded.requires_grad for param in params)
        self.flat = FlatParam(locations, nn.Parameter(nothing, requires_grad=needed), nothing, length)
        self._resting: Sequence[ManagedParam | FlatParam] = params if originals else [self.flat]
        self._bound = False
        self._all = tuple(index for index, param in enumerate(params) if param.sharding.numel)
        self._shown: list[tuple[tuple[int, ...], ManagedParam | FlatParam, torch.Tensor, torch.Tensor | None]] = []
        self._placeholders: dict[ManagedParam, torch.Tensor] = {}
        self._places: list[tuple[dict[str, Any], str, ManagedParam | FlatParam, int]] = []
        super().__init__(params, transport, offload)

    @staticmethod
    def kind_of(originals: bool) -> str:
        return f"FullyShardedDataParallel with use_orig_params={originals}"

    # -- binding parameters to the shard ---------------------------------------------------------------------------

    def parameters(self) -> list[nn.Parameter]:
        placeholders: Any = self._placeholders.values()
        return [*super().parameters(), self.flat.sharded, *placeholders]

    @property
    def flat_parameter(self) -> nn.Parameter | None:
        return None if self.originals else self.flat.sharded

    @property
    def locations(self) -> list[ParamLocation]:
        return [location for each in self._resting for location in each.locations]

    def is_bound(self) -> bool:
        if not self.is_registered():
            return False
        return all(each.sharded.data_ptr() == address for *_, each, address in self._places)

    def is_registered(self) -> bool:
        return all(parameters.get(name) is each.sharded for parameters, name, each, _ in self._places)

    def replaced(self) -> list[tuple[ManagedParam, Any]]:
        if self.originals:
            return super().replaced()
        found = []
        for param in self.params:
            held = [location.parameters.get(location.name) for location in param.locations]
            others = [each for each in held if isinstance(each, PlaceholderParam) and each is not self._at_rest(param)]
            found += [(param, each) for each in others[:1]]
        return found

    def shows(self, param: ManagedParam, parameter: Any) -> bool:
        return parameter is param.origin() or parameter is self._at_rest(param)

    def _at_rest(self, param: ManagedParam) -> Any:
        return self._placeholders.get(param, param.sharded)

    def drop(self, params: list[ManagedParam], unit: str, started: bool) -> None:
        if len(params) < len(self.params) or started:
            why = "after the first forward" if started else "and the unit has other parameters, too"
            raise ArgumentError(
                f"Parameter {params[0].name!r} of unit {unit!r} was tied to another unit's parameter after it "
                f"was wrapped, {why}: it is part of a flat parameter, from which it cannot be removed. Tie parameters "
                "before wrapping, or wrap the module that has this one by itself and tie before the first forward."
            )
        super().drop(params, unit, started)
        for location in self.flat.locations:
            location.parameters.pop(location.name, None)

    def rebind(self, unit: str, fewer: bool = False) -> bool:
        """Copy parameters into a new shard if the program replaced their memory. Return True if the layout changed.

        The old shard is not reused, for two reasons. The program may have exchanged the memory of two parameters. It
        may also still use the old memory, for example if it swaps averaged weights in and out with `.data = tensor`.
        """
        with torch.no_grad(), torch.inference_mode(False):
            for each in self._resting:
                self._take_over(each, unit)  # type: ignore[arg-type]
            if not self.originals:
                for param in self.params:
                    param.sharded = self.flat.sharded
            if len(set(self._dtypes())) > 1:
                listed = ", ".join(f"{param.name} in {param.sharded.dtype}" for param in self.params)
                raise ParameterError(
                    f"The parameters of unit {unit!r} become one flat parameter and must have one dtype, found: "
                    f"{listed}. Convert all of them."
                )
            if self._dtypes() != self.shard.segments.originals:
                self.shard = self._lay_out()
                return True
            shard = self._make_shard()
            self._bind(shard)
            self.shard = shard
            return False

    def undo_assigned_data(self) -> list[str]:
        """Return an empty list. Assignments to plain tensors need not be undone, because `rebind` adopts the data."""
        return []

    def find_extended(self) -> bool:
        return False

    def reduce_in(self, dtype: torch.dtype) -> None:
        """Reduce gradients in `dtype` from now on, regardless of the policy. The layout does not change."""
        for param in self.params:
            param.policy = replace(param.policy, reduce_dtype=dtype)
        with torch.no_grad(), torch.inference_mode(False):
            self.shard.segments = Segments(self._dtypes(), [param.policy for param in self.params])
            self._bind(self.shard)

    @property
    def has_elements(self) -> bool:
        """True if this rank's shard contains elements of parameters, and not only padding."""
        return any(local.numel() for local in self.shard.locals)

    def _dtypes(self) -> list[torch.dtype]:
        return [param.sharded.dtype for param in self.params]

    def _lay_out(self) -> Shard:
        shard = self._make_shard()
        if not self.originals:
            dtype = shard.segments.kinds[0].original
            self._placeholders = {param: placeholder_for(param, dtype, self.offload.device) for param in self.params}
            for param, placeholder in self._placeholders.items():
                give_attributes(placeholder, param.attributes, None)
        self._bind(shard)
        return shard

    def _make_shard(self) -> Shard:
        segments = Segments(self._dtypes(), [param.policy for param in self.params])
        shardings, members = [param.sharding for param in self.params], range(len(self.params))
        return Shard(
            shardings, segments, self._transport, members, self.offload.device, self.offload.memory, self.layout
        )

    def _bind(self, shard: Shard) -> None:
        """Copy parameters with memory outside the shard into the shard. Parameters on another device are skipped."""
        kinds, shard_numel = shard.segments.kinds[0], self.params[0].sharding.shard_numel  # type: ignore[union-attr]
        piece = shard.flat(kinds.original, 0, shard_numel)
        if not self._bound:
            self._begin(shard, piece)
        elif self.originals:
            for param, inside in zip(self.params, shard.locals, strict=True):
                _move_in(param.sharded, inside)
            if self.flat.sharded.data_ptr() != piece.data_ptr() or self.flat.sharded.dtype != piece.dtype:
                self.flat.sharded.data = piece
        else:
            _move_in(self.flat.sharded, piece)
        self.flat.local = piece
        for param, inside in zip(self.params, shard.locals, strict=True):
            param.local = inside
        for each in (*self._resting, self.flat):
            if getattr(each.sharded, "grad_dtype", kinds.gradient) != kinds.gradient:
                each.sharded.grad_dtype = kinds.gradient  # torch then accepts a `.grad` in another dtype
        self.placed = not self._misplaced(shard)
        self._written = [tensor for each in self._resting for tensor in (each.sharded, each.local)]
        self.bind_locations()

    def bind_locations(self) -> None:
        self._places = [
            (location.parameters, location.name, each, each.sharded.data_ptr())
            for each in self._resting
            for location in each.locations
        ]

    def _begin(self, shard: Shard, piece: torch.Tensor) -> None:
        self._bound = True
        self.flat.sharded.data = piece
        for param, inside in zip(self.params, shard.locals, strict=True):
            inside.copy_(param.local)
            if self.originals:
                param.sharded.grad = None
                param.sharded.data = inside
            else:
                param.sharded = self.flat.sharded

    # -- gradients and writes -------------------------------------------------------------------------------

    def make_swap(self) -> ParamSwap:
        return FlatParamSwap(self.params, self.flat, self._placeholders)

    def make_sharded_grad(self, shard: Shard, regions: Sequence[Region], transport: Transport) -> ShardedGrad:
        flat = None if self.originals else self.flat
        return FlatShardedGrad(shard, regions, self.params, transport, self.offload, flat=flat)

    def members_to_reduce(self, gradients: Mapping[int, torch.Tensor]) -> tuple[int, ...]:
        """Return all indices if there is any gradient, because ranks may have gradients for different parameters."""
        for index, gradient in gradients.items():
            if gradient.requires_grad:
                raise StateError(
                    f"The gradient of {self.params[index].name!r} is to be differentiated again (create_graph=True); "
                    "nothing leads back through the reduction. Call backward without a graph."
                )
        return self._all if gradients else ()

    def show_unreduced(self, sums: UnreducedGradients) -> None:
        """Show users the unreduced sums as `.grad`, in the shape of the unsharded parameters."""
        shown: list[tuple[tuple[int, ...], ManagedParam | FlatParam, torch.Tensor, torch.Tensor | None]] = []
        if self.originals:
            shown = [
                ((index,), self.params[index], each, self.params[index].unsharded_view)
                for index, each in sums.sums().items()
            ]
        elif sums.sums():
            shown = [(tuple(range(len(self.params))), self.flat, sums.flat(self.flat.length), self.flat.unsharded)]
        for indices, holder, each, like in shown:
            parameter = holder.sharded
            self._shown.append((indices, holder, each, parameter.grad))
            if like is not None:
                parameter.data = like  # torch refuses a gradient of another shape
                parameter.grad = None
                parameter.grad = each
                parameter.data = holder.local

    @property
    def shows_unreduced(self) -> bool:
        return bool(self._shown)

    def hide_unreduced(self) -> list[int]:
        cleared = [
            index for indices, holder, each, _ in self._shown if holder.sharded.grad is not each for index in indices
        ]
        for _, holder, each, before in self._shown:
            # Put the reduced gradients back, unless the user cleared everything.
            holder.sharded.grad = before if holder.sharded.grad is each else None
        self._shown = []
        return cleared

    def writes(self) -> tuple[int, int]:
        # New addresses do not count: ranks without elements of a parameter miss them, so the others would gather alone.
        return self.steps.count_writes(self._written)

    def is_stepped(self, param: ManagedParam) -> bool:
        return param.sharded.requires_grad  # a rank without elements of the parameter has no gradient

    def _own_elements(self, param: ManagedParam, unsharded: torch.Tensor) -> torch.Tensor:
        sharding = param.sharding
        assert isinstance(sharding, FlatSharding)
        if sharding.world == 1:
            return unsharded
        first, count = sharding.elements(self._transport.rank)
        return unsharded.as_strided((sharding.numel,), (1,), unsharded.storage_offset())[first : first + count]

    def copy_flat(self) -> bool:
        flat, rank = self.flat, self._transport.rank
        assert flat.unsharded is not None and flat.padded is not None
        written = flat.sharded.detach()
        if written.dtype != flat.local.dtype or written.shape != flat.unsharded.shape:
            return False
        if written.data_ptr() != flat.unsharded.data_ptr():
            flat.unsharded.copy_(written)  # a program gave it other memory
        if flat.local.data_ptr() != flat.padded.data_ptr():  # else the shard is the unsharded buffer
            flat.local.copy_(flat.padded[rank * flat.local.numel() : (rank + 1) * flat.local.numel()])
        return True

    # -- errors ---------------------------------------------------------------------------------------------

    def _misplaced(self, shard: Shard) -> list[str]:
        wrong = [each for each in self._resting if each.sharded.device != shard.device]
        return [f"{each.name} on {each.sharded.device}" for each in wrong]

    def _what_to_do(self) -> str:
        return (
            "Offloaded parameters stay on the host; otherwise move the module, or pass device_id, before it is wrapped."
        )

    def _check_replacement(self, param: Any, current: Any, where: str) -> None:
        if not isinstance(current, nn.Parameter):
            raise ParameterError(f"{where} was replaced by a {type(current).__name__}; assign an nn.Parameter.")
        if current.shape != param.local.shape:
            raise ParameterError(
                f"{where} has the shape {tuple(current.shape)} now; expected {tuple(param.local.shape)}, this rank's "
                "elements of it. To change unsharded parameters use summon_full_params."
            )


def _move_in(parameter: nn.Parameter, inside: torch.Tensor) -> None:
    if parameter.device == inside.device and parameter.data_ptr() != inside.data_ptr():
        inside.copy_(parameter.detach())
        parameter.data = inside
