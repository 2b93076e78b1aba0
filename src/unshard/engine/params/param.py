"""Managed parameters: locations and swaps on modules, replaced and quantized parameters, and counts of writes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_not, setitem
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import ParameterError
from ...layout.shardings import FlatSharding, RowSharding
from ...names import clean_tensor_name
from ...policies import MixedPrecisionPolicy
from ...torch_private import DTensorSpec, foreach_copy, own_parameters, set_rnn_weight, version_of


@dataclass(frozen=True)
class ParamLocation:
    """One name under which a module has a parameter. Refers to the module weakly."""

    module: weakref.ref[nn.Module]
    parameters: dict[str, Any]
    """`_parameters` of the module, or its `__dict__` if the parameter is not registered."""
    name: str
    registered: bool = True
    """False if the parameter is an attribute that the module has not registered: a part of a flat parameter."""

    @property
    def plain(self) -> bool:
        """True if writing to `parameters` replaces the parameter. Recurrent layers also keep a list to be updated."""
        module = self.module()
        return module is None or type(module).__setattr__ is nn.Module.__setattr__

    def put(self, parameter: nn.Parameter) -> None:
        module = self.module()
        if module is not None and not self.plain and self.registered:
            setattr(module, self.name, parameter)
            return
        self.parameters[self.name] = parameter
        if module is not None and not self.plain:
            set_rnn_weight(module, self.name, parameter)


def location_of(module: nn.Module, name: str) -> ParamLocation:
    return ParamLocation(weakref.ref(module), own_parameters(module), name)


def unregistered_location_of(module: nn.Module, name: str) -> ParamLocation:
    return ParamLocation(weakref.ref(module), module.__dict__, name, registered=False)


@dataclass(eq=False)
class ManagedParam:
    """One parameter of a unit: its locations, how it is sharded, and the parameters that modules hold in its place."""

    name: str
    locations: list[ParamLocation]
    sharding: RowSharding | FlatSharding
    origin: weakref.ref[nn.Parameter]
    """The parameter before it was sharded; tells whether two units were given the same parameter."""
    sharded: nn.Parameter
    """The parameter that modules hold at rest."""
    local: torch.Tensor
    """The local tensor that `sharded` was given. If `sharded` has another now, a program has replaced this one."""
    policy: MixedPrecisionPolicy
    tp_spec: DTensorSpec | None = None
    """Distribution of the unsharded parameter over other ranks (tensor parallelism), if any."""
    partial_dims: frozenset[int] = frozenset()
    """Mesh dimensions of `tp_spec` that the reduction sums over, so gradients may be partial in these dimensions."""
    unsharded: nn.Parameter | None = None
    """The parameter that modules hold while they compute."""
    sliced: nn.Parameter | None = None
    """The parameter that modules hold between forward and backward with an integer `reshard_after_forward`."""
    unsharded_view: torch.Tensor | None = None
    """The place of `unsharded` in the unsharded buffer."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Attributes that a subclass of nn.Parameter added to `origin`; `sharded` and `unsharded` get them, too."""

    @property
    def packed(self) -> bool:
        """True if the elements are not numbers, whatever the dtype; see `is_packed`."""
        return self.attributes.get("quant_state") is not None

    @property
    def is_outside_buffer(self) -> bool:
        """True if `unsharded` was given memory outside the unsharded buffer."""
        unsharded, place = self.unsharded, self.unsharded_view
        return unsharded is not None and place is not None and unsharded.data_ptr() != place.data_ptr()

    @property
    def is_replaced(self) -> bool:
        """True if a program has registered another parameter in place of this one."""
        known = (self.sharded, self.unsharded, self.sliced)
        return any(all(at.parameters.get(at.name) is not each for each in known) for at in self.locations)


# Tables instead of attributes, which would be copied and pickled with the parameter. Only for parameters that no module
# has at rest: torch does not convert DTensors that have weak references.
_former: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_unsharded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_dropped: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

former_name: Callable[[Any], str | None] = _former.get
"""Return the name of a sharded parameter that was replaced; None for others."""
unsharded_name: Callable[[Any], str | None] = _unsharded.get
"""Return the name of an unsharded parameter; None for others."""
dropped_name: Callable[[Any], tuple[str, str] | None] = _dropped.get
"""Return the names of a dropped parameter and of the one in its place; None for others."""


class Replacements:
    """Counts the sharded parameters that programs have replaced. A new count causes new checks of all optimizers."""

    seen = 0


def mark_replaced(parameter: nn.Parameter, name: str, by: nn.Parameter) -> None:
    """Remember a sharded parameter that a program has replaced, because optimizers may still hold it."""
    _former[parameter] = name
    _former.pop(by, None)  # a former parameter that was put back
    Replacements.seen += 1


