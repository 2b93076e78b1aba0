"""Gathers full state dicts from sharded models, and loads full state dicts into sharded models.

Tensors are gathered on rank 0, or broadcast from rank 0, one at a time. In addition to its results, a rank needs memory
only for the largest tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..comm.groups import current_device, staging_device
from ..comm.order.waiting import wait_for
from ..errors import CheckpointError
from ..names import ALL_PREFIXES, behind_data_parallel, clean_tensor_name
from ..state.boxes import full_box
from ..state.model import EXTRA, HeldTensor, ModelState, model_state, non_persistent_names
from .files import copy_pieces
from .load import LoadedNames, fill, match
from .manifest import TensorEntry
from .optimizer import optimizer_state
from .plan import Descriptions, describe, make_plan
from .ranks import Differences, begin, exchanging, on_first_rank, pack, rank_and_size, together, unpacked
from .values import DTYPES, name_of_dtype

_SENDING = "Sending a tensor between the ranks"


# -- gathering ----------------------------------------------------------------------------------------------


def full_state_dict(model: nn.Module, *, rank0_only: bool = True, cpu_offload: bool = True) -> dict[str, Any]:
    """Return the full state dict of a model, under names without wrapper prefixes.

    All ranks must call this function. The tensors are copies, which are gathered one at a time. With `rank0_only`, all
    ranks except rank 0 get an empty dict. Without `cpu_offload`, tensors are on the devices of the sharded tensors.

    Raises a CheckpointError if a layer cannot be saved.

    Example::

        state = checkpoint.full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(state, "model.pt")
    """
    state, ranks, tensors = gather("the full state dict", model, None, rank0_only, cpu_offload)
    found: dict[str, Any] = {name.removeprefix("model/"): tensor for name, tensor in tensors.items()}
    found |= _extra_states(state, ranks)
    rank, _ = rank_and_size()
    if rank and rank0_only:
        return {}
    for part in ranks:
        found |= {
            alias.removeprefix("model/"): found[name.removeprefix("model/")] for alias, name in part.aliases.items()
        }
    return {name: found[name] for name in dict.fromkeys(name for part in ranks for name in part.names)}


def _extra_states(state: ModelState, ranks: list[RankPart]) -> dict[str, Any]:
    """Gather the extra states of modules, each from the lowest rank with that module. All ranks must call this."""
    rank, _ = rank_and_size()
    names = [[name for name in part.names if is_extra(name)] for part in ranks]
    if not any(names):
        return {}
    mine = set(names[rank]) - {name for lower in names[:rank] for name in lower}
    found = together(
        "Gathering the full state dict",
        lambda: {n: module.get_extra_state() for key, module in state.extra.items() if (n := _extra_name(key)) in mine},
    )
    return {name: value for each in found for name, value in each.items()}


class RankPart(NamedTuple):
    """Describes one rank's share of a model or its optimizer. The ranks exchange these descriptions."""

    tensors: Descriptions
    aliases: dict[str, str]
    names: list[str]
    """All names in the model's state dict on this rank, in the order of that state dict."""
    device_type: str
    optimizer: dict[str, Any] | None


@torch.no_grad()
def gather(
    noun: str, model: nn.Module, optimizer: Optimizer | None, rank0_only: bool, cpu_offload: bool
) -> tuple[ModelState, list[RankPart], dict[str, torch.Tensor]]:
    """Gather full tensors of a model, or of its optimizer, on rank 0 or on all ranks.

    Without `cpu_offload`, each full tensor is on the device of this rank's local tensor.
    """
    state = ModelState()
    tensors: list[HeldTensor] = []

    def collect() -> list[Any]:
        nonlocal state, tensors
        state = model_state(model)
        tensors, entry = (state.tensors, None) if optimizer is None else optimizer_state(optimizer, state)
        device_type = sending_device_type([each.local for each in tensors])
        return pack(RankPart(describe(tensors), state.aliases, _names(model, state), device_type, entry))

    begin(f"gather {noun}", model)
    ranks = [RankPart(*fields) for fields in unpacked(together(f"Gathering {noun}", collect))]
    rank, _ = rank_and_size()
    plan, _ = make_plan([each.tensors for each in ranks], spread=False)
    sent_from, by_name = current_device(ranks[0].device_type), {each.name: each for each in tensors}
    gathered: dict[str, torch.Tensor] = {}
    for name, entry in plan.items():
        held = by_name.get(name)
        views = {} if held is None else dict(zip(held.box_map.boxes, held.views(), strict=True))
        device = torch.device("cpu") if cpu_offload else sent_from if held is None else held.local.device
        full = None
        if rank == 0:
            full = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)
            _receive(full, entry, views, sent_from)
        else:
            _send([views[each.box] for each in entry.boxes.in_file(rank)], DTYPES[entry.dtype], sent_from)
        if not rank0_only:
            full = broadcast(full, entry, sent_from.type).to(device)
        if full is not None:
            gathered[name] = full
    return state, ranks, gathered


