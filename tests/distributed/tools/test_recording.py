"""`unshard.tools.record`: what a run leaves in its folder, and that it changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.stack import WIDTH, Stack
from bed.wrapped import wrap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from unshard import fully_shard, tools
from unshard.errors import ArgumentError, StateError
from unshard.tools import recording


def sharded(front_end: str, **options: Any) -> nn.Module:
    model = Stack()
    if front_end == "wrapper":
        return wrap(model, [*model.blocks, model], **options)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, recorded: Any = None) -> list[float]:
    losses = []
    for step in range(1, steps + 1):
        loss = model(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] /= 2
        if recorded is not None:
            recorded.step(loss, half=torch.tensor([0.5 * step]))
        losses.append(loss.item())
    return losses


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("front_end", ["fully_shard", "wrapper"])
@world(1, 2)
def test_a_run_is_recorded(tmp_path: Path, front_end: str) -> None:
    plain, model = sharded(front_end), sharded(front_end)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    expected = train(plain, optimizers[0], 3)
    keys = set(model.state_dict())
    with tools.record(tmp_path / "run", model, optimizers[1]) as recorded:
        losses = train(model, optimizers[1], 3, recorded)
    assert losses == expected and set(model.state_dict()) == keys
    dist.barrier()
    mine = lines(tmp_path / "run", dist.get_rank())
    assert [line["step"] for line in mine] == [1, 2, 3] and all(line["seconds"] > 0 for line in mine)
    if dist.get_rank() > 0:
        assert all(set(line) == {"step", "seconds"} for line in mine)
        return
    assert [line["loss"] for line in mine] == expected
    assert [line["half"] for line in mine] == [0.5, 1.0, 1.5]
    assert [line["lr"] for line in mine] == pytest.approx([0.05, 0.025, 0.0125])
    result = recorded.to_dict()
    assert (result["kind"], result["model"], result["error"]) == ("recording", "Stack", None)
    assert result["world"] == dist.get_world_size()
    assert [row["rank"] for row in result["ranks"]] == list(range(dist.get_world_size()))
    # The blocks are equal; the head is all that is left for the root.
    block, head = 2 * (WIDTH * WIDTH + WIDTH), 2 * WIDTH + 2
    units = {unit["name"].replace("_fsdp_wrapped_module.", ""): unit for unit in result["units"]}
    elements = {name: unit["elements"] for name, unit in units.items()}
    assert sorted(elements.values()) == [head, block, block, block]
    assert all(unit["bytes"] == 4 * unit["elements"] for unit in units.values())
    assert all(unit["ranks"] == list(range(dist.get_world_size())) for unit in units.values())
    assert [each["kind"] for each in result["results"]] == ["precision"]
    page = tools.report(tmp_path, tmp_path / "run").read_text()
    assert page.count("<section") >= 4 and f"Loss went from {expected[0]:.4g} in step 1" in page


@world(4)
def test_the_map_names_the_ranks_that_share_a_unit(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with tools.record(tmp_path, sharded("fully_shard", mesh=mesh)):
        pass
    if dist.get_rank() == 0:
        units = json.loads((tmp_path / "summary.json").read_text())["units"]
        assert [unit["ranks"] for unit in units] == [[0, 1]] * 4 and [unit["replicas"] for unit in units] == [2] * 4


@world(1)
def test_skipped_steps(tmp_path: Path) -> None:
    model = sharded("fully_shard")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    with tools.record(tmp_path, model, optimizer, scaler=scaler) as recorded:
        for step in range(4):
            loss = model(inputs(step)).square().mean() * (math.inf if step in (0, 2) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            recorded.step()
    found = lines(tmp_path)
    assert [line["scale"] for line in found] == [512.0, 1024.0, 512.0, 1024.0]
    assert [line.get("skipped", False) for line in found] == [True, False, True, False]
    assert "1024 to 512" in found[2]["why"] and not any("loss" in line for line in found)


@world(1)
def test_a_run_that_fails_and_resumes(tmp_path: Path) -> None:
    model = sharded("fully_shard")
    with pytest.raises(ZeroDivisionError), tools.record(tmp_path, model) as recorded:
        for step in range(1, 4):
            recorded.step(1.0 / (3 - step))
    assert recording.read_recording(tmp_path)["error"] == "ZeroDivisionError: float division by zero"
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # as a killed process leaves it
    (tmp_path / "rank5.jsonl").write_text('{"step": 1, "seconds": 1.0}\n')  # of a run with more ranks
    with tools.record(tmp_path, model) as recorded:
        for step in range(2, 5):
            recorded.step(float(step), step=step)
    result = recorded.to_dict()
    assert [(line["step"], line["loss"]) for line in result["steps"]] == [(1, 0.5), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert result["error"] is None and [row["rank"] for row in result["ranks"]] == [0]
    with tools.record(tmp_path, model) as recorded:
        recorded.step(9.0)
    assert [line["loss"] for line in lines(tmp_path)] == [9.0]


@world(1)
def test_values_are_written_when_they_have_arrived(tmp_path: Path) -> None:
    model, arrived = sharded("fully_shard"), []
    ready = recording._Line.is_ready
    recording._Line.is_ready = lambda line: line.values["step"] in arrived  # type: ignore[method-assign]
    try:
        with tools.record(tmp_path, model) as recorded:
            recorded.step(1.0)
            arrived.append(2)
            recorded.step(2.0)
            assert not (tmp_path / "rank0.jsonl").exists()
            arrived.append(1)
            recorded.step(3.0)
            assert [line["loss"] for line in lines(tmp_path)] == [1.0, 2.0]
    finally:
        recording._Line.is_ready = ready  # type: ignore[method-assign]
    assert [line["loss"] for line in lines(tmp_path)] == [1.0, 2.0, 3.0]


@world(1)
def test_added_results(tmp_path: Path) -> None:
    with tools.record(tmp_path, sharded("fully_shard")) as recorded:
        recorded.add({"kind": "doctor", "unshard": "0", "rows": [{"what": "the disk", "value": "full", "ok": False}]})
        with pytest.raises(ArgumentError, match="Expected a result of a tool"):
            recorded.add(3)
    page = tools.report(tmp_path / "page.html", tmp_path).read_text()
    assert "the disk: full" in page and "Recording in" in str(recorded)


@world(2)
def test_wrong_arguments(tmp_path: Path) -> None:
    """All ranks raise, also those that write no values."""
    with pytest.raises(ArgumentError, match="contains no module that fully_shard was applied to"):
        tools.record(tmp_path, nn.Linear(2, 2))
    with tools.record(tmp_path, sharded("fully_shard")) as recorded:
        with pytest.raises(ArgumentError, match="loss has 2 elements"):
            recorded.step(torch.ones(2))
        with pytest.raises(ArgumentError, match="one-element tensor for loss, got NoneType"):
            recorded.step(None)
        with pytest.raises(ArgumentError, match=r"one-element tensor for accuracy, got str"):
            recorded.step(accuracy="high")
        with pytest.raises(ArgumentError, match="record writes peak, seconds itself"):
            recorded.step(seconds=1, peak=2)
        with pytest.raises(ArgumentError, match=r"step must be a non-negative integer that increases, got -1\.$"):
            recorded.step(1.0, step=-1)
        recorded.step(1.0, step=5)
        with pytest.raises(ArgumentError, match=r"got 5 after step 5"):
            recorded.step(1.0, step=5)
    with pytest.raises(StateError, match=r"Call step\(\) inside"):
        recorded.step(1.0)
    dist.barrier()
    assert [line["step"] for line in lines(tmp_path, dist.get_rank())] == [5]
    with pytest.raises(ArgumentError, match=r"has no recording \(rank0.jsonl\)"):
        recording.read_recording(tmp_path / "elsewhere")
