"""Full optimizer state by parameter name: of ordinary, flat and host optimizers, into any other of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.late import late_host
from bed.models import CASES
from bed.recorders import LiveBytes
from bed.runs import Run, assert_same, build_model
from bed.world import mostly_slow
from bed.wrapped import wrap, wrap_case
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from unshard import CheckpointError, StateDictType, checkpoint, fully_shard
from unshard import FullyShardedDataParallel as FSDP

KINDS = [
    *("fully_shard", "fully_shard,flat", "fully_shard,sgd", "fully_shard tied", "fully_shard mixed,flat"),
    *("fully_shard columns convolution", "fully_shard offload", "fully_shard host,flat", "flat", "flat,sgd"),
    *("flat tied", "flat channels convolution", "originals", "originals tied", "originals offload", "legacy"),
]
MESHES = ["fully_shard hybrid", "fully_shard tp", "fully_shard tp10,flat", "flat hybrid", "originals tp", "flat tp"]
FEW = ["fully_shard", "fully_shard,flat", "flat", "originals"]
quiet = pytest.mark.filterwarnings("ignore")


def get(run: Run, **options: Any) -> dict[str, Any]:
    """With the names of groups in one order: flat parameters and others do not have the same."""
    state = checkpoint.full_optimizer_state_dict(run.model, run.optimizer, **options)
    for group in state.get("param_groups", ()):
        group["params"].sort()
    return state


def put(run: Run, state: Any) -> None:
    checkpoint.load_full_optimizer_state_dict(run.model, run.optimizer, on_rank0(state))


def on_rank0(value: Any) -> Any:
    return value if dist.get_rank() == 0 else None


def check(kind: str) -> None:
    with late_host() if "host" in kind else nullcontext():
        run = Run(kind)
        run.train(range(2))
        gathered = run.state()
        expected = {"state": gathered["state"], "param_groups": gathered["groups"]}
        found = get(run)
        assert_same(found, expected if dist.get_rank() == 0 else {})
        assert len(expected["state"]) > 2
        for stepped in (False, True):
            other = Run(kind, lr=0.7)
            if stepped:
                other.train(range(5, 6))
            checkpoint.load_full_state_dict(other.model, checkpoint.full_state_dict(run.model))
            put(other, found)
            assert_same(get(other, rank0_only=False, cpu_offload=False), expected)
        other.scheduler.load_state_dict(run.scheduler.state_dict())
        run.train(range(2, 3))
        other.train(range(2, 3))
        assert_same(get(other), get(run))


@quiet
@pytest.mark.parametrize("kind", mostly_slow(KINDS, [*FEW, "fully_shard host,flat"]))
@world(2)
def test_optimizers(kind: str) -> None:
    check(kind)


@quiet
@pytest.mark.parametrize("kind", mostly_slow(KINDS, FEW))
@world(1, 3, slow=(1,))
def test_other_numbers_of_ranks(kind: str) -> None:
    check(kind)


@quiet
@pytest.mark.parametrize("kind", mostly_slow(MESHES, MESHES[:1]))
@world(4)
def test_meshes(kind: str) -> None:
    check(kind)


@quiet
@pytest.mark.parametrize(
    "kinds",
    [("fully_shard", "flat", "plain", "originals"), ("originals", "fully_shard,flat", "flat", "plain", "legacy")],
)
@world(3)
def test_from_one_kind_into_the_next(kinds: tuple[str, ...]) -> None:
    state = None
    for kind in kinds:
        run = Run(kind)
        run.optimizer = torch.optim.AdamW(run.model.parameters(), 0.1, amsgrad=True)
        if state is None:
            run.train(range(2))
        else:
            put(run, state)
        found = get(run)
        if state is not None:
            assert_same(found, state)
        state = found
    assert dist.get_rank() or len(state["state"]) == 9  # type: ignore[index]


class Adding(nn.Module):
    """A parameter without dimensions, one that gets no gradient, a frozen one, and one that is ignored."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.rare = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3))
        self.frozen, self.ignored = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2, 2))
        self.body = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x @ self.ignored + self.frozen) * self.scale


