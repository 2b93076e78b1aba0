"""What really happened to a model's parameters, inputs, outputs and buffers, written down while steps run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ..engine.faces import Slot, full_name
from ..engine.observer import Members
from ..engine.precision import Precision
from ..engine.states import Phase
from ..engine.tree import tensors_in
from ..torch_private import never_compiled, own_buffers
from .plan import Member, ModelPlan, UnitPlan
from .state import parameters_of, state_dtypes

Dtypes = set[torch.dtype]
_CAST_NAMES = ("to", "type", "type_as", "float", "double", "half", "bfloat16")
_CASTS = frozenset(getattr(torch.Tensor, name) for name in _CAST_NAMES)


class Stage(Enum):
    """Where on its way a parameter, or its gradient, has a dtype."""

    GATHERED = "gathered"
    COMPUTED = "computed"
    GRADIENT = "gradient of autograd"
    KEPT = "sums kept"
    WIRE = "wire"
    REDUCED = "reduced"
    ALL_REDUCED = "over replicas"
    GRAD = ".grad"
    UPDATED = "updated"
    STATE = "optimizer state"


class Findings:
    """An observer of the engine, hooks on modules and on optimizers. Sets of dtypes: repetitions add nothing."""

    def __init__(self, plan: ModelPlan, optimizer: Any = None):
        self._optimizer = optimizer
        self._owners = {each.slot: (unit, each) for unit in plan.units for each in unit.members}
        self._plan = plan
        self.parameters: dict[tuple[Stage, Slot, Precision], Dtypes] = {}
        self.inputs: dict[tuple[nn.Module, Precision], Dtypes] = {}
        self.outputs: dict[tuple[nn.Module, Precision], Dtypes] = {}
        self.buffers: dict[tuple[str, Precision], Dtypes] = {}
        self.autocast: dict[nn.Module, torch.dtype] = {}
        self.casts: dict[Slot, Dtypes] = {}
        """What full faces were converted to by the model's own code."""
        self.steps = 0
        """How often an optimizer stepped that holds parameters of the model."""
        self._stepping: set[int] = set()  # a subclass whose step calls its parent's steps once

    def install(self) -> list[Any]:
        """All registrations; each is taken back with `remove()`."""
        handles: list[Any] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for unit in self._plan.units:
            tops = unit.state.modules()
            for module in dict.fromkeys([*tops, *owners_of(unit)]):
                look = _Look(self, unit, is_top=module in tops)
                # Behind the hooks that cast: they were registered before.
                handles.append(module.register_forward_pre_hook(look.before, with_kwargs=True))
                handles.append(module.register_forward_hook(look.after))
        return handles

    # -- the engine -----------------------------------------------------------------------------------------

    def gathering(self, slots: Sequence[Slot], members: Members, sent: Sequence[torch.Tensor]) -> None:
        self._all(Stage.GATHERED, slots, members, sent)

    def whole(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.full is not None:
                self._one(Stage.COMPUTED, slot, slot.full.dtype)

    def keeping(self, slots: Sequence[Slot], sums: Mapping[int, torch.Tensor]) -> None:
        for index, tensor in sums.items():
            self._one(Stage.KEPT, slots[index], tensor.dtype)

    def reducing(
        self,
        slots: Sequence[Slot],
        members: Members,
        gradients: Mapping[int, torch.Tensor],
        sent: Sequence[torch.Tensor],
        sums: Sequence[torch.Tensor],
    ) -> None:
        for index, gradient in gradients.items():
            self._one(Stage.GRADIENT, slots[index], gradient.dtype)
        self._all(Stage.WIRE, slots, members, sent)
        self._all(Stage.REDUCED, slots, members, sums)

    def all_reducing(self, slots: Sequence[Slot], members: Members, sums: Sequence[torch.Tensor]) -> None:
        self._all(Stage.ALL_REDUCED, slots, members, sums)

    def delivered(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if (grad := slot.sharded.grad) is not None:
                self._one(Stage.GRAD, slot, grad.dtype)

    def _all(self, stage: Stage, slots: Sequence[Slot], members: Members, tensors: Sequence[torch.Tensor]) -> None:
        for inside, tensor in zip(members, tensors, strict=False):
            for index in inside:
                self._one(stage, slots[index], tensor.dtype)

    def _one(self, stage: Stage, slot: Slot, dtype: torch.dtype) -> None:
        owner = self._owners.get(slot)
        if owner is not None:  # else it is another model's
            self.parameters.setdefault((stage, slot, owner[0].state.unit.precision), set()).add(dtype)

    def cast(self, face: torch.Tensor, dtype: torch.dtype) -> None:
        """The full face of some parameter was converted. Between steps that is nobody's computation."""
        for slot, (unit, _) in self._owners.items():
            if slot.full is face and face.dtype != dtype and unit.state.unit.phase is not Phase.IDLE:
                self.casts.setdefault(slot, set()).add(dtype)

    def of(self, stage: Stage, member: Member, *precisions: Precision) -> Dtypes:
        wanted = precisions or tuple(Precision)
        return {d for each in wanted for d in self.parameters.get((stage, member.slot, each), ())}

    # -- optimizers -----------------------------------------------------------------------------------------

    def _held(self, optimizer: Any) -> list[Slot]:
        if self._optimizer is not None and optimizer is not self._optimizer:
            return []
        slots = {id(slot.sharded): slot for slot in self._owners}
        return [slots[id(each)] for each in parameters_of(optimizer) if id(each) in slots]

    def _before_step(self, optimizer: Any, *unused: Any) -> None:
        held = self._held(optimizer)
        self.steps += bool(held) and id(optimizer) not in self._stepping
        self._stepping.add(id(optimizer))
        for slot in held:
            if slot.sharded.grad is not None:
                self._one(Stage.GRAD, slot, slot.sharded.grad.dtype)
                self._one(Stage.UPDATED, slot, slot.sharded.dtype)

    def _after_step(self, optimizer: Any, *unused: Any) -> None:
        self._stepping.discard(id(optimizer))
        for slot in self._held(optimizer):
            for dtype in state_dtypes(optimizer, slot.sharded) or ():
                self._one(Stage.STATE, slot, dtype)


class Casts(TorchFunctionMode):
    """Sees the model's own code convert parameters, which no input or output need show."""

    def __init__(self, findings: Findings):
        super().__init__()
        self._findings = findings

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CASTS and full_name(args[0]) is not None:
            self._findings.cast(args[0], result.dtype)
        return result


class _Look:
    """The hooks on one module."""

    def __init__(self, findings: Findings, unit: UnitPlan, is_top: bool):
        self._findings, self._unit, self._is_top = findings, unit, is_top

    @never_compiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        unit, findings = self._unit.state.unit, self._findings
        findings.inputs.setdefault((module, unit.precision), set()).update(_floats((args, kwargs)))
        kind = unit.device.type
        if torch.is_autocast_enabled(kind):
            findings.autocast[module] = torch.get_autocast_dtype(kind)
        for each in self._unit.buffers if self._is_top else ():
            buffer = own_buffers(each.module).get(each.alias.rpartition(".")[2])
            if buffer is not None:
                findings.buffers.setdefault((each.name, unit.precision), set()).add(buffer.dtype)

    @never_compiled
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        precision = self._unit.state.unit.precision
        self._findings.outputs.setdefault((module, precision), set()).update(_floats(output))


def owners_of(unit: UnitPlan) -> dict[nn.Module, list[Member]]:
    """The modules that have parameters of a unit themselves."""
    found: dict[nn.Module, list[Member]] = {}
    for member in unit.members:
        for home in member.slot.homes:
            module = home.module()
            if module is not None:
                found.setdefault(module, []).append(member)
    return found


def _floats(value: Any) -> Iterable[torch.dtype]:
    return {tensor.dtype for tensor in tensors_in(value) if tensor.is_floating_point()}
