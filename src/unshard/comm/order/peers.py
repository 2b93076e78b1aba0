"""Tells the other ranks what this rank is doing, and finds the ranks that a collective waits for.

A rank whose wait fails reads what the announcers (`announcing.py`) of the other ranks have written.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress

from ...errors import listed
from ...torch_private import line_of_program
from . import announcing
from .announcing import Announcement, Announcer, announcement
from .sequence import OrderStore, Progress, is_of_unit

RECENT = 16  # a rank can be this many collectives ahead of another rank that waits

STEP = "step its optimizer"

REMEDY = (
    "Every rank must run the same forwards and backwards in the same order. Look for branches, loops and losses that "
    "depend on the rank or its data, for different numbers of micro-batches, and for exceptions that only one rank "
    "catches.\n"
    "If ranks have different work, put it into `with unshard.step(model)`. Or run a unit without data on a dummy input "
    "(one that requires a gradient if the real one does) and add `0 * output.sum()` to the loss; or leave the module "
    "in a larger unit that every rank runs, and call set_reduce_scatter_unused_params(True) on that unit.\n"
    "The process group is no longer usable: end the job."
)
CALLS_REMEDY = (
    "Every rank must make the same calls in the same order: forwards, backwards, clipping, gradient scaling, optimizer "
    "steps and checkpoint calls. Look for branches that depend on the rank, for different numbers of micro-batches, "
    "and for exceptions that only one rank catches. If only some ranks load a checkpoint, hosts see "
    "different files.\n"
    "The process group is no longer usable: end the job."
)
RAISED_REMEDY = (
    "Training can continue after an exception only if all ranks raise one at the same point. Otherwise some ranks have "
    "issued collectives that others never issue, and the process group is no longer usable: end the job on all ranks "
    "and restart it from a checkpoint. To skip bad data, decide before forward: in unshard.step, a rank may simply run "
    "fewer micro-batches; otherwise, all-reduce a flag and skip the step on all ranks."
)
FAILED_REMEDY = (
    "Every rank must shard the same modules, run the same forwards and backwards, and end after the same number of "
    "steps. If a rank is only slow, give init_process_group a longer timeout. The process group is no longer usable: "
    "end the job on all ranks and restart it from a checkpoint."
)
REMEDIES = (REMEDY, CALLS_REMEDY, RAISED_REMEDY, FAILED_REMEDY)

_log = logging.getLogger("unshard")

# -- the other ranks ---------------------------------------------------------------------------------------


class Peers:
    """Tells the other members of a process group what this rank is doing, and reads what they are doing."""

    def __init__(self, store: OrderStore, announcer: Announcer, progress: Progress, warn_seconds: float):
        """`warn_seconds` is how long this rank waits for other ranks before it logs what they are doing."""
        self.name, self.ranks, self.announcer, self.progress = store.name, store.ranks, announcer, progress
        self.failed = False
        """True if this rank has raised an error about other ranks. This rank then logs no more warnings."""
        self._store, self._warn_seconds = store, warn_seconds
        self._next_look = 0.0
        self._position = -1, 0.0
        announcer.add(self)

    def position(self, now: float) -> tuple[int, str, float]:
        """Return how many collectives this rank has announced, a description of the latest one, and a time.

        The time is the `now` of the first call that returned the current count. Only the announcer calls this method.
        """
        issued, text = self.progress.last_announced()
        if self._position[0] != issued:
            self._position = issued, now
        return issued, text, self._position[1]

    def forget_position(self) -> None:
        """Take the time of the current position again, because the announcer's clock has changed."""
        self._position = -1, 0.0

    def own(self) -> Announcement:
        """Return an announcement that describes this rank now."""
        issued, last = self.progress.last_announced()
        raised = dict(self.announcer.last_raised)
        after = raised.pop("raised_after", {}).get(self.name, -1)
        host = socket.gethostname()
        return Announcement(self._store.rank, host, issued=issued, last=last, raised_after=after, **raised)

    def others(self) -> list[Announcement]:
        """Return the latest announcements of the other members of the process group."""
        records = self.announcer.records([rank for rank in self.ranks if rank != self._store.rank])
        return [announcement(rank, record, self.name) for rank, record in records.items()]

    def places(self, *ranks: int) -> list[str]:
        """Return a name for each of the ranks. The names include hosts if the process group has several."""
        announced = [self.own(), *self.others()]
        hosts = {each.rank: each.host for each in announced}
        several = len({*hosts.values()} - {""}) > 1
        return [f"rank {rank} on {hosts[rank]}" if several and hosts[rank] else f"rank {rank}" for rank in ranks]

    def lines(self, rank: int, position: int) -> str:
        """Return a text with the lines of the program on this rank and on `rank`, if they are known.

        Wait until `rank` has announced its collective at `position`: an earlier line would mislead.
        """
        mine = line_of_program(threading.main_thread().ident or 0)
        needed, limit = self.progress.count_at(position), time.monotonic() + 1.5 * self.announcer.interval
        while (theirs := self._announced_by(rank)).issued < needed and not theirs.ended and time.monotonic() < limit:
            time.sleep(self.announcer.interval / 20)
        texts = [f"Rank {self._store.rank} is at {mine}."] if mine else []
        if theirs.place and theirs.issued >= needed:
            texts.insert(0, f"Rank {rank} {'was last seen' if theirs.ended else 'is'} at {theirs.place}.")
        return " ".join(texts) + "\n" if texts else ""

    def _announced_by(self, rank: int) -> Announcement:
        return announcement(rank, self.announcer.records([rank])[rank], self.name)

    def fail(self, error: str) -> None:
        """Note that this rank raises `error` about other ranks."""
        self.failed = True
        if announcing.watcher is not None:
            announcing.watcher.failed(self.announcer, error)

    def doing(self, ranks: Collection[int]) -> list[str]:
        """Return one text for each other rank in `ranks`. The text says what that rank is doing."""
        mine, now = self.own(), self.announcer.now()
        return [described(each, mine, False, now) for each in self.others() if each.rank in ranks]

    def any_gave_up(self) -> bool:
        """Return True if another rank has raised an error and will not join a collective that this rank waits for."""
        mine = self.own()
        return self.announcer.any_raised() and any(
            (each.waited_for or each.left) and raised_alone(each, mine) for each in self.others()
        )

    def cause(self, *texts: str) -> str:
        """Return a message that says why the ranks may differ and what the user should do.

        `texts` are the labels' texts of the collectives that the ranks want.
        """
        raised = raised_lately([self.own(), *self.others()], self.announcer.now())
        if raised:
            return f"The cause is an exception: {raised}. {RAISED_REMEDY}"
        return REMEDY if all(map(is_of_unit, texts)) else CALLS_REMEDY

    def explain_failure(self, what: str, patient: bool) -> str:
        """Return a message that names the ranks that the failed collective `what` waited for.

        Return an empty string if no such ranks are found. If `patient` is True, this method first waits to find out
        which ranks are alive.
        """
        rank = self._store.rank
        begin = f"Rank {rank} wanted to {what}, and the backend failed."
        try:
            absent = self._find_absent(patient)
            if not absent:
                return ""
            raised = any(each.raised and not each.waited_for for each in self.others() if each.rank in absent)
        except RuntimeError:
            where = f" on {self.announcer.first_host}" if self.announcer.first_host else ""
            return (
                f"{begin} The job's store does not answer either: the process that hosts it, rank 0 or the launcher"
                f"{where}, has ended or cannot be reached. {FAILED_REMEDY}"
            )
        who = f"rank {rank} waited for {named(list(absent))}: {listed(absent.values(), 8)}"
        with suppress(RuntimeError):
            self.announcer.raised(f"CollectiveError: {who}", absent)
            self._wait_for_readers(absent)
        remedy = RAISED_REMEDY if raised else FAILED_REMEDY
        return f"{begin} In the process group of {named(self.ranks)}, {who}. {remedy}"

    def _find_absent(self, patient: bool) -> dict[int, str]:
        mine, interval = self.own(), self.announcer.interval
        limit = time.monotonic() + (1.5 * interval if patient else 0.0)
        others = self.others()
        first = {each.rank: each.count for each in others}
        # A rank that announces something after the failure is alive.
        while True:
            fresh = {each.rank for each in others if each.count > first[each.rank]}
            known = any((each.ended or raised_alone(each, mine)) and not each.waited_for for each in others)
            late = time.monotonic() > limit
            if known or late or all(each.ended or each.rank in fresh for each in others):
                silent = set(first) - fresh if late and patient and not known else set()
                return absent_ranks(others, mine, fresh, silent, self.announcer.now())
            time.sleep(interval / 20)
            others = self.others()

    def _wait_for_readers(self, absent: Collection[int]) -> None:
        # Ranks with the same failure also read the cause from the store, which may end with this process.
        limit = time.monotonic() + 2 * self.announcer.interval
        while time.monotonic() < limit:
            others = [each for each in self.others() if each.rank not in absent]
            if all(each.ended or each.waited_for for each in others):
                return
            time.sleep(self.announcer.interval / 20)

    def warn_of_absent(self) -> None:
        """Log a warning that says which ranks this rank is waiting for. Only the announcer's thread calls this method.

        This method logs the first warning after `warn_seconds`, or earlier if one of these ranks can no longer join. It
        logs the next warning each time the duration of the wait has doubled.
        """
        issued, since = self._position
        stalled = self.announcer.now() - since if issued == self.progress.last_announced()[0] else 0.0
        if stalled < 2 * self.announcer.interval:
            self._next_look = 0.0
            return
        if stalled < self._next_look or self.failed:
            return
        late = stalled >= self._warn_seconds
        self._next_look = 2 * stalled if late else min(2 * stalled, self._warn_seconds)
        mine, now = self.own(), self.announcer.now()
        if mine.last == STEP:
            return  # an optimizer step waits for nobody
        behind = [
            each
            for each in self.others()
            if each.issued < mine.issued and (late or each.ended or raised_alone(each, mine))
        ]
        if behind:
            what = listed([described(each, mine, False, now) for each in behind])
            _log.warning("rank %d has waited %.0f s to %s: %s", self._store.rank, stalled, mine.last, what)


