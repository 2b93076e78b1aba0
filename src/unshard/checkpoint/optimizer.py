"""Saves and loads optimizer state, which a checkpoint stores under the names of the model's parameters.

The values of a manifest contain this entry for the optimizer:

    {"defaults": ["betas", "lr", ...],
     "groups": [{"params": ["head.weight", ...], "options": {"lr": 0.1, ...}}, ...],
     "state": {"head.weight": {"step": <value>, "exp_avg": {"$": "sharded"}}, ...},
     "others": {...}}

State marked `sharded` has one value per element of the parameter, and is stored as a tensor such as
`optimizer/exp_avg/head.weight`. A parameter that never had a gradient has no saved state, and no state after loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.api import finish_steps, shard_ranges_of
from ..errors import CheckpointError, listed
from ..state.boxes import BoxMap, whole
from ..state.model import HeldTensor, ModelState, OptimizedParam, box_map_of_state, is_sharded, params_of
from ..torch_private import local_of, make_dtensor, spec_of
from .manifest import TensorEntry
from .ranks import Differences
from .values import DTYPES, decode, encode

SHARDED = {"$": "sharded"}
Stored = Callable[[str], torch.Tensor]
T = TypeVar("T")


def tensor_name(key: str, name: str) -> str:
    return f"optimizer/{key}/{name}"


@torch.no_grad()
def optimizer_state(optimizer: Optimizer, model: ModelState) -> tuple[list[HeldTensor], dict[str, Any]]:
    """Return this rank's optimizer state tensors and the optimizer entry that is described at the top of this file."""
    finish_steps()
    tensors: list[HeldTensor] = []
    states: dict[str, dict[str, Any]] = {}

    def store(name: str, value: torch.Tensor) -> None:
        tensors.append(HeldTensor(name, whole(value.shape), value.dtype, value, plain=True))

    def add(parameter: Any, param: OptimizedParam, key: Any, value: Any) -> Any:
        if not isinstance(key, str):
            raise CheckpointError(f"The optimizer's state of {param.name!r} has the key {key!r}, not a string.")
        name = tensor_name(key, param.name)
        if not is_sharded(parameter, param, key, value):
            return encode(value, name, store)
        box_map = box_map_of_state(value, parameter, param)
        tensors.append(HeldTensor(name, box_map, value.dtype, param.local_of(value), param.plain))
        return SHARDED

    groups = params_of(optimizer, model)
    values: dict[str, Any] = {"defaults": sorted(optimizer.defaults), "groups": [], "state": states}
    for number, (options, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        own = {key: value for key, value in options.items() if key not in ("params", "param_names")}
        names = [each.name for _, inside in group for each in inside]
        values["groups"].append({"params": names, "options": encode(own, f"optimizer/param_groups[{number}]", store)})
        for parameter, inside in group:
            for param in inside if parameter in optimizer.state else ():
                # Skip state without elements on this rank. Its counters may not have advanced since it was loaded.
                if param.box_map.boxes or 0 in param.box_map.shape:
                    state = optimizer.state[parameter].items()
                    states[param.name] = {key: add(parameter, param, key, value) for key, value in state}
    params = {id(each) for group in groups for each, _ in group}
    others = {key: value for key, value in optimizer.state.items() if id(key) not in params}
    values["others"] = encode(others, "optimizer/state", store)
    return tensors, values


def merged(entries: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Merge the optimizer entries of all ranks, because ranks may hold different parameters."""
    given = [entry for entry in entries if entry is not None]
    if not given:
        return None
    found = {**given[0], "groups": [], "state": {}}
    for groups in _different(entry["groups"] for entry in given):
        for number, group in enumerate(groups):
            if number == len(found["groups"]):
                found["groups"].append(dict(group))
            names = [*found["groups"][number]["params"], *group["params"]]
            found["groups"][number]["params"] = list(dict.fromkeys(names))
    for states in _different(entry["state"] for entry in given):
        for name, state in states.items():
            found["state"].setdefault(name, state)
    return found


def _different(values: Iterable[T]) -> Iterable[T]:
    """Return `values` without repeated objects. Ranks with equal entries share objects (`ranks.unpacked`)."""
    return {id(each): each for each in values}.values()


# -- loading ---------------------------------------------------------------------------------------------------


class OptimizerLoad:
    """Loads an optimizer. Call `decode`, then fill the tensors that `targets` returns, and then call `finish`."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: ModelState,
        entry: Any,
        tensors: dict[str, TensorEntry],
        differences: Differences,
    ):
        """Compare the optimizer with `entry`, which is None if the checkpoint has no optimizer. Fill `differences`."""
        self._optimizer, self._tensors = optimizer, tensors
        self._groups = params_of(optimizer, model)
        self._params = [pair for group in self._groups for pair in group]
        self._state: dict[int, dict[str, Any]] = {}
        """Saved state by parameter number, as JSON until `decode` decodes the values."""
        self._others: dict[Any, Any] = {}
        self._loaded: dict[Any, dict[str, Any]] = {}
        """A copy of `_state` in which `targets` replaces the `sharded` marks with tensors to fill."""
        if entry is None:
            differences.missing["the optimizer"] = 0
            return
        self._saved = _checked(entry)
        if unknown := set(self._saved["defaults"]) - set(optimizer.defaults):
            differences.wrong.append(
                f"the checkpoint has another optimizer, with options that this {type(optimizer).__name__} lacks: "
                f"{listed(sorted(unknown))}"
            )
            return
        self._options = [self._options_of(group, differences) for group in self._groups]
        for number, (parameter, inside) in enumerate(self._params):
            if own := self._state_of(parameter, inside, differences):
                self._state[number] = own
        mine, saved = {each.name for _, inside in self._params for each in inside}, self._saved["state"]
        for group in self._saved["groups"]:
            for name in set(group["params"]) - mine:
                entries = (tensors.get(tensor_name(key, name)) for key in saved.get(name, ()))
                nbytes = sum(each.nbytes for each in entries if each is not None)
                differences.unexpected[f"optimizer state of {name}"] = nbytes
        if any(saved.values()) or any(optimizer.state.values()):
            differences.without_state |= {
                each.name: prod(each.box_map.shape) * parameter.element_size()
                for parameter, inside in self._params
                if parameter.requires_grad
                for each in inside
                if not saved.get(each.name)
            }

    def _options_of(self, group: list[tuple[Any, list[OptimizedParam]]], differences: Differences) -> Any:
        names = [each.name for _, inside in group for each in inside]
        saved = self._saved["groups"]
        found = [number for number, each in enumerate(saved) if not set(names).isdisjoint(each["params"])]
        known = {name for number in found for name in saved[number]["params"]}
        differences.missing.update({f"optimizer state of {name}": 0 for name in names if name not in known})
        if len(found) > 1:
            differences.wrong.append(
                f"an optimizer group has parameters of the groups {found} of the checkpoint ({listed(names)})"
            )
        return saved[found[0]]["options"] if found else {}

    def _state_of(self, parameter: Any, inside: list[OptimizedParam], differences: Differences) -> dict[str, Any]:
        """Return the saved JSON state of one of the optimizer's parameters, or {} if there is none."""
        if not isinstance(parameter, DTensor) and not parameter.numel():
            return {}  # the optimizer has no state for parameters without elements on this rank
        states = [self._saved["state"].get(each.name, {}) for each in inside]
        first = states[0]
        for param, state in zip(inside, states, strict=True):
            if state != first:
                differences.wrong.append(
                    f"the optimizer state of {param.name} has other entries or counters than {inside[0].name}, which "
                    "is in the same flat parameter (use_orig_params=True keeps them apart)"
                )
                return {}
            for name in [tensor_name(key, param.name) for key in _sharded(state)]:
                entry = self._tensors.get(name)
                if entry is None:
                    differences.missing[name] = 0
                elif entry.shape != param.box_map.shape:
                    differences.wrong.append(f"{name} has the shape {entry.shape}, expected {param.box_map.shape}")
        if any(len({self._dtype(key, each.name) for each in inside}) > 1 for key in _sharded(first)):
            differences.wrong.append(f"the optimizer states of {listed(each.name for each in inside)} differ in dtype")
        return first

    def _dtype(self, key: str, name: str) -> torch.dtype | None:
        entry = self._tensors.get(tensor_name(key, name))
        return None if entry is None else DTYPES[entry.dtype]

    def needed(self) -> list[tuple[str, BoxMap]]:
        """Return the name of each saved state tensor that this rank reads, with the boxes to read."""
        return [
            (tensor_name(key, each.name), each.box_map)
            for number, state in self._state.items()
            for key in _sharded(state)
            for each in self._params[number][1]
        ]

    def decode(self, stored: Stored) -> None:
        """Decode all saved JSON values. Call this before the load changes anything, because decoding may raise."""
        for number, saved in self._state.items():
            path = tensor_name("state", self._params[number][1][0].name)
            kept = _sharded(saved)
            self._state[number] = {k: v if k in kept else decode(v, path, stored) for k, v in saved.items()}
        self._options = [decode(options, "optimizer/param_groups", stored) for options in self._options]
        self._others = decode(self._saved["others"], "optimizer/state", stored)

    @torch.no_grad()
    def targets(self) -> list[HeldTensor]:
        """Return the tensors that callers must fill before `finish`. Existing state tensors are reused if they fit."""
        finish_steps()
        found: list[HeldTensor] = []
        ranges = shard_ranges_of(parameter for parameter, _ in self._params)
        devices = {key: each.states.device for key, each in ranges.items() if each.states is not None}
        for number, saved in self._state.items():
            parameter, inside = self._params[number]
            before = self._optimizer.state.get(parameter, {})
            own = self._loaded[number] = dict(saved)
            for key in _sharded(saved):
                dtype = self._dtype(key, inside[0].name)
                assert dtype is not None
                own[key] = _memory(parameter, before.get(key), dtype, devices.get(id(parameter)))
                for each in inside:
                    local = each.local_of(own[key])
                    found.append(HeldTensor(tensor_name(key, each.name), each.box_map, dtype, local, plain=False))
        return found

    @torch.no_grad()
    def finish(self) -> None:
        """Load the filled tensors and the other saved state into the optimizer."""
        optimizer, numbers, groups = self._optimizer, iter(range(len(self._params))), []
        for options, own_group, group in zip(self._options, optimizer.param_groups, self._groups, strict=True):
            kept = {key: value for key, value in own_group.items() if key != "params"}
            groups.append({**kept, **options, "params": [next(numbers) for _ in group]})
        optimizer.load_state_dict({"state": {**self._loaded, **self._others}, "param_groups": groups})
        # Undo torch's cast of floating-point state to the parameter's dtype.
        for number, entry in self._loaded.items():
            loaded = optimizer.state[self._params[number][0]]
            for key, value in entry.items():
                if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)


