"""Optimizer steps compiled with inductor for a CUDA device."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from bed import world
from torch import nn
from torch.optim import AdamW

from unshard import fully_shard


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 33)).cuda()


def _losses(model: nn.Module, compiled: bool) -> list[torch.Tensor]:
    """The same batches on every rank, so that gradients are those of the unsharded model."""
    torch._dynamo.reset()
    optimizer = AdamW(model.parameters(), 1e-2)
    step = torch.compile(optimizer.step) if compiled else optimizer.step
    losses = []
    for number in range(5):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).cuda()
        losses.append(model(x).square().mean())
        losses[-1].backward()
        step()
        optimizer.zero_grad()
    return losses


# dynamo's own, about guards, profilers and matrix products in TF32
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@world(1, 2, backend="nccl")
def test_a_compiled_step() -> None:
    """Also: parameters lie at addresses that inductor does not expect to be aligned."""
    expected = _losses(_model(), compiled=False)
    torch.testing.assert_close(_losses(fully_shard(_model()), compiled=True), expected, rtol=1e-4, atol=1e-6)
