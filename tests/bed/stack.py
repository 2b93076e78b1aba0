"""Three residual blocks and a head: the model of most tests of `fully_shard`, and what they assert about it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from unshard import fully_shard
from unshard.engine.states import GradState, ParamState, Phase

WIDTH = 132  # its square is above the packing threshold of the host, and three ranks do not divide it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Stack(nn.Module):
    """Three blocks and a head; `run` says how a block is called."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 2)
        self.run: Callable[..., torch.Tensor] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


def sharded(model: Stack | None = None, **options: object) -> Stack:
    model = Stack() if model is None else model
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(seed: int = 0, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_(requires_grad)


def loss_of(model: nn.Module, seed: int = 0) -> torch.Tensor:
    return model(batch(seed)).square().mean()


def assert_gradients(model: nn.Module, reference: nn.Module, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    compared = 0
    pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
    for (name, mine), (other_name, theirs) in pairs:
        assert name == other_name
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(
                mine.grad.full_tensor(), theirs.grad, rtol=rtol, atol=atol, msg=(name + ": {}").format
            )
            compared += 1
    assert compared


def units(model: nn.Module) -> list:
    return [state.unit for module in model.modules() if (state := fully_shard.state(module))]


def assert_at_rest(model: nn.Module) -> None:
    for unit in units(model):
        assert (unit.param_state, unit.phase) == (ParamState.SHARDED, Phase.IDLE), unit
        for part in unit.param_groups:
            assert part.gradients.state in (GradState.EMPTY, GradState.REDUCED), unit
            assert not part.held
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def mesh(replicas: int) -> DeviceMesh:
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def input_gradient(model: nn.Module, x: torch.Tensor, aside: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the gradient of its sum with respect to `x`. `aside`: computed in another thread, as a device's
    backward is. Autograd numbers its nodes per thread, so a second backward then reaches the nodes of this gradient
    after those of forward, not before."""
    out = model(x)
    with ThreadPoolExecutor(1) as thread:
        grad = partial(torch.autograd.grad, out.sum(), x, create_graph=True)
        (slope,) = thread.submit(grad).result() if aside else grad()
    return out, slope
