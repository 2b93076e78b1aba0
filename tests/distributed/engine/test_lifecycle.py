"""One forward and backward of a unit, seen from the outside: hooks, inputs, outputs, and when it is unsharded."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.recorders import Collectives
from bed.stack import WIDTH, Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded, units
from torch import nn
from torch.distributed.tensor import DTensor

from unshard import FullyShardedDataParallel as FSDP
from unshard import MixedPrecisionPolicy, composable, fully_shard
from unshard.engine.states import ParamState


@world(2)
def test_the_gradient_is_the_mean_over_the_ranks() -> None:
    """Contract RUN-27: inputs 1 and 2 on two ranks, a weight gradient of 1.5."""
    layer = fully_shard(nn.Linear(1, 1, bias=False))
    layer(torch.tensor([[1.0 + dist.get_rank()]])).sum().backward()
    assert layer.weight.grad.full_tensor().item() == 1.5


@world(2)
def test_users_hooks_around_forward() -> None:
    """Contract RUN-01, RUN-12, RUN-13: unsharded parameters, cast inputs before; after, it depends on who was first."""
    layer, seen = nn.Linear(6, 6), {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, *output: Any) -> None:
            seen[name] = (isinstance(module.weight, DTensor), args[0].dtype)

        return hook

    layer.register_forward_pre_hook(note("before, registered first"))
    layer.register_forward_hook(note("after, registered first"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    layer.register_forward_pre_hook(note("before, registered last"))
    layer.register_forward_hook(note("after, registered last"))
    layer(torch.ones(2, 6))
    assert {name: is_sharded for name, (is_sharded, _) in seen.items()} == {
        "before, registered first": False,
        "before, registered last": False,
        "after, registered first": False,
        "after, registered last": True,
    }
    assert {dtype for _, dtype in seen.values()} == {torch.bfloat16}


Pair = namedtuple("Pair", "first second")


@dataclass
class Result:
    first: torch.Tensor
    second: torch.Tensor


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "dict": (lambda a, b: {"first": a, "second": b}, lambda out: out["second"]),
    "list": (lambda a, b: [a, b], lambda out: out[1]),
    "nested": (lambda a, b: (a, [{"deep": (b,)}]), lambda out: out[1][0]["deep"][0]),
    "named tuple": (Pair, lambda out: out.second),
    "dataclass": (Result, lambda out: out.second),
    "set": (lambda a, b: {a.detach(), b}, lambda out: next(each for each in out if each.requires_grad)),
}


class Packing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return KINDS[self.kind][0](self.first(x), self.second(x))


class Unpacking(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = Packing(kind), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KINDS[self.kind][1](self.inner(x))


@pytest.mark.parametrize("kind", KINDS)
@world(2)
def test_backward_begins_from_outputs_in_any_container(kind: str) -> None:
    """Contract RUN-05, RUN-07, RUN-25: only the second output is used; the unit is gathered for it in time.

    In a set too, where the reference would lose the unit's gradients without a word.
    """
    model, reference = Unpacking(kind), Unpacking(kind)
    fully_shard(model.inner, reshard_after_forward=True)
    fully_shard(model)
    for _ in range(2):
        loss = loss_of(model)
        with Collectives() as calls:
            loss.backward()
        assert [call.kind for call in calls.calls] == ["gather", "reduce_scatter"]
        loss_of(reference).backward()
        assert_gradients(model, reference)
    assert_at_rest(model)


@world(2)
def test_several_outputs_begin_one_backward() -> None:
    """Contract RUN-30: gathered once, reduced once, whatever the number of outputs with gradients."""
    model, reference = Packing("list"), Packing("list")
    fully_shard(model, reshard_after_forward=True)
    loss = sum(model(batch())).square().mean()
    with Collectives() as calls:
        loss.backward()
    assert [call.kind for call in calls.calls] == ["gather", "reduce_scatter"]
    sum(reference(batch())).square().mean().backward()
    assert_gradients(model, reference)


def test_a_unit_without_input_gradients_is_closed_at_the_end() -> None:
    """Contract RUN-09: tokens have no gradients, so the embedding's reduction is the last one."""
    with loopback.job(2) as group:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(40, 6), nn.Linear(6, 4), nn.Linear(4, 2))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        loss = model(torch.arange(8)).square().mean()
        group.log.clear()
        loss.backward()
        sizes = [call.bytes_in for call in group.log if call.kind == "reduce_scatter"]
        assert sizes == [4 * (2 * 4 + 2), 4 * (4 * 6 + 4), 4 * 40 * 6]


@world(2)
def test_forward_called_as_a_function_is_refused() -> None:
    """Contract RUN-11: nothing gathers; torch says that a sharded and a plain tensor cannot be mixed."""
    layer = fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        layer.forward(torch.ones(2, 4))
    assert layer(torch.ones(2, 4)).shape == (2, 4)


