"""Ranks that do not run the same units in the same order raise the same error, and nothing hangs."""

from __future__ import annotations

import copy
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.branches import Branches, quick, sharded, step
from bed.programs import free_port
from bed.recorders import Collectives
from bed.stack import WIDTH, assert_at_rest, assert_gradients, batch
from bed.world import mostly_slow
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from unshard import fully_shard
from unshard.comm.order import check as order
from unshard.errors import OrderError


@contextmanager
def raises_on_every_rank(model: nn.Module, match: str) -> Iterator[None]:
    """The same error on every rank; afterwards the model is at rest, and the next step fails before it sends anything.

    No collective fails by itself here: its timeout is longer than the pool waits. So the error is that of the check.
    """
    with pytest.raises(OrderError, match=match) as caught:
        yield
    # All ranks raise, so only the first one of the process group prints the long hint.
    text, remedy, refers = str(caught.value), "Every rank must run the same forwards", r"The error of rank \d says what"
    assert (remedy in text) != bool(re.search(refers, text)) and (remedy in text or dist.get_rank() > 0), text
    assert_at_rest(model)
    with Collectives() as calls, pytest.raises(OrderError, match=match):
        step(model, [0, 1, 2])
    assert not calls.calls
    assert_at_rest(model)
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, text, group=_other_group())
    assert 0 < sum(remedy in each for each in messages) < len(messages), messages
    if "want different collectives" in text:
        _, places, position, *_ = text.splitlines()
        assert re.fullmatch(r"Rank \d is at \S+\.py:\d+ in \S+ Rank \d is at \S+\.py:\d+ in \S+", places), text
        assert re.match(r"They differ at position \d+ of the process group of ranks ", position), text
    assert len({re.split(f"{remedy}|{refers}", each)[0] for each in messages}) == 1, messages


def _other_group() -> dist.ProcessGroup:
    """The default group has collectives that nobody will ever answer; new groups need it in no way."""
    return dist.new_group(backend="gloo", use_local_synchronization=True)


# Imports once and forks the ranks of each program: they end as any process that Python has started to run a program.
EXITING = """
import os, socket, sys, torch._dynamo  # which a step would import, in every rank
import torch.distributed as dist
from bed.branches import quick, sharded, step
from unshard.errors import CollectiveError, OrderError

def become_a_rank():
    orders = socket.socket(fileno=int(sys.argv[1]))
    while True:
        order, streams, *_ = socket.recv_fds(orders, 100, 6)
        if not order:
            os._exit(0)
        children = []
        for rank in range(2):
            children.append(os.fork())
            if children[-1] == 0:
                for number, stream in enumerate(streams[3 * rank : 3 * rank + 3]):
                    os.dup2(stream, number)
                break
        for stream in streams:
            os.close(stream)
        if children[-1] == 0:
            orders.close()
            return rank, *order.decode().split()
        orders.sendall(f"{children[0]} {children[1]}\\n".encode())
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        orders.sendall(f"{codes[0]} {codes[1]}\\n".encode())

rank, port, way = become_a_rank()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
with quick():
    model = sharded()
    for _ in range(3):
        step(model, [0, 1, 2])
    try:
        if way == "reduction":
            step(model, [0, 2] if rank else [0, 1, 2])
        elif way in ("ended", "killed", "failed"):
            if rank and way == "failed":
                raise KeyError("no such batch")
            elif rank:
                os.kill(os.getpid(), 9) if way == "killed" else sys.exit()
            step(model, [0, 1, 2])
        else:
            model.blocks[2].unshard() if rank else step(model, [0, 1, 2])
    except OrderError as error:
        print("raised", flush=True)
        if rank and way != "reduction":
            sys.stdin.read()  # lives on, with its connections open, until the test lets it go
        if way == "destroy":
            del model
            dist.destroy_process_group()
        elif way == "raise":
            raise
    except CollectiveError as error:
        print(error, flush=True)
"""


