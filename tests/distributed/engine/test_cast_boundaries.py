"""What enters and leaves a sharded module under a policy: which values are cast, in which containers, how often."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.stack import assert_at_rest
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.engine.hooks import FSDPState

F64, F32, F16, B16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


class Layer(nn.Linear):
    """A linear layer that notes the dtypes it computes with."""

    def __init__(self, size: int = 6) -> None:
        super().__init__(size, size)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return super().forward(x.to(self.weight.dtype))


class Catch(nn.Module):
    """Keeps what it is called with, and returns what it is given."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.result = result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return self.result


def batch(seed: int = 0, size: int = 6) -> torch.Tensor:
    return torch.randn(3, size, generator=torch.Generator().manual_seed(seed))


# --- which values ----------------------------------------------------------------------------------------------------


@world(2)
def test_floating_point_inputs_of_every_sharded_module() -> None:
    """Contract MP-14, MP-15: arguments by place and by name, at the root and below, float64 too."""
    for original in (F32, B16):  # cast even where the parameters have the dtype already
        inner, outer = Catch(torch.ones(2)).to(original), nn.Module()
        outer.inner = inner
        outer.forward = lambda *args, outer=outer, **kwargs: (outer.inner(*args, **kwargs), args, kwargs)
        outer.weight = nn.Parameter(torch.ones(2, dtype=original))
        fully_shard(inner, mp_policy=MixedPrecisionPolicy(param_dtype=B16))
        fully_shard(outer, mp_policy=MixedPrecisionPolicy(param_dtype=F16))
        given = [torch.ones(2, dtype=dtype) for dtype in (F64, F32, F16, B16)]
        _, args, kwargs = outer(*given, **{f"name{i}": each for i, each in enumerate(given)})
        assert [each.dtype for each in (*args, *kwargs.values())] == [F16] * 8
        assert args[2] is given[2]  # nothing to do
        assert [each.dtype for each in (*inner.args, *inner.kwargs.values())] == [B16] * 8
        assert list(inner.kwargs) == ["name0", "name1", "name2", "name3"]


@world(2)
def test_everything_else_passes_as_it_is() -> None:
    """Contract MP-16: the very objects."""
    model = fully_shard(Catch(), mp_policy=MixedPrecisionPolicy(param_dtype=B16, output_dtype=F32))
    dtypes = (torch.int64, torch.uint8, torch.bool, torch.complex64)
    values = [*(torch.ones(2, dtype=dtype) for dtype in dtypes), 3.5, "text", None, object(), len]
    model(*values, torch.ones(2), key=values)
    assert len(model.args) == len(values) + 1 and model.args[-1].dtype == B16
    assert all(mine is given for mine, given in zip(model.args, values, strict=False))
    assert all(mine is given for mine, given in zip(model.kwargs["key"], values, strict=True))


@pytest.mark.parametrize("policy", [{}, {"param_dtype": B16, "cast_forward_inputs": False}], ids=["none", "off"])
@world(2)
def test_inputs_that_are_left_alone(policy: dict[str, Any]) -> None:
    """Contract MP-19, MP-20: no param_dtype, or no casts wanted; what does not fit fails in the operation."""
    values = [torch.ones(2, dtype=dtype) for dtype in (F64, F32, F16, B16)]
    catch = fully_shard(Catch().to(B16), mp_policy=MixedPrecisionPolicy(**policy))
    catch(*values)
    assert all(mine is given for mine, given in zip(catch.args, values, strict=True))
    linear = fully_shard(nn.Linear(6, 6).to(B16), mp_policy=MixedPrecisionPolicy(**policy))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="dtype"):
            linear(batch())
        assert_at_rest(linear)
    assert linear(batch().to(B16)).dtype == B16


# --- containers ------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Data:
    tensor: torch.Tensor
    label: str
    derived: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True)
class Frozen:
    data: Data
    count: torch.Tensor


class Subclass(dict):
    pass


