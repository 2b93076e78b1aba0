"""Optimizers that step a few flat tensors per unit instead of every DTensor of a model."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.arrivals import settle, unlisten
from ..engine.flat import lies_flat, replaced_by_shards, rest_on_the_host
from ..engine.writes import note_optimizer_step
from ..errors import ArgumentError
from ..torch_private import foreach_zero, is_scheduled, local_of, schedule_again
from . import host
from .ahead import Ahead
from .entries import detached
from .loading import loading, send_home
from .shadow import Shadow
from .stream import Stream

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)

_O = torch.optim
_ELEMENTWISE = (
    *(_O.SGD, _O.Adam, _O.AdamW, _O.Adagrad, _O.RMSprop, _O.NAdam, _O.RAdam, _O.Adamax, _O.Adadelta, _O.ASGD, _O.Rprop),
)
_BESIDE_STEPS = {"zero_grad", "state_dict", "load_state_dict", "add_param_group"}
"""What subclasses of these may do in their own way, since steps do not use it."""
_NOT_ELEMENTWISE = {
    "LBFGS": "it works with inner products over all parameters. Without flat it runs if every parameter is cut evenly "
    "(torch does not flatten other DTensors) and the closure's loss is the same on all ranks.",
    "Adafactor": "it keeps averages over the rows and columns of each parameter. Without flat torch's DTensors do not "
    "support it either (seen with torch 2.13).",
    "Muon": "it orthogonalises the update of each matrix. Use it as it is, without flat.",
    "SparseAdam": "it takes sparse gradients, and those of sharded parameters are dense. Use Adam.",
}


def flat(optimizer: _Optimizer, *, elementwise: bool = False, ahead: bool | None = None) -> _Optimizer:
    """Let the optimizer step flat shards; returns the very object. After `fully_shard`.

    A step runs the optimizer's own code on a few flat tensors per unit: parameters that lie side by side in memory, one
    tensor for each dtype and parameter group. Everything else is as before, the numbers too: parameter groups and state
    per parameter, hooks, schedulers, scalers, and state dicts that optimizers with and without this can load.

    Only optimizers that treat each element by itself can do this; torch's are known, with subclasses that keep their
    steps. With `elementwise=True` you say that yours is one too: the step of an element depends on that element, its
    gradient and its state, and an element that is zero stays zero while its gradient is. A closure is called before the
    step, once.

    With `ahead=True` units that rest on the host (`CPUOffloadPolicy`) are stepped during backward, each as soon as its
    gradients have arrived there; `step` waits for these and does the rest. So gradients can be neither clipped nor
    scaled, no step can be skipped, and every backward that synchronises gradients must be followed by `step`. False
    ends that; None leaves it as it is.
    """
    if not isinstance(ahead, bool | None):
        raise ArgumentError(f"ahead must be True or False, got {ahead!r}.")
    if not isinstance(optimizer, Flat):
        _check(optimizer, elementwise)
        scheduled = is_scheduled(optimizer)
        optimizer.__class__ = _flat_class(type(optimizer))  # type: ignore[assignment]
        if scheduled:
            schedule_again(optimizer)
        send_home(optimizer)
    if ahead is not None:
        _step_ahead(optimizer, ahead)
    return optimizer


def _step_ahead(optimizer: Any, wanted: bool) -> None:
    before = vars(optimizer).pop("unshard_ahead", None)
    if before is not None:
        optimizer.collect(before)
        unlisten(before)
    if wanted:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if not rest_on_the_host(parameters):
            warnings.warn(
                f"ahead=True does nothing for this {type(optimizer).__name__}: none of its parameters is of a unit "
                "that rests on the host beside a device (CPUOffloadPolicy).",
                stacklevel=3,
            )
        vars(optimizer)["unshard_ahead"] = Ahead(optimizer)


def _check(optimizer: Any, elementwise: bool) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"flat takes a torch.optim.Optimizer, got a {type(optimizer).__name__}.")
    name = type(optimizer).__name__
    for base in type(optimizer).__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in _NOT_ELEMENTWISE:
            raise ArgumentError(f"{name} cannot step flat shards: {_NOT_ELEMENTWISE[base.__name__]}")
    if not elementwise and not _steps_like_a_known_one(type(optimizer)):
        raise ArgumentError(
            f"{name} is not known to treat each element by itself, and flat shards have lost the parameters' shapes. "
            "If its step of an element depends on that element, its gradient and its state alone, and leaves zero as "
            "it is where the gradient is zero, pass elementwise=True."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ArgumentError(f"{name}(differentiable=True) cannot step flat shards: autograd would not see the step.")
    _check_parameters(name, [each for group in optimizer.param_groups for each in group["params"]])
    if "step" in vars(optimizer) and not is_scheduled(optimizer):
        raise ArgumentError(
            f"Something has replaced the step of this {name} object, and flat would replace that. Call flat first."
        )


def _steps_like_a_known_one(kind: type[Optimizer]) -> bool:
    """Whether the class is known, or a subclass that has left alone what the steps of a known one consist of."""
    known = next((base for base in kind.__mro__ if base in _ELEMENTWISE), None)
    if known is None or _without_hooks(kind.step) is not _without_hooks(known.step):
        return False
    added = {name for base in kind.__mro__[: kind.__mro__.index(known)] for name in vars(base)} - {"step"}
    own = {name for name in added - _BESIDE_STEPS if not name.startswith("__")}
    return not any(hasattr(known, name) for name in own)


def _check_parameters(name: str, parameters: list[torch.Tensor]) -> None:
    flat_unit = lies_flat(parameters)
    if flat_unit is not None:
        raise ArgumentError(
            f"flat is for parameters that fully_shard has cut; this {name} holds {flat_unit!r} of "
            "FullyShardedDataParallel or composable.fully_shard. Use the optimizer as it is: with "
            "use_orig_params=False it has one parameter for each unit anyway."
        )
    replaced = replaced_by_shards(parameters)
    listed = ", ".join([*list(replaced.values())[:8], *(["..."] if len(replaced) > 8 else [])])
    if not any(isinstance(each, DTensor) and id(each) not in replaced for each in parameters):
        found = (
            f"This {name} was built before fully_shard, which has replaced its parameters ({listed}) by sharded ones."
            if replaced
            else f"No parameter of this {name} is sharded: either fully_shard was not called yet, or the optimizer was "
            "built before it, from parameters that fully_shard has replaced."
        )
        raise ArgumentError(f"{found} First fully_shard, then the optimizer of model.parameters(), then flat.")
    if replaced:
        warnings.warn(
            f"This {name} was built before the last call of fully_shard, which has replaced {listed} by sharded "
            "parameters. It will never move these. Build it after all calls of fully_shard.",
            stacklevel=4,
        )


class Flat(Optimizer):
    """Mixed into the class of an optimizer. Its step lends the optimizer other groups and other state."""

    base: ClassVar[type[Optimizer]]
    plain_step: ClassVar[Any]
    """The step of the class it was before, without the hooks around it: those have run already."""
    streams_state: ClassVar[bool] = True
    """Whether it can step parameters whose state rests on the host: the engine asks."""

    def shadow(self) -> Shadow:
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
        shadow, groups, state = self.shadow(), self.param_groups, self.state
        ahead = vars(self).get("unshard_ahead")
        if ahead is not None:
            ahead.refuse_written()
            note_optimizer_step()  # before anything is sent that this step has made
        with torch.no_grad():
            shadows = shadow.groups(self, [] if ahead is None else ahead.finish(self))
            stream = Stream(shadow.streamed, shadow.state, groups)
        try:
            self.param_groups, self.state = shadows, shadow.state
            result = self._plain_step(shadows, options)
            for self.param_groups, self.state in stream.lend():
                self.plain_step(self, **options)
        finally:
            self.param_groups, self.state = groups, state
            with torch.no_grad():
                stream.close()
                shadow.release(self, shadows)
        if ahead is not None:
            ahead.learn(shadow)
        return result if closure is None else loss

    def _plain_step(self, shadows: list[dict[str, Any]], options: dict[str, Any]) -> Any:
        """Step the groups; beside a device, what is on the host gets all cores that this rank may use."""
        mine = [[each for each in group["params"] if each.is_cpu] for group in shadows]
        if not torch.accelerator.is_available() or not any(mine):
            return self.plain_step(self, **options)
        twin = self.twin([{**group, "params": own} for group, own in zip(shadows, mine, strict=True)], self.state)
        stepping = host.submit(lambda: self.plain_step(twin, **options))
        for group in shadows:
            group["params"] = [each for each in group["params"] if not each.is_cpu]
        try:
            return self.plain_step(self, **options)
        finally:
            stepping.result()

    def twin(self, groups: list[dict[str, Any]], state: dict[Any, Any]) -> Any:
        """Something that the plain step takes for this optimizer, with other groups and other state."""
        twin = object.__new__(self.base)
        vars(twin).update(vars(self) | {"param_groups": groups, "state": state})
        return twin

    def collect(self, ahead: Ahead) -> bool:
        """What was stepped ahead counts as a step, even if none follows; whether there is any."""
        with torch.no_grad():
            spans = ahead.finish(self)
            self.shadow().show(spans, self.state)
        return bool(spans)

    def state_dict(self) -> dict[str, Any]:
        settle()
        state = self.state
        try:
            self.state = detached(state)  # type: ignore[assignment]
            return super().state_dict()
        finally:
            self.state = state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        settle()
        with loading(self):
            super().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made at run time; whoever reads this makes it again.
        return _restored, (self.base,), self.__getstate__()


def _zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
    """As `Optimizer.zero_grad`, without a call of torch for every DTensor."""
    ahead = vars(self).get("unshard_ahead")
    stepped = False if ahead is None else self.collect(ahead)  # type: ignore[attr-defined]
    parameters = [each for group in self.param_groups for each in group["params"]]
    if set_to_none:
        for each in parameters:
            each.grad = None
    else:
        _zero(self, [each.grad for each in parameters if each.grad is not None])
    if ahead is not None and stepped:
        ahead.warn_of_steps()


def _zero(optimizer: Optimizer, gradients: list[torch.Tensor]) -> None:
    if any(each.requires_grad or each.is_sparse for each in gradients):
        Optimizer.zero_grad(optimizer, set_to_none=False)
    elif gradients:
        foreach_zero([local_of(each) if isinstance(each, DTensor) else each for each in gradients])


def _without_hooks(step: Any) -> Any:
    """Torch wraps the step of a class when it makes the first object of it."""
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
        if base.zero_grad is Optimizer.zero_grad:  # else the class has one of its own
            members["zero_grad"] = _zero_grad
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        _classes[base] = type(base.__name__, (Flat, base), members | names)
    return _classes[base]
