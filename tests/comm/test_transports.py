"""One conformance test, run against every transport there is."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from distributed.test_plugins import IGNORED, ToyGather, ToyMany, ToyReduceScatter

from unshard.comm import process_group
from unshard.comm.groups import group_of
from unshard.comm.plugin import PluginTransport
from unshard.comm.process_group import ProcessGroupTransport, transport_for
from unshard.comm.solo import SoloTransport
from unshard.comm.split import SplitTransport

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def conforms(transport, rank: int, size: int, equal_ranks: bool = False) -> None:
    """A gather and a reduce-scatter of several tensors of several dtypes, out of place and in place."""
    value = (lambda r: rank) if equal_ranks else (lambda r: r)
    for in_place in (True, False):
        if transport.in_place_only and not in_place:
            continue
        outputs = [torch.zeros(3 * size, dtype=dtype) for dtype in DTYPES]
        places = [output[rank * 3 : rank * 3 + 3] for output in outputs]
        inputs = places if in_place else [torch.empty_like(place) for place in places]
        for number, each in enumerate(inputs):
            each.fill_(10 * rank + number)
        transport.gather(outputs, inputs).wait()
        for number, output in enumerate(outputs):
            assert output.view(size, 3)[:, 0].tolist() == [10 * value(r) + number for r in range(size)]
    for average in (True, False):
        inputs = [torch.arange(2.0 * size) + value(rank), torch.full((size,), 1.0 + value(rank)).bfloat16()]
        results = [torch.empty(2), torch.empty(1, dtype=torch.bfloat16)]
        before = [each.clone() for each in inputs]
        transport.reduce_scatter(results, inputs, average=average).wait()
        mean = sum(value(r) for r in range(size)) / size
        scale = 1 if average else size
        assert results[0].tolist() == pytest.approx([scale * (2 * rank + mean), scale * (2 * rank + 1 + mean)])
        assert results[1].item() == pytest.approx(scale * (1 + mean), rel=0.01)
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    tensors = [torch.full((2,), 1.0 + value(rank)), torch.full((3,), 2.0 * value(rank)).double()]
    transport.all_reduce(tensors, average=True).wait()
    mean = sum(value(r) for r in range(size)) / size
    assert tensors[0].tolist() == pytest.approx([1 + mean] * 2)
    assert tensors[1].tolist() == pytest.approx([2 * mean] * 3)


def test_solo_conforms() -> None:
    conforms(SoloTransport(), 0, 1)


@world(1, 2, 3, 4)
def test_process_groups_conform() -> None:
    transport = transport_for(dist.group.WORLD, CPU)
    assert isinstance(transport, SoloTransport) == (dist.get_world_size() == 1)
    conforms(transport, dist.get_rank(), dist.get_world_size())


@world(2, 3)
def test_gloos_own_reduce_scatter_conforms() -> None:
    """What tensors on a device are left to."""
    with mock.patch.object(process_group, "_adds_on_arrival", lambda *unused: False):
        transport = ProcessGroupTransport(dist.group.WORLD, CPU)
    assert (transport.gathers_groups, transport.reduces_groups) == (False, True)
    conforms(transport, dist.get_rank(), dist.get_world_size())
    transport.reduces_groups = False
    conforms(transport, dist.get_rank(), dist.get_world_size())


@world(2, 3)
def test_a_reduce_scatter_that_a_program_replaces_conforms() -> None:
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    with mock.patch.object(dist, name, mock.Mock(wraps=getattr(dist, name))) as replaced:
        conforms(transport_for(dist.group.WORLD, CPU), dist.get_rank(), dist.get_world_size())
    assert replaced.call_count == 4  # two tensors, with and without a mean


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@world(2, 3, 4)
def test_gloo_reduces_exactly_what_a_sum_in_the_order_of_the_ranks_is(dtype: torch.dtype) -> None:
    """Narrow dtypes are rounded once, wide ones added one after the other; infinities and NaN stay what they are."""
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = transport_for(dist.group.WORLD, CPU)
    assert not transport.reduces_groups
    wholes = [torch.randn(size * 1001, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
    for r, whole in enumerate(wholes):
        whole.view(size, -1)[:, r] = torch.inf
    wholes[0].view(size, -1)[:, 1] = -torch.inf  # meets the infinity of rank 1
    rows = [whole.view(size, -1)[rank] for whole in wholes]
    total = sum(row.to(dtype if dtype.itemsize > 2 else torch.float32) for row in rows)
    for average in (False, True):
        output = torch.full((1001,), 7.0, dtype=dtype)
        mine = wholes[rank].clone()
        work = transport.reduce_scatter([output], [mine], average=average)
        work.wait()
        work.wait()  # adds nothing twice
        torch.testing.assert_close(
            output, (total / size if average else total).to(dtype), rtol=0, atol=0, equal_nan=True
        )
        assert torch.equal(mine, wholes[rank])


def _bytes_received() -> int:
    """By anybody over the loopback interface."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[1])


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="bytes are counted by Linux")
@world(2, 3)
def test_a_reduction_sends_each_piece_once() -> None:
    """Contract CM-06: every rank sends all pieces but its own. Gloo's own reduce-scatter sends twice as many bytes."""
    size, transport = dist.get_world_size(), transport_for(dist.group.WORLD, CPU)
    whole, output = torch.ones(size << 20), torch.empty(1 << 20)
    expected = size * (size - 1) * output.nbytes
    seen = []
    for _ in range(4):  # others may talk at the same time, but hardly as much, and not every time
        dist.barrier()
        before = _bytes_received()
        dist.barrier()
        transport.reduce_scatter([output], [whole], average=False).wait()
        dist.barrier()
        seen.append(_bytes_received() - before)
    assert expected <= min(seen) < 1.5 * expected