@pytest.fixture(scope="module")
def launcher() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    number = theirs.fileno()
    process = subprocess.Popen(
        [sys.executable, "-c", EXITING, str(number)], env={**environment, "OMP_NUM_THREADS": "1"}, pass_fds=[number]
    )
    theirs.close()
    with ours:
        ours.settimeout(120)
        yield ours
    try:
        process.wait(30)
    finally:
        process.kill()


class Program:
    """Two ranks, each with pipes of its own, that are gone when the block is left."""

    def __init__(self, launcher: socket.socket, way: str) -> None:
        pipes = [os.pipe() for _ in range(6)]
        # Of each rank: its input is written here, its output and errors are read here.
        self._inputs = [pipes[0][1], pipes[3][1]]
        self._outputs = [pipes[place][0] for place in (1, 2, 4, 5)]
        theirs = [read if place % 3 == 0 else write for place, (read, write) in enumerate(pipes)]
        socket.send_fds(launcher, [f"{free_port()} {way}".encode()], theirs)
        for each in theirs:
            os.close(each)
        self._launcher = launcher
        self._pids = self._answer()
        self._codes: list[int] = []

    def _answer(self) -> list[int]:
        return [int(number) for number in _line(lambda: self._launcher.recv(1)).split()]

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *unused: object) -> None:
        if not self._codes:
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)  # the launcher knows them still: it has not waited for both
            self.codes()
        for each in (*self._inputs, *self._outputs):
            os.close(each)

    def line(self, rank: int) -> bytes:
        return _line(lambda: os.read(self._outputs[2 * rank], 1))

    def let_go(self, rank: int) -> None:
        os.close(self._inputs[rank])
        self._inputs[rank] = os.open(os.devnull, os.O_WRONLY)

    def lives(self, rank: int) -> bool:
        """Its pipe is open, and nothing is in it."""
        return not select.select([self._outputs[2 * rank]], [], [], 0)[0]

    def ended(self, rank: int, timeout: float = 60) -> list[str]:
        """What it still wrote, to its output and as errors, once it has ended."""
        texts, limit = [], time.monotonic() + timeout
        for stream in self._outputs[2 * rank : 2 * rank + 2]:
            pieces = [b"?"]
            while pieces[-1]:
                ready, *_ = select.select([stream], [], [], max(0.0, limit - time.monotonic()))
                assert ready, f"rank {rank} has not ended; it wrote {texts} {pieces}"
                pieces.append(os.read(stream, 4096))
            texts.append(b"".join(pieces[1:]).decode())
        return texts

    def codes(self) -> list[int]:
        self._codes = self._answer()
        return self._codes


@pytest.mark.slow
def test_the_program_ends_inside_a_reduction(launcher: socket.socket) -> None:
    """A thread waits for Gloo's reduce-scatter; coming back while the interpreter ends it would abort the process."""
    with Program(launcher, "reduction") as program:
        outputs = [program.ended(rank) for rank in range(2)]
        assert all(output == "raised\n" and "terminate called" not in errors for output, errors in outputs), outputs
        assert set(program.codes()) <= {0, 1}


@pytest.mark.parametrize("way", mostly_slow(["exit", "raise", "destroy"], ["raise"]))
def test_the_program_ends(launcher: socket.socket, way: str) -> None:
    """Also while a rank that will never answer keeps its connections open, and without a crash."""
    with Program(launcher, way) as program:
        for rank in range(2):
            assert program.line(rank) == b"raised\n", program.ended(rank)
        output, errors = program.ended(0)
        assert program.lives(1)
        program.let_go(1)
        program.ended(1)
        assert program.codes() == [int(way == "raise")] * 2, errors
    assert not output and ("OrderError: The ranks want different collectives" in errors) == (way == "raise")


