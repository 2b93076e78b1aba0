"""The legacy composable `fully_shard(module, mixed_precision=...)` (contract part F)."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import models, world
from bed.models import CASES
from bed.parity import adamw
from torch import Tensor, nn

from unshard import FullStateDictConfig, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, StateDictType
from unshard import FullyShardedDataParallel as FSDP
from unshard.composable import fully_shard
from unshard.fsdp1.state import _get_fsdp_handles, _get_module_fsdp_state
from unshard.optim import clip_grad_norm_
from unshard.wrap import ModuleWrapPolicy

half, single = torch.float16, torch.float32

# (cast root, cast child, root without params) -> inputs of model, c1, c2; None: not reached
TABLE = {
    (True, True, True): (half, half, half),  # LG-10
    (True, True, False): (single, single, half),  # LG-11
    (True, False, True): (half, half, half),  # LG-12
    (True, False, False): (single, single, half),  # LG-13, LG-19
    (False, True, True): (single, half, half),  # LG-14, LG-18
    (False, True, False): (single, single, half),  # LG-15
    (False, False, True): (single, single, None),  # LG-16
    (False, False, False): (single, single, single),  # LG-17
}


class Child(nn.Module):
    def __init__(self, seen: dict[nn.Module, Tensor]) -> None:
        super().__init__()
        self.l, self.forward_inputs = nn.Linear(100, 100), seen

    def forward(self, x: Tensor) -> Tensor:
        self.forward_inputs[self] = x
        return self.l(x)


class Model(nn.Module):
    """LG-08."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_inputs: dict[nn.Module, Tensor] = {}
        self.c1, self.c2 = Child(self.forward_inputs), Child(self.forward_inputs)

    def forward(self, x: Tensor) -> Tensor:
        self.forward_inputs[self] = x
        return self.c2(self.c1(x))


@world(2)
def test_lg_04_to_lg_19_inputs() -> None:
    for row, expected in TABLE.items():
        root, child, empty = row
        config = MixedPrecision(param_dtype=half, cast_root_forward_inputs=root, cast_forward_inputs=child)
        model, x = Model(), torch.zeros(2, 100)
        assert fully_shard(model.c2, mixed_precision=config) is model.c2
        if empty:
            fully_shard(model.c1, mixed_precision=config)
            found = fully_shard(model, mixed_precision=config)
        else:
            found = fully_shard(model)
        assert found is model, "LG-01, LG-21"
        if root or child:
            found(x).sum().backward()
        else:  # LG-09
            with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype"):
                found(x).sum().backward()
        seen = model.forward_inputs
        dtypes = tuple(seen[each].dtype if each in seen else None for each in (model, model.c1, model.c2))
        assert dtypes == expected, row


def test_lg_01_arguments() -> None:
    first, *others = inspect.signature(fully_shard).parameters.values()
    assert first.name == "module"
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in others)
    assert [each.name for each in others] == [
        *("process_group", "policy", "strategy", "mixed_precision", "cpu_offload", "ignored_modules", "device_id"),
        *("param_init_fn", "sync_module_states", "forward_prefetch", "ignored_states"),
    ]


