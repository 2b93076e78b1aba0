"""Optimizers that step a few flat tensors per unit instead of every DTensor of a model."""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.api import (
    built_too_early,
    finish_steps,
    name_in_flat_unit,
    note_optimizer_step,
    replaced_by_shards,
    rest_on_the_host,
    shard_ranges_of,
    unlisten,
)
from ..errors import ArgumentError
from ..names import optimizer_parameters
from ..torch_private import (
    foreach_zero,
    is_scheduled,
    local_of,
    local_part,
    make_dtensor,
    rewrap_scheduled_step,
    spec_of,
)
from .flat_spans import FlatGroups, own_copy
from .offload import StateStreamer, StepInBackward, submit

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)

_O = torch.optim
_ELEMENTWISE = (
    *(_O.SGD, _O.Adam, _O.AdamW, _O.Adagrad, _O.RMSprop, _O.NAdam, _O.RAdam, _O.Adamax, _O.Adadelta, _O.ASGD, _O.Rprop),
)
_UNUSED_BY_STEP = {"zero_grad", "state_dict", "load_state_dict", "add_param_group"}
"""Methods that a subclass may override, because `step` does not call them."""
_NOT_ELEMENTWISE = {
    "LBFGS": "it needs inner products over all parameters. Without flat, it runs if every parameter is sharded evenly "
    "(torch does not flatten other DTensors) and the closure's loss is the same on all ranks.",
    "Adafactor": "it keeps averages over the rows and columns of each parameter. Torch's DTensors do not support it "
    "without flat either (torch 2.13).",
    "Muon": "it orthogonalizes the update of each matrix. Use it without flat.",
    "SparseAdam": "it takes sparse gradients, but the gradients of sharded parameters are dense. Use Adam.",
}


def flat(
    optimizer: _Optimizer, *, elementwise: bool = False, step_in_backward: bool | None = None, ahead: bool | None = None
) -> _Optimizer:
    """Make an optimizer step flat shards instead of DTensors. Returns the same object. Call it after `fully_shard`.

    A step runs the optimizer's own code on a few flat tensors per unit. Each flat tensor covers parameters that are
    adjacent in memory and have the same dtype and optimizer group. Results do not change, and neither do
    `param_groups`, the state of each parameter, hooks, schedulers and scalers. Optimizers with and without `flat` can
    load each other's state dicts.

    The optimizer must be elementwise. This function recognizes PyTorch's elementwise optimizers, and subclasses that do
    not change the step. For other optimizers, pass `elementwise=True` if two conditions hold. The step of an element
    must depend only on that element, its gradient and its state. A zero element must stay zero while its gradient is
    zero.

    If `step` gets a closure, it calls the closure once, before it updates any parameter.

    With `step_in_backward=True`, backward steps units whose shards are on the host (`CPUOffloadPolicy`). Each of these
    units is stepped as soon as its gradients have arrived on the host. `step` waits for these steps, and then steps all
    other units. In this mode, gradients can be neither clipped nor scaled, and steps cannot be skipped. Call `step`
    after every backward that synchronizes gradients. `step_in_backward=False` turns the mode off, and None leaves it
    unchanged. `ahead` is the deprecated name of `step_in_backward`.

    Raises:
        ArgumentError: the optimizer is not elementwise, or steps parameters of `FullyShardedDataParallel`.

    Example::

        optimizer = unshard.optim.flat(torch.optim.AdamW(model.parameters(), fused=True))
    """
    if ahead is not None:
        if step_in_backward is not None:
            raise ArgumentError("flat got both step_in_backward and ahead, its old name. Pass step_in_backward alone.")
        warnings.warn(
            "The argument ahead of flat is deprecated. Use step_in_backward instead.", FutureWarning, stacklevel=2
        )
        step_in_backward = ahead
    if not isinstance(step_in_backward, bool | None):
        raise ArgumentError(f"step_in_backward must be True or False, got {step_in_backward!r}.")
    if not isinstance(optimizer, Flat):
        _check(optimizer, elementwise)
        scheduled = is_scheduled(optimizer)
        optimizer.__class__ = _flat_class(type(optimizer))  # type: ignore[assignment]
        if scheduled:
            rewrap_scheduled_step(optimizer)
        _move_to_host(optimizer)
    if step_in_backward is not None:
        _set_step_in_backward(optimizer, step_in_backward)
    return optimizer


