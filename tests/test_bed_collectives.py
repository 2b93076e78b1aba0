"""The recorders and the loop-back group tested: what they count is right, and a missing wait cannot hide."""

from collections.abc import Iterable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import loopback_stream, models, world
from bed.loopback import Loopback, LoopbackReference, job, repeat_shards
from bed.parity import check_loopback
from bed.peer import peer
from bed.recorders import Collectives, TorchCalls
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

# One release of torch names them so, the next deprecates that name.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- recorders -----------------------------------------------------------------------------------------------


def known_sequence() -> None:
    """One of each collective, on two ranks."""
    half, full = torch.ones(6, dtype=torch.bfloat16), torch.empty(12, dtype=torch.bfloat16)
    gather(full, half)
    reduce_scatter(torch.empty(5), torch.ones(10))
    with dist._coalescing_manager():
        gather(torch.empty(8), torch.ones(4))
        gather(torch.empty(2), torch.ones(1))
    with dist._coalescing_manager():
        reduce_scatter(torch.empty(4), torch.ones(8))
        reduce_scatter(torch.empty(1), torch.ones(2))
    dist.all_reduce(torch.ones(3, dtype=torch.float64))
    dist.broadcast(torch.ones(2), 0)


@world(2)
def test_collectives_are_recorded_with_their_bytes() -> None:
    with Collectives() as record:
        known_sequence()
    calls = record.calls
    kinds = ["gather", "reduce_scatter", "gather", "reduce_scatter", "all_reduce", "other"]
    assert [call.kind for call in calls] == kinds
    assert [call.grouped for call in calls] == [False, False, True, True, False, False]
    assert [call.bytes_in for call in calls] == [12, 40, 20, 40, 24, 8]
    assert [call.bytes_out for call in calls] == [24, 20, 40, 20, 24, 8]
    assert {call.ranks for call in calls} == {2}
    assert calls[0].inputs == ((torch.bfloat16, 6),) and calls[0].outputs == ((torch.bfloat16, 12),)
    assert calls[2].inputs == ((torch.float32, 4), (torch.float32, 1))
    assert calls[4].dtypes == {torch.float64}
    assert record.of("gather") == [calls[0], calls[2]]


@world(2)
def test_collectives_of_hooks_in_the_backward_pass_are_recorded() -> None:
    leaf = torch.ones(3, requires_grad=True)
    leaf.register_hook(lambda grad: dist.all_reduce(grad.clone()))
    leaf.register_post_accumulate_grad_hook(lambda leaf: gather(torch.empty(6), leaf.grad))
    with Collectives() as record:
        leaf.sum().backward()
    assert [call.kind for call in record.calls] == ["all_reduce", "gather"]


@world(2)
def test_collectives_below_a_dtensor_are_recorded_once() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    with Collectives() as record:
        tensor.full_tensor()
    (call,) = record.calls
    assert (call.kind, call.bytes_in, call.bytes_out, call.ranks) == ("gather", 24, 48, 2)


def test_operations_are_counted() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    with TorchCalls() as calls:
        torch._foreach_add_(tensors, 1.0)
        torch._foreach_add_(tensors, tensors)
        tensors[0].mul(2).add_(1)
    assert calls.counts == {"aten._foreach_add_": 2, "aten.mul": 1, "aten.add_": 1}
    assert calls.total == 4


def test_operations_of_the_backward_pass_are_counted() -> None:
    leaf = torch.ones(2, 2, requires_grad=True)
    with TorchCalls() as calls:
        (leaf @ leaf).sum().backward()
    assert calls.counts["aten.mm"] == 3


# --- the loop-back group -------------------------------------------------------------------------------------


def test_outputs_are_poison_until_the_wait() -> None:
    with job(4) as group:
        piece, whole = torch.arange(3.0), torch.zeros(12)
        work = gather(whole, piece, async_op=True)
        assert whole.isnan().all()
        assert group.unwaited() == [0]
        work.wait()
        assert whole.tolist() == [0.0, 1.0, 2.0] * 4
        assert group.unwaited() == []


def test_inputs_are_read_late() -> None:
    with job(2):
        piece, whole = torch.zeros(2), torch.zeros(4)
        work = gather(whole, piece, async_op=True)
        piece.fill_(7)  # too early: a real group may not have read it yet
        work.wait()
        assert whole.tolist() == [7.0] * 4


