"""Loading an optimizer: what it needs of a checkpoint, memory for that, and the state dict that it takes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.api import finish_steps, shard_ranges_of
from ..errors import CheckpointError, listed
from ..state.boxes import Part
from ..state.model import HeldTensor, ModelState, OptimizedParam
from ..torch_private import local_of, make_dtensor, spec_of
from .differences import Differences
from .optimizer_state import SHARDED, params_of, tensor_name
from .plan import TensorEntry
from .values import DTYPES, decode

Stored = Callable[[str], torch.Tensor]


class OptimizerLoad:
    """What an optimizer takes from a checkpoint. Making one changes nothing."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: ModelState,
        entry: Any,
        tensors: dict[str, TensorEntry],
        differences: Differences,
    ):
        """`entry`: what `optimizer_state` has described, None if there is none."""
        self._optimizer, self._tensors = optimizer, tensors
        self._groups = params_of(optimizer, model)
        self.found = entry is not None
        self._saved: dict[str, Any] = _checked(entry) if entry is not None else {}
        if entry is None:
            differences.missing["the optimizer"] = 0
            return
        unknown = set(self._saved["defaults"]) - set(optimizer.defaults)
        if unknown:
            differences.wrong.append(
                f"the checkpoint is of another optimizer than this {type(optimizer).__name__}: it has the options "
                f"{listed(sorted(unknown))}"
            )
            self._saved = {}
            return
        self._state: dict[int, dict[str, Any]] = {}
        """By the number of the parameter, its state, in JSON until it is decoded."""
        self._others: dict[Any, Any] = {}
        self._loaded: dict[Any, dict[str, Any]] = {}
        """As `_state`, with memory for what is sharded."""
        self._options = [self._options_of(group, differences) for group in self._groups]
        params = self._params()
        for number, (parameter, inside) in enumerate(params):
            own = self._state_of(parameter, inside, differences)
            if own:
                self._state[number] = own
        mine = {each.name for _, inside in params for each in inside}
        for group in self._saved["groups"]:
            for name in set(group["params"]) - mine:
                nbytes = sum(self._nbytes(key, name) for key in self._saved["state"].get(name, ()))
                differences.unexpected[f"optimizer state of {name}"] = nbytes
        differences.without_state.update(self._without_state())

    def _without_state(self) -> dict[str, int]:
        """Parameters that have no state in the checkpoint, and bytes, if any parameter has state there or here."""
        saved = self._saved["state"]
        if not any(saved.values()) and not any(self._optimizer.state.values()):
            return {}
        return {
            each.name: prod(each.part.shape) * parameter.element_size()
            for parameter, inside in self._params()
            if parameter.requires_grad
            for each in inside
            if not saved.get(each.name)
        }

    def _params(self) -> list[tuple[Any, list[OptimizedParam]]]:
        return [pair for group in self._groups for pair in group]

    def _nbytes(self, key: str, name: str) -> int:
        entry = self._tensors.get(tensor_name(key, name))
        return 0 if entry is None else entry.nbytes

    def _options_of(self, group: list[tuple[Any, list[OptimizedParam]]], differences: Differences) -> Any:
        """The options, in JSON, of the saved group that has the parameters of this one."""
        names = [each.name for _, inside in group for each in inside]
        found = [
            number for number, saved in enumerate(self._saved["groups"]) if not set(names).isdisjoint(saved["params"])
        ]
        known = {name for number in found for name in self._saved["groups"][number]["params"]}
        differences.missing.update({f"optimizer state of {name}": 0 for name in names if name not in known})
        if len(found) > 1:
            differences.wrong.append(
                f"a parameter group of the optimizer has parameters of the groups {found} of the checkpoint "
                f"({listed(names)})"
            )
        return self._saved["groups"][found[0]]["options"] if found else {}

    def _state_of(self, parameter: Any, inside: list[OptimizedParam], differences: Differences) -> dict[str, Any]:
        """The saved state of a parameter that the optimizer has, in JSON; empty if it has none."""
        if not isinstance(parameter, DTensor) and not parameter.numel():
            return {}  # no elements on this rank: the optimizer has no state for it
        states = [self._saved["state"].get(each.name, {}) for each in inside]
        first = states[0]
        for param, state in zip(inside, states, strict=True):
            if state != first:
                differences.wrong.append(
                    f"the optimizer state of {param.name} has other entries or counters than that of {inside[0].name}, "
                    "which is in the same flat parameter (use_orig_params=True keeps them apart)"
                )
                return {}
            for key in [key for key, value in state.items() if _is_marked(value)]:
                self._compare(tensor_name(key, param.name), param, differences)
        dtypes = {key: {self._dtype(key, each.name) for each in inside} for key in first if _is_marked(first[key])}
        if any(len(each) > 1 for each in dtypes.values()):
            differences.wrong.append(f"the optimizer states of {listed(each.name for each in inside)} differ in dtype")
        return first

    def _compare(self, name: str, param: OptimizedParam, differences: Differences) -> None:
        entry = self._tensors.get(name)
        if entry is None:
            differences.missing[name] = 0
        elif entry.shape != param.part.shape:
            differences.wrong.append(f"{name} has the shape {entry.shape}, expected {param.part.shape}")

    def _dtype(self, key: str, name: str) -> torch.dtype | None:
        entry = self._tensors.get(tensor_name(key, name))
        return None if entry is None else DTYPES[entry.dtype]

    def needed(self) -> list[tuple[str, Part]]:
        """The tensors of the checkpoint, and which part of each this rank reads."""
        params = self._params()
        return [
            (tensor_name(key, each.name), each.part)
            for number, state in self._state.items()
            for key, value in state.items()
            if _is_marked(value)
            for each in params[number][1]
        ]

    def decode(self, stored: Stored) -> None:
        """Decode everything that is JSON: an error must come before anything is changed."""
        params = self._params()
        for number, saved in self._state.items():
            path = tensor_name("state", params[number][1][0].name)
            self._state[number] = {k: v if _is_marked(v) else decode(v, path, stored) for k, v in saved.items()}
        self._options = [decode(options, "optimizer/param_groups", stored) for options in self._options]
        self._others = decode(self._saved["others"], "optimizer/state", stored)

    @torch.no_grad()
    def targets(self) -> list[HeldTensor]:
        """The tensors to fill before `finish`: memory that the optimizer has already, or new memory."""
        finish_steps()
        params, found = self._params(), []
        ranges = shard_ranges_of(parameter for parameter, _ in params)
        devices = {key: each.states.device for key, each in ranges.items() if each.states is not None}
        for number, saved in self._state.items():
            parameter, inside = params[number]
            before = self._optimizer.state.get(parameter, {})
            own = self._loaded[number] = dict(saved)
            for key in [key for key, value in saved.items() if _is_marked(value)]:
                dtype = self._dtype(key, inside[0].name)
                assert dtype is not None
                own[key] = _memory(parameter, before.get(key), dtype, devices.get(id(parameter)))
                for each in inside:
                    local = each.local_of(own[key])
                    found.append(HeldTensor(tensor_name(key, each.name), each.part, dtype, local, plain=False))
        return found

    @torch.no_grad()
    def finish(self) -> None:
        """Give the optimizer its state."""
        optimizer, params, state = self._optimizer, self._params(), self._loaded
        numbers, groups = iter(range(len(params))), []
        for options, own_group, group in zip(self._options, optimizer.param_groups, self._groups, strict=True):
            kept = {key: value for key, value in own_group.items() if key != "params"}
            groups.append({**kept, **options, "params": [next(numbers) for _ in group]})
        optimizer.load_state_dict({"state": {**state, **self._others}, "param_groups": groups})
        self._restore_dtypes(state, [parameter for parameter, _ in params])

    def _restore_dtypes(self, state: dict[Any, dict[str, Any]], params: list[Any]) -> None:
        """Torch has cast floating-point state to the parameter's dtype; the checkpoint has what the optimizer had."""
        for number, entry in state.items():
            loaded = self._optimizer.state[params[number]]
            for key, value in entry.items():
                if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)


