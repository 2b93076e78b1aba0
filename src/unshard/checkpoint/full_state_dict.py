"""Full state dicts: the state dict of the unsharded model, from and into a sharded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from ..names import ALL_PREFIXES, behind_data_parallel, clean_tensor_name
from ..state.boxes import Box, full_box
from ..state.model import EXTRA, HeldTensor, ModelState, model_state, non_persistent_names
from .files import copy_pieces
from .full_tensors import Gathering, broadcast, sending_device_type
from .matching import Differences, LoadedNames, fill, match
from .plan import Described, TensorEntry, describe
from .ranks import begin, on_first_rank, rank_and_size, together
from .values import name_of_dtype


class RankPart(NamedTuple):
    """What one rank holds of a model or its optimizer; the ranks exchange these."""

    tensors: dict[str, Described]
    aliases: dict[str, str]
    names: list[str]
    """All names of the model's state dict on this rank, in its order."""
    device_type: str
    optimizer: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        state: ModelState,
        tensors: list[HeldTensor],
        optimizer: dict[str, Any] | None = None,
    ) -> RankPart:
        device_type = sending_device_type([each.local for each in tensors])
        return cls(describe(tensors), state.aliases, _names(model, state), device_type, optimizer)


def full_state_dict(model: nn.Module, *, rank0_only: bool = True, cpu_offload: bool = True) -> dict[str, Any]:
    """Return the state dict of the unsharded model: full tensors, by names without the prefixes of wrappers.

    All ranks must call it. The tensors are copies, gathered one at a time. With `rank0_only`, other ranks get an empty
    dict. Without `cpu_offload`, tensors are on the devices of the sharded ones.
    """
    what, state = "Gathering the full state dict", ModelState()

    def collect() -> RankPart:
        nonlocal state
        state = model_state(model)
        return RankPart.of(model, state, state.tensors)

    begin("gather the full state dict", model)
    ranks = together(what, collect)
    gathering = Gathering([each.tensors for each in ranks], state.tensors, ranks[0].device_type)
    found: dict[str, Any] = {
        name.removeprefix("model/"): tensor for name, tensor in gathering.tensors(rank0_only, cpu_offload)
    }
    found |= _extra_states(what, state, ranks)
    rank, _ = rank_and_size()
    if rank and rank0_only:
        return {}
    for part in ranks:
        found |= {
            alias.removeprefix("model/"): found[name.removeprefix("model/")] for alias, name in part.aliases.items()
        }
    return {name: found[name] for name in dict.fromkeys(name for part in ranks for name in part.names)}


def _extra_states(what: str, state: ModelState, ranks: list[RankPart]) -> dict[str, Any]:
    """Extra states of modules, each from the lowest rank that has the module."""
    rank, _ = rank_and_size()
    names = [[name for name in part.names if is_extra(name)] for part in ranks]
    if not any(names):
        return {}
    mine = set(names[rank]) - {name for lower in names[:rank] for name in lower}
    found = together(
        what,
        lambda: {n: module.get_extra_state() for key, module in state.extra.items() if (n := _extra_name(key)) in mine},
    )
    return {name: value for each in found for name, value in each.items()}


def _names(model: nn.Module, state: ModelState) -> list[str]:
    """All names of the state dict, including tied ones, in torch's order."""
    paths = dict.fromkeys(
        clean_tensor_name(f"{path}.", ALL_PREFIXES).rstrip(".")
        for path, _ in behind_data_parallel(model).named_modules(remove_duplicate=False)
    )
    order = {path: number for number, path in enumerate(paths)}
    names = [each.name for each in state.tensors]
    names = [name.removeprefix("model/") for name in (*names, *state.aliases)] + [*map(_extra_name, state.extra)]

    def place(name: str) -> int:
        path = name.rpartition(".")[0]
        while path not in order:  # names that a module adds itself may contain dots
            path = path.rpartition(".")[0]
        return order[path]

    return sorted(names, key=place)


def is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA


def _extra_name(path: str) -> str:
    return f"{path}.{EXTRA}" if path else EXTRA


