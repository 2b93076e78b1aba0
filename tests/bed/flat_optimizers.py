"""A small model for flat optimizers, the optimizers that can be flat, and the same one on copies to compare with."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unshard import CPUOffloadPolicy, fully_shard
from unshard.engine.params.sharded import ShardedParams
from unshard.engine.sharded_grad import ShardedGrad

optim = torch.optim

Groups = list[dict[str, Any]]


class Net(nn.Module):
    """Uneven pieces, empty ones, and a layer that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.odd, self.last = nn.Linear(6, 7), nn.Linear(7, 1)
        self.extra = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        x = x + self.second(torch.tanh(self.first(x)))
        x = x + self.extra(x) if extra else x
        return self.last(torch.tanh(self.odd(x)))


def sharded(**options: Any) -> Net:
    model = Net()
    fully_shard([model.first, model.second], **options)
    return fully_shard(model, **options)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(step))


def by_decay(model: nn.Module) -> Groups:
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def ranges(optimizer: Any) -> list[Any]:
    return optimizer.flat_groups().spans


class Mirror:
    """The same optimizer on plain copies of the local tensors, with copies of the gradients: what DTensors compute."""

    def __init__(self, optimizer: Any, **options: Any) -> None:
        self.followed = optimizer
        self.copies = {each: nn.Parameter(local(each).detach().clone()) for each in parameters_of(optimizer)}
        groups = [
            {**group, "params": [self.copies[each] for each in group["params"]]} for group in optimizer.param_groups
        ]
        self.optimizer = base_of(optimizer)(groups, **options)

    def step(self) -> None:
        """Before the step of the one it follows."""
        for each, copy in self.copies.items():
            copy.grad = None if each.grad is None else local(each.grad).clone()
        for copied, group in zip(self.optimizer.param_groups, self.followed.param_groups, strict=True):
            copied.update({key: value for key, value in group.items() if key != "params"})
        self.optimizer.step()

    def check(self, *, bitwise: bool = True) -> None:
        """Not bitwise after fused steps: torch's fused kernels for CPUs round the last elements of a tensor differently
        from the rest, and a flat shard ends elsewhere than the copies. Which kernels do so depends on the CPU.
        """
        tolerance = {"rtol": 0.0, "atol": 0.0} if bitwise else {}
        compared = 0
        for each, copy in self.copies.items():
            torch.testing.assert_close(local(each).detach(), copy.detach(), **tolerance)
            one, two = self.followed.state.get(each, {}), self.optimizer.state.get(copy, {})
            assert (each in self.followed.state, one.keys()) == (copy in self.optimizer.state, two.keys())
            for key, value in one.items():
                if isinstance(each, DTensor) and two[key].ndim:
                    assert value.placements == each.placements and value.device_mesh is each.device_mesh
                torch.testing.assert_close(local(value), two[key], **tolerance, msg=key)
            compared += copy.numel()
        assert compared or dist.get_rank()


def base_of(optimizer: Any) -> type:
    return type(optimizer).__mro__[2]


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def assert_clean() -> None:
    """Padding and gaps are zero in every master and gradient shard that is alive; not those of other tests' models."""
    gc.collect()
    alive = gc.get_objects()
    for each in (each for each in alive if isinstance(each, ShardedParams)):
        inside = torch.zeros_like(each.shard.memory, dtype=torch.bool)
        for index, begin in each.shard.ranges():
            inside[begin : begin + each.shard.locals[index].nbytes] = True
        assert not each.shard.memory[~inside].any()
    for shard in (each for each in alive if isinstance(each, ShardedGrad)):
        if shard.buffer.held:
            assert all(not gap.any() for gap in shard.buffer._gaps)


Loss = Callable[[nn.Module, int], torch.Tensor]


def plain_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(inputs(step)).square().mean()


def train(
    model: nn.Module, optimizer: Any, *mirrors: Mirror, steps: Iterable[int] = range(5), loss: Loss = plain_loss
) -> None:
    for step in steps:
        loss(model, step).backward()
        for each in mirrors:
            each.step()
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.05}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (optim.AdamW, {"lr": 0.01}),
    "amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "nadam": (optim.NAdam, {"lr": 0.01}),
    "radam": (optim.RAdam, {"lr": 0.01}),
    "adamax": (optim.Adamax, {"lr": 0.01}),
    "adadelta": (optim.Adadelta, {}),
    "asgd": (optim.ASGD, {"lr": 0.05}),
    "rprop": (optim.Rprop, {"lr": 0.01}),
}

WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}

FUSED = ("sgd", "momentum", "nesterov", "adam", "adamw", "amsgrad", "adagrad")


def in_parallel(mesh: DeviceMesh) -> nn.Module:
    model = Net()
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def tensor_parallel() -> nn.Module:
    return in_parallel(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def replicas() -> nn.Module:
    return fully_shard(Net(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def several_meshes() -> nn.Module:
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), Net()
    fully_shard(model.first, mesh=mesh["a"])
    fully_shard(model.second, mesh=mesh["b"])
    return fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


def some_ignored() -> nn.Module:
    """Plain parameters in the same groups; torch refuses to step both kinds at once."""
    model = Net()
    return fully_shard(model, ignored_params={model.first.weight, model.last.bias})


def some_ignored_of_full_vectors() -> nn.Module:
    """The same with multiples of 16 elements on each of two ranks.

    Torch's fused Adam on a CPU rounds elements that do not fill a vector differently from the others, and which these
    are depends on where a tensor ends.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 32))
    return fully_shard(model, ignored_params={model[0].weight, model[3].bias})


def several_dtypes() -> nn.Module:
    model = Net()
    model.second.double()
    model.extra.bfloat16()
    for part in (model.second, model.extra):
        part.forward = lambda x, linear=part.forward, part=part: linear(x.to(part.weight.dtype)).to(x.dtype)
    return fully_shard(model)


def on_the_host() -> nn.Module:
    return sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))


KINDS = [tensor_parallel, replicas, several_meshes, some_ignored, several_dtypes, on_the_host]


def loss_of_some_layers(model: nn.Module, step: int) -> torch.Tensor:
    return model(inputs(step), step % 2 == 0).square().mean()


def assert_equal(mine: tuple[nn.Module, Any], theirs: tuple[nn.Module, Any]) -> None:
    for a, b in zip(mine[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(local(a), local(b))
        assert mine[1].state[a].keys() == theirs[1].state[b].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in mine[1].state[a].items():
            assert torch.equal(local(value), local(theirs[1].state[b][key])), key


class Counting(optim.Optimizer):
    """Its counter has one dimension, as a parameter with one element on this rank has; and a sum for all parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.zeroed = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.state.pop("fresh", None)
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    if not state:
                        state["step"], state["average"] = torch.zeros(1), torch.zeros_like(each)
                    state["step"] += 1
                    state["average"].lerp_(each.grad, 0.1)
                    each.sub_(state["average"], alpha=group["lr"] / state["step"].item() / self.state["steps"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)


def nan_buffer(resting: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.full_like(resting, torch.nan, device=device)