@pytest.mark.parametrize(
    ("way", "said", "code"),
    [
        pytest.param("ended", "has ended;", 0, marks=pytest.mark.slow),
        ("killed", "has shown no sign of life", -9),
        ("failed", "has ended with KeyError: 'no", 1),
    ],
)
def test_a_rank_ends_and_the_other_says_so(launcher: socket.socket, way: str, said: str, code: int) -> None:
    with Program(launcher, way) as program:
        output, errors = program.ended(0)
        program.ended(1)
        assert program.codes() == [0, code], errors
    assert "Rank 0 wanted to all-gather unit '(root)'" in output and f"waited for rank 1: rank 1 {said}" in output
    # If the rank ended by itself, its last known line may be older than its last collective.
    assert way == "ended" or re.search(r"; was last seen at \S+:\d+ in ", output)


def _line(read: Callable[[], bytes]) -> bytes:
    """Up to the end of the line, or of what can be read; it may come in pieces."""
    line = piece = read()
    while piece not in (b"\n", b""):
        piece = read()
        line += piece
    return line


def order_of(model: nn.Module) -> order.Order:
    return getattr(fully_shard.state(model).unit.param_groups[0].shards, "order", None)


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


# --- disagreement --------------------------------------------------------------------------------------------------


@world(2, 3)
def test_in_the_first_forward() -> None:
    with quick():
        model = sharded()
        with raises_on_every_rank(
            model, r"rank \d wants to all-gather unit 'blocks.[01]', rank \d to all-gather unit 'blocks.[01]'"
        ):
            step(model, [1, 0, 2] if is_last() else [0, 1, 2])


@world(2, 3)
def test_units_that_were_exchanged_before_the_first_forward() -> None:
    """They bear each other's names then; what tells them apart is the order in which they were sharded."""
    with quick():
        model = sharded()
        if is_last():
            model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]
        with raises_on_every_rank(model, r"unit 'blocks.0' \(the one numbered \d+.\d+\)"):
            step(model, [0, 1, 2])


@pytest.mark.parametrize("good", [0, 1, 2, 5])
@pytest.mark.parametrize("which", [[0, 2, 1], [1, 2], [0, 1], [0, 1, 2, 2]], ids=str)
@world(2)
def test_one_rank_takes_another_way(which: list[int], good: int) -> None:
    """The others do what they have always done, and wait inside Gloo."""
    with quick():
        model = sharded()
        for _ in range(good):
            step(model, [0, 1, 2])
        with raises_on_every_rank(model, r"rank \d wants to .* unit '.*, rank \d to .* unit '"):
            step(model, which if is_last() else [0, 1, 2])
            step(model, [0, 1, 2])


@pytest.mark.parametrize("good", [0, 3])
@world(2, 3)
def test_only_backward_differs(good: int) -> None:
    with quick():
        model = sharded()
        for _ in range(good):
            step(model, [0, 1, 2])
        with raises_on_every_rank(model, r"unit 'blocks.[12]'"):
            step(model, [0, 1, 2], used=[0, 2] if is_last() else [0, 1, 2])


@world(2)
def test_other_parameters_of_a_unit_have_gradients() -> None:
    with quick():
        model = fully_shard(Branches())  # all of it is one unit
        step(model, [0, 1])
        with raises_on_every_rank(
            model,
            r"reduce-scatter the gradients of unit '\(root\)' without blocks.[12].*rank \d to .* without blocks.[12]",
        ):
            step(model, [0, 1] if is_last() else [0, 2])


@world(2)
def test_a_forward_too_many() -> None:
    """One rank validates once more than the other, which trains; both have done both before."""
    with quick():
        model = sharded()
        for _ in range(4):
            step(model, [0, 1, 2])
            with torch.no_grad():
                model(batch(), [0, 1, 2])
        with raises_on_every_rank(model, r"rank \d wants to"):
            for _ in range(3):
                if is_last():
                    with torch.no_grad():
                        model(batch(), [0, 1, 2])
                else:
                    step(model, [0, 1, 2])


