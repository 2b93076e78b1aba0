"""One conformance test, run against every transport there is."""

from __future__ import annotations

import dataclasses
import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.python_groups import (
    PYTHON_GROUPS,
    LookAlike,
    NewNames,
    NewNamesInGroups,
    OnlyGroups,
    PythonGroup,
    make,
)
from bed.user_collectives import ToyGather, ToyMany, ToyReduceScatter, ignore_old_names
from torch.distributed.distributed_c10d import default_pg_timeout

from unshard.comm import process_group
from unshard.comm.agreement import require_agreement
from unshard.comm.groups import group_like, group_of
from unshard.comm.interface import Label, Transport, Work
from unshard.comm.order import check, waiting
from unshard.comm.process_group import ProcessGroupTransport
from unshard.comm.transports import OrderCheckedTransport, PluginTransport, SoloTransport, SplitTransport, transport_for
from unshard.errors import OrderError, UnsupportedError
from unshard.torch_private import group_timeout, number_of_groups

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def conforms(transport, rank: int, size: int, equal_ranks: bool = False) -> None:
    """A gather and a reduce-scatter of several tensors of several dtypes, out of place and in place."""
    value = (lambda r: rank) if equal_ranks else (lambda r: r)
    for in_place in (True, False):
        if transport.traits.in_place_only and not in_place:
            continue
        outputs = [torch.zeros(3 * size, dtype=dtype) for dtype in DTYPES]
        places = [output[rank * 3 : rank * 3 + 3] for output in outputs]
        inputs = places if in_place else [torch.empty_like(place) for place in places]
        for number, each in enumerate(inputs):
            each.fill_(10 * rank + number)
        transport.all_gather(outputs, inputs).wait()
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
    with mock.patch.object(process_group, "_exchange_is_faster", lambda *unused: False):
        transport = transport_for(dist.group.WORLD, CPU)
    assert (transport.traits.gathers_groups, transport.traits.reduces_groups) == (False, True)
    conforms(transport, dist.get_rank(), dist.get_world_size())

    def without_groups(base: Transport) -> Transport:
        base.traits = dataclasses.replace(base.traits, reduces_groups=False)
        return base

    conforms(transport.wrapped(without_groups), dist.get_rank(), dist.get_world_size())


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
    assert not transport.traits.reduces_groups
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
    least = torch.tensor(torch.inf)
    for _ in range(100):  # others may talk at the same time, but hardly every time
        dist.barrier()
        before = _bytes_received()
        dist.barrier()
        transport.reduce_scatter([output], [whole], average=False).wait()
        dist.barrier()
        least = least.minimum(torch.tensor(float(_bytes_received() - before)))
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        if least < 1.5 * expected:
            break
    assert expected <= least < 1.5 * expected


def reducing_transport(own: bool) -> OrderCheckedTransport:
    """`own`: with Gloo's own reduce-scatter, which ignores its timeout."""
    with mock.patch.object(process_group, "_exchange_is_faster", lambda *unused: not own):
        transport = transport_for(dist.group.WORLD, CPU)
    assert isinstance(transport, OrderCheckedTransport)
    assert transport.traits.reduce_scatter_ignores_timeout == own
    return transport


@pytest.mark.parametrize("own", [False, True])
@world(2)
def test_a_late_rank_is_waited_for_in_slices(own: bool) -> None:
    """A reduction may take longer than the slice after which a rank looks around, and is right all the same.

    The late rank comes when the other one has looked twice.
    """
    transport = reducing_transport(own)
    order, rank = transport.order, dist.get_rank()
    store, looks = dist.distributed_c10d._get_default_store(), itertools.count(1)

    def look() -> None:
        if next(looks) == 2:
            store.set("looked twice", "")

    with (
        mock.patch.object(order, "poll_interval", timedelta(seconds=0.05)),
        mock.patch.object(order, "compare_recent", look),
    ):
        if rank == 1:
            store.wait(["looked twice"])
        output = torch.empty(3)
        transport.reduce_scatter([output], [torch.arange(6.0) + rank], average=False).wait()
    assert output.tolist() == [6.0 * rank + 1, 6.0 * rank + 3, 6.0 * rank + 5]