def test_a_gather_in_place_keeps_its_input() -> None:
    with job(3, rank=1):
        whole = torch.arange(6.0)
        work = gather(whole, whole[2:4], async_op=True)
        assert whole[2:4].tolist() == [2.0, 3.0]
        assert whole[:2].isnan().all() and whole[4:].isnan().all()
        work.wait()
        assert whole.tolist() == [2.0, 3.0] * 3


def test_bytes_are_poison_for_every_type_of_number() -> None:
    with job(2):
        whole = torch.zeros(16, dtype=torch.uint8)
        work = gather(whole, torch.zeros(8, dtype=torch.uint8), async_op=True)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            assert whole.view(dtype).isnan().all()
        work.wait()
        assert not whole.any()


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_reductions_are_those_of_equal_ranks(op: str) -> None:
    factor = 3 if op == "SUM" else 1
    with job(3, rank=1) as group:
        piece, total = torch.empty(2), torch.ones(2)
        reduce_scatter(piece, torch.arange(6.0), op=getattr(dist.ReduceOp, op))
        dist.all_reduce(total, op=getattr(dist.ReduceOp, op))
        assert piece.tolist() == [2.0 * factor, 3.0 * factor]
        assert total.tolist() == [1.0 * factor] * 2
        assert [call.reduce for call in group.log] == [op, op]


def test_a_scaled_sum_is_scaled() -> None:
    with job(4):
        total = torch.ones(2)
        dist.all_reduce(total, op=dist._make_nccl_premul_sum(0.5))
        assert total.tolist() == [2.0, 2.0]


def test_the_log_reads_like_a_record() -> None:
    with job(2) as group:
        known_sequence()
    kinds = ["gather", "reduce_scatter", "gather", "reduce_scatter", "all_reduce", "other"]
    assert [call.kind for call in group.log] == kinds
    assert [call.grouped for call in group.log] == [False, False, True, True, False, False]
    assert [call.bytes_in for call in group.log] == [12, 40, 20, 40, 24, 8]
    assert [call.bytes_out for call in group.log] == [24, 20, 40, 20, 24, 8]


def test_the_group_itself_counts_for_nothing() -> None:
    with job(2), TorchCalls() as calls:
        piece, whole = torch.ones(2), torch.empty(4)
        before = calls.total
        gather(whole, piece)
        reduce_scatter(piece, whole)
        dist.all_reduce(piece)
    assert calls.total == before


