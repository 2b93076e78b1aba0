"""The hooks of a unit on its modules, for forward, backward and state dicts. Start here to see what runs when."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import StateError
from ..names import FSDP_PREFIX, clean_tensor_name
from ..policies import MixedPrecisionPolicy
from ..torch_private import (
    add_gradient_hook,
    calls_on_stack,
    frame_not_compiled,
    inside_backward,
    mark_fully_sharded,
    never_compiled,
    next_sequence_nr,
)
from .backward_hooks import watch_inputs, watch_outputs, watch_parameters
from .checks import (
    explain,
    refuse_plain_tensors,
    refuse_second_root,
    refuse_shards_of_another_rank,
    warn_when_pickled,
)
from .forward_tensors import (
    SideOutputs,
    cast_floats,
    cast_inputs,
    map_tensors,
    moved,
    shares_memory,
    tensors_in,
    with_own_memory,
)
from .observer import traced
from .optimizer_steps import watch_optimizers
from .params.module_casts import CastBoundary, ModuleBuffers
from .params.param import ManagedParam, ParamLocation, load_quant_states
from .root import Root
from .states import Options, ParamState, Phase, Precision
from .transport_settings import TransportSettings
from .unit import ROOT, STATE_KEY, Unit, warn_of_lost_writes

_NESTED = 0  # marks a nested call in `FSDPState._handled`, where all other numbers are ids
_FINDING_ROOT = threading.RLock()


@frame_not_compiled
def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state that a front-end attached to the module itself, or None.

    States of parent modules do not count.
    """
    return module.__dict__.get(STATE_KEY)


