"""State dicts of wrapped models: full, sharded, local (contract C8)."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bed import world
from bed.models import CASES
from bed.wrapped import full_parameters, wrap, wrap_case
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from unshard import (
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from unshard import FullyShardedDataParallel as FSDP

S = ShardingStrategy
UNSHARDED, LOCAL, SHARDED = StateDictType
quiet = pytest.mark.filterwarnings("ignore::FutureWarning")


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert type(found[name]) is torch.Tensor, name
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda each: each.name)
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@quiet
@world(1, 2, 3)
def test_f1_90_f1_96_full_ones_are_those_of_the_unwrapped_model(strategy: S, originals: bool) -> None:
    """Names, order, shapes, values; shared parameters under all names; and back into a wrapped or unwrapped model."""
    for case in CASES[:4]:
        expected = case.build().state_dict()
        model = wrap_case(case, sharding_strategy=strategy, use_orig_params=originals)
        found = model.state_dict()
        same(found, expected)
        case.loss(model, case.batch(0)).backward()  # clones: what follows does not change them
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        same(found, expected)
        assert not torch.equal(next(iter(model.state_dict().values())), next(iter(expected.values())))
        assert str(model.load_state_dict(expected)) == "<All keys matched successfully>"
        same(model.state_dict(), expected)
        unwrapped = case.build()
        for parameter in unwrapped.parameters():
            nn.init.zeros_(parameter)
        unwrapped.load_state_dict(found)
        same(unwrapped.state_dict(), expected)
        case.loss(model, case.batch(0)).backward()


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@quiet
@world(2)
def test_f1_96_keys_are_reported_by_clean_names(originals: bool) -> None:
    case = CASES[1]
    model = wrap_case(case, use_orig_params=originals)
    values = model.state_dict()
    values["layers.9.weight"] = values.pop("layers.1.weight")
    result = model.load_state_dict(values, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["layers.1.weight"], ["layers.9.weight"])
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "layers.1.weight"'):
        model.load_state_dict(values)
    values = model.state_dict()
    values["gain"] = torch.ones(7)
    with pytest.raises(RuntimeError, match="size mismatch for"):
        model.load_state_dict(values)
    case.loss(model, case.batch(0)).backward()  # and nothing is left summoned


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@quiet
@world(2, 3)
def test_f1_91_rank0_only(originals: bool) -> None:
    case = CASES[1]
    model = wrap_case(case, use_orig_params=originals)
    with FSDP.state_dict_type(model, UNSHARDED, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        found = model.state_dict()
    if dist.get_rank() == 0:
        same(found, case.build().state_dict())
    else:
        assert found == {}


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@quiet
@world(2, 3)
def test_f1_92_sharded(originals: bool) -> None:
    """ShardedTensors, or DTensors with a mesh; and back."""
    case, size = CASES[1], dist.get_world_size()
    expected = case.build().state_dict()
    for mesh in (None, init_device_mesh("cpu", (size,))):
        model = wrap_case(case, use_orig_params=originals, device_mesh=mesh)
        with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
            assert FSDP.get_state_dict_type(model).state_dict_config._use_dtensor == (mesh is not None)
            found = model.state_dict()
            assert list(found) == list(expected)
            for name, tensor in found.items():
                if mesh is not None:
                    assert isinstance(tensor, DTensor)
                    torch.testing.assert_close(tensor.full_tensor(), expected[name], rtol=0, atol=0)
                else:
                    assert isinstance(tensor, ShardedTensor) and tensor.size() == expected[name].shape
                    rows = -(-expected[name].shape[0] // size)
                    mine = expected[name][dist.get_rank() * rows : (dist.get_rank() + 1) * rows]
                    local = [shard.tensor for shard in tensor.local_shards()]
                    assert torch.equal(torch.cat(local) if local else mine, mine)
            torch.optim.SGD(model.parameters(), lr=1.0)
            with FSDP.summon_full_params(model), torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(found)
        same(model.state_dict(), expected)


@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda each: each.name)
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@quiet
@world(2, 3)
def test_f1_93_local(originals: bool, strategy: S) -> None:
    for case in CASES[:4]:
        model = wrap_case(case, use_orig_params=originals, sharding_strategy=strategy)
        before, buffers = full_parameters(model), {name for name, _ in model.named_buffers()}
        with FSDP.state_dict_type(model, LOCAL, LocalStateDictConfig()):
            found = model.state_dict()
            flats = [each for name, each in found.items() if name.rpartition(".")[2] == "_flat_param"]
            assert (
                len(found) - len(buffers)
                == len(flats)
                == len([each for each in FSDP.fsdp_modules(model) if each.params])
            )
            for unit in FSDP.fsdp_modules(model):
                for parameter in unit.params:
                    tensor = next(each for each in flats if each.size() == parameter._unpadded_unsharded_size)
                    assert isinstance(tensor, ShardedTensor)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            case.loss(model, case.batch(0))  # unsharded, where units are kept for backward
            assert str(model.load_state_dict(found)) == "<All keys matched successfully>"
        for name, tensor in full_parameters(model).items():
            assert torch.equal(tensor, before[name])


@quiet
@world(2)
def test_f1_93_local_is_refused_with_a_mesh() -> None:
    case = CASES[1]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = wrap_case(case, device_mesh=mesh)
    with FSDP.state_dict_type(model, LOCAL), pytest.raises(RuntimeError, match="device_mesh"):
        model.state_dict()


@quiet
@world(2)
def test_f1_94_no_shard_has_full_ones_only() -> None:
    case = CASES[1]
    model = wrap_case(case, sharding_strategy=S.NO_SHARD)
    for kind in (SHARDED, LOCAL):
        with FSDP.state_dict_type(model, kind), pytest.warns(UserWarning, match="NO_SHARD"):
            same(model.state_dict(), case.build().state_dict())


@quiet
@world(2)
def test_f1_88_f1_89_settings() -> None:
    case = CASES[1]
    model = wrap_case(case)
    with pytest.warns(FutureWarning, match="deprecated"):
        before = FSDP.set_state_dict_type(model, SHARDED)
    assert before.state_dict_type is UNSHARDED
    assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED
    with FSDP.state_dict_type(model, LOCAL):
        assert FSDP.get_state_dict_type(model).state_dict_type is LOCAL
    assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED
    for kind, config in ((UNSHARDED, ShardedStateDictConfig()), (SHARDED, FullStateDictConfig())):
        with pytest.raises(RuntimeError, match="takes a"):
            FSDP.set_state_dict_type(model, kind, config)
    FSDP.set_state_dict_type(model.layers[0], UNSHARDED)
    with pytest.raises(AssertionError, match="disagree"):
        FSDP.get_state_dict_type(model)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("table", torch.arange(4, dtype=torch.float64) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.table.to(x.dtype)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@quiet
@world(2)
def test_f1_95_buffers_are_saved_in_their_own_dtypes(originals: bool) -> None:
    config = MixedPrecision(torch.float16, torch.float16, torch.float16)
    module = Buffered()
    expected = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    module.inner = FSDP(module.inner, mixed_precision=config, use_orig_params=originals)
    model = FSDP(module, mixed_precision=config, use_orig_params=originals)
    model(torch.randn(3, 4)).sum().backward()
    assert module.table.dtype == torch.float16
    for kind in (UNSHARDED, SHARDED):
        with FSDP.state_dict_type(model, kind):
            found = model.state_dict()
        assert {name: tensor.dtype for name, tensor in found.items()} == expected
    assert module.table.dtype == torch.float16
    model.load_state_dict(model.state_dict())
    assert module.table.dtype == torch.float16


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@quiet
@world(2)
def test_f1_98_wrappers_of_checkpointing_leave_no_names(originals: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    expected = plain.state_dict()
    for outside in (True, False):
        module = copy.deepcopy(plain)
        inner = module[1]
        if outside:
            module[1] = checkpoint_wrapper(FSDP(inner, use_orig_params=originals))
        else:
            module[1] = FSDP(checkpoint_wrapper(inner), use_orig_params=originals)
            assert module[1].module is inner, "F1-43"
        model = FSDP(module, use_orig_params=originals)
        same(model.state_dict(), expected)
        model.load_state_dict(expected)
        model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("mesh", [False, True], ids=["groups", "mesh"])
@quiet
@world(2)
def test_checkpoints_of_torch(mesh: bool, tmp_path: Any) -> None:
    """Sharded ones are written and read by `torch.distributed.checkpoint`."""
    case = CASES[1]
    options = {"device_mesh": init_device_mesh("cpu", (2,))} if mesh else {}
    for number, originals in enumerate((False, True)):
        model = wrap_case(case, use_orig_params=originals, **options)
        expected = model.state_dict()
        with FSDP.state_dict_type(model, SHARDED), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(model.state_dict(), checkpoint_id=tmp_path / str(number))
            with FSDP.summon_full_params(model), torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            into = model.state_dict()
            dcp.load(into, checkpoint_id=tmp_path / str(number))
            model.load_state_dict(into)
        same(model.state_dict(), expected)


@quiet
@world(4)
def test_hybrid_and_offloaded() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    case = CASES[1]
    for originals, kind in itertools.product((False, True), (UNSHARDED, SHARDED)):
        model = wrap_case(case, use_orig_params=originals, device_mesh=mesh, sharding_strategy=S.HYBRID_SHARD)
        with FSDP.state_dict_type(model, kind):
            model.load_state_dict(model.state_dict())
        same(model.state_dict(), case.build().state_dict())


@pytest.mark.parametrize("kind", [SHARDED, LOCAL], ids=lambda each: each.name)
@quiet
@world(2)
def test_pickling_shards_names_the_call_for_full_ones(kind: StateDictType) -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 4), FSDP(nn.Linear(4, 2))))
    assert pickle.dumps(model.state_dict())  # full
    FSDP.set_state_dict_type(model, kind)
    state = model.state_dict()
    with pytest.warns(
        UserWarning, match=r"only its own shards.*state_dict_type\(model, StateDictType.FULL_STATE_DICT"
    ) as one:
        torch.save(state, io.BytesIO())
    assert [each.filename for each in one if each.category is UserWarning] == [__file__]


@quiet
@world(2)
def test_shards_of_another_rank_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = FSDP(nn.Linear(3, 4), device_mesh=mesh)
    FSDP.set_state_dict_type(model, SHARDED)
    file = io.BytesIO()
    with pytest.warns(UserWarning, match="only its own shards"):
        torch.save(model.state_dict(), file)
    saved = [file.getvalue()]
    dist.broadcast_object_list(saved)
    loaded = torch.load(io.BytesIO(saved[0]))
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match=r"rank 1 holds the shards of rank 0"):
            model.load_state_dict(loaded)


def _checkpointed(how: str, originals: bool) -> nn.Module:
    """A model of two units, with wrappers of activation checkpointing at a place."""

    def unit(module: nn.Module) -> nn.Module:
        return wrap(module, [], use_orig_params=originals, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))

    torch.manual_seed(0)
    inner, last = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 3)
    inner[1].register_buffer("table", torch.ones(2))
    if how == "modules of a unit":
        inner[0], inner[1] = checkpoint_wrapper(inner[0]), checkpoint_wrapper(inner[1])
        return unit(nn.Sequential(unit(inner), checkpoint_wrapper(last)))
    if how == "outside and inside":
        return unit(nn.Sequential(checkpoint_wrapper(unit(checkpoint_wrapper(checkpoint_wrapper(inner)))), last))
    if how == "offloaded":
        return unit(nn.Sequential(unit(offload_wrapper(inner)), offload_wrapper(last)))
    if how == "around the root":
        return checkpoint_wrapper(unit(nn.Sequential(unit(inner), last)))
    model = unit(nn.Sequential(unit(inner), last))
    kinds: Any = FSDP if how == "units, afterwards" else nn.Linear
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kinds))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_f1_98_state_dicts_with_activation_checkpointing(originals: bool) -> None:
    """Wherever its wrappers are, names are those of the plain model, and what was saved is loaded."""
    plain = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 3))
    plain[0][1].register_buffer("table", torch.ones(2))
    places = ("modules of a unit", "outside and inside", "offloaded", "around the root")
    for how in (*places, "modules, afterwards", "units, afterwards"):
        model = _checkpointed(how, originals)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        for kind in StateDictType:
            fresh = _checkpointed(how, originals)
            for each in fresh.parameters():
                each.data.zero_()
            with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(fresh, kind):
                saved = model.state_dict()
                if kind is not StateDictType.LOCAL_STATE_DICT:
                    assert saved.keys() == plain.state_dict().keys(), how
                    states = FSDP.optim_state_dict(model, optimizer)
                    assert states["state"].keys() == dict(plain.named_parameters()).keys(), how
                    other = torch.optim.Adam(fresh.parameters())
                    other.load_state_dict(FSDP.optim_state_dict_to_load(fresh, other, states))
                    loaded, original = other.state_dict()["state"], optimizer.state_dict()["state"]
                    assert all(torch.equal(loaded[n]["exp_avg"], original[n]["exp_avg"]) for n in original), how
                assert saved["0.1.table"].dtype == torch.float32, how
                fresh.load_state_dict(saved)
            assert all(map(torch.equal, fresh.parameters(), model.parameters())), (how, kind)
