"""Tensor subclasses with inner tensors that do not say how their shards are gathered: quantised weights of torchao."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from bed import world
from bed.tensor_subclass import OpaqueTensor
from torch import nn

from unshard import FullyShardedDataParallel as FSDP
from unshard import fully_shard
from unshard.errors import UnsupportedError


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    if kind == "opaque":
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(OpaqueTensor(layer.weight.detach()), requires_grad=False)
    else:
        torchao: Any = importlib.import_module("torchao.quantization")
        torchao.quantize_(model, getattr(torchao, kind)())
    return model


TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
KINDS = ["opaque", *(pytest.param(f"{kind}WeightOnlyConfig", marks=TORCHAO) for kind in ("Int8", "Float8"))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@world(1, 2, slow=(1,))
def test_refused_by_name_and_accepted_if_ignored(kind: str) -> None:
    name = type(build(kind)[0].weight).__name__
    message = rf"'0\.weight' is a {name}, a tensor subclass .* fsdp_pre_all_gather .*: .* Pass it in ignored_"
    with pytest.raises(UnsupportedError, match=message + "params"):
        fully_shard(build(kind))
    with pytest.raises(UnsupportedError, match=message + "states"):
        FSDP(build(kind), use_orig_params=True)
    reference, x = build(kind), torch.randn(4, 32)
    for ignore in (
        lambda model, weights: fully_shard(model, ignored_params=set(weights)),
        lambda model, weights: FSDP(model, use_orig_params=True, ignored_states=weights),
    ):
        model = build(kind)
        sharded = ignore(model, [model[0].weight, model[2].weight])
        assert torch.equal(sharded(x), reference(x))