def containers(tensor: torch.Tensor) -> list[Any]:
    """One of every kind, nested; twelve floating-point tensors."""
    count = torch.ones(2, dtype=torch.int64)
    return [
        [tensor, [tensor]],
        (tensor, (count, 1)),
        {"a": tensor, "b": {"c": tensor}},
        OrderedDict(z=tensor, a=tensor),
        Pair(Data(tensor, "label"), [count]),
        Frozen(Data(tensor, "deep"), count),
        {tensor, "text", 4},
        Subclass(a=tensor),
        defaultdict(list, a=tensor),
    ]


def floats(value: Any) -> list[torch.Tensor]:
    """Every floating-point tensor, found by hand."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [each for item in value.values() for each in floats(item)]
    if dataclasses.is_dataclass(value):
        return [each for field in dataclasses.fields(value) for each in floats(getattr(value, field.name))]
    return [each for item in value for each in floats(item)] if isinstance(value, (list, tuple, set)) else []


def check_containers(found: list[Any], given: list[Any], dtype: torch.dtype) -> None:
    tensors = floats(found)
    assert len(tensors) == len(floats(given)) == 12
    assert {each.dtype for each in tensors} == {dtype} and {each.dtype for each in floats(given)} == {F32}
    assert [type(each) for each in found[:7]] == [type(each) for each in given[:7]]
    assert [type(each) for each in found[7:]] == [dict, dict]  # as the reference does it
    assert list(found[3]) == ["z", "a"] and found[1][1][0] is given[1][1][0] and found[1][1][1] == 1
    pair, frozen = found[4], found[5]
    assert type(pair.left) is Data and (pair.left.label, pair.left.derived) == ("label", 7)
    assert pair.right[0] is given[4].right[0]
    assert type(frozen.data) is Data and frozen.data.label == "deep" and frozen.count is given[5].count
    assert {"text", 4} < found[6] and len(found[6]) == 3


@world(2)
def test_containers_of_inputs_and_outputs() -> None:
    """Contract MP-17, MP-21: found in every kind of container, which comes back as the same kind."""
    values = containers(torch.ones(2))
    model = fully_shard(Catch(), mp_policy=MixedPrecisionPolicy(param_dtype=B16))
    model(*values, named=values)
    check_containers(list(model.args), values, B16)
    check_containers(model.kwargs["named"], values, B16)
    model = fully_shard(Catch(values), mp_policy=MixedPrecisionPolicy(output_dtype=F16))
    check_containers(model(), values, F16)
    packed = pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 1]), enforce_sorted=False)
    model = fully_shard(Catch(packed), mp_policy=MixedPrecisionPolicy(param_dtype=B16, output_dtype=F16))
    assert model(packed).data.dtype == F16 and model.args[0].data.dtype == B16  # QK-14


class Sum(nn.Linear):
    """The sum of the layer's results for every floating-point tensor it is given."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(6, 6)

    def forward(self, *args: Any) -> torch.Tensor:  # type: ignore[override]
        return torch.stack([super(Sum, self).forward(each) for each in floats(args)]).sum(0)


@world(2, 3)
def test_gradients_of_inputs() -> None:
    """Contract MP-18: the cast is part of the graph, for plain tensors and inside containers."""
    model = fully_shard(Sum(), mp_policy=MixedPrecisionPolicy(param_dtype=B16))
    reference = Sum().to(B16)
    for wrap, count in ((lambda x: [x], 1), (containers, 12)):
        x, y = (batch(dist.get_rank()).requires_grad_() for _ in range(2))
        model(*wrap(x)).sum().backward()
        reference(*[y.to(B16) for _ in range(count)]).sum().backward()
        assert x.grad.dtype == F32 and torch.equal(x.grad, y.grad) and y.grad.any()
        assert model.weight.grad.dtype == F32
        assert_at_rest(model)


# --- outputs ---------------------------------------------------------------------------------------------------------


