"""Private APIs to run a model on memory that is never touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._foreach_utils as _foreach_utils
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

Work = dist._Work

flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention


def schema_of(operator: Any) -> Any:
    """Return the names, types and aliases of the arguments and results of an operator."""
    return operator._schema


def is_composite(operator: Any) -> bool:
    """Return True if an operator only calls other operators."""
    return operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN. The public `torch.backends.mkldnn.flags` also sets TF32, and warns about that."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def run_backward(loss: torch.Tensor) -> None:
    """Run backward of `loss` inside a `TorchFunctionMode`, so that recomputations see the mode.

    `loss.backward()` leaves the mode until it returns.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextmanager
def foreach_on_the_host() -> Iterator[None]:
    """Let optimizers treat parameters on the CPU as those on a CUDA device, for which they default to `foreach`.

    Optimizers read the list of devices from this function, and their argument `foreach` would have to be set by the
    program.
    """
    original = _foreach_utils._get_foreach_kernels_supported_devices
    _foreach_utils._get_foreach_kernels_supported_devices = lambda: [*original(), "cpu"]
    from torch.optim import optimizer

    before = optimizer._get_foreach_kernels_supported_devices
    optimizer._get_foreach_kernels_supported_devices = lambda: [*original(), "cpu"]
    try:
        yield
    finally:
        _foreach_utils._get_foreach_kernels_supported_devices = original
        optimizer._get_foreach_kernels_supported_devices = before
