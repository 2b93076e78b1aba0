"""State dicts, param groups and pickles hold what they hold with PyTorch's own FSDP, and nothing of ours."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
import warnings
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from bed import world
from torch import nn
from torch.distributed.tensor import DTensor

import unshard

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "Adagrad, two groups": lambda parameters: torch.optim.Adagrad(
        [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], lr=0.1
    ),
}
fronts = pytest.mark.parametrize("front", ["fully_shard", "flat", "originals"])


def trained(api: Any, front: str, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    if front == "fully_shard":
        api.fully_shard(model[0])
        api.fully_shard(model)
    else:
        options = {"use_orig_params": front == "originals", "device_id": torch.device("cpu")}
        model[0] = api.FullyShardedDataParallel(model[0], **options)
        model = api.FullyShardedDataParallel(model, **options)
    stepped = OPTIMIZERS[optimizer](list(model.parameters()))
    for _ in range(2):
        model(torch.ones(4, 6)).square().mean().backward()
        stepped.step()
        stepped.zero_grad()
    return model, stepped


def words(value: Any) -> set[str]:
    """Names of classes and functions, and all strings, in what `torch.save` writes of `value`."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A state dict of shards")
        torch.save(value, file)
    archive = zipfile.ZipFile(file)
    (name,) = (each for each in archive.namelist() if each.endswith("data.pkl"))
    found = {argument for _, argument, _ in pickletools.genops(archive.read(name)) if isinstance(argument, str)}
    return {each for each in found if not each.isdigit()}  # numbers of storages


def shape_of(value: Any) -> Any:
    """Keys and classes of nested dicts and lists."""
    if isinstance(value, dict):
        return type(value).__mro__[-2], {key: shape_of(each) for key, each in value.items()}
    return [shape_of(each) for each in value] if isinstance(value, list) else type(value)


MARKED_BY_TORCH = {"_has_been_cloned", "_fsdp_flattened", "torch Tensor", "torch._tensor _rebuild_from_type_v2"}
"""What attributes that torch's wrapper leaves on tensors add to pickles."""


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@fronts
@pytest.mark.filterwarnings("ignore::FutureWarning")
@world(2)
def test_state_dicts_and_pickles_are_those_of_torch(front: str, optimizer: str) -> None:
    marked = set() if front == "fully_shard" else MARKED_BY_TORCH
    ours, stepped = trained(unshard, front, optimizer)
    theirs, expected = trained(torch_fsdp, front, optimizer)
    for keep_vars in (False, True):
        mine, state = ours.state_dict(keep_vars=keep_vars), theirs.state_dict(keep_vars=keep_vars)
        assert list(mine) == list(state)
        assert mine._metadata == state._metadata and repr(mine._metadata) == repr(state._metadata)
        assert words(mine) == words(state) - marked
        assert all(vars(each).keys() <= {"_is_param"} for each in mine.values())
    assert shape_of(stepped.state_dict()) == shape_of(expected.state_dict())
    assert [group.keys() for group in stepped.param_groups] == [group.keys() for group in expected.param_groups]
    assert words(stepped.state_dict()) == words(expected.state_dict())
    assert stepped.__getstate__().keys() == expected.__getstate__().keys()
    if front == "flat":  # both have torch's attributes on the flat parameter
        assert not any("unshard." in word or "unshard_" in word for word in words([stepped, *ours.parameters()]))
    else:
        kind = {"torch._utils _rebuild_parameter_with_state", "torch._utils _rebuild_parameter"}
        assert words(stepped) - kind == words(expected) - marked - kind
        assert words(list(ours.parameters())) - kind == words(list(theirs.parameters())) - marked - kind
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("front", ["fully_shard", "originals"])
@world(2)
def test_optimizer_state_by_name_is_that_of_torch(front: str) -> None:
    if front == "fully_shard":
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as by_name
    else:

        def by_name(model: nn.Module, optimizer: Any) -> Any:
            api = unshard if isinstance(model, unshard.FullyShardedDataParallel) else torch_fsdp
            return api.FullyShardedDataParallel.optim_state_dict(model, optimizer)

    mine, state = (by_name(*trained(api, front, "AdamW")) for api in (unshard, torch_fsdp))
    assert shape_of(mine) == shape_of(state)


@world(2)
def test_state_dicts_of_shards_pickle_byte_by_byte() -> None:
    """What warns when it is pickled leaves no trace, also in copies."""
    model, _ = trained(unshard, "fully_shard", "SGD")
    for state in (model.state_dict(), copy.deepcopy(model.state_dict())):
        plain = OrderedDict((key, None) for key in state)
        plain._metadata = OrderedDict((key, dict(each)) for key, each in state._metadata.items())  # type: ignore[attr-defined]
        for key in state:
            state[key] = None
        assert pickle.dumps(state) == pickle.dumps(plain)


@fronts
@world(2)
def test_parameters_have_no_attributes_of_ours(front: str) -> None:
    """At rest, unsharded, and before sharding; a parameter that was copied or unpickled is like any other."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 8)
    before = list(plain.parameters())
    model: Any = plain
    if front == "fully_shard":
        unshard.fully_shard(model)
        unsharded = model.unshard
    else:
        model = unshard.FullyShardedDataParallel(model, use_orig_params=front == "originals")
        unsharded = model._unshard
    model(torch.ones(2, 6)).sum().backward()
    at_rest = list(model.parameters())
    unsharded()
    now = [plain.weight, plain.bias]
    assert [tuple(each.shape) for each in now] == [(8, 6), (8,)]
    for each in (*before, *at_rest, *now):
        assert not any("unshard_" in name and not name.endswith("_unsharded_size") for name in vars(each))
    restored = pickle.loads(pickle.dumps(at_rest[0]))
    assert vars(restored).keys() == vars(at_rest[0]).keys()
    if front != "flat":
        assert vars(restored).keys() == ({"_is_param"} if isinstance(restored, DTensor) else set())
    optimizer = torch.optim.SGD(copy.deepcopy(now), lr=0.1)  # a copy of an unsharded parameter is no unsharded one
    optimizer.step()


@fronts
@world(2)
def test_exceptions_have_no_attributes_of_ours(front: str) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"no dtype fits {self.inner(x).dtype}")

    model: Any = nn.Sequential(Failing())
    if front == "fully_shard":
        unshard.fully_shard(model[0])
        unshard.fully_shard(model)
    else:
        model[0] = unshard.FullyShardedDataParallel(model[0], use_orig_params=front == "originals")
        model = unshard.FullyShardedDataParallel(model, use_orig_params=front == "originals")
    with pytest.raises(ValueError, match=r"^no dtype fits torch.float32$") as caught:
        model(torch.ones(2, 6))
    assert vars(caught.value) == {}
