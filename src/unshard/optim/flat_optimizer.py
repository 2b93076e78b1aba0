"""Optimizers that step a few flat tensors per unit instead of every DTensor of a model."""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.api import finish_steps, lies_flat, note_optimizer_step, replaced_by_shards, rest_on_the_host, unlisten
from ..errors import ArgumentError, listed
from ..names import optimizer_parameters
from ..torch_private import foreach_zero, is_scheduled, local_of, rewrap_scheduled_step
from .flat_groups import FlatGroups
from .offloaded_state import StateStreamer, loading_to_host, move_to_host
from .step_in_backward import StepInBackward, submit

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)

_O = torch.optim
_ELEMENTWISE = (
    *(_O.SGD, _O.Adam, _O.AdamW, _O.Adagrad, _O.RMSprop, _O.NAdam, _O.RAdam, _O.Adamax, _O.Adadelta, _O.ASGD, _O.Rprop),
)
_UNUSED_BY_STEP = {"zero_grad", "state_dict", "load_state_dict", "add_param_group"}
"""Methods that a subclass may override, because `step` does not call them."""
_NOT_ELEMENTWISE = {
    "LBFGS": "it needs inner products over all parameters. Without flat it runs if every parameter is sharded evenly "
    "(torch does not flatten other DTensors) and the closure's loss is the same on all ranks.",
    "Adafactor": "it keeps averages over the rows and columns of each parameter. Without flat torch's DTensors do not "
    "support it either (seen with torch 2.13).",
    "Muon": "it orthogonalises the update of each matrix. Use it as it is, without flat.",
    "SparseAdam": "it takes sparse gradients, and those of sharded parameters are dense. Use Adam.",
}