def mark_unsharded(parameter: nn.Parameter, name: str) -> None:
    """Remember an unsharded parameter, in order to refuse optimizers that hold it."""
    _unsharded[parameter] = name


def mark_dropped(parameter: nn.Parameter, name: str, owner: str) -> None:
    """Remember a sharded parameter that no module holds any more: `owner`, of another unit, has taken its place."""
    _dropped[parameter] = name, owner
    Replacements.seen += 1


# Not Python functions, because they are called for every parameter of a unit.
_requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
_gradient: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


class Steps:
    """Counts the optimizer steps of one rank, for all units that were built on that rank.

    Autograd counts writes through a DTensor and through its local tensor, but not the `_foreach` and fused operations
    of optimizers on DTensors. A hook on every optimizer's step counts those.
    """

    def __init__(self) -> None:
        self.taken = 0

    def count_writes(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Return a value that changes when any of `tensors` may have been written.

        Optimizers skip frozen parameters without gradients, so their steps do not count as writes to a frozen unit.
        """
        stepped = any(map(_requires_grad, tensors)) or any(map(is_not, map(_gradient, tensors), repeat(None)))
        return self.taken if stepped else -1, sum(map(version_of, tensors))


# Keyed by default process group: ranks may be threads of this process, and each gathers again only after its own steps.
_steps: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()
_steps_without_group = Steps()


def steps_of_this_rank() -> Steps:
    group = dist.group.WORLD
    return _steps_without_group if group is None else _steps.setdefault(group, Steps())


class ParamSwap:
    """Swaps parameters on modules, by assigning to `_parameters` from lists that are made once."""

    def __init__(self, params: Iterable[ManagedParam]):
        self._params = list(params)
        locations = [(location, param) for param in self._params for location in param.locations]
        plain = [(location, param) for location, param in locations if location.plain]
        self._dicts = [location.parameters for location, _ in plain]
        self._names = [location.name for location, _ in plain]
        self._plain = [param for _, param in plain]
        self._special = [(location, param) for location, param in locations if not location.plain]
        self._cudnn = CudnnWeights(param for _, param in self._special)
        self.refresh()

    def refresh(self) -> None:
        """Rebuild the lists. Call this after params were given other sharded or unsharded parameters."""
        unsharded = [param.unsharded for param in self._params if param.unsharded is not None]
        self.unsharded = unsharded if len(unsharded) == len(self._params) else []
        """The unsharded parameters of all params, once all have one; else empty."""
        self._at_rest = [param.sharded for param in self._params]
        self._unsharded_values = [param.unsharded for param in self._plain]
        self._sharded_values: Sequence[Any] = [param.sharded for param in self._plain]

    def show_unsharded(self, follow_requires_grad: bool = False) -> None:
        """Put unsharded parameters on modules. `follow_requires_grad`: with `requires_grad` of the sharded ones."""
        if follow_requires_grad and any(
            map(is_not, map(_requires_grad, self.unsharded), map(_requires_grad, self._at_rest))
        ):
            for unsharded, at_rest in zip(self.unsharded, self._at_rest, strict=True):
                unsharded.requires_grad_(at_rest.requires_grad)
        deque(map(setitem, self._dicts, self._names, self._unsharded_values), maxlen=0)  # a loop in C
        if self._special:
            self._cudnn.fill()
            for location, param in self._special:
                assert param.unsharded is not None
                location.put(param.unsharded)

    def show_sharded(self) -> None:
        deque(map(setitem, self._dicts, self._names, self._sharded_values), maxlen=0)
        if self._special:
            self._cudnn.empty()
            for location, param in self._special:
                location.put(self._at_rest_of(param))

    def _at_rest_of(self, param: ManagedParam) -> Any:
        return param.sharded

    def show_sliced(self) -> None:
        for param in self._params:
            assert param.sliced is not None
            param.sliced.requires_grad_(param.sharded.requires_grad)
        deque(map(setitem, self._dicts, self._names, [param.sliced for param in self._plain]), maxlen=0)
        if self._special:
            self._cudnn.empty()
            for location, param in self._special:
                assert param.sliced is not None
                location.put(param.sliced)


class CudnnWeights:
    """The memory to which recurrent layers move their unsharded parameters on a GPU.

    Such a layer moves weights that it has not seen before into one allocation, in cuDNN's order. Later all-gathers
    would fill memory that nobody reads, and the layer would silently compute with the weights of the first step. So
    `fill` copies the gathered values into that allocation, and `empty` frees it with the unsharded buffer.
    """

    def __init__(self, params: Iterable[ManagedParam]):
        self._params = list(params)
        self._filled = False
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []

    def fill(self) -> None:
        self._filled = True
        for storage, nbytes in self._emptied:
            storage.resize_(nbytes)
        self._emptied = []
        moved = self._moved()
        if moved:
            foreach_copy([unsharded.data for unsharded, _ in moved], [view for _, view in moved])

    def empty(self) -> None:
        if not self._filled:
            return
        self._filled = False
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each, _ in self._moved()}
        self._emptied = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)

    def _moved(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return the unsharded parameters outside the unsharded buffer. Call this only while the buffer has memory."""
        pairs = [(param.unsharded, param.unsharded_view) for param in self._params]
        return [(p, v) for p, v in pairs if p is not None and v is not None and p.data_ptr() != v.data_ptr()]


# -- parameters of quantized layers --------------------------------------------------------------------------
#
# Subclasses of nn.Parameter that keep scales and the like in attributes. bitsandbytes has two: `Params4bit` (attribute
# `quant_state`; the elements are packed, whatever the dtype) and `Int8Params` (`SCB`, and `CB`, which is the memory of
# the parameter itself). Layers read these attributes from the parameter that they hold, in forward and in state dicts,
# so sharded and unsharded parameters need them, too.

_QUANT_STATE = "quant_state"


class _OwnMemory:
    """Replaces, in `ManagedParam.attributes`, a tensor over the parameter's own memory."""


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes and properties that a subclass of nn.Parameter adds."""
    kind = type(parameter)
    if kind is nn.Parameter or isinstance(parameter, DTensor) or not issubclass(kind, nn.Parameter):
        return {}
    found = dict(vars(parameter))
    for base in kind.__mro__[: kind.__mro__.index(nn.Parameter)]:
        for name, each in vars(base).items():
            if isinstance(each, property) and not hasattr(nn.Parameter, name):
                # torch resolves a state dict key such as "weight.absmax" with getattr.
                with suppress(AttributeError):
                    found.setdefault(name, getattr(parameter, name))
    return {name: _OwnMemory if _is_memory_of(parameter, value) else value for name, value in found.items()}


def _is_memory_of(parameter: nn.Parameter, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not value.numel():
        return False
    return value.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def give_attributes(parameter: torch.Tensor, attributes: dict[str, Any], memory: torch.Tensor | None) -> None:
    """Set `attributes` on a sharded or unsharded parameter, except those that it already has.

    `memory`: the value of attributes that are the parameter's own memory.
    """
    for name, value in attributes.items():
        if vars(parameter).get(name) is None:
            setattr(parameter, name, memory if value is _OwnMemory else value)


def is_packed(parameter: Any) -> bool:
    """Return True if the elements are packed bits, whatever the dtype, so that casts would destroy them."""
    return getattr(parameter, _QUANT_STATE, None) is not None


def load_quant_states(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Load the scales of packed parameters from entries such as `weight.absmax`, and remove these from `state_dict`.

    torch would report the entries as unexpected: the layers save them but have no method to load them.
    """
    marked = [key for key in state_dict if key.startswith(prefix) and f".{_QUANT_STATE}." in key]
    entries: dict[str, dict[str, Any]] = {key.partition(f".{_QUANT_STATE}.")[0]: {} for key in marked}
    if not entries:
        return
    for key in list(state_dict):
        name = next((name for name in (key.rpartition(".")[0], key.rsplit(".", 2)[0]) if name in entries), None)
        if name is not None:
            entries[name][key.removeprefix(f"{name}.")] = state_dict[key]
    modules = {clean_tensor_name(f"{path}."): each for path, each in module.named_modules()}
    for key, scales in entries.items():
        path, _, name = key.removeprefix(prefix).rpartition(".")
        parameter = getattr(modules.get(path + "."), name, None)  # not registered in a flat unit
        if is_packed(parameter):
            set_quant_state(parameter, scales, key)
            for suffix in scales:
                del state_dict[f"{key}.{suffix}"]


def set_quant_state(parameter: Any, entries: dict[str, Any], name: str) -> None:
    """Set the scales of a packed parameter in place: its layer and its sharded and unsharded parameters share them."""
    state = getattr(parameter, _QUANT_STATE)
    try:
        loaded = type(state).from_dict(dict(entries), device=state.absmax.device)
    except Exception as error:
        raise ParameterError(f"The quantization state of {name!r} cannot be loaded: {error!r}") from error
    if loaded.quant_type != state.quant_type:
        raise ParameterError(f"{name!r} is quantized as {state.quant_type}, and was saved as {loaded.quant_type}.")
    _assign(state, loaded)


@torch.no_grad()
def _assign(state: Any, loaded: Any) -> None:
    for name, value in vars(loaded).items():
        mine = getattr(state, name, None)
        if isinstance(mine, type(state)) and isinstance(value, type(state)):
            _assign(mine, value)
        elif (
            isinstance(mine, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and (mine.shape, mine.dtype) == (value.shape, value.dtype)
        ):
            mine.copy_(value)  # in place: parameters have the same tensor as an attribute
        else:
            setattr(state, name, value)
