"""Before a module is cut: where it is to compute, memory for what is on meta, values from one rank for all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ArgumentError, StateError
from ..torch_private import own_buffers, own_parameters, served_device_types
from .flatten import Managed

_BUCKET = 64 * 1024 * 1024  # bytes that are sent at once


def compute_device(device_id: Any, mesh: Any, group: Any, managed: Managed) -> torch.device:
    """Where the module computes: as told, else where its parameters are, else on the accelerator if there is one."""
    found = {each.device for each in _states(managed) if not each.is_meta}
    accelerated = {device for device in found if device.type != "cpu"}
    if len(accelerated) > 1 or (len(found) > 1 and device_id is None):
        listed = ", ".join(sorted(map(str, found)))
        raise StateError(
            f"The module has parameters and buffers on several devices ({listed}). Move it to one, or, where only the "
            "host and one device are among them, pass device_id."
        )
    if device_id is not None:
        return _agreeing(_named(device_id), accelerated)
    if accelerated:
        return accelerated.pop()
    if mesh is not None:
        return _indexed(mesh.device_type)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in served_device_types(group):
        return torch.device("cpu")
    return _indexed(accelerator.type)


def _named(device_id: Any) -> torch.device:
    if type(device_id) is int:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, device_id)
    device = torch.device(device_id)
    if str(device) == device.type != "cpu":
        chosen = _indexed(device.type)
        warnings.warn(f"device_id={device_id} does not say which one; {chosen} is taken.", stacklevel=5)
        return chosen
    return torch.device("cpu") if device.type == "cpu" else device


def _indexed(kind: str) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def _agreeing(device: torch.device, found: set[torch.device]) -> torch.device:
    if found and found != {device}:
        raise ArgumentError(f"device_id is {device}, but the module is on {found.pop()}. Pass the same device.")
    return device


def _states(managed: Managed) -> list[torch.Tensor]:
    buffers = [each for module in managed.modules for each in own_buffers(module).values() if each is not None]
    return [*managed.parameters, *buffers]


def move_buffers(managed: Managed, device: torch.device) -> None:
    """Buffers stay whole, so they are needed where the module computes."""
    for module in managed.modules:
        for name, buffer in own_buffers(module).items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                own_buffers(module)[name] = buffer.to(device)


def materialise(
    managed: Managed, device: torch.device, init: Callable[[nn.Module], Any] | None, again: Callable[[], Managed]
) -> Managed:
    """Memory and values for modules on meta: by `init`, or by `to_empty` and the module's own `reset_parameters`."""
    waiting = [module for module in managed.modules if _on_meta(module, managed)]
    if not waiting:
        return managed
    for module in waiting:
        if init is not None:
            init(module)
        else:
            _reset(module, device)
    return again()


def _on_meta(module: nn.Module, managed: Managed) -> bool:
    parameters = [each for each in own_parameters(module).values() if each in managed.parameters]
    buffers = [each for each in own_buffers(module).values() if each is not None]
    return any(each.is_meta for each in (*parameters, *buffers))


def _reset(module: nn.Module, device: torch.device) -> None:
    name = type(module).__name__
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is None:
        warnings.warn(
            f"{name} has parameters or buffers on meta and no reset_parameters() to give them values.", stacklevel=6
        )
        raise StateError(
            f"{name} is on meta and has no reset_parameters(). Give it one that initialises its own parameters and "
            "buffers, or pass param_init_fn."
        )
    module.to_empty(device=device, recurse=False)
    with torch.no_grad():
        reset()


@torch.no_grad()
def broadcast(states: Iterable[torch.Tensor], groups: Iterable[Any], device: torch.device) -> None:
    """The values of each group's first rank for all of its ranks, a bucket at a time."""
    states = [each.detach() for each in states]
    for group in groups:
        if group.size() == 1:
            continue
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for each in states:
            by_dtype.setdefault(each.dtype, []).append(each)
        for same in by_dtype.values():
            for bucket in _buckets(same):
                _send(bucket, group, device)


def _buckets(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for each in tensors:
        bucket.append(each)
        size += each.numel() * each.element_size()
        if size >= _BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _send(bucket: list[torch.Tensor], group: Any, device: torch.device) -> None:
    flat = torch.cat([each.reshape(-1).to(device) for each in bucket])
    dist.broadcast(flat, group=group, group_src=0)
    for each, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
        each.copy_(part.view(each.shape))


def states_to_send(managed: Managed) -> list[torch.Tensor]:
    return _states(managed)
