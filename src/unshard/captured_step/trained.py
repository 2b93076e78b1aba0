"""What a step trains: models, optimizers and a scaler, and all that a recording of the step depends on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, is_not
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm.groups import ranks_of
from ..engine.api import NOTHING_LEFT, GradState, LeftGradients, ParamGroup, Phase, Root, Unit, param_group_of, state_of
from ..torch_private import hooks_of, local_of, own_buffers, own_modules, own_parameters
from .learning_rates import reads_on_device
from .signatures import TrainedSignature

Left = tuple[LeftGradients, ...]
"""What each param group has of gradients."""

_training, _requires_grad, _grad, _unit_options = map(attrgetter, ("training", "requires_grad", "grad", "options"))
_grad_state, _extended = attrgetter("gradients.state"), attrgetter("sharded.extended")
_copy_streams = attrgetter("sharded.offload.copy_streams")
_options = attrgetter(
    *("reshard_after_forward", "slice_after_forward", "reshard_after_backward", "show_sharded_after_forward"),
    *("show_sharded_after_backward", "unshard_in_backward", "synchronise", "all_reduce", "reduce_unused"),
    *("reduce_buffers", "divide_factor", "force_sum", "divide_in_halves", "last_backward"),
)
_option_objects = attrgetter("all_reduce_hook", "forward_prefetch", "backward_prefetch")
_RESTING = {GradState.EMPTY, GradState.REDUCED}


class Trained:
    """Every call compares all of it with the call before, so that is done by functions in C over lists made once."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], scaler: Any):
        self._models, self.optimizers, self.scaler = models, optimizers, scaler
        self._modules: list[nn.Module] = []
        self._children: list[Any] = []
        self._child_dicts: list[dict[str, Any]] = []
        self._parameter_dicts: list[dict[str, Any]] = []
        self._buffer_dicts: list[dict[str, Any]] = []
        self._hook_dicts: list[dict[int, Any]] = []
        self.units: list[Unit] = []
        self._groups: list[ParamGroup] = []
        self.parameters: list[torch.Tensor] = []
        """Those that modules hold."""
        self.unmanaged: list[torch.Tensor] = []
        """Those of them that are not sharded."""

    def look(self) -> None:
        """Follow changes of the models: modules that were added or removed, parameters that were replaced."""
        children = _values(self._child_dicts)
        if not self._modules or children != self._children:
            self._modules = list(dict.fromkeys(module for model in self._models for module in model.modules()))
            self._child_dicts = list(map(own_modules, self._modules))
            self._children = _values(self._child_dicts)
            self._parameter_dicts = list(map(own_parameters, self._modules))
            self._buffer_dicts = list(map(own_buffers, self._modules))
            self._hook_dicts = [hooks for module in self._modules for hooks in hooks_of(module)]
        self._look_at_parameters()

    def _look_at_parameters(self) -> None:
        parameters = [each for each in _values(self._parameter_dicts) if each is not None]
        if list(map(id, parameters)) == list(map(id, self.parameters)):
            return
        self.parameters = parameters
        states = map(state_of, self._modules)
        self.units = list(dict.fromkeys(state.unit for state in states if state is not None))
        self._groups = [group for unit in self.units for group in unit.param_groups]
        self.unmanaged = [each for each in parameters if param_group_of(each) is None]

    @property
    def device(self) -> torch.device | None:
        """Where the models compute; None if they have no parameters."""
        if self.units:
            return self.units[0].device
        return self.parameters[0].device if self.parameters else None

    def ranks(self) -> list[int]:
        """The ranks that train these models together; none where collectives are not compared.

        Flat parameters do not tell over which ranks they are replicated, unless that is the whole job: each set of
        ranks that shards them is then one of its own.
        """
        found: set[int] = set()
        for group in self._groups:
            found.update(group.shards.compared_ranks or group.replicas.compared_ranks)
            if group.shards.world * group.replicas.world == dist.get_world_size() and found:
                found.update(range(dist.get_world_size()))
        meshes = {id(mesh): mesh for each in self.parameters if (mesh := getattr(each, "device_mesh", None))}
        if found:
            found.update(*map(ranks_of, meshes.values()))
        return sorted(found)

    def roots(self) -> list[Root]:
        references = dict.fromkeys(unit.root for unit in self.units if unit.root is not None)
        return [root for each in references if (root := each()) is not None]

    def obstacle(self) -> str:
        """Why no step of these can be recorded or replayed now; empty if one can."""
        if any(root.in_forward or root.in_backward for root in self.roots()):
            return "it is called inside a forward or a backward of the model"
        if any(map(_extended, self._groups)):
            group = next(filter(_extended, self._groups))
            return f"unit {group.unit_name!r} has parameters with a gather protocol of their own"
        if any(map(is_not, map(_copy_streams, self._groups), repeat(None))):
            return "the model keeps its shards on the host (CPUOffloadPolicy)"
        for optimizer in self.optimizers:
            if "unshard_step_in_backward" in vars(optimizer):
                return f"{type(optimizer).__name__} steps in backward (flat(..., step_in_backward=True))"
        if any(root.unit.options.post_optim_event is not None for root in self.roots()):
            return "set_post_optim_event was called"
        return ""

    def obstacle_in(self, left: Left) -> str:
        """Why gradients that lie between two calls stand in the way; empty if they do not."""
        if not all(each.repeatable for each in left):
            return "gradients lie between two calls that are not reduced (no_sync() of the wrapper) or were set by hand"
        if any(map(is_not, map(_grad, self.unmanaged), repeat(None))):
            return "a gradient of a parameter that is not sharded lies between two calls. Clear it in the step"
        return ""

    def rest(self) -> None:
        """Reshard units that an evaluation, or a call of unshard(), has left unsharded."""
        kept = [unit for unit in self.units if not unit.at_rest and unit.phase is Phase.IDLE]
        for unit in kept:
            unit.rest()
        if kept:
            self._look_at_parameters()

    # -- what recordings depend on --------------------------------------------------------------------------

    def identity(self) -> list[Any]:
        """What all recordings rely on: objects and addresses. If it changes, none of them is right any more."""
        buffers = [each for each in _values(self._buffer_dicts) if each is not None]
        tensors = [*self.parameters, *buffers]
        return [
            self._children,
            list(chain.from_iterable(self._hook_dicts)),
            list(map(id, tensors)),
            [local_of(each).data_ptr() if isinstance(each, DTensor) else each.data_ptr() for each in tensors],
            [id(unit.policy) for unit in self.units],
            [id(group.shards) for group in self._groups],
            self.optimizer_identity(),
        ]

    def optimizer_identity(self) -> list[Any]:
        """The objects that optimizers have as their state, and their parameters."""
        return [
            [
                list(map(id, chain.from_iterable(map(dict.values, optimizer.state.values())))),
                [list(map(id, group["params"])) for group in optimizer.param_groups],
            ]
            for optimizer in self.optimizers
        ]

    def signature(self, left: Left) -> TrainedSignature:
        """What chooses among recordings: modes, flags, settings, and the gradients that are there, `left`."""
        options = list(map(_unit_options, self.units))
        return TrainedSignature(
            tuple(map(_training, self._modules)),
            tuple(map(_requires_grad, self.parameters)),
            tuple(map(_options, options)),
            tuple(map(id, chain.from_iterable(map(_option_objects, options)))),
            left,
            tuple(_settings(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups),
            self._scaler_settings(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.are_deterministic_algorithms_enabled(),
        )

    def _scaler_settings(self) -> tuple[Any, ...]:
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return ()
        return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()

    # -- what a step leaves ---------------------------------------------------------------------------------

    def left(self) -> Left:
        nothing = not any(map(is_not, map(_grad, self.parameters), repeat(None)))
        if nothing and _RESTING.issuperset(map(_grad_state, self._groups)):
            return (NOTHING_LEFT,) * len(self._groups)
        return tuple([group.gradients.left() for group in self._groups])

    def can_leave(self, left: Left) -> bool:
        return all(group.gradients.can_leave(each) for group, each in zip(self._groups, left, strict=True))

    def leave(self, left: Left) -> None:
        for group, each in zip(self._groups, left, strict=True):
            group.gradients.leave(each)

    def keep_left(self) -> None:
        """Keep the memory of gradients that are left where it is, for good."""
        for group in self._groups:
            if not group.gradients.left().nothing:
                group.gradients.stay()

    def obstacle_after(self) -> str:
        """Why what a step leaves cannot be repeated; empty if it can."""
        for unit in self.units:
            if not unit.at_rest:
                return f"it leaves unit {unit.name!r} unsharded (set_reshard_after_backward(False))"
        return self.obstacle_in(self.left())

    def undo(self, before: TrainedState) -> None:
        """Undo what a recording that failed has done on the host: nothing of it has run on the device."""
        for root in self.roots():
            root.abandon()
        if self.can_leave(before.left):
            self.leave(before.left)
        before.restore()
        if self.scaler is not None and hasattr(self.scaler, "forget_stages"):
            self.scaler.forget_stages()


class TrainedState:
    """Gradients and optimizer state, as the host knows them."""

    def __init__(self, trained: Trained):
        self.left = trained.left()
        self._unmanaged = trained.unmanaged
        self._states = [(each, {key: dict(entry) for key, entry in each.state.items()}) for each in trained.optimizers]

    def restore(self) -> None:
        for parameter in self._unmanaged:  # they had no gradients
            parameter.grad = None
        for optimizer, state in self._states:
            for key in optimizer.state.keys() - state.keys():
                del optimizer.state[key]
            for key, entry in state.items():
                optimizer.state[key].clear()
                optimizer.state[key].update(entry)


def _values(dicts: list[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[Any, ...]:
    """All settings of a param group that a recording repeats: the learning rate only if it is read on the host."""
    left_out = ("params", "lr") if reads_on_device(optimizer, group) else ("params",)
    return tuple((name, _comparable(value)) for name, value in group.items() if name not in left_out)


def _comparable(value: Any) -> Any:
    """Numbers and flags as they are, everything else by identity."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, tuple) and all(isinstance(each, bool | int | float | str | None) for each in value):
        return value
    return id(value)
