"""However a model is sharded, its checkpoint has the elements of the unsharded model, each once."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.models import CASES
from bed.runs import assert_same, build_model, full, kept_unsharded, zeroed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from unshard import CheckpointError, MixedPrecision, checkpoint, fully_shard
from unshard import FullyShardedDataParallel as FSDP
from unshard.checkpoint.manifest import read_manifest
from unshard.torch_private import strided_shard

KINDS = [
    *("fully_shard", "fully_shard mixed", "fully_shard tied", "fully_shard columns convolution", "fully_shard offload"),
    *("flat", "flat tied", "flat convolution", "flat channels convolution", "originals", "originals convolution"),
    *(
        "originals tied",
        "originals channels convolution",
        "originals mixed",
        "flat offload",
        "legacy",
        "flat whole channels convolution",
        "originals whole channels convolution",
    ),
]
MESHES = [
    "fully_shard hybrid",
    "fully_shard tp",
    "fully_shard tp10",
    "flat hybrid",
    "originals hybrid",
    "flat tp",
    "originals tp",
]
quiet = pytest.mark.filterwarnings("ignore")


def check(kind: str, path: Path) -> None:
    """From the sharded model into an unsharded one and back; the values are those that were never sharded."""
    model, case = build_model(kind)
    expected = case.build().state_dict()
    folder = checkpoint.save(path, model=model, step=1)
    plain = zeroed(case.build())
    checkpoint.load(folder, model=plain)
    assert_same(dict(plain.state_dict()), dict(expected))
    manifest = read_manifest(folder)
    stored = sum(each.box.numel for entry in manifest.tensors.values() for each in entry.boxes)
    assert stored == sum(
        value.numel() for value in {id(v): v for v in case.build().state_dict(keep_vars=True).values()}.values()
    )
    folder = checkpoint.save(path, model=plain, step=2)
    checkpoint.load(folder, model=zeroed(model))
    folder = checkpoint.save(path, model=model, step=3)
    checkpoint.load(folder, model=zeroed(plain))
    assert_same(dict(plain.state_dict()), dict(expected))


@quiet
@pytest.mark.parametrize("kind", KINDS)
@world(2, 3)
def test_shardings(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)


@quiet
@pytest.mark.parametrize("kind", MESHES)
@world(4)
def test_meshes(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)


@quiet
@world(2)
def test_written_once_and_evenly(tmp_path: Path) -> None:
    """Replicas share the work."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    fully_shard(model, mesh=mesh)
    folder = checkpoint.save(tmp_path, model=model, step=1)
    assert [file.nbytes for file in read_manifest(folder).files] == [2 * 64 * 64 * 4] * 2


@quiet
@world(2)
def test_ranks_read_their_own_bytes(tmp_path: Path) -> None:
    """Also of a file that another number of ranks wrote: here one rank did, and two read."""
    model = nn.Linear(2048, 4096, bias=False)
    nbytes = model.weight.nbytes
    folder = checkpoint.save(tmp_path, model=model, step=1)
    assert [file.nbytes for file in read_manifest(folder).files] == [nbytes]
    read, preadv = 0, os.preadv

    def counted(*arguments: Any) -> int:
        nonlocal read
        count = preadv(*arguments)
        read += count
        return count

    os.preadv = counted
    try:
        checkpoint.load(folder, model=fully_shard(nn.Linear(2048, 4096, bias=False)))
    finally:
        os.preadv = preadv
    assert read == nbytes // 2


