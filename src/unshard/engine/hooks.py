"""The only place where hooks are registered: what runs when is answered here."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import StateError
from ..policies import MixedPrecisionPolicy
from ..torch_private import (
    base_of,
    current_backward,
    inside_backward,
    never_compiled,
    next_node,
    node_number,
    watch_gradient,
)
from .borders import Border
from .faces import Home
from .leavings import Leavings
from .mismatch import explain
from .module_buffers import ModuleBuffers
from .optimizers import watch_optimizers
from .options import Options
from .precision import Precision, cast_floats, cast_inputs
from .refusals import refuse_second_root
from .root import Root
from .saved_shards import FULL_STATE_DICT, ShardsNote, refuse_shards_of_another_rank
from .states import Phase
from .trace import traced
from .tree import map_tensors, tensors_in
from .unit import ROOT, Unit
from .wiring import Wiring

STATE_KEY = "_unshard_state"
_WATCHED = "unshard_watched"
WRAPPED = "_fsdp_wrapped_module."
"""What a wrapper adds to the names of what it wraps."""


def state_of(module: nn.Module) -> ShardState | None:
    """What a front-end attached to this very module, if any."""
    return module.__dict__.get(STATE_KEY)


class ShardState:
    """Ties a unit to its modules: one, or the several of a list that were sharded as one unit.

    The modules own it; it refers neither to them nor strongly upward.
    """

    full_state_dict: ClassVar[str] = FULL_STATE_DICT
    """The call that gives whole parameters, for messages."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.wiring = Wiring(unit)
        self._modules: list[weakref.ref[nn.Module]] = []
        self._to_run: set[weakref.ref[nn.Module]] = set()
        self._root: weakref.ref[Root] | None = None
        self._own_root: Root | None = None  # only on the root module: deleting the model then frees everything
        self._handled: list[int] = []
        self._first_node = 0
        self._leavings = Leavings()
        self.casts_inputs = unit.policy.cast_forward_inputs
        """Whether inputs are cast at the door; for some policies that depends on where the root is."""
        self.buffers: ModuleBuffers | None = None
        self.buffer_dtypes: dict[tuple[int, str], torch.dtype] = {}
        """What the modules' buffers were stored in when they were sharded, by number of the module and by name."""
        self.ignored: list[Home] = []
        """Where the modules have parameters that they were told to leave alone."""

    def attach(self, module: nn.Module) -> None:
        """All registrations on the module."""
        watch_optimizers()
        self.adopt([module])
        module.__dict__[STATE_KEY] = self
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.post_forward, with_kwargs=True, always_call=True)
        self._attach_to_state_dicts(module)
        self._note_shards_of(module)

    def _attach_to_state_dicts(self, module: nn.Module) -> None:
        module.register_state_dict_pre_hook(self.pre_state_dict)
        module.register_load_state_dict_pre_hook(self.pre_load)
        module.register_load_state_dict_post_hook(self.post_load)

    def _note_shards_of(self, module: nn.Module) -> None:
        module.register_state_dict_post_hook(partial(self.post_state_dict))  # torch marks it; methods take no marks

    def attach_wrapper(self, module: nn.Module) -> None:
        """The same for a module whose own forward calls `run`."""
        watch_optimizers()
        self.adopt([module])
        module.__dict__[STATE_KEY] = self
        self._note_shards_of(module)

    def attach_border(self, module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        """Cast at the door of a module inside that has a precision of its own."""
        border = Border(self, policy)
        module.register_forward_pre_hook(border.enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(border.leave)

    def cast_buffers(self, buffers: ModuleBuffers) -> None:
        """Show forward the modules' buffers in another dtype."""
        self.buffers = buffers

    def adopt(self, modules: list[nn.Module]) -> None:
        self._modules += [weakref.ref(module) for module in modules]

    def modules(self) -> list[nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    # -- forward --------------------------------------------------------------------------------------------

    @never_compiled
    @traced("pre_forward")
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self.unit
        # An exception that is already being handled when forward begins is not forward's.
        self._handled.append(id(sys.exc_info()[1]))
        precision = unit.precision_in(module.training)
        if self.buffers is not None:
            self.buffers.enter(cast=precision is Precision.POLICY)
        root = self.find_root(module)
        root.recover(unit)
        if unit is root.unit:
            if root.unmanaged.changed and torch.is_grad_enabled():
                self._look_for_unmanaged(module, root)
            if unit.device.type != "cpu":
                args, kwargs = map_tensors(partial(_move, unit.device), (args, kwargs))
        if self.casts_inputs:
            args, kwargs = cast_inputs(args, kwargs, unit.compute_dtype_in(precision))
        if unit.phase is Phase.BACKWARD:
            unit.select(precision)
            unit.use()  # recomputation inside the unit's own backward: hooks are in place, nothing to free
            return args, kwargs
        if self._runs_in_group(root):
            if unit.phase is Phase.FORWARD:
                return args, kwargs  # the first module of the list has gathered and watches its inputs
            self._to_run = set(self._modules)
        root.before_forward(unit, precision)
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(args, kwargs)
            self._first_node = next_node()
        return args, kwargs

    def _runs_in_group(self, root: Root) -> bool:
        """Whether the modules of a list are to be gathered once and freed when the last of them has run.

        Called alone, outside the root's forward (a loss computed in chunks), each is on its own.
        """
        return len(self._modules) > 1 and root.in_forward and not inside_backward()

    @never_compiled
    @traced("post_forward")
    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        unit, root = self.unit, self._live_root()
        if not self._handled:
            return output  # our own pre_forward did not run
        before = self._handled.pop()
        if self.buffers is not None:
            self.buffers.leave()
        if root is None:
            return output  # our own pre_forward refused
        error = sys.exc_info()[1]
        if id(error) != before:
            explain(error, module, unit)
            root.fail_forward(unit)
            return output
        if unit.phase is not Phase.BACKWARD:
            graph = torch.is_grad_enabled()
            # Without a graph it may be a checkpoint's first forward; modules of a list have other outputs besides.
            returns = not graph or len(self._modules) > 1
            if graph:
                output, watched = self._watch_outputs(output)
                returns = returns or watched
                if self._leavings.expected():
                    self._watch_leavings(output)
            if self._to_run:
                self._to_run.discard(weakref.ref(module))
            if not (self._to_run and self._runs_in_group(root)):
                root.after_forward(unit, graph, returns, blind=not returns and self._watch_parameters())
        return output if unit.precision is Precision.STORED else cast_floats(output, unit.policy.output_dtype)

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

    def _watch_outputs(self, output: Any) -> tuple[Any, bool]:
        """Backward of the unit begins when a gradient reaches any output; false if none can."""
        outputs: Iterable[torch.Tensor] = (output,) if isinstance(output, torch.Tensor) else tensors_in(output)
        watched = [tensor for tensor in outputs if tensor.requires_grad]
        begin = self._begin()
        for tensor in watched:
            watch_gradient(tensor, begin)
            base = base_of(tensor)
            if base is not None and base.grad_fn is not None:
                # Overwritten in place, a view gets another place in the graph and its hook never fires; the node that
                # made its base stays.
                base.grad_fn.register_prehook(begin)
        if watched and max(map(node_number, watched)) + 1 < next_node():
            # What was computed after the outputs may have a part in the loss, and would run in backward before anybody
            # is told. A younger node runs before it.
            output = map_tensors(self._made_last, output)
        return output, bool(watched)

    def _begin(self) -> Callable[[Any], None]:
        return self.pre_backward if self.unit.precision is Precision.POLICY else self.pre_backward_stored

    def _made_last(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor = _alias_of(tensor)
            watch_gradient(tensor, self._begin())
        return tensor

    def _watch_leavings(self, output: Any) -> None:
        """What forward left on its modules is as good as an output."""
        if not inside_backward():
            outputs = set(map(id, tensors_in(output)))
            for tensor in self._leavings.tensors(self.modules(), self._first_node):
                if id(tensor) not in outputs:
                    watch_gradient(tensor, self._begin())

    def _watch_parameters(self) -> bool:
        """Of a unit without outputs to watch: a backward may come all the same, by what forward left elsewhere.

        When it begins is not told, only that it reached a parameter; false if it cannot.
        """
        trained = [slot.full for slot in self.unit.slots if slot.full is not None and slot.full.requires_grad]
        for face in trained:
            if not hasattr(face, _WATCHED):
                setattr(face, _WATCHED, True)
                face.register_post_accumulate_grad_hook(partial(_gradient_came, weakref.ref(self)))
        return bool(trained)

    def expect_end_of_backward(self) -> None:
        root = self._live_root()
        if root is not None:
            root.expect_end_of_backward()

    @traced("pre_backward")
    def pre_backward(self, gradient: Any) -> None:
        self._begin_backward(Precision.POLICY)

    @traced("pre_backward")
    def pre_backward_stored(self, gradient: Any) -> None:
        self._begin_backward(Precision.STORED)

    def _begin_backward(self, precision: Precision) -> None:
        root = self._live_root()
        if root is not None:
            root.before_backward(self.unit, precision)

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Backward of the unit is over when the gradients of all inputs are done.

        Each input passes through a view of its own, whose graph node sees only this unit's share of the gradient:
        an input that other modules use too must not delay the reduction.
        """
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
            if not args[0].requires_grad:
                return args, kwargs
            watched = _alias_of(args[0])
            watch_gradient(watched, self.post_backward)
            return (watched,), kwargs
        watch = InputWatch(self)
        return map_tensors(watch.through, (args, kwargs))

    @traced("post_backward")
    def post_backward(self, *gradients: Any) -> None:
        root = self._live_root()
        if root is not None:
            root.after_backward(self.unit)

    # -- state dicts ----------------------------------------------------------------------------------------

    def pre_state_dict(self, module: nn.Module, *unused: Any) -> None:
        """State dicts are taken from, and loaded into, the sharded faces."""
        self.wait_for_uploads()
        self.unit.reshard()
        self.unit.settle()

    def post_state_dict(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        ShardsNote.put(state_dict, local_metadata, self.full_state_dict)

    def pre_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
        refuse_shards_of_another_rank(state_dict, prefix, self.full_state_dict)
        self.pre_state_dict(module)

    def wait_for_uploads(self) -> None:
        """To be called before parameters are written on the host."""
        root = self._live_root()
        if root is not None:
            root.wait_for_uploads()

    def post_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.unit.settle()

    # -- the root -------------------------------------------------------------------------------------------

    @property
    def is_initialised(self) -> bool:
        """Whether a forward has found this module's root."""
        return self._live_root() is not None

    def _live_root(self) -> Root | None:
        return None if self._root is None else self._root()

    def root_options(self) -> Options:
        """The options that count for the whole model."""
        root = self._live_root()
        return self.unit.options if root is None else root.unit.options

    def reset(self) -> None:
        root = self._live_root()
        if root is None:
            self.unit.reset()
        elif root.unit is not self.unit:
            raise StateError(f"{self.unit} is not the root; call reset_iter_state on the outermost sharded module.")
        else:
            root.reset()

    def find_root(self, module: nn.Module) -> Root:
        """The root, which is the first module to run: then all units below it are known."""
        return self._live_root() or self._become_root(module)

    def _become_root(self, module: nn.Module) -> Root:
        if len(self._modules) > 1:
            raise StateError(
                f"Modules that were sharded as a list cannot be the root: {type(module).__name__} ran first. Apply "
                "fully_shard to a module that contains them, too, and run that one."
            )
        names: dict[ShardState, list[str]] = {}
        for name, child in module.named_modules():
            if state := state_of(child):
                names.setdefault(state, []).append(name)
        prefixes = {child: f"{name}." if name else "" for name, child in module.named_modules()}
        for state, paths in names.items():
            if state._live_root() is not None:
                refuse_second_root(", ".join(paths))
            state.unit.name = ", ".join(without_wrappers(path).rstrip(".") or ROOT for path in paths)
            for slot in state.unit.slots:
                slot.name = without_wrappers(prefixes.get(slot.homes[0].module(), "")) + slot.homes[0].name
        self._own_root = Root([state.unit for state in names])
        for state in names:
            state._root = weakref.ref(self._own_root)
            state.casts_inputs = state.unit.policy.casts_inputs(state is self, empty=not state.unit.slots)
        return self._own_root

    def _look_for_unmanaged(self, module: nn.Module, root: Root) -> None:
        states = {state for child in module.modules() if (state := state_of(child))}
        parts = [part for state in states for part in state.unit.parts]
        homes = [home for part in parts for home in part.sharded.homes]
        homes += [home for state in states for home in state.ignored]
        root.unmanaged.look(module, homes, max([part.shards.world * part.replicas.world for part in parts], default=1))

    # -- what PyTorch's pipelines ask for once their last backward is over: `fully_shard.state(stage)` ... ---------

    @property
    def _state_ctx(self) -> ShardState:
        return self

    @property
    def all_states(self) -> list[Any]:
        """... to close one by one; ours are closed by the call below, all at once."""
        return []

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the sums of backwards that did not synchronise, and rest."""
        root = self._live_root()
        if root is not None:
            root.end_backward()


class InputWatch:
    """Several inputs: the unit's backward is over when the gradients of all of them are done."""

    def __init__(self, state: ShardState):
        self._state = state
        self._inputs = 0
        self._done = 0
        self._backward = -1

    def through(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        watched = _alias_of(tensor)
        watch_gradient(watched, self._one_done)
        self._inputs += 1
        return watched

    def _one_done(self, gradients: Any) -> None:
        if self._backward != current_backward():  # a retained graph is run through again
            self._backward, self._done = current_backward(), 0
        self._done += 1
        if self._done == self._inputs:
            self._state.post_backward()


def _alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor with a place of its own in the graph.

    Indexing with nothing makes an alias, whose backward hands the gradient on; that of a view reshapes it. But not
    every subclass of tensors knows it.
    """
    return tensor[...] if type(tensor) is torch.Tensor else tensor.view_as(tensor)


def _gradient_came(ref: weakref.ref[ShardState], face: torch.Tensor) -> None:
    """Parameters must not keep their modules' state alive."""
    state = ref()
    if state is not None:
        state.expect_end_of_backward()


def without_wrappers(path: str) -> str:
    """A path of modules without those that `FullyShardedDataParallel` puts between others."""
    return f"{path}.".replace(WRAPPED, "")[:-1] if WRAPPED in f"{path}." else path


def _move(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)
