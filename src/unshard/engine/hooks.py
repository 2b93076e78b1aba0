"""All forward and backward hooks of a unit, and its state-dict hooks: what runs when is answered here."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import StateError
from ..names import FSDP_PREFIX, clean_tensor_name
from ..policies import MixedPrecisionPolicy
from ..torch_private import (
    add_gradient_hook,
    base_of,
    calls_on_stack,
    frame_not_compiled,
    inside_backward,
    mark_fully_sharded,
    never_compiled,
    next_sequence_nr,
    sequence_nr_of,
)
from .checks.forward_errors import explain
from .checks.lost_writes import warn_of_lost_writes
from .checks.optimizer_steps import watch_optimizers
from .checks.root_checks import refuse_second_root
from .checks.saved_shards import FULL_STATE_DICT, refuse_plain_tensors, refuse_shards_of_another_rank, warn_when_pickled
from .dtype_rules import Precision, cast_floats, cast_inputs
from .input_watch import InputWatch, alias_of
from .nested_tensors import map_tensors, moved, tensors_in
from .options import Options
from .output_memory import shares_memory, with_own_memory
from .params.module_casts import CastBoundary, ModuleBuffers
from .params.param import ManagedParam, ParamLocation
from .params.quantized import load_quant_states
from .root import Root
from .side_outputs import SideOutputs
from .states import ParamState, Phase
from .trace import traced
from .transport_settings import TransportSettings
from .unit import ROOT, STATE_KEY, Unit

_watched = WeakTensorKeyDictionary()  # unsharded parameters that have the hook
_NESTED = 0  # of `FSDPState._handled`, where all other numbers are ids
_FINDING_ROOT = threading.RLock()


@frame_not_compiled
def state_of(module: nn.Module) -> FSDPState | None:
    """What a front-end attached to this very module, if any."""
    return module.__dict__.get(STATE_KEY)


class FSDPState:
    """The hooks of a unit on its modules: one, or the several of a list that were sharded as one unit.

    The modules own it; it refers to them weakly.
    """

    full_state_dict: ClassVar[str] = FULL_STATE_DICT
    """The call that gives unsharded parameters, for messages."""
    takes_over_units: ClassVar[bool] = False
    """Whether a module that contains the units of another root becomes their root when it runs."""
    in_summon_full_params: bool = False
    """True inside `summon_full_params`, which only wrapped modules have."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.transport_settings = TransportSettings(unit)
        self._modules: list[weakref.ref[nn.Module]] = []
        self._to_run: set[weakref.ref[nn.Module]] = set()
        self._root: Callable[[], Root | None] = _no_root
        self._own_root: Root | None = None  # only on the root module: deleting the model then frees everything
        self._handled: list[int] = []
        self._first_node = 0
        self._ran = False  # a forward that writes parameters does so the first time, too
        self._versions: dict[ManagedParam, tuple[int, bool]] | None = None
        self._side_outputs = SideOutputs()
        self._tensors_before = 0
        self.casts_inputs = unit.policy.cast_forward_inputs
        """Whether inputs of forward are cast; for some policies that depends on where the root is."""
        self.buffers: ModuleBuffers | None = None
        self.buffer_dtypes: dict[tuple[int, str], torch.dtype] = {}
        """What the modules' buffers were stored in when they were sharded, by number of the module and by name."""
        self.ignored: list[ParamLocation] = []
        """Where the modules register parameters that the caller excluded from sharding."""

    def attach(self, module: nn.Module) -> None:
        """All registrations on the module."""
        watch_optimizers()
        self.adopt([module])
        module.__dict__[STATE_KEY] = self
        mark_fully_sharded(module)
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.post_forward, with_kwargs=True, always_call=True)
        self._attach_to_state_dicts(module)
        self._mark_state_dicts(module)

    def _attach_to_state_dicts(self, module: nn.Module) -> None:
        module.register_state_dict_pre_hook(self.pre_state_dict)
        module.register_load_state_dict_pre_hook(self.pre_load)
        module.register_load_state_dict_post_hook(self.post_load)

    def _mark_state_dicts(self, module: nn.Module) -> None:
        # torch sets an attribute on the hook, which a bound method cannot have.
        module.register_state_dict_post_hook(partial(self.post_state_dict))

    def attach_wrapper(self, module: nn.Module) -> None:
        """As `attach`, for a wrapper whose own forward calls `run`."""
        watch_optimizers()
        self.adopt([module])
        module.__dict__[STATE_KEY] = self
        self._mark_state_dicts(module)

    def attach_cast_boundary(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        """Cast inputs and outputs of a submodule whose parameters have an override."""
        boundary = CastBoundary(self, policy)
        module.register_forward_pre_hook(boundary.enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(boundary.leave)

    def cast_buffers(self, buffers: ModuleBuffers) -> None:
        """Show forward the modules' buffers in another dtype."""
        self.buffers = buffers

    def original_buffer_dtypes(self) -> dict[int, torch.dtype]:
        """Dtypes that buffers had before a front-end cast them in place, by the buffer's id."""
        return {}

    def adopt(self, modules: list[nn.Module]) -> None:
        self._modules += [weakref.ref(module) for module in modules]

    def modules(self) -> list[nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    # -- forward --------------------------------------------------------------------------------------------

    @traced("pre_forward")
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self.unit
        nested = self._is_nested() if self._handled else False
        # An exception that is already being handled when forward begins is not forward's.
        self._handled.append(id(sys.exc_info()[1]))
        if nested:
            self._handled.append(_NESTED)
            return self._enter_nested(args, kwargs)
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
            unit.unshard()  # recomputation inside the unit's own backward: hooks are in place, nothing to free
            return args, kwargs
        if len(self._modules) > 1 and self._runs_as_list(root):
            if unit.phase is Phase.FORWARD:
                return args, kwargs  # the first module of the list has gathered, and its inputs are watched
            self._to_run = set(self._modules)
        root.before_forward(unit, precision)
        if self._side_outputs.aliases:
            self._side_outputs.restore_aliases()
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(args, kwargs)
            self._first_node = next_sequence_nr()
            if not self._ran:
                self._ran = True
                self.watch_writes()
        else:
            self._tensors_before = unit.tensors_of_memory
        return args, kwargs

    def _runs_as_list(self, root: Root) -> bool:
        """Whether the modules of the list are to be gathered once and freed when the last of them has run.

        Called alone, outside the root's forward (a loss computed in chunks), each is on its own.
        """
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
            # Without grad mode it may be the first forward of a reentrant checkpoint. Of a list of modules, the output
            # of another one may be used.
            returns = not graph or len(self._modules) > 1
            outputs = (output,) if isinstance(output, torch.Tensor) else tuple(tensors_in(output))
            if shares_memory(outputs):
                output = with_own_memory(output)
                outputs = tuple(tensors_in(output))
            if graph:
                output, watched = self._watch_outputs(output, outputs)
                returns = returns or watched
                if self._side_outputs.expected():
                    self._watch_side_outputs(outputs)
                    if self._versions is not None:
                        self.warn_of_writes()
            elif (search := unit.tensors_of_memory > self._tensors_before) or self._side_outputs.places:
                self._side_outputs.copy_aliases(self.modules(), search)
            if self._to_run:
                self._to_run.discard(weakref.ref(module))
            if not (self._to_run and self._runs_as_list(root)):
                root.after_forward(unit, graph, returns, unwatched=not returns and self._watch_parameters())
        dtype = unit.policy.output_dtype
        return output if dtype is None or unit.precision is Precision.STORED else cast_floats(output, dtype)

    def watch_writes(self) -> None:
        """Note how often the unsharded parameters have been written."""
        self._versions = self.unit.versions()

    def warn_of_writes(self) -> None:
        """Writes of forward itself are lost."""
        versions, self._versions = self._versions, None
        if versions and self.unit.shows_unsharded:
            now = self.unit.versions()
            written = [param.name for param, version in versions.items() if now.get(param, version) != version]
            if written:
                warn_of_lost_writes(self.unit.name, written)

    def _is_nested(self) -> bool:
        """Whether a module of the unit called itself, or another one of its list.

        A call that was left by a KeyboardInterrupt looks the same, except that it is not on the stack.
        """
        return self.unit.phase is Phase.FORWARD and calls_on_stack(self.modules()) > 1

    def _enter_nested(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A nested call is a part of the outer one, which needs the unsharded parameters until its own end."""
        if self.casts_inputs:
            return cast_inputs(args, kwargs, self.unit.compute_dtype_in(self.unit.precision))
        return args, kwargs

    def _leave_nested(self, module: nn.Module, output: Any) -> Any:
        unit, error = self.unit, sys.exc_info()[1]
        if id(error) != self._handled.pop():
            explain(error, module, unit)
            return output  # the outer call ends the forward, unless it catches the exception
        self._to_run.discard(weakref.ref(module))
        if unit.phase is Phase.FORWARD and torch.is_grad_enabled():
            output, _ = self._watch_outputs(output, tuple(tensors_in(output)))  # forward may call backward itself
        dtype = unit.policy.output_dtype
        return output if dtype is None or unit.precision is Precision.STORED else cast_floats(output, dtype)

    @frame_not_compiled
    def run(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`function` as if it were the module's forward."""
        try:
            args, kwargs = self.pre_forward(module, args, kwargs)
            output = function(*args, **kwargs)
        except Exception:
            self.post_forward(module, args, kwargs, None)
            raise
        return self.post_forward(module, args, kwargs, output)

    # -- backward -------------------------------------------------------------------------------------------

    def _watch_outputs(self, output: Any, outputs: Sequence[torch.Tensor]) -> tuple[Any, bool]:
        """Backward of the unit begins when a gradient reaches any of `outputs`, all in `output`; false if none can."""
        begin = self.pre_backward if self.unit.precision is Precision.POLICY else self.pre_backward_stored
        last = -1
        for tensor in outputs:
            if tensor.requires_grad:
                add_gradient_hook(tensor, begin)
                last = max(last, sequence_nr_of(tensor))
                base = base_of(tensor)
                if base is not None and base.grad_fn is not None:
                    # Overwritten in place, a view gets another place in the graph and its hook never fires; the node
                    # that made its base stays.
                    base.grad_fn.register_prehook(begin)
        if -1 < last < next_sequence_nr() - 1:
            # Autograd runs later nodes first, so what was computed after the outputs would run before the hook. An
            # alias that is made now is later still.
            output = map_tensors(self._alias_with_hook, output)
        return output, last > -1

    def _pre_backward_hook(self) -> Callable[[Any], None]:
        return self.pre_backward if self.unit.precision is Precision.POLICY else self.pre_backward_stored

    def _alias_with_hook(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor = alias_of(tensor)
            add_gradient_hook(tensor, self._pre_backward_hook())
        return tensor

    def _watch_side_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """What forward leaves on its modules may be used as an output is."""
        if not inside_backward():
            returned = set(map(id, outputs))
            for tensor in self._side_outputs.tensors(self.modules(), self._first_node):
                if id(tensor) not in returned:
                    add_gradient_hook(tensor, self._pre_backward_hook())

    def _watch_parameters(self) -> bool:
        """Of a unit without outputs to watch: a backward may come all the same, by what forward left elsewhere.

        No hook runs when it begins, only when it reaches a parameter; false if it cannot.
        """
        trained = [
            param.unsharded
            for param in self.unit.used_params
            if param.unsharded is not None and param.unsharded.requires_grad
        ]
        for parameter in trained:
            if parameter not in _watched:
                _watched[parameter] = True
                parameter.register_post_accumulate_grad_hook(partial(_on_gradient, weakref.ref(self)))
        return bool(trained)

    def queue_end_of_backward(self) -> None:
        root = self._root()
        if root is not None:
            root.queue_end_of_backward()

    @traced("pre_backward")
    def pre_backward(self, gradient: Any) -> None:
        root = self._root()
        if root is not None:
            root.before_backward(self.unit, Precision.POLICY)

    @traced("pre_backward")
    def pre_backward_stored(self, gradient: Any) -> None:
        """The same after a forward in the stored dtypes."""
        root = self._root()
        if root is not None:
            root.before_backward(self.unit, Precision.STORED)

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Backward of the unit is over when the gradients of all inputs are done.

        Each input passes through an alias of its own, whose graph node sees only this unit's share of the gradient:
        an input that other modules use too must not delay the reduction.
        """
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
            if not args[0].requires_grad:
                return args, kwargs
            watched = alias_of(args[0])
            add_gradient_hook(watched, self.post_backward)
            return (watched,), kwargs
        watch = InputWatch(self.post_backward)
        return map_tensors(watch.through, (args, kwargs))

    @traced("post_backward")
    def post_backward(self, *gradients: Any) -> None:
        root = self._root()
        if root is not None:
            root.after_backward(self.unit)

    # -- state dicts ----------------------------------------------------------------------------------------

    def pre_state_dict(self, module: nn.Module, *unused: Any) -> None:
        """State dicts are taken from, and loaded into, the sharded parameters."""
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
        """To be called before parameters are written on the host."""
        root = self._root()
        if root is not None:
            root.wait_for_uploads()

    def post_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.unit.rebind_params()

    # -- the root -------------------------------------------------------------------------------------------

    @property
    def is_initialised(self) -> bool:
        """Whether a forward has found this module's root."""
        return self._root() is not None

    def root_options(self) -> Options:
        """The options that count for the whole model."""
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
        """To be called when the program lists parameters."""
        root = self._root()
        if root is not None:
            root.before_listing()

    def find_root(self, module: nn.Module) -> Root:
        """The root, which is the first module to run: then all units below it are known."""
        return self._root() or self._become_root(module)

    def _become_root(self, module: nn.Module) -> Root:
        with _FINDING_ROOT:  # two threads may run the first forward
            root = self._root()
            return self._make_root(module) if root is None or root.gave_up_units else root

    def _make_root(self, module: nn.Module) -> Root:
        if len(self._modules) > 1:
            raise StateError(
                f"Modules that were sharded as a list cannot be the root: {type(module).__name__} ran first. Apply "
                "fully_shard to a module that contains them, too, and run that one."
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
        """Units that ran under another root. `fully_shard` refuses them, as in PyTorch; a wrapper takes them over."""
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


def _no_root() -> Root | None:
    """Before the first forward."""
    return None


class UnshardHandle:
    """An all-gather that `unshard(async_op=True)` issued."""

    def __init__(self, state: FSDPState):
        self._state: FSDPState | None = state

    def wait(self) -> None:
        """Wait for the all-gather and put the unsharded parameters on the module. A second call does nothing."""
        state, self._state = self._state, None
        if state is not None and state.unit.param_state is not ParamState.SHARDED:
            state.unit.unshard()
            state.unit.watch_writes()


@never_compiled
def _on_gradient(ref: weakref.ref[FSDPState], parameter: torch.Tensor) -> None:
    """Parameters must not keep their modules' state alive."""
    state = ref()
    if state is not None:
        state.queue_end_of_backward()


def _clean(prefix: str) -> str:
    """A path of modules without those that `FullyShardedDataParallel` puts between others."""
    return clean_tensor_name(prefix, (FSDP_PREFIX,))
