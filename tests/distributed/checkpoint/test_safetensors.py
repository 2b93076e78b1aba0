"""Safetensors files from checkpoints of sharded models, and loaded into sharded models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.models import CASES
from bed.runs import assert_same, build_model, kept_unsharded, zeroed
from torch import nn

from unshard import CheckpointError, checkpoint, fully_shard
from unshard.checkpoint import safetensors as loader

package = pytest.importorskip("safetensors.torch")
quiet = pytest.mark.filterwarnings("ignore")
KINDS = [
    *("plain", "fully_shard", "fully_shard tied", "fully_shard columns convolution", "fully_shard offload"),
    *("flat", "flat tied", "flat channels convolution", "originals", "originals tied", "originals convolution"),
]
MESHES = ["fully_shard hybrid", "fully_shard tp", "fully_shard tp10", "flat tp", "originals tp", "originals hybrid"]


def check(kind: str, path: Path) -> None:
    """Export what is sharded, and load it into the same sharded model; the values are those never sharded."""
    model, case = build_model(kind)
    expected = dict(case.build().state_dict())
    folder = checkpoint.save(path / "saved", model=model, step=1)
    if dist.get_rank() == 0:
        checkpoint.export(folder, path / "out", max_file_size=200)
    dist.barrier()
    found: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for file in sorted((path / "out").glob("*.safetensors")):
        found.update(package.load_file(file))
        with package.safe_open(file, "pt") as opened:
            aliases |= {alias: name for alias, name in opened.metadata().items() if alias != "format"}
    assert_same({**found, **{alias: found[name] for alias, name in aliases.items()}}, expected)
    checkpoint.load_safetensors(zeroed(model), path / "out")
    plain = zeroed(case.build())
    checkpoint.load(checkpoint.save(path / "saved", model=model, step=2), model=plain)
    assert_same(dict(plain.state_dict()), expected)
    checkpoint.load_safetensors(zeroed(plain), path / "out")
    assert_same(dict(plain.state_dict()), expected)


@quiet
@pytest.mark.parametrize("kind", KINDS)
@world(1, 2, 3, slow=(1, 2))
def test_shardings(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)


@quiet
@pytest.mark.parametrize("kind", MESHES)
@world(4)
def test_meshes(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)


@quiet
@world(2)
def test_checkpoints_of_other_shardings_are_equal(tmp_path: Path) -> None:
    folders = []
    for kind in ("fully_shard", "flat", "plain"):
        torch.manual_seed(5)
        folders.append(checkpoint.save(tmp_path / kind, model=build_model(kind)[0], step=1))
    for other in folders[1:]:
        found = checkpoint.diff(folders[0], other)
        assert not (found.only_a or found.only_b or found.other or found.tensors) and found.same > 3


@quiet
@world(2)
def test_from_meta(tmp_path: Path) -> None:
    """Each rank has the pages of its own elements in memory, and no others."""
    path = tmp_path / "model.safetensors"
    weight = torch.arange(4096 * 4096, dtype=torch.float32).view(4096, 4096)
    if dist.get_rank() == 0:
        package.save_file({"weight": weight, "bias": torch.arange(4096.0)}, path)
    dist.barrier()
    with torch.device("meta"):
        model = nn.Linear(4096, 4096)
    fully_shard(model).to_empty(device="cpu")
    mapped, before, copy_pieces = [], file_pages(), loader.copy_pieces

    def measured(*arguments: Any) -> None:
        copy_pieces(*arguments)
        mapped.append(file_pages() - before)

    loader.copy_pieces = measured
    try:
        assert checkpoint.load_safetensors(model, path) == ([], [], [])
    finally:
        loader.copy_pieces = copy_pieces
    mine = weight.nbytes // 2
    assert mine * 0.95 < max(mapped) < mine + 4 * 2**20, (mapped, mine)
    assert torch.equal(model.weight.full_tensor(), weight)
    assert torch.equal(model.bias.full_tensor(), torch.arange(4096.0))


@quiet
@world(1, 2)
def test_tied_from_meta(tmp_path: Path) -> None:
    """Sharded parameters that are tied stay so in `to_empty`, in one unit and in two."""
    value = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    path = tmp_path / f"{dist.get_rank()}.safetensors"
    package.save_file({"0.weight": value}, path)
    for units in ([0, 1], []):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        model[1].weight = model[0].weight
        for each in units:
            fully_shard(model[each])
        fully_shard(model).to_empty(device="cpu")
        checkpoint.load_safetensors(model, path)
        assert torch.equal(model[0].weight.full_tensor(), value)
        assert torch.equal(model[1].weight.full_tensor(), value)


@quiet
@pytest.mark.parametrize("kind", ["fully_shard", "flat", "originals"])
@world(2)
def test_units_that_are_kept_unsharded(kind: str, tmp_path: Path) -> None:
    """The next forward has what was loaded."""
    x, model, other = kept_unsharded(kind)
    expected = model(x)
    package.save_file(CASES[1].build().state_dict(), tmp_path / f"{dist.get_rank()}.safetensors")
    assert not torch.equal(other(x), expected)
    checkpoint.load_safetensors(other, tmp_path / f"{dist.get_rank()}.safetensors")
    assert torch.equal(other(x), expected)


def file_pages() -> int:
    """Bytes of files that are mapped into this process and in memory."""
    found = re.search(r"RssFile:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@quiet
@world(2)
def test_refused_on_all_ranks(tmp_path: Path) -> None:
    """If the files do not fit on one rank, no rank changes anything."""
    rank = dist.get_rank()
    package.save_file({"weight": torch.ones(4, 4 + rank)}, tmp_path / f"{rank}.safetensors")
    package.save_file({"weight": torch.ones(4, 4)}, tmp_path / f"same{rank}.safetensors")
    model = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="The ranks read different files"):
        checkpoint.load_safetensors(model, tmp_path / f"{rank}.safetensors")
    with pytest.raises(CheckpointError, match=r"On rank 1: .*cannot be opened"):
        checkpoint.load_safetensors(model, tmp_path / f"same{rank * 7}.safetensors")
    assert torch.equal(model.weight, before)
    stages = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2, bias=False)})
    whole = {f"stage{each}.weight": torch.full((2, 2), float(each)) for each in range(2)}
    if rank == 0:
        package.save_file(whole, tmp_path / "stages.safetensors")
    dist.barrier()
    checkpoint.load_safetensors(stages, tmp_path / "stages.safetensors")
    assert torch.equal(stages[f"stage{rank}"].weight, whole[f"stage{rank}.weight"])
