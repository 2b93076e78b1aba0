"""Finds out that ranks issue different collectives, before one is issued that would hang, crash or mix up numbers.

All ranks of a process group must issue the same collectives in the same order. In most steps they issue what they
issued in the step before, which each rank can predict for itself: nothing is exchanged. A collective that was not
expected is first compared over the store of the process group.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...errors import CollectiveError, OrderError, UnshardError, listed
from ...torch_private import group_timeout
from ..interface import Label
from .absent import absent_ranks, described, named, raised_alone, raised_lately
from .announcements import RECENT, Announcement
from .polling import PollingWork, WaitThread
from .predictor import SequencePredictor
from .remedies import FAILED_REMEDY, RAISED_REMEDY, REMEDY
from .store import OrderStore

POLL_SECONDS = 5.0  # that a rank waits before it looks whether something is wrong
PEER_SECONDS: float | None = None  # to wait for ranks that do not come; None: half the process group's timeout
WARN_SECONDS = 30.0  # to wait before a log message says where the others are; less if PEER_SECONDS is less
CHECKS_PER_LABEL = 32  # how often a label may be checked, on the average ...
EXTRA_CHECK_EVERY = 1000  # ... and beyond that, one collective in so many
MAX_LABELS = 1 << 14  # whose texts are kept, unless all of them were used lately

_log = logging.getLogger("unshard")
_orders: weakref.WeakKeyDictionary[Any, dict[str, Order]] = weakref.WeakKeyDictionary()

_STEP = "step its optimizer"


def order_of(group: Any, backend: str, device: torch.device) -> Order | None:
    """The order of a process group's collectives; none where there are no real peers to differ from, or no store."""
    in_python = type(group) is not dist.ProcessGroup  # somebody's own class, without real backends
    if backend in ("fake", "mpi") or in_python or group.size() == 1:
        return None
    orders = _orders.setdefault(group, {})  # one per backend: a group may have one for the host and one for devices
    if backend not in orders:
        limit = os.environ.get("UNSHARD_ORDER_TIMEOUT", PEER_SECONDS)
        seconds = group_timeout(group, device).total_seconds() / 2 if limit is None else float(limit)
        ranks = dist.get_process_group_ranks(group)
        store = OrderStore(f"{group.group_name}/{backend}", ranks, dist.get_rank(), POLL_SECONDS)
        # Gloo's ranks wait on the host for each collective, and can look for errors meanwhile.
        orders[backend] = Order(store, waits_on_host=backend == "gloo", peer_seconds=seconds)
    return orders[backend]


def all_orders() -> list[Order]:
    """Of all process groups of this rank."""
    return [order for orders in list(_orders.values()) for order in orders.values()]


def known_orders(groups: Iterable[Any]) -> list[Order]:
    """The orders of those process groups that units are sharded over."""
    real = {group for group in groups if type(group) is dist.ProcessGroup}
    return [order for group in real for order in _orders.get(group, {}).values()]


def explained(error: RuntimeError) -> str:
    """Why a collective of this rank failed, if another rank is the cause and known; otherwise an empty string."""
    order = _largest_order()
    return "" if order is None else order.explained(error)


def wait_for(work: Any) -> None:
    """Wait for a collective of the whole job, and look for errors of other ranks meanwhile."""
    order = _largest_order()
    if order is not None and order.waits_on_host:
        PollingWork(work, order, work, None).wait()
    else:
        work.wait()


def _largest_order() -> Order | None:
    orders = [order for order in all_orders() if order.in_job]
    return max(orders, key=lambda order: len(order.ranks), default=None)


