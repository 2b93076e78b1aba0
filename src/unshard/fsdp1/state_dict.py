"""Saves and loads state dicts of wrapped modules, and sets the type of these state dicts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..engine.api import (
    FlatShardedParams,
    ManagedParam,
    ParamLocation,
    load_quant_states,
    refuse_shards_of_another_rank,
)
from ..errors import ArgumentError, ConflictError, StateError
from ..names import CHECKPOINT_PREFIX, FSDP_PREFIX, clean_tensor_name
from ..torch_private import as_dtensor, read_sharded_tensor, stack_level_of_program
from .api import (
    CONFIGS,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    default_settings,
)
from .full_params import full_params, full_tensor, full_value, is_sharded, offloaded, shard_flat, shard_tensor, tp_local
from .state import FLAT_PARAM, WrapperState, flat_sharded_of, wrapper_states

Keys = list[tuple[str, ManagedParam, ParamLocation]]
"""Tuples (state dict key, parameter, location). The location says which module registers the parameter."""


class StateDictHandler:
    """Saves and loads the parameters and buffers of one unit. Units inside this unit have their own handlers.

    `wrapper_prefix` is the prefix that a wrapper adds to parameter names. Without a wrapper, it is empty.
    """

    def __init__(self, state: WrapperState, wrapper_prefix: str = FSDP_PREFIX):
        self._state, self._wrapper_prefix = state, wrapper_prefix
        self._summoned: ExitStack | None = None
        self._missing: list[str] = []
        """Keys of shared parameters that the state dict lacks. `end_loading` reports these keys as missing."""

    def attach(self, module: nn.Module) -> None:
        """Register hooks that save and load. Call this for `composable.fully_shard`, which creates no wrapper."""
        module.register_state_dict_pre_hook(self._begin_saving)
        # torch sets an attribute on this hook, which a bound method cannot have.
        module.register_state_dict_post_hook(partial(self._end_saving))
        module.register_load_state_dict_pre_hook(self.begin_loading)
        module.register_load_state_dict_post_hook(lambda *_: self._reshard())

    @property
    def _type(self) -> StateDictType:
        """The type that `set_state_dict_type` chose, or FULL_STATE_DICT if the unit is not sharded."""
        state_dict_type = self._state.settings.state_dict_type
        if state_dict_type is not StateDictType.FULL_STATE_DICT and self._state.groups.shards is None:
            message = f"NO_SHARD has full state dicts only; {state_dict_type.name} is ignored."
            warnings.warn(message, stacklevel=stack_level_of_program())
            return StateDictType.FULL_STATE_DICT
        return state_dict_type

    # -- saving ---------------------------------------------------------------------------------------------

    def save(self, module: nn.Module, fill: Any, prefix: str) -> Any:
        """Call `fill`, which is torch's own `state_dict`, and convert this unit's entries to the chosen type."""
        self._begin_saving(module)
        try:
            state_dict = fill()
            self._end_saving(module, state_dict, prefix)
        finally:
            self._reshard()
        for key in [key for key in state_dict if key.startswith(prefix)]:  # remove wrapper prefixes
            state_dict[prefix + clean_tensor_name(key.removeprefix(prefix))] = state_dict.pop(key)
        return state_dict

    def _begin_saving(self, module: nn.Module, *unused: Any) -> None:
        if not self._wrapper_prefix:
            self._reshard()  # if an earlier save failed, torch did not call the hook that reshards
        if self._type is StateDictType.LOCAL_STATE_DICT:
            self._flat_sharded()  # raises before anything changes
        else:
            self._unshard(module, writeback=False)

    def _end_saving(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
        local = self._type is StateDictType.LOCAL_STATE_DICT
        if local:
            self._replace_by_flat_param(module, state_dict, prefix)
        self._convert_entries(module, state_dict, prefix)
        self._reshard()
        if not local:
            self._save_shared(module, state_dict, prefix)

    @property
    def _drops(self) -> bool:
        # Only ranks that are first among the shards and in all tensor-parallel meshes save.
        config = self._state.settings.state_dict_config
        if not isinstance(config, FullStateDictConfig) or not config.rank0_only:
            return False
        meshes = self._state.tensor_parallel_meshes()
        return self._state.transports[0].rank != 0 or any(any(mesh.get_coordinate() or ()) for mesh in meshes)

    @torch.no_grad()
    def _convert_entries(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Convert parameters to the chosen type and buffers to their original dtypes. Drop both if `_drops` is True."""
        offload, drop = self._state.settings.state_dict_config.offload_to_cpu, self._drops
        views = [param.unsharded_view for param in self._state.unit.params]
        storages = {view.untyped_storage().data_ptr() for view in views if view is not None}
        originals = self._state.original_buffer_dtypes()
        buffers = nn.Module.named_buffers(module, remove_duplicate=False)
        dtypes = {prefix + _key(name): originals[id(buffer)] for name, buffer in buffers if id(buffer) in originals}
        own = self._own_keys(module, prefix)
        tensor_parallel = {clean_tensor_name(key) for key, param in own if param.tp_spec is not None}
        for key, value in list(state_dict.items()):
            if not key.startswith(prefix) or not isinstance(value, torch.Tensor):
                continue
            if isinstance(value, DTensor) and clean_tensor_name(key) in tensor_parallel:
                state_dict[key] = self._to_save(value.detach(), offload)  # a collective: all ranks call it
            elif is_sharded(value):
                continue
            elif value.untyped_storage().data_ptr() in storages and value.numel():
                state_dict[key] = None if drop else self._to_save(value.detach(), offload)
            elif key in dtypes:
                state_dict[key] = None if drop else offloaded(value.detach().to(dtypes[key]), offload)
            else:
                continue
            if drop:
                del state_dict[key]

    def _to_save(self, unsharded: torch.Tensor, offload: bool) -> Any:
        if self._type is StateDictType.SHARDED_STATE_DICT:
            return shard_tensor(unsharded, self._state, offload)
        if isinstance(unsharded, DTensor):
            return offloaded(full_value(unsharded), offload).clone()
        return offloaded(unsharded, offload) if offload and unsharded.device.type != "cpu" else unsharded.clone()

    @torch.no_grad()
    def _save_shared(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Save shared parameters that other units own, under the names that these parameters have in this unit."""
        offload = self._state.settings.state_dict_config.offload_to_cpu
        for owner, entries in self._shared_keys(module, prefix):
            owner.find_root(owner.modules()[0])
            with full_params([owner], writeback=False):
                for key, param, _ in entries:
                    assert param.unsharded is not None
                    state_dict[key] = self._to_save(param.unsharded.detach(), offload)  # a collective, as before
                    if self._drops:
                        del state_dict[key]

    def _borrowed_keys(self, module: nn.Module, prefix: str) -> Keys:
        return self._keys(module, prefix, self._state.unit.borrowed)  # shared parameters that other units own

    def _shared_keys(self, module: nn.Module, prefix: str) -> list[tuple[WrapperState, Keys]]:
        keys = self._borrowed_keys(module, prefix)
        # `summon_full_params` has already registered an owner's parameters on every module that shares them.
        owners = [owner for owner in self._state.owners if not owner.in_summon_full_params]
        return [(owner, [entry for entry in keys if entry[1] in owner.unit.params]) for owner in owners]

    def _replace_by_flat_param(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        sharded = self._flat_sharded()
        if sharded is None:
            return
        if self._state.use_orig_params:
            own = [key for key, _ in self._own_keys(module, prefix)]
            for key in own + [key for key, *_ in self._borrowed_keys(module, prefix)]:
                state_dict.pop(key, None)
        local = offloaded(sharded.flat.local.detach(), self._state.settings.state_dict_config.offload_to_cpu)
        state_dict[self._flat_key(prefix)] = shard_flat(local, sharded.flat.length, self._state.groups.own)

    def _flat_key(self, prefix: str) -> str:
        return f"{prefix}{self._wrapper_prefix}{FLAT_PARAM}"

    def _flat_sharded(self) -> FlatShardedParams | None:
        if self._state.groups.mesh is not None:
            raise StateError(
                "LOCAL_STATE_DICT does not support modules wrapped with a device_mesh. Set SHARDED_STATE_DICT."
            )
        return flat_sharded_of(self._state.unit)

    # -- loading --------------------------------------------------------------------------------------------

    def begin_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
        """Prepare the entries of `state_dict` for the wrapped module, and unshard the unit until loading ends."""
        self._reshard()
        load_quant_states(module, state_dict, prefix)
        state_dict_type = self._type
        if self._wrapper_prefix:
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[f"{prefix}{self._wrapper_prefix}{key.removeprefix(prefix)}"] = state_dict.pop(key)
        if state_dict_type is StateDictType.LOCAL_STATE_DICT:
            self._load_local(module, state_dict, prefix)
            return
        refuse_shards_of_another_rank(state_dict, prefix, self._state.full_state_dict)
        own = self._own_keys(module, prefix)
        self._unshard_entries(state_dict, own)
        self._load_shared(module, state_dict, prefix)
        self._unshard(module, writeback=True)
        self._skip_shared(module, state_dict, prefix)
        for key, param in own:
            # PyTorch's checkpoint functions replace missing entries by the model's own sharded parameters.
            if state_dict.get(key) is param.sharded and param.unsharded is not None:
                state_dict[key] = param.unsharded

    def _unshard_entries(self, state_dict: dict[str, Any], entries: Iterable[tuple[str, ManagedParam]]) -> None:
        """Convert sharded entries to unsharded tensors, and entries of tensor-parallel parameters to DTensors."""
        for key, param in entries:
            value, spec = state_dict.get(key), param.tp_spec
            if spec is None:
                if is_sharded(value):
                    state_dict[key] = full_tensor(value, self._state.groups.own, self._state.unit.device)
            elif isinstance(value, torch.Tensor) and value is not param.sharded and value.shape == spec.shape:
                state_dict[key] = as_dtensor(tp_local(param, value), spec)

    def end_loading(self, incompatible: Any) -> None:
        self._reshard()
        incompatible.missing_keys.extend(self._missing)
        self._missing = []
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
            keys[:] = [clean_tensor_name(key) for key in keys]

    def _unshard(self, module: nn.Module, writeback: bool) -> None:
        self._state.find_root(module)
        self._summoned = ExitStack()
        self._summoned.enter_context(full_params([self._state], writeback))

    def _reshard(self) -> None:
        stack, self._summoned = self._summoned, None
        if stack is not None:
            stack.close()

    def _own_keys(self, module: nn.Module, prefix: str) -> list[tuple[str, ManagedParam]]:
        """Return (key, parameter) for parameters that the unit owns, once for each name of the parameter's module."""
        unit = self._state.unit
        others = {id(location) for other in unit.sharers for _, location in other.borrowed}
        places = [(param, location) for param in unit.params for location in param.locations]
        mine = [place for place in places if id(place[1]) not in others]
        return [(key, param) for key, param, _ in self._keys(module, prefix, mine)]

    def _keys(self, module: nn.Module, prefix: str, places: list[tuple[ManagedParam, ParamLocation]]) -> Keys:
        names: dict[int, list[str]] = {}
        for name, inner in module.named_modules(remove_duplicate=False):
            names.setdefault(id(inner), []).append(f"{name}." if name else "")
        keys = []
        for param, location in places:
            paths = names.get(id(location.module()), [""])
            keys += [(prefix + _key(f"{path}{location.name}"), param, location) for path in paths]
        return keys

    @torch.no_grad()
    def _load_shared(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        if not self._state.owners:
            return
        self._state.find_root(module)
        self._unshard_entries(state_dict, [(key, param) for key, param, _ in self._borrowed_keys(module, prefix)])
        for owner, entries in self._shared_keys(module, prefix):
            owner.find_root(owner.modules()[0])
            with full_params([owner], writeback=True):
                for key, param, _ in entries:
                    value = state_dict.get(key)
                    assert param.unsharded is not None
                    if value is not None and value is not param.sharded and value.shape == param.unsharded.shape:
                        param.unsharded.copy_(value)

    def _skip_shared(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Prevent torch from loading shared parameters that `_load_shared` has already loaded."""
        for key, _, location in [entry for _, entries in self._shared_keys(module, prefix) for entry in entries]:
            if not self._state.use_orig_params:
                if state_dict.pop(key, None) is None:
                    self._missing.append(key)
            elif key in state_dict:
                state_dict[key] = location.parameters[location.name]

    def _load_local(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        sharded, key = self._flat_sharded(), self._flat_key(prefix)
        if self._state.use_orig_params:
            state_dict.update((name, param.sharded) for name, param, _ in self._borrowed_keys(module, prefix))
        if sharded is None or not is_sharded(state_dict.get(key)):
            return
        self._state.wait_for_uploads()
        self._state.unit.reshard()  # because torch must load into the sharded parameters
        mine = sharded.flat.local.detach().clone()
        _, _, local = read_sharded_tensor(state_dict[key])
        if local is not None:
            mine[: local.numel()] = local.to(mine.device)
        if not self._state.use_orig_params:
            state_dict[key] = mine
            return
        del state_dict[key]
        begins = {sharded.params[index]: begin // mine.element_size() for index, begin in sharded.shard.ranges()}
        for name, param in self._own_keys(module, prefix):
            begin = begins.get(param, 0)  # a parameter without elements on this rank has no begin
            state_dict[name] = mine[begin : begin + param.sharded.numel()]


def _key(name: str) -> str:
    # State dicts do not contain the prefixes of checkpoint wrappers, because hooks of these wrappers remove them.
    return clean_tensor_name(name, (CHECKPOINT_PREFIX,))


# -- the type of state dicts -------------------------------------------------------------------------------------


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the state dict type of all wrapped modules in `module`. Return the previous settings.

    `state_dict_config` and `optim_state_dict_config` are options of `state_dict_type`, such as a `FullStateDictConfig`.
    Raises an ArgumentError for another type, and a StateError for options of another type.
    """
    warnings.warn(
        # PyTorch's checkpoint helpers ignore warnings that begin with these words.
        "FSDP.state_dict_type() and FSDP.set_state_dict_type() are deprecated, as in PyTorch. After "
        "unshard.dropin.install(), use get_state_dict and set_state_dict of torch.distributed.checkpoint.state_dict. "
        "Otherwise keep using these, with optim_state_dict and optim_state_dict_to_load for the optimizer.",
        FutureWarning,
        stacklevel=stack_level_of_program(),
    )
    given: Any = state_dict_type
    if not isinstance(given, StateDictType):
        names = ", ".join(f"StateDictType.{each.name}" for each in StateDictType)
        raise ArgumentError(f"state_dict_type must be one of {names}, got {given!r}.")
    expected, expected_optim = CONFIGS[state_dict_type]
    config = state_dict_config or expected()
    optim_config = optim_state_dict_config or expected_optim()
    for each, wanted in ((config, expected), (optim_config, expected_optim)):
        if type(each) is not wanted:
            raise StateError(f"{state_dict_type.name} takes a {wanted.__name__}, got a {type(each).__name__}.")
    states = wrapper_states(module)
    before = get_state_dict_type(module)
    for state in states:
        state.settings = StateDictSettings(state_dict_type, _for_mesh(state, config), _for_mesh(state, optim_config))
    return before


def _for_mesh(state: WrapperState, config: Any) -> Any:
    if isinstance(config, ShardedStateDictConfig | ShardedOptimStateDictConfig):
        return replace(config, _use_dtensor=state.groups.mesh is not None)
    return config


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the state dict settings of all wrapped modules in `module`. Raise a ConflictError if they differ."""
    found: StateDictSettings | None = None
    for state in wrapper_states(module):
        if found is not None and state.settings != found:
            raise ConflictError(
                f"Wrapped modules disagree about the type of state dict: {found} and {state.settings} in "
                f"{state.unit}. Call set_state_dict_type with a module that contains all of them."
            )
        found = state.settings
    return found or default_settings()


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """A context manager that sets the type of state dicts, and restores the previous settings on exit.

    `module`, `state_dict_type`, `state_dict_config` and `optim_state_dict_config` are those of `set_state_dict_type`.
    """
    before = [(state, state.settings) for state in wrapper_states(module)]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for state, settings in before:
            state.settings = settings
