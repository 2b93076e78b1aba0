"""Which modules a policy wraps, with what, and in which order; PyTorch's own policies as the peer."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as theirs
from bed.python_groups import LookAlike
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp._wrap_utils import _auto_wrap as their_auto_wrap

from unshard import FullyShardedDataParallel as FSDP
from unshard import wrap as ours
from unshard.errors import ArgumentError, PolicyError, UnsupportedError
from unshard.fsdp1 import auto_wrap as traversal
from unshard.fsdp1.auto_wrap import auto_wrap
from unshard.optim import ShardedGradScaler


class Wrapper(nn.Module):
    """Stands in for a sharded module: remembers what it was called with, and when."""

    made: list[nn.Module] = []

    def __init__(self, module: nn.Module, **kwargs: Any):
        super().__init__()
        self.inner, self.kwargs = module, kwargs
        Wrapper.made.append(module)

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


class Block(nn.Module):
    def __init__(self, width: int = 8, leaves: bool = True):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2) if leaves else nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.norm = nn.BatchNorm1d(width)


class Model(nn.Module):
    def __init__(self, leaves: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(8, leaves), Block(8, leaves), Block(16, leaves)])
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 64)})
        self.norm = nn.LayerNorm(8)


def wrapped(model: nn.Module) -> dict[str, Any]:
    """What was wrapped, by its name in the original model, and with what."""
    return {
        ".".join(part for part in name.split(".") if part != "inner"): each.kwargs
        for name, each in model.named_modules()
        if isinstance(each, Wrapper)
    }


def policies(of: Any) -> dict[str, Any]:
    partial = functools.partial
    return {
        "always": of.always_wrap_policy,
        "classes": of.ModuleWrapPolicy({Block, nn.Embedding}),
        "classes as a function": of.ModuleWrapPolicy([Block]).__call__,
        "containers too": of.ModuleWrapPolicy({nn.ModuleList, nn.Linear}),
        "custom": of.CustomPolicy(lambda each: isinstance(each, nn.Linear) and {"level": each.in_features}),
        "custom empty": of.CustomPolicy(lambda each: {} if isinstance(each, nn.Linear) else isinstance(each, Block)),
        "transformer": partial(of.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "lambda": partial(of.lambda_auto_wrap_policy, lambda_fn=lambda each: isinstance(each, nn.LayerNorm | Block)),
        "large": partial(of.size_based_auto_wrap_policy, min_num_params=500),
        "medium": partial(of.size_based_auto_wrap_policy, min_num_params=250),
        "small": partial(of.size_based_auto_wrap_policy, min_num_params=20, force_leaf_modules=set()),
        "all of some size": partial(of.size_based_auto_wrap_policy, min_num_params=300, exclude_wrap_modules=set()),
        "default size": of.size_based_auto_wrap_policy,
        "or": partial(
            of._or_policy,
            policies=[
                partial(of.transformer_auto_wrap_policy, transformer_layer_cls={nn.Embedding}),
                partial(of.size_based_auto_wrap_policy, min_num_params=600),
            ],
        ),
        "by class": partial(of._wrap_module_cls_individually, module_classes=[nn.LayerNorm]),
        "by class too": partial(of._module_wrap_policy, module_classes={nn.LayerNorm}),
    }


SIZED = ("large", "medium", "all of some size", "default size", "or")


@pytest.mark.parametrize("ignoring", [False, True])
@pytest.mark.parametrize("precision", [None, MixedPrecision(torch.float16)], ids=["plain", "mixed"])
@pytest.mark.parametrize("name", policies(ours))
def test_same_modules_as_the_peer(name: str, precision: Any, ignoring: bool) -> None:
    """Contract F1-105 to F1-111."""

    def apply(call: Callable[..., Any], policy: Any) -> tuple[dict[str, Any], list[str]]:
        # With mixed precision theirs asks a policy inside of leaves as well, which tears them apart.
        model = Model(leaves=precision is None or name not in SIZED)
        ignored = set(model.blocks[1].modules()) if ignoring else set()
        names = {module: each for each, module in model.named_modules()}
        Wrapper.made.clear()
        kwargs = {"mixed_precision": precision, "use_orig_params": False, "depth": 3}
        params = {each for module in ignored for each in module.parameters()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            call(model, policy, ignored, params, kwargs)
        return wrapped(model), [names[each] for each in Wrapper.made]

    def own(model: nn.Module, policy: Any, ignored: Any, params: Any, kwargs: Any) -> None:
        auto_wrap(model, policy, Wrapper, kwargs, ignored, params)

    def peer(model: nn.Module, policy: Any, ignored: Any, params: Any, kwargs: Any) -> None:
        their_auto_wrap(model, policy, ignored, params, kwargs, Wrapper)

    modules, order = apply(own, policies(ours)[name])
    expected, their_order = apply(peer, policies(theirs)[name])
    for each in expected.values():
        each.pop("auto_wrap_policy", None)  # theirs passes on that there is none
        each.setdefault("mixed_precision", None)
    assert modules == expected
    assert order == their_order
    assert modules or name == "default size"
    assert not ignoring or not any(each.startswith("blocks.1") for each in modules)
    if precision is not None:
        assert modules["blocks.0.norm"]["mixed_precision"] is None


@pytest.mark.parametrize("excluded", [None, {nn.BatchNorm1d}])
@pytest.mark.parametrize("size", [100, 500, 700, 1000])
def test_modules_of_ignored_classes_are_counted_as_taken(size: int, excluded: Any) -> None:
    """By the size-based policy, wherever they are: inside of what it looks into, and of what it does not."""

    def model() -> nn.Module:
        block = nn.Sequential(nn.BatchNorm1d(300), nn.Linear(4, 4))  # 600 and 20 elements
        return nn.Sequential(nn.Sequential(block, nn.Linear(20, 10)), nn.Linear(2, 2))  # 210 more

    results = []
    for of in (ours, theirs):
        made = model()
        policy = functools.partial(of.size_based_auto_wrap_policy, min_num_params=size, exclude_wrap_modules=excluded)
        kwargs = {"mixed_precision": MixedPrecision(torch.float16), "use_orig_params": False}
        with pytest.warns(UserWarning, match="BatchNorm1d"):
            if of is theirs:
                their_auto_wrap(made, policy, set(), set(), kwargs, Wrapper)
            else:
                auto_wrap(made, policy, Wrapper, kwargs)
        results.append(set(wrapped(made)))
    assert results[0] == results[1] and "0.0.0" in results[0]


def test_leaves_are_not_split_with_mixed_precision() -> None:
    """A leaf's code reads the parameters of modules inside it that it never calls, so nothing would gather them."""
    policy = functools.partial(ours.size_based_auto_wrap_policy, min_num_params=60)
    plain, mixed = Model(), Model()
    auto_wrap(plain, policy, Wrapper, {})
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        auto_wrap(mixed, policy, Wrapper, {"mixed_precision": MixedPrecision(torch.float16)})
    assert set(wrapped(mixed)) == set(wrapped(plain)) | {f"blocks.{number}.norm" for number in range(3)}
    assert not any("attention" in each for each in wrapped(mixed))