@quiet
@pytest.mark.parametrize(("rows", "columns"), [(8, 4), (7, 5), (1, 3)])
@world(4)
def test_dtensors_of_any_placements(rows: int, columns: int, tmp_path: Path) -> None:
    """Parameters that are DTensors without fully_shard; compared with what was distributed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    placements = [
        *[(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Replicate())],
        *[(Replicate(), Shard(0)), (Replicate(), Replicate()), (strided_shard(0, 2), Shard(0))],
    ]
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    for number, each in enumerate(placements):
        if rows != 8 and number == 6:
            continue  # torch itself does not distribute it
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(whole, mesh, each))
        assert isinstance(model.weight, DTensor)
        plain = nn.Module()
        plain.weight = nn.Parameter(torch.zeros(rows, columns))
        folder = checkpoint.save(tmp_path / f"{rows}_{number}", model=model, step=0)
        checkpoint.load(folder, model=plain)
        assert torch.equal(plain.weight, whole), (rows, each)
        checkpoint.load(folder, model=zeroed(model))
        assert torch.equal(full(model.weight), whole), (rows, each)


@quiet
@pytest.mark.parametrize(
    ("one", "other"),
    [("fully_shard", "originals"), ("originals", "fully_shard"), ("fully_shard", "flat"), ("flat", "originals mixed")],
)
@world(3)
def test_from_one_front_end_into_the_other(one: str, other: str, tmp_path: Path) -> None:
    """Parameters and optimizer state: a third model, loaded from the second, has what the first had."""
    states = []
    folder = None
    for number, kind in enumerate((one, other, one)):
        model, case = build_model(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if folder is None:
            for step in range(2):
                case.loss(model, case.batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            checkpoint.load(folder, model=zeroed(model), optimizer=optimizer)
        folder = checkpoint.save(tmp_path, model=model, optimizer=optimizer, step=number)
        plain = case.build()
        stepper = torch.optim.AdamW(plain.parameters())
        checkpoint.load(folder, model=plain, optimizer=stepper)
        states.append((dict(plain.state_dict()), stepper.state_dict()))
    assert len(states[0][1]["state"]) == len(states[0][0]) and states[0][1]["state"][0]["exp_avg"].abs().sum() > 0
    assert_same(states[1], states[0])
    assert_same(states[2], states[0])


@quiet
@world(3)
def test_counters_of_ranks_without_elements(tmp_path: Path) -> None:
    """A counter that was loaded on a rank without elements of the parameter is never advanced, and not saved."""
    model, case = build_model("originals")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        case.loss(model, case.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            state = FSDP.optim_state_dict(model, optimizer)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    stale: list[Any] = [None] * 3
    dist.all_gather_object(stale, any(entry["step"] == 2 for entry in optimizer.state.values()))
    assert any(stale)
    folder = checkpoint.save(tmp_path, model=model, optimizer=optimizer, step=3)
    plain = case.build()
    stepper = torch.optim.AdamW(plain.parameters())
    checkpoint.load(folder, model=plain, optimizer=stepper)
    assert {float(entry["step"]) for entry in stepper.state.values()} == {3.0}


@quiet
@world(2)
def test_ignored_parameters_and_buffers(tmp_path: Path) -> None:
    """Plain tensors are those of rank 0, on all ranks, after loading."""

    def build(value: float) -> nn.Module:
        model = CASES[1].build()
        model.register_buffer("mean", torch.full((3,), value))
        fully_shard(model, ignored_params={model.gain})
        with torch.no_grad():
            model.gain.fill_(value)
        return model

    model = build(float(dist.get_rank() + 5))
    checkpoint.save(tmp_path, model=model, step=1)
    loaded = build(0.0)
    checkpoint.load(tmp_path, model=loaded)
    assert loaded.gain.tolist() == [[5.0] * 3] and loaded.mean.tolist() == [5.0] * 3


@quiet
@world(2)
def test_buffers_that_the_wrapper_has_cast(tmp_path: Path) -> None:
    """They are saved in their original dtype, as in state dicts, and load before and after the first forward."""

    def build() -> nn.Module:
        model = CASES[1].build()
        model.register_buffer("mean", torch.full((3,), 0.1))
        return FSDP(model, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16), use_orig_params=True)

    model = build()
    model(torch.randn(2, 7))
    assert model.mean.dtype == torch.bfloat16
    folder = checkpoint.save(tmp_path, model=model, step=1)
    assert read_manifest(folder).tensors["model/mean"].dtype == "float32"
    for ran in (False, True):
        other = build()
        if ran:
            other(torch.randn(2, 7))
        checkpoint.load(folder, model=zeroed(other))
        assert other.mean.dtype == (torch.bfloat16 if ran else torch.float32)
        assert torch.equal(other.mean.float(), torch.full((3,), 0.1).bfloat16().float())


@quiet
@world(2)
def test_models_that_differ_between_ranks(tmp_path: Path) -> None:
    """In a pipeline each rank has modules of its own; tensors of one name must be the same everywhere."""
    rank = dist.get_rank()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 3)})
    optimizer = torch.optim.AdamW(model.parameters())
    model[f"stage{rank}"](torch.ones(2)).sum().backward()
    optimizer.step()
    folder = checkpoint.save(tmp_path, model=model, optimizer=optimizer, step=1)
    both = nn.ModuleDict({f"stage{each}": nn.Linear(2, 3) for each in range(2)})
    stepper = torch.optim.AdamW(both.parameters())
    checkpoint.load(folder, model=both, optimizer=stepper)
    assert torch.equal(both[f"stage{rank}"].weight, model[f"stage{rank}"].weight)
    assert len(stepper.state) == 4
    other = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 3)})
    checkpoint.load(folder, model=other, optimizer=torch.optim.AdamW(other.parameters()))
    assert torch.equal(other[f"stage{rank}"].weight, model[f"stage{rank}"].weight)
    with pytest.raises(CheckpointError, match=r"'model/bias' differs between ranks"):
        checkpoint.save(tmp_path, model=nn.Linear(2, 3 + rank), step=2)
    with pytest.raises(CheckpointError, match=r"The ranks save different steps: \[5, 6\]"):
        checkpoint.save(tmp_path, model=both, step=5 + rank)


@quiet
@pytest.mark.parametrize("kind", ["fully_shard", "flat", "originals"])
@world(2)
def test_units_that_are_kept_unsharded(kind: str, tmp_path: Path) -> None:
    """Saving and loading take the shards, and the next forward has what was loaded."""
    x, model, other = kept_unsharded(kind)
    expected = model(x)
    checkpoint.save(tmp_path, model=model, step=1)
    assert not torch.equal(other(x), expected)
    checkpoint.load(tmp_path, model=other)
    assert torch.equal(other(x), expected)


@quiet
@world(2)
def test_names_without_what_wrappers_add(tmp_path: Path) -> None:
    """Activation checkpointing and `torch.compile` change no name."""
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3)), torch.compile(nn.Linear(3, 3)))
    for layer in wrapped:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    folder = checkpoint.save(tmp_path, model=wrapped, optimizer=optimizer, step=1)
    assert sorted(read_manifest(folder).tensors) == sorted(f"model/{name}" for name in plain.state_dict())
    checkpoint.load(folder, model=plain, optimizer=torch.optim.AdamW(plain.parameters()))


@quiet
@world(2)
def test_data_parallel_models(tmp_path: Path) -> None:
    """`DistributedDataParallel` changes no name either."""

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    replicated, sharded = nn.parallel.DistributedDataParallel(build()), build()
    for layer in sharded:
        fully_shard(layer)
    optimizers = [torch.optim.SGD(each.parameters(), momentum=0.9) for each in (replicated, sharded)]
    checkpoint.save(tmp_path / "a", model=replicated, optimizer=optimizers[0], step=1)
    checkpoint.load(tmp_path / "a", model=sharded, optimizer=optimizers[1])
    expected = {name: value.clone() for name, value in replicated.module.state_dict().items()}
    assert_same({name: full(value) for name, value in sharded.state_dict().items()}, expected)
    checkpoint.save(tmp_path / "b", model=sharded, optimizer=optimizers[1], step=1)
    with torch.no_grad():
        for each in replicated.parameters():
            each.zero_()
    checkpoint.load(tmp_path / "b", model=replicated, optimizer=optimizers[0])
    assert_same(dict(replicated.module.state_dict()), expected)
    assert_same(checkpoint.full_state_dict(replicated, rank0_only=False), expected)
    assert checkpoint.load_full_state_dict(replicated, expected).missing == []


@quiet
@world(1)
def test_in_the_middle_of_a_step(tmp_path: Path) -> None:
    model = CASES[1].build()
    fully_shard(model)
    failed = []

    def look(*unused: object) -> None:
        try:
            checkpoint.save(tmp_path, model=model, step=1)
        except CheckpointError as error:
            failed.append(str(error))

    model.layers[0].register_forward_hook(look)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.randn(2, 7))
    assert len(failed) == 1 and "Save and load checkpoints between steps" in failed[0]
