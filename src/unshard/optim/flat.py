"""Optimizers that step a few flat tensors per unit instead of every DTensor of a model."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import ArgumentError
from ..torch_private import foreach_zero, is_scheduled, local_of, schedule_again
from .entries import detached
from .shadow import Shadow

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)

_O = torch.optim
_ELEMENTWISE = (
    *(_O.SGD, _O.Adam, _O.AdamW, _O.Adagrad, _O.RMSprop, _O.NAdam, _O.RAdam, _O.Adamax, _O.Adadelta, _O.ASGD, _O.Rprop),
)
_NOT_ELEMENTWISE = {
    "LBFGS": "it works with inner products over all parameters",
    "Adafactor": "it keeps averages over the rows and columns of each parameter",
    "Muon": "it orthogonalises the update of each matrix",
    "SparseAdam": "it takes sparse gradients, and those of sharded parameters are dense",
}


def flat(optimizer: _Optimizer, *, elementwise: bool = False) -> _Optimizer:
    """Let the optimizer step flat shards; returns the very object. After `fully_shard`.

    A step runs the optimizer's own code on a few flat tensors per unit: parameters that lie side by side in memory, one
    tensor for each dtype and parameter group. Everything else is as before, the numbers too: parameter groups and state
    per parameter, hooks, schedulers, scalers, and state dicts that optimizers with and without this can load.

    Only optimizers that treat each element by itself can do this; torch's are known. With `elementwise=True` you say
    that yours is one too: the step of an element depends on that element, its gradient and its state, and an element
    that is zero stays zero while its gradient is. A closure is called before the step, once.
    """
    if isinstance(optimizer, Flat):
        return optimizer
    _check(optimizer, elementwise)
    scheduled = is_scheduled(optimizer)
    optimizer.__class__ = _flat_class(type(optimizer))  # type: ignore[assignment]
    if scheduled:
        schedule_again(optimizer)
    return optimizer


def _check(optimizer: Any, elementwise: bool) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"flat takes a torch.optim.Optimizer, got a {type(optimizer).__name__}.")
    name = type(optimizer).__name__
    for base in type(optimizer).__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in _NOT_ELEMENTWISE:
            raise ArgumentError(
                f"{name} cannot step flat shards: {_NOT_ELEMENTWISE[base.__name__]}. Use it as it is, without flat."
            )
    if type(optimizer) not in _ELEMENTWISE and not elementwise:
        raise ArgumentError(
            f"{name} is not known to treat each element by itself, and flat shards have lost the parameters' shapes. "
            "If its step of an element depends on that element, its gradient and its state alone, and leaves zero as "
            "it is where the gradient is zero, pass elementwise=True."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ArgumentError(f"{name}(differentiable=True) cannot step flat shards: autograd would not see the step.")
    if not any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]):
        raise ArgumentError(f"No parameter of this {name} is sharded. Call flat after fully_shard.")
    if "step" in vars(optimizer) and not is_scheduled(optimizer):
        raise ArgumentError(
            f"Something has replaced the step of this {name} object, and flat would replace that. Call flat first."
        )


class Flat(Optimizer):
    """Mixed into the class of an optimizer. Its step lends the optimizer other groups and other state."""

    base: ClassVar[type[Optimizer]]
    plain_step: ClassVar[Any]
    """The step of the class it was before, without the hooks around it: those have run already."""

    def _shadow(self) -> Shadow:
        """Made when it is first needed: copies and unpickled optimizers have none."""
        shadow = vars(self).get("unshard_shadow")
        if shadow is None:
            shadow = vars(self)["unshard_shadow"] = Shadow()
        return shadow

    def step(self, closure: Any = None, **options: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shadow, groups, state = self._shadow(), self.param_groups, self.state
        with torch.no_grad():
            shadows = shadow.groups(self)
        try:
            self.param_groups, self.state = shadows, shadow.state
            result = self.plain_step(self, **options)
        finally:
            self.param_groups, self.state = groups, state
            with torch.no_grad():
                shadow.release(self, shadows)
        return result if closure is None else loss

    def state_dict(self) -> dict[str, Any]:
        state = self.state
        try:
            self.state = detached(state)  # type: ignore[assignment]
            return super().state_dict()
        finally:
            self.state = state

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made at run time; whoever reads this makes it again.
        return _restored, (self.base,), self.__getstate__()


def _zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    """As `Optimizer.zero_grad`, without a call of torch for every DTensor."""
    parameters = [each for group in self.param_groups for each in group["params"]]
    if set_to_none:
        for each in parameters:
            each.grad = None
        return
    gradients = [each.grad for each in parameters if each.grad is not None]
    if any(each.requires_grad or each.is_sparse for each in gradients):
        Optimizer.zero_grad(self, set_to_none=False)
    elif gradients:
        foreach_zero([local_of(each) if isinstance(each, DTensor) else each for each in gradients])


def _restored(base: type[Optimizer]) -> Optimizer:
    return object.__new__(_flat_class(base))


_classes: dict[type, type[Optimizer]] = {}


def _flat_class(base: type[Optimizer]) -> type[Optimizer]:
    """The class with `Flat` mixed in, under the same name; made once."""
    if base not in _classes:
        step, plain = Optimizer.profile_hook_step(Flat.step), base.step
        step.hooked = True  # type: ignore[attr-defined]
        plain = plain.__wrapped__ if getattr(plain, "hooked", False) else plain  # type: ignore[attr-defined]
        members = {"base": base, "step": step, "plain_step": staticmethod(plain), "__doc__": base.__doc__}
        if base.zero_grad is Optimizer.zero_grad:  # else the class has one of its own
            members["zero_grad"] = _zero_grad
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        _classes[base] = type(base.__name__, (Flat, base), members | names)
    return _classes[base]