@pytest.mark.parametrize("own", [False, True])
@world(2)
def test_a_wait_is_given_up_when_the_order_is_broken(own: bool) -> None:
    transport, rank = reducing_transport(own), dist.get_rank()
    output, unreduced, other = torch.zeros(3), torch.ones(6), dist.new_group(backend="gloo")
    with (
        mock.patch.object(transport.order, "poll_interval", timedelta(seconds=0.05)),
        mock.patch.object(transport.order, "compare_recent", side_effect=OrderError("broken")),
        mock.patch.object(waiting, "_given_up", []) as given_up,
    ):
        if rank == 0:
            work = transport.reduce_scatter([output], [unreduced], average=False)
            with pytest.raises(OrderError, match="broken"):
                work.wait()
            assert len(given_up) == own
    dist.barrier(other)
    if rank == 1:  # the answer comes after all: nothing has been freed
        transport.reduce_scatter([output], [unreduced], average=False).wait()
    dist.barrier(other)


@ignore_old_names
@world(2)
def test_a_users_collective_is_checked_too() -> None:
    """The check stays outside of whatever takes the place of a process group's own collectives."""
    plain = transport_for(dist.group.WORLD, CPU)
    transport = plain.wrapped(lambda base: PluginTransport(base, dist.group.WORLD, ToyGather(), ToyReduceScatter()))
    rank, output = dist.get_rank(), torch.empty(4)
    same = Label(lambda: "gather the same")
    transport.all_gather([output], [torch.full((2,), 1.0 * rank)], label=same).wait()
    assert output.tolist() == [0, 0, 1, 1]
    transport.all_gather([output], [torch.full((2,), 2.0 * rank)]).wait()  # without a label: not compared
    assert output.tolist() == [0, 0, 2, 2]
    with (
        mock.patch.object(check, "POLL_SECONDS", 0.2),
        mock.patch.object(plain.order, "poll_interval", timedelta(seconds=0.2)),
        pytest.raises(OrderError, match=r"gather [01], rank \d to gather [01]"),
    ):
        transport.all_gather([output], [torch.ones(2)], label=Label(lambda: f"gather {rank}")).wait()


@world(2)
def test_the_check_of_the_order_can_be_left_out() -> None:
    transport = transport_for(dist.group.WORLD, CPU, check_order=False)
    assert type(transport) is ProcessGroupTransport and transport.next_unit_number() == 0
    conforms(transport, dist.get_rank(), dist.get_world_size())


@ignore_old_names
@pytest.mark.parametrize("gather", [ToyGather, ToyMany])
@world(1, 2, 3)
def test_a_users_transport_conforms(gather: type) -> None:
    base = transport_for(dist.group.WORLD, CPU)
    transport = PluginTransport(base, dist.group.WORLD, gather(), ToyReduceScatter())
    conforms(transport, dist.get_rank(), dist.get_world_size())


def second_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    return group_like(group, "gloo", CPU, meet=lambda: None)


@world(2, 3)
def test_two_groups_over_the_same_ranks_conform() -> None:
    usual = dist.group.WORLD
    own = second_group(usual)
    assert own is second_group(usual) and own is not usual
    assert (own.rank(), own.size()) == (usual.rank(), usual.size())
    assert group_timeout(own, CPU) == group_timeout(usual, CPU) != default_pg_timeout
    conforms(transport_for(usual, CPU, separate=True), dist.get_rank(), dist.get_world_size())