class Clock:
    """Stands in for the module `time`: a sleep takes no time, and nothing else does."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_transfer_takes_its_time_and_hides_behind_work() -> None:
    clock = Clock()
    with mock.patch.object(loopback_stream, "time", clock), job(2, delay=0.25):
        works = [gather(torch.empty(4), torch.ones(2), async_op=True) for _ in range(2)]
        assert clock.now == 0.0 and not works[0].is_completed()
        clock.sleep(0.375)  # the compute that a prefetch hides behind
        assert works[0].is_completed() and not works[1].is_completed()
        works[0].wait()
        assert clock.now == 0.375
        works[1].wait()
        assert clock.now == 0.5


def test_a_skipped_wait_leaves_poison_and_harms_no_other() -> None:
    with job(2, skip_wait={1}) as group:
        wholes = [torch.zeros(4) for _ in range(3)]
        works = [gather(whole, torch.ones(2), async_op=True) for whole in wholes]
        for work in works:
            work.wait()
        assert [whole.isnan().any().item() for whole in wholes] == [False, True, False]
        assert group.unwaited() == [1]  # still under way


@pytest.mark.parametrize("role", ["input", "output"])
@pytest.mark.parametrize("then", ["wait", "nothing", "another", "another and wait"])
def test_memory_freed_before_the_wait_is_reported(role: str, then: str) -> None:
    with pytest.raises(AssertionError, match=f"_allgather_base .number 0.: the storage of an {role}"), job(2):
        piece, whole = torch.ones(2), torch.empty(4)
        work = gather(whole, piece, async_op=True)
        (piece if role == "input" else whole).untyped_storage().resize_(0)
        if "another" in then:
            gather(torch.empty(4), torch.ones(2))
        if "wait" in then:
            work.wait()


def test_a_wrong_size_is_refused() -> None:
    with job(4), pytest.raises(ValueError, match="4 ranks"):
        Loopback(0, 4)._allgather_base(torch.empty(6), torch.ones(2))


def test_repeated_shards_are_equal_and_the_reference_keeps_them_so() -> None:
    model = nn.Linear(2, 7)
    repeat_shards(model, 3)  # 3 rows, 3 rows, 1 row
    assert torch.equal(model.weight[:3], model.weight[3:6])
    assert torch.equal(model.weight[:1], model.weight[6:])
    reference = LoopbackReference(model, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight[:3].clone()
    (model(torch.ones(1, 2)) * torch.arange(7.0)).sum().backward()
    reference.step(optimizer)
    assert torch.equal(model.weight[:3], before - 0.1 * reference.piece(model.weight.grad))
    assert torch.equal(model.weight[:3], model.weight[3:6])


# --- an engine on it: PyTorch's own fully_shard ---------------------------------------------------------


def exact(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Rounds once per element, since the product with a power of two is exact. What rounds more often depends on the
    place of an element: the CPU computes the ends of tensors with other instructions, and a shard has other ends."""
    return torch.optim.SGD(parameters, lr=2**-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", models.CASES, ids=str)
def test_the_peer_equals_the_reference_bit_by_bit(case: models.Case) -> None:
    with job(3, delay=0.001) as group:
        check_loopback(case, peer(case), steps=2, tolerance=0.0, optimizer=exact)
        assert group.unwaited() == []
        assert {call.kind for call in group.log} == {"gather", "reduce_scatter"}


@pytest.mark.filterwarnings("ignore")
def test_every_skipped_wait_of_an_engine_is_noticed() -> None:
    case = models.case("tied")
    with job(2) as group:
        check_loopback(case, peer(case), steps=1)
    for number in range(len(group.log)):
        with job(2, skip_wait={number}), pytest.raises(AssertionError, match="not finite here"):
            check_loopback(case, peer(case), steps=1)


# --- the same on a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_outputs_are_poison_until_the_wait() -> None:
    with job(4, device="cuda", delay=0.5, skip_wait={1}) as group:
        piece, wholes = torch.arange(3.0, device="cuda"), [torch.zeros(12, device="cuda") for _ in range(2)]
        warm_up = Loopback(0, 4, "cuda")  # the first launch of a kernel may wait for all that runs
        warm_up._allgather_base(wholes[0], piece).wait()
        wholes[0].clone().isnan().all().item()
        works = [gather(whole, piece, async_op=True) for whole in wholes]
        early = [whole.clone() for whole in wholes]
        for work in works:
            work.wait()
        late = [whole.clone() for whole in wholes]
        assert all(each.isnan().all() for each in early)
        assert late[0].tolist() == [0.0, 1.0, 2.0] * 4
        assert late[1].isnan().all()
        assert group.unwaited() == [1]  # still under way


@pytest.mark.gpu
def test_on_a_gpu_a_transfer_takes_its_time_and_blocks_nobody() -> None:
    with job(2, device="cuda", delay=1.0):
        piece, whole = torch.ones(2, device="cuda"), torch.empty(4, device="cuda")
        Loopback(0, 2, "cuda")._allgather_base(whole, piece).wait()
        torch.cuda.synchronize()
        work = gather(whole, piece, async_op=True)
        piece.fill_(7)  # too early: the side stream has not read it yet
        assert not work.is_completed()
        work.wait()
        assert not torch.cuda.current_stream().query()  # the stream waits, the host does not
        assert whole.tolist() == [7.0] * 4
        assert work.is_completed()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", models.CASES, ids=str)
def test_on_a_gpu_the_peer_equals_the_reference(case: models.Case) -> None:
    if case.name == "recurrent":
        # cuDNN moves the weights of an LSTM into a buffer of its own (`set_`) during the first forward pass. The
        # peer goes on gathering into the old memory, so from the second step on the LSTM computes with old weights.
        pytest.xfail("the peer trains an LSTM wrongly on a GPU")
    with job(3, device="cuda", delay=0.001) as group:
        check_loopback(case, peer(case, "cuda"), steps=2, tolerance=1e-5, device="cuda")
        assert group.unwaited() == []