def _is_marked(value: Any) -> bool:
    """Whether a state is a tensor of the checkpoint that is sharded as the parameter is."""
    return type(value) is dict and value == SHARDED


def _memory(parameter: torch.Tensor, before: Any, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """The optimizer's own memory of a state, or new memory, with zeros in the padding of flat parameters."""
    if isinstance(before, torch.Tensor) and before.dtype == dtype and before.shape == parameter.shape:
        if not isinstance(before, DTensor) and not isinstance(parameter, DTensor):
            return before
        same_kind = isinstance(before, DTensor) and isinstance(parameter, DTensor)
        if same_kind and spec_of(before).placements == spec_of(parameter).placements:
            return before
    if not isinstance(parameter, DTensor):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    spec, local = spec_of(parameter), local_of(parameter)
    zeros = torch.zeros(local.shape, dtype=dtype, device=device or local.device)
    return make_dtensor(zeros, spec.mesh, spec.placements, parameter.shape)


def _checked(entry: Any) -> dict[str, Any]:
    """The optimizer's entry of a manifest, which may come from anywhere."""

    def all_are(kind: type, values: Any) -> bool:
        return all(type(value) is kind for value in values)

    valid = type(entry) is dict and {key: type(value) for key, value in entry.items()} == {
        "defaults": list,
        "groups": list,
        "state": dict,
        "others": dict,
    }
    valid = valid and all_are(str, entry["defaults"]) and all_are(dict, entry["groups"])
    valid = valid and all_are(dict, entry["state"].values())
    for group in entry["groups"] if valid else ():
        valid = valid and type(group.get("params")) is list and all_are(str, group["params"])
        valid = valid and type(group.get("options")) is dict
    if not valid:
        raise CheckpointError("The checkpoint's entry of the optimizer is malformed.")
    return entry
