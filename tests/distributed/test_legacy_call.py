"""The legacy composable `fully_shard(module, mixed_precision=...)` (contract part F)."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
import torch.distributed as dist
from bed import models, world
from bed.models import CASES
from bed.parity import adamw
from torch import Tensor, nn

from unshard import MixedPrecision, ShardingStrategy
from unshard.composable import fully_shard
from unshard.frontends.traversal import _get_fsdp_handles
from unshard.frontends.wrap import ModuleWrapPolicy

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