@world(1, 2, 3)
@pytest.mark.filterwarnings("ignore")
def test_lg_02_trains_like_the_unsharded_model() -> None:
    """Names unchanged, original parameters as rows of flat shards; by hand and by policy."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for case, by_policy in itertools.product(CASES[:2], (False, True)):
        if by_policy and case.name != "transformer":
            continue
        reference, model = case.build(), case.build()
        names = [name for name, _ in model.named_parameters()]
        if by_policy:
            fully_shard(model, policy=ModuleWrapPolicy({models.Block}), strategy=ShardingStrategy.SHARD_GRAD_OP)
        else:
            for unit in case.units(model):
                fully_shard(unit)
        assert [name for name, _ in model.named_parameters()] == names
        assert len(_get_fsdp_handles(model)) == len(case.units(model))
        assert size == 1 or all(each.ndim == 1 for each in model.parameters())
        stepper, other = adamw(model.parameters()), adamw(reference.parameters())
        for step in range(4):
            batch = case.batch(step)
            expected = case.loss(reference, batch)
            expected.backward()
            loss = case.loss(model, models.shard(batch, rank, size))
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(mean / size, expected.detach(), rtol=1e-5, atol=1e-6)
            for each in (stepper, other):
                each.step()
                each.zero_grad()


@world(2)
def test_applied_twice() -> None:
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(AssertionError, match="already applied"):
        fully_shard(model)


UNSHARDED, LOCAL, SHARDED = StateDictType
quiet = pytest.mark.filterwarnings("ignore::FutureWarning")


def sharded(case: models.Case, **options: Any) -> nn.Module:
    model = case.build()
    for unit in case.units(model):
        fully_shard(unit, **options)
    return model


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: models.Case, steps: Any, alone: bool = False
) -> None:
    rank, size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    for step in steps:
        case.loss(model, models.shard(case.batch(step), rank, size)).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert type(found[name]) is torch.Tensor, name
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@quiet
@world(1, 2, 3)
@pytest.mark.filterwarnings("ignore")
def test_lg_02_state_dicts() -> None:
    """Full by default: names, order, shapes and values of the unsharded model, and back; other kinds as asked."""
    for case in CASES[:4]:
        expected = case.build().state_dict()
        model = sharded(case)
        found = model.state_dict()
        same(found, expected)
        before = [parameter.shape for parameter in model.parameters()]
        train(model, torch.optim.SGD(model.parameters(), lr=1.0), case, range(1))
        same(found, expected)  # copies: what follows does not change them
        assert [parameter.shape for parameter in model.parameters()] == before
        assert str(model.load_state_dict(expected)) == "<All keys matched successfully>"
        same(model.state_dict(), expected)
        config = FullStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(model, UNSHARDED, config):
            found = model.state_dict()
            assert dist.get_rank() == 0 or not [name for name, _ in model.named_parameters() if name in found]
        other = sharded(case)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.fill_(7.0)
        with FSDP.state_dict_type(model, SHARDED), FSDP.state_dict_type(other, SHARDED):
            shards = model.state_dict()
            assert dist.get_world_size() == 1 or not any(type(each) is Tensor for each in shards.values() if each.ndim)
            other.load_state_dict(shards)
        same(other.state_dict(), expected)
        wrong = {**expected, "zz": torch.ones(1)}
        with pytest.raises(RuntimeError, match="zz"):
            model.load_state_dict(wrong)
        case.loss(model, case.batch(0)).backward()  # every unit is sharded again


@world(2)
@pytest.mark.filterwarnings("ignore")
def test_lg_02_local_state_dict() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    expected = model.state_dict()
    expected = {name: each.clone() for name, each in expected.items()}
    for layer in (model[0], model):
        fully_shard(layer)
    with FSDP.state_dict_type(model, LOCAL):
        found = model.state_dict()
        assert sorted(found) == ["0._flat_param", "_flat_param"]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(found)
    same(model.state_dict(), expected)


@world(2)
@pytest.mark.filterwarnings("ignore")
def test_lg_02_state_dicts_restore_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    fully_shard(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16))
    model(torch.ones(2, 3))
    found = model.state_dict()
    assert found["1.running_mean"].dtype == found["1.weight"].dtype == torch.float32


@world(1, 2, 3)
@pytest.mark.filterwarnings("ignore")
def test_lg_02_optimizer_state() -> None:
    """By original names and unsharded, as that of the unsharded model; and back."""
    case = CASES[0]
    reference, model = case.build(), sharded(case)
    whole, optimizer = adamw(reference.parameters()), adamw(model.parameters())
    train(reference, whole, case, range(2), alone=True)
    train(model, optimizer, case, range(2))
    states = FSDP.optim_state_dict(model, optimizer)
    for name, parameter in reference.named_parameters():
        for key, value in whole.state[parameter].items():
            torch.testing.assert_close(states["state"][name][key], value, rtol=1e-4, atol=1e-6)
    again = sharded(case)
    again.load_state_dict(model.state_dict())
    other = adamw(again.parameters())
    other.load_state_dict(FSDP.optim_state_dict_to_load(again, other, copy.deepcopy(states)))
    for each, stepper in ((model, optimizer), (again, other)):
        train(each, stepper, case, range(2, 4))
    same(again.state_dict(), model.state_dict())


@world(2)
def test_lg_02_found_as_units() -> None:
    """PyTorch's helpers for checkpoints ask which units there are, and of which group."""
    model = nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2))
    fully_shard(model)
    found = FSDP.fsdp_modules(model)
    assert [each.sharding_strategy for each in found] == [ShardingStrategy.FULL_SHARD] * 2
    assert all(_get_module_fsdp_state(each) is each and each.process_group.size() == 2 for each in found)
    assert FSDP.fsdp_modules(model, root_only=True) == found[:1]


@world(2)
@pytest.mark.filterwarnings("ignore")
def test_lg_02_clipping_and_no_sync() -> None:
    """By the class, since there is no wrapper to have methods; what else clips says so."""
    case = CASES[0]
    reference, model = case.build(), sharded(case)
    rank, size = dist.get_rank(), dist.get_world_size()
    with FSDP.no_sync(model):
        case.loss(model, models.shard(case.batch(0), rank, size)).backward()
    case.loss(model, models.shard(case.batch(1), rank, size)).backward()
    for step in range(2):
        case.loss(reference, case.batch(step)).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    with pytest.raises(ValueError, match=r"FullyShardedDataParallel.clip_grad_norm_\(model, max_norm\)"):
        clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(FSDP.clip_grad_norm_(model, 0.01), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(FSDP.clip_grad_norm_(model, 1.0), torch.tensor(0.01), rtol=1e-3, atol=0)
    inner = next(unit for unit in case.units(model) if unit is not model)
    with pytest.raises(RuntimeError, match="inside another one"):
        FSDP.clip_grad_norm_(inner, 1.0)
    with pytest.raises(ValueError, match="this Linear is neither"):
        FSDP.clip_grad_norm_(nn.Linear(2, 2), 1.0)


@world(2)
def test_wrong_arguments() -> None:
    for options, words in (
        ({"mixed_precision": torch.bfloat16}, r"MixedPrecision\(param_dtype=torch.bfloat16\)"),
        ({"mixed_precision": MixedPrecisionPolicy(half)}, "is for unshard.fully_shard"),
        ({"cpu_offload": True}, r"CPUOffload\(offload_params=True\)"),
    ):
        with pytest.raises(TypeError, match=words):
            fully_shard(nn.Linear(2, 2), **options)
    with pytest.raises(TypeError, match="takes a module, got 3"):
        fully_shard(3)
    with pytest.raises(NotImplementedError, match=r"cannot be pickled or copied.*state_dict"):
        pickle.dumps(fully_shard(nn.Linear(2, 2)))
