"""Runs work on all ranks of a job. If the work fails on one rank, all ranks raise the same error.

`Differences` collects the mismatches that ranks find when they load a checkpoint.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ..comm.order.check import Order, explained, known_orders
from ..engine.api import orders_of
from ..errors import CheckpointError, listed
from ..state.model import check_model
from . import storage

_log = logging.getLogger("unshard")
T = TypeVar("T")
SHARE = (
    "All ranks must see the same files: put them on a file system that all hosts mount. With a network file system, a "
    "host may see changes late; try again."
)
_COMPRESSED = 1024
"""Fields of fewer bytes are sent as they are, because decompressing any field takes 20 microseconds or more."""


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks, or (0, 1) if there is no process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def together(what: str, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return the results of all ranks. All ranks must call this function.

    If `work` raises on any rank, all ranks raise a CheckpointError that names the failed ranks. If a rank dies, the
    other ranks raise a CheckpointError that names the dead rank if it is known.
    """
    _, size = rank_and_size()
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    own = (result, None if error is None else error_text(error), socket.gethostname())
    answers: list[Any] = [own]
    if size > 1:
        answers = [None] * size
        with exchanging(what, own[1]):
            dist.all_gather_object(answers, own)
    if any(text is not None for _, text, _ in answers):
        raise CheckpointError(_message(what, [(text, host) for _, text, host in answers])) from error
    return [value for value, _, _ in answers]


@contextmanager
def exchanging(what: str, error: str | None = None) -> Iterator[None]:
    """If a collective in the `with` block fails, raise a CheckpointError that names the dead ranks if they are known.

    `error` is an earlier error of this rank to include in the message.
    """
    try:
        yield
    except RuntimeError as failure:  # raised by the backend
        here = "" if error is None else f" On this rank: {error}"
        cause, remedy = explained(failure), ""
        if not cause:
            first = (str(failure).splitlines() or [""])[0]
            cause = (
                f"A collective failed: {first} A rank has probably died, or was slower than the timeout of the process "
                "group; see its output."
            )
            remedy = " Restart all ranks and load the latest one."
        raise CheckpointError(f"{what} failed.{here} {cause} Published checkpoints are intact.{remedy}") from failure


def begin(what: str, model: nn.Module | None = None) -> None:
    """Raise if another rank calls a different function. Call this first in every function that all ranks must call.

    `what` completes "rank 0 wants to ..." in error messages, and must be a constant.
    """
    if model is not None:
        check_model(model)
    if dist.is_available() and dist.is_initialized():
        orders: set[Order] = {*known_orders([dist.group.WORLD])}
        orders.update(() if model is None else orders_of(model.parameters()))
        for order in sorted(orders, key=attrgetter("name")):
            # Skip failed orders of subgroups, because a checkpoint needs only the process group of all ranks.
            if not order.error or len(order.ranks) == dist.get_world_size():
                order.meet(what)