def adding(kind: str) -> nn.Module:
    model = Adding()
    if kind == "plain":
        return model
    if kind == "fully_shard":
        return fully_shard(model, ignored_params={model.ignored, model.scale})
    return wrap(model, [], use_orig_params=True, ignored_states=[model.ignored, model.scale])


@quiet
@pytest.mark.parametrize("kind", ["plain", "fully_shard", "originals"])
@world(1, 2)
def test_scalars_and_parameters_without_state(kind: str) -> None:
    model, plain = adding(kind), Adding()
    optimizers = []
    for each in (model, plain):
        optimizers.append(torch.optim.AdamW(each.parameters(), 0.1))
        for _ in range(2):
            each(torch.ones(1, 2)).sum().backward()
            optimizers[-1].step()
            optimizers[-1].zero_grad()
    full = checkpoint.full_optimizer_state_dict(model, optimizers[0], rank0_only=False)
    expected = get_optimizer_state_dict(plain, optimizers[1], options=StateDictOptions(full_state_dict=True))
    assert sorted(full["state"]) == sorted(expected["state"]) and full["state"]["scale"]["exp_avg"].shape == ()
    assert "rare" in full["param_groups"][0]["params"] and "rare" not in full["state"]
    assert_same(full["state"], expected["state"])
    other = adding(kind)
    fresh = torch.optim.AdamW(other.parameters(), 0.7)
    checkpoint.load_full_optimizer_state_dict(other, fresh, on_rank0(full))
    assert_same(checkpoint.full_optimizer_state_dict(other, fresh, rank0_only=False), full)


@quiet
@world(2)
def test_state_that_is_not_for_each_element() -> None:
    """Of parameters that are not sharded: every rank has all of it. Others are refused."""
    model = nn.Linear(3, 5)
    optimizer = torch.optim.Adafactor(model.parameters(), 0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert state["state"]["weight"]["row_var"].shape != (5, 3)
    fresh = torch.optim.Adafactor(model.parameters(), 0.7)
    checkpoint.load_full_optimizer_state_dict(model, fresh, on_rank0(state))
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert fresh.state[model.weight]["row_var"].data_ptr() != state["state"]["weight"]["row_var"].data_ptr()
    sharded = fully_shard(nn.Linear(3, 5))
    with pytest.raises(CheckpointError, match=r"row_var/weight has the shape"):
        checkpoint.load_full_optimizer_state_dict(
            sharded, torch.optim.Adafactor(sharded.parameters(), 0.1), on_rank0(state)
        )


@quiet
@pytest.mark.parametrize("kind", ["fully_shard", "fully_shard,flat", "originals", "flat"])
@world(2)
def test_one_tensor_at_a_time(kind: str) -> None:
    layers, width = 12, 256
    model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    if kind.startswith("fully_shard"):
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = wrap(model, [*model], use_orig_params=kind == "originals")
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    one, rank, slack = width * width * 4, dist.get_rank(), 128 * 1024
    checkpoint.full_optimizer_state_dict(model, optimizer)
    with LiveBytes() as live:
        state = checkpoint.full_optimizer_state_dict(model, optimizer)
    kept = 0 if rank else 2 * layers * one
    assert kept <= live.now and kept <= live.peak < kept + slack, live.peak
    with LiveBytes() as live:
        checkpoint.load_full_optimizer_state_dict(model, optimizer, state)
    assert live.peak < 3 * one + slack, live.peak
    assert (live.peak >= one) == bool(rank)


@quiet
@pytest.mark.parametrize("kind", ["fully_shard", "flat", "originals", "fully_shard,flat"])
@world(1, 3, slow=(1,))
def test_what_does_not_fit_is_refused_on_all_ranks(kind: str) -> None:
    run = Run(kind)
    run.train(range(1))
    before = get(run, rank0_only=False)
    shape = {name: {**values} for name, values in before["state"].items()}
    shape["gain"]["exp_avg"] = torch.ones(3, 1)
    groups = before["param_groups"]
    fewer = [{**group, "params": [each for each in group["params"] if each != "gain"]} for group in groups]
    more = [*groups[:-1], {**groups[-1], "params": [*groups[-1]["params"], "other"]}]
    numbers = [{**group, "params": [*range(len(group["params"]))]} for group in groups]
    sgd = [{"params": group["params"], "lr": 0.1, "momentum": 0.9, "dampening": 0} for group in groups]
    without = {name: values for name, values in before["state"].items() if name != "gain"}
    for state, given, text in (
        (shape, groups, r"optimizer/exp_avg/gain has the shape \(3, 1\), expected \(1, 3\)"),
        (without, fewer, r"1 entry .* missing in the state dict: .*optimizer state of gain"),
        (before["state"], more, r"1 entry .* unexpected here: .*optimizer state of other"),
        (before["state"], numbers, r"parameters by number .*full_optimizer_state_dict"),
        (before["state"], sgd, r"another optimizer, with options that this .* lacks: dampening, momentum"),
        (before["state"], fewer, r"state of 'gain', which is in none of its param_groups"),
    ):
        with pytest.raises(CheckpointError, match=text) as caught:
            put(run, {"state": state, "param_groups": given})
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(caught.value))
        assert len(set(texts)) == 1
    with pytest.raises(CheckpointError, match=r"Rank 0 has to pass a dict with `state` and `param_groups`.*NoneType"):
        put(run, None)
    assert_same(get(run, rank0_only=False), before)


