"""The models, optimizers and scaler that a step trains, and everything that a recording of the step depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain, repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm.groups import ranks_of
from ..engine.api import (
    NO_GRADIENTS,
    GradientSnapshot,
    GradState,
    ModuleBuffers,
    Options,
    ParamGroup,
    ParamState,
    Phase,
    Root,
    ShardedGrad,
    Unit,
    keep_gradient_memory,
    kept_grads,
    param_group_of,
    state_of,
)
from ..names import optimizer_parameters
from ..optim.flat_optimizer import Flat
from ..torch_private import (
    hooks_made,
    hooks_of,
    hooks_of_all,
    hooks_of_step,
    hooks_of_tensor,
    local_of,
    own_buffers,
    own_modules,
    own_parameters,
    quick_attributes,
    scaler_stages,
    storage_key,
    tree_flatten,
)
from .signature import OptimizerSettings, SameObjects, Signature, values_of

Snapshots = tuple[GradientSnapshot, ...]
"""One snapshot of the gradients for each param group."""

_training, _requires_grad, _grad, _unit_options = map(attrgetter, ("training", "requires_grad", "grad", "options"))
_root, _param_state = attrgetter("root"), attrgetter("param_state")
_grad_state, _extended = attrgetter("gradients.state"), attrgetter("sharded.extended")
_copy_streams, _pool = attrgetter("sharded.offload.copy_streams"), attrgetter("shards.pool")
_device, _data_ptr = attrgetter("device"), torch.Tensor.data_ptr
_policy, _shards, _shard = attrgetter("policy"), attrgetter("shards"), attrgetter("sharded.shard")
_reductions = attrgetter("gradients.reductions")
_BY_IDENTITY = ("all_reduce_hook", "forward_prefetch", "backward_prefetch")
_flags = attrgetter(*(each.name for each in fields(Options) if each.name not in (*_BY_IDENTITY, "post_optim_event")))
"""Gets the options that are compared by value. `post_optim_event` is not compared, because `obstacle` refuses it."""
_option_objects = attrgetter(*_BY_IDENTITY)
_WITHOUT_PARTS = (torch.Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types whose objects contain no other tensors."""
_RESTING = {GradState.EMPTY, GradState.REDUCED}


class Identity(NamedTuple):
    """Objects and addresses that all recordings rely on. A change invalidates every recording."""

    model: list[Any]
    other: list[Any]
    """Hooks and optimizer state. Their changes do not restart the warmup, because the first step creates state."""


