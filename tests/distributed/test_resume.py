"""A run that is resumed from a checkpoint, with any number of ranks, has bitwise the state of the run that went on."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bed import pool
from bed.models import CASES, shard
from bed.runs import assert_same
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
from torch.distributed.tensor import DTensor

import unshard
from unshard import FullyShardedDataParallel as FSDP
from unshard import StateDictType, dropin, fully_shard
from unshard.composable import fully_shard as legacy

CASE = CASES[1]  # uneven: some ranks have no elements of some parameters
OPTIONS = {
    "sharded": {},
    "on the host": {"cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True, "cpu_offload": True},
    "broadcast": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
}
WRAPPED = ("flat", "originals", "legacy")  # without the drop-in torch's helpers refuse them
DROPIN = " with the drop-in"
QUICK = {("fully_shard", "sharded", 2, 3), ("fully_shard", "broadcast", 3, 1), ("originals", "sharded", 2, 3)}
QUICK |= {("flat optimizer", "flattened", 4, 2), (f"originals{DROPIN}", "sharded", 2, 3)}


def build(kind: str, lr: float) -> tuple[nn.Module, Any]:
    """The second group has parameters of its own and another learning rate."""
    if kind in ("flat", "originals"):
        model: Any = wrap_case(CASE, use_orig_params=kind == "originals")
    else:
        model = CASE.build()
        for unit in CASE.units(model):
            (legacy if kind == "legacy" else fully_shard)(unit)
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": lr / 2}, {"params": others}] if others else [{"params": [first]}]
    optimizer = torch.optim.AdamW(groups, lr, weight_decay=0.1)
    return model, unshard.optim.flat(optimizer) if kind == "flat optimizer" else optimizer


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        CASE.loss(model, shard(CASE.batch(step), dist.get_rank(), dist.get_world_size())).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def state_of(kind: str, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """All of it, in plain tensors by the names of parameters: gathered here, or by the wrapper's own method."""
    if kind in WRAPPED:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {
        names[each]: {key: whole(value) for key, value in entry.items()} for each, entry in optimizer.state.items()
    }
    groups = [{**group, "params": [names[each] for each in group["params"]]} for group in optimizer.param_groups]
    weights = {name: whole(each.detach()) for name, each in model.named_parameters()}
    return {"model": weights, "optimizer": {"state": state, "param_groups": groups}}


def get(kind: str, way: str, model: nn.Module, optimizer: Any, for_loading: bool = False) -> dict[str, Any]:
    if kind in WRAPPED:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = FSDP.optim_state_dict(model, optimizer, for_loading=for_loading)
            return {"model": model.state_dict(), "optimizer": state}
    options = StateDictOptions(**{key: value for key, value in OPTIONS[way].items() if key != "broadcast_from_rank0"})
    if way == "on the host":
        weights = get_model_state_dict(model, options=options)
        return {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    weights, states = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": states}


def put(kind: str, way: str, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
    if kind in WRAPPED:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
        return
    options = StateDictOptions(**OPTIONS[way])
    if way in ("on the host", "broadcast"):  # set_state_dict takes an empty dict for "not this one", on that rank alone
        set_model_state_dict(model, state["model"], options=options)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    else:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **parts, options=options)


def save(kind: str, way: str, folder: str) -> None:
    with dropin.stand_in() if kind.endswith(DROPIN) else nullcontext():
        _save(kind, kind.removesuffix(DROPIN), way, folder)


def resume(kind: str, way: str, folder: str) -> None:
    with dropin.stand_in() if kind.endswith(DROPIN) else nullcontext():
        _resume(kind, kind.removesuffix(DROPIN), way, folder)


def _save(through: str, kind: str, way: str, folder: str) -> None:
    model, optimizer = build(kind, 0.1)
    train(model, optimizer, range(3))
    state, at = get(through, way, model, optimizer), Path(folder)
    if "full_state_dict" in OPTIONS[way]:
        if dist.get_rank() == 0:
            torch.save(state, at / "full.pt")
    else:
        dcp.save(state, checkpoint_id=str(at / "checkpoint"))
    expected = state_of(kind, model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, at / "expected.pt")


def _resume(through: str, kind: str, way: str, folder: str) -> None:
    at = Path(folder)
    expected = torch.load(at / "expected.pt", weights_only=False)
    for stepped in (False, True):
        model, optimizer = build(kind, 0.7)
        if stepped:
            train(model, optimizer, range(5, 6))
        if "full_state_dict" in OPTIONS[way]:
            here = way != "broadcast" or dist.get_rank() == 0
            empty: dict[str, Any] = {"model": {}, "optimizer": {}}
            state = torch.load(at / "full.pt", weights_only=False) if here else empty
        else:
            state = get(through, way, model, optimizer, for_loading=True)
            dcp.load(state, checkpoint_id=str(at / "checkpoint"))
        put(through, way, model, optimizer, state)
        assert_same(state_of(kind, model, optimizer), expected)
        train(model, optimizer, range(3, 4))


WAYS = {
    **dict.fromkeys(("fully_shard", "flat optimizer", f"fully_shard{DROPIN}"), tuple(OPTIONS)),
    **dict.fromkeys(WRAPPED, ("sharded",)),
    **dict.fromkeys([f"{kind}{DROPIN}" for kind in WRAPPED], ("sharded", "full")),
}
ROWS = [
    pytest.param(kind, way, *ranks, marks=() if (kind, way, *ranks) in QUICK else pytest.mark.slow)
    for kind, ways in WAYS.items()
    for way in ways
    for ranks in ((2, 2), (2, 3), (4, 2), (3, 1))
]


@pytest.mark.parametrize(("kind", "way", "before", "after"), ROWS)
def test_resumed_state_is_that_of_the_run_that_went_on(
    kind: str, way: str, before: int, after: int, tmp_path: Path
) -> None:
    for body, ranks in ((save, before), (resume, after)):
        arguments = {"kind": kind, "way": way, "folder": str(tmp_path)}
        pool.shared().run((body.__module__, body.__qualname__), ranks, arguments, filters=["ignore"])
