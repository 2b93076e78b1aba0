"""State dicts of a wrapped module: saving and loading."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
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
from ..errors import StateError
from ..names import CHECKPOINT_PREFIX, FSDP_PREFIX, clean_tensor_name
from ..torch_private import as_dtensor, read_sharded_tensor
from .api import (
    FullStateDictConfig,
    StateDictType,
)
from .flat_parameter import FLAT_PARAM, flat_sharded_of
from .sharded_tensors import full_tensor, is_sharded, offloaded, shard_flat, shard_tensor
from .state import WrapperState
from .summon import summon_full_params
from .tensor_parallel import full_value, tp_part


class StateDictHandler:
    """Saves and loads the parameters and buffers of one unit; units inside it have handlers of their own.

    `wrapper_prefix`: what the wrapper adds to the names of what it wraps.
    """

    def __init__(self, state: WrapperState, wrapper_prefix: str = FSDP_PREFIX):
        self._state, self._wrapper_prefix = state, wrapper_prefix
        self._summoned: ExitStack | None = None
        self._missing: list[str] = []
        """Keys of other units' parameters that the state dict to load does not have."""

    @property
    def _type(self) -> StateDictType:
        """Of a unit that is not sharded, a full one whatever is set."""
        state_dict_type = self._state.settings.state_dict_type
        if state_dict_type is not StateDictType.FULL_STATE_DICT and not self._state.call.groups.traits.shards:
            warnings.warn(f"NO_SHARD has full state dicts only; {state_dict_type.name} is ignored.", stacklevel=5)
            return StateDictType.FULL_STATE_DICT
        return state_dict_type

    # -- saving ---------------------------------------------------------------------------------------------

    def save(self, module: nn.Module, fill: Any, prefix: str) -> Any:
        """`fill()` is the module's own `state_dict`, in which the entries of this unit are converted."""
        if self._type is StateDictType.LOCAL_STATE_DICT:
            return self._save_local(module, fill, prefix)
        with summon_full_params(module, recurse=False, writeback=False, shared=False):
            state_dict = fill()
            self._convert_entries(module, state_dict, prefix)
        self._save_shared(module, state_dict, prefix)
        return _without_prefixes(state_dict, prefix)

    @property
    def _drops(self) -> bool:
        """Whether this rank's state dict is without parameters and buffers."""
        config = self._state.settings.state_dict_config
        return isinstance(config, FullStateDictConfig) and config.rank0_only and not self._is_first_rank()

    @torch.no_grad()
    def _convert_entries(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Convert parameters to the type that is set, buffers to their original dtypes; `rank0_only` removes both."""
        config, drop = self._state.settings.state_dict_config, self._drops
        storages = self._unsharded_storages()
        dtypes = self._buffer_dtypes(module, prefix)
        tensor_parallel = self._tensor_parallel_names(module, prefix)
        for key, value in list(state_dict.items()):
            if not key.startswith(prefix) or not isinstance(value, torch.Tensor):
                continue
            if isinstance(value, DTensor) and clean_tensor_name(key) in tensor_parallel:
                value = value.detach()
                state_dict[key] = self._to_save(value, config.offload_to_cpu)  # all ranks, also those that drop it
                if drop:
                    del state_dict[key]
            elif is_sharded(value):
                continue
            elif value.untyped_storage().data_ptr() in storages and value.numel():
                if drop:
                    del state_dict[key]
                else:
                    state_dict[key] = self._to_save(value.detach(), config.offload_to_cpu)
            elif key in dtypes:
                if drop:
                    del state_dict[key]
                else:
                    state_dict[key] = offloaded(value.detach().to(dtypes[key]), config.offload_to_cpu)

    def _is_first_rank(self) -> bool:
        """Whether this rank keeps a full state dict with `rank0_only`: one rank of those that share the model."""
        meshes = self._state.tensor_parallel_meshes()
        return self._state.transports[0].rank == 0 and not any(any(mesh.get_coordinate() or ()) for mesh in meshes)

    def _tensor_parallel_names(self, module: nn.Module, prefix: str) -> set[str]:
        if not any(param.tp_spec is not None for param in self._state.unit.params):
            return set()
        return {clean_tensor_name(key) for key, param in self._own_keys(module, prefix) if param.tp_spec is not None}

    def _buffer_dtypes(self, module: nn.Module, prefix: str) -> dict[str, torch.dtype]:
        """The original dtype of each buffer of the unit, by its key."""
        dtypes = self._state.original_buffer_dtypes()
        named = nn.Module.named_buffers(module, remove_duplicate=False)
        return {prefix + _key(name): dtypes[id(buffer)] for name, buffer in named if id(buffer) in dtypes}

    def _unsharded_storages(self) -> set[int]:
        """The storages of the unsharded parameters."""
        return {
            param.unsharded_view.untyped_storage().data_ptr()
            for param in self._state.unit.params
            if param.unsharded_view is not None
        }

    def _to_save(self, unsharded: torch.Tensor, offload: bool) -> Any:
        """`unsharded`: a DTensor if it is tensor parallel. A full one is a plain tensor all the same."""
        if self._type is StateDictType.SHARDED_STATE_DICT:
            return shard_tensor(unsharded, self._state, offload)
        if isinstance(unsharded, DTensor):
            return offloaded(full_value(unsharded), offload).clone()
        return offloaded(unsharded, offload) if offload and unsharded.device.type != "cpu" else unsharded.clone()

    @torch.no_grad()
    def _save_shared(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Parameters of other units, under the names that they have in this one."""
        offload = self._state.settings.state_dict_config.offload_to_cpu
        for owner, entries in self._shared_keys(module, prefix):
            with summon_full_params(owner.modules()[0], recurse=False, writeback=False, shared=False):
                for key, param, _ in entries:
                    assert param.unsharded is not None
                    state_dict[key] = self._to_save(param.unsharded.detach(), offload)  # all ranks
                    if self._drops:
                        del state_dict[key]

    def _borrowed_keys(self, module: nn.Module, prefix: str) -> list[tuple[str, ManagedParam, ParamLocation]]:
        """The keys of parameters that belong to other units."""
        return self._keys(module, prefix, self._state.unit.borrowed)

    def _shared_keys(
        self, module: nn.Module, prefix: str
    ) -> list[tuple[WrapperState, list[tuple[str, ManagedParam, ParamLocation]]]]:
        """The same by unit, without units that are summoned now together with all places of their parameters."""
        keys = self._borrowed_keys(module, prefix)
        owners = [owner for owner in self._state.owners if not owner.in_summon_full_params]
        return [(owner, [entry for entry in keys if entry[1] in owner.unit.params]) for owner in owners]

    def _save_local(self, module: nn.Module, fill: Any, prefix: str) -> Any:
        self._flat_sharded()  # may refuse, so before anything is done
        state_dict = fill()
        self._replace_by_flat_param(module, state_dict, prefix)
        self._convert_entries(module, state_dict, prefix)
        return _without_prefixes(state_dict, prefix)

    def _replace_by_flat_param(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Put this rank's shard of the flat parameter in place of the original parameters."""
        sharded = self._flat_sharded()
        if sharded is None:
            return
        if self._state.call.use_orig_params:
            own = [key for key, _ in self._own_keys(module, prefix)]
            for key in own + [key for key, *_ in self._borrowed_keys(module, prefix)]:
                state_dict.pop(key, None)
        local = offloaded(sharded.flat.local.detach(), self._state.settings.state_dict_config.offload_to_cpu)
        state_dict[self._flat_key(prefix)] = shard_flat(local, sharded.flat.length, self._state.call.groups.own)

    def _flat_key(self, prefix: str) -> str:
        return f"{prefix}{self._wrapper_prefix}{FLAT_PARAM}"

    def _flat_sharded(self) -> FlatShardedParams | None:
        if self._state.call.groups.mesh is not None:
            raise StateError(
                "LOCAL_STATE_DICT is not for modules that were wrapped with a device_mesh. Set SHARDED_STATE_DICT."
            )
        return flat_sharded_of(self._state.unit)

    # -- loading --------------------------------------------------------------------------------------------

    def begin_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Rename the entries as the wrapped module expects them, and unshard the unit until `end_loading`."""
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
        groups, device = self._state.call.groups, self._state.unit.device
        own = self._own_keys(module, prefix)
        for key, param in own:
            if param.tp_spec is not None:
                state_dict.update(self._tensor_parallel_entry(key, param, state_dict.get(key)))
            elif is_sharded(state_dict.get(key)):
                state_dict[key] = full_tensor(state_dict[key], groups.own, device)
        self._load_shared(module, state_dict, prefix)
        self._unshard(module, writeback=True)
        self._skip_shared(module, state_dict, prefix)
        for key, param in own:
            # PyTorch's helpers fill in what a checkpoint lacks with the model's own parameter, which is sharded.
            if state_dict.get(key) is param.sharded and param.unsharded is not None:
                state_dict[key] = param.unsharded

    def _tensor_parallel_entry(self, key: str, param: ManagedParam, value: Any) -> dict[str, Any]:
        """The entry as the DTensor that the module holds while it is unsharded; another shape is left for torch."""
        spec = param.tp_spec
        if spec is None or not isinstance(value, torch.Tensor) or value is param.sharded or value.shape != spec.shape:
            return {}
        return {key: as_dtensor(tp_part(param, value), spec)}

    def end_loading(self, incompatible: Any) -> None:
        self._reshard()
        incompatible.missing_keys.extend(self._missing)
        self._missing = []
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
            keys[:] = [clean_tensor_name(key) for key in keys]

    def _unshard(self, module: nn.Module, writeback: bool) -> None:
        """Enter `summon_full_params` until `_reshard`."""
        self._summoned = ExitStack()
        self._summoned.enter_context(summon_full_params(module, recurse=False, writeback=writeback, shared=False))

    def _reshard(self) -> None:
        stack, self._summoned = self._summoned, None
        if stack is not None:
            stack.close()

    def _own_keys(self, module: nn.Module, prefix: str) -> list[tuple[str, ManagedParam]]:
        """The key of each parameter, under all names that its module has."""
        unit = self._state.unit
        others = {id(location) for other in unit.sharers for _, location in other.borrowed}
        places = [(param, location) for param in unit.params for location in param.locations]
        mine = [place for place in places if id(place[1]) not in others]
        return [(key, param) for key, param, _ in self._keys(module, prefix, mine)]

    def _keys(
        self, module: nn.Module, prefix: str, places: list[tuple[ManagedParam, ParamLocation]]
    ) -> list[tuple[str, ManagedParam, ParamLocation]]:
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
        """Write what this unit's names have for parameters of other units into these."""
        if not self._state.owners:
            return
        self._state.find_root(module)
        groups, device = self._state.call.groups, self._state.unit.device
        for key, param, _ in self._borrowed_keys(module, prefix):
            if param.tp_spec is not None:
                state_dict.update(self._tensor_parallel_entry(key, param, state_dict.get(key)))
            elif is_sharded(state_dict.get(key)):
                state_dict[key] = full_tensor(state_dict[key], groups.own, device)
        for owner, entries in self._shared_keys(module, prefix):
            with summon_full_params(owner.modules()[0], recurse=False, writeback=True, shared=False):
                for key, param, _ in entries:
                    value = state_dict.get(key)
                    assert param.unsharded is not None
                    if value is not None and value is not param.sharded and value.shape == param.unsharded.shape:
                        param.unsharded.copy_(value)

    def _skip_shared(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """What `_load_shared` has loaded is not loaded again."""
        for key, _, location in [entry for _, entries in self._shared_keys(module, prefix) for entry in entries]:
            if not self._state.call.use_orig_params:
                if state_dict.pop(key, None) is None:
                    self._missing.append(key)
            elif key in state_dict:
                state_dict[key] = location.parameters[location.name]

    def _load_local(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        sharded, key = self._flat_sharded(), self._flat_key(prefix)
        if self._state.call.use_orig_params:
            state_dict.update((name, param.sharded) for name, param, _ in self._borrowed_keys(module, prefix))
        if sharded is None or not is_sharded(state_dict.get(key)):
            return
        self._state.wait_for_uploads()
        self._state.unit.reshard()  # the shard is loaded, not the unsharded parameters
        mine = sharded.flat.local.detach().clone()
        _, _, local = read_sharded_tensor(state_dict[key])
        if local is not None:
            mine[: local.numel()] = local.to(mine.device)
        if not self._state.call.use_orig_params:
            state_dict[key] = mine
            return
        del state_dict[key]
        begins = {sharded.params[index]: begin // mine.element_size() for index, begin in sharded.shard.ranges()}
        for name, param in self._own_keys(module, prefix):
            begin = begins.get(param, 0)  # a parameter without elements on this rank has no begin
            state_dict[name] = mine[begin : begin + param.sharded.numel()]


class HookedStateDictHandler(StateDictHandler):
    """The same by hooks on the module, for the legacy call, which has no wrapper."""

    def __init__(self, state: WrapperState):
        super().__init__(state, wrapper_prefix="")

    def attach(self, module: nn.Module) -> None:
        module.register_state_dict_pre_hook(self._begin_saving)
        # torch sets an attribute on this hook, which a method cannot have.
        module.register_state_dict_post_hook(partial(self._end_saving))
        module.register_load_state_dict_pre_hook(self._begin_loading)
        module.register_load_state_dict_post_hook(self._end_loading)

    def _begin_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._reshard()
        if self._type is StateDictType.LOCAL_STATE_DICT:
            self._flat_sharded()  # may refuse
        else:
            self._unshard(module, writeback=False)

    def _end_saving(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self._type is StateDictType.LOCAL_STATE_DICT:
            self._replace_by_flat_param(module, state_dict, prefix)
        self._convert_entries(module, state_dict, prefix)
        self._reshard()
        if self._type is not StateDictType.LOCAL_STATE_DICT:
            self._save_shared(module, state_dict, prefix)

    def _begin_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
        self.begin_loading(module, state_dict, prefix)

    def _end_loading(self, module: nn.Module, incompatible_keys: Any) -> None:
        self._reshard()


def _key(name: str) -> str:
    """A name below a unit as its hooks see it: without what activation checkpointing adds in hooks of its own."""
    return clean_tensor_name(name, (CHECKPOINT_PREFIX,))


def _without_prefixes(state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Remove the prefixes of wrappers from the keys."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[prefix + clean_tensor_name(key.removeprefix(prefix))] = state_dict.pop(key)
    return state_dict
