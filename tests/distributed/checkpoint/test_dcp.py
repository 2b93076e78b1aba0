"""`torch.distributed.checkpoint` with both front-ends: a run that is resumed, with any number of ranks and also by the
other front-end, has bitwise the state of the run that went on."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bed import pool, world
from bed.models import CASES, Case, shard
from bed.runs import assert_same
from bed.world import mostly_slow
from bed.wrapped import wrap_case
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import unshard
from unshard import FullyShardedDataParallel as FSDP
from unshard import StateDictType, dropin, fully_shard
from unshard.composable import fully_shard as legacy


class Mixed(nn.Module):
    """Tied and frozen weights, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm, self.frozen = nn.Embedding(29, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 29)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.norm(self.tokens(tokens).mean(1))))[:, None].expand(-1, tokens.shape[1], -1)


UNEVEN = CASES[1]  # some ranks have no elements of some parameters
MIXED = Case("mixed", Mixed, CASES[2].batch, CASES[2].loss, lambda model: [model.frozen, model])
OPTIONS = {
    "sharded": {},
    "on the host": {"cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True, "cpu_offload": True},
    "broadcast": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
}
MESH = "originals on a mesh"  # its state dicts have DTensors, those of other wrappers ShardedTensors
WRAPPED = ("flat", "originals", "legacy", MESH)  # without the drop-in torch's helpers refuse them
DROPIN = " with the drop-in"
QUICK = {("fully_shard", "sharded", 2, 3), ("originals", "sharded", 2, 3), ("flat optimizer", "flattened", 4, 2)}


def build(kind: str, lr: float, case: Case = UNEVEN, groups: int = 2) -> tuple[nn.Module, Any]:
    """The second group has parameters of its own and another learning rate."""
    if kind in ("flat", "originals", MESH):
        mesh = {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))} if kind == MESH else {}
        model: Any = wrap_case(case, use_orig_params=kind != "flat", **mesh)
    else:
        model = case.build()
        for unit in case.units(model):
            (legacy if kind == "legacy" else fully_shard)(unit)
    first, *others = model.parameters()
    params = [{"params": [first], "lr": lr / 2}, {"params": others}] if others else [{"params": [first]}]
    optimizer = torch.optim.AdamW(params if groups == 2 else [first, *others], lr, weight_decay=0.1)
    return model, unshard.optim.flat(optimizer) if kind == "flat optimizer" else optimizer