class Trained:
    """The models, optimizers and scaler of a step. Loops in C find changes since the previous call of the step."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], scaler: Any):
        self._models, self.optimizers, self.scaler = models, optimizers, scaler
        self._modules: list[nn.Module] = []
        self._empty_dicts: list[dict[str, Any]] = []
        """The modules' empty dicts of children, parameters or buffers. The next three lists contain all other dicts."""
        self._child_dicts: list[dict[str, Any]] = []
        self._parameter_dicts: list[dict[str, Any]] = []
        self._buffer_dicts: list[dict[str, Any]] = []
        self._hook_dicts: list[dict[int, Any]] = []
        self._children = SameObjects([])
        self._held = self._buffers = self._state = self._optimized = SameObjects([])
        self._locals = self._objects = SameObjects([])
        self._settings = OptimizerSettings(optimizers)
        self._seen: list[SameObjects] = []
        self._on_other_devices = False
        self._hooks_made = -1
        self._hooked: list[dict[int, Any]] = []
        self._dtensors: list[torch.Tensor] = []
        self._plain: list[torch.Tensor] = []
        self._plain_state: list[torch.Tensor] = []
        self._number_on_host: torch.Tensor | None = None
        self.units: list[Unit] = []
        self._groups: list[ParamGroup] = []
        self.parameters: list[torch.Tensor] = []
        """All parameters of the models and the optimizers."""
        self.unmanaged: list[torch.Tensor] = []
        """Parameters that are not sharded."""
        self._cast_buffers: list[ModuleBuffers] = []
        """Buffers that a unit casts to another dtype for its forward."""

    def look(self) -> None:
        """Find modules and parameters again if modules were added or removed, or if parameters were replaced."""
        children = self._children.followed_by(values_of(self._child_dicts))
        has_changed = not self._modules or any(self._empty_dicts) or children is not self._children
        if has_changed:
            self._find_modules()
        self._look_at_parameters(has_changed)

    def _find_modules(self) -> None:
        self._modules = list(dict.fromkeys(module for model in self._models for module in model.modules()))
        children, parameters, buffers = (
            list(map(own, self._modules)) for own in (own_modules, own_parameters, own_buffers)
        )
        self._empty_dicts = [each for each in (*children, *parameters, *buffers) if not each]
        self._child_dicts, self._parameter_dicts, self._buffer_dicts = (
            list(filter(None, dicts)) for dicts in (children, parameters, buffers)
        )
        self._children = self._children.followed_by(values_of(self._child_dicts))
        self._hook_dicts = [hooks for module in self._modules for hooks in hooks_of(module)]
        self._hooks_made = -1

    def _look_at_parameters(self, modules_changed: bool = False) -> None:
        held = self._held.followed_by(values_of(self._parameter_dicts))
        optimized = self._optimized.followed_by(list(chain.from_iterable(map(optimizer_parameters, self.optimizers))))
        same = held is self._held and optimized is self._optimized
        if same and not self._on_other_devices and not modules_changed:
            return
        self._held, self._optimized = held, optimized
        # By identity: a dict would compare tensors.
        self.parameters = list({id(each): each for each in (*held.tensors(), *optimized.tensors())}.values())
        states = [state for module in self._modules if (state := state_of(module)) is not None]
        self.units = list(dict.fromkeys(state.unit for state in states))
        self._cast_buffers = [each for each in dict.fromkeys(state.buffers for state in states) if each is not None]
        self._groups = [group for unit in self.units for group in unit.param_groups]
        self.unmanaged = [each for each in self.parameters if param_group_of(each) is None]
        self._on_other_devices = not {self.device}.issuperset(map(_device, optimized.tensors()))
        self._hooks_made = -1

    def is_part(self, value: Any) -> bool:
        """Return True if `value` is the scaler, an optimizer, a module of the models, or a module without tensors."""
        if isinstance(value, nn.Module):
            return value in self._modules or next(chain(value.parameters(), value.buffers()), None) is None
        return value is self.scaler or any(value is each for each in self.optimizers)

    @property
    def device(self) -> torch.device | None:
        """The device of the models, or None if the models have no parameters."""
        if self.units:
            return self.units[0].device
        return self.parameters[0].device if self.parameters else None

    def ranks(self) -> list[int]:
        """Return the ranks that train these models together, or [] if the ranks do not compare their collectives.

        For flat parameters, only the ranks that shard them are known, not the ranks that replicate them. If both
        together are not all ranks of the job, each set of ranks that shards the parameters decides on its own.
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

    def has_dropout_of_cudnn(self) -> bool:
        """Return True if a recurrent module in train mode has dropout. cuDNN rebuilds dropout state for each seed."""
        return any(isinstance(each, nn.RNNBase) and each.dropout and each.training for each in self._modules)

    def roots(self) -> list[Root]:
        references = dict.fromkeys(map(_root, self.units))
        return [root for each in references if each is not None and (root := each()) is not None]

    def obstacle(self) -> str:
        """Return the reason why no step can be recorded or replayed now, or an empty string."""
        if self._on_other_devices:
            return f"optimizers have parameters that are not on {self.device} (for example, with CPUOffloadPolicy)"
        if torch.is_inference_mode_enabled():
            return "it is called under torch.inference_mode(). Use torch.no_grad() instead"
        roots = self.roots()
        if any(root.in_forward or root.in_backward for root in roots):
            return "it is called inside forward or backward of the model"
        if (extended := next(filter(_extended, self._groups), None)) is not None:
            return f"unit {extended.unit_name!r} has parameters with their own gather protocol"
        if any(map(is_not, map(_copy_streams, self._groups), repeat(None))):
            return "the model keeps its shards on the host (CPUOffloadPolicy)"
        if any(map(is_not, map(_pool, self._groups), repeat(None))):
            return "the model's collectives allocate from a memory pool"
        for optimizer in self.optimizers:
            if "unshard_step_in_backward" in vars(optimizer):
                return f"{type(optimizer).__name__} steps in backward (flat(..., step_in_backward=True))"
        if any(root.unit.options.post_optim_event is not None for root in roots):
            return "set_post_optim_event was called"
        return ""

    def obstacle_in(self, gradients: Snapshots) -> str:
        """Return the reason why gradients from the previous call prevent a recording, or an empty string."""
        if not all(each.repeatable for each in gradients):
            return "unreduced gradients (no_sync() of the wrapper), or gradients set by the program, remain from before"
        if any(map(is_not, map(_grad, self.unmanaged), repeat(None))):
            return (
                "a parameter that is not sharded has a gradient between two calls. End the step with "
                "optimizer.zero_grad(set_to_none=True)"
            )
        return ""

    def rest(self) -> None:
        """Reshard units that stayed unsharded after an evaluation or a call of `unshard()`."""
        self._rest(self._left_unsharded())

    def rest_after(self, result: Any) -> None:
        """Reshard units that were kept for the next forward, unless `result` may contain views of their memory."""
        kept = [unit for unit in self._left_unsharded() if unit.kept_for_forward]
        values = tree_flatten(result)[0] if kept else []
        if all(isinstance(each, _WITHOUT_PARTS) for each in values):
            returned = _storages_of(values)
            self._rest([unit for unit in kept if returned.isdisjoint(_storages_of(unit.unsharded))])

    def awaited(self) -> int:
        """Return the number of forwards whose backward has not run yet."""
        return sum([len(root.backward_order) for root in self.roots()])

    def _left_unsharded(self) -> list[Unit]:
        if not any(map(is_not, map(_param_state, self.units), repeat(ParamState.SHARDED))):
            return []
        return [unit for unit in self.units if not unit.at_rest and unit.phase is Phase.IDLE]

    def _rest(self, units: list[Unit]) -> None:
        for unit in units:
            unit.rest()
        if units:
            self._look_at_parameters()

    def follow_changes(self) -> None:
        """Let units and flat optimizers copy replaced parameters, parameters with new memory, and loaded state.

        Without this method, the next step would make these copies. If that step is recorded, every replay would repeat
        them. Units without a root are skipped, because the root resolves tied parameters in the first forward. That
        forward is never recorded.
        """
        if not all(group.sharded.is_bound() for group in self._groups):
            for unit in self.units:
                if unit.at_rest and unit.root is not None:
                    unit.rebind_params()
            self._look_at_parameters()
        for optimizer in self.optimizers:
            if isinstance(optimizer, Flat):
                optimizer.flat_groups().follow_changes(optimizer)

    def release_memory(self) -> None:
        """Free the memory of cleared gradients and of unfinished all-gathers.

        The next forward would free this memory too late. If that forward is recorded, replays would write to the memory
        when it already has new owners. Also, the memory keeps the allocator from freeing the blocks of earlier steps.
        """
        for unit in self.units:
            for group in unit.param_groups:
                group.gradients.release_idle()
                if unit.at_rest and not group.holders:
                    group.release_gathered()

    def forget_casts(self) -> None:
        """Drop the cached casts of buffers.

        A recording must create its own casts. Cached casts would become outdated without notice, because a replay that
        writes a buffer does not change the buffer's version.
        """
        for buffers in self._cast_buffers:
            buffers.forget_casts()

    # -- what recordings depend on ------------------------------------------------------------------------

    def identity(self) -> Identity:
        """Return the current `Identity`. Unchanged lists of objects are reused, so comparing two identities is fast."""
        self._buffers = self._buffers.followed_by(values_of(self._buffer_dicts))
        attributes = [each for each in values_of(map(vars, self.optimizers)) if isinstance(each, torch.Tensor)]
        self._state = self._state.followed_by(values_of(self._entries_of_state()) + attributes)
        self._settings.look()
        held = [self._held, self._optimized, self._buffers, self._state, self._settings.tensors]
        if len(held) != len(self._seen) or any(map(is_not, held, self._seen)):
            self._seen = held
            self._look_at_memory()
        self._locals = self._locals.followed_by(list(map(local_of, self._dtensors)))
        options = map(_option_objects, map(_unit_options, self.units))
        self._objects = self._objects.followed_by(
            [
                *map(_policy, self.units),
                *chain.from_iterable(options),
                *map(_shards, self._groups),
                *map(_shard, self._groups),
                *map(_reductions, self._groups),
            ]
        )
        model = [self._held, self._optimized, self._buffers, self._children, self._locals, self._objects]
        return Identity(
            [*model, list(map(_data_ptr, self._plain))],
            [self._state, self._settings.tensors, self._hooks(), list(map(_data_ptr, self._plain_state))],
        )

    def _look_at_memory(self) -> None:
        """Separate plain tensors from DTensors.

        `identity` detects replaced memory by the address of a plain tensor, and by the local tensor of a DTensor.
        """
        tensors = [*self.parameters, *self._buffers.tensors()]
        self._dtensors = [each for each in tensors if isinstance(each, DTensor)]
        self._plain = [each for each in tensors if not isinstance(each, DTensor)]
        state = [*self._state.tensors(), *self._settings.tensors.tensors()]
        self._plain_state = [each for each in state if not isinstance(each, DTensor)]
        numbers = (each for each in self._buffers.tensors() if each.dim() == 0 and each.device != self.device)
        self._number_on_host = next(numbers, None)

    def obstacle_in_buffers(self) -> str:
        """Return the reason why a buffer prevents a recording, or an empty string. Call `identity` first."""
        if self._number_on_host is None:
            return ""
        number = self._number_on_host
        names = ", ".join(name for model in self._models for name, each in model.named_buffers() if each is number)
        return (
            f"buffer {names!r} is a number on {number.device}, and a replay would repeat its recorded value. Move it "
            f"to {self.device}"
        )

    def _hooks(self) -> list[tuple[int, ...]]:
        # Search for hooks only if one was registered anywhere since the last call.
        made = hooks_made()
        if made != self._hooks_made:
            self._hooks_made = made
            of_tensors = chain.from_iterable(map(hooks_of_tensor, self.parameters))
            of_steps = chain.from_iterable(map(hooks_of_step, self.optimizers))
            self._hooked = [each for each in (*self._hook_dicts, *of_tensors, *of_steps, *hooks_of_all()) if each]
        return list(map(tuple, self._hooked))

    def tensor_dicts(self) -> list[dict[str, Any]]:
        return [own(module) for own in (own_parameters, own_buffers) for module in self._modules]

    def tensors(self) -> SameObjects:
        """Return the tensors of modules and optimizers that the step must not replace."""
        self._settings.look()
        held = values_of([*self.tensor_dicts(), *self._entries_of_state(), *map(vars, self.optimizers)])
        return SameObjects([*SameObjects(held).tensors(), *self._settings.tensors.tensors()])

    def _entries_of_state(self) -> list[dict[str, Any]]:
        entries = [entry for each in self.optimizers for entry in each.state.values()]
        # Some optimizers store other objects besides dicts.
        if {dict}.issuperset(map(type, entries)):
            return entries
        return [each for each in entries if isinstance(each, dict)]

    def signature(self, arguments: Any, gradients: Snapshots) -> Signature:
        """Return the signature of a call, which selects a recording. `gradients` are snapshots before the call."""
        with quick_attributes():
            requires_grad = tuple(map(_requires_grad, self.parameters))
        self._settings.look()
        of_scaler: tuple[Any, ...] = ()
        if (scaler := self.enabled_scaler) is not None:
            of_scaler = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        return Signature(
            arguments,
            tuple(map(_training, self._modules)),
            requires_grad,
            tuple(map(_flags, map(_unit_options, self.units))),
            gradients,
            self._settings.compared,
            of_scaler,
            self.stages(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
        )

    @property
    def enabled_scaler(self) -> Any:
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    # -- gradients and units after a step -----------------------------------------------------------------

    def gradients(self) -> Snapshots:
        with quick_attributes():
            nothing = not any(map(is_not, map(_grad, self.parameters), repeat(None)))
        if nothing and _RESTING.issuperset(map(_grad_state, self._groups)):
            return (NO_GRADIENTS,) * len(self._groups)
        return tuple(map(GradientSnapshot.of, self._groups))

    def can_restore(self, gradients: Snapshots) -> bool:
        return all(each.fits(group) for each, group in zip(gradients, self._groups, strict=True))

    def restore(self, gradients: Snapshots) -> None:
        for each, group in zip(gradients, self._groups, strict=True):
            each.restore(group)

    def kept_grads(self) -> list[ShardedGrad]:
        """Return the gradients whose memory stays allocated, because recordings may write to it."""
        return list(chain.from_iterable(map(kept_grads, self._groups)))

    def keep_gradient_memory(self) -> None:
        """Keep the memory of the current gradients allocated at the same address from now on."""
        for group in self._groups:
            if GradientSnapshot.of(group) != NO_GRADIENTS:
                keep_gradient_memory(group)

    def obstacle_after(self) -> str:
        """Return the reason why a replay cannot reproduce the state after the step, or an empty string."""
        return self.unit_left_unsharded() or self.obstacle_in(self.gradients())

    def unit_left_unsharded(self) -> str:
        """Return a reason that names a unit that is not at rest, or an empty string if all units are at rest."""
        for unit in self.units:
            if not unit.at_rest:
                return (
                    f"it leaves unit {unit.name!r} unsharded, after a forward without backward (use torch.no_grad()) "
                    "or because its result may be an unsharded parameter (return a clone, in a tuple or a dict)"
                )
        return ""

    def stages(self) -> tuple[Any, ...]:
        """Return the scaler's stage for each optimizer (for example, unscaled or stepped) since its last `update`."""
        return () if self.enabled_scaler is None else scaler_stages(self.scaler)


def _storages_of(values: Sequence[Any]) -> set[int]:
    tensors = [each for each in values if isinstance(each, torch.Tensor) and each.layout is torch.strided]
    return {storage_key(each.untyped_storage()) for each in tensors}
