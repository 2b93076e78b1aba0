"""Records the dtypes that parameters, gradients, inputs, outputs and buffers have while steps run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ..engine.api import ManagedParam, Members, Phase, Precision, tensors_in, unsharded_name
from ..names import optimizer_parameters
from ..torch_private import never_compiled, own_buffers
from .precision_plan import ModelPlan, ParamPlan, UnitPlan, state_dtypes

Dtypes = set[torch.dtype]
_CAST_NAMES = ("to", "type", "type_as", "float", "double", "half", "bfloat16")
_CASTS = frozenset(getattr(torch.Tensor, name) for name in _CAST_NAMES)


class Stage(Enum):
    """A stage at which a parameter, or its gradient, has a dtype."""

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


class PrecisionRecorder:
    """An observer of the engine, with hooks on modules and optimizers. Keeps sets of dtypes, no tensors."""

    def __init__(self, plan: ModelPlan, optimizer: Any = None):
        self._optimizer = optimizer
        self._owners = {each.param: (unit, each) for unit in plan.units for each in unit.params}
        self._plan = plan
        self.parameters: dict[tuple[Stage, ManagedParam, Precision], Dtypes] = {}
        self.inputs: dict[tuple[nn.Module, Precision], Dtypes] = {}
        self.outputs: dict[tuple[nn.Module, Precision], Dtypes] = {}
        self.buffers: dict[tuple[str, Precision], Dtypes] = {}
        self.autocast: dict[nn.Module, torch.dtype] = {}
        self.casts: dict[ManagedParam, Dtypes] = {}
        """The dtypes to which the model's own code converted unsharded parameters."""
        self.steps = 0
        """How often an optimizer stepped that holds parameters of the model."""
        self._stepping: set[int] = set()  # the step of a subclass may call its parent's: that is one step

    def install(self) -> list[Any]:
        """Register all hooks; `remove()` of each handle ends it."""
        handles: list[Any] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for unit in self._plan.units:
            tops = unit.state.modules()
            for module in dict.fromkeys([*tops, *modules_with_params(unit)]):
                hooks = _ModuleHooks(self, unit, is_top=module in tops)
                # These run after the hooks that cast, which were registered before.
                handles.append(module.register_forward_pre_hook(hooks.before, with_kwargs=True))
                handles.append(module.register_forward_hook(hooks.after))
        return handles

    # -- the engine -----------------------------------------------------------------------------------------

    def all_gathering(self, params: Sequence[ManagedParam], members: Members, sent: Sequence[torch.Tensor]) -> None:
        self._all(Stage.GATHERED, params, members, sent)

    def unsharded(self, params: Sequence[ManagedParam]) -> None:
        for param in params:
            if param.unsharded is not None:
                self._one(Stage.COMPUTED, param, param.unsharded.dtype)

    def keeping(self, params: Sequence[ManagedParam], sums: Mapping[int, torch.Tensor]) -> None:
        for index, tensor in sums.items():
            self._one(Stage.KEPT, params[index], tensor.dtype)

    def reducing(
        self,
        params: Sequence[ManagedParam],
        members: Members,
        gradients: Mapping[int, torch.Tensor],
        sent: Sequence[torch.Tensor],
        sums: Sequence[torch.Tensor],
    ) -> None:
        for index, gradient in gradients.items():
            self._one(Stage.GRADIENT, params[index], gradient.dtype)
        self._all(Stage.WIRE, params, members, sent)
        self._all(Stage.REDUCED, params, members, sums)

    def all_reducing(self, params: Sequence[ManagedParam], members: Members, sums: Sequence[torch.Tensor]) -> None:
        self._all(Stage.ALL_REDUCED, params, members, sums)

    def delivered(self, params: Sequence[ManagedParam]) -> None:
        for param in params:
            if (grad := param.sharded.grad) is not None:
                self._one(Stage.GRAD, param, grad.dtype)

    def _all(
        self, stage: Stage, params: Sequence[ManagedParam], members: Members, tensors: Sequence[torch.Tensor]
    ) -> None:
        for inside, tensor in zip(members, tensors, strict=False):
            for index in inside:
                self._one(stage, params[index], tensor.dtype)

    def _one(self, stage: Stage, param: ManagedParam, dtype: torch.dtype) -> None:
        owner = self._owners.get(param)
        if owner is not None:  # a parameter of another model has none
            self.parameters.setdefault((stage, param, owner[0].state.unit.precision), set()).add(dtype)

    def cast(self, unsharded: torch.Tensor, dtype: torch.dtype) -> None:
        """The model has converted an unsharded parameter. Between steps that is not part of a computation."""
        for param, (unit, _) in self._owners.items():
            if param.unsharded is unsharded and unsharded.dtype != dtype and unit.state.unit.phase is not Phase.IDLE:
                self.casts.setdefault(param, set()).add(dtype)

    def dtypes(self, stage: Stage, param: ParamPlan, *precisions: Precision) -> Dtypes:
        wanted = precisions or tuple(Precision)
        return {d for each in wanted for d in self.parameters.get((stage, param.param, each), ())}

    # -- optimizers -----------------------------------------------------------------------------------------

    def _held_params(self, optimizer: Any) -> list[ManagedParam]:
        if self._optimizer is not None and optimizer is not self._optimizer:
            return []
        params = {id(param.sharded): param for param in self._owners}
        return [params[id(each)] for each in optimizer_parameters(optimizer) if id(each) in params]

    def _before_step(self, optimizer: Any, *unused: Any) -> None:
        held = self._held_params(optimizer)
        self.steps += bool(held) and id(optimizer) not in self._stepping
        self._stepping.add(id(optimizer))
        for param in held:
            if param.sharded.grad is not None:
                self._one(Stage.GRAD, param, param.sharded.grad.dtype)
                self._one(Stage.UPDATED, param, param.sharded.dtype)

    def _after_step(self, optimizer: Any, *unused: Any) -> None:
        self._stepping.discard(id(optimizer))
        for param in self._held_params(optimizer):
            for dtype in state_dtypes(optimizer, param.sharded) or ():
                self._one(Stage.STATE, param, dtype)


