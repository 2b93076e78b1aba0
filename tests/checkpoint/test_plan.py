"""Plans of many ranks: who writes what is right, and the cost does not grow with tensors times ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bed import loopback
from bed.damage import edit_manifest

from benchmarks import plans, scaling
from benchmarks.bytecodes import counted
from benchmarks.formulas import Job
from unshard import CheckpointError, checkpoint
from unshard.checkpoint.manifest import read_manifest
from unshard.checkpoint.plan import make_plan
from unshard.checkpoint.ranks import pack, unpacked
from unshard.checkpoint.save import RankEntry, Saving
from unshard.checkpoint.stored_boxes import integers, runs_of, values_of
from unshard.state.boxes import Box, first_overlap

Entries = list[RankEntry]


def entries_of(kind: str, units: list[plans.Shapes], world: int, replicas: int = 1) -> Entries:
    sent = [pack(vars(plans.entry_of(kind, units, rank, world, replicas)).values()) for rank in range(world)]
    return [RankEntry(*fields) for fields in unpacked(sent)]


def bytecodes(work: Callable[[], Any]) -> int:
    with counted() as found:
        work()
    return sum(found.bytecodes.values())


@pytest.mark.parametrize("kind", ["plain", "wrapper", "columns"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_box_is_written_once(kind: str, replicas: int) -> None:
    world = 6
    entries = entries_of(kind, plans.llama(2, 24, 6, 40, 50), world, replicas)
    tensors, nbytes = make_plan([entry.tensors for entry in entries])
    held = [{name: each.boxes for names, each in entry.tensors.items() for name in names} for entry in entries]
    assert set(tensors) == {name for each in held for name in each} and len(tensors) > 60
    used: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for name, entry in tensors.items():
        assert sum(each.box.numel for each in entry.boxes) == torch.Size(entry.shape).numel()
        assert first_overlap([each.box for each in entry.boxes]) is None
        for each in entry.boxes:
            assert each.box in held[each.file][name]
            used[each.file].append((each.offset, each.offset + each.box.numel * entry.itemsize))
        assert [box for rank in range(world) for _, _, box in entry.boxes.in_file(rank)] != [] or not len(entry.boxes)
    for rank in range(world):
        ordered = sorted(used[rank])
        assert all(end <= begin < end + 64 for (_, end), (begin, _) in pairwise(ordered))
        assert ordered[0][0] == 0 and ordered[-1][1] <= nbytes[rank] < ordered[-1][1] + 64
    if replicas > 1:  # replicas share the work
        assert max(nbytes) < 2 * min(nbytes)


@pytest.mark.parametrize("kind", ["plain", "wrapper"])
def test_simulated_descriptions_are_those_of_a_save(kind: str) -> None:
    world = 4
    for rank in range(world):
        with loopback.job(world, rank):
            model = scaling.sharded(kind, Job(world, flat=kind == "wrapper"))
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(2, scaling.WIDTH)).sum().backward()
            optimizer.step()
            real = Saving("saving", Path("unused"), 1, None).collect(model, optimizer, {}, None)
        shapes = {name: tuple(each.shape) for name, each in scaling.Model().named_parameters()}
        blocks = [{n: s for n, s in shapes.items() if n.startswith(f"blocks.{k}.")} for k in range(scaling.LAYERS)]
        made = plans.entry_of(kind, [{"head": shapes["head"]}, *blocks], rank, world)

        def by_name(entry: RankEntry) -> dict[str, Any]:
            return {name: each for names, each in entry.tensors.items() for name in names}

        assert by_name(made) == by_name(real)
        assert made.optimizer is not None and real.optimizer is not None
        assert made.optimizer["state"].keys() == real.optimizer["state"].keys()
        assert made.optimizer["groups"][0]["params"].sort() == real.optimizer["groups"][0]["params"].sort()


def test_ranks_that_are_alike_share_objects() -> None:
    entries = entries_of("plain", plans.llama(2, 256, 64, 512, 512), 32)
    assert len({id(entry.optimizer["groups"]) for entry in entries if entry.optimizer}) == 1
    names = {id(names) for entry in entries for names in entry.tensors}
    assert len(names) <= 6  # one list per shape


@pytest.mark.parametrize("kind", ["plain", "columns"])
def test_the_cost_of_a_plan(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the product of tensors and ranks: four times as many ranks cost four times as much, tensors little."""
    monkeypatch.setattr("unshard.checkpoint.values.MANY_RANKS", 0)

    def cost(layers: int, world: int) -> int:
        entries = entries_of(kind, plans.llama(layers, 128, 128, 256, 128), world)
        return bytecodes(lambda: make_plan([entry.tensors for entry in entries]))

    base = cost(1, 8)
    assert base > 1000
    assert cost(1, 32) < 5 * base
    assert cost(4, 8) < 2 * base  # 39 parameters instead of 12