class UsesWeight(nn.Module):
    """Computes with the weight of a layer without a call of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.layer.weight


@world(2)
def test_a_weight_of_another_unit_is_used_directly() -> None:
    """The error of torch has a note with the module and the remedy."""
    model = nn.Sequential(UsesWeight(nn.Linear(4, 4)))
    fully_shard(model[0].layer)
    fully_shard(model)
    expected = r"mixed torch\.Tensor and DTensor.*\n\nunshard: in UsesWeight '0'. It uses a parameter of another unit"
    with pytest.raises(RuntimeError, match=expected):
        model(torch.ones(2, 4))
    assert_at_rest(model)
    model[0].layer.unshard()
    assert model(torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("front_end", ["fully_shard", "flat", "originals", "legacy"])
@world(1, 2)
def test_share_memory_is_refused(front_end: str) -> None:
    """Before sharding it does no harm; afterwards the next step would end the process."""
    inner = nn.Linear(4, 4)
    inner.share_memory()
    shard = {"fully_shard": fully_shard, "legacy": composable.fully_shard, "flat": FSDP}
    model = nn.Sequential(shard.get(front_end, partial(FSDP, use_orig_params=True))(inner))
    for each in (model, model[0]):
        with pytest.raises(NotImplementedError, match=r"share_memory\(\) of Unit"):
            each.share_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None)


class Source(nn.Module):
    """A root without parameters and without arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, 2)

    def forward(self) -> torch.Tensor:
        return self.inner(torch.ones(3, WIDTH))


@world(2)
def test_a_root_without_parameters_and_arguments() -> None:
    """Contract RUN-15, SEL-03, API-33."""
    model, reference = Source(), Source()
    fully_shard(model.inner)
    fully_shard(model)
    with Collectives() as calls:
        assert model.unshard() is None
        handle = model.unshard(async_op=True)
        handle.wait()
        model.reshard()
    assert calls.calls == []
    for _ in range(2):
        model().square().mean().backward()
        reference().square().mean().backward()
    assert_gradients(model, reference)


@pytest.mark.filterwarnings("ignore:Hooks of parameter.register_hook")
@world(2)
def test_hooks_on_parameters() -> None:
    """Contract RUN-20, RUN-21: tensor hooks of a sharded parameter never fire, the others do, with the parameter."""
    model, fired = sharded(), []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient: pytest.fail("a tensor hook fired"))
        parameter.register_post_accumulate_grad_hook(lambda each, name=name: fired.append((name, each)))
    loss_of(model).backward()
    assert dict(fired) == dict(model.named_parameters()) and len(fired) == len(dict(fired))
    assert all(each.grad is not None for _, each in fired)


@world(2)
def test_evaluation_mode_is_no_special_mode() -> None:
    """Contract RUN-24: the same collectives and numbers in `eval()` as in `train()`."""
    model, reference = sharded().eval(), Stack()
    with Collectives() as calls:
        loss_of(model).backward()
    assert (len(calls.of("gather")), len(calls.of("reduce_scatter"))) == (7, 4)
    loss_of(reference).backward()
    assert_gradients(model, reference)
    assert not any(module.training for module in model.modules())


@world(2)
def test_gathers_are_no_writes_for_autograd() -> None:
    """Contract RUN-03, RUN-28: the same object, storage and version in every step; memory only while unsharded."""
    model, seen = sharded(reshard_after_forward=True), []
    layer = model.blocks[1].first
    layer.register_forward_hook(
        lambda module, args, output: seen.append((id(module.weight), module.weight._version, module.weight))
    )
    for _ in range(3):
        loss_of(model).backward()
        assert seen[-1][2].untyped_storage().nbytes() == 0
    assert len({(number, version) for number, version, _ in seen}) == 1


@world(2)
def test_frozen_models_leave_no_trace_in_backward() -> None:
    """Contract FRZ-07: no output requires grad, so nothing waits for a backward."""
    model = sharded(reshard_after_forward=True)
    model.requires_grad_(False)
    out = model(batch())
    assert not out.requires_grad and out._backward_hooks is None
    x = batch(requires_grad=True)
    with Collectives() as calls:
        (x * out.sum()).sum().backward()
    assert calls.calls == []
    assert_at_rest(model)


@world(2)
def test_a_root_that_nothing_comes_back_to_is_freed() -> None:
    """As without gradient mode: a teacher's parameters are sharded again when its average is updated."""
    model = sharded()
    model.requires_grad_(False)
    model(batch())
    assert_at_rest(model)
    model.blocks[0].requires_grad_(True)  # now a backward may come
    model(batch())
    assert units(model)[0].param_state is ParamState.UNSHARDED


@world(2)
def test_weights_changed_while_the_model_is_kept_unsharded() -> None:
    """Contract RAF-14 improved: kept after backward, stepped by the optimizer, gathered again by the next forward."""
    model, reference = sharded(reshard_after_forward=False), Stack()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    model.set_reshard_after_backward(False)
    for seed in range(3):
        for each in (model, reference):
            loss_of(each, seed).backward()
        assert all(unit.param_state is ParamState.UNSHARDED for unit in units(model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for module in (model, *model.blocks):
        module.reshard()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach(), rtol=1e-5, atol=1e-7)


@world(2)
def test_reshard_by_hand_between_forward_and_backward() -> None:
    """Contract RAF-11, RAF-12 without an integer: the sharded parameters are back; backward gathers over all ranks."""
    model, reference = sharded(reshard_after_forward=False), Stack()
    loss = loss_of(model)
    for module in (model, *model.blocks):
        module.reshard()
    assert_at_rest(model)
    with Collectives() as calls:
        loss.backward()
    assert len(calls.of("gather")) == 4
    loss_of(reference).backward()
    assert_gradients(model, reference)