def test_numbers_that_a_function_is_asked_with() -> None:
    """Contract F1-105, F1-106: what children took is not counted, nor what is ignored; the root is not asked."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3)), nn.Linear(4, 4))
    seen: dict[tuple[nn.Module, bool], int] = {}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        seen[module, recurse] = nonwrapped_numel
        return recurse or module is model[0][0]

    first = model[0]
    auto_wrap(model, policy, Wrapper, {}, ignored_params={model[1].weight})
    assert isinstance(first[0], Wrapper) and not isinstance(first[1], Wrapper)
    assert seen[model, True] == 6 + 12 + 4 and (model, False) not in seen
    assert seen[first, True] == 6 + 12 and seen[first, False] == 12
    assert seen[model[1], False] == 4


def test_a_module_with_two_names_is_wrapped_once() -> None:
    """Under all its names: otherwise one of them would lead to a module whose parameters nobody gathers."""
    shared = nn.Linear(2, 2)
    for policy in (ours.ModuleWrapPolicy({nn.Linear}), ours.ModuleWrapPolicy({nn.Linear}).__call__):
        model = nn.ModuleDict({"a": nn.Sequential(shared, shared), "b": nn.Sequential(shared)})
        auto_wrap(model, policy, Wrapper, {})
        assert isinstance(model["a"][0], Wrapper) and model["a"][0].inner is shared
        assert model["a"][1] is model["b"][0] is model["a"][0]


@pytest.mark.parametrize("policy", [ours.ModuleWrapPolicy({nn.Linear}), ours.always_wrap_policy], ids=str)
def test_ignored_classes_compute_in_their_own_dtype(policy: Any) -> None:
    """Contract F1-111, F1-112."""
    seen = []

    class Watched(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(input.dtype)
            return super().forward(input)

    model = nn.Sequential(nn.Linear(4, 4), Watched(4))
    with pytest.warns(UserWarning, match="full precision: Watched"):
        auto_wrap(model, policy, Wrapper, {"mixed_precision": MixedPrecision(torch.float16)})
    assert model[1].kwargs["mixed_precision"] is None and model[0].kwargs["mixed_precision"] is not None
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        inputs = torch.randn(3, 4, dtype=dtype, requires_grad=True)
        output = model[1](inputs)
        assert output.dtype == dtype
        output.sum().backward()
        assert inputs.grad is not None and inputs.grad.dtype == dtype
    assert seen == [torch.float32] * 4


def test_other_classes_may_be_ignored_or_none() -> None:
    for classes, expected in (((nn.LayerNorm,), ["norm"]), ((), []), (None, [])):
        model = Model()
        precision = MixedPrecision(torch.float16, _module_classes_to_ignore=classes)  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            auto_wrap(model, ours.CustomPolicy(lambda each: False), Wrapper, {"mixed_precision": precision})
        assert list(wrapped(model)) == expected
        assert len(told) == len(expected)


@pytest.mark.parametrize("policy", [ours.ModuleWrapPolicy({nn.Linear}), ours.always_wrap_policy], ids=str)
def test_a_tree_that_is_wrapped_already_is_refused(policy: Any) -> None:
    """Contract F1-37."""
    model = nn.Sequential(nn.Linear(2, 2), Wrapper(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="'1' is wrapped already"):
        auto_wrap(model, policy, Wrapper, {})
    assert not isinstance(model[0], Wrapper)


def test_frozen_parameters_among_others() -> None:
    """Contract F1-114. Inside a unit of their own they are no matter of the outer one."""

    def model() -> nn.Module:
        made = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
        made[0][0].requires_grad_(False)
        return made

    outer = ours.ModuleWrapPolicy({nn.Sequential})
    with pytest.raises(ValueError, match=r"'0' \(Sequential\).*0.weight, 0.bias.*1.weight, 1.bias"):
        auto_wrap(model(), outer, Wrapper, {})
    with pytest.warns(UserWarning, match="12 elements instead of 6"):
        auto_wrap(model(), outer, Wrapper, {"use_orig_params": True})
    both = ours.ModuleWrapPolicy({nn.Sequential, nn.Linear})
    auto_wrap(model(), both, Wrapper, {})
    frozen = model()
    auto_wrap(frozen, outer, Wrapper, {}, ignored_params=set(frozen[0][0].parameters()))
    auto_wrap(model(), outer.__call__, Wrapper, {})  # a function is not asked about the whole


def test_wrong_policies() -> None:
    """Contract F1-110."""
    for answer in (None, 1, "yes"):
        with pytest.raises(ValueError, match=f"returned {answer!r}"):
            auto_wrap(Model(), ours.CustomPolicy(lambda each: answer), Wrapper, {})  # noqa: B023
    with pytest.raises(TypeError, match="ModuleWrapPolicy"):
        auto_wrap(Model(), {nn.Linear}, Wrapper, {})  # type: ignore[arg-type]
    for wrong in (nn.Linear, [3], 5):
        with pytest.raises(PolicyError, match="module classes"):
            ours.ModuleWrapPolicy(wrong)  # type: ignore[arg-type]
    with pytest.raises(PolicyError):
        ours.CustomPolicy(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ours._Policy()  # type: ignore[abstract]
    assert repr(ours.ModuleWrapPolicy({nn.Linear, Block})) == "ModuleWrapPolicy({Block, Linear})"


def test_defaults_of_the_size_based_policy() -> None:
    """Contract F1-107: the sets are attributes, which programs change."""
    mine, other = ours.size_based_auto_wrap_policy, theirs.size_based_auto_wrap_policy
    assert vars(mine) == vars(other)
    assert mine(nn.Linear(1, 1), False, int(1e8)) and not mine(nn.Linear(1, 1), False, int(1e8) - 1)


def test_wrapping_by_hand() -> None:
    """Contract F1-113."""
    module = nn.Linear(2, 2)
    assert ours.wrap(module, level=1) is module
    with ours.enable_wrap(wrapper_cls=Wrapper, level=1, depth=2):
        result = ours.wrap(module, level=5)
        assert isinstance(result, Wrapper) and result.inner is module and result.kwargs == {"level": 5, "depth": 2}
        with pytest.raises(NotImplementedError):
            with ours.enable_wrap(wrapper_cls=Wrapper):
                pass
        assert isinstance(ours.wrap(module), Wrapper)
    assert ours.wrap(module) is module
    with pytest.raises(ZeroDivisionError), ours.enable_wrap(wrapper_cls=Wrapper):
        raise ZeroDivisionError
    assert ours.wrap(module) is module


def test_names_that_activation_checkpointing_uses() -> None:
    """Contract F1-02."""
    wrapper = functools.partial(checkpoint_wrapper)
    policy = functools.partial(ours.lambda_auto_wrap_policy, lambda_fn=lambda each: isinstance(each, nn.Linear))
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(3, 3)))
    _, numel = traversal._recursive_wrap(
        module=model,
        auto_wrap_policy=policy,
        wrapper_cls=wrapper,
        ignored_modules=set(),
        ignored_params=set(),
        only_wrap_children=True,
    )
    assert numel == 6 + 12
    assert isinstance(model[0], CheckpointWrapper) and isinstance(model[1][0], CheckpointWrapper)
    single, numel = traversal._recursive_wrap(nn.Linear(2, 2), policy, wrapper, set(), set())
    assert isinstance(single, CheckpointWrapper) and numel == 6
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(3, 3)))
    targets = ours.ModuleWrapPolicy({nn.Linear, nn.Sequential})._run_policy(model, set(), {})
    assert model in targets
    traversal._post_order_apply(model, fn=traversal._construct_wrap_fn(model, targets, Wrapper))
    assert list(wrapped(model)) == ["0", "1", "1.0"]


@pytest.mark.parametrize("size", [1, 2])
def test_an_object_that_only_looks_like_a_process_group(size: int) -> None:
    """Programs wrap and scale with one that has no more than a rank and a size, before anything is sent."""
    group = LookAlike(0, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank
        with ours.enable_wrap(wrapper_cls=FSDP, process_group=group, use_orig_params=True):
            by_hand = ours.wrap(nn.Sequential(ours.wrap(nn.Linear(4, 4)), nn.ReLU()))
        policy = ours.ModuleWrapPolicy({nn.Linear})
        model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), group, auto_wrap_policy=policy)
    assert by_hand.process_group is by_hand.module[0].process_group is model.module[0].process_group is group
    assert sum(each.numel() for each in by_hand.parameters()) == 20 // size
    assert [type(each) for each in model.module] == [FSDP, nn.ReLU]
    weight, scaler = nn.Parameter(torch.ones(2)), ShardedGradScaler("cpu", init_scale=4.0, process_group=group)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [0.0, 0.0]
    for misuse in (lambda: FSDP(nn.Linear(2, 2), object()), lambda: ShardedGradScaler(process_group=object())):
        with pytest.raises(ArgumentError, match=r"process.group.*got <object"):
            misuse()
    if size > 1:
        with pytest.raises(UnsupportedError, match="has no method all_gather_single"):
            model(torch.ones(1, 4))
