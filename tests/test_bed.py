"""The test bed tested: ranks that fail, hang or die are reported, and comparisons notice what they must."""

import copy
import os
import pickle
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import models, world
from bed.models import CASES, Case
from bed.parity import Record, assert_close, check_parity, train
from bed.peer import peer
from bed.pool import JobFailed, Pool
from bed.quick import few_of
from bed.stack import assert_gradients
from torch import nn


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A pool of our own to maltreat."""
    own = Pool(grace=30.0)
    yield own
    own.close()


@contextmanager
def time_is_up_with_one_rank_left(pool: Pool) -> Iterator[None]:
    """Inside, the pool waits for the first of two ranks as long as it takes, and for the second not at all."""

    def wait(pipes: list[Connection], timeout: float) -> list[Any]:
        return connection.wait(pipes, timeout) if len(pipes) > 1 else []

    with mock.patch.object(pool, "wait", wait):
        yield


# --- worlds --------------------------------------------------------------------------------------------------


@world(1, 2, 3, 4)
def test_every_rank_takes_part() -> None:
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    assert total.item() == sum(range(1, dist.get_world_size() + 1))


@world(2)
@pytest.mark.parametrize("word", ["one", "two"])
@pytest.mark.parametrize("number", [1, 2])
def test_parameters_and_fixtures_reach_the_ranks(word: str, number: int, tmp_path: Path) -> None:
    (tmp_path / f"{dist.get_rank()}").write_text(word * number)
    dist.barrier()
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == word * number


@world(1, 3)
def test_a_body_may_ask_for_the_world_size(world_size: int) -> None:
    assert world_size == dist.get_world_size()


@world(1)
@pytest.mark.filterwarnings("error:told to fail")
def test_warning_filters_reach_the_ranks() -> None:
    import warnings

    with pytest.raises(UserWarning):
        warnings.warn("told to fail", stacklevel=1)


def test_a_body_out_of_reach_is_refused() -> None:
    def inner() -> None: ...

    with pytest.raises(TypeError, match="top of its module"):
        world(2)(inner)


# --- the pool ------------------------------------------------------------------------------------------------


def who() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


@pytest.mark.parametrize(("sizes", "quick"), [((3,), [3]), ((2, 4), [4]), ((1, 2), [2, 1]), ((1, 2, 3, 4), [4])])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_few_rows_of_a_test_are_quick(sizes: tuple[int, ...], quick: list[int], count: int) -> None:
    rows = [(size, number) for number in range(count) for size in sizes]
    chosen = [few_of(rows, [size for size, _ in rows], seed) for seed in range(count)]
    assert all([size for size, _ in kept] == quick for kept in chosen)
    assert {kept[0][1] for kept in chosen} == set(range(count))  # each row for some seed


def test_values_come_back_in_order_of_rank(pool: Pool) -> None:
    for size in (3, 1, 4, 2):
        assert pool.run(who, size) == [(rank, size) for rank in range(size)]


def process() -> int:
    return os.getpid()


def test_workers_are_started_once(pool: Pool) -> None:
    """Each start costs an import of torch, or at least a fork."""
    first = pool.run(process, 4)
    assert len(set(first)) == 4
    assert pool.run(process, 4) == first and pool.run(process, 2) == first[:2]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted where the system lists them")
def test_workers_with_many_threads_are_replaced(pool: Pool) -> None:
    before = pool.run(process, 2)
    assert pool.run(process, 2) == before
    with mock.patch("bed.pool.MOST_THREADS", 0):
        assert set(pool.run(process, 2)).isdisjoint(before)


def fail_on(rank: int) -> None:
    limit = 41
    if dist.get_rank() == rank:
        assert limit == 42
    dist.all_reduce(torch.ones(1))


def test_a_failing_rank_is_quoted_and_the_others_freed(pool: Pool) -> None:
    with pytest.raises(JobFailed, match=r"fail_on failed on 3 of 3 ranks, first on rank 1") as caught:
        pool.run(fail_on, 3, {"rank": 1})
    assert "assert 41 == 42" in caught.value.failures[1]
    assert "in fail_on" in caught.value.failures[1]
    for rank in (0, 2):  # the failure itself ended their collective, neither a timeout nor the pool
        assert re.search("closed by peer|reset by peer", caught.value.failures[rank]), caught.value.failures[rank]
    assert pool.run(who, 3) == [(0, 3), (1, 3), (2, 3)]


def fail_in_a_helper() -> None:
    assert_gradients(nn.Linear(1, 1), nn.Linear(1, 1))  # neither has gradients, so nothing is compared


def test_asserts_of_helpers_show_their_values_too(pool: Pool) -> None:
    with pytest.raises(JobFailed) as caught:
        pool.run(fail_in_a_helper, 1)
    assert "assert 0" in caught.value.failures[0]


def fail_beside_a_sleeper() -> None:
    dist.barrier()  # the other rank has come as far as this
    if dist.get_rank() == 0:
        raise ValueError("rank 0 cannot go on")
    time.sleep(600)


def test_after_a_failure_the_others_have_a_moment_and_then_go(pool: Pool) -> None:
    with pytest.raises(JobFailed) as caught, time_is_up_with_one_rank_left(pool):
        pool.run(fail_beside_a_sleeper, 2)
    assert "rank 0 cannot go on" in caught.value.failures[0]
    assert "after rank 0 had given up" in caught.value.failures[1]
    assert "fail_beside_a_sleeper" in caught.value.failures[1]
    assert pool.run(who, 2) == [(0, 2), (1, 2)]


def hang_in_a_collective() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1))


def test_a_hang_ends_and_shows_where(pool: Pool) -> None:
    with pytest.raises(JobFailed) as caught, time_is_up_with_one_rank_left(pool):
        pool.run(hang_in_a_collective, 2, timeout=50.0)
    assert list(caught.value.failures) == [1]
    assert "within 50 s" in caught.value.failures[1]
    assert "hang_in_a_collective" in caught.value.failures[1]
    assert pool.run(who, 2) == [(0, 2), (1, 2)]


def die(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("how", "text"), [("exit", "exit status 3"), ("crash", "SIGSEGV")])
def test_a_dead_worker_is_reported_and_replaced(pool: Pool, how: str, text: str) -> None:
    with pytest.raises(JobFailed) as caught:
        pool.run(die, 3, {"how": how})
    assert next(iter(caught.value.failures)) == 1  # the cause before its consequences
    assert text in caught.value.failures[1]
    assert pool.run(who, 3) == [(0, 3), (1, 3), (2, 3)]


def skip() -> None:
    pytest.skip("not today")


def test_a_skip_on_the_ranks_is_a_skip(pool: Pool) -> None:
    with pytest.raises(pytest.skip.Exception, match="not today"):
        pool.run(skip, 2)


def give_a_lambda() -> object:
    return lambda: None


def test_what_cannot_travel_is_named(pool: Pool) -> None:
    with pytest.raises(JobFailed, match="return value cannot be pickled"):
        pool.run(give_a_lambda, 1)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pool.run(who, 1, {"argument": lambda: None})
    assert pool.run(who, 1) == [(0, 1)]


def disturb() -> tuple[torch.dtype, bool, float]:
    before = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(()).item())
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return before


def test_a_job_leaves_nothing_behind(pool: Pool) -> None:
    first, second = pool.run(disturb, 1), pool.run(disturb, 1)
    assert first == second
    assert first[0][:2] == (torch.float32, True)


# --- the models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_keep_their_promises(case: Case) -> None:
    model, again = case.build(), case.build()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert case.units(model)[-1] is model
    assert pickle.loads(pickle.dumps(case)) is case
    batch = case.batch(0)
    for size in (1, 2, 3, 4):
        losses = [case.loss(model, models.shard(batch, rank, size)) for rank in range(size)]
        torch.testing.assert_close(torch.stack(losses).mean(), case.loss(again, batch))
    case.loss(model, batch).backward()
    assert all(parameter.grad.norm() > 0 for parameter in model.parameters())


def test_cases_hold_the_awkward_sizes() -> None:
    rows = {len(parameter) for case in CASES for parameter in case.build().parameters()}
    assert 1 in rows and 3 in rows
    tied = models.case("tied").build()
    assert tied.head.weight is tied.tokens.weight
    assert all(len(tied.head.weight) % size for size in (2, 3, 4))


# --- parity --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> Record:
    case = models.case("uneven")
    return train(case.build(), case, 2)


def scale_gradient(record: Record, factor: float) -> None:
    record.grads[1]["out.weight"] *= factor


def scale_parameter(record: Record, factor: float) -> None:
    record.params["layers.0.bias"] *= factor


def drop_gradient(record: Record) -> None:
    del record.grads[0]["gain"]


DAMAGE = {
    "a gradient twice as large": (lambda r: scale_gradient(r, 2.0), "step 1 of 'out.weight'.* 2 times"),
    "a gradient half as large": (lambda r: scale_gradient(r, 0.5), "0.5 times"),
    "a gradient a little too large": (lambda r: scale_gradient(r, 1.001), "1.001 times"),
    "a gradient just out of tolerance": (lambda r: scale_gradient(r, 1 + 1.1e-5), "differs by 1.1"),
    "a gradient of the wrong sign": (lambda r: scale_gradient(r, -1.0), "-1 times"),
    "a gradient of zeros": (lambda r: scale_gradient(r, 0.0), "differs by 1 "),
    "a gradient that is not a number": (lambda r: scale_gradient(r, float("nan")), "not finite here"),
    "a missing gradient": (drop_gradient, "step 0 is missing for .'gain'."),
    "a gradient too many": (lambda r: r.grads[0].update(odd=torch.ones(1)), "odd"),
    "a gradient of another shape": (lambda r: r.grads[0].update(gain=torch.ones(1)), "shape"),
    "missing steps of gradients": (lambda r: r.grads.pop(), "1 steps, expected 2"),
    "another loss": (lambda r: r.losses.__setitem__(1, r.losses[1] * 1.001), "loss of step 1"),
    "missing losses": (lambda r: r.losses.clear(), "0 steps, expected 2"),
    "another parameter": (lambda r: scale_parameter(r, 1.001), "parameter .* 'layers.0.bias'"),
    "missing parameters": (lambda r: r.params.clear(), "missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damage_is_noticed(reference: Record, damage: str) -> None:
    record = copy.deepcopy(reference)
    assert_close(record, reference, 0.0)
    harm, message = DAMAGE[damage]
    harm(record)
    with pytest.raises(AssertionError, match=message):
        assert_close(record, reference)


def test_a_reference_that_proves_nothing_is_refused(reference: Record) -> None:
    with pytest.raises(AssertionError, match="nothing"):
        assert_close(Record(), Record())
    no_gradients = Record(reference.losses, [{}, {}], reference.params)
    with pytest.raises(AssertionError, match="has none"):
        assert_close(no_gradients, no_gradients)
    zeros = copy.deepcopy(reference)
    scale_gradient(zeros, 0.0)
    with pytest.raises(AssertionError, match="is zero in the reference"):
        assert_close(zeros, zeros)


@world(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_peer_passes(case: Case) -> None:
    check_parity(case, peer(case), steps=3)


@world(2)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_division_by_the_ranks_is_noticed() -> None:
    case = models.case("uneven")

    def shard(model: nn.Module) -> None:
        peer(case)(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda leaf: leaf.grad.mul_(2))

    with pytest.raises(AssertionError, match="it is 2 times the expected one"):
        check_parity(case, shard, steps=1)