@world(4)
def test_ranks_of_a_second_group_may_be_in_different_numbers_of_groups() -> None:
    """Torch names a group of some ranks by that number, and waits forever for a rank that has another name for it."""
    dist.new_group([0])
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[dist.get_rank() // 2]
    own = second_group(mine)
    assert (own is mine) == (dist.get_rank() < 2)  # one group for both is right, too, and only slower
    assert second_group(dist.group.WORLD) is not dist.group.WORLD
    conforms(transport_for(mine, CPU, separate=True), mine.rank(), 2)


@world(3)
def test_groups_of_some_ranks_do_not_disturb_later_groups_of_all() -> None:
    """Torch 2.14 and newer count them on their ranks alone, and name the next group of all ranks by that count."""
    pair = [0, 1]
    if dist.get_rank() in pair:
        made = [group_of(pair, "one purpose"), group_of(pair, "another")]
        assert made[0] is not made[1] and group_of(pair, "another") is made[1]
        for each in made:
            conforms(transport_for(each, CPU), each.rank(), 2)
    later = dist.new_group()  # of the program, or of a device mesh
    conforms(transport_for(later, CPU), later.rank(), 3)


@world(2)
def test_a_second_group_is_made_for_the_first_reduce_scatter() -> None:
    """And all reduce-scatters go through it, and nothing else does."""
    used = []

    def noted(name: str) -> Any:
        original = getattr(ProcessGroupTransport, name)

        def method(self: ProcessGroupTransport, *args: Any, **kwargs: Any) -> Work:
            used.append((name, self._group))
            return original(self, *args, **kwargs)

        return mock.patch.object(ProcessGroupTransport, name, method)

    usual, groups = dist.group.WORLD, number_of_groups()
    transport = SplitTransport(usual, CPU, lambda: second_group(usual))
    with noted("all_gather"), noted("reduce_scatter"), noted("all_reduce"):
        transport.all_gather([torch.empty(2)], [torch.ones(1)]).wait()
        transport.all_reduce([torch.ones(1)], average=True).wait()
        assert number_of_groups() == groups
        for _ in range(2):
            transport.reduce_scatter([torch.empty(1)], [torch.ones(2)], average=True).wait()
            assert number_of_groups() == groups + 1
    own = second_group(usual)
    assert used == [("all_gather", usual), ("all_reduce", usual), ("reduce_scatter", own), ("reduce_scatter", own)]


@world(2)
def test_an_order_is_compared_over_both_groups() -> None:
    """One rank gathers while the other reduces, for which it has to make a group that the other does not make."""
    transport, rank = transport_for(dist.group.WORLD, CPU, separate=True), dist.get_rank()
    label = Label(lambda: ["gather", "reduce"][rank])
    with pytest.raises(OrderError, match=r"(?s)gather.*reduce|reduce.*gather"):
        if rank == 0:
            transport.all_gather([torch.empty(2)], [torch.ones(1)], label=label).wait()
        else:
            transport.reduce_scatter([torch.empty(1)], [torch.ones(2)], label=label, average=True).wait()


def test_the_loopback_group_conforms() -> None:
    with loopback.job(3, rank=1) as group:
        transport = transport_for(group, CPU)
        assert transport.traits.gathers_groups and transport.traits.reduces_groups
        conforms(transport, 1, 3, equal_ranks=True)


@pytest.mark.parametrize("kind", PYTHON_GROUPS, ids=lambda kind: kind.__name__)
@world(2)
def test_a_group_written_in_python_conforms(kind: type[PythonGroup]) -> None:
    """By the methods that it has, of whatever version of torch, with groups of tensors only if it has methods for them.

    What it has for one tensor, or for several, is not left out for what it inherits.
    """
    group, rank = make(kind), dist.get_rank()
    transport = transport_for(group, CPU)
    assert type(transport) is ProcessGroupTransport and transport.backend == "unknown"
    groups = kind in (NewNamesInGroups, OnlyGroups)
    assert (transport.traits.gathers_groups, transport.traits.reduces_groups) == (groups, groups)
    conforms(transport, rank, 2)
    if groups:
        assert (group.calls["gather many"], group.calls["reduce many"]) == (2, 2)
    else:
        assert (group.calls["gather"], group.calls["reduce"]) == (6, 4)
    narrow, output = torch.full((4,), 1.0 + rank).bfloat16(), torch.empty(2)
    transport.reduce_scatter([output], [narrow], average=True).wait()  # added up in the dtype of the output
    assert output.tolist() == [1.5, 1.5]
    assert group.calls["all_to_all"] == issubclass(kind, NewNames)


@world(2)
def test_a_python_class_over_a_backend_inherits_its_collectives() -> None:
    """But no other collective takes the place of a reduce-scatter that it overrides.

    Repeated, because what the group itself inherits hangs now and then, holding the GIL.
    """
    rounds = 100

    class Inherits(dist.ProcessGroup):
        pass

    class Overrides(Inherits):
        reduced = 0

        def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: object) -> dist.Work:
            self.reduced += 1
            return backend._reduce_scatter_base(output, input, opts)

    backend, rank = dist.new_group(backend="gloo")._get_backend(CPU), dist.get_rank()
    for kind in (Inherits, Overrides):
        group = kind(rank, 2)
        group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
        transport = transport_for(group, CPU)
        assert transport.backend == "gloo" and not transport.traits.reduces_groups
        for _ in range(rounds):
            conforms(transport, rank, 2)
    assert group.reduced == 4 * rounds


