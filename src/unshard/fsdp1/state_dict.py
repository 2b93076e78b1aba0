"""State dicts of a wrapped module: which type is set, saving and loading, and sharded tensors in them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..comm.transports import transport_for
from ..engine.api import FlatShardedParams, ManagedParam, ParamLocation, refuse_shards_of_another_rank
from ..errors import ArgumentError, ConflictError, StateError
from ..layout.rows import RowSharding
from ..names import CHECKPOINT_PREFIX, FSDP_PREFIX, clean_tensor_name
from ..torch_private import ShardedTensor, as_dtensor, make_dtensor, make_sharded_tensor, read_sharded_tensor
from .api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    default_settings,
)
from .flat_parameter import FLAT_PARAM, flat_sharded_of
from .state import WrapperState, wrapper_states
from .summon import summon_full_params
from .tensor_parallel import full_value, shard_on_meshes, tp_part

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the type for all wrapped modules below `module`; returns the previous settings."""
    warnings.warn(
        # PyTorch's helpers for checkpoints ignore a warning that begins so.
        "FSDP.state_dict_type() and FSDP.set_state_dict_type() are deprecated, as in PyTorch. get_state_dict and "
        "set_state_dict of torch.distributed.checkpoint.state_dict take the model after unshard.dropin.install(); "
        "without that, use these, with optim_state_dict and optim_state_dict_to_load for the optimizer.",
        FutureWarning,
        stacklevel=3,
    )
    given: Any = state_dict_type
    if not isinstance(given, StateDictType):
        names = ", ".join(f"StateDictType.{each.name}" for each in StateDictType)
        raise ArgumentError(f"state_dict_type must be one of {names}, got {given!r}.")
    expected, expected_optim = _CONFIGS[state_dict_type]
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
    """Sharded tensors are DTensors if the module was wrapped with a mesh."""
    if isinstance(config, ShardedStateDictConfig | ShardedOptimStateDictConfig):
        return replace(config, _use_dtensor=state.call.groups.mesh is not None)
    return config


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """The settings of all wrapped modules below `module`, which must be the same."""
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
    """The same as `set_state_dict_type`, until the context ends."""
    before = [(state, state.settings) for state in wrapper_states(module)]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for state, settings in before:
            state.settings = settings


# -- saving and loading -----------------------------------------------------------------------------------------------


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
                    state_dict[key] = _offloaded(value.detach().to(dtypes[key]), config.offload_to_cpu)

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
        dtypes = self._state.own_buffers.original_dtypes()
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
            return _offloaded(full_value(unsharded), offload).clone()
        return _offloaded(unsharded, offload) if offload and unsharded.device.type != "cpu" else unsharded.clone()

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
        local = _offloaded(sharded.flat.local.detach(), self._state.settings.state_dict_config.offload_to_cpu)
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


def _offloaded(tensor: torch.Tensor, offload: bool) -> torch.Tensor:
    return tensor.cpu() if offload else tensor


# -- sharded tensors --------------------------------------------------------------------------------------------------


def shard_tensor(unsharded: torch.Tensor, state: WrapperState, offload: bool) -> Any:
    """An unsharded parameter, or a state of it, as a sharded state dict has it; a DTensor if it is tensor parallel.

    In a model with tensor parallelism, plain parameters are on the same mesh as the others, replicated.
    """
    groups, meshes = state.call.groups, state.tensor_parallel_meshes()
    if isinstance(unsharded, DTensor):
        return shard_on_meshes(unsharded, groups, unsharded.device_mesh, offload)
    if len(meshes) == 1 and groups.mesh is not None:
        return shard_on_meshes(unsharded, groups, meshes[0], offload)
    return shard_rows(_offloaded(unsharded, offload), groups.own, groups.mesh)


def shard_rows(unsharded: torch.Tensor, group: Any, mesh: DeviceMesh | None) -> Any:
    """This rank's rows, as a DTensor on the mesh or, without one, as a ShardedTensor of the group.

    A rank without rows has an empty shard: `torch.distributed.checkpoint` leaves out a ShardedTensor without shards on
    a rank, takes the checkpoint for one of an old version then, and does not find the optimizer's `param_groups`.
    """
    cut = RowSharding(tuple(unsharded.shape), group.size())
    rows = unsharded.narrow(0, *cut.rows(group.rank())).clone()
    if mesh is not None:
        placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
        return make_dtensor(rows, mesh, placements, unsharded.shape)
    shards = []
    for rank in range(group.size()):
        offsets = [cut.rows(rank)[0], *[0] * (unsharded.ndim - 1)]
        shards.append((offsets, list(cut.local_shape(rank)), dist.get_global_rank(group, rank)))
    return make_sharded_tensor(rows, shards, tuple(unsharded.shape), group)


def shard_flat(local: torch.Tensor, length: int, group: Any) -> Any:
    """This rank's shard of a flat tensor, which has padding, as a ShardedTensor without padding."""
    shard_numel, rank = local.numel(), group.rank()
    shards = []
    for each in range(group.size()):
        first, count = each * shard_numel, min(max(length - each * shard_numel, 0), shard_numel)
        if count or (each == 0 and not length):  # torch refuses a ShardedTensor without shards
            shards.append(([first], [count], dist.get_global_rank(group, each)))
    mine = min(max(length - rank * shard_numel, 0), shard_numel)
    return make_sharded_tensor(local[:mine].clone(), shards, (length,), group)


def is_sharded(value: Any) -> bool:
    return isinstance(value, DTensor | ShardedTensor)


@torch.no_grad()
def full_tensor(value: Any, group: Any, device: torch.device) -> Any:
    """A DTensor or ShardedTensor unsharded; another value as it is. All ranks of the group have to call."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    shape, dtype, local = read_sharded_tensor(value)
    cut = RowSharding(shape, group.size())
    padded = torch.zeros((cut.chunk, *shape[1:]), dtype=dtype, device=device)
    if local is not None:
        padded[: local.shape[0]] = local.to(device)
    if group.size() == 1:
        return padded[: shape[0]]
    unsharded = torch.empty((cut.chunk * group.size(), *shape[1:]), dtype=dtype, device=device)
    transport_for(group, device).all_gather([unsharded.view(torch.uint8)], [padded.view(torch.uint8)]).wait()
    return unsharded[: shape[0]]
