"""The wrapper beside PyTorch's own: the same numbers, and errors of the same types."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from bed import world
from torch import nn

import unshard
from unshard import ShardingStrategy

S = ShardingStrategy
flat_or_originals = pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
BOTH: tuple[Any, Any] = (unshard, torch_fsdp)


def with_gradients(library: Any, strategy: S, originals: bool) -> Any:
    """Two units and a parameter that no unit has; the gradients are random, and zero in the padding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5)), nn.Linear(5, 3), nn.Linear(3, 3))
    options = {
        "sharding_strategy": library.ShardingStrategy[strategy.name],
        "use_orig_params": originals,
        "ignored_states": [model[2].weight],
        "device_id": torch.device("cpu"),
    }
    wrapper = library.FullyShardedDataParallel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD
        model[0] = wrapper(model[0], **options)
        wrapped = wrapper(model, **options)
    for each in wrapped.parameters():
        if each.numel():
            each.grad = torch.randn_like(each)
    for unit in wrapper.fsdp_modules(wrapped) if not originals else ():
        flat = unit._handle.flat_param
        flat.grad[flat.numel() - flat._shard_numel_padded :] = 0
    return wrapped


@flat_or_originals
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.NO_SHARD], ids=lambda each: each.name)
@world(2, 3)
def test_f1_83_clipping_bit_for_bit(strategy: S, originals: bool) -> None:
    for order, limit in itertools.product((2.0, 1.0, 3.0, float("inf")), (0.01, 1e6)):
        results = []
        for library in BOTH:
            model = with_gradients(library, strategy, originals)
            norm = model.clip_grad_norm_(limit, order)
            results.append([norm, *(each.grad for each in model.parameters() if each.grad is not None)])
        mine, theirs = results
        assert len(mine) == len(theirs) > 1 and all(map(torch.equal, mine, theirs)), (order, limit)
    ours = with_gradients(unshard, strategy, originals)
    for wrong in (0, -1.0, "two", None):
        with pytest.raises(ValueError, match="norm_type must be"):
            ours.clip_grad_norm_(1.0, wrong)
    with pytest.raises(ValueError, match="max_norm must"):
        ours.clip_grad_norm_(-1.0)
