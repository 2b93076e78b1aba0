"""A tensor subclass with its own all-gather protocol."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


class SplitTensor(torch.Tensor):
    """A weight that is all-gathered as two tensors: a half-precision one, and the difference to the weight."""

    KEPT = {
        torch.ops.aten.detach.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.clone.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.copy_.default,
        torch.ops.aten.view.default,
        torch.ops.aten.split.Tensor,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.zeros_like.default,
        torch.ops.aten.new_zeros.default,
    }
    seen: list[tuple] = []
    trims = True
    """Whether the unsharded tensor comes without the padding of uneven shards."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> SplitTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict, meta: object, size: object, stride: object) -> SplitTensor:
        return SplitTensor(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrapped = tree_map_only(SplitTensor, lambda each: each.inner, (args, kwargs or {}))
        result = func(*unwrapped[0], **unwrapped[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return tree_map_only(torch.Tensor, cls, result) if func in cls.KEPT else result

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        SplitTensor.seen.append((mesh, outer_size, outer_stride, module, mp_policy))
        padded = self.inner.new_zeros(-(-outer_size[0] // mesh.size()), *self.inner.shape[1:])
        padded[: self.inner.shape[0]] = self.inner
        body = padded.to(torch.bfloat16)
        return (body, padded - body.float()), (outer_size, padded.dtype)

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        size, _ = metadata
        body, rest = gathered
        assert body.shape[0] >= size[0] and body.dtype == torch.bfloat16 and rest.dtype == torch.float32
        if not self.trims:
            size = body.shape
        whole = (body.float() + rest)[: size[0]].to(param_dtype)
        if out is None:
            return whole, (whole,)
        assert out.shape == size and out.dtype == param_dtype
        out.copy_(whole)
        return None


class OpaqueTensor(SplitTensor):
    """The same without the protocol."""

    @property
    def fsdp_pre_all_gather(self):
        raise AttributeError

    @property
    def fsdp_post_all_gather(self):
        raise AttributeError


def with_split_weights(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(SplitTensor(module.weight.detach()))
    return model
