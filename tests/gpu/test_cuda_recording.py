"""`unshard.tools.record` on a CUDA device: values come from the device, and the host never waits for them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from bed import world
from torch import nn

from unshard import fully_shard, tools
from unshard.optim import GradScaler


@contextmanager
def waits_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@world(1, backend="nccl")
def test_recording_does_not_wait_for_the_device(tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(8, 8).cuda())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cuda", growth_interval=2)
    losses = []
    with tools.record(tmp_path, model, optimizer, scaler=scaler) as recorded:
        for step in range(5):
            loss = model(torch.ones(2, 8, device="cuda")).square().mean() * (float("inf") if step == 3 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            losses.append(loss.detach() + 1)
            behind = torch.cuda.Event()
            behind.record()
            with waits_are_errors():
                recorded.step(losses[-1])
            # The first steps of a process allocate page-locked memory, for which CUDA waits.
            assert step < 2 or not behind.query()
    lines = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [each.item() for each in losses]
    assert [line["scale"] for line in lines] == [2.0**16, 2.0**17, 2.0**17, 2.0**16, 2.0**16]
    assert [line.get("skipped", False) for line in lines] == [False, False, False, True, False]
    assert all(line["peak"] >= line["allocated"] > 0 for line in lines)