# -- loading ------------------------------------------------------------------------------------------------


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None = None, *, strict: bool = True
) -> LoadedNames:
    """Load rank 0's full state dict into a model that may be sharded.

    All ranks must call it; the argument of other ranks is ignored. Tensors are broadcast one at a time. Allocate a
    model on the meta device first, with `model.to_empty(device=...)`. Floating-point tensors are converted to the
    dtypes of the model. If names are missing or unexpected, or shapes or dtypes do not match, all ranks raise a
    CheckpointError and nothing changes. `strict=False` allows missing and unexpected names and loads the rest.
    """
    what, loading = "Loading a full state dict", FullLoading()
    begin("load a full state dict", model)
    loading.source = FullSource(on_first_rank(what, lambda: _describe(state_dict, model)), state_dict)
    answers = together(what, lambda: loading.compare(model))
    found = Differences.of_all_ranks([differences for differences, _ in answers])
    names = {names for _, chosen in answers for names in chosen}
    found.wrong += on_first_rank(what, lambda: loading.source.different_ties(names))
    found.refuse("The state dict", strict, what="state dict")
    loading.apply({first for first, *_ in names})
    together(what, loading.finish)
    return LoadedNames(sorted(found.missing), sorted(found.unexpected), non_persistent_names(model))


Description = tuple[dict[str, TensorEntry], dict[str, Any], str]
"""Rank 0's state dict for the other ranks: tensors, extra states, and the device type to send from."""


def _describe(state_dict: Mapping[str, Any] | None, model: nn.Module) -> Description:
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"Rank 0 must pass the full state dict, got {type(state_dict).__name__}.")
    tensors, extra = {}, {}
    for key in state_dict:
        name = clean_tensor_name(key, ALL_PREFIXES)
        if name in tensors or name in extra:
            raise CheckpointError(f"Two entries of the state dict have the name {name!r}.")
        if is_extra(name):
            extra[name] = state_dict[key]
        else:
            tensors[name] = entry_of(state_dict[key], repr(key))
    return tensors, extra, sending_device_type([*model.parameters()])


def entry_of(value: Any, where: str) -> TensorEntry:
    """Describe a full tensor for the other ranks."""
    is_full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not is_full or value.layout is not torch.strided or value.is_meta:
        about = f" of layout {value.layout} on {value.device}" if is_full else ""
        raise CheckpointError(
            f"{where} is a {type(value).__name__}{about}. A full state dict must hold dense, unsharded tensors."
        )
    return TensorEntry(name_of_dtype(value.dtype, where), tuple(value.shape))


class FullSource:
    """Rank 0's state dict. All ranks receive one tensor at a time."""

    prefix, casts = "", True

    def __init__(self, description: Description, state_dict: Mapping[str, Any] | None):
        self.entries, self.extra, self._device_type = description
        self.aliases: dict[str, str] = {}
        rank, _ = rank_and_size()
        self._state_dict: Mapping[str, Any] = {} if rank or state_dict is None else state_dict
        self._keys = {clean_tensor_name(key, ALL_PREFIXES): key for key in self._state_dict}
        self._received = torch.empty(0)

    def different_ties(self, tied: set[tuple[str, ...]]) -> list[str]:
        """On rank 0: tensors that are tied in the model and differ in the state dict, in words."""
        return [
            f"{first} and {other} are tied here, and are two different tensors in the state dict"
            for first, *others in sorted(tied)
            for other in others
            if not _same_bytes(self._tensor(first), self._tensor(other))
        ]

    def _tensor(self, name: str) -> Any:
        return self._state_dict[self._keys[name]].detach() if name in self._keys else None

    def receive(self, name: str) -> None:
        """Broadcast a tensor from rank 0; all ranks must call. The previous one is freed first."""
        self._received = torch.empty(0)
        self._received = broadcast(self._tensor(name), self.entries[name], self._device_type)

    def copy(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Copy from the tensor that was received last."""
        copy_pieces(target, self._received[box.slices_in(full_box(self.entries[name].shape))])


class FullLoading:
    """One load on one rank."""

    source: FullSource

    def __init__(self) -> None:
        self._model = ModelState()
        self._targets: dict[str, HeldTensor] = {}
        """By the name in the state dict."""

    def compare(self, model: nn.Module) -> tuple[Differences, list[tuple[str, ...]]]:
        """Returns the differences, and for each tensor the names in the state dict that are tied here."""
        differences, self._model = Differences(), model_state(model)
        found = match(self._model, self.source, differences)
        self._targets = {names[0]: held for held, names in found}
        extra = {_extra_name(path) for path in self._model.extra}
        differences.missing.update(dict.fromkeys(extra - self.source.extra.keys(), 0))
        differences.unexpected.update(dict.fromkeys(self.source.extra.keys() - extra, 0))
        return differences, [tuple(names) for _, names in found]

    def apply(self, names: set[str]) -> None:
        for name in self.source.entries:
            if name in names:
                self.source.receive(name)
                if name in self._targets:
                    fill(self._targets[name], name, self.source)

    def finish(self) -> None:
        self._model.finish_loading(self._targets.values())
        for path, module in self._model.extra.items():
            if (name := _extra_name(path)) in self.source.extra:
                module.set_extra_state(self.source.extra[name])


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.device != other.device:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)