class CastRecorder(TorchFunctionMode):
    """Records conversions of parameters by the model's own code, which inputs and outputs may not show."""

    def __init__(self, recorder: PrecisionRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CASTS and unsharded_name(args[0]) is not None:
            self._recorder.cast(args[0], result.dtype)
        return result


class _ModuleHooks:
    """The hooks on one module."""

    def __init__(self, recorder: PrecisionRecorder, unit: UnitPlan, is_top: bool):
        self._recorder, self._unit, self._is_top = recorder, unit, is_top

    @never_compiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        unit, recorder = self._unit.state.unit, self._recorder
        recorder.inputs.setdefault((module, unit.precision), set()).update(_floats((args, kwargs)))
        kind = unit.device.type
        if torch.is_autocast_enabled(kind):
            recorder.autocast[module] = torch.get_autocast_dtype(kind)
        for each in self._unit.buffers if self._is_top else ():
            buffer = own_buffers(each.module).get(each.alias.rpartition(".")[2])
            if buffer is not None:
                recorder.buffers.setdefault((each.name, unit.precision), set()).add(buffer.dtype)

    @never_compiled
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        precision = self._unit.state.unit.precision
        self._recorder.outputs.setdefault((module, precision), set()).update(_floats(output))


def modules_with_params(unit: UnitPlan) -> dict[nn.Module, list[ParamPlan]]:
    """The modules that parameters of a unit are registered on."""
    found: dict[nn.Module, list[ParamPlan]] = {}
    for each in unit.params:
        for location in each.param.locations:
            module = location.module()
            if module is not None:
                found.setdefault(module, []).append(each)
    return found


def _floats(value: Any) -> Iterable[torch.dtype]:
    return {tensor.dtype for tensor in tensors_in(value) if tensor.is_floating_point()}