@quiet
@world(2)
def test_as_the_wrapper_and_torch_have_it() -> None:
    """Names of tied parameters too: what any of them returns is loaded."""
    model = wrap_case(CASES[2], use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    CASES[2].loss(model, CASES[2].batch(0)).backward()
    optimizer.step()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        of_wrapper = FSDP.optim_state_dict(model, optimizer)
    mine = checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert_same(mine["state"], of_wrapper["state"])
    sharded, _ = build_model("fully_shard tied")
    fresh = torch.optim.AdamW(sharded.parameters(), 0.7)
    checkpoint.load_full_optimizer_state_dict(sharded, fresh, on_rank0(of_wrapper))
    assert_same(checkpoint.full_optimizer_state_dict(sharded, fresh, rank0_only=False)["state"], mine["state"])
    of_torch = get_optimizer_state_dict(sharded, fresh, options=StateDictOptions(full_state_dict=True))
    assert_same(of_torch["state"], mine["state"])
    again = torch.optim.AdamW(model.parameters(), 0.7)
    renamed = {"head.weight" if name == "tokens.weight" else name: each for name, each in of_torch["state"].items()}
    groups = [
        {**group, "params": ["head.weight" if name == "tokens.weight" else name for name in group["params"]]}
        for group in of_torch["param_groups"]
    ]
    checkpoint.load_full_optimizer_state_dict(model, again, on_rank0({"state": renamed, "param_groups": groups}))
    assert_same(checkpoint.full_optimizer_state_dict(model, again, rank0_only=False)["state"], mine["state"])


@quiet
@world(2)
def test_models_that_differ_between_ranks() -> None:
    rank = dist.get_rank()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2, bias=False)})
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model[f"stage{rank}"](torch.ones(1, 2)).sum().mul(rank + 1).backward()
    optimizer.step()
    state = checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert sorted(state["state"]) == sorted(state["param_groups"][0]["params"]) == ["stage0.weight", "stage1.weight"]
    fresh = torch.optim.AdamW(model.parameters(), 0.7)
    checkpoint.load_full_optimizer_state_dict(model, fresh, on_rank0(state))
    assert_same(fresh.state_dict(), optimizer.state_dict())


@quiet
@world(3)
def test_a_rank_that_cannot() -> None:
    """The others do not wait for it."""
    run, other = Run("fully_shard"), Run("fully_shard")
    optimizer = other.optimizer if dist.get_rank() == 1 else run.optimizer
    with pytest.raises(
        CheckpointError, match=r"Gathering .* failed\. On rank 1: 9 of the parameters .* not in the model"
    ):
        checkpoint.full_optimizer_state_dict(run.model, optimizer)
    run.train(range(1))
    state = checkpoint.full_optimizer_state_dict(run.model, run.optimizer)
    with pytest.raises(CheckpointError, match=r"Loading .* failed\. On rank 1: 9 of the parameters"):
        checkpoint.load_full_optimizer_state_dict(run.model, optimizer, state)
