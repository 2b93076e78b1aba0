"""The state dict of the unsharded model, from and into a model that is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from ..names import ALL_PREFIXES, behind_data_parallel, clean_tensor_name
from ..state.model import EXTRA, HeldTensor, ModelState, model_state, non_persistent_names
from .differences import Differences, LoadedNames
from .full_tensors import Gathering, broadcast, fill, sending_device_type
from .plan import Described, TensorEntry, describe
from .ranks import begin, on_first_rank, rank_and_size, together
from .values import DTYPES, name_of_dtype


class RankPart(NamedTuple):
    """What one rank has of a model or of its optimizer; the ranks exchange these."""

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
    """The state dict that the unsharded model would have: full tensors, by the names without what wrappers add.

    All ranks have to call. The tensors are copies. With `rank0_only` the other ranks get an empty dict. Without
    `cpu_offload` tensors are on the devices of the sharded ones. Tensors are gathered one at a time.
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
    """The extra states of modules, each as the lowest rank that has the module has it."""
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
    """All names of the state dict, tied ones as well, in the order of the modules, as torch has them."""
    paths = dict.fromkeys(
        clean_tensor_name(f"{path}.", ALL_PREFIXES).rstrip(".")
        for path, _ in behind_data_parallel(model).named_modules(remove_duplicate=False)
    )
    order = {path: number for number, path in enumerate(paths)}
    names = [each.name for each in state.tensors]
    names = [name.removeprefix("model/") for name in (*names, *state.aliases)] + [*map(_extra_name, state.extra)]

    def place(name: str) -> int:
        path = name.rpartition(".")[0]
        while path not in order:  # what a module adds may have dots in the name that it gives
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
    """Load the state dict of an unsharded model, which rank 0 passes, into a model that may be sharded.

    All ranks have to call; what other ranks than rank 0 pass is not used. Tensors are broadcast one at a time. A model
    on the meta device is given memory first, by `model.to_empty(device=...)`. Floating-point tensors are converted to
    the dtypes of the model. If names are missing or unexpected, or shapes or dtypes do not fit, all ranks raise a
    CheckpointError and nothing is changed; `strict=False` loads what fits if only names are missing or unexpected.
    """
    what = "Loading a full state dict"
    begin("load a full state dict", model)
    loading = FullLoading(state_dict, on_first_rank(what, lambda: _describe(state_dict, model)))
    answers = together(what, lambda: loading.compare(model))
    found = Differences.of_all_ranks([differences for differences, _ in answers])
    names = {name for _, chosen in answers for name in chosen}
    found.wrong += on_first_rank(what, lambda: loading.different_ties(names))
    found.refuse("The state dict", strict, what="state dict")
    loading.apply({first for first, *_ in names})
    together(what, loading.finish)
    return LoadedNames(sorted(found.missing), sorted(found.unexpected), non_persistent_names(model))


class FullSource(NamedTuple):
    """What rank 0 has, for the other ranks."""

    tensors: dict[str, TensorEntry]
    extra: dict[str, Any]
    device_type: str


def _describe(state_dict: Mapping[str, Any] | None, model: nn.Module) -> FullSource:
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"Rank 0 has to pass the full state dict, got {type(state_dict).__name__}.")
    tensors, extra = {}, {}
    for key in state_dict:
        name = clean_tensor_name(key, ALL_PREFIXES)
        if name in tensors or name in extra:
            raise CheckpointError(f"Two entries of the state dict have the name {name!r}.")
        if is_extra(name):
            extra[name] = state_dict[key]
        else:
            tensors[name] = entry_of(state_dict[key], repr(key))
    return FullSource(tensors, extra, sending_device_type([*model.parameters()]))


def entry_of(value: Any, where: str) -> TensorEntry:
    """A full tensor, for the other ranks."""
    is_full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not is_full or value.layout is not torch.strided or value.is_meta:
        about = f" of layout {value.layout} on {value.device}" if is_full else ""
        raise CheckpointError(
            f"{where} is a {type(value).__name__}{about}. A full state dict holds dense tensors that are not sharded."
        )
    return TensorEntry(name_of_dtype(value.dtype, where), tuple(value.shape), ())


class FullLoading:
    """One load on one rank."""

    def __init__(self, state_dict: Mapping[str, Any] | None, source: FullSource):
        self._source, (rank, _) = source, rank_and_size()
        self._state_dict: Mapping[str, Any] = {} if rank or state_dict is None else state_dict
        self._keys = {clean_tensor_name(key, ALL_PREFIXES): key for key in self._state_dict}
        self._model = ModelState()
        self._targets: dict[str, HeldTensor] = {}
        """By the name in the state dict."""

    def compare(self, model: nn.Module) -> tuple[Differences, list[tuple[str, ...]]]:
        """Returns the differences, and for each tensor the names in the state dict that are tied here."""
        differences, chosen = Differences(), []
        self._model, unexpected = model_state(model), dict(self._source.tensors)
        tied: dict[str, list[str]] = {held.name: [held.name] for held in self._model.tensors}
        for alias, name in self._model.aliases.items():
            tied[name].append(alias)
        for held in self._model.tensors:
            names = [name for key in tied[held.name] if (name := key.removeprefix("model/")) in unexpected]
            entries = [unexpected.pop(name) for name in names]
            if not names:
                name, shape = held.name.removeprefix("model/"), held.part.shape
                differences.missing[name] = TensorEntry(name_of_dtype(held.dtype, name), shape, ()).nbytes
            elif not (wrong := _differences(held, names, entries)):
                self._targets[names[0]] = held
                chosen.append(tuple(names))
            else:
                differences.wrong += wrong
        extra = {_extra_name(path) for path in self._model.extra}
        differences.missing.update(dict.fromkeys(extra - self._source.extra.keys(), 0))
        differences.unexpected = {name: entry.nbytes for name, entry in unexpected.items()}
        differences.unexpected.update(dict.fromkeys(self._source.extra.keys() - extra, 0))
        return differences, chosen

    def different_ties(self, chosen: set[tuple[str, ...]]) -> list[str]:
        """On rank 0: a tensor that is tied in the model may have several names in the state dict if they are equal."""
        return [
            f"{first} and {other} are tied here, and are two different tensors in the state dict"
            for first, *others in sorted(chosen)
            for other in others
            if not _same_bytes(self._tensor(first), self._tensor(other))
        ]

    def _tensor(self, name: str) -> Any:
        return self._state_dict[self._keys[name]].detach()

    @torch.no_grad()
    def apply(self, names: set[str]) -> None:
        rank, _ = rank_and_size()
        for name, entry in self._source.tensors.items():
            if name in names:
                fill(
                    self._targets.get(name),
                    broadcast(None if rank else self._tensor(name), entry, self._source.device_type),
                )

    def finish(self) -> None:
        self._model.finish_loading(self._targets.values())
        for path, module in self._model.extra.items():
            if (name := _extra_name(path)) in self._source.extra:
                module.set_extra_state(self._source.extra[name])


def _differences(held: HeldTensor, names: list[str], entries: list[TensorEntry]) -> list[str]:
    found = []
    for name, entry in zip(names, entries, strict=True):
        dtype = DTYPES[entry.dtype]
        held.expect(entry.shape)
        if entry.shape != held.part.shape:
            found.append(f"{name} has the shape {entry.shape}, expected {held.part.shape}")
        elif dtype != held.dtype and not (dtype.is_floating_point and held.dtype.is_floating_point):
            found.append(f"{name} has the dtype {dtype}, expected {held.dtype}")
    return found


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.device != other.device:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)
