"""Which device things are on: what a call moves there, what the root moves, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from bed import world
from torch import nn

from unshard import CPUOffloadPolicy, fully_shard


class Mixed(nn.Module):
    """Built on the host, with a buffer and a parameter that is not to be sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.spare = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(x) * self.scale + more["bias"]


@world(1, backend="nccl")
def test_a_model_built_on_the_host() -> None:
    """Contract ARG-11, SEL-04, SEL-06, SEL-07, RUN-14, RUN-15: parameters and buffers move, ignored ones do not."""
    inner, reference = Mixed(), Mixed()
    model = nn.Sequential(inner)
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    fully_shard(inner, ignored_params={inner.spare})
    fully_shard(model)  # without parameters of its own; it moves the inputs all the same
    assert inner.linear.weight.to_local().is_cuda and inner.scale.is_cuda and not inner.spare.is_cuda
    x, bias = torch.randn(3, 4), torch.randn(4)
    out = model(x, more={"bias": bias})
    assert out.is_cuda
    torch.testing.assert_close(out.cpu(), reference(x, {"bias": bias}), rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert inner.linear.weight.grad.to_local().is_cuda


@world(1, backend="nccl")
def test_parameters_on_the_wrong_device_are_refused() -> None:
    """Contract META-04, OFF-05: by name, with the device found and the one expected."""
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    fully_shard(layer)
    layer.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"expects its parameters on cuda.*weight on cpu"):
        layer(torch.ones(2, 4, device="cuda"))
    offloaded = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy())
    offloaded.cuda()
    with pytest.raises(RuntimeError, match=r"expects its parameters on cpu.*weight on cuda.*keeps them on the host"):
        offloaded(torch.ones(2, 4, device="cuda"))
    offloaded.to("cpu")
    assert offloaded(torch.ones(2, 4, device="cuda")).is_cuda


@world(1, backend="nccl")
def test_loading_by_assignment_pins_again() -> None:
    """Contract OFF-07, OFF-08, OFF-09: what is loaded is in the page-locked shard; unsharded weights on the device."""
    layer = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy())
    state = copy.deepcopy(layer.state_dict())
    assert all(entry.to_local().device.type == "cpu" for entry in state.values())
    layer.load_state_dict(state, assign=True)
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight.device.type))
    layer(torch.ones(2, 4)).sum().backward()
    assert layer.weight.to_local().is_pinned() and layer.weight.grad.to_local().device.type == "cpu"
    assert seen == ["cuda"]