def _sharded(state: dict[str, Any]) -> list[str]:
    return [key for key, value in state.items() if type(value) is dict and value == SHARDED]


def _memory(parameter: torch.Tensor, before: Any, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """Return `before` if its dtype is `dtype` and its shape and sharding match `parameter`. Otherwise, return zeros."""
    if isinstance(before, torch.Tensor) and before.dtype == dtype and before.shape == parameter.shape:
        if not isinstance(before, DTensor) and not isinstance(parameter, DTensor):
            return before
        same_kind = isinstance(before, DTensor) and isinstance(parameter, DTensor)
        if same_kind and spec_of(before).placements == spec_of(parameter).placements:
            return before
    if not isinstance(parameter, DTensor):  # loading does not fill the padding of flat parameters
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    spec, local = spec_of(parameter), local_of(parameter)
    zeros = torch.zeros(local.shape, dtype=dtype, device=device or local.device)
    return make_dtensor(zeros, spec.mesh, spec.placements, parameter.shape)


def _checked(entry: Any) -> dict[str, Any]:
    # Entries come from untrusted manifests.
    def all_are(kind: type, values: Any) -> bool:
        return all(type(value) is kind for value in values)

    kinds = {"defaults": list, "groups": list, "state": dict, "others": dict}
    valid = type(entry) is dict and {key: type(value) for key, value in entry.items()} == kinds
    valid = valid and all_are(str, entry["defaults"]) and all_are(dict, entry["groups"])
    valid = valid and all_are(dict, entry["state"].values())
    for group in entry["groups"] if valid else ():
        valid = valid and type(group.get("params")) is list and all_are(str, group["params"])
        valid = valid and type(group.get("options")) is dict
    if not valid:
        raise CheckpointError("The checkpoint's entry for the optimizer is malformed.")
    return entry