def test_what_an_object_has_no_method_for_is_said_when_it_is_sent() -> None:
    transport = transport_for(LookAlike(0, 2), CPU)
    assert (transport.rank, transport.world, transport.traits.gathers) == (0, 2, False)
    require_agreement(transport, CPU, "nothing", ["is compared"])
    transport.all_reduce([torch.ones(2)], average=True).wait()
    with pytest.raises(UnsupportedError, match=r"LookAlike.* has no method all_gather_single"):
        transport.all_gather([torch.ones(2)], [torch.ones(1)])

    class Nothing(dist.ProcessGroup):
        pass

    for group in (LookAlike(0, 2), Nothing(0, 2)):
        with pytest.raises(UnsupportedError, match=rf"{type(group).__name__}.* has no method reduce_scatter_single"):
            transport_for(group, CPU).reduce_scatter([torch.ones(1)], [torch.ones(2)], average=True)


@world(2)
def test_dtypes_that_gloo_does_not_know_travel_as_bytes() -> None:
    transport = transport_for(dist.group.WORLD, CPU)
    assert transport.carrier(torch.bfloat16) == torch.bfloat16
    for dtype in (torch.float8_e4m3fn, torch.int16):
        carrier = transport.carrier(dtype)
        assert carrier == torch.uint8
        piece = torch.full((4,), 1 + dist.get_rank(), dtype=torch.float32).to(dtype)
        output = torch.empty(8, dtype=dtype)
        transport.all_gather([output.view(carrier)], [piece.view(carrier)]).wait()
        assert output.float().tolist() == [1.0] * 4 + [2.0] * 4


@world(2)
def test_large_integers_beside_floats_arrive_as_they_are() -> None:
    """Gloo's own gather of a group would mix them up."""
    transport = transport_for(dist.group.WORLD, CPU)
    number = 2**60 + 1 + dist.get_rank()
    outputs = [torch.zeros(2, dtype=torch.int64), torch.zeros(4)]
    transport.all_gather(outputs, [torch.tensor([number]), torch.randn(2)]).wait()
    assert outputs[0].tolist() == [2**60 + 1, 2**60 + 2]


@world(2)
def test_several_gathers_issued_at_once() -> None:
    """Each is complete after its own wait, in whatever order they are waited for."""
    transport = transport_for(dist.group.WORLD, CPU)
    for order in ((0, 1, 2), (2, 1, 0)):
        outputs = [[torch.zeros(8), torch.zeros(4)] for _ in order]
        works = [
            transport.all_gather(pair, [torch.full((4,), 10.0 * n + dist.get_rank()), torch.full((2,), 1.0 * n)])
            for n, pair in enumerate(outputs)
        ]
        for number in order:
            works[number].wait()
            assert outputs[number][0].tolist() == [10.0 * number] * 4 + [10.0 * number + 1] * 4
            works[number].wait()
