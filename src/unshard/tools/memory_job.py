"""One rank of a job whose other ranks and device do not exist. Collectives do nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from ..engine.api import simulating_device
from ..errors import StateError
from ..fsdp1 import build as wrapper_module
from ..fsdp2 import fully_shard as fully_shard_module
from ..torch_private import (
    ALL_GATHER,
    ALL_GATHER_COALESCED,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    REDUCE_SCATTER_COALESCED,
    Work,
    efficient_attention,
    flash_attention,
    foreach_on_the_host,
    without_onednn,
)

BACKEND = "unshard_plan"


class _Done(Work):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class _Group(dist.ProcessGroup):
    """A process group that delivers nothing. Its name selects the engine's behavior with this backend."""

    backend = "gloo"

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._name_of_group = ""

    def getBackendName(self) -> str:
        return self.backend

    def setGroupName(self, name: str) -> None:
        self._name_of_group = name

    def getGroupName(self) -> str:
        return self._name_of_group

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for places, mine in zip(outputs, inputs, strict=True):
            for place in places:
                place.copy_(mine)
        return _Done(outputs)


class _DeviceGroup(_Group):
    backend = "nccl"


def _nothing(self: Any, outputs: Any = None, *args: Any) -> Any:
    return _Done(outputs)


# The engine exchanges the pieces of a reduction if the backend is Gloo and the group has no reduce-scatter of its own.
for _name in (*ALL_GATHER, *ALL_TO_ALL, "allreduce", "allreduce_coalesced", "broadcast", "barrier"):
    setattr(_Group, _name, _nothing)
for _name in (*ALL_GATHER_COALESCED, *REDUCE_SCATTER, *REDUCE_SCATTER_COALESCED):
    setattr(_DeviceGroup, _name, _nothing)


_group_class: list[type[_Group]] = []


def _create(store: Any, rank: int, world: int, timeout: Any) -> _Group:
    return _group_class[-1](rank, world)


@contextmanager
def simulated_job(world: int, device: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Make this process rank 0 of `world` ranks on `device`. All tensors are on the CPU.

    `options` replace arguments of every `fully_shard` call that the caller leaves out: `mp_policy`, `offload_policy`.
    """
    if dist.is_initialized():
        raise StateError(
            "plan() simulates a job of its own, and this process is already part of a job. Call plan() before "
            "init_process_group, or use `unshard plan`. If a file joins a job when it is imported, put that under "
            '`if __name__ == "__main__":`.'
        )
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    on_device, hook = device != "cpu", sys.excepthook
    _group_class.append(_DeviceGroup if on_device else _Group)
    with ExitStack() as stack:
        if on_device:
            stack.enter_context(simulating_device())
            stack.enter_context(foreach_on_the_host())
        stack.enter_context(_only_the_host())
        stack.enter_context(mock.patch.object(fully_shard_module, "_checked_type", _with(options)))
        if on_device:
            stack.enter_context(_Operators())
            stack.enter_context(without_onednn())  # its LSTM differs from that of a device
            # `F.multi_head_attention_forward` runs outside the mode.
            attention = partial(_attention, F.scaled_dot_product_attention)
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        try:
            dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=world)
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _group_class.pop()
            sys.excepthook = hook  # init_process_group wraps it


def _with(options: Mapping[str, Any]) -> Callable[..., Any]:
    original = fully_shard_module._checked_type
    return lambda name, value, *args: original(name, options.get(name) if value is None else value, *args)


@contextmanager
def _only_the_host() -> Iterator[None]:
    """Hide accelerators of this machine, and let meshes of an accelerator be meshes of the CPU."""
    make = DeviceMesh.__init__

    def on_host(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        make(self, "cpu", *args, **kwargs)

    with (
        mock.patch.object(DeviceMesh, "__init__", on_host),
        mock.patch.object(wrapper_module, "_resolve_device_id", lambda device_id: torch.device("cpu")),
        mock.patch.object(torch.accelerator, "current_accelerator", lambda *args, **kwargs: None),
        mock.patch.object(torch.accelerator, "is_available", lambda: False),
        mock.patch.object(torch.accelerator, "device_count", lambda: 8),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        yield


class _RMSNorm(torch.autograd.Function):
    """Keeps what the fused kernel of CUDA keeps: the input, the weight and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, axes: int) -> torch.Tensor:
        rows = torch.empty(x.shape[:-axes] + (1,) * axes, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


_SDPA = F.scaled_dot_product_attention


class _Operators(TorchFunctionMode):
    """Replaces operators that keep less memory on a CUDA device than on the CPU, and devices by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return _attention(func, *args, **kwargs)
        if func is F.rms_norm or func is torch.rms_norm:
            return _rms_norm(func, *args, **kwargs)
        if func is torch.dropout or func is F.dropout:
            return _dropout(func, *args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if _is_accelerator(each) else each for each in args)
        return func(*args, **kwargs)


def _is_accelerator(value: Any) -> bool:
    if isinstance(value, str | torch.device):
        return torch.device(value).type not in ("cpu", "meta")
    return False


def _attention(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Call the operator that CUDA chooses: flash attention for 16 bits, else the memory-efficient one."""
    usable = query.dim() == 4 and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    if usable and attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        return flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if usable and not enable_gqa and (attn_mask is None or attn_mask.dtype != torch.bool):
        needs_log = any(each.requires_grad for each in (query, key, value))
        return efficient_attention(query, key, value, attn_mask, needs_log, dropout_p, is_causal, scale=scale)[0]
    return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _rms_norm(func: Any, x: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    if weight is not None and weight.dtype != x.dtype:
        return func(x, normalized_shape, weight, eps)
    return _RMSNorm.apply(x, weight, len(normalized_shape))


def _dropout(func: Any, x: Any, p: float = 0.5, training: bool = True, *args: Any, **kwargs: Any) -> Any:
    train = kwargs.pop("train", training)
    if not train or p == 0 or args or kwargs.get("inplace"):
        return x if not train or p == 0 else func(x, p, train, *args, **kwargs)
    return torch.native_dropout(x, p, True)[0]