def raised_alone(each: Announcement, mine: Announcement) -> bool:
    """Return True if another rank has recently raised an exception, and this rank has not raised one at the same point.

    `each` is the announcement of the other rank, and `mine` is the announcement of this rank. Only exceptions that
    leave forward or backward count.
    """
    return bool(each.raised) and each.raised_after >= mine.issued - RECENT and each.raised_after != mine.raised_after


def absent_ranks(
    others: list[Announcement], mine: Announcement, fresh: set[int], silent: set[int], now: float
) -> dict[int, str]:
    """Return the ranks that a failed collective of this rank waited for, each with a text about what it did instead.

    `fresh` contains the ranks that have announced something after the collective failed. The announcements of all other
    ranks are too old to tell whether these ranks are behind. `silent` contains the ranks that have announced nothing
    for so long that their processes may have ended. Ranks that are only behind are returned only if this function finds
    no ranks that have ended, raised or fallen silent, because they may wait for those. Ranks that raised an error only
    because they had waited for others come last.
    """
    gone: dict[int, str] = {}
    behind: dict[int, str] = {}
    gave_up: dict[int, str] = {}
    for each in others:
        raised = raised_alone(each, mine)
        if each.waited_for and raised:
            gave_up[each.rank] = described(each, mine, False, now)
        elif each.ended or each.rank in silent or raised:
            gone[each.rank] = described(each, mine, each.rank in silent, now)
        elif each.rank in fresh and each.issued < mine.issued:
            behind[each.rank] = described(each, mine, False, now)
    return gone or behind or gave_up


