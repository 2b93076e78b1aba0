"""What a flat unit of a front-end knows besides the unit, and what happens at its first forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

from torch import nn

from ..comm.interface import Transport
from ..engine.hooks import ShardState, state_of
from ..engine.precision import Precision, division
from ..engine.root import Root
from ..engine.states import Phase
from ..engine.unit import Unit
from ..errors import ArgumentError, UnsupportedError
from ..torch_private import never_compiled
from .comm_hooks import HookedTransport
from .flat_parameter import Handle
from .wrapper_api import CPUOffload, MixedPrecision, ShardingStrategy, default_settings
from .wrapper_buffers import CastBuffers
from .wrapper_groups import Groups


class TrainingState(Enum):
    """What a wrapped module is doing."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


@dataclass(frozen=True)
class Call:
    """What a user passed, as far as it is asked for later."""

    groups: Groups
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    use_orig_params: bool
    limit_all_gathers: bool


class WrapperState(ShardState):
    """Ties a flat unit to a wrapper, or to the module that the legacy call was applied to."""

    full_state_dict: ClassVar[str] = (
        "model.state_dict() inside FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT)"
    )

    def __init__(self, unit: Unit, call: Call, handle: Handle | None, buffers: CastBuffers):
        super().__init__(unit)
        self.call, self.handle = call, handle
        self.own_buffers = buffers
        self.summoned = False
        self.settings = default_settings()
        self.hooked = False

    def __getstate__(self) -> Any:
        raise UnsupportedError(
            f"{self.unit} cannot be pickled or copied: its shards belong to one set of ranks and buffers. Save the "
            "state_dict(), and load it into a model that is sharded anew."
        )

    def _attach_to_state_dicts(self, module: nn.Module) -> None:
        """Not as DTensors at rest are saved: plain pieces would be taken for whole parameters."""

    def install_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Give gradients to a user's hook, which divides too."""
        self.hooked = True
        self.unit.options.divide_factor, self.unit.options.divide_in_halves = 1.0, True
        for part in self.unit.parts:
            part.hook_reductions(self.unit.name, lambda inner: HookedTransport(inner, state, hook))

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        return self.call.groups.strategy

    @property
    def process_group(self) -> Any:
        return self.call.groups.own

    @property
    def transports(self) -> tuple[Transport, Transport]:
        """Over the shards, and over the replicas."""
        if self.unit.parts:
            return self.unit.parts[0].shards, self.unit.parts[0].replicas
        return self.call.groups.transports(self.unit.device)

    @property
    def training_state(self) -> TrainingState:
        if self.summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.IDLE if self.unit.phase is Phase.IDLE else TrainingState.FORWARD_BACKWARD

    def division(self) -> tuple[float, float]:
        """What gradients are divided by before and after they are summed."""
        shards, replicas = self.transports
        how = division(shards.world, replicas.world, frozenset(), None, False, in_halves=True)
        return how.before, how.after

    @never_compiled
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.unit.policy.full_precision_in_eval and self._is_root_of(module):
            self._switch_buffers(module)
        return super().pre_forward(module, args, kwargs)

    def _is_root_of(self, module: nn.Module) -> bool:
        return self.find_root(module).unit is self.unit

    def _switch_buffers(self, module: nn.Module) -> None:
        stored = self.unit.precision_in(module.training) is Precision.STORED
        for state in wrapper_states(module):
            state.own_buffers.restore() if stored else state.own_buffers.lower()

    def _become_root(self, module: nn.Module) -> Root:
        states = wrapper_states(module)
        _check_agreement(states)
        root = super()._become_root(module)
        for state in states:
            state.own_buffers.lower()
        return root


def wrapper_state_of(module: nn.Module) -> WrapperState | None:
    state = state_of(module)
    return state if isinstance(state, WrapperState) else None


def wrapper_states(module: nn.Module) -> list[WrapperState]:
    """Those of the modules below, in the order of `modules()`."""
    found = (wrapper_state_of(each) for each in module.modules())
    return list(dict.fromkeys(state for state in found if state is not None))


def _check_agreement(states: list[WrapperState]) -> None:
    for what, values in (
        ("use_orig_params", {state.call.use_orig_params for state in states if state.handle is not None}),
        ("limit_all_gathers", {state.call.limit_all_gathers for state in states}),
        ("full precision in eval (FSDP_USE_FULL_PREC_IN_EVAL)", {_in_eval(state) for state in states}),
    ):
        if len(values) > 1:
            raise ArgumentError(
                f"Wrapped modules under one root must agree on {what}, found {sorted(values)}. Pass the same to all."
            )


def _in_eval(state: WrapperState) -> bool:
    return state.unit.policy.full_precision_in_eval