@world(2)
def test_two_models_in_another_order() -> None:
    """Units of the same name and size: the numbers would be mixed up, and nothing would hang."""
    with quick():
        first = sharded()
        second = copy.deepcopy(first)
        for _ in range(3):
            step(first, [0, 1, 2])
            step(second, [0, 1, 2])
        with raises_on_every_rank(
            first,
            r"all-gather unit '\(root\)' \(the one numbered [\d.]+\), rank \d to all-gather unit '\(root\)' \(the one",
        ):
            models = [second, first] if is_last() else [first, second]
            for model in models:
                step(model, [0, 1, 2])


@world(2)
def test_a_rank_that_does_not_come() -> None:
    store = dist.distributed_c10d._get_default_store()
    with quick():
        model = sharded()
        for _ in range(3):
            step(model, [0, 1, 2])
        if is_last():
            store.wait(["the other rank has given up"])
            with pytest.raises(OrderError, match="rank 1 did not join"):
                step(model, [0, 1, 2])
        else:
            order_of(model)._peer_seconds = 0.5
            expected = r"wants to all-gather unit 'blocks.2', but rank 1 did not join within 0\.5 s\."
            with pytest.raises(OrderError, match=expected):
                model.blocks[2].unshard()
            store.set("the other rank has given up", "")
        assert_at_rest(model)


@world(4)
def test_replicas_that_disagree() -> None:
    """Within each replica the ranks agree; gradients would be added up crosswise. All four ranks raise an error."""
    with quick():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh=mesh)
        for _ in range(3):
            step(model, [0, 1, 2])
        with pytest.raises(OrderError, match=r"(?s)wants to all-reduce over the replicas.* of ranks [01], [23]\."):
            step(model, [2, 1, 0] if dist.get_rank() > 1 else [0, 1, 2])
            step(model, [0, 1, 2])
        assert_at_rest(model)


@world(4)
def test_an_error_among_the_shards_of_one_replica_reaches_the_others() -> None:
    with quick():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(mesh=mesh)
        for _ in range(3):
            step(model, [0, 1, 2])
        with pytest.raises(OrderError, match=r"(?s)rank \d wants to .* of ranks 2, 3\."):
            step(model, [0, 2, 1] if is_last() else [0, 1, 2])
            step(model, [0, 1, 2])
        assert_at_rest(model)


# --- a rank that has no data for a unit ----------------------------------------------------------------------------


@pytest.mark.parametrize("remedy", ["none", "dummy input", "part of another unit"])
@world(2, 3)
def test_what_the_error_suggests_works(remedy: str) -> None:
    """For a rank that skips a unit."""
    with quick():
        if remedy == "none":
            model = sharded()
            model.set_reduce_scatter_unused_params(True)
            suggested = (
                r"dummy input .* add `0 \* output.sum\(\)` to the loss; .*set_reduce_scatter_unused_params\(True\)"
            )
            if dist.get_rank():
                suggested += r"|The error of rank 0 says what to do\."
            with pytest.raises(OrderError, match=suggested):
                step(model, [0, 1, 2] if is_last() else [0, 2])
            return
        if remedy == "dummy input":
            model = Skipping()
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        else:
            model = Branches()
            for number in (0, 2):
                fully_shard(model.blocks[number])
            fully_shard(model).set_reduce_scatter_unused_params(True)
        for _ in range(3):
            model.zero_grad()
            step(model, [0, 1, 2] if is_last() else [0, 2])
        assert_gradients(model, _mean_over_ranks())


class Skipping(Branches):
    """Runs the blocks that it skips on a dummy input."""

    def forward(self, x: torch.Tensor, which: list[int]) -> dict[int, torch.Tensor]:
        x = self.stem(x)
        outputs = {}
        for number, block in enumerate(self.blocks):
            outputs[number] = block(x if number in which else torch.zeros(1, WIDTH, requires_grad=True))
        outputs[which[0]] = outputs[which[0]] + sum(0 * each.sum() for each in outputs.values())
        return outputs


