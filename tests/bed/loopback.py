"""One rank of a job whose other ranks do not exist, on a stream that shows every missing wait.

All ranks of such a job are taken to be equal: a gather puts this rank's piece into every place, and a reduction sees
the same numbers from everybody (so a mean is the input, and a sum the input times the number of ranks). The group
poisons its outputs at the issue and fills them only at the wait (see `bed.loopback_stream`), so code that reads too
early, or reuses or frees memory too early, gets NaN or an error instead of luck.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from bed.loopback_stream import CpuStream, CudaStream, Ledger, LoopbackWork, unseen
from bed.recorders import Call, describe
from torch import Tensor, nn

_SAME = ("AVG", "MIN", "MAX", "BAND", "BOR")  # of equal numbers, these are the number


class Loopback(dist.ProcessGroup):
    """Rank `rank` of `world`. Works whose running number is in `skip_wait` never deliver: a forgotten wait."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: str = "cpu",
        delay: float = 0.0,
        skip_wait: Iterable[int] = (),
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(rank, world)
        self._rank, self._world, self._name = rank, world, ""
        self._ledger = ledger or Ledger(frozenset(skip_wait))
        self._stream = CudaStream(self._ledger, delay) if device == "cuda" else CpuStream(self._ledger, delay)

    def getBackendName(self) -> str:
        return "loopback"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    @property
    def log(self) -> list[Call]:
        """Every collective of the job, in order: the place is the running number."""
        return self._ledger.log

    def unwaited(self) -> list[int]:
        """The numbers of the works that nobody has waited for yet."""
        return sorted(self._ledger.open)

    def check(self) -> None:
        """Raise if memory of a collective was freed or resized between its issue and its wait."""
        if problems := self._ledger.problems():
            raise AssertionError("memory was taken from under a collective:\n" + "\n".join(problems))

    # --- gathers ---

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> LoopbackWork:
        return self._gather("_allgather_base", [output], [input])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> LoopbackWork:
        return self._gather("allgather_into_tensor_coalesced", outputs, inputs)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _gather(self, op: str, outputs: list[Tensor], inputs: list[Tensor]) -> LoopbackWork:
        def deliver() -> None:
            for whole, piece in zip(wholes, pieces, strict=True):
                # Of a copy, for in a gather in place the piece lies inside the output.
                whole.view(self._world, -1).copy_(piece.reshape(1, -1).clone().expand(self._world, -1))

        wholes, pieces = _plain(outputs), _plain(inputs)
        for whole, piece in zip(wholes, pieces, strict=True):
            _require_size(op, whole, piece, self._world)
        return self._issue(op, inputs, outputs, deliver)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> LoopbackWork:
        def deliver() -> None:
            for row, piece in zip(rows, pieces, strict=True):
                for place in row:
                    place.copy_(piece.clone())

        rows, pieces = [_plain(row) for row in outputs], _plain(inputs)
        return self._issue("allgather", inputs, [place for row in outputs for place in row], deliver)

    # --- reductions ---

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> LoopbackWork:
        return self._scatter("_reduce_scatter_base", [output], [input], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> LoopbackWork:
        return self._scatter("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _scatter(self, op: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> LoopbackWork:
        def deliver() -> None:
            for piece, whole in zip(pieces, wholes, strict=True):
                mine = whole.reshape(self._world, -1)[self._rank].clone()
                piece.copy_(mine.mul_(factor).view_as(piece))

        factor, name = self._factor(opts)
        pieces, wholes = _plain(outputs), _plain(inputs)
        for piece, whole in zip(pieces, wholes, strict=True):
            _require_size(op, whole, piece, self._world)
        return self._issue(op, inputs, outputs, deliver, name)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> LoopbackWork:
        return self._in_place("allreduce", tensors, *self._factor(opts))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> LoopbackWork:
        return self._in_place("allreduce_coalesced", tensors, *self._factor(opts))

    def _factor(self, opts: Any) -> tuple[float, str]:
        """By what a reduction multiplies equal numbers, and what it is called."""
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        if op == dist.ReduceOp.SUM:
            return self._world, "SUM"
        for name in _SAME:
            if op == getattr(dist.ReduceOp, name):
                return 1, name
        if op == dist.ReduceOp.PREMUL_SUM:
            return op.__getstate__()[1] * self._world, "PREMUL_SUM"
        raise NotImplementedError(f"a loop-back group cannot reduce with {op}")

    # --- the rest ---

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> LoopbackWork:
        return self._in_place("broadcast", tensors, 1, None)

    def barrier(self, opts: Any = None) -> LoopbackWork:
        return self._issue("barrier", [], [], lambda: None)

    @unseen
    def _in_place(self, op: str, tensors: list[Tensor], factor: float, name: str | None) -> LoopbackWork:
        def deliver() -> None:
            for place, value in zip(places, values, strict=True):
                place.copy_(value)

        places = _plain(tensors)
        values = [place * factor for place in places]  # now, for the poison will cover the inputs
        call = describe(f"loopback.{op}", tensors, tensors, name, self._world)
        return self._send(call, [], tensors, deliver)

    def _issue(
        self,
        op: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        deliver: Callable[[], None],
        reduce: str | None = None,
    ) -> LoopbackWork:
        call = describe(f"loopback.{op}", inputs, outputs, reduce, self._world)
        return self._send(call, inputs, outputs, deliver)

    def _send(
        self, call: Call, inputs: list[Tensor], outputs: list[Tensor], deliver: Callable[[], None]
    ) -> LoopbackWork:
        transfer = self._ledger.enter(call, _plain(inputs), _plain(outputs), deliver)
        self._stream.issue(transfer)
        return LoopbackWork(self._stream, transfer)


@unseen
def _plain(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same memory without autograd, and with a version counter of its own: a collective bumps none."""
    return [each.data for each in tensors]


def _require_size(op: str, whole: Tensor, piece: Tensor, world: int) -> None:
    if whole.numel() != piece.numel() * world or whole.dtype != piece.dtype:
        raise ValueError(
            f"{op} over {world} ranks between a piece of {piece.numel()} {piece.dtype} "
            f"and a whole of {whole.numel()} {whole.dtype}"
        )
    if not whole.is_contiguous() or not piece.is_contiguous():
        raise ValueError(f"{op} needs contiguous tensors")


# How the groups of the current job are made: the default one, and those that a mesh makes from it.
_make: list[Callable[[int, int], Loopback]] = []


def _create(store: dist.Store, rank: int, world: int, timeout: object) -> Loopback:
    return _make[-1](rank, world)


@contextlib.contextmanager
def job(
    world: int,
    rank: int = 0,
    device: str = "cpu",
    delay: float = 0.0,
    skip_wait: Iterable[int] = (),
    check: bool = True,
) -> Iterator[Loopback]:
    """A job of `world` ranks in this process alone; yields the default group and checks it at the end."""
    if "loopback" not in dist.Backend.backend_list:
        dist.Backend.register_backend("loopback", _create, devices=["cpu", "cuda"])
    ledger, hook = Ledger(frozenset(skip_wait)), sys.excepthook
    _make.append(lambda rank, world: Loopback(rank, world, device, delay, ledger=ledger))
    try:
        dist.init_process_group("loopback", store=dist.HashStore(), rank=rank, world_size=world)
        group = dist.distributed_c10d._get_default_group()
        yield group
        if check:
            group.check()
    finally:
        if device == "cuda":
            torch.cuda.synchronize()  # what nobody waited for must not write memory that is used again
        if dist.is_initialized():
            dist.destroy_process_group()
        _make.pop()
        sys.excepthook = hook  # init_process_group wraps it


def repeat_shards(model: nn.Module, world: int) -> None:
    """Make every rank's rows of each parameter equal to those of rank 0, so that one rank knows them all."""
    with torch.no_grad():
        for parameter in model.parameters():
            first, *others = parameter.chunk(world)
            for chunk in others:
                chunk.copy_(first[: len(chunk)])


class LoopbackReference:
    """An unsharded model that does what rank 0 of a loop-back job of `world` ranks sees.

    There every rank holds what rank 0 holds. Here the optimizer also moves the other rows, by gradients that no rank
    of the job would use; so after each step they are set back to the rows of rank 0.
    """

    def __init__(self, model: nn.Module, world: int) -> None:
        self.model, self.world = model, world
        self.make_shards_equal()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self.make_shards_equal()

    def make_shards_equal(self) -> None:
        repeat_shards(self.model, self.world)

    def piece(self, tensor: Tensor) -> Tensor:
        """The rows of rank 0."""
        return tensor.chunk(self.world)[0]
