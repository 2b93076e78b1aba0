"""Values that would be lost or land in the wrong place: writes to unsharded parameters, state dicts of shards."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import ParameterError, listed
from ...torch_private import ShardedTensor, stack_level_of_program

FULL_STATE_DICT = "unshard.checkpoint.full_state_dict(model)"
"""The call that returns unsharded parameters, for messages."""


def refuse_lost_writes(unit: str, lost: list[str]) -> None:
    """`lost`: the names of the parameters, of this unit and of others."""
    raise ParameterError(
        f"{unit}: the program wrote {listed(map(repr, lost))} while the unit was kept for a later forward or backward. "
        "Modules then hold copies in the compute dtype, or slices, which cannot be copied back to the sharded "
        "parameters without losing precision. The writes are dropped, and the model stays usable. Write parameters "
        "while they are sharded: before forward, after backward, or after reshard() of the unit; with "
        "FullyShardedDataParallel, inside summon_full_params()."
    )


def warn_of_lost_writes(unit_name: str, written: list[str]) -> None:
    warnings.warn(
        f"Unsharded parameters of unit {unit_name!r} were written ({listed(written)}), and the writes are lost: the "
        "next all-gather overwrites them with the sharded parameters. Write parameters while they are sharded: before "
        "forward, after a backward that reshards, or after reshard() of the unit. A parameter that forward itself "
        "writes, as nn.Embedding(max_norm=...) does, must be excluded from sharding.",
        stacklevel=stack_level_of_program(),
    )


class _Metadata(OrderedDict[str, Any]):
    """The metadata of a state dict of shards, which warns when the state dict is pickled.

    Pickles, copies and prints like the metadata that it replaces.
    """

    def __init__(self, metadata: Any, state_dict: Any, full: str):
        super().__init__(metadata)
        self._state_dict, self._full = weakref.ref(state_dict), full

    def __repr__(self) -> str:
        return repr(OrderedDict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied, metadata = memo.get(id(self._state_dict())), copy.deepcopy(OrderedDict(self), memo)
        return metadata if copied is None else _Metadata(metadata, copied, self._full)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state_dict = self._state_dict()
        if state_dict is None or any(map(_is_cut, state_dict.values())):
            warnings.warn(
                f"A state dict of shards is being pickled by rank {dist.get_rank()}, which holds only its own shards. "
                "That is enough if every rank saves its own file and loads it into a model that is sharded over the "
                f"same number of ranks. For one file that any model can load, call {self._full} on all ranks and save "
                "the result, or save shards with torch.distributed.checkpoint.",
                stacklevel=stack_level_of_program(),
            )
        return OrderedDict(self).__reduce_ex__(protocol)


def warn_when_pickled(state_dict: Any, full: str) -> None:
    """Warn when `state_dict` is pickled. `full`: the call that returns unsharded parameters instead."""
    metadata = getattr(state_dict, "_metadata", None)  # a user's own dict has none
    if type(metadata) is OrderedDict and isinstance(state_dict, OrderedDict):
        state_dict._metadata = _Metadata(metadata, state_dict, full)  # type: ignore[attr-defined]


def _is_cut(value: Any) -> bool:
    """Return True if other ranks hold other elements of it."""
    if isinstance(value, DTensor):
        sizes = value.device_mesh.mesh.shape
        return any(size > 1 and not each.is_replicate() for size, each in zip(sizes, value.placements, strict=True))
    return isinstance(value, ShardedTensor) and dist.get_world_size() > 1


def refuse_plain_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Raise if values to load are unsharded. Torch's own error, one per parameter, does not name the reason."""
    for name, parameter in module.named_parameters():
        value = state_dict.get(prefix + name)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.numel() == 1:
            continue
        if isinstance(parameter, DTensor):
            raise ParameterError(
                f"The state dict to load on rank {dist.get_rank()} has a plain tensor for {prefix + name!r}, which is "
                f"sharded ({parameter.placements} over {parameter.device_mesh}). Load a full state dict with "
                "unshard.checkpoint.load_full_state_dict(model, state_dict) on all ranks, or make each value a DTensor "
                "first: distribute_tensor(value, parameter.device_mesh, parameter.placements)."
            )


def refuse_shards_of_another_rank(state_dict: dict[str, Any], prefix: str, full: str) -> None:
    """Raise if another rank saved the shards. Torch would copy them into this rank's shards without an error."""
    for name, value in state_dict.items():
        other = rank_of_other_shard(value) if name.startswith(prefix) else None
        if other is not None:
            raise ParameterError(
                f"The state dict to load on rank {dist.get_rank()} holds the shards of rank {other} ({name!r}). Each "
                f"rank can load only what it saved itself. For a file that all ranks load, save the result of {full}, "
                "called on all ranks, or use torch.distributed.checkpoint."
            )


def rank_of_other_shard(value: Any) -> int | None:
    """The rank that saved `value` if it is a DTensor with other rows than this rank's, else None."""
    if not isinstance(value, DTensor):
        return None
    ranks, theirs = value.device_mesh.mesh, value.device_mesh.get_coordinate()
    mine = (ranks == dist.get_rank()).nonzero().flatten().tolist()
    if not theirs or not mine:
        return None  # not a rank of this mesh, for which torch raises
    differ = [a != b and not each.is_replicate() for a, b, each in zip(theirs, mine, value.placements, strict=True)]
    return int(ranks[tuple(theirs)]) if any(differ) else None
