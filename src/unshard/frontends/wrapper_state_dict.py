"""State dicts of a wrapped module: full, sharded and local ones, out and in."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from ..engine.faces import Slot
from ..engine.flat_sharded import FlatSharded
from ..engine.hooks import WRAPPED
from ..engine.saved_shards import refuse_shards_of_another_rank
from ..errors import StateError
from ..torch_private import read_sharded_tensor
from .flatten import FLAT_PARAM, flat_sharded_of
from .sharded_tensors import cut_rows, flat_piece, is_sharded, whole_of
from .summon import summon_full_params
from .wrapper_api import FullStateDictConfig, StateDictType
from .wrapper_names import clean_tensor_name
from .wrapper_state import WrapperState


class StateDicts:
    """What a wrapper's `state_dict` and `load_state_dict` do for its own unit; units inside do their own.

    `between`: what the wrapper adds to the names of what it wraps.
    """

    def __init__(self, state: WrapperState, between: str = WRAPPED):
        self._state, self._between = state, between
        self._whole: ExitStack | None = None

    @property
    def _kind(self) -> StateDictType:
        """Without sharding there is nothing but full ones."""
        kind = self._state.settings.state_dict_type
        if kind is not StateDictType.FULL_STATE_DICT and not self._state.call.groups.meaning.cuts:
            warnings.warn(f"NO_SHARD has full state dicts only; {kind.name} is ignored.", stacklevel=5)
            return StateDictType.FULL_STATE_DICT
        return kind

    # -- out ------------------------------------------------------------------------------------------------

    def save(self, module: nn.Module, fill: Any, prefix: str) -> Any:
        """`fill()` is the module's own `state_dict`, into which this unit's entries are then put right."""
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            return self._save_local(module, fill, prefix)
        with summon_full_params(module, recurse=False, writeback=False):
            state_dict = fill()
            self._put_right(module, state_dict, prefix)
        return _renamed(state_dict, prefix)

    @torch.no_grad()
    def _put_right(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Own parameters as the kind says, buffers in their original dtypes; nothing on ranks that get none."""
        config = self._state.settings.state_dict_config
        drop = isinstance(config, FullStateDictConfig) and config.rank0_only and self._state.transports[0].rank != 0
        homes = self._storages()
        dtypes = self._buffer_dtypes(module, prefix)
        for key, value in list(state_dict.items()):
            if not key.startswith(prefix) or not isinstance(value, torch.Tensor) or is_sharded(value):
                continue
            if value.untyped_storage().data_ptr() in homes and value.numel():
                if drop:
                    del state_dict[key]
                else:
                    state_dict[key] = self._given(value.detach(), config.offload_to_cpu)
            elif key in dtypes:
                if drop:
                    del state_dict[key]
                else:
                    state_dict[key] = _moved(value.detach().to(dtypes[key]), config.offload_to_cpu)

    def _buffer_dtypes(self, module: nn.Module, prefix: str) -> dict[str, torch.dtype]:
        """The original dtype of each own buffer, by its key."""
        originals = self._state.own_buffers.originals()
        named = nn.Module.named_buffers(module, remove_duplicate=False)
        return {prefix + name: originals[id(buffer)] for name, buffer in named if id(buffer) in originals}

    def _storages(self) -> set[int]:
        """Where the unit lies while it is whole."""
        return {slot.anchor.untyped_storage().data_ptr() for slot in self._state.unit.slots if slot.anchor is not None}

    def _given(self, whole: torch.Tensor, offload: bool) -> Any:
        if self._kind is StateDictType.SHARDED_STATE_DICT:
            groups = self._state.call.groups
            return cut_rows(_moved(whole, offload), groups.own, groups.mesh)
        return _moved(whole, offload) if offload and whole.device.type != "cpu" else whole.clone()

    def _save_local(self, module: nn.Module, fill: Any, prefix: str) -> Any:
        self._flat()  # refuses before anything is done
        state_dict = fill()
        self._put_flat(module, state_dict, prefix)
        self._put_right(module, state_dict, prefix)
        return _renamed(state_dict, prefix)

    def _put_flat(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """This rank's piece of the unit, laid end to end, instead of its parameters."""
        sharded = self._flat()
        if sharded is None:
            return
        if sharded.originals:
            for key, _ in self._own_keys(module, prefix):
                state_dict.pop(key, None)
        local = _moved(sharded.flat.local.detach(), self._state.settings.state_dict_config.offload_to_cpu)
        state_dict[self._flat_key(prefix)] = flat_piece(local, sharded.flat.length, self._state.call.groups.own)

    def _flat_key(self, prefix: str) -> str:
        return f"{prefix}{self._between}{FLAT_PARAM}"

    def _flat(self) -> FlatSharded | None:
        if self._state.call.groups.mesh is not None:
            raise StateError("LOCAL_STATE_DICT is not for modules that were wrapped with a device_mesh.")
        return flat_sharded_of(self._state.unit)

    # -- in -------------------------------------------------------------------------------------------------

    def begin_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        """Put the names as the modules inside know them; be whole until `end_loading`."""
        self._abandon()
        kind = self._kind
        if self._between:
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[f"{prefix}{self._between}{key.removeprefix(prefix)}"] = state_dict.pop(key)
        if kind is StateDictType.LOCAL_STATE_DICT:
            self._load_local(module, state_dict, prefix)
            return
        refuse_shards_of_another_rank(state_dict, prefix, self._state.full_state_dict)
        groups, device = self._state.call.groups, self._state.unit.device
        own = self._own_keys(module, prefix)
        for key, _ in own:
            if is_sharded(state_dict.get(key)):
                state_dict[key] = whole_of(state_dict[key], groups.own, device)
        self._be_whole(module, writeback=True)
        for key, slot in own:
            # What a checkpoint lacks, PyTorch's helpers fill in with the model's own parameter, which is cut at rest.
            if state_dict.get(key) is slot.sharded and slot.full is not None:
                state_dict[key] = slot.full

    def end_loading(self, incompatible: Any) -> None:
        self._abandon()
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
            keys[:] = [clean_tensor_name(key) for key in keys]

    def _be_whole(self, module: nn.Module, writeback: bool) -> None:
        """Until `_abandon`."""
        self._whole = ExitStack()
        self._whole.enter_context(summon_full_params(module, recurse=False, writeback=writeback))

    def _abandon(self) -> None:
        stack, self._whole = self._whole, None
        if stack is not None:
            stack.close()

    def _own_keys(self, module: nn.Module, prefix: str) -> list[tuple[str, Slot]]:
        names = {id(inner): name for name, inner in module.named_modules()}
        keys = []
        for slot in self._state.unit.slots:
            for home in slot.homes:
                path = names.get(id(home.module()), "")
                keys.append((f"{prefix}{path}.{home.name}" if path else f"{prefix}{home.name}", slot))
        return keys

    def _load_local(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        sharded, key = self._flat(), self._flat_key(prefix)
        if sharded is None or not is_sharded(state_dict.get(key)):
            return
        self._state.wait_for_uploads()
        self._state.unit.reshard()  # the pieces are loaded, not whole parameters
        mine = sharded.flat.local.detach().clone()
        _, _, local = read_sharded_tensor(state_dict[key])
        if local is not None:
            mine[: local.numel()] = local.to(mine.device)
        if not sharded.originals:
            state_dict[key] = mine
            return
        del state_dict[key]
        begins = {sharded.slots[index]: begin // mine.element_size() for index, begin in sharded.master.spots()}
        for name, slot in self._own_keys(module, prefix):
            begin = begins.get(slot, 0)  # without elements here it is nowhere
            state_dict[name] = mine[begin : begin + slot.sharded.numel()]


class HookedStateDicts(StateDicts):
    """The same by hooks on the module itself: what the legacy call does, which has no wrapper."""

    def __init__(self, state: WrapperState):
        super().__init__(state, between="")

    def attach(self, module: nn.Module) -> None:
        module.register_state_dict_pre_hook(self._begin_saving)
        module.register_state_dict_post_hook(partial(self._end_saving))  # torch marks it, and methods take no marks
        module.register_load_state_dict_pre_hook(self._begin_loading)
        module.register_load_state_dict_post_hook(self._end_loading)

    def _begin_saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._abandon()
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            self._flat()  # refuses
        else:
            self._be_whole(module, writeback=False)

    def _end_saving(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self._kind is StateDictType.LOCAL_STATE_DICT:
            self._put_flat(module, state_dict, prefix)
        self._put_right(module, state_dict, prefix)
        self._abandon()

    def _begin_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
        self.begin_loading(module, state_dict, prefix)

    def _end_loading(self, module: nn.Module, incompatible_keys: Any) -> None:
        self._abandon()


def _renamed(state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Without the wrapper's part of the names."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[prefix + clean_tensor_name(key.removeprefix(prefix))] = state_dict.pop(key)
    return state_dict


def _moved(tensor: torch.Tensor, offload: bool) -> torch.Tensor:
    return tensor.cpu() if offload else tensor