@world(2)
def test_outputs_without_and_with_their_dtype() -> None:
    """Contract MP-21, MP-22, MP-23: the unit's own gradients are in the compute dtype, before the cast."""
    for output in (None, F32, F64):
        grads: list[torch.dtype] = []
        real = FSDPState.pre_backward

        def spy(self: FSDPState, gradient: torch.Tensor, real: Callable = real, grads: list = grads) -> None:
            grads.append(gradient.dtype)
            real(self, gradient)

        model = fully_shard(nn.Linear(6, 6), mp_policy=MixedPrecisionPolicy(param_dtype=B16, output_dtype=output))
        with mock.patch.object(FSDPState, "pre_backward", spy):
            out = model(batch())
            loss = out.square().mean()
            assert out.dtype == loss.dtype == (output or B16)
            loss.backward()
        assert grads == [B16]
        assert model.weight.grad is not None


# --- several modules -------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two layers; the first one's output, or a tensor made in between, goes into the second."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Layer(), Layer()
        self.scale = nn.Parameter(torch.ones(6))
        self.between = between
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.second(self.between(self.first(x * self.scale)))


def run(model: Two) -> tuple[list[torch.dtype], ...]:
    model(batch()).float().sum().backward()
    assert all(each.grad is not None and each.grad.dtype == F32 for each in model.parameters())
    return model.seen, model.first.seen, model.second.seen


@world(2)
def test_half_precision_in_one_of_two_children() -> None:
    """Contract MP-24 to MP-27: whose inputs are cast, by whom."""
    half = MixedPrecisionPolicy(param_dtype=F16)
    loose = MixedPrecisionPolicy(param_dtype=F16, cast_forward_inputs=False)
    back = MixedPrecisionPolicy(param_dtype=F16, output_dtype=F32)
    for first, second, expected in (
        (None, half, (F32, F32, F16)),
        (None, loose, (F32, F32, F32)),  # the layer casts by itself
        (back, None, (F32, F16, F32)),
        (half, None, (F32, F16, F16)),
    ):
        model = Two()
        for layer, policy in ((model.first, first), (model.second, second)):
            fully_shard(layer, mp_policy=policy)
        fully_shard(model)
        assert run(model) == tuple([each] for each in expected)
    for policy, expected in ((half, F16), (loose, F32)):
        model = Two(between=lambda x: torch.ones(3, 6))  # made in the parent, in fp32
        fully_shard(model.second, mp_policy=policy)
        fully_shard(model)
        assert model(batch()).dtype == F16 and model.second.seen == [expected]


@world(2)
def test_modules_of_a_list() -> None:
    """Contract MP-28: each of them casts what it is given, also what was cast up in between."""
    model = Two(between=lambda x: x.float())
    between: list[torch.dtype] = []
    model.first.register_forward_hook(lambda module, args, output: between.append(output.dtype))
    fully_shard([model.first, model.second], mp_policy=MixedPrecisionPolicy(param_dtype=B16))
    fully_shard(model)
    assert run(model) == ([F32], [B16], [B16]) and between == [B16]
    model = Two(between=lambda x: x.double())
    policy = MixedPrecisionPolicy(param_dtype=B16, output_dtype=F64)
    outputs: list[torch.dtype] = []
    fully_shard([model.first, model.second], mp_policy=policy)
    for layer in (model.first, model.second):  # after the library's own hook
        layer.register_forward_hook(lambda module, args, output: outputs.append(output.dtype))
    fully_shard(model)
    assert run(model) == ([F32], [B16], [B16]) and outputs == [F64, F64]


