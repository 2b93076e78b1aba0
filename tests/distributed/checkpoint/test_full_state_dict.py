"""Full state dicts are those of the unsharded model, however the model is sharded; and load into any other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.models import CASES
from bed.recorders import Collectives, LiveBytes
from bed.runs import assert_same, build_model, full, kept_unsharded, zeroed
from bed.world import mostly_slow
from bed.wrapped import wrap, wrap_case
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from unshard import CheckpointError, MixedPrecision, StateDictType, checkpoint, fully_shard
from unshard import FullyShardedDataParallel as FSDP

KINDS = [
    *("plain", "fully_shard", "fully_shard mixed", "fully_shard tied", "fully_shard columns convolution"),
    *("fully_shard offload", "flat", "flat tied", "flat channels convolution", "originals", "originals tied"),
    *("originals channels convolution", "originals mixed", "flat offload", "legacy", "flat whole channels convolution"),
]
MESHES = [
    *("fully_shard hybrid", "fully_shard tp", "fully_shard tp10", "flat hybrid", "originals hybrid", "flat tp"),
    *("originals tp", "plain tp"),
]
FEW = ["plain", "fully_shard", "flat", "originals"]
quiet = pytest.mark.filterwarnings("ignore")


def on_rank0(value: Any) -> Any:
    return value if dist.get_rank() == 0 else None


def check(kind: str) -> None:
    model, case = build_model(kind)
    expected = case.build().state_dict()
    state = checkpoint.full_state_dict(model)
    if dist.get_rank():
        assert state == {}
    else:
        assert list(state) == list(expected)
        assert_same(state, dict(expected))
    assert checkpoint.load_full_state_dict(zeroed(model), on_rank0(expected)).missing == []
    assert_same(checkpoint.full_state_dict(model, rank0_only=False, cpu_offload=False), dict(expected))
    case.loss(model, case.batch(0)).backward()  # with what was loaded


@quiet
@pytest.mark.parametrize("kind", KINDS)
@world(3)
def test_shardings(kind: str) -> None:
    check(kind)


@quiet
@pytest.mark.parametrize("kind", mostly_slow(KINDS, FEW))
@world(1, 2)
def test_other_numbers_of_ranks(kind: str) -> None:
    check(kind)


@quiet
@pytest.mark.parametrize("kind", MESHES)
@world(4)
def test_meshes(kind: str) -> None:
    check(kind)


class Everything(nn.Module):
    """Frozen and ignored parameters, scalars, buffers of all kinds, extra state, and tied weights."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(5, 3), nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.ignored = nn.Parameter(torch.full((2, 3), value))
        self.head = nn.Linear(3, 5)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.tensor([True, False, value > 1]))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("phase", torch.tensor([1 + 2j, value]))
        self.register_buffer("scratch", torch.full((2,), value), persistent=False)
        self.note = value
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += value

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.body(self.tokens(tokens)) * self.ignored.sum(0)))


def everything(kind: str, value: float) -> nn.Module:
    torch.manual_seed(1)
    model = Everything(value)
    if kind == "fully_shard":
        fully_shard(model.frozen)
        return fully_shard(model, ignored_params={model.ignored})
    if kind == "plain":
        return model
    return wrap(model, [model.frozen], use_orig_params=kind == "originals", ignored_states=[model.ignored])


