"""Parameters that modules of different wrapped units share: one unit owns them, the others use them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.models import shard
from bed.parity import assert_close
from bed.parity import train as train_plain
from bed.tied_units import shard_tied, tied_case, untied
from bed.wrapped import full_parameters, train, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

from unshard import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType, fully_shard
from unshard import FullyShardedDataParallel as FSDP
from unshard.composable import fully_shard as legacy_fully_shard
from unshard.errors import ArgumentError
from unshard.wrap import ModuleWrapPolicy

ORDERS = (["tokens", "head"], ["tokens"], ["head"])
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


def wrapped(names: Iterable[str], even: bool = False, after: bool = False, **options: Any) -> FSDP:
    """`names`: the modules that are units; `after`: they are not tied yet, and the head has no bias."""
    model = tied_case(even).build()
    if after:
        model.head = nn.Linear(model.head.in_features, model.head.out_features, bias=False)
    return wrap(model, [*(getattr(model, name) for name in names), *model.hidden, model], **options)


def local_loss(model: nn.Module, step: int) -> torch.Tensor:
    case = tied_case()
    return case.loss(model, shard(case.batch(step), dist.get_rank(), dist.get_world_size()))


def is_tied(model: FSDP) -> None:
    with FSDP.summon_full_params(model):
        weights = [p for name, p in model.named_parameters(remove_duplicate=False) if name.split(".")[-1] == "weight"]
        tied = [each for each in weights if len(each) > 20]
        assert len(tied) == 2 and tied[0] is tied[1]


@pytest.mark.parametrize("use_orig_params", [False, True])
@world(1, 2, 3, 4)
def test_parity(use_orig_params: bool) -> None:
    """Units by hand and by policy; even and uneven rows; every strategy; offloaded."""
    kinds: list[dict[str, Any]] = [{"sharding_strategy": each} for each in STRATEGIES]
    kinds.append({"cpu_offload": CPUOffload(True)})
    for number, options in enumerate(kinds):
        even = bool(number % 2)
        case = tied_case(even)
        reference = train_plain(case.build(), case, 3)
        model = wrapped(ORDERS[number % 3], even, use_orig_params=use_orig_params, **options)
        assert_close(_renamed(train(model, case, 3)), reference)
        is_tied(model)
    case = tied_case()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = ModuleWrapPolicy({nn.Embedding, nn.Linear})
        model = FSDP(case.build(), auto_wrap_policy=policy, use_orig_params=use_orig_params)
    assert_close(train(model, case, 3), train_plain(case.build(), case, 3))
    assert len(list(model.parameters())) == (6 if use_orig_params else 4)


def _renamed(record: Any) -> Any:
    """The weight has the name that it has in the unit that owns it."""
    for each in (*record.grads, record.params):
        if "head.weight" in each:
            each["tokens.weight"] = each.pop("head.weight")
    return record


def _several_forwards(model: nn.Module) -> None:
    losses = [local_loss(model, step) for step in range(2)]
    (losses[0] + losses[1]).backward()


def _accumulate(model: nn.Module) -> None:
    with model.no_sync() if isinstance(model, FSDP) else warnings.catch_warnings():
        local_loss(model, 0).backward()
    local_loss(model, 1).backward()


def _recompute(model: nn.Module) -> None:
    inner = model.module if isinstance(model, FSDP) else model

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda t: torch.tanh(inner.hidden[0](inner.tokens(t))), tokens, use_reentrant=False)
        return checkpoint(inner.head, x, use_reentrant=False)

    inner.forward = forward
    local_loss(model, 0).backward()
    with torch.no_grad():
        model(tied_case().batch(0)[0])


def _only_the_head(model: nn.Module) -> None:
    inner = model.module if isinstance(model, FSDP) else model
    inner.forward = lambda tokens: inner.head(nn.functional.one_hot(tokens % 16, 16).float()).square()
    model(tied_case().batch(dist.get_rank())[0]).sum().backward()


PROGRAMS: list[Callable[[nn.Module], None]] = [_several_forwards, _accumulate, _recompute, _only_the_head]


@pytest.mark.parametrize("use_orig_params", [False, True])
@world(2)
def test_programs(use_orig_params: bool) -> None:
    """Steps of SGD are those of one unit that has both modules, whatever runs before them."""
    for program in PROGRAMS:
        for names in ORDERS:
            results = []
            for units in (names, []):
                model = wrapped(units, use_orig_params=use_orig_params)
                optimizer = torch.optim.SGD(model.parameters(), 0.5)
                program(model)
                norm = model.clip_grad_norm_(0.5)
                optimizer.step()
                results.append((norm, full_parameters(model)))
            (norm, mine), (expected_norm, theirs) = results
            torch.testing.assert_close(norm, expected_norm)
            assert mine.keys() == theirs.keys() or len(mine) == len(theirs) == 6
            for (_, one), (_, other) in zip(sorted(mine.items()), sorted(theirs.items()), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("use_orig_params", [False, True])
@world(2)
def test_mixed_precision(use_orig_params: bool) -> None:
    precision = MixedPrecision(torch.bfloat16, torch.float32)
    results = []
    for units in (["tokens", "head"], []):
        model = wrapped(units, use_orig_params=use_orig_params, mixed_precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for step in range(2):
            local_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(full_parameters(model))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=0, atol=0)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@world(2, 3)
def test_state_dicts(kind: str, use_orig_params: bool) -> None:
    """Both names are saved and loaded; optimizer state is there once, and training goes on as it would have."""
    full = tied_case().build().state_dict()
    for names in ORDERS:
        saved, other = (wrapped(names, use_orig_params=use_orig_params) for _ in range(2))
        optimizers = [torch.optim.Adam(each.parameters(), 0.1) for each in (saved, other)]
        for step in range(2):
            optimizers[0].zero_grad()
            local_loss(saved, step).backward()
            optimizers[0].step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for model in (saved, other):
                FSDP.set_state_dict_type(model, StateDictType[kind])
            state = saved.state_dict()
            if kind != "LOCAL_STATE_DICT":
                assert set(state) == set(full)
            optim_state = FSDP.optim_state_dict(saved, optimizers[0])
            assert sum(name in optim_state["state"] for name in ("tokens.weight", "head.weight")) == 1
            result = other.load_state_dict(copy.deepcopy(state) if kind == "FULL_STATE_DICT" else state, strict=True)
            assert not result.missing_keys and not result.unexpected_keys
            loaded = FSDP.optim_state_dict_to_load(other, optimizers[1], optim_state)
            optimizers[1].load_state_dict(loaded)
        for model, optimizer in zip((saved, other), optimizers, strict=True):
            optimizer.zero_grad()
            local_loss(model, 2).backward()
            optimizer.step()
        mine, theirs = full_parameters(other), full_parameters(saved)
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=0)
        if kind == "FULL_STATE_DICT":
            torch.testing.assert_close(state["head.weight"], state["tokens.weight"], rtol=0, atol=0)
            plain = tied_case().build()
            plain.load_state_dict(state)
            del state["head.weight"]
            with pytest.raises(RuntimeError, match=r"head\.weight"):
                other.load_state_dict(state)


@pytest.mark.parametrize("use_orig_params", [False, True])
@world(1, 2)
def test_tied_after_wrapping(use_orig_params: bool) -> None:
    """What the head had is dropped."""
    case = tied_case()
    reference = case.build()
    reference.head = nn.Linear(16, 29, bias=False)
    reference.head.weight = reference.tokens.weight
    model = wrapped(["tokens", "head"], after=True, use_orig_params=use_orig_params)
    early = torch.optim.SGD(model.parameters(), 0.0)
    model.module.head.module.weight = model.module.tokens.module.weight
    full_parameters(model)  # asks for the root
    assert len(list(model.parameters())) == (5 if use_orig_params else 3)
    assert_close(train(model, case, 3), train_plain(reference, case, 3))
    is_tied(model)
    local_loss(model, 0).backward()
    with pytest.warns(UserWarning, match=r"'head.weight' is 'tokens.weight'.*after tying"):
        early.step()
    with_bias = tied_case().build()
    with_bias = wrap(untied(with_bias), [with_bias.tokens, with_bias.head, with_bias], use_orig_params=use_orig_params)
    with_bias.module.head.module.weight = with_bias.module.tokens.module.weight
    with pytest.raises(ArgumentError, match=r"'head.weight' of unit 'head'.*Tie parameters before wrapping"):
        local_loss(with_bias, 0)


@world(2)
def test_the_legacy_call() -> None:
    for order in ("tokens head", "head tokens", "head"):
        model, other, reference = (tied_case().build() for _ in range(3))
        for each in (model, other):
            shard_tied(each, order, legacy_fully_shard)
        optimizers = [torch.optim.SGD(each.parameters(), 0.5) for each in (model, reference)]
        for step in range(2):
            for each, optimizer in zip((model, reference), optimizers, strict=True):
                optimizer.zero_grad()
                tied_case().loss(each, tied_case().batch(step)).backward()
                optimizer.step()
        state = model.state_dict()
        assert set(state) == set(reference.state_dict())
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
        other.load_state_dict(state)
        for name, value in other.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=0)


@world(2)
def test_refusals() -> None:
    """Different kinds of units, and dtypes."""
    half = MixedPrecision(torch.bfloat16)
    for first, second in (
        (fully_shard, FSDP),
        (partial(FSDP, use_orig_params=True), FSDP),
        (partial(FSDP, use_orig_params=True), fully_shard),
        (FSDP, partial(FSDP, mixed_precision=half)),
    ):
        model = tied_case().build()
        model.tokens = first(model.tokens)
        with pytest.raises(ArgumentError, match=r"'weight' \(unit 'Embedding'\) and 'weight' \(unit 'Linear'\)"):
            second(model.head)