def flat(
    optimizer: _Optimizer, *, elementwise: bool = False, step_in_backward: bool | None = None, ahead: bool | None = None
) -> _Optimizer:
    """Make the optimizer step flat shards; returns the same object. Call it after `fully_shard`.

    A step runs the optimizer's own code on a few flat tensors per unit: parameters that are adjacent in memory, one
    tensor for each dtype and parameter group. Results stay the same, and so do parameter groups, state per parameter,
    hooks, schedulers and scalers. Optimizers with and without `flat` can load each other's state dicts.

    The optimizer has to be elementwise. Torch's elementwise optimizers are known, and so are subclasses that keep their
    steps. With `elementwise=True` you say that yours is one: the step of an element depends only on that element, its
    gradient and its state, and an element that is zero stays zero while its gradient is zero. A closure is called once,
    before the step.

    With `step_in_backward=True` units whose shards are on the host (`CPUOffloadPolicy`) are stepped during backward,
    each as soon as its gradients are there; `step` waits for these steps and does the others. So gradients can be
    neither clipped nor scaled, no step can be skipped, and `step` must follow every backward that synchronises
    gradients. False turns it off; None leaves it as it is. `ahead` is its old, deprecated name.
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
        move_to_host(optimizer)
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
                f"step_in_backward=True has no effect on this {type(optimizer).__name__}: none of its parameters is of "
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
            "of an element depends only on that element, its gradient and its state, and leaves an element that is "
            "zero as it is while its gradient is zero, pass elementwise=True."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ArgumentError(f"{name}(differentiable=True) cannot step flat shards: autograd does not see the step.")
    _check_parameters(name, optimizer_parameters(optimizer))
    if "step" in vars(optimizer) and not is_scheduled(optimizer):
        raise ArgumentError(
            f"The step of this {name} object was replaced (optimizer.step = ...), and flat would replace it again. "
            "Call flat first."
        )


def _has_known_step(kind: type[Optimizer]) -> bool:
    """Whether the class is known, or a subclass that overrides nothing that the step of a known one uses."""
    known = next((base for base in kind.__mro__ if base in _ELEMENTWISE), None)
    if known is None or _without_hooks(kind.step) is not _without_hooks(known.step):
        return False
    added = {name for base in kind.__mro__[: kind.__mro__.index(known)] for name in vars(base)} - {"step"}
    own = {name for name in added - _UNUSED_BY_STEP if not name.startswith("__")}
    return not any(hasattr(known, name) for name in own)


def _check_parameters(name: str, parameters: list[torch.Tensor]) -> None:
    flat_unit = lies_flat(parameters)
    if flat_unit is not None:
        raise ArgumentError(
            f"flat is for parameters that fully_shard has sharded; this {name} holds {flat_unit!r} of "
            "FullyShardedDataParallel or composable.fully_shard. Use the optimizer as it is: with "
            "use_orig_params=False it has one parameter for each unit anyway."
        )
    replaced = replaced_by_shards(parameters)
    names = listed(replaced.values(), most=8)
    if not any(isinstance(each, DTensor) and id(each) not in replaced for each in parameters):
        found = (
            f"This {name} was built before fully_shard, which has replaced its parameters ({names}) by sharded ones."
            if replaced
            else f"No parameter of this {name} is sharded: either fully_shard was not called yet, or the optimizer was "
            "built before it, from parameters that fully_shard has replaced."
        )
        raise ArgumentError(
            f"{found} Call fully_shard first, then build the optimizer of model.parameters(), then flat."
        )
    if replaced:
        warnings.warn(
            f"This {name} was built before the last call of fully_shard, which has replaced {names} by sharded "
            "parameters. It will never update these. Build it after all calls of fully_shard.",
            stacklevel=4,
        )


class Flat(Optimizer):
    """Mixed into the class of an optimizer. Its step gives the optimizer other groups and other state for a while."""

    base: ClassVar[type[Optimizer]]
    plain_step: ClassVar[Any]
    """The step of the class that the optimizer had before, without the hooks around it: those have run already."""
    streams_state: ClassVar[bool] = True
    """Whether it can step parameters whose state rests on the host: the engine asks."""

    def flat_groups(self) -> FlatGroups:
        """Made at the first use: copies and unpickled optimizers have none."""
        flat_groups = vars(self).get("unshard_flat_groups")
        if flat_groups is None:
            flat_groups = vars(self)["unshard_flat_groups"] = FlatGroups()
        return flat_groups

    def follow_changes(self) -> None:
        """Make flat state of one that was loaded or moved, as the next step would."""
        with torch.no_grad():
            self.flat_groups().follow_changes(self)

    def step(self, closure: Any = None, **options: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        flat_groups, param_groups, state = self.flat_groups(), self.param_groups, self.state
        in_backward = vars(self).get("unshard_step_in_backward")
        if in_backward is not None:
            in_backward.refuse_changed_gradients()
            note_optimizer_step(self)  # before shards are copied to the device that this step has changed
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
        """Step the groups. If there is a device, parameters on the host are stepped in the thread for that."""
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
        """An object that `plain_step` can step as if it were this optimizer, with other groups and other state."""
        stand_in = object.__new__(self.base)
        vars(stand_in).update(vars(self) | {"param_groups": groups, "state": state})
        return stand_in

    def finish_steps_in_backward(self, in_backward: StepInBackward) -> bool:
        """Complete the steps that backward has begun, also if no `step` follows; whether there are any."""
        with torch.no_grad():
            segments = in_backward.finish(self)
            self.flat_groups().update_entries(segments, self.state)
        return bool(segments)

    def state_dict(self) -> dict[str, Any]:
        finish_steps()
        state = self.state
        try:
            self.state = _with_own_counters(state)  # type: ignore[assignment]
            return super().state_dict()
        finally:
            self.state = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        finish_steps()
        with loading_to_host(self):
            super().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made at run time, so it is made again when this is read.
        return _restored, (self.base,), self.__getstate__()


def _with_own_counters(state: MutableMapping[Any, Any]) -> dict[Any, Any]:
    """Copies of counters, which parameters of one segment share: another optimizer would advance them repeatedly."""
    return {
        key: {name: value.clone() if _is_plain_tensor(value) else value for name, value in entry.items()}
        if isinstance(key, DTensor)
        else entry
        for key, entry in state.items()
    }


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    """As `Optimizer.zero_grad`, without a call of torch for every DTensor."""
    in_backward = vars(self).get("unshard_step_in_backward")
    stepped = False if in_backward is None else self.finish_steps_in_backward(in_backward)  # type: ignore[attr-defined]
    parameters = optimizer_parameters(self)
    if set_to_none:
        for each in parameters:
            each.grad = None
    else:
        _zero(self, [each.grad for each in parameters if each.grad is not None])
    if in_backward is not None and stepped:
        in_backward.warn_of_steps()


def _zero(optimizer: Optimizer, gradients: list[torch.Tensor]) -> None:
    if any(each.requires_grad or each.is_sparse for each in gradients):
        Optimizer.zero_grad(optimizer, set_to_none=False)
    elif gradients:
        foreach_zero([local_of(each) if isinstance(each, DTensor) else each for each in gradients])


def _without_hooks(step: Any) -> Any:
    """Torch wraps the step of a class in hooks when the first object of the class is made."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _restored(base: type[Optimizer]) -> Optimizer:
    return object.__new__(_flat_class(base))


_classes: dict[type, type[Optimizer]] = {}


def _flat_class(base: type[Optimizer]) -> type[Optimizer]:
    """The class with `Flat` mixed in, under the same name; made once."""
    if base not in _classes:
        step, plain = Optimizer.profile_hook_step(Flat.step), staticmethod(_without_hooks(base.step))
        step.hooked = True  # type: ignore[attr-defined]
        members = {"base": base, "step": step, "plain_step": plain, "__doc__": base.__doc__}
        if base.zero_grad is Optimizer.zero_grad:  # a class may override it
            members["zero_grad"] = _zero_grad
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        _classes.setdefault(base, type(base.__name__, (Flat, base), members | names))
    return _classes[base]