def _receive(full: torch.Tensor, entry: TensorEntry, own: Mapping[Any, torch.Tensor], sent_to: torch.device) -> None:
    received, receives = [], []
    for stored in entry.boxes:
        target = full[stored.box.slices_in(full_box(entry.shape))]
        if stored.file == 0:
            copy_pieces(target, own[stored.box])
            continue
        direct = target.is_contiguous() and full.device == sent_to
        buffer = target if direct else torch.empty(stored.box.size, dtype=full.dtype, device=sent_to)
        receives.append(dist.P2POp(dist.irecv, _bytes(buffer), stored.file))
        if not direct:
            received.append((target, buffer))
    _exchange(receives)
    for target, buffer in received:
        copy_pieces(target, buffer)


def _send(views: list[torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
    buffers = [view.to(device, dtype).resolve_conj().resolve_neg().contiguous() for view in views]
    _exchange([dist.P2POp(dist.isend, _bytes(each), 0) for each in buffers])


def _exchange(operations: list[dist.P2POp]) -> None:
    # A batch uses the communicator of the process group. With single sends, NCCL creates one per pair of ranks.
    with exchanging(_SENDING):
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


def sending_device_type(tensors: Sequence[torch.Tensor]) -> str:
    """Return the type of the device to send tensors from. All ranks must use the result of rank 0."""
    _, size = rank_and_size()
    return staging_device(dist.group.WORLD, tensors).type if size > 1 else "cpu"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes, because communication backends do not support all dtypes."""
    return tensor.reshape(-1).view(torch.uint8)


def _names(model: nn.Module, state: ModelState) -> list[str]:
    """Return all names in the model's state dict in PyTorch's order, including every name of a tied tensor."""
    paths = dict.fromkeys(
        clean_tensor_name(f"{path}.", ALL_PREFIXES).rstrip(".")
        for path, _ in behind_data_parallel(model).named_modules(remove_duplicate=False)
    )
    order = {path: number for number, path in enumerate(paths)}
    names = [each.name for each in state.tensors]
    names = [name.removeprefix("model/") for name in (*names, *state.aliases)] + [*map(_extra_name, state.extra)]

    def place(name: str) -> int:
        path = name.rpartition(".")[0]
        while path not in order:  # names that a module adds to its state dict may contain dots
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
    """Load a full state dict from rank 0 into a model, which may be sharded.

    All ranks must call this function, but only rank 0's `state_dict` is used. If the model is on the meta device, call
    `model.to_empty(device=...)` first. Tensors are broadcast one at a time, and floating-point tensors are converted to
    the dtypes of the model. If names are missing or unexpected, or if shapes or dtypes do not match, all ranks raise a
    CheckpointError and nothing changes. `strict=False` allows missing and unexpected names and loads the rest.

    Example::

        state = torch.load("model.pt") if dist.get_rank() == 0 else None
        checkpoint.load_full_state_dict(model, state)
    """
    what, state = "Loading a full state dict", ModelState()
    rank, _ = rank_and_size()
    targets: dict[str, HeldTensor] = {}

    def compare() -> tuple[Differences, list[tuple[str, ...]]]:
        """Return the differences and, for each tensor that matches, its names in the state dict."""
        nonlocal state
        differences, state = Differences(), model_state(model)
        found = match(state, entries, differences)
        targets.update({names[0]: held for held, names in found})
        own = {_extra_name(path) for path in state.extra}
        differences.missing.update(dict.fromkeys(own - extra.keys(), 0))
        differences.unexpected.update(dict.fromkeys(extra.keys() - own, 0))
        return differences, [tuple(names) for _, names in found]

    def different_ties() -> list[str]:
        return [
            f"{first} and {other} are tied here, and are two different tensors in the state dict"
            for first, *others in sorted(tied)
            for other in others
            if not _same_bytes(tensor(first), tensor(other))
        ]

    def tensor(name: str) -> Any:
        return None if rank or state_dict is None else state_dict[keys[name]].detach()

    def finish() -> None:
        state.finish_loading(targets.values())
        for path, module in state.extra.items():
            if (name := _extra_name(path)) in extra:
                module.set_extra_state(extra[name])

    begin("load a full state dict", model)
    keys, entries, extra, device_type = on_first_rank(what, lambda: _described(state_dict, model))
    answers = together(what, compare)
    found = Differences.of_all_ranks([differences for differences, _ in answers])
    tied = {names for _, chosen in answers for names in chosen}
    found.wrong += on_first_rank(what, different_ties)
    found.refuse("The state dict", strict, what="state dict")
    loaded = {first for first, *_ in tied}
    for name in entries:
        if name in loaded:
            fill_full(targets.get(name), broadcast(tensor(name), entries[name], device_type))
    together(what, finish)
    return LoadedNames(sorted(found.missing), sorted(found.unexpected), non_persistent_names(model))


def _described(
    state_dict: Mapping[str, Any] | None, model: nn.Module
) -> tuple[dict[str, str], dict[str, TensorEntry], dict[str, Any], str]:
    """Return rank 0's keys by name, tensor entries and extra states, and the device type to send tensors from."""
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"Rank 0 must pass the full state dict, got {type(state_dict).__name__}.")
    keys, tensors, extra = {}, {}, {}
    for key in state_dict:
        name = clean_tensor_name(key, ALL_PREFIXES)
        if name in keys:
            raise CheckpointError(f"Two entries of the state dict have the name {name!r}.")
        keys[name] = key
        if is_extra(name):
            extra[name] = state_dict[key]
        else:
            tensors[name] = entry_of(state_dict[key], repr(key))
    return keys, tensors, extra, sending_device_type([*model.parameters()])


def entry_of(value: Any, where: str) -> TensorEntry:
    is_full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not is_full or value.layout is not torch.strided or value.is_meta:
        about = f" of layout {value.layout} on {value.device}" if is_full else ""
        raise CheckpointError(
            f"{where} is a {type(value).__name__}{about}. A full state dict must hold dense, unsharded tensors."
        )
    return TensorEntry(name_of_dtype(value.dtype, where), tuple(value.shape))


@torch.no_grad()
def broadcast(tensor: torch.Tensor | None, entry: TensorEntry, device_type: str) -> torch.Tensor:
    """Return rank 0's tensor on all ranks. On rank 0, the result may be `tensor` itself. All ranks must call this."""
    rank, size = rank_and_size()
    if size == 1:
        assert tensor is not None
        return tensor
    device = current_device(device_type)
    if tensor is None or rank:
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)
    else:
        tensor = tensor.to(device).resolve_conj().resolve_neg().contiguous()
    if tensor.numel():
        with exchanging(_SENDING):
            wait_for(dist.broadcast(_bytes(tensor), 0, async_op=True))
    return tensor


def fill_full(held: HeldTensor | None, full: torch.Tensor) -> None:
    """Copy this rank's boxes of `full` to `held`. Callers must free `full` before the next broadcast."""
    if held is not None:
        outer = full_box(held.box_map.shape)
        fill(held, lambda box, view: copy_pieces(view, full[box.slices_in(outer)]))


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.device != other.device:
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)
