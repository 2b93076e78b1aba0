"""Optimizer state of wrapped models where optimizers differ: by name, without groups, of other sizes, unmanaged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from bed import world
from bed.wrapped import wrap
from torch import nn
from torch.distributed.optim import _NamedOptimizer

from unshard import FullyShardedDataParallel as FSDP
from unshard import OptimStateKeyType, StateDictType

quiet = pytest.mark.filterwarnings("ignore")
flat_or_originals = pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])


class Partly(nn.Module):
    """One unit, and parameters that no unit has, which may be others on each rank."""

    def __init__(self, originals: bool, own: str = "plain"):
        super().__init__()
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.own = own
        setattr(self, own, nn.Linear(4, 4))
        self.dense = wrap(dense, [], use_orig_params=originals)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(getattr(self, self.own)(x))


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model.zero_grad()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def restored(found: dict[str, Any], before: dict[str, Any]) -> bool:
    """Parameters without elements on this rank had no state, and have a loaded one."""
    states = {key: found["state"].get(key) for key in before["state"]}
    return bool(states) and same(states, before["state"]) and same(found["param_groups"], before["param_groups"])


@quiet
@flat_or_originals
@world(1, 2)
def test_f1_99_state_dicts_without_groups(originals: bool) -> None:
    model = Partly(originals)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    saved = FSDP.optim_state_dict(model, optimizer, {"state": optimizer.state_dict()["state"]})
    assert saved.keys() == {"state"} and same(saved["state"], FSDP.optim_state_dict(model, optimizer)["state"])
    step(model, optimizer)
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    assert loaded.keys() == {"state"}
    optimizer.load_state_dict({**loaded, "param_groups": before["param_groups"]})
    assert restored(optimizer.state_dict(), before)
    with pytest.raises(ValueError, match="must be what"):
        FSDP.optim_state_dict_to_load(model, optimizer, {"param_groups": []})


@quiet
@flat_or_originals
@world(1, 2)
def test_f1_100_an_optimizer_that_keeps_state_by_name(originals: bool) -> None:
    """The same state as of one that numbers its parameters, with parameters that other ranks do not have."""
    found = []
    for named in (False, True):
        model = Partly(originals, f"sparse{dist.get_rank()}")
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
        if named:
            groups = [{"params": list(model.parameters())[::-1]}]
            optimizer = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, groups, model, lr=0.1)
        for each in model.parameters():  # also state of parameters without elements, which it wants to load
            each.grad = torch.zeros_like(each)
        optimizer.step()
        step(model, optimizer)
        found.append(copy.deepcopy(FSDP.optim_state_dict(model, optimizer)))
    assert found[0]["state"].keys() == found[1]["state"].keys() and same(found[0]["state"], found[1]["state"])
    assert f"sparse{dist.get_rank()}.weight" in found[1]["state"]
    for _ in range(2):
        step(model, optimizer)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found[1], is_named_optimizer=True))
    assert same(FSDP.optim_state_dict(model, optimizer), found[1])


@quiet
@flat_or_originals
@world(2)
def test_f1_99_optimizers_of_other_parameters_are_refused_on_all_ranks(originals: bool) -> None:
    """Ranks without them do not take part in the gathers; nobody waits."""
    model = wrap(nn.Sequential(first := nn.Linear(4, 4), nn.Linear(4, 4)), [first], use_orig_params=originals)
    parameters = list(model.parameters())
    mine = parameters if dist.get_rank() == 0 else parameters[1:]
    optimizer = torch.optim.Adam(mine, lr=0.1)
    step(model, optimizer)
    for call in (FSDP.optim_state_dict, FSDP.full_optim_state_dict, FSDP.sharded_optim_state_dict):
        with pytest.raises(RuntimeError, match="Rank 1 of the group has elements of"):
            call(model, optimizer)
    optimizer = torch.optim.Adam(parameters[1:], lr=0.1)
    step(model, optimizer)
    assert FSDP.optim_state_dict(model, optimizer)["state"], "of some parameters on all ranks"


@quiet
@flat_or_originals
@world(2, 3)
def test_f1_99_states_of_other_sizes(originals: bool) -> None:
    """Saved whole if they are the same on all ranks, and refused to be loaded; numbers, strings and None travel."""
    model = Partly(originals)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    extra = {"rows": torch.arange(3.0), "name": "a", "nothing": None, "number": 2.5}
    for each in model.parameters():
        if each.numel():
            optimizer.state[each].update(copy.deepcopy(extra))
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            saved = FSDP.optim_state_dict(model, optimizer)
            assert all(same({key: state[key] for key in extra}, extra) for state in saved["state"].values())
            with pytest.raises(ValueError, match="'rows' of shape"):
                FSDP.optim_state_dict_to_load(model, optimizer, saved)
            for state in saved["state"].values():
                del state["rows"]
            loaded = FSDP.optim_state_dict_to_load(model, optimizer, saved)
            assert all(state["nothing"] is None and state["name"] == "a" for state in loaded["state"].values())
    if originals:
        return  # no parameter has elements on two ranks here
    for each in model.dense.parameters():
        if each.numel():
            optimizer.state[each]["rows"] += dist.get_rank()
    with pytest.raises(RuntimeError, match="nor the same on all ranks"):
        FSDP.optim_state_dict(model, optimizer)


@quiet
@flat_or_originals
@pytest.mark.parametrize("groups", [1, 2])
@world(2)
def test_f1_101_unmanaged_parameters_in_the_older_methods(originals: bool, groups: int) -> None:
    """In a group with others, or of their own."""
    model, plain = Partly(originals), nn.Module()
    torch.manual_seed(0)
    plain.dense, plain.plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), nn.Linear(4, 4)

    def adam(of: Any) -> torch.optim.Optimizer:
        parts = [{"params": list(of.dense.parameters())}, {"params": list(of.plain.parameters()), "lr": 0.2}]
        return torch.optim.Adam(parts if groups == 2 else parts[0]["params"] + parts[1]["params"], lr=0.1)

    optimizer, other = adam(model), adam(plain)
    step(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert full["state"].keys() == dict(plain.named_parameters()).keys() and len(full["param_groups"]) == groups
    step(model, optimizer)
    for sharded in (
        FSDP.shard_full_optim_state_dict(full, model, optim=optimizer),
        FSDP.scatter_full_optim_state_dict(full if dist.get_rank() == 0 else None, model, optim=optimizer),
        FSDP.flatten_sharded_optim_state_dict(full, model, optimizer),
    ):
        optimizer.load_state_dict(sharded)
        assert restored(optimizer.state_dict(), before)
    other.load_state_dict(FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=other))
    names = FSDP.rekey_optim_state_dict(other.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=other)
    assert same(names["state"], full["state"])


@pytest.mark.parametrize("groups", [1, 2])
@flat_or_originals
@quiet
@world(2)
def test_unmanaged_parameters_that_were_not_saved(originals: bool, groups: int) -> None:
    """As in PyTorch: the older methods leave their numbers out, for the program to add them and their state."""
    found = []
    for api in (FSDP, torch_fsdp.FullyShardedDataParallel):

        def model_of(extra: bool, api: Any = api) -> tuple[nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(0)
            model = nn.Module()
            if extra:
                model.unmanaged = nn.Parameter(torch.ones(5, 5))
            for name in ("a", "b"):
                unit = api(nn.Linear(4, 4), use_orig_params=originals, device_id=torch.device("cpu"))
                model.register_module(name, unit)
            cut = 1 + (2 if originals else 1) * 1
            parameters = list(model.parameters())
            parts = [parameters] if groups == 1 else [parameters[: cut - (not extra)], parameters[cut - (not extra) :]]
            return model, torch.optim.Adam([{"params": part} for part in parts], lr=0.1)

        saved_model, saved = model_of(extra=False)
        saved_model.b(saved_model.a(torch.ones(2, 4))).sum().backward()
        saved.step()
        full = api.full_optim_state_dict(saved_model, saved, rank0_only=False)
        model, optimizer = model_of(extra=True)
        given = [{"params": group["params"]} for group in optimizer.param_groups]
        results = [
            api.shard_full_optim_state_dict(full, model, optim=optimizer),
            api.shard_full_optim_state_dict(full, model, optim_input=given),
            api.shard_full_optim_state_dict(full, model),
            api.scatter_full_optim_state_dict(full, model, optim=optimizer),
            api.flatten_sharded_optim_state_dict(api.sharded_optim_state_dict(saved_model, saved), model, optimizer),
        ]
        found.append([result["param_groups"] for result in results])
        for result in results:
            assert 0 not in result["state"] and 0 not in result["param_groups"][0]["params"]
            result["param_groups"][0]["params"].insert(0, 0)
            result["state"][0] = {name: torch.zeros(5, 5) for name in ("exp_avg", "exp_avg_sq")}
            result["state"][0]["step"] = torch.tensor(1.0)
            optimizer.load_state_dict(result)
            assert optimizer.state_dict()["state"][1]["exp_avg"].any() or dist.get_rank()
    assert found[0] == found[1]
