"""Forwards that return, or keep, tensors that share memory with unsharded parameters: a weight, a view of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from bed import world
from bed.wrapped import full_parameters
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from unshard import FullyShardedDataParallel as FSDP
from unshard import MixedPrecisionPolicy, fully_shard

WIDTH = 66


@dataclass
class Result:
    positions: torch.Tensor
    others: list[torch.Tensor]


class Detached(torch.autograd.Function):
    """Its result has a place in the graph, shares memory, and is no view for autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


RETURNS: dict[str, Callable[[torch.Tensor], Any]] = {
    "parameter": lambda weight: weight,
    "rows": lambda weight: weight[:5],
    "transposed": lambda weight: weight.T,
    "expanded": lambda weight: weight[None].expand(3, -1, -1),
    "unbound": lambda weight: weight.unbind(),
    "detached": lambda weight: (weight * 2, weight.detach(), weight.data[3:]),
    "in containers": lambda weight: {"a": [weight[1:], (weight.detach(),)], "b": Result(weight[2:], [weight.T])},
    "of a function": Detached.apply,
    "of no memory": lambda weight: (weight[:0], torch.ones(2)),
}


class Positions(nn.Module):
    """Returns what `result` makes of its weight; `keep` may leave something on the module."""

    def __init__(self, result: Callable[[torch.Tensor], Any], keep: Callable[[Any], None] = lambda module: None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.result, self.keep = result, keep
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.keep(self)
        return x + self.weight.sum(), self.result(self.weight)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else vars(value).values() if isinstance(value, Result) else value
    return [tensor for item in items for tensor in tensors_of(item)]


class Model(nn.Module):
    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.positions = nn.Linear(WIDTH, WIDTH), Positions(*arguments)
        self.last = nn.Linear(WIDTH, 2)
        self.returned: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, result = self.positions(self.first(x))
        self.returned = [tensor.detach() for tensor in tensors_of(result)]
        return self.last(y) + sum(tensor.square().sum() for tensor in tensors_of(result))


HOWS = ("resharded", "kept", "to smaller groups", "flat", "originals")


def wrapped(model: Model, how: str, **options: Any) -> nn.Module:
    if how in ("flat", "originals"):
        options["use_orig_params"] = how == "originals"
        model.positions = FSDP(model.positions, **options)
        return FSDP(model, **options)
    reshard: dict[str, Any] = {"resharded": True, "kept": False, "to smaller groups": 2}
    fully_shard(model.positions, reshard_after_forward=reshard[how], **options)
    return fully_shard(model, **options)


def inside(positions: nn.Module) -> Any:
    return getattr(positions, "module", positions)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FSDP):
        return full_parameters(model)
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach()
        for name, each in model.named_parameters()
    }


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def check(how: str, *arguments: Any, **options: Any) -> None:
    """As the unsharded model in training, and in evaluation after every step."""
    reference, model = Model(*arguments), Model(*arguments)
    top = wrapped(model, how, **options)
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=1e-4)) for each in (top, reference)]
    modes: list[Callable[[], AbstractContextManager[Any]]] = [torch.no_grad, torch.inference_mode, nullcontext]
    for step in range(3):
        losses = [each(batch(step)).mean() for each, _ in pairs]
        assert_same(losses[:1], losses[1:])
        for loss in losses:
            loss.backward()
        assert_same(model.returned, reference.returned)
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
        for mode in modes:
            with mode():
                assert_same([top(batch(7))], [reference(batch(7))])
                assert_same(model.returned, reference.returned)
    found, expected, fresh = full(top), full(reference), full(Model(*arguments))
    assert_same([found[name] for name in expected], list(expected.values()))
    assert not torch.allclose(found["positions.weight"], fresh["positions.weight"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RETURNS)
@pytest.mark.parametrize("how", HOWS)
@world(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_results_that_share_memory_with_parameters(how: str, name: str) -> None:
    check(how, RETURNS[name])


@pytest.mark.parametrize("name", ["rows", "in containers"])
@pytest.mark.parametrize("how", ["resharded", "kept", "flat", "originals"])
@world(1, 3)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_with_one_rank_and_with_three(how: str, name: str) -> None:
    check(how, RETURNS[name])


@world(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_units_that_are_recomputed() -> None:
    reference, model = Model(RETURNS["rows"]), Model(RETURNS["rows"])
    wrapped(model, "resharded")
    for each in (reference, model):
        checkpoint(each, batch(0), use_reentrant=False).mean().backward()
    found = model.positions.weight.grad
    assert isinstance(found, DTensor) and reference.positions.weight.grad is not None
    assert_same([found.full_tensor()], [reference.positions.weight.grad])


@world(2)
def test_evaluation_in_full_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, full_precision_in_eval=True)
    reference, model = Model(RETURNS["rows"]), Model(RETURNS["rows"])
    wrapped(model, "resharded", mp_policy=policy)
    for each in (reference, model):
        each.eval()(batch(0))
    assert_same(model.returned, reference.returned)
    for each in (reference, model):
        each.train()(batch(0))
    assert model.returned[0].dtype == torch.bfloat16
    assert_same([model.returned[0].float()], [reference.returned[0].bfloat16().float()])


@world(2)
def test_weights_that_another_unit_owns() -> None:
    """A head that returns the weight it shares with the embedding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Positions(RETURNS["transposed"]))
    model[1].weight = model[0].weight
    expected = model[0].weight.detach().clone().T
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        y, shared = model(batch(0))
        assert_same([shared], [expected])
        (y.sum() + shared.sum()).backward()


@world(2)
def test_a_tensor_parallel_weight() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    layer = Positions(RETURNS["rows"])
    expected = layer.weight.detach().clone()
    torch.distributed.broadcast(expected, 0)
    layer.weight = nn.Parameter(DTensor.from_local(expected, mesh["tp"], [Replicate()]))
    layer.forward = lambda: layer.weight  # type: ignore[method-assign]
    fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)
    found: Any = layer()
    assert isinstance(found, DTensor)
    assert_same([found.to_local()], [expected])


def keep_attribute(module: Any) -> None:
    module.kept = module.weight.detach()


def keep_in_containers(module: Any) -> None:
    module.kept = {"a": [module.weight[1:], torch.ones(1)], "b": (module.weight.T, 3)}


def keep_once(module: Any) -> None:
    """A view that forward uses every time, made the first time."""
    if module.kept is None:
        module.kept = [module.weight.detach().T]
    module.seen = module.kept[0] * 2


KEEPS = {"attribute": keep_attribute, "in containers": keep_in_containers, "once": keep_once}


def kept_by(positions: Any) -> list[torch.Tensor]:
    kept = positions.kept
    if isinstance(kept, dict):
        return [kept["a"][0], kept["b"][0]]
    return [kept] if isinstance(kept, torch.Tensor) else [kept[0], positions.seen]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("how", ["resharded", "kept", "flat", "originals"])
@world(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_forward_leaves_on_its_module(how: str, keep: str) -> None:
    """It can be read after forward, and inside the next forward it is what is gathered then."""
    reference, model = Model(RETURNS["rows"], KEEPS[keep]), Model(RETURNS["rows"], KEEPS[keep])
    top = wrapped(model, how)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (top, reference)]
    for step in range(3):
        for mode in (torch.no_grad, nullcontext):
            with mode():
                losses = [each(batch(step)).mean() for each in (top, reference)]
                assert_same(kept_by(inside(model.positions)), kept_by(reference.positions))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@world(2)
def test_what_the_program_puts_in_its_place_stays() -> None:
    model = Model(RETURNS["rows"], keep_in_containers)
    wrapped(model, "resharded")
    model(batch(0))
    positions: Any = model.positions
    positions.keep = lambda module: None
    before = positions.kept["a"]
    before.pop(0)
    positions.kept["b"] = None
    model(batch(0))
    assert positions.kept["a"] is before and before[0].tolist() == [1.0] and positions.kept["b"] is None


@world(2)
def test_other_results_are_not_copied() -> None:
    model = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), reshard_after_forward=True)
    model.register_buffer("table", torch.ones(3))
    seen: list[torch.Tensor] = []

    def forward(x: torch.Tensor) -> Any:
        seen[:] = [x @ model.weight, model.table, x[:1]]
        return tuple(seen)

    model.forward = forward  # type: ignore[method-assign]
    result: Any = model(torch.ones(1, WIDTH))
    assert all(mine is theirs for mine, theirs in zip(result, seen, strict=True))