@quiet
@pytest.mark.parametrize("kind", ["plain", "fully_shard", "flat", "originals"])
@world(1, 2)
def test_everything(kind: str) -> None:
    """Plain tensors and extra state are those of rank 0."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    reference = Everything(2.0)
    expected = dict(reference.state_dict())
    model = everything(kind, 2.0)
    with torch.no_grad():
        for tensor in (model.ignored, model.phase):
            tensor += rank
    state = checkpoint.full_state_dict(model, rank0_only=False)
    assert list(state) == list(expected) and "scratch" not in state and "_extra_state" in state
    assert_same(state, expected)
    assert state["head.weight"] is state["tokens.weight"]
    other = everything(kind, 5.0)
    found = checkpoint.load_full_state_dict(other, on_rank0(state))
    assert found == ([], [], ["scratch"])
    assert_same(checkpoint.full_state_dict(other, rank0_only=False), expected)
    (inner,) = (module for module in other.modules() if isinstance(module, Everything))
    assert inner.note == 2.0 and torch.equal(inner.ignored, reference.ignored)
    plain = Everything(7.0)
    plain.load_state_dict(state)
    assert_same(dict(plain.state_dict()), expected)


@quiet
@pytest.mark.parametrize("kind", ["fully_shard", "flat", "originals"])
@world(2)
def test_one_tensor_at_a_time(kind: str) -> None:
    """Besides the state dict that rank 0 has, no rank ever has more than one full tensor and a shard of it."""
    layers, width = 12, 256
    model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    plain = copy.deepcopy(model)
    if kind == "fully_shard":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = wrap(model, [*model], use_orig_params=kind == "originals")
    one, rank = width * width * 4, dist.get_rank()
    source = on_rank0({name: value * 2 for name, value in plain.state_dict().items()})
    checkpoint.full_state_dict(model)
    with LiveBytes() as live:
        state = checkpoint.full_state_dict(model)
    kept, slack = 0 if rank else layers * one, 64 * 1024
    assert len(state) == (0 if rank else layers)
    assert kept <= live.now and kept <= live.peak < kept + slack, live.peak  # nothing is copied on its way
    del state
    with LiveBytes() as live, Collectives() as seen:
        checkpoint.load_full_state_dict(model, source)
    assert live.peak < 3 * one + slack, live.peak  # each of Gloo's two threads may release a tensor late
    assert (live.peak >= one) == bool(rank)
    sent = [call for call in seen.calls if call.op == "c10d.broadcast_" and call.inputs == ((torch.uint8, one),)]
    assert len(sent) == layers
    expected = {name: value * 2 for name, value in plain.state_dict().items()}
    assert_same(checkpoint.full_state_dict(model, rank0_only=False), expected)


@quiet
@pytest.mark.parametrize("kind", ["plain", "fully_shard", "flat", "originals"])
@world(1, 3, slow=(1,))
def test_what_does_not_fit_is_refused_on_all_ranks(kind: str) -> None:
    """One error, with everything in it, and nothing is changed."""
    model, case = build_model(kind)
    expected = dict(case.build().state_dict())
    wrong = {name: value + 1 for name, value in expected.items()}
    del wrong["out.bias"]
    wrong |= {"gain": torch.ones(3, 1), "layers.0.bias": torch.ones(13, dtype=torch.int32), "more": torch.ones(2)}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_full_state_dict(model, on_rank0(wrong))
    for part in (
        *("The state dict does not fit.", "1 entry (4 bytes) missing", "out.bias", "1 entry (8 bytes)", "more"),
        *("gain has the shape (3, 1), expected (1, 3)", "layers.0.bias has the dtype torch.int32, expected"),
        "Nothing was changed.",
    ):
        assert part in str(caught.value), str(caught.value)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    with pytest.raises(CheckpointError, match="Rank 0 must pass the full state dict, got NoneType"):
        checkpoint.load_full_state_dict(model)
    with pytest.raises(CheckpointError, match="'gain' is a str"):
        checkpoint.load_full_state_dict(model, on_rank0({**expected, "gain": "0.1"}))
    assert_same(checkpoint.full_state_dict(model, rank0_only=False), expected)
    part = {"out.weight": expected["out.weight"] * 3, "more": torch.ones(2)}
    found = checkpoint.load_full_state_dict(model, on_rank0(part), strict=False)
    assert found.unexpected == ["more"] and found.missing == sorted(expected.keys() - part.keys())
    assert_same(
        checkpoint.full_state_dict(model, rank0_only=False), {**expected, "out.weight": expected["out.weight"] * 3}
    )


@quiet
@world(2)
def test_dtypes() -> None:
    """Floating-point tensors are converted; buffers that the wrapper has cast have their own dtypes."""
    model = fully_shard(nn.Linear(3, 3))
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    checkpoint.load_full_state_dict(model, on_rank0({"weight": weight, "bias": torch.arange(3.0).double()}))
    assert torch.equal(full(model.weight), weight.float()) and full(model.bias).tolist() == [0, 1, 2]
    groups, rank = [dist.new_group([each]) for each in range(2)], dist.get_rank()
    for group in (None, groups[rank]):  # also a module that only rank 1 has, and sends
        module = CASES[1].build()
        module.register_buffer("mean", torch.full((3,), 0.1))
        wrapped = FSDP(module, group, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
        wrapped(torch.randn(2, 7))
        assert wrapped.mean.dtype == torch.bfloat16
        stages = nn.ModuleDict({"all" if group is None else f"stage{rank}": wrapped})
        state = checkpoint.full_state_dict(stages, rank0_only=False)
        means = [value for name, value in state.items() if name.endswith("mean")]
        assert [each.dtype for each in means] == [torch.float32] * (1 if group is None else 2)
        checkpoint.load_full_state_dict(zeroed(stages), on_rank0(state))
        assert torch.equal(wrapped.mean, torch.full((3,), 0.1).bfloat16())


@quiet
@world(2)
def test_from_meta() -> None:
    with torch.device("meta"):
        model = fully_shard(nn.Linear(4, 4))
    reference = nn.Linear(4, 4)
    for sync in (reference.weight, reference.bias):
        dist.broadcast(sync.detach(), 0)
    with pytest.raises(CheckpointError, match=r"'weight' is on the meta device.*model\.to_empty"):
        checkpoint.load_full_state_dict(model, on_rank0(reference.state_dict()))
    model.to_empty(device="cpu")
    checkpoint.load_full_state_dict(model, on_rank0(reference.state_dict()))
    assert torch.equal(full(model.weight), reference.weight)
    assert torch.equal(model(torch.ones(1, 4)), reference(torch.ones(1, 4)))


@quiet
@pytest.mark.parametrize("kind", ["fully_shard", "flat", "originals"])
@world(2)
def test_units_that_are_kept_unsharded(kind: str) -> None:
    """The next forward has what was loaded."""
    x, model, other = kept_unsharded(kind)
    expected = model(x)
    assert not torch.equal(other(x), expected)
    checkpoint.load_full_state_dict(other, checkpoint.full_state_dict(model))
    assert torch.equal(other(x), expected)


@quiet
@world(2)
def test_tied_tensors_under_one_name_or_equal() -> None:
    model, case = build_model("fully_shard tied")
    expected = dict(case.build().state_dict())
    for lost in ("tokens.weight", "head.weight"):
        state = {name: value for name, value in expected.items() if name != lost}
        checkpoint.load_full_state_dict(zeroed(model), on_rank0(state))
        assert_same(checkpoint.full_state_dict(model, rank0_only=False), expected)
    checkpoint.load_full_state_dict(model, on_rank0({name: value.clone() for name, value in expected.items()}))
    different = {**expected, "head.weight": expected["head.weight"] + 1}
    with pytest.raises(CheckpointError, match=r"head\.weight and tokens\.weight are tied here, and are two different"):
        checkpoint.load_full_state_dict(model, on_rank0(different))
    assert_same(checkpoint.full_state_dict(model, rank0_only=False), expected)


@quiet
@world(2)
def test_names_without_what_wrappers_add() -> None:
    """Neither in what is returned nor in what is loaded."""
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), torch.compile(nn.Linear(3, 3)))
    for layer in wrapped:
        fully_shard(layer)
    state = checkpoint.full_state_dict(wrapped, rank0_only=False)
    assert list(state) == list(plain.state_dict())
    plain.load_state_dict(state)
    compiled = {f"_orig_mod.{name}": value + 1 for name, value in state.items()}
    checkpoint.load_full_state_dict(wrapped, on_rank0(compiled))
    assert_same(
        checkpoint.full_state_dict(wrapped, rank0_only=False), {name: value + 1 for name, value in state.items()}
    )


@quiet
@world(3)
def test_models_that_differ_between_ranks() -> None:
    """In a pipeline each rank has modules of its own, and the full state dict has all of them."""
    rank = dist.get_rank()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2, bias=False), "all": nn.Linear(1, 1, bias=False)})
    with torch.no_grad():
        model[f"stage{rank}"].weight.fill_(rank)
        model["all"].weight.fill_(7 + rank)
    state = checkpoint.full_state_dict(model, rank0_only=False)
    assert list(state) == ["stage0.weight", "all.weight", "stage1.weight", "stage2.weight"]
    assert [value.mean().item() for value in state.values()] == [0, 7, 1, 2]
    checkpoint.load_full_state_dict(model, on_rank0({name: value + 1 for name, value in state.items()}))
    assert model[f"stage{rank}"].weight.mean() == rank + 1 and model["all"].weight.item() == 8
    with pytest.raises(CheckpointError, match=r"stage2\.weight"):
        checkpoint.load_full_state_dict(model, on_rank0({k: v for k, v in state.items() if k != "stage2.weight"}))


@quiet
@world(2)
def test_as_the_wrapper_and_torch_have_it() -> None:
    """The same names and tensors as FULL_STATE_DICT; and in the middle of a step it is refused."""
    model = wrap_case(CASES[2], use_orig_params=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        expected = model.state_dict()
    state = checkpoint.full_state_dict(model, rank0_only=False)
    assert list(state) == list(expected)
    assert_same(state, dict(expected))
    with FSDP.summon_full_params(model), pytest.raises(CheckpointError, match="between steps"):
        checkpoint.full_state_dict(model)