def raised_lately(announcements: list[Announcement], now: float) -> str:
    """Return a message that names the ranks that have raised an exception recently. This rank's announcement is first.

    Return an empty string if no rank has raised one, or if all ranks have raised an exception at the same point.
    """
    position = max(each.issued for each in announcements)
    recent = [each for each in announcements if each.raised and each.raised_after >= position - RECENT]
    if len(recent) == len(announcements) and len({each.raised_after for each in recent}) == 1:
        return ""
    mine = announcements[0]
    return "; ".join(f"{_who(each, mine)} raised {each.raised}, {_ago(each.raised_at, now)}" for each in recent)


def described(each: Announcement, mine: Announcement, silent: bool, now: float) -> str:
    """Return a message that says what another rank has announced about itself.

    `silent` is True if the rank has announced nothing for so long that its process may have ended.
    """
    facts = []
    if raised_alone(each, mine):
        facts.append(f"raised {each.raised}, {_ago(each.raised_at, now)}")
    if each.ended:
        facts.append(each.ended)
    elif silent and each.count:
        elsewhere = "its host or the network has failed, " if each.host != mine.host else ""
        facts.append(
            f"has shown no sign of life for {now - each.written:.0f} s ({elsewhere}its process was killed, or runs "
            "code that never releases Python's global lock)"
        )
    if each.issued < 0 and not each.ended:
        facts.append(
            "has not sharded any module over this process group: it ended before that, or runs PyTorch's FSDP (start "
            "all ranks with `unshard run`)"
        )
    elif each.last:
        facts.append(f"last announced to {each.last}, {_ago(each.since, now)}")
    if each.place:
        facts.append(f"{'was last seen' if silent or each.ended else 'is now'} at {each.place}")
    return f"{_who(each, mine)} " + "; ".join(facts)


def _who(each: Announcement, mine: Announcement) -> str:
    return f"rank {each.rank} on {each.host}" if each.host != mine.host and each.host else f"rank {each.rank}"


def _ago(then: float, now: float) -> str:
    return f"{max(0.0, now - then):.0f} s ago"


def without_remedy(error: str, rank: int) -> str:
    """Return `error` without its long hint, which the error of `rank` has."""
    for remedy in REMEDIES:
        error = error.replace(remedy, f"The error of rank {rank} says what to do.")
    return error


def named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks, 16)}"