def _mean_over_ranks() -> nn.Module:
    """The model of one process, with the mean of the gradients that the ranks would compute for themselves."""
    model = Branches()
    for rank in range(dist.get_world_size()):
        step(model, [0, 1, 2] if rank == dist.get_world_size() - 1 else [0, 2])
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
    return model


# --- agreement -----------------------------------------------------------------------------------------------------


class Counted:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any) -> None:
        self._store, self.calls = store, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._store, name)


def counted(model: nn.Module) -> Callable[[], int]:
    board = order_of(model)._store
    board._store = mine = Counted(board._store)
    board.job = jobs = Counted(board.job)
    return lambda: mine.calls + jobs.calls


@world(2, 3)
def test_nothing_is_exchanged_once_the_order_is_known() -> None:
    model = sharded()
    calls = counted(model)
    for _ in range(3):
        step(model, [0, 1, 2])
    learned = calls()
    assert learned > 10
    for _ in range(10):
        step(model, [0, 1, 2])
    assert calls() == learned


@pytest.mark.parametrize("kind", ["accumulation", "validation"])
@world(2)
def test_a_cycle_of_several_steps_is_learned(kind: str) -> None:
    model = sharded()
    calls = counted(model)
    counts = []
    for _ in range(6):
        for number in range(4):
            if kind == "accumulation":
                model.set_requires_gradient_sync(number == 3)
            with torch.set_grad_enabled(kind == "accumulation" or number < 2):
                step(model, [0, 1, 2]) if torch.is_grad_enabled() else model(batch(), [0, 1, 2])
        counts.append(calls())
    assert counts[-1] == counts[-3] > 10


@world(2)
def test_an_order_that_varies_alike_on_all_ranks() -> None:
    """Numbers are right, and the checks come to an end: at the latest, few are left."""
    with quick(CHECKS_PER_LABEL=4):
        _vary()


def _vary() -> None:
    model, reference = sharded(), Branches()
    calls = counted(model)
    rng, counts = random.Random(0), []
    for seed in range(30):
        which = rng.sample(range(3), k=rng.randrange(1, 4))
        for each in (model, reference):
            each.zero_grad()
            step(each, which, seed=seed)
        assert_gradients(model, reference)
        counts.append(calls())
    assert counts[5] > counts[0]
    assert counts[-1] == counts[-5] > 10


@world(2)
def test_keys_do_not_pile_up() -> None:
    """Beyond what is kept for slower ranks, old ones are deleted."""
    with mock.patch("unshard.comm.order.sequence.KEPT", 20), quick(CHECKS_PER_LABEL=10**6):
        model = sharded()
        rng = random.Random(0)
        keys = []
        for _ in range(40):
            step(model, rng.sample(range(3), k=3))
            dist.barrier()
            keys.append(dist.distributed_c10d._get_default_store().num_keys())
            dist.barrier()
    assert keys[1] > keys[0]
    assert max(keys[20:]) <= max(keys[:20]) + 20


@world(2)
def test_a_slow_rank_is_no_error() -> None:
    """Longer than a slice, on the way and at a check."""
    with mock.patch.object(order, "POLL_SECONDS", 0.1):
        model, reference = sharded(), Branches()
        for number in range(4):
            if dist.get_rank() == number % 2:
                time.sleep(0.5)
            which = [0, 1, 2] if number < 3 else [2, 1, 0]
            for each in (model, reference):
                step(each, which)
    assert_gradients(model, reference)


def test_only_real_peers_are_asked() -> None:
    with loopback.job(2):
        model = sharded()
        step(model, [0, 1, 2])
        assert order_of(model) is None


@world(1)
def test_one_rank_has_nobody_to_disagree_with() -> None:
    model = sharded()
    for which in ([0, 1], [1, 2]):
        step(model, which)
    assert dist.group.WORLD not in order._orders


@world(2)
def test_all_units_share_the_order_of_their_group() -> None:
    model = sharded()
    step(model, [0, 1, 2])
    orders = {order_of(module) for module in (model, *model.blocks)}
    assert orders == {order._orders[dist.group.WORLD]["gloo"]}
