"""Reductions in a side stream of their own: what has to wait for what, and whose memory the reduce buffer is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from bed import loopback
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from unshard import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from unshard.engine import reduction
from unshard.engine import side_stream as stream
from unshard.engine.reduction import Reduction
from unshard.engine.side_stream import SideStream, StreamEvent

SLEEP = 20_000_000  # cycles, about 10 ms
ON_DEVICE = OffloadPolicy()


class Forgotten(StreamEvent):
    """As if nobody had put it anywhere, nor waited for it."""

    def record(self) -> StreamEvent:
        return self

    def wait(self) -> None:
        pass


@contextmanager
def forgetting(name: str) -> Iterator[None]:
    start, pack = Reduction._start_on_side_stream, Reduction._pack

    def forgetful(self: Reduction, *arguments: object) -> None:
        setattr(self, name, Forgotten(torch.device("cuda", 0)))
        start(self, *arguments)  # type: ignore[arg-type]

    def late(self: Reduction, *arguments: Any) -> Any:
        if name == "_packed":  # or packing may be done before the next gradient is
            torch.cuda._sleep(SLEEP // 10)
        return pack(self, *arguments)

    with (
        mock.patch.object(Reduction, "_start_on_side_stream", forgetful),
        mock.patch.object(Reduction, "_pack", late),
    ):
        yield


def gradients(
    rest: OffloadPolicy = ON_DEVICE, replicas: int = 1, change: Callable[[FSDPModule], None] | None = None
) -> list[torch.Tensor]:
    """Of equal layers, so that the next one's gradient is written where the last one's was."""
    torch.manual_seed(0)
    with loopback.job(2 * replicas, device="cuda", delay=2e-3):
        mesh = None
        if replicas > 1:
            mesh = init_device_mesh("cuda", (replicas, 2), mesh_dim_names=("replicas", "shards"))
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6))).cuda()
        for layer in (*model, model):
            # Divided when they are reduced, so that something is done to them before the end of backward.
            fully_shard(layer, mesh=mesh, offload_policy=rest).set_force_sum_reduction_for_comms(True)
            if change is not None:
                change(layer)
        for _ in range(2):
            model.zero_grad()
            output = model(torch.randn(64, 256, device="cuda"))
            output.register_hook(lambda gradient: torch.cuda._sleep(SLEEP))  # the device is far behind the host
            output.square().mean().backward()
        return [parameter.grad.to_local().clone().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["_computed", "_packed", "_reduce_scattered"])
def test_what_waits(name: str) -> None:
    """Gradients are packed when they are there, freed when they are packed, and used when they are reduced."""
    with mock.patch.object(reduction, "reduce_stream", lambda device: None):
        expected = gradients()
    assert all(map(torch.equal, gradients(), expected))
    with forgetting(name):
        assert not all(map(torch.equal, gradients(), expected))


def hasty(self: SideStream, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> StreamEvent:
    """A copy that waits for nothing."""
    with self.inside():
        torch._foreach_copy_(targets, sources, True)
        return StreamEvent(sources[0].device).record()


def test_copies_to_the_host_wait_for_the_sum() -> None:
    expected = gradients()
    assert all(map(torch.equal, gradients(CPUOffloadPolicy()), expected))
    with mock.patch.object(SideStream, "copy", hasty):
        assert not all(map(torch.equal, gradients(CPUOffloadPolicy()), expected))


def doubled(unit: FSDPModule) -> None:
    unit.set_all_reduce_hook(lambda flat: flat.mul_(2))


@pytest.mark.parametrize(("replicas", "change"), [(2, None), (1, doubled)], ids=["all-reduce", "hook"])
def test_copies_to_the_host_wait_for_what_comes_after_the_sum(
    replicas: int, change: Callable[[FSDPModule], None] | None
) -> None:
    expected = gradients(ON_DEVICE, replicas, change)
    assert all(map(torch.equal, gradients(CPUOffloadPolicy(), replicas, change), expected))
    with mock.patch.object(Reduction, "_copies_at_once", lambda self, pending: True):
        assert not all(map(torch.equal, gradients(CPUOffloadPolicy(), replicas, change), expected))


class Slow(nn.Module):
    """Its backward takes the device long, and asks `meanwhile`, on the host, for something to remember."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self.meanwhile = meanwhile
        self.answers: list[object] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        x.register_hook(self.sleep)
        return x

    def sleep(self, gradient: torch.Tensor) -> None:
        torch.cuda._sleep(20 * SLEEP)
        after = torch.cuda.Event()
        after.record()
        self.answers.append((self.meanwhile(), after.query()))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("pin", [True, False])
def test_copies_to_the_host_do_not_wait_for_the_next_unit(pin: bool, ranks: int) -> None:
    """Those to page-locked memory: with other memory the host would wait for the copy, and the device for the host."""
    marks: list[StreamEvent] = []
    send = Reduction._copy_to_host

    def noted(self: Reduction, pending: reduction.ReductionInFlight, stream: SideStream) -> reduction.Stage:
        stage = send(self, pending, stream)
        assert pending.copied is not None
        marks.append(pending.copied)
        return stage

    def arrived() -> int:
        for mark in marks:
            mark.synchronize()
        return len(marks)

    slow = Slow(arrived)
    with loopback.job(ranks, device="cuda"), mock.patch.object(Reduction, "_copy_to_host", noted):
        model = nn.Sequential(nn.Linear(256, 256), nn.Sequential(nn.Linear(256, 256), slow), nn.Linear(256, 256)).cuda()
        for layer in (*model, model):
            fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=pin))
        model(torch.ones(64, 256, device="cuda")).square().mean().backward()
    assert slow.answers == [(1 if pin else 0, False)]
    assert len(marks) == 3


def test_another_device_is_current() -> None:
    """Streams that are asked for by device do as well; tests/engine/test_side_stream.py knows which ones those are."""
    expected = gradients()
    with mock.patch.object(stream, "current_device_index", lambda: 7):
        assert all(map(torch.equal, gradients(), expected))
        with forgetting("_packed"):
            assert not all(map(torch.equal, gradients(), expected))


def peak(layers: int, width: int, **options: object) -> int:
    """Bytes in use at most during a backward, beside what was in use before it."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).cuda()
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model)
    for _ in range(2):
        loss = model(torch.ones(1, width, device="cuda")).square().mean()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        model.zero_grad()
    return torch.cuda.max_memory_allocated() - before


def test_memory_of_a_reduction() -> None:
    """The next unit's backward does not come on top of the reduce buffer."""
    layers, width = 6, 2048
    whole = width * width  # elements
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with loopback.job(8, device="cuda"):
        aside = peak(layers, width, mp_policy=policy)
        gc.collect()
        with mock.patch.object(reduction, "reduce_stream", lambda device: None):
            beside = peak(layers, width, mp_policy=policy)
    shards, slack = layers * whole * 4 // 8, 2**20
    # Gradients of one layer in bf16 and in fp32, and the next layer.
    assert aside <= (2 + 4 + 2) * whole + shards + slack
    assert beside >= aside + whole - slack


def test_memory_of_one_rank_with_shards_on_the_host() -> None:
    """A layer, the next one, gradients, and those of the layer before on their way to the host."""
    layers, width = 6, 2048
    with loopback.job(1, device="cuda"):
        assert peak(layers, width, offload_policy=CPUOffloadPolicy()) <= 4 * (4 * width * width) + 2**20
