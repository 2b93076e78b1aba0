"""`FSDPModule`, the base class that `fully_shard` adds to the class of each module."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..comm.groups import pool_of_group, symmetric_pool
from ..comm.interface import AllGather, ReduceScatter
from ..engine.api import (
    FSDPState,
    ParamGroup,
    Unit,
    UnshardHandle,
    location_of,
    refuse_shared_memory,
    share,
    state_of,
    users_of,
)
from ..errors import ArgumentError, ArgumentTypeError, PickleError, PolicyError, UnsupportedError
from ..torch_private import local_of, make_dtensor, spec_of

_FSDP_CLASSES: dict[type, type] = {}


class FSDPModule:
    """Base class with the methods of a sharded module.

    The class of a sharded module is `FSDP<Original>`, which derives from this class and from the original class. With
    `recurse=True`, a setter changes all units inside the module, otherwise only the module's own unit, even on the
    root. Example: `model.set_requires_gradient_sync(False)`.
    """

    # PyTorch's compiler reads these, and so do generation loops of other libraries, which keep ranks in step.
    _is_fsdp_managed_module = True
    _fsdp_use_orig_params = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an instance of the original class, so that a slice of a sharded Sequential is a plain Sequential."""
        original = cls.__mro__[2]
        instance = original.__new__(original, *args, **kwargs)
        if not _skips_init.get():
            instance.__init__(*args, **kwargs)
        return instance

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather the parameters of this module's own unit. Units inside the module do not change.

        With `async_op=True`, return a handle without waiting. Call its `wait()`, or run the module's forward, to wait.
        """
        state = self._get_fsdp_state()
        state.unit.select(state.unit.precision_in(self.training))  # type: ignore[attr-defined]
        state.unit.all_gather()
        state.unit.watch_writes()
        state.unit.kept_for_forward = False  # the program may list the parameters that it has unsharded
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the unit's unsharded parameters and register the sharded ones. Units inside the module do not change."""
        self._get_fsdp_state().unit.reshard()

    def reset_iter_state(self) -> None:
        """Reshard the model and drop the state of an unfinished iteration. Call this on the root.

        This also drops gradients that were accumulated without synchronization. You need not call this after an
        exception, because the model recovers by itself.
        """
        self._get_fsdp_state().reset()

    # -- options of the following forwards and backwards ----------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in backward if `requires_gradient_sync`, else accumulate unsharded gradients."""
        self._set("synchronize", _bool("requires_gradient_sync", requires_gradient_sync), recurse)
        self._set("all_reduce", requires_gradient_sync, recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """All-reduce over replicas in backward if `requires_all_reduce`, else accumulate reduce-scattered gradients."""
        self._set("all_reduce", _bool("requires_all_reduce", requires_all_reduce), recurse)

    # In PyTorch, the next four methods change one unit and have no argument `recurse`.

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divide the sum of gradients by `factor`, not by the number of ranks. Raise an ArgumentError if it is <= 0."""
        if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
            raise ArgumentError(f"factor must be a positive number, got {factor!r}.")
        self._set("divide_factor", float(factor), recurse)

    def set_reduce_scatter_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Do the same as `set_gradient_divide_factor`, which is the newer name, with `factor`."""
        self.set_gradient_divide_factor(factor, recurse=recurse)

    def set_force_sum_reduction_for_comms(self, enable: bool, *, recurse: bool = False) -> None:
        """With `enable`, collectives only sum gradients, which are divided afterwards."""
        self._set("force_sum", _bool("enable", enable), recurse)

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None],
        *,
        stream: torch.cuda.Stream | None = None,
        recurse: bool = False,
    ) -> None:
        """Set a `hook` that gets a unit's reduced gradients as a flat tensor, before they are divided and cast.

        The hook may change the tensor in place. With `stream`, it runs on that stream. Raise an ArgumentError if a
        `stream` is given and the mesh has replicas.
        """
        if stream is None:
            self._set("all_reduce_hook", hook, recurse)
            return
        groups = [group for state in self._states(recurse) for group in state.unit.param_groups]
        if any(group.replicas.world > 1 for group in groups):
            raise ArgumentError("The argument stream cannot be combined with a mesh of replicas. Leave it out.")

        def run_on_stream(tensor: torch.Tensor) -> None:
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                hook(tensor)
            current.wait_stream(stream)

        self._set("all_reduce_hook", run_on_stream, recurse)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """All-gather this unit with `comm` instead of the process group. Raise an ArgumentTypeError for other types."""
        if not isinstance(comm, AllGather):
            raise ArgumentTypeError(f"comm must be an unshard.AllGather, got {type(comm).__name__}.")
        self._get_fsdp_state().transport_settings.install(comm, None)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter gradients with `comm`, not the process group. Raise an ArgumentTypeError for other types."""
        if not isinstance(comm, ReduceScatter):
            raise ArgumentTypeError(f"comm must be an unshard.ReduceScatter, got {type(comm).__name__}.")
        self._get_fsdp_state().transport_settings.install(None, comm)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free parameters after forward if `reshard_after_forward`. Overrides the argument of `fully_shard`."""
        self._set("reshard_after_forward", _bool("reshard_after_forward", reshard_after_forward), recurse)
        self._set("slice_after_forward", False, recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free the unsharded parameters after backward if `reshard_after_backward`."""
        self._set("reshard_after_backward", _bool("reshard_after_backward", reshard_after_backward), recurse)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Unshard this module's own unit in backward if `unshard_in_backward`.

        Pass False only if no gradient depends on the unit's weights, for example in an embedding.
        """
        self._set("unshard_in_backward", _bool("unshard_in_backward", unshard_in_backward), recurse=False)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the next forward wait for `event`, such as the end of an optimizer step on another stream."""
        self._get_fsdp_state().root_options().post_optim_event = event

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set to False as `is_last_backward` if more backwards of the iteration follow, as pipeline schedules do."""
        self._get_fsdp_state().root_options().last_backward = _bool("is_last_backward", is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """If `enabled`, the iteration's backwards end only in `finalize_backward`. Schedules of torch 2.15 use this."""
        self._get_fsdp_state().root_options().last_backward = not _bool("enabled", enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce pending gradients and reshard. Call this after the last backward of an iteration.

        To reduce gradients that were accumulated without synchronization, first turn synchronization on. With
        `async_op=True`, return a handle for compatibility. The gradients are already complete.
        """
        state = self._get_fsdp_state()
        if state.is_initialized:
            options = state.root_options()
            before, options.last_backward = options.last_backward, True
            try:
                state.find_root(state.modules()[0]).end_backward()
            finally:
                options.last_backward = before
        return GradientReductionHandle() if async_op else None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Accept False as `keep`, for compatibility. True raises an UnsupportedError: `reshard` frees parameters."""
        if _bool("keep", keep):
            raise UnsupportedError(
                "set_keep_unsharded_storage(True) is not supported: unshard frees unsharded parameters when it "
                "reshards. To capture steps as CUDA graphs, use unshard.capture; to keep parameters, "
                "set_reshard_after_forward(False)."
            )

    def set_reduce_scatter_unused_params(self, reduce_unused: bool, *, recurse: bool = True) -> None:
        """With `reduce_unused`, reduce zeros for trained parameters without a gradient, so ranks may use others."""
        self._set("reduce_unused", _bool("reduce_unused", reduce_unused), recurse)

    def set_reduce_scatter_max_input_buffers(self, buffers: int, *, recurse: bool = True) -> None:
        """Let `buffers` reductions run at once. The first forward fixes the limit: the maximum over all units.

        Raise a PolicyError if `buffers` is no integer, and an ArgumentError if it is less than 1.
        """
        if isinstance(buffers, bool) or not isinstance(buffers, int):
            raise PolicyError(f"buffers must be an int, got {buffers!r}.")
        if buffers < 1:
            raise ArgumentError(f"buffers must be at least 1, got {buffers}.")
        self._set("reduce_buffers", buffers, recurse)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """When forward unshards this module, prefetch these modules instead of the next one in forward order."""
        self._get_fsdp_state().unit.options.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """When backward unshards this module, prefetch these modules instead of the previous one in forward order."""
        self._get_fsdp_state().unit.options.backward_prefetch = _units_of(modules)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """With `enable`, reduce-scatter in a second process group, so that reductions do not queue behind all-gathers.

        This is the default with NCCL, except for units whose buffers come from a memory pool. All ranks must call
        this, because the next reduce-scatter creates a process group.
        """
        _bool("enable", enable)
        for state in self._states(recurse):
            state.transport_settings.separate(enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool, *, recurse: bool = False) -> None:
        """With `enable`, allocate the buffers of collectives with the backend's allocator, if it has one (NCCL)."""
        _bool("enable", enable)
        for state in self._states(recurse):
            state.transport_settings.allocate_from(pool_of_group if enable else None)

    def set_symm_mem_for_comm(self, backend: str = "NCCL", *, recurse: bool = False) -> None:
        """Allocate buffers of collectives in torch's symmetric memory of `backend`, which needs CUDA."""
        for state in self._states(recurse):
            state.transport_settings.allocate_from(lambda group, device: symmetric_pool(device, backend))

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No-op for compatibility. All-gathers are always asynchronous."""
        _bool("async_op", async_op)

    def _get_fsdp_state(self) -> FSDPState:
        assert isinstance(self, nn.Module)
        return sharded_state(self)

    def _states(self, recurse: bool) -> list[FSDPState]:
        assert isinstance(self, nn.Module)
        found = (state_of(module) for module in (self.modules() if recurse else (self,)))
        return list(dict.fromkeys(state for state in found if state is not None))

    def _set(self, option: str, value: Any, recurse: bool) -> None:
        for state in self._states(recurse):
            setattr(state.unit.options, option, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters as `nn.Module` does. They are sharded, except between forward and backward."""
        if not torch.compiler.is_compiling():
            self._get_fsdp_state().before_listing()
        return super().named_parameters(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those of unsharded parameters and those accumulated without synchronization.

        An optimizer's `zero_grad` does not clear the latter. With `set_to_none=False`, gradients become zeros.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for state in self._states(recurse=True):
            state.unit.drop_unreduced()
            state.unit.clear_gradients(set_to_none)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert the sharded parameters. `.to()`, `.half()` and `to_empty()` call this."""
        state = self._get_fsdp_state()
        refuse_shared_memory(state.unit, fn)
        state.unit.rest()
        state.unit.refuse_assigned_data()  # a conversion hides assigned data
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        state.unit.rebind_params()
        return result

    def __getstate__(self) -> Any:
        raise PickleError(
            f"{self._get_fsdp_state().unit} cannot be pickled: its shards belong to one set of ranks. Save its "
            "state_dict() and load that into another sharded model; copy.deepcopy copies the model in this process."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        assert isinstance(self, nn.Module)
        return copy_sharded(self, memo)


class GradientReductionHandle:
    """The handle that `finalize_backward(async_op=True)` returns."""

    def wait(self) -> None:
        """No-op, because the gradients are already complete."""


_skips_init: ContextVar[bool] = ContextVar("unshard_skips_init", default=False)


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Return a context in which calling an `FSDP<Original>` class creates a module without calling `__init__`.

    Example: `with disable_fsdp_module_new_init(): copy = type(model)()`.
    """
    token = _skips_init.set(True)
    try:
        yield
    finally:
        _skips_init.reset(token)


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return a dict from original classes to `FSDP<Original>` classes. Example: `get_cls_to_fsdp_cls()[Block]`."""
    return _FSDP_CLASSES


def sharded_state(module: Any) -> FSDPState:
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ArgumentError(f"Expected a module that fully_shard was applied to, got {type(module).__name__}.")
    return state


def _units_of(modules: list[Any]) -> list[weakref.ref[Unit]]:
    return [weakref.ref(sharded_state(module).unit) for module in modules]


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}.")
    return value


def swap_class(module: nn.Module) -> None:
    """Change the class of `module` to `FSDP<Original>`. The first call for an original class creates this class."""
    cls = type(module)
    if cls not in _FSDP_CLASSES:
        made = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
        _FSDP_CLASSES.setdefault(cls, made)  # another rank, in another thread, may have created it meanwhile
    module.__class__ = _FSDP_CLASSES[cls]


# -- `copy.deepcopy`: a second model with its own shards, for example to average weights --------------------------


_IN_PROGRESS = "unshard copies a model"


def copy_sharded(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Copy a sharded module with values, policies and hooks, but without gradients. The copy has its own root.

    `copy.deepcopy` calls this function for every sharded module inside the copied module. The outermost call copies all
    units.
    """
    is_outermost = _IN_PROGRESS not in memo
    states = _prepare(module, memo) if is_outermost else []
    # FSDPModule.__new__ would make an instance of the original class.
    new = object.__new__(type(module))
    memo[id(module)] = new
    new.__dict__.update(copy.deepcopy(module.__dict__, memo))
    if is_outermost:
        for state in states:
            _copy_unit(state, memo)
        for state, other in itertools.product(states, states):
            for number, group in enumerate(other.unit.param_groups):
                if state.unit in users_of(group):
                    share(memo[id(other)].unit.param_groups[number], memo[id(state)].unit)
        del memo[_IN_PROGRESS]
    return new


def _prepare(module: nn.Module, memo: dict[Any, Any]) -> list[FSDPState]:
    """Reshard all units. Put copies of states and sharded parameters into the memo, where deepcopy finds them."""
    memo[_IN_PROGRESS] = True
    states = list(dict.fromkeys(state for child in module.modules() if (state := state_of(child))))
    for state in states:
        state.unit.rest()
        state.unit.rebind_params()
        for other in state.unit.borrows_from:
            if other not in [each.unit for each in states]:
                raise UnsupportedError(
                    f"{state.unit} cannot be copied without {other}, whose parameters it uses. Copy a module that "
                    "contains both."
                )
        memo[id(state)] = FSDPState.__new__(FSDPState)  # `_copy_unit` initializes it
        for param in state.unit.params:
            spec = spec_of(param.sharded)
            with torch.no_grad():
                dtensor = make_dtensor(param.local.clone(), spec.mesh, spec.placements, param.sharded.shape)
            memo[id(param.sharded)] = nn.Parameter(dtensor, requires_grad=param.sharded.requires_grad)
    return states


def _copy_unit(state: FSDPState, memo: dict[Any, Any]) -> None:
    old = state.unit
    # Prefetch lists refer to units of the original model. The copy learns its own order.
    options = dataclasses.replace(old.options, forward_prefetch=None, backward_prefetch=None)
    with torch.no_grad(), torch.inference_mode(False):
        param_groups = [_copy_param_group(old, group, memo) for group in old.param_groups]
        unit = Unit(param_groups, old.device, old.policy, options)
    unit.name = old.name
    new: FSDPState = memo[id(state)]
    new.__init__(unit)  # type: ignore[misc]
    new.transport_settings.like(state.transport_settings)
    new.buffer_dtypes = state.buffer_dtypes
    new.ignored = [location_of(memo[id(location.module())], location.name) for location in state.ignored]
    new.adopt([memo[id(module)] for module in state.modules()])
    if state.buffers is not None:
        new.buffers = state.buffers.of_copies(lambda module: memo[id(module)])


def _copy_param_group(unit: Unit, group: ParamGroup, memo: dict[Any, Any]) -> ParamGroup:
    params = [
        dataclasses.replace(
            param,
            locations=[
                location_of(memo[id(module)], location.name)
                for location in param.locations
                if id(module := location.module()) in memo  # modules outside the copied model may use the parameter
            ],
            sharded=memo[id(param.sharded)],
            local=local_of(memo[id(param.sharded)]),
            unsharded=None,
            sliced=None,
            unsharded_view=None,
            attributes=copy.deepcopy(param.attributes, memo),
        )
        for param in group.params
    ]
    offload = group.sharded.offload
    return ParamGroup(
        params, group.shards, group.replicas, group.mesh, unit.device, offload, group.slicing, group.number
    )