def _set_step_in_backward(optimizer: Any, wanted: bool) -> None:
    before = vars(optimizer).pop("unshard_step_in_backward", None)
    if before is not None:
        optimizer.finish_steps_in_backward(before)
        unlisten(before)
    if wanted:
        if not rest_on_the_host(optimizer_parameters(optimizer)):
            warnings.warn(
                f"step_in_backward=True has no effect on this {type(optimizer).__name__}: none of its parameters is in "
                "a unit with CPUOffloadPolicy on an accelerator.",
                stacklevel=3,
            )
        vars(optimizer)["unshard_step_in_backward"] = StepInBackward(optimizer)


def _check(optimizer: Any, elementwise: bool) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"flat takes a torch.optim.Optimizer, got a {type(optimizer).__name__}.")
    name = type(optimizer).__name__
    for base in type(optimizer).__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in _NOT_ELEMENTWISE:
            raise ArgumentError(f"{name} cannot step flat shards: {_NOT_ELEMENTWISE[base.__name__]}")
    if not elementwise and not _has_known_step(type(optimizer)):
        raise ArgumentError(
            f"{name} is not known to be elementwise, and flat shards do not have the parameters' shapes. If its step "
            "of an element depends only on that element, its gradient and its state, and keeps an element zero while "
            "its gradient is zero, pass elementwise=True."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ArgumentError(f"{name}(differentiable=True) cannot step flat shards: autograd does not see the step.")
    _check_parameters(name, optimizer_parameters(optimizer))
    if "step" in vars(optimizer) and not is_scheduled(optimizer):
        raise ArgumentError(
            f"The step of this {name} object was replaced (optimizer.step = ...); flat would override it. Call flat "
            "before you replace the step."
        )


def _has_known_step(kind: type[Optimizer]) -> bool:
    """Return True for classes in `_ELEMENTWISE`, and for their subclasses that override nothing that `step` uses."""
    known = next((base for base in kind.__mro__ if base in _ELEMENTWISE), None)
    if known is None or _without_hooks(kind.step) is not _without_hooks(known.step):
        return False
    added = {name for base in kind.__mro__[: kind.__mro__.index(known)] for name in vars(base)} - {"step"}
    own = {name for name in added - _UNUSED_BY_STEP if not name.startswith("__")}
    return not any(hasattr(known, name) for name in own)


def _check_parameters(name: str, parameters: list[torch.Tensor]) -> None:
    flat_unit = name_in_flat_unit(parameters)
    if flat_unit is not None:
        raise ArgumentError(
            f"flat takes parameters that fully_shard has sharded; this {name} holds {flat_unit!r} of "
            "FullyShardedDataParallel or composable.fully_shard. Use the optimizer without flat: with "
            "use_orig_params=False it already has one parameter per unit."
        )
    replaced = replaced_by_shards(parameters)
    why = f"This {name} {built_too_early(replaced.values())}."
    if not any(isinstance(each, DTensor) and id(each) not in replaced for each in parameters):
        found = (
            why
            if replaced
            else f"No parameter of this {name} is sharded. Either fully_shard was not called yet, or the optimizer was "
            "built before it, from parameters that fully_shard has replaced."
        )
        raise ArgumentError(
            f"{found} Call fully_shard first, then build the optimizer from model.parameters(), then call flat."
        )
    if replaced:
        warnings.warn(f"{why} It will never update these. Build it after all calls to fully_shard.", stacklevel=4)


class Flat(Optimizer):
    """Mixin for optimizer classes. During a step, `param_groups` and `state` contain flat tensors, not DTensors."""

    base: ClassVar[type[Optimizer]]
    plain_step: ClassVar[Any]
    """The `step` of the original class without hooks. The hooks run around `Flat.step` instead."""
    streams_state: ClassVar[bool] = True
    """Tells the engine that this optimizer can step parameters whose state is on the host."""

    def flat_groups(self) -> FlatGroups:
        # Created on first use, because copied and unpickled optimizers have no groups.
        flat_groups = vars(self).get("unshard_flat_groups")
        if flat_groups is None:
            flat_groups = vars(self)["unshard_flat_groups"] = FlatGroups()
        return flat_groups

    def step(self, closure: Any = None, **options: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        flat_groups, param_groups, state = self.flat_groups(), self.param_groups, self.state
        in_backward = vars(self).get("unshard_step_in_backward")
        if in_backward is not None:
            in_backward.refuse_changed_gradients()
            note_optimizer_step(self)  # before changed shards are copied to the device
        with torch.no_grad():
            groups = flat_groups.begin_step(self, [] if in_backward is None else in_backward.finish(self))
            streamer = StateStreamer(flat_groups.streamed, flat_groups.state, param_groups)
        try:
            self.param_groups, self.state = groups, flat_groups.state
            result = self._step_groups(groups, options)
            for self.param_groups, self.state in streamer.steps():
                self.plain_step(self, **options)
        finally:
            self.param_groups, self.state = param_groups, state
            with torch.no_grad():
                streamer.close()
                flat_groups.end_step(self, groups)
        if in_backward is not None:
            in_backward.remember(flat_groups)
        return result if closure is None else loss

    def _step_groups(self, groups: list[dict[str, Any]], options: dict[str, Any]) -> Any:
        """Step the optimizer groups. If there is an accelerator, a thread steps the parameters that are on the host."""
        on_host = [[each for each in group["params"] if each.is_cpu] for group in groups]
        if not torch.accelerator.is_available() or not any(on_host):
            return self.plain_step(self, **options)
        host_groups = [{**group, "params": params} for group, params in zip(groups, on_host, strict=True)]
        stand_in = self.stand_in(host_groups, self.state)
        stepping = submit(lambda: self.plain_step(stand_in, **options))
        for group in groups:
            group["params"] = [each for each in group["params"] if not each.is_cpu]
        try:
            return self.plain_step(self, **options)
        finally:
            stepping.result()

    def stand_in(self, groups: list[dict[str, Any]], state: dict[Any, Any]) -> Any:
        """Return a shallow copy of this optimizer with the given groups and state, for use with `plain_step`."""
        stand_in = object.__new__(self.base)
        vars(stand_in).update(vars(self) | {"param_groups": groups, "state": state})
        return stand_in

    def finish_steps_in_backward(self, in_backward: StepInBackward) -> bool:
        """Complete the steps that backward has started, without a call of `step`. Return True if there were any."""
        with torch.no_grad():
            spans = in_backward.finish(self)
            self.flat_groups().update_entries(spans, self.state)
        return bool(spans)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict as PyTorch's optimizers do, with a separate step counter for each parameter.

        Inside this optimizer, all parameters of a span share one counter.
        """
        finish_steps()
        state: Any = self.state
        try:
            self.state = {  # type: ignore[assignment]
                key: {name: own_copy(value) for name, value in entry.items()} if isinstance(key, DTensor) else entry
                for key, entry in state.items()
            }
            return super().state_dict()
        finally:
            self.state = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as PyTorch's optimizers do, but without copying offloaded state to the device."""
        finish_steps()
        handles = [  # innermost, so that users' hooks see tensors and not `_Hidden` objects
            self.register_load_state_dict_pre_hook(_hide),
            self.register_load_state_dict_post_hook(_move_to_host, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
        # Frees the former flat state now and not in the next step: programs load an empty state to make room on the
        # device.
        vars(self).pop("unshard_flat_groups", None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was created at run time, so unpickling has to create it again.
        return _restored, (self.base,), self.__getstate__()


def _zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    """Clear gradients like `Optimizer.zero_grad`, but without one torch call per DTensor."""
    in_backward = vars(self).get("unshard_step_in_backward")
    stepped = False if in_backward is None else self.finish_steps_in_backward(in_backward)  # type: ignore[attr-defined]
    parameters = optimizer_parameters(self)
    if set_to_none:
        for each in parameters:
            each.grad = None
    else:
        gradients = [each.grad for each in parameters if each.grad is not None]
        if any(each.requires_grad or each.is_sparse for each in gradients):
            Optimizer.zero_grad(self, set_to_none=False)
        elif gradients:
            foreach_zero(list(map(local_part, gradients)))
    if in_backward is not None and stepped:
        in_backward.warn_of_steps()


def _without_hooks(step: Any) -> Any:
    # Torch wraps hooks around the `step` of a class when it creates the first optimizer of that class.
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _restored(base: type[Optimizer]) -> Optimizer:
    return object.__new__(_flat_class(base))


_classes: dict[type, type[Optimizer]] = {}


def _flat_class(base: type[Optimizer]) -> type[Optimizer]:
    """Return a class with the name of `base` that has `Flat` mixed in. There is one such class per `base`."""
    if base not in _classes:
        step, plain = Optimizer.profile_hook_step(Flat.step), staticmethod(_without_hooks(base.step))
        step.hooked = True  # type: ignore[attr-defined]
        members = {"base": base, "step": step, "plain_step": plain, "__doc__": base.__doc__}
        if base.zero_grad is Optimizer.zero_grad:  # a class may override it
            members["zero_grad"] = _zero_grad
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        _classes.setdefault(base, type(base.__name__, (Flat, base), members | names))
    return _classes[base]


# -- state on the host: loading -----------------------------------------------------------------------------------


class _Hidden:
    """Hides a state tensor from torch's `load_state_dict`, which would copy all state to the device at once."""

    def __init__(self, value: DTensor):
        self.value = value


def _hide(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    devices = _state_devices(optimizer)
    parameters = optimizer_parameters(optimizer)
    numbers = {number for number, each in zip(saved, parameters, strict=False) if id(each) in devices}
    state = {
        number: {key: _Hidden(value) if _is_offloaded(key, value) else value for key, value in entry.items()}
        if number in numbers
        else entry
        for number, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _is_offloaded(key: Any, value: Any) -> bool:
    return isinstance(value, DTensor) and key != "step"  # the optimizer decides where counters are


@torch.no_grad()
def _move_to_host(optimizer: Optimizer) -> None:
    """Move offloaded state to the host, and unwrap the state that `_hide` has wrapped."""
    devices = _state_devices(optimizer)
    for parameter in optimizer_parameters(optimizer):
        if id(parameter) in devices and parameter in optimizer.state:
            entry = optimizer.state[parameter]
            for key, value in entry.items():
                if isinstance(value, _Hidden) or _is_offloaded(key, value):
                    entry[key] = _moved(devices[id(parameter)], parameter, value)


def _moved(device: torch.device, parameter: torch.Tensor, value: _Hidden | DTensor) -> DTensor:
    dtensor, dtype = value, None
    if isinstance(dtensor, _Hidden):
        # Cast the tensor as torch's `load_state_dict` would have done.
        dtensor, dtype = dtensor.value, parameter.dtype if parameter.is_floating_point() else None
    old = local_of(dtensor)
    local = old.to(device, dtype or old.dtype)
    spec = spec_of(dtensor)
    return dtensor if local is old else make_dtensor(local, spec.mesh, spec.placements, dtensor.shape)


def _state_devices(optimizer: Optimizer) -> dict[int, torch.device]:
    ranges = shard_ranges_of(optimizer_parameters(optimizer))
    return {key: each.states.device for key, each in ranges.items() if each.states is not None}