class Order:
    """The sequence of collectives of one process group, as this rank sees it.

    Whether a collective is checked follows from those before it alone, so ranks that agreed so far agree on that too.
    While there are new labels, every collective is checked, and each rank knows that the others check. Later, only a
    collective that was not expected is; other ranks may have expected theirs and not check, so the rank waits until
    all have joined.
    """

    def __init__(self, store: OrderStore, waits_on_host: bool, peer_seconds: float):
        self.poll_interval = timedelta(seconds=POLL_SECONDS)
        self.error = ""
        self.name = store.name
        self.next_unlabelled = ""
        """What the next collective without a label is for."""
        self._store, self._announcer = store, store.announcer
        self.waits_on_host, self._peer_seconds = waits_on_host, peer_seconds
        self._predictor = SequencePredictor()
        self._step, self._calls = Label(lambda: _STEP), dict[str, Label]()
        self._texts: dict[int, str] = {}
        self._numbers = self._units = 0
        self._learning = True
        self._expected_in_a_row = 0
        self._checks = 0
        self._published = 0
        self._met, self._patience = -1, 1
        self._unlabelled = 0
        self._last_unlabelled = 0, ""
        self._failure = ""
        self._next_look = 0.0
        self._announcer.add(self)

    @cached_property
    def wait_thread(self) -> WaitThread:
        return WaitThread()

    def next_unit_number(self) -> int:
        """The number of the next unit that is made on this process group; all ranks make them in the same order."""
        self._units += 1
        return self._units

    def check(self, label: Label, meet: bool = False) -> None:
        """To be called before the collective is issued; raises if another rank issues another one.

        `meet`: wait until all ranks are there, if the label is new.
        """
        if self.error:
            raise OrderError(self.error)
        if label.number < 0:
            label.number, self._numbers = self._numbers, self._numbers + 1
        if not self._predictor.step(label.number):
            self._expected_in_a_row = 0
        elif self._learning:
            self._expected_in_a_row += 1
        else:
            return
        self._check_unexpected(label, meet)

    def compare_step(self) -> None:
        """To be called before an optimizer steps parameters of this process group.

        A step issues no collective, so it is compared as if it did. Steps in a row count as one: ranks may divide their
        parameters among different numbers of optimizers.
        """
        number = self._step.number
        if number < 0 or self._predictor.latest != number:
            self.check(self._step)

    def compare_call(self, what: str) -> Label:
        """To be called before this rank does `what` with all others, outside of forward and backward.

        `what` is one of few constants: after a new text, the ranks compare every collective of an iteration.
        """
        label = self._calls.setdefault(what, Label(lambda: what))
        self.check(label)
        return label

    def meet(self, what: str) -> Label:
        """The same for a rare call whose collectives do not look for errors while they wait: all ranks have come then.

        Waits as long as these would.
        """
        self._patience = 2
        try:
            label = self.compare_call(what)
            position = self._predictor.position - 1
            if self._met != position:
                self._compare(position)
                self._wait_for_all(position, self._texts[label.number])
            return label
        finally:
            self._patience = 1

    def begin_noting(self) -> list[Label]:
        """Collect the labels that `check` is called with, instead of checking them, until `end_noting`."""
        noted: list[Label] = []
        # An attribute of the object hides the method. A flag would cost every collective of a step a look at it.
        self.check = lambda label, meet=False: noted.append(label)  # type: ignore[method-assign]
        self.compare_step = lambda: noted.append(self._step)  # type: ignore[method-assign]
        # What goes wrong with collectives that never run is no news for other ranks.
        self.raised = lambda text: True  # type: ignore[method-assign]
        self.raise_failed = _raise_as_it_is  # type: ignore[method-assign]
        return noted

    def end_noting(self) -> None:
        del self.check, self.compare_step, self.raised, self.raise_failed

    @property
    def in_job(self) -> bool:
        """False if the process has left the job that the process group belongs to."""
        return not self._announcer.has_left()

    @property
    def ranks(self) -> list[int]:
        """The members of the process group, as the whole job numbers them."""
        return self._store.ranks

    def _check_unexpected(self, label: Label, meet: bool) -> None:
        number = label.number
        position, known = self._predictor.position - 1, len(self._texts)
        allowed = self._checks < CHECKS_PER_LABEL * known + position // EXTRA_CHECK_EVERY
        all_check = self._learning and (allowed or not known)
        new = number not in self._texts
        if new:
            if known >= MAX_LABELS:  # models are made and deleted; texts of those long deleted are not needed
                self._texts = {each: text for each, text in self._texts.items() if self._predictor.knows(each)}
            self._texts[number] = f"{number}.{label.unit} {label.describe()}"
        # Once as many collectives as there are labels were expected in a row, a whole iteration was.
        self._learning = new or (self._learning and self._expected_in_a_row < known)
        if not new:
            # Steps are always compared: at another point than the others', a step fails nowhere, and weights are wrong.
            if not allowed and self._step.number not in (number, self._predictor.missed):
                return  # the order varies by design, or the program is very irregular
            self._checks += allowed
        self._compare(position)
        if meet or not (all_check and self.waits_on_host):
            self._wait_for_all(position, self._texts[number])

    def _compare(self, position: int) -> None:
        """Raise if this rank and the first to publish for `position` issue different collectives there."""
        number = dict(self._predictor.last(RECENT))[position]
        mine = self._texts[number]
        rank, theirs = self._store.publish(position, mine)
        self._published = max(self._published, position + 1)
        if theirs != mine:
            self._publish_error(
                f"The ranks want different collectives, at position {position} of the process group of "
                f"{named(self._store.ranks)}: rank {rank} wants to {_shown(theirs, mine)}, rank "
                f"{self._store.rank} to {_shown(mine, theirs)}. {self._cause()}"
            )

    def _cause(self) -> str:
        """Why the ranks may differ, and the remedy."""
        announcements = [self._announcer.own(self), *self._store.announcements()]
        raised = raised_lately(announcements, time.time())
        return f"The cause is an exception: {raised}. {RAISED_REMEDY}" if raised else REMEDY

    def _wait_for_all(self, position: int, text: str) -> None:
        """Wait until all ranks have joined at the same position, or one of them is gone."""
        store, began, named = self._store, time.monotonic(), False
        next_look, counts = POLL_SECONDS, dict[int, int]()
        self._met, limit = position, self._patience * self._peer_seconds
        if store.join(position):
            return
        while not store.all_joined(position):
            waited = time.monotonic() - began
            self._raise_published_error()
            if waited > limit:
                self._fail_for_missing(position, text, limit)
            if waited > POLL_SECONDS and not named:
                named = True
                store.add_name(position)
                _log.warning("rank %d waits for other ranks to %s as well", store.rank, _shown(text))
            if waited > POLL_SECONDS and (error := store.error_elsewhere()):
                self._publish_error(error)
            if waited > next_look and self.waits_on_host:
                next_look, before = waited + 3 * self._announcer.interval, counts
                others = store.announcements()
                if any(each.ended or before.get(each.rank) == each.count for each in others):
                    return  # the collective fails at once if the rank is gone, and waits for it otherwise
                counts = {each.rank: each.count for each in others}
            time.sleep(min(0.25, waited / 4))  # in proportion, so that little is lost and the store not flooded
        if named:
            store.remove_name(position)

    def _fail_for_missing(self, position: int, text: str, waited: float) -> None:
        store = self._store
        store.add_name(position)
        missing = store.missing(position)
        mine, now = self._announcer.own(self), time.time()
        doing = [described(each, mine, False, now) for each in store.announcements() if each.rank in missing]
        self._publish_error(
            f"Rank {store.rank} wants to {_shown(text)} (position {position} of the process group of "
            f"{named(store.ranks)}), but within {waited:g} s {named(missing)} did not come to do the same: "
            f"{listed(doing)}. {self._cause()} If the others are only "
            "slow, give init_process_group a longer timeout, or set UNSHARD_ORDER_TIMEOUT to seconds."
        )

    # -- a wait that takes long -----------------------------------------------------------------------------

    def compare_recent(self) -> None:
        """For ranks that wait for a collective: raise if another rank has an error, gave up, or issued another one.

        Recent collectives that were expected are compared too; so two ranks that both issue what they expect, and not
        the same, find out as well.
        """
        self._raise_published_error()
        if error := self._store.error_elsewhere():
            self._publish_error(error)
        for position, number in self._predictor.last(RECENT):
            if position >= self._published and number in self._texts:
                self._compare(position)
        mine = self._announcer.own(self)
        if any(each.waited_for and raised_alone(each, mine) for each in self._store.announcements()):
            self.raise_failed(RuntimeError("Another rank has stopped waiting."), None)

    def raise_known_error(self) -> None:
        """For a collective that failed: raise if that is because another rank has an error and ended."""
        error = self.error
        with suppress(RuntimeError):  # the store may be gone as well
            error = error or self._store.error() or self._store.error_elsewhere()
        if error:
            self._raise(error)

    # -- a collective that failed ---------------------------------------------------------------------------

    def count_unlabelled(self) -> None:
        """Before a collective without a label is issued: nothing is compared, but the ranks count it."""
        self._unlabelled += 1
        self._last_unlabelled = self._predictor.position + self._unlabelled, self.next_unlabelled
        self.next_unlabelled = ""

    def last_announced(self) -> tuple[int, str]:
        """How many collectives this rank has announced, and what the last of them does."""
        issued = self._predictor.position + self._unlabelled
        at, what = self._last_unlabelled
        if at == issued:
            return issued, what or ("issue a collective outside of a step" if issued else "")
        numbers = [number for _, number in self._predictor.last(1)]  # none if a thread asks in between
        return issued, _shown(self._texts.get(numbers[0], " issue a collective") if numbers else "")

    def raised(self, text: str) -> bool:
        """Tell the other ranks that an exception leaves forward or backward of this one."""
        if not (self.error or self._failure):  # else the others know more than that already
            with suppress(RuntimeError):  # the store may be gone
                self._announcer.raised(text)
        return True

    def raise_failed(self, error: RuntimeError, label: Label | None, patient: bool = True) -> NoReturn:
        """A collective failed: name the ranks that it waited for, if there are any.

        `patient`: the error is of a kind that other ranks cause, so it is worth waiting to see which of them live.
        """
        self.raise_known_error()
        if not self._failure:
            what = self.last_announced()[1] if label is None else label.describe()
            self._failure = self._explained(what, patient)
        if not self._failure:
            raise error
        raise CollectiveError(self._failure) from error

    def explained(self, error: RuntimeError) -> str:
        """Why a collective of a rank failed, if another rank is the cause; otherwise an empty string."""
        try:
            self.raise_failed(error, None)
        except UnshardError as found:
            return str(found)
        except RuntimeError:
            return ""

    def _explained(self, what: str, patient: bool) -> str:
        rank = self._store.rank
        begin = f"Rank {rank} wanted to {what}, in the process group of {named(self._store.ranks)}, and the backend "
        try:
            absent = self._find_absent(patient)
            if not absent:
                return ""
            raised = any(
                each.raised and not each.waited_for for each in self._store.announcements() if each.rank in absent
            )
        except RuntimeError:
            return (
                f"{begin}failed. The other ranks cannot be asked either, because the job's store does not answer: the "
                f"process that hosts it has ended, which is rank 0 or the launcher. {FAILED_REMEDY}"
            )
        who = f"rank {rank} waited for {named(list(absent))}: {listed(absent.values(), 8)}"
        with suppress(RuntimeError):
            self._announcer.raised(f"CollectiveError: {who}", absent)
            self._wait_for_readers(set(absent))
        return f"{begin}failed while {who}. {RAISED_REMEDY if raised else FAILED_REMEDY}"

    def _find_absent(self, patient: bool) -> dict[int, str]:
        """The ranks that a collective waited for, with descriptions; waits for signs of life if no end is known."""
        mine, interval = self._announcer.own(self), self._announcer.interval
        limit = time.monotonic() + (1.5 * interval if patient else 0.0)
        others = self._store.announcements()
        first = {each.rank: each.count for each in others}
        while True:
            fresh = {each.rank for each in others if each.count > first[each.rank]}
            known = any((each.ended or raised_alone(each, mine)) and not each.waited_for for each in others)
            late = time.monotonic() > limit
            if known or late or all(each.ended or each.rank in fresh for each in others):
                silent = set(first) - fresh if late and patient and not known else set()
                return absent_ranks(others, mine, fresh, silent, time.time())
            time.sleep(interval / 20)
            others = self._store.announcements()

    def _wait_for_readers(self, absent: set[int]) -> None:
        """Wait a little until ranks that wait for the same ones know, since this process may host the store."""
        limit = time.monotonic() + 2 * self._announcer.interval
        while time.monotonic() < limit:
            others = [each for each in self._store.announcements() if each.rank not in absent]
            if all(each.ended or each.waited_for for each in others):
                return
            time.sleep(self._announcer.interval / 20)

    def warn_of_absent(self) -> None:
        """From a thread: log which ranks this one waits for, after WARN_SECONDS or once one of them has failed."""
        stalled, limit = self._announcer.stalled(self), min(WARN_SECONDS, self._peer_seconds)
        if stalled < 2 * self._announcer.interval:
            self._next_look = 0.0
        elif stalled >= self._next_look and not self.error and not self._failure:
            self._next_look = 2 * stalled if stalled >= limit else min(2 * stalled, limit)
            mine, now = self._announcer.own(self), time.time()
            if mine.last == _STEP:
                return  # the rank does not wait there
            behind = [each for each in self._store.announcements() if _fails(each, mine, stalled >= limit)]
            if behind:
                what = listed([described(each, mine, False, now) for each in behind])
                _log.warning("rank %d has waited %.0f s to %s: %s", self._store.rank, stalled, mine.last, what)

    def _raise_published_error(self) -> None:
        error = self._store.error()
        if error:
            self._raise(error)

    def _publish_error(self, error: str) -> NoReturn:
        self._raise(self._store.publish_error(error))

    def _raise(self, error: str) -> NoReturn:
        """Wait a little until all ranks know the error, since the end of this process may take the store with it."""
        self.error = error
        with suppress(RuntimeError):
            self._store.acknowledge(error)
            limit = time.monotonic() + 2 * POLL_SECONDS
            while not self._store.acknowledged_by_all() and time.monotonic() < limit:
                time.sleep(0.02)
        raise OrderError(error)


def _fails(each: Announcement, mine: Announcement, late: bool) -> bool:
    """Whether a rank is behind and cannot come any more, or is `late`."""
    return each.issued < mine.issued and (late or bool(each.ended) or raised_alone(each, mine))


def _shown(text: str, other: str = "") -> str:
    """Without the label's number, unless that is the difference: two models have units of the same name."""
    number, _, plain = text.partition(" ")
    return f"{plain} (the one numbered {number})" if plain == other.partition(" ")[2] else plain


def _raise_as_it_is(error: RuntimeError, label: Label | None, patient: bool = True) -> NoReturn:
    raise error
