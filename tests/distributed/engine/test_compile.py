"""`torch.compile(fullgraph=True)` of sharded modules: one graph per unit, and the numbers of the eager model."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from bed import world
from bed.stack import Block, Stack, loss_of
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from unshard import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, composable, fully_shard

Compile = Callable[[nn.Module], Any]
WRAPPED_HALF = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _stack(block: Callable[[], nn.Module] = Block) -> Stack:
    model = Stack(2)
    model.blocks = nn.ModuleList(block() for _ in range(2))
    return model


def _each(model: Stack, shard: Callable[[nn.Module], Any]) -> Stack:
    for index, block in enumerate(list(model.blocks)):
        model.blocks[index] = shard(block)
    return model


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(lambda y: self.second(torch.tanh(self.first(y))), x, use_reentrant=False)


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(132)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.first(x))


def _compiled_before(model: Stack, shard: Callable[[nn.Module], Any], compile_: Compile) -> Any:
    for block in model.blocks:
        compile_(block)
    return shard(_each(model, shard))


def _compiled_after(model: Stack, shard: Callable[[nn.Module], Any], compile_: Compile) -> Any:
    _each(model, shard)
    for block in model.blocks:
        compile_(block)
    return shard(model)


def _wrapped(compile_: Compile, **options: Any) -> Any:
    return _compiled_after(_stack(), lambda module: FullyShardedDataParallel(module, **options), compile_)


def _with_override(compile_: Compile) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, overrides={"*norm*": torch.float32})
    return _compiled_after(_stack(Normed), lambda module: fully_shard(module, mp_policy=policy), compile_)


def _checkpoint_around(compile_: Compile) -> Any:
    model = _each(_stack(), fully_shard)
    for block in model.blocks:
        compile_(block)
    return fully_shard(_each(model, checkpoint_wrapper))


def _checkpoint_wrapper(compile_: Compile) -> Any:
    return _compiled_after(_each(_stack(), checkpoint_wrapper), fully_shard, compile_)


def _one_unit(compile_: Compile) -> Any:
    model = fully_shard(_stack())
    compile_(model)
    return model


MODELS: dict[str, tuple[Callable[[Compile], Any], int]] = {
    "before": (lambda compile_: _compiled_before(_stack(), fully_shard, compile_), 2),
    "after": (lambda compile_: _compiled_after(_stack(), fully_shard, compile_), 2),
    "mixed precision": (
        lambda compile_: _compiled_before(_stack(), lambda m: fully_shard(m, mp_policy=HALF), compile_),
        2,
    ),
    "override": (_with_override, 2),
    "wrapper": (lambda compile_: _wrapped(compile_, use_orig_params=True), 2),
    "flat wrapper": (_wrapped, 2),
    "wrapper in mixed precision": (lambda compile_: _wrapped(compile_, mixed_precision=WRAPPED_HALF), 2),
    "legacy call": (lambda compile_: _compiled_after(_stack(), composable.fully_shard, compile_), 2),
    "checkpoint inside": (lambda compile_: _compiled_after(_stack(Checkpointed), fully_shard, compile_), 2),
    "checkpoint wrapper": (_checkpoint_wrapper, 2),
    "checkpoint around": (_checkpoint_around, 2),
    "one unit": (_one_unit, 1),
}


def _losses(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed in range(steps):
        # After the first step nothing is compiled again: the unsharded parameters are the same objects.
        again = torch._dynamo.config.patch(error_on_recompile=True) if seed else contextlib.nullcontext()
        with again:
            loss = loss_of(model, seed)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
@world(2)
def test_one_graph_per_unit(name: str) -> None:
    """Contract INT-04, with `fullgraph=True`: the hooks are skipped without a graph break."""
    build, graphs = MODELS[name]
    expected = _losses(build(lambda module: None))
    torch._dynamo.reset()
    counters.clear()
    assert _losses(build(lambda module: module.compile(backend="aot_eager", fullgraph=True))) == expected
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@world(2)
def test_sharded_modules_inside_a_graph() -> None:
    """One graph cannot contain them: `fullgraph=True` raises an error that names the remedy."""
    model = _compiled_after(_stack(), fully_shard, lambda module: None)
    called = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"hook of unshard.*Compile each sharded module by itself"):
        loss_of(called)
    loss_of(torch.compile(model, backend="eager")).backward()  # the model is usable, and compiled in pieces


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@world(2)
def test_inductor() -> None:
    expected = _losses(_stack())
    model = _compiled_after(_stack(), fully_shard, lambda module: module.compile(fullgraph=True))
    torch.testing.assert_close(_losses(model), expected)
