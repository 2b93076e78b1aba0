"""The parameters of a unit, where modules hold them, and how sharded and unsharded parameters are swapped on modules.

This module also keeps track of replaced parameters and of writes, and supports the parameters of quantized layers.
"""

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
    """One name under which a module has a parameter. The reference to the module is weak."""

    module: weakref.ref[nn.Module]
    parameters: dict[str, Any]
    """The module's `_parameters`, or its `__dict__` if the parameter is not registered."""
    name: str
    registered: bool = True
    """False if the parameter is a plain attribute of the module. Such parameters are parts of a flat parameter."""

    @property
    def plain(self) -> bool:
        """True if writing to `parameters` is enough to replace the parameter.

        False for recurrent layers, which also have a list of their parameters that must be updated.
        """
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
    """One parameter of a unit: its locations, its sharding, and the parameters that modules hold in its place."""

    name: str
    locations: list[ParamLocation]
    sharding: RowSharding | FlatSharding
    origin: weakref.ref[nn.Parameter]
    """The parameter before sharding. Used to detect that two units were given the same parameter."""
    sharded: nn.Parameter
    """The parameter that modules hold while the unit is sharded."""
    local: torch.Tensor
    """The local tensor that the engine gave `sharded`. The program may have replaced it with another one."""
    policy: MixedPrecisionPolicy
    tp_spec: DTensorSpec | None = None
    """The distribution of the unsharded parameter over other ranks, or None without tensor parallelism."""
    partial_dims: frozenset[int] = frozenset()
    """The mesh dimensions of `tp_spec` in which gradients may be partial, because the reduction sums over them."""
    unsharded: nn.Parameter | None = None
    """The parameter that modules hold while the unit computes."""
    sliced: nn.Parameter | None = None
    """The parameter that modules hold between forward and backward if `reshard_after_forward` is an integer."""
    unsharded_view: torch.Tensor | None = None
    """A tensor at the place of `unsharded` in the unsharded buffer."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Attributes that a subclass of nn.Parameter added to `origin`. They are also set on `sharded` and `unsharded`."""

    @property
    def packed(self) -> bool:
        """True if the elements are packed bits instead of numbers of their dtype, as in quantized layers.

        See `is_packed`.
        """
        return self.attributes.get("quant_state") is not None

    @property
    def is_outside_buffer(self) -> bool:
        """True if the memory of `unsharded` is outside the unsharded buffer."""
        unsharded, place = self.unsharded, self.unsharded_view
        return unsharded is not None and place is not None and unsharded.data_ptr() != place.data_ptr()

    @property
    def is_replaced(self) -> bool:
        """True if the program has registered another parameter in place of this parameter."""
        known = (self.sharded, self.unsharded, self.sliced)
        return any(all(at.parameters.get(at.name) is not each for each in known) for at in self.locations)


# Tables instead of attributes, because attributes are copied and pickled with the parameter. Only parameters that no
# module holds while units are sharded are in these tables: torch does not convert DTensors that have weak references.
_former: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_unsharded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_dropped: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

former_name: Callable[[Any], str | None] = _former.get
"""Return the name of a sharded parameter that the program has replaced, or None for other tensors."""
unsharded_name: Callable[[Any], str | None] = _unsharded.get
"""Return the name of an unsharded parameter, or None for other tensors."""
dropped_name: Callable[[Any], tuple[str, str] | None] = _dropped.get
"""Return the names of a dropped parameter and of the parameter in its place, or None for other tensors."""


class Replacements:
    """Counts the sharded parameters that programs have replaced. A new count makes all optimizer checks run again."""

    seen = 0


def mark_replaced(parameter: nn.Parameter, name: str, by: nn.Parameter) -> None:
    """Remember that `by` has replaced the sharded parameter `parameter`. Optimizers may still have `parameter`."""
    _former[parameter] = name
    _former.pop(by, None)  # a former parameter that was put back
    Replacements.seen += 1


def mark_unsharded(parameter: nn.Parameter, name: str) -> None:
    """Remember an unsharded parameter, so that optimizers with this parameter are refused."""
    _unsharded[parameter] = name


def mark_dropped(parameter: nn.Parameter, name: str, owner: str) -> None:
    """Remember a sharded parameter that modules no longer hold, because parameter `owner` has replaced it."""
    _dropped[parameter] = name, owner
    Replacements.seen += 1


# Not Python functions, because they are called for every parameter of a unit.
_requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
_gradient: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


class Steps:
    """Counts the optimizer steps of one rank, for all units that were built on that rank.

    Version counters of autograd count writes through a DTensor and through its local tensor. They do not count the
    `_foreach` and fused operations of optimizers on DTensors, so a hook on every optimizer's step counts these writes.
    """

    def __init__(self) -> None:
        self.taken = 0

    def count_writes(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Return a value that changes when any of `tensors` may have been written.

        Optimizers skip frozen parameters without gradients. Therefore, optimizer steps do not count as writes to a unit
        that has only such parameters.
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
    """Swaps the parameters that modules hold, by assigning to `_parameters` from lists that are prepared in advance."""

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
        """Rebuild the lists. Call this method after the sharded or unsharded parameter of any param has changed."""
        unsharded = [param.unsharded for param in self._params if param.unsharded is not None]
        self.unsharded = unsharded if len(unsharded) == len(self._params) else []
        """The unsharded parameters of all params. Empty until every param has an unsharded parameter."""
        self._at_rest = [param.sharded for param in self._params]
        self._unsharded_values = [param.unsharded for param in self._plain]
        self._sharded_values: Sequence[Any] = [param.sharded for param in self._plain]

    def show_unsharded(self, follow_requires_grad: bool = False) -> None:
        """Put the unsharded parameters on the modules.

        If `follow_requires_grad`, first copy `requires_grad` from the sharded to the unsharded parameters.
        """
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

    Such a layer moves new weights into one allocation, in cuDNN's order. Later all-gathers would fill memory that the
    layer no longer reads, so it would silently compute with the weights of the first step. Therefore, `fill` copies the
    gathered values into that allocation, and `empty` frees the allocation together with the unsharded buffer.
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
        """Return the unsharded parameters outside the unsharded buffer. The buffer must be allocated."""
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
    """Stands in `ManagedParam.attributes` for a tensor that shares the memory of the parameter itself."""


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

    Attributes that share the memory of the parameter itself are set to `memory`.
    """
    for name, value in attributes.items():
        if vars(parameter).get(name) is None:
            setattr(parameter, name, memory if value is _OwnMemory else value)


def is_packed(parameter: Any) -> bool:
    """Return True if the elements are packed bits, regardless of the dtype. Casts would destroy such elements."""
    return getattr(parameter, _QUANT_STATE, None) is not None


def load_quant_states(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Load the scales of packed parameters from entries such as `weight.absmax`, and remove these from `state_dict`.

    Quantized layers save these entries but have no method to load them, so torch would report the entries as
    unexpected.
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
    """Set the scales of a packed parameter in place, because the layer and its parameters share the scales."""
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