def on_first_rank(what: str, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 only and return its result on all ranks. All ranks must call this."""
    rank, _ = rank_and_size()
    return together(what, lambda: work() if rank == 0 else None)[0]  # type: ignore[return-value]


def require_seen(path: Path) -> None:
    """Raise if this rank does not see a file or folder that rank 0 sees."""
    if not storage.exists(path):
        raise CheckpointError(f"{path} does not exist on {socket.gethostname()}, but rank 0 sees it. {SHARE}")


def refuse_different_files(answers: Iterable[tuple[str, str]], what: str) -> None:
    """Raise if ranks have read different files. `answers` are the checksum of what a rank has read, and its host."""
    ranks: dict[str, list[str]] = {}
    for rank, (checksum, host) in enumerate(answers):
        ranks.setdefault(checksum, []).append(f"rank {rank} on {host}")
    if len(ranks) > 1:
        versions = [f"one by {listed(each)}" for each in ranks.values()]
        raise CheckpointError(f"The ranks read different {what}: {'; '.join(versions)}. {SHARE}")


def pack(fields: Iterable[Any]) -> list[Any]:
    """Return `fields` as bytes. The keys and the values of a dict are converted one by one."""

    def bytes_of(value: Any) -> bytes:
        data = pickle.dumps(value)
        return data if len(data) < _COMPRESSED else zlib.compress(data, 1)

    return [
        [bytes_of(part) for item in each.items() for part in item] if type(each) is dict else bytes_of(each)
        for each in fields
    ]


def unpacked(ranks: Iterable[list[Any]]) -> Iterator[list[Any]]:
    """Yield the fields that each rank passed to `pack`. Equal bytes become one object.

    Ranks of a job describe themselves nearly alike, so this takes little time and memory in a large job.
    """
    known: dict[bytes, Any] = {}

    def value(data: bytes) -> Any:
        if data not in known:
            known[data] = pickle.loads(data if data.startswith(pickle.PROTO) else zlib.decompress(data))
        return known[data]

    for fields in ranks:
        yield [
            value(each)
            if isinstance(each, bytes)
            else dict(zip(map(value, each[::2]), map(value, each[1::2]), strict=True))
            for each in fields
        ]


def refuse_different_parts(given: list[list[str]]) -> None:
    """Raise if ranks passed different arguments besides the model. `given` lists the argument names of each rank."""
    for rank, names in enumerate(given):
        if names != given[0]:
            raise CheckpointError(
                f"Besides the model, rank 0 passed {listed(given[0]) or 'nothing'}, and rank {rank} passed "
                f"{listed(names) or 'nothing'}. Pass the same on all ranks."
            )


def error_text(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        name = os.fsdecode(error.filename) if isinstance(error.filename, bytes | str) else error.filename
        return f"{type(error).__name__}: {error.strerror} ({name})"
    return f"{type(error).__name__}: {error}"


def _message(what: str, answers: list[tuple[str | None, str]]) -> str:
    """`answers` are the error and the host of each rank."""
    if len(answers) == 1:
        return f"{what} failed. {answers[0][0]}"
    several = len({host for _, host in answers}) > 1
    failed: dict[tuple[str, str], list[int]] = {}
    for rank, (text, host) in enumerate(answers):
        if text is not None:
            failed.setdefault((text, f" ({host})" if several else ""), []).append(rank)
    parts = []
    for (text, host), ranks in list(failed.items())[:4]:
        some = f"rank{'' if len(ranks) == 1 else 's'} {listed(ranks, most=8)}{host}"
        parts.append(f"On {'all ranks' if len(ranks) == len(answers) else some}: {text}")
    more = f" {len(failed) - 4} other errors." if len(failed) > 4 else ""
    return f"{what} failed. {' '.join(parts)}{more}"


# -- differences between a checkpoint and a run -------------------------------------------------------------


@dataclass
class Differences:
    """Mismatches between the source of a load (such as a checkpoint) and the model or optimizer."""

    missing: dict[str, int] = field(default_factory=dict)
    """Names that the source lacks, with their sizes in bytes."""
    unexpected: dict[str, int] = field(default_factory=dict)
    """Names that only the source has, with their sizes in bytes."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of mismatches that even `strict=False` does not allow."""
    without_state: dict[str, int] = field(default_factory=dict)
    """Trainable parameters without saved state, with sizes in bytes. They may be unused, so this is not an error."""

    @staticmethod
    def of_all_ranks(each_rank: list[Differences]) -> Differences:
        return Differences(
            missing={name: nbytes for each in each_rank for name, nbytes in each.missing.items()},
            # With pipeline parallelism, a name that is unexpected on one rank may be in another rank's model.
            unexpected={
                name: nbytes
                for name, nbytes in each_rank[0].unexpected.items()
                if all(name in each.unexpected for each in each_rank)
            },
            wrong=list(dict.fromkeys(text for each in each_rank for text in each.wrong)),
            without_state={name: nbytes for each in each_rank for name, nbytes in each.without_state.items()},
        )

    def refuse(self, where: Path | str, strict: bool, what: str = "checkpoint", look: str = "") -> None:
        """Raise if the differences prevent loading. In the message, `what` names the source and `look` gives advice."""
        parts = []
        if strict and self.missing:
            parts.append(f"{_counted(self.missing)} missing in the {what}: {listed(self.missing)}.")
        if strict and self.unexpected:
            parts.append(f"{_counted(self.unexpected)} of the {what} unexpected here: {listed(self.unexpected)}.")
        if self.wrong:
            parts.append(f"{len(self.wrong)} cannot be loaded: {listed(self.wrong)}.")
        if parts:
            advice = "" if self.wrong else " Pass strict=False to load the rest."
            raise CheckpointError(f"{where} does not fit. {' '.join(parts)} Nothing was changed.{advice}{look}")

    def warn(self, where: Path) -> None:
        """Log warnings about all names and state that are not loaded. Call this after `refuse`."""
        for kind, names in (("missing in it", self.missing), ("of it unexpected here", self.unexpected)):
            if names:
                _log.warning("%s is partly loaded: %s %s: %s.", where, _counted(names), kind, listed(names))
        if self.without_state:
            _log.warning(
                "%s: the optimizer has no state for %s: %s. They start without state. If the saved run trained them, "
                "it lost their state.",
                *(where, _counted(self.without_state, "parameter", "parameters"), listed(self.without_state)),
            )


def _counted(names: dict[str, int], one: str = "entry", several: str = "entries") -> str:
    nbytes = sum(names.values())
    return f"{len(names)} {one if len(names) == 1 else several} ({nbytes} bytes)"