class FSDPState:
    """The hooks of a unit on its modules. The modules own this object, and this object refers to them weakly."""

    full_state_dict: ClassVar[str] = "unshard.checkpoint.full_state_dict(model)"
    """The call that returns unsharded parameters. Used in error messages."""
    takes_over_units: ClassVar[bool] = False
    """True if a new root may take over units that already belong to another root."""
    in_summon_full_params: bool = False
    """True inside `summon_full_params`, which exists only for wrapped modules."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.transport_settings = TransportSettings(unit)
        self._modules: list[weakref.ref[nn.Module]] = []
        self._to_run: set[weakref.ref[nn.Module]] = set()
        self._root: Callable[[], Root | None] = lambda: None
        self._own_root: Root | None = None  # the root module owns the root, so deleting the model frees everything
        self._handled: list[int] = []
        """For each active forward, the id of the exception that the program was handling when the forward began."""
        self._first_node = 0
        self._ran = False  # look for writes only once: a forward that writes parameters also does so the first time
        self._versions: dict[ManagedParam, tuple[int, bool]] | None = None
        self._side_outputs = SideOutputs()
        self._tensors_before = 0
        self.casts_inputs = unit.policy.cast_forward_inputs
        """True if the inputs of forward are cast. With some policies, this depends on which unit is the root."""
        self.buffers: ModuleBuffers | None = None
        """Casts the buffers of the modules during forward, or None if forward casts no buffers."""
        self.buffer_dtypes: dict[tuple[int, str], torch.dtype] = {}
        """The dtypes that the modules' buffers had before sharding, by module number and buffer name."""
        self.ignored: list[ParamLocation] = []
        """The locations of parameters that the caller excluded from sharding."""

    def attach(self, module: nn.Module) -> None:
        self._own(module)
        mark_fully_sharded(module)
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.post_forward, with_kwargs=True, always_call=True)
        self._attach_to_state_dicts(module)

    def _attach_to_state_dicts(self, module: nn.Module) -> None:
        module.register_state_dict_pre_hook(self.pre_state_dict)
        module.register_load_state_dict_pre_hook(self.pre_load)
        module.register_load_state_dict_post_hook(self.post_load)

    def attach_wrapper(self, module: nn.Module) -> None:
        """Attach this state to a wrapper. Forward needs no hooks, because the wrapper's own forward calls `run`."""
        self._own(module)

    def _own(self, module: nn.Module) -> None:
        watch_optimizers()
        self.adopt([module])
        module.__dict__[STATE_KEY] = self
        # A partial, because torch sets an attribute on the hook, which a bound method cannot have.
        module.register_state_dict_post_hook(partial(self.post_state_dict))

    def attach_cast_boundary(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        """Register hooks that cast the inputs and outputs of a submodule whose parameters have a dtype override."""
        boundary = CastBoundary(self, policy)
        module.register_forward_pre_hook(boundary.enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(boundary.leave)

    def original_buffer_dtypes(self) -> dict[int, torch.dtype]:
        """Return the dtypes of buffers before a front-end cast the buffers in place, by the id of the buffer."""
        return {}

    def adopt(self, modules: list[nn.Module]) -> None:
        self._modules += [weakref.ref(module) for module in modules]

    def modules(self) -> list[nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    # -- forward --------------------------------------------------------------------------------------------

    @traced("pre_forward")
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self.unit
        # A module of the unit may call itself, or another one of its list. A call that a KeyboardInterrupt left looks
        # the same, except that it is not on the stack.
        if self._handled and unit.phase is Phase.FORWARD and calls_on_stack(self.modules()) > 1:
            self._handled += [id(sys.exc_info()[1]), _NESTED]
            # The outer call keeps the unsharded parameters until its own end.
            dtype = unit.compute_dtype_in(unit.precision) if self.casts_inputs else None
            return cast_inputs(args, kwargs, dtype)
        self._handled.append(id(sys.exc_info()[1]))
        precision = unit.precision_in(module.training)
        if self.buffers is not None:
            self.buffers.enter(cast=precision is Precision.POLICY)
        root = self._root() or self._become_root(module)
        if root.in_backward:
            root.recover()
        if unit is root.unit:
            if root.in_forward:
                root.recover()
            if root.gave_up_units:
                root = self._become_root(module)
            if torch.is_grad_enabled() and root.unmanaged.due():
                self._check_unmanaged(module, root)
            if unit.device.type != "cpu":
                args, kwargs = map_tensors(partial(moved, unit.device), (args, kwargs))
        if self.casts_inputs:
            args, kwargs = cast_inputs(args, kwargs, unit.compute_dtype_in(precision))
        if unit.phase is Phase.BACKWARD:
            unit.select(precision)
            unit.unshard()  # a recomputation inside the unit's own backward: hooks are in place, nothing to free
            return args, kwargs
        if len(self._modules) > 1 and self._runs_as_list(root):
            if unit.phase is Phase.FORWARD:
                return args, kwargs  # the first module of the list has unsharded the unit, and its inputs are watched
            self._to_run = set(self._modules)
        root.before_forward(unit, precision)
        if self._side_outputs.aliases:
            self._side_outputs.restore_aliases()
        if torch.is_grad_enabled():
            args, kwargs = watch_inputs(args, kwargs, self.post_backward)
            self._first_node = next_sequence_nr()
            if not self._ran:
                self._ran = True
                self._versions = unit.versions()
        else:
            self._tensors_before = unit.tensors_of_memory
        return args, kwargs

    def _runs_as_list(self, root: Root) -> bool:
        # The first module of the list unshards the unit, and the last one reshards it. Outside the root's forward (a
        # loss computed in chunks), each call of a module unshards and reshards the unit.
        return root.in_forward and not inside_backward()

    @traced("post_forward")
    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        unit, root = self.unit, self._root()
        if not self._handled:
            return output  # our own pre_forward did not run
        before = self._handled.pop()
        if before == _NESTED:
            return self._leave_nested(module, output)
        if self.buffers is not None:
            self.buffers.leave()
        if root is None:
            return output  # our own pre_forward refused
        error = sys.exc_info()[1]
        if id(error) != before:
            self._versions = None
            explain(error, module, unit)
            root.fail_forward(unit, error)
            return output
        if unit.phase is not Phase.BACKWARD:
            graph = torch.is_grad_enabled()
            # Without grad mode this may be the first forward of a reentrant checkpoint. If the unit is a list of
            # modules, backward may come through the output of another module.
            returns = not graph or len(self._modules) > 1
            outputs = (output,) if isinstance(output, torch.Tensor) else tuple(tensors_in(output))
            if shares_memory(outputs):
                output = with_own_memory(output)
                outputs = tuple(tensors_in(output))
            if graph:
                begin = self.pre_backward if unit.precision is Precision.POLICY else self.pre_backward_stored
                output, watched = watch_outputs(output, outputs, begin)
                returns = returns or watched
                if self._side_outputs.expected():
                    self._watch_side_outputs(outputs)
                    if self._versions is not None:
                        self._warn_of_writes()
            elif (search := unit.tensors_of_memory > self._tensors_before) or self._side_outputs.places:
                self._side_outputs.copy_aliases(self.modules(), search)
            if self._to_run:
                self._to_run.discard(weakref.ref(module))
            if not (self._to_run and self._runs_as_list(root)):
                unwatched = not returns and watch_parameters(unit.unsharded, partial(_on_gradient, weakref.ref(self)))
                root.after_forward(unit, graph, returns, unwatched)
        dtype = unit.policy.output_dtype
        return output if dtype is None or unit.precision is Precision.STORED else cast_floats(output, dtype)

    def _warn_of_writes(self) -> None:
        versions, self._versions = self._versions, None
        if versions and self.unit.shows_unsharded:
            now = self.unit.versions()
            written = [param.name for param, version in versions.items() if now.get(param, version) != version]
            if written:
                warn_of_lost_writes(self.unit.name, written)

    def _leave_nested(self, module: nn.Module, output: Any) -> Any:
        unit, error = self.unit, sys.exc_info()[1]
        if id(error) != self._handled.pop():
            explain(error, module, unit)
            return output  # the outer call ends the forward, unless it catches the exception
        self._to_run.discard(weakref.ref(module))
        if unit.phase is Phase.FORWARD and torch.is_grad_enabled():
            # Forward may call backward itself.
            output, _ = watch_outputs(output, tuple(tensors_in(output)), self._pre_backward_hook())
        dtype = unit.policy.output_dtype
        return output if dtype is None or unit.precision is Precision.STORED else cast_floats(output, dtype)

    @frame_not_compiled
    def run(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `function` between `pre_forward` and `post_forward`, as if `function` were the forward of `module`."""
        try:
            args, kwargs = self.pre_forward(module, args, kwargs)
            output = function(*args, **kwargs)
        except Exception:
            self.post_forward(module, args, kwargs, None)
            raise
        return self.post_forward(module, args, kwargs, output)

    # -- backward -------------------------------------------------------------------------------------------

    def _pre_backward_hook(self) -> Callable[[Any], None]:
        return self.pre_backward if self.unit.precision is Precision.POLICY else self.pre_backward_stored

    def _watch_side_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        # Backward may begin at tensors that forward stored on its modules.
        if not inside_backward():
            returned, begin = set(map(id, outputs)), self._pre_backward_hook()
            for tensor in self._side_outputs.tensors(self.modules(), self._first_node):
                if id(tensor) not in returned:
                    add_gradient_hook(tensor, begin)

    @traced("pre_backward")
    def pre_backward(self, gradient: Any) -> None:
        root = self._root()
        if root is not None:
            root.before_backward(self.unit, Precision.POLICY)

    @traced("pre_backward")
    def pre_backward_stored(self, gradient: Any) -> None:
        """Run `pre_backward` for a forward that ran in the stored dtypes."""
        root = self._root()
        if root is not None:
            root.before_backward(self.unit, Precision.STORED)

    @traced("post_backward")
    def post_backward(self, *gradients: Any) -> None:
        root = self._root()
        if root is not None:
            root.after_backward(self.unit)

    # -- state dicts ----------------------------------------------------------------------------------------

    def pre_state_dict(self, module: nn.Module, *unused: Any) -> None:
        """Put the sharded parameters on the modules. State dicts are read from, and loaded into, sharded parameters."""
        self.wait_for_uploads()
        self.unit.rest()
        self.unit.rebind_params()
        for group in self.unit.param_groups:
            group.sharded.widen_tied()

    def post_state_dict(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        warn_when_pickled(state_dict, self.full_state_dict)

    def pre_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
        refuse_shards_of_another_rank(state_dict, prefix, self.full_state_dict)
        self.pre_state_dict(module)
        refuse_plain_tensors(module, state_dict, prefix)
        load_quant_states(module, state_dict, prefix)

    def wait_for_uploads(self) -> None:
        """Block the host until copies to the device have completed.

        Call this method before writing offloaded parameters.
        """
        root = self._root()
        if root is not None:
            root.wait_for_uploads()

    def post_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.unit.rebind_params()

    # -- the root -------------------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """True if a forward has found this module's root."""
        return self._root() is not None

    def root_options(self) -> Options:
        """Return the options of the root. Before the first forward, return the unit's own options."""
        root = self._root()
        return self.unit.options if root is None else root.unit.options

    def reset(self) -> None:
        root = self._root()
        if root is None:
            self.unit.reset()
        elif root.unit is not self.unit:
            raise StateError(f"{self.unit} is not the root; call reset_iter_state on the outermost sharded module.")
        else:
            root.reset()

    def before_listing(self) -> None:
        """Tell the root that the program is about to list parameters. See `Root.before_listing`."""
        root = self._root()
        if root is not None:
            root.before_listing()

    def find_root(self, module: nn.Module) -> Root:
        """Return the root. If there is none, make `module` the root, because all units below `module` exist by now."""
        return self._root() or self._become_root(module)

    def _become_root(self, module: nn.Module) -> Root:
        with _FINDING_ROOT:  # several threads may run the first forward
            root = self._root()
            return self._make_root(module) if root is None or root.gave_up_units else root

    def _make_root(self, module: nn.Module) -> Root:
        if len(self._modules) > 1:
            raise StateError(
                f"Modules that were sharded as a list cannot be the root: {type(module).__name__} ran first. Also "
                "apply fully_shard to a module that contains them, and run that one."
            )
        names: dict[FSDPState, list[str]] = {}
        for name, child in module.named_modules():
            if state := state_of(child):
                names.setdefault(state, []).append(name)
        prefixes = {child: f"{name}." if name else "" for name, child in module.named_modules()}
        self._release_roots(names)
        for state, paths in names.items():
            state.unit.name = ", ".join(_clean(f"{path}.").rstrip(".") or ROOT for path in paths)
            for param in state.unit.params:
                param.name = _clean(prefixes.get(param.locations[0].module(), "")) + param.locations[0].name
        self._own_root = Root([state.unit for state in names])
        for state in names:
            state._root = weakref.ref(self._own_root)
            state.casts_inputs = state.unit.policy.casts_inputs(state is self, empty=not state.unit.used_params)
        return self._own_root

    def _release_roots(self, names: dict[FSDPState, list[str]]) -> None:
        """Take over units that ran under another root. `fully_shard` raises an error instead, as in PyTorch."""
        for state, paths in names.items():
            before = state._root()
            if before is None or before.unit is self.unit:
                continue
            if not self.takes_over_units or before.in_forward or before.in_backward:
                refuse_second_root(", ".join(paths))
            before.give_up_units()
            if before.unit is state.unit:
                state._own_root = None

    def _check_unmanaged(self, module: nn.Module, root: Root) -> None:
        states = {state for child in module.modules() if (state := state_of(child))}
        groups = [group for state in states for group in state.unit.param_groups]
        locations = [location for group in groups for location in group.sharded.locations]
        locations += [location for state in states for location in state.ignored]
        ranks = max([group.shards.world * group.replicas.world for group in groups], default=1)
        root.unmanaged.check(module, locations, ranks)


class UnshardHandle:
    """The handle for an all-gather that `unshard(async_op=True)` returns."""

    def __init__(self, state: FSDPState):
        self._state: FSDPState | None = state

    def wait(self) -> None:
        """Wait for the all-gather and put the unsharded parameters on the module. Later calls are no-ops."""
        state, self._state = self._state, None
        if state is not None and state.unit.param_state is not ParamState.SHARDED:
            state.unit.unshard()
            state.unit.watch_writes()


@never_compiled
def _on_gradient(ref: weakref.ref[FSDPState], parameter: torch.Tensor) -> None:
    # `ref` is weak, so that parameters do not keep the state alive. The end of backward reduces the gradients.
    state = ref()
    root = None if state is None else state._root()
    if root is not None:
        root.queue_end_of_backward()


def _clean(prefix: str) -> str:
    return clean_tensor_name(prefix, (FSDP_PREFIX,))
