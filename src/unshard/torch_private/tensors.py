"""Tensors and their memory: one call for many of them, views, versions, storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch

# One call for many tensors; what `torch.optim` itself is built on. Documented, but with underscores. All versions.
foreach_copy = torch._foreach_copy_
foreach_add = torch._foreach_add_
foreach_div = torch._foreach_div_
foreach_zero = torch._foreach_zero_
foreach_mul = torch._foreach_mul_
foreach_norm = torch._foreach_norm
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiplies tensors of one dtype, and sets a flag if any element is not finite; what torch's scaler uses."""


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


# Called for every parameter in every step, hence no Python function.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Autograd's count of writes to a tensor. All versions."""


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `tensor` is a view of, to autograd. All versions."""
    return tensor._base


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors (and Python objects) share a storage; there is no public way. All versions."""
    return torch._C._storage_Use_Count(storage._cdata)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Tells storages apart even when they are empty; Python objects of one storage come and go. All versions."""
    return storage._cdata


def chunk_cat_into(out: torch.Tensor, tensors: list[torch.Tensor], chunks: int) -> None:
    """Cut each tensor along dim 0 into `chunks` pieces, pad them with zeros, lay them side by side in `out`.

    `out` is (chunks, sum of piece sizes). One kernel on CUDA, where it casts only bf16 to fp32; other casts go
    through a buffer in the gradients' dtype. No public operation pads and interleaves in one call. All versions.
    """
    dtype = tensors[0].dtype
    if dtype == out.dtype or (dtype == torch.bfloat16 and out.dtype == torch.float32):
        torch._chunk_cat(tensors, dim=0, num_chunks=chunks, out=out)
    else:
        out.copy_(torch._chunk_cat(tensors, dim=0, num_chunks=chunks))
