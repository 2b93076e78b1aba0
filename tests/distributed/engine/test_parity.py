"""A sharded model trains like the unsharded one: losses, gradients and parameters of ten steps of AdamW."""

from __future__ import annotations

import pytest
import torch
from bed import world
from bed.models import CASES, Case
from bed.packing import path
from bed.parity import check_parity, each_unit
from torch import nn

from unshard import fully_shard


@pytest.mark.parametrize("case", CASES, ids=str)
@world(1, 2, 3, 4)
def test_ten_steps_match_the_unsharded_model(case: Case) -> None:
    with path("rows"):
        check_parity(case, each_unit(case, fully_shard))


@pytest.mark.parametrize("case", CASES, ids=str)
@world(2, 3, 4)
def test_packed_parameters_match(case: Case) -> None:
    check_parity(case, each_unit(case, fully_shard), steps=4)


@pytest.mark.parametrize("case", CASES, ids=str)
@world(3)
def test_one_tensor_per_collective_matches(case: Case) -> None:
    with path("ungrouped"):
        check_parity(case, each_unit(case, fully_shard), steps=4)


@pytest.mark.parametrize("way", ["rows", "packed"])
@pytest.mark.parametrize("reshard", [True, False])
@world(3)
def test_every_reshard_mode_matches(reshard: bool, way: str) -> None:
    case = CASES[0]
    with path(way):
        check_parity(case, each_unit(case, fully_shard, reshard_after_forward=reshard), steps=4)


class Wide(nn.Module):
    """Parameters above and below the packing threshold in one unit, without any patch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(150, 301), nn.Tanh(), nn.Linear(301, 151))
        self.out = nn.Linear(151, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x))


def _build_wide() -> nn.Module:
    torch.manual_seed(3)
    return Wide()


def _wide_batch(step: int, total: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(step)
    return torch.randn(total, 150, generator=dice), torch.randn(total, 1, generator=dice)


def _error(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


WIDE = Case("wide", _build_wide, _wide_batch, _error, lambda model: [model.inner, model])


@world(1, 2, 3, 4)
def test_large_and_small_parameters_in_one_unit() -> None:
    check_parity(WIDE, each_unit(WIDE, fully_shard), steps=4)


@world(2)
def test_a_wrong_scale_would_be_noticed() -> None:
    """The proof that the parity tests can fail."""

    def shard(model: nn.Module) -> None:
        each_unit(WIDE, fully_shard)(model)
        scale = model.out.forward
        model.out.forward = lambda x: scale(x) * 1.001  # type: ignore[method-assign]

    with pytest.raises(AssertionError, match="differs by"):
        check_parity(WIDE, shard, steps=1)
