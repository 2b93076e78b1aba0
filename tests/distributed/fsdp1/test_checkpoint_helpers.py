"""PyTorch's helpers for checkpoints and wrapped models, without the drop-in: right, or refused beforehand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bed import world
from bed.models import CASES
from bed.wrapped import wrap_case
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from unshard import FullyShardedDataParallel as FSDP
from unshard import StateDictType
from unshard.composable import fully_shard as legacy

FULL = StateDictOptions(full_state_dict=True)
kinds = pytest.mark.parametrize("kind", ["flat", "originals", "legacy"])
quiet = pytest.mark.filterwarnings("ignore")


class Named(nn.Sequential):
    """Tells the helpers about its names itself."""

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"asked": str(self[0].in_features)}


def blank(cls: type[nn.Sequential]) -> nn.Sequential:
    return cls(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 4)), nn.Linear(4, 2))


def build(kind: str, seed: int = 0, cls: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    torch.manual_seed(seed)
    model = blank(cls)
    if kind == "legacy":
        legacy(model[1])
        return legacy(model)
    model[1] = FSDP(model[1], use_orig_params=kind == "originals")
    return FSDP(model, use_orig_params=kind == "originals")


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def empty(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.1)


def refused(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(NotImplementedError) as caught:
        call(*args, **kwargs)
    for part in (f".{call.__name__} ", "optim_state_dict_to_load", "SHARDED_STATE_DICT", "unshard.dropin.install()"):
        assert part in str(caught.value), part


@kinds
@quiet
@world(1, 2, 3)
def test_optimizer_state_is_refused(kind: str) -> None:
    """By all four, whatever the optimizer has done before, and before it is changed."""
    model = build(kind)
    fresh = empty(model.parameters())
    loaded = empty(model.parameters())
    loaded.load_state_dict(stepped(model).state_dict())
    states: dict[str, Any] = {"state": {"0.weight": {}}, "param_groups": []}
    both: dict[str, Any] = {"model_state_dict": {"0.weight": 1}, "optim_state_dict": states}
    for optimizer in (fresh, loaded, [stepped(model), fresh]):
        for options in (None, FULL, StateDictOptions(cpu_offload=True)):
            refused(get_state_dict, model, optimizer, options=options)
            refused(get_optimizer_state_dict, model, optimizer, options=options)
            refused(set_optimizer_state_dict, model, optimizer, states, options=options)
            refused(set_state_dict, model, optimizer, **both, options=options)
    assert not fresh.state


@kinds
@quiet
@world(2)
def test_a_wrapped_module_inside_another(kind: str) -> None:
    """Optimizers of what is not wrapped are taken, by the names that they had."""
    model = nn.Sequential(build(kind), nn.Linear(2, 2))
    refused(get_optimizer_state_dict, model, empty(model.parameters()))
    refused(get_optimizer_state_dict, model, empty(model[0].parameters()))
    states = get_optimizer_state_dict(model, stepped_alone(model[1]))["state"]
    assert {name: state["exp_avg"].shape for name, state in states.items()} == {"1.weight": (2, 2), "1.bias": (2,)}


def stepped_alone(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = empty(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


@kinds
@quiet
@world(1, 2, 3)
def test_model_state(kind: str) -> None:
    """Out: a full one. In: the same, and refused where the helpers would look for other names."""
    torch.manual_seed(0)
    expected = blank(nn.Sequential).state_dict()
    model = build(kind)
    for state in (get_model_state_dict(model), get_model_state_dict(model, options=FULL), get_state_dict(model, ())[0]):
        assert sorted(state) == sorted(expected)
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
    other = build(kind, 1)
    set_model_state_dict(other, dict(expected))
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    other = build(kind, 1)
    for strict in (True, False):
        options = StateDictOptions(full_state_dict=True, strict=strict)
        if kind == "legacy":
            set_model_state_dict(other, dict(expected), options=options)
            assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
        else:
            with pytest.raises(NotImplementedError, match=r"set_model_state_dict .* model\.load_state_dict"):
                set_model_state_dict(other, dict(expected), options=options)


@kinds
@quiet
@world(2)
def test_modules_keep_what_they_tell_the_helpers(kind: str) -> None:
    assert build(kind, cls=Named)._fqn_modifiers() == {"asked": "3"}
    assert build(kind)._fqn_modifiers() == {}


@kinds
@quiet
@world(2, 3)
def test_the_optimizer_itself_in_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """`dcp.save` would ask it for its state dict. A user who asks may save it for each rank."""
    model = build(kind)
    optimizer = stepped(model)
    for call in (dcp.save, dcp.load):
        with pytest.raises(NotImplementedError) as caught:
            call({"optimizer": optimizer}, checkpoint_id=str(tmp_path / "checkpoint"))
        for part in ("asks this Adam", "torch.distributed.checkpoint.", "optim_state_dict_to_load"):
            assert part in str(caught.value), part
    assert not (tmp_path / "checkpoint").exists()
    assert optimizer.state_dict()["state"]


@quiet
@world(2)
def test_a_legacy_call_on_a_module_without_children() -> None:
    """The helpers ask it for nothing; the optimizer refuses then."""
    model = legacy(nn.Linear(3, 3))
    with pytest.raises(NotImplementedError, match=r"asks this Adam .*optim_state_dict_to_load"):
        get_optimizer_state_dict(model, stepped(model))
    with pytest.raises(NotImplementedError, match=r"asks this Adam .*optim_state_dict_to_load"):
        get_optimizer_state_dict(model, empty(model.parameters()))


@quiet
@world(1, 2)
def test_whole_state_in_a_checkpoint(tmp_path: Path) -> None:
    """Nothing is cut with one rank: the optimizer itself can be saved."""
    if torch.distributed.get_world_size() == 1:
        optimizer = stepped(build("originals"))
        before = {key: dict(state) for key, state in optimizer.state_dict()["state"].items()}
        dcp.save({"optimizer": optimizer}, checkpoint_id=str(tmp_path / "checkpoint"))
        other = stepped(build("originals", 1))
        dcp.load({"optimizer": other}, checkpoint_id=str(tmp_path / "checkpoint"))
        for key, state in other.state_dict()["state"].items():
            assert all(torch.equal(value, before[key][name]) for name, value in state.items())
    else:
        plain = nn.Linear(3, 3)
        build("flat")
        dcp.save({"optimizer": stepped(plain)}, checkpoint_id=str(tmp_path / "checkpoint"))


@world(2)
def test_the_deprecation_names_what_works() -> None:
    model = wrap_case(CASES[1])
    with pytest.warns(
        FutureWarning, match=r"After unshard\.dropin\.install\(\), use.*optim_state_dict_to_load"
    ) as seen:
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            pass
    assert {each.filename for each in seen} == {__file__}  # the line of the program, not of contextlib