@pytest.mark.parametrize("reentrant", [True, False])
@world(2)
def test_recomputation_casts_again(reentrant: bool) -> None:
    """Contract MP-29: inside a unit, around one, around the root; the same dtypes and gradients as without."""
    found = {}
    for place in ("nowhere", "inside", "around", "root"):
        model, outputs = Two(), []
        policy = MixedPrecisionPolicy(param_dtype=B16, output_dtype=F64)
        fully_shard(model.first, mp_policy=policy)
        fully_shard(model.second, mp_policy=dataclasses.replace(policy, param_dtype=F16))
        fully_shard(model, mp_policy=policy)
        for layer in (model.first, model.second):
            layer.register_forward_hook(lambda module, args, output, outputs=outputs: outputs.append(output.dtype))
        call: Callable = model
        if place == "inside":
            for layer in (model.first, model.second):
                layer.forward = lambda x, real=layer.forward: checkpoint(real, x, use_reentrant=reentrant)
        elif place == "around":
            for name in ("first", "second"):
                wrapped = nn.Module()
                wrapped.layer = getattr(model, name)
                wrapped.forward = lambda x, w=wrapped: checkpoint(w.layer, x, use_reentrant=reentrant)
                setattr(model, name, wrapped)
        elif place == "root":
            call = lambda x, model=model: checkpoint(model, x, use_reentrant=reentrant)  # noqa: E731
        x = batch().requires_grad_()
        with set_checkpoint_early_stop(False):  # else the last layer's hooks are not run again
            loss = call(x).sum()
        loss.backward()
        first, second = (each.layer if place == "around" else each for each in (model.first, model.second))
        times = 1 if place == "nowhere" else 2
        assert first.seen == [B16] * times and second.seen == [F16] * times
        assert model.seen == [B16] * (2 if place == "root" else 1)
        assert outputs == [F64] * (2 if place in ("nowhere", "inside") else 4)
        assert loss.dtype == F64 and x.grad.dtype == F32
        found[place] = [loss, x.grad, *(each.grad.full_tensor() for each in model.parameters())]
        assert_at_rest(model)
    for place, values in found.items():
        for mine, plain in zip(values, found["nowhere"], strict=True):
            assert torch.equal(mine, plain) and plain.any(), place


# --- structured activations ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Activation:
    hidden: torch.Tensor
    step: int


@dataclasses.dataclass(frozen=True)
class Wrapped:
    inner: Activation
    mask: torch.Tensor


class Named(NamedTuple):
    hidden: torch.Tensor
    mask: torch.Tensor


MASK = torch.arange(6) % 3 != 0
SHAPES: dict[str, tuple[Callable, Callable]] = {
    "tensor": (lambda x: x, lambda value: value),
    "dataclass": (lambda x: Activation(x, 1), lambda value: value.hidden),
    "nested": (lambda x: Wrapped(Activation(x, 1), MASK), lambda value: value.inner.hidden),
    "namedtuple": (lambda x: Named(x, MASK), lambda value: value.hidden),
    "dict": (lambda x: {"hidden": [x]}, lambda value: value["hidden"][0]),
}


class Step(nn.Module):
    """Takes and returns an activation of some shape."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.layer, self.shape = nn.Linear(6, 6), shape

    def forward(self, value: Any) -> Any:
        wrap, unwrap = SHAPES[self.shape]
        x = unwrap(value)
        assert x.dtype == self.layer.weight.dtype
        return wrap(x + torch.tanh(self.layer(x)))


class Chain(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.steps = nn.ModuleList(Step(shape) for _ in range(3))
        self.shape = shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wrap, unwrap = SHAPES[self.shape]
        value = wrap(x)
        for step in self.steps:
            value = step(value)
        return unwrap(value).float().square().mean()


POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=B16),
    "bf16 and fp32": MixedPrecisionPolicy(param_dtype=B16, reduce_dtype=F32),
}


@pytest.mark.parametrize("policy", POLICIES)
@world(2, 3)
def test_structured_activations_train_like_plain_tensors(policy: str) -> None:
    """Contract MP-46: the same losses, bit by bit, over five steps."""
    losses = {}
    for shape in SHAPES:
        model = Chain(shape)
        for step in model.steps:
            fully_shard(step, mp_policy=POLICIES[policy])
        fully_shard(model, mp_policy=POLICIES[policy])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        losses[shape] = []
        for seed in range(5):
            loss = model(batch(dist.get_rank() + 10 * seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[shape].append(loss.item())
        assert_at_rest(model)
    assert len(set(losses["tensor"])) == 5
    for shape, values in losses.items():
        assert values == losses["tensor"], shape