def test_the_size_of_a_manifest() -> None:
    row = {layers: plans.plan_row(plans.llama(layers, 160, 160, 320, 160), "plain", 80) for layers in (1, 4)}
    more = row[4]["tensors"] - row[1]["tensors"]
    assert more == 3 * 9 * 3
    assert (row[4]["manifest_mib"] - row[1]["manifest_mib"]) * 2**20 / more < 300  # bytes; 80 boxes would have 2,500
    assert row[4]["boxes"] - row[1]["boxes"] == 80 * more


@pytest.mark.parametrize("columns", [False, True])
def test_overlaps_are_found_in_one_pass(columns: bool) -> None:
    def boxes(count: int) -> list[Box]:
        cut = [Box((0, number), (count, 1)) for number in range(count)]
        return cut if columns else [Box(box.begin[::-1], box.size[::-1]) for box in cut]

    small, large = (bytecodes(lambda count=count: first_overlap(boxes(count))) for count in (32, 256))
    assert small > 100 and large < 10 * small
    assert first_overlap([*boxes(8), Box((3, 3), (1, 1))]) is not None


# -- the format ---------------------------------------------------------------------------------------------


def test_runs() -> None:
    for values in ([], [5], [0, 0, 0, 64], [0, 1, 2, 9, 9, 9, 4, 3, 2], [3, 1, 4, 1, 5, 9, 2, 6], [2**60, 0]):
        assert values_of(runs_of(integers(values)), len(values)).tolist() == values
    assert len(runs_of(torch.arange(2816))) == 3


BAD_RUNS = [
    *(None, {}, [0], [0, 1], [0, 0, 3.0], [0, 0, True], [0, 0, 2], [0, 0, 4], [0, 0, 0, 0, 0, 3], [-1, 0, 3]),
    *([0, -1, 3], [2**60, 1, 3], [2**61, 0, 3], [0, 2**60, 3], [0, 0, 2**60] * 16 + [0, 0, 3], [0, 0, -(2**60)] * 16),
]


@pytest.mark.parametrize("runs", BAD_RUNS, ids=str)
def test_bad_runs(runs: Any) -> None:
    with pytest.raises(ValueError, match="runs"):
        values_of(runs, 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("unshard.checkpoint.manifest.MOST_INLINE", 0)
    monkeypatch.setattr("unshard.checkpoint.values.MANY_RANKS", 0)
    model = torch.nn.Linear(4, 4)
    return checkpoint.save(tmp_path, model=model, step=7)


def test_a_manifest_with_splits(folder: Path) -> None:
    drawn = torch.rand(3)
    assert checkpoint.load(folder, model=torch.nn.Linear(4, 4)) == 7
    assert torch.equal(torch.rand(3), drawn)  # from the rank's file
    manifest = read_manifest(folder)
    assert list(manifest.tensors) == ["model/bias", "model/weight", "rng/0"]
    assert checkpoint.verify(folder) == folder


def weight(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["tensors"]["model/weight"]["boxes"]


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no such split": lambda m: weight(m).update(split=9),
    "a split that is text": lambda m: weight(m).update(split="0"),
    "another tensor's split": lambda m: weight(m).update(split=m["tensors"]["model/bias"]["boxes"]["split"]),
    "no such file": lambda m: weight(m).update(files=[1, 0, 1]),
    "an offset outside": lambda m: weight(m).update(offsets=[2**40, 0, 1]),
    "an offset that is not aligned": lambda m: weight(m).update(offsets=[1, 0, 1]),
    "the bytes of another tensor": lambda m: weight(m).update(offsets=m["tensors"]["model/bias"]["boxes"]["offsets"]),
    "too many offsets": lambda m: weight(m).update(offsets=[0, 64, 2]),
    "a split that is a number": lambda m: m.update(splits=[3] * len(m["splits"])),
    "splits that are an object": lambda m: m.update(splits={}),
    "a box without a size": lambda m: [each[0].pop() for each in m["splits"]],
    "a box twice": lambda m: [each.append(copy.deepcopy(each[0])) for each in m["splits"]],
    "a huge box": lambda m: [each[0].__setitem__(1, [2**60] * len(each[0][0])) for each in m["splits"]],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_splits(what: str, folder: Path) -> None:
    edit_manifest(folder, lambda manifest: HOSTILE[what](manifest) and None)
    with pytest.raises(CheckpointError, match="malformed"):
        read_manifest(folder)