@world(2)
def test_a_late_rank_is_waited_for_in_slices() -> None:
    """A reduction may take longer than the slice after which a rank looks around, and is right all the same."""
    transport = transport_for(dist.group.WORLD, CPU)
    order, rank = transport._order, dist.get_rank()
    with mock.patch.object(order, "slice", timedelta(seconds=0.05)), mock.patch.object(order, "look") as looks:
        dist.barrier()
        if rank == 1:
            time.sleep(0.5)
        output = torch.empty(3)
        transport.reduce_scatter([output], [torch.arange(6.0) + rank], average=False).wait()
    assert output.tolist() == [6.0 * rank + 1, 6.0 * rank + 3, 6.0 * rank + 5]
    assert rank == 1 or looks.call_count > 1


@IGNORED
@pytest.mark.parametrize("gather", [ToyGather, ToyMany])
@world(1, 2, 3)
def test_a_users_transport_conforms(gather: type) -> None:
    base = transport_for(dist.group.WORLD, CPU)
    transport = PluginTransport(base, dist.group.WORLD, gather(), ToyReduceScatter())
    conforms(transport, dist.get_rank(), dist.get_world_size())


@world(2, 3)
def test_two_groups_over_the_same_ranks_conform() -> None:
    own = group_of(range(dist.get_world_size()), "reductions")
    assert own is group_of(range(dist.get_world_size()), "reductions") and own is not dist.group.WORLD
    transport = SplitTransport(transport_for(dist.group.WORLD, CPU), transport_for(own, CPU))
    conforms(transport, dist.get_rank(), dist.get_world_size())


def test_the_loopback_group_conforms() -> None:
    with loopback.job(3, rank=1) as group:
        transport = transport_for(group, CPU)
        assert transport.gathers_groups and transport.reduces_groups
        conforms(transport, 1, 3, equal_ranks=True)


@world(2)
def test_dtypes_that_gloo_does_not_know_travel_as_bytes() -> None:
    transport = transport_for(dist.group.WORLD, CPU)
    assert transport.carrier(torch.bfloat16) == torch.bfloat16
    for dtype in (torch.float8_e4m3fn, torch.int16):
        carrier = transport.carrier(dtype)
        assert carrier == torch.uint8
        piece = torch.full((4,), 1 + dist.get_rank(), dtype=torch.float32).to(dtype)
        output = torch.empty(8, dtype=dtype)
        transport.gather([output.view(carrier)], [piece.view(carrier)]).wait()
        assert output.float().tolist() == [1.0] * 4 + [2.0] * 4


@world(2)
def test_large_integers_beside_floats_arrive_as_they_are() -> None:
    """Gloo's own gather of a group would mix them up."""
    transport = transport_for(dist.group.WORLD, CPU)
    number = 2**60 + 1 + dist.get_rank()
    outputs = [torch.zeros(2, dtype=torch.int64), torch.zeros(4)]
    transport.gather(outputs, [torch.tensor([number]), torch.randn(2)]).wait()
    assert outputs[0].tolist() == [2**60 + 1, 2**60 + 2]


@world(2)
def test_several_gathers_issued_at_once() -> None:
    """Each is complete after its own wait, in whatever order they are waited for."""
    transport = transport_for(dist.group.WORLD, CPU)
    for order in ((0, 1, 2), (2, 1, 0)):
        outputs = [[torch.zeros(8), torch.zeros(4)] for _ in order]
        works = [
            transport.gather(pair, [torch.full((4,), 10.0 * n + dist.get_rank()), torch.full((2,), 1.0 * n)])
            for n, pair in enumerate(outputs)
        ]
        for number in order:
            works[number].wait()
            assert outputs[number][0].tolist() == [10.0 * number] * 4 + [10.0 * number + 1] * 4
            works[number].wait()
