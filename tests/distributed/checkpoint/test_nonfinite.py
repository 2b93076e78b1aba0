"""Saving a model that is not finite: one warning that names parameters and ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bed import world
from torch import nn

from unshard import FullyShardedDataParallel as FSDP
from unshard import checkpoint, fully_shard


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    messages: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("unshard")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.complex = nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.full((2,), -math.inf))  # many models have such a buffer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("front_end", ["fully_shard", "originals", "flat"])
@world(1, 3)
def test_one_warning_names_parameters_and_ranks(front_end: str, tmp_path: Path) -> None:
    net = Net()
    if front_end != "fully_shard":
        del net.complex  # a flat parameter has one dtype
    with torch.no_grad():
        finite = {name: value.clone() for name, value in net.state_dict().items()}
        net.first.weight[5] = math.nan  # the last rank's
        net.last.bias[0] = -math.inf  # rank 0's
        if front_end == "fully_shard":
            net.complex[5] = complex(0, math.inf)
    model = fully_shard(net) if front_end == "fully_shard" else FSDP(net, use_orig_params=front_end == "originals")
    saver, last = checkpoint.Saver(tmp_path / "background"), dist.get_world_size() - 1
    names = ["complex"] if front_end == "fully_shard" else []
    for save in (
        lambda step: checkpoint.save(tmp_path, model=model, step=step),
        lambda step: saver.save(model=model, step=step),
    ):
        with warnings_logged() as messages:
            save(1)
        assert len(messages) == (dist.get_rank() == 0), messages
        for message in messages:
            assert f"{len(names) + 2} parameters are not finite" in message
            if front_end == "fully_shard":
                assert f"complex (rank {last}), first.weight (rank {last}), last.bias (rank 0)." in message
    saver.wait()
    checkpoint.load_full_state_dict(model, finite)
    with warnings_logged() as messages:
        checkpoint.save(tmp_path, model=model, step=2)
    assert messages == []
