"""Who is compared: the same training without sharding, with PyTorch's two engines, and with unshard."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from .models import UNIT_CLASSES, Case, units
from .places import Place

OURS = ("unshard", "unshard-flat", "unshard-wrapper", "unshard-watched")
OURS += ("unshard-offload", "unshard-offload-flat", "unshard-offload-step-in-backward", "unshard-offload-state")
PEERS = ("fsdp2", "fsdp1", "fsdp2-offload", "unsharded")
PEER_OF_OURS = {"unshard-watched": "unshard"}  # the same training, with a watch
MAX_NORM = 1.0
GROUP = 400


@dataclass
class Training:
    """A model in training; the parts of a step can be called and timed one by one."""

    case: Case
    model: nn.Module
    optimizer: Any
    batch: Tensor
    clip: Callable[[], Any]
    observed: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What watches the steps inside a `with` block. Other sides may run outside."""

    def forward(self) -> Tensor:
        return self.case.loss(self.model, self.batch)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.forward().backward()
        self.update()


def start(side: str, case: Case, place: Place) -> Training:
    """Build one side from the same weights and data as all others."""
    # What the peers warn about (names of theirs that will go away) says nothing about a measurement.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = case.build(place.device)
        model = _SHARDERS[side](model, case, place)
        # A learning rate that keeps the numbers where they are: steps are timed, nothing is learned.
        optimizer: Any = torch.optim.AdamW(_groups(model), lr=1e-5, fused=True)
        if side.endswith(("-flat", "-step-in-backward", "-state")):
            optimizer = _flat(optimizer, step_in_backward=side.endswith("-step-in-backward"))
    training = Training(case, model, optimizer, case.batch(place.device, place.rank), _clip(side, model))
    return watched(training) if side in PEER_OF_OURS else training


def watched(training: Training) -> Training:
    """The same training, with a watch. Two trainings would also differ by the addresses of their tensors."""
    from unshard.tools import watch

    return replace(training, observed=lambda: watch(training.model, training.optimizer))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups of a limited size, of whole units in the models with many parameters.

    The first fused step over DTensors plans their placements, and that takes about three times as long for twice as
    many in a group (8 s for 800 on the CPU this was written on). All sides have the same groups.
    """
    parameters = list(model.parameters())
    return [{"params": parameters[first : first + GROUP]} for first in range(0, len(parameters), GROUP)]


def known(names: str) -> list[str]:
    """The sides that a comma-separated list names; `all` are those that offload nothing."""
    if names == "all":
        return [name for name in _SHARDERS if "-offload" not in name and name not in PEER_OF_OURS]
    chosen = [name.replace("_", "-") for name in names.split(",")]
    if missing := [name for name in chosen if name not in _SHARDERS]:
        raise ValueError(f"no such side: {', '.join(missing)}; there are {', '.join(_SHARDERS)}")
    return chosen


def with_unsharded(chosen: list[str]) -> list[str]:
    """The same sides with the one that others are compared with, which comes first."""
    return ["unsharded", *(side for side in chosen if side != "unsharded")]


def _unsharded(model: nn.Module, case: Case, place: Place) -> nn.Module:
    """The limit in time: everything in the dtype of the computation, and nothing to send."""
    return model.to(case.dtype)


def _fsdp2(model: nn.Module, case: Case, place: Place, **more: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return _per_unit(model, case, place, fully_shard, MixedPrecisionPolicy, more)


def _fsdp2_offload(model: nn.Module, case: Case, place: Place) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fsdp2(model, case, place, offload_policy=CPUOffloadPolicy(pin_memory=place.on_gpu))


def _unshard(model: nn.Module, case: Case, place: Place, **more: Any) -> nn.Module:
    from unshard import MixedPrecisionPolicy, fully_shard

    return _per_unit(model, case, place, fully_shard, MixedPrecisionPolicy, more)


def _unshard_offload(model: nn.Module, case: Case, place: Place) -> nn.Module:
    from unshard import CPUOffloadPolicy

    return _unshard(model, case, place, offload_policy=CPUOffloadPolicy(pin_memory=place.on_gpu))


def _unshard_offload_state(model: nn.Module, case: Case, place: Place) -> nn.Module:
    from unshard import OptimizerOffloadPolicy

    return _unshard(model, case, place, offload_policy=OptimizerOffloadPolicy(pin_memory=place.on_gpu))


def _per_unit(
    model: nn.Module, case: Case, place: Place, fully_shard: Any, policy: Any, more: dict[str, Any]
) -> nn.Module:
    options = {"mesh": init_device_mesh(place.device.type, (place.world,)), **more}
    if case.dtype != torch.float32:
        options["mp_policy"] = policy(param_dtype=case.dtype, reduce_dtype=torch.float32)
    for unit in units(model):
        fully_shard(unit, **options)
    fully_shard(model, **options)
    return model


def _fsdp1(model: nn.Module, case: Case, place: Place) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return _wrapped(model, case, place, FullyShardedDataParallel, MixedPrecision, ModuleWrapPolicy)


def _unshard_wrapper(model: nn.Module, case: Case, place: Place) -> nn.Module:
    from unshard import FullyShardedDataParallel, MixedPrecision, ModuleWrapPolicy

    return _wrapped(model, case, place, FullyShardedDataParallel, MixedPrecision, ModuleWrapPolicy)


def _wrapped(model: nn.Module, case: Case, place: Place, wrapper: Any, precision: Any, policy: Any) -> nn.Module:
    mixed = None
    if case.dtype != torch.float32:
        mixed = precision(param_dtype=case.dtype, reduce_dtype=torch.float32)
    options = {"auto_wrap_policy": policy(set(UNIT_CLASSES)), "mixed_precision": mixed, "use_orig_params": True}
    return wrapper(model, device_id=place.device, **options)


_SHARDERS: dict[str, Callable[[nn.Module, Case, Place], nn.Module]] = {
    "unsharded": _unsharded,
    "fsdp2": _fsdp2,
    "fsdp1": _fsdp1,
    "unshard": _unshard,
    "unshard-flat": _unshard,
    "unshard-watched": _unshard,
    "unshard-wrapper": _unshard_wrapper,
    "fsdp2-offload": _fsdp2_offload,
    "unshard-offload": _unshard_offload,
    "unshard-offload-flat": _unshard_offload,
    "unshard-offload-step-in-backward": _unshard_offload,
    "unshard-offload-state": _unshard_offload_state,
}


def _flat(optimizer: Any, step_in_backward: bool) -> Any:
    import unshard

    return unshard.optim.flat(optimizer, step_in_backward=step_in_backward)


def _clip(side: str, model: nn.Module) -> Callable[[], Any]:
    """What users of the side would call; a list is made once, as a training loop would."""
    if side in ("fsdp1", "unshard-wrapper"):
        return lambda: model.clip_grad_norm_(MAX_NORM)
    parameters: Iterable[Tensor] = list(model.parameters())
    if side in OURS:
        import unshard

        return lambda: unshard.optim.clip_grad_norm_(parameters, MAX_NORM)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