def train(model: nn.Module, optimizer: Any, steps: range, case: Case = UNEVEN) -> None:
    for step in steps:
        # Torch saves the buffers of any rank, so they have to be equal.
        place = (0, 1) if case is MIXED else (dist.get_rank(), dist.get_world_size())
        case.loss(model, shard(case.batch(step), *place)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def state_of(kind: str, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """All of it, in plain tensors by the names of parameters: gathered here, or by the wrapper's own method."""
    if kind in WRAPPED:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            state = FSDP.optim_state_dict(model, optimizer)
            return {"model": model.state_dict(), "state": state["state"], "groups": in_order(state["param_groups"])}
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {
        names[each]: {key: whole(value) for key, value in entry.items()} for each, entry in optimizer.state.items()
    }
    groups = [{**group, "params": [names[each] for each in group["params"]]} for group in optimizer.param_groups]
    weights = {name: whole(each.detach()).clone() for name, each in model.state_dict().items()}
    return {"model": weights, "state": state, "groups": in_order(groups)}


def in_order(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": sorted(group["params"])} for group in groups]


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


# -- one front-end into the other -------------------------------------------------------------------------------

CASE_OF = {"uneven": UNEVEN, "mixed": MIXED}


def save_as(kind: str, case: str, folder: str, asynchronous: bool) -> None:
    with dropin.stand_in() if kind.endswith(DROPIN) else nullcontext():
        through, kind, of = kind, kind.removesuffix(DROPIN), CASE_OF[case]
        model, optimizer = build(kind, 0.1, of, groups=1)
        train(model, optimizer, range(2), of)
        state = get(through, "sharded", model, optimizer)
        expected = state_of(kind, model, optimizer)
        if dist.get_rank() == 0:
            torch.save(expected, f"{folder}/expected.pt")
        if asynchronous:
            # The default stager of torch cannot copy ShardedTensors; nor can it with PyTorch's FSDP.
            stager = BlockingAsyncStager() if kind in WRAPPED and kind != MESH else None
            # A thread sends, so it needs a process group of its own: the model's units use the default group.
            group = dist.new_group(backend="gloo")
            target = f"{folder}/checkpoint"
            future: Any = dcp.async_save(state, checkpoint_id=target, process_group=group, async_stager=stager)
            train(model, optimizer, range(2, 3), of)  # what is saved was copied
            future.result()
        else:
            dcp.save(state, checkpoint_id=f"{folder}/checkpoint")


def load_as(kind: str, case: str, folder: str) -> None:
    with dropin.stand_in() if kind.endswith(DROPIN) else nullcontext():
        through, kind, of = kind, kind.removesuffix(DROPIN), CASE_OF[case]
        model, optimizer = build(kind, 0.7, of, groups=1)
        state = get(through, "sharded", model, optimizer, for_loading=True)
        dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
        put(through, "sharded", model, optimizer, state)
        expected = torch.load(f"{folder}/expected.pt", weights_only=False)
        assert expected["state"] and all(each["exp_avg"].any() for each in expected["state"].values())
        assert_same(state_of(kind, model, optimizer), expected)
        train(model, optimizer, range(2, 3), of)


def through_dcp(one: str, other: str, before: int, after: int, case: str, folder: Path, asynchronous: bool) -> None:
    arguments: dict[str, Any] = {"case": case, "folder": str(folder)}
    saving = {**arguments, "kind": one, "asynchronous": asynchronous}
    pool.shared().run((__name__, "save_as"), before, saving, filters=["ignore"])
    pool.shared().run((__name__, "load_as"), after, {**arguments, "kind": other}, filters=["ignore"])


ONE_AND_OTHER = [
    *[("fully_shard", "originals"), ("originals", "fully_shard"), ("fully_shard", "flat"), ("flat", "fully_shard")],
    *[("fully_shard", MESH), (MESH, "fully_shard"), ("flat optimizer", "flat"), ("legacy", "flat optimizer")],
    *[(f"originals{DROPIN}", "fully_shard"), ("fully_shard", f"flat{DROPIN}")],
]
RANKS = [(4, 3), (3, 4), (4, 2), (2, 4), (4, 1), (1, 4), (2, 2)]
ONCE = {("fully_shard", "originals", 4, 3), ("flat", "fully_shard", 4, 1), ("fully_shard", MESH, 2, 4)}
CROSSED = [
    pytest.param(*pair, *ranks, marks=() if (*pair, *ranks) in ONCE else pytest.mark.slow)
    for pair in ONE_AND_OTHER
    for ranks in RANKS
]


@pytest.mark.parametrize(("one", "other", "before", "after"), CROSSED)
def test_from_one_front_end_into_the_other(one: str, other: str, before: int, after: int, tmp_path: Path) -> None:
    through_dcp(one, other, before, after, "uneven", tmp_path, asynchronous=False)


@pytest.mark.parametrize(("one", "other"), ONE_AND_OTHER[:6])
def test_tied_and_frozen_parameters_and_buffers(one: str, other: str, tmp_path: Path) -> None:
    through_dcp(one, other, 2, 3, "mixed", tmp_path, asynchronous=False)


@pytest.mark.parametrize(
    "kind", mostly_slow(["fully_shard", "flat", "originals", MESH, "legacy", "flat optimizer"], ["fully_shard", "flat"])
)
def test_async_save(kind: str, tmp_path: Path) -> None:
    """Training goes on meanwhile."""
    through_dcp(kind, kind, 2, 3, "uneven", tmp_path, asynchronous=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(numbers))


@pytest.mark.parametrize("units", ["root", "embedding", "tied later"])
@world(2, 3)
def test_tied_weights_in_safetensors_files(units: str, tmp_path: Path) -> None:
    """Both names are written, also by ranks on the host, where torch copies only what does not fill its storage."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = Tied()
    if units == "tied later":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        fully_shard(model.head)
    if units != "root":
        fully_shard(model.embedding)
    fully_shard(model)
    if units == "tied later":
        model.head.weight = model.embedding.weight
    model(torch.arange(4)).sum().backward()
    state = model.state_dict()
    assert state["head.weight"].to_local().data_ptr() == state["embedding.weight"].to_local().data_ptr()
    writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path), save_distributed=True)
    dcp.save(state, storage_writer=writer)
    (mine,) = tmp_path.glob(f"shard-{dist.get_rank() + 1:05d}-*.safetensors")
    written = safetensors.load_file(mine)
    assert sorted(written) == sorted(state)
    for name, value in state.items():
        assert torch.equal(written[name], value.to_local())
