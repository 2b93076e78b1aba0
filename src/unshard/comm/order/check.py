"""Detects when ranks issue different collectives, before a collective can hang, crash or mix up values.

All ranks of a process group must issue the same collectives in the same order. Most steps repeat the collectives of the
previous step, so each rank can predict its next collective. If the prediction is right, the rank exchanges nothing. If
the prediction is wrong, the rank compares its collective with the other ranks over the job's store before issuing it.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...errors import CollectiveError, OrderError, UnshardError, listed
from ...torch_private import group_timeout
from .announcing import announcer_of_job
from .peers import RECENT, STEP, Peers, named, without_remedy
from .sequence import OrderStore, Progress, shown

POLL_SECONDS = 5.0  # how long a rank waits before it looks for errors of other ranks
PEER_SECONDS: float | None = None  # how long to wait for absent ranks; None means half the process group's timeout
WARN_SECONDS = 30.0  # how long to wait before a warning says where the others are; at most PEER_SECONDS
CHECKS_PER_LABEL = 32  # how often a label may be compared, on average ...
EXTRA_CHECK_EVERY = 1000  # ... plus one comparison per this many collectives
MAX_LABELS = 1 << 14  # texts to keep; more are kept only if they were all used recently

_log = logging.getLogger("unshard")
_orders: weakref.WeakKeyDictionary[Any, dict[str, Order]] = weakref.WeakKeyDictionary()


class Label:
    """Identifies a collective that is issued repeatedly. A param group has one label per purpose, created once.

    The ranks compare labels to find out whether they issue the same collective.
    """

    __slots__ = ("describe", "number", "unit")

    def __init__(self, describe: Callable[[], str], unit: int = 0) -> None:
        self.describe = describe  # completes "rank 0 wants to ...", for errors
        self.unit = unit  # number of the unit in its process group, in order of creation: unit names are not unique
        # Assigned at the first use, because ranks agree on the labels that they use, but may create different ones.
        self.number = -1


def order_of(group: Any, backend: str, device: torch.device) -> Order | None:
    """Return the `Order` of a process group. The first call creates the `Order`.

    Return None if collectives cannot be compared: if the group has only one rank, uses MPI (which has no store) or
    PyTorch's fake backend, or is written in Python.
    """
    in_python = type(group) is not dist.ProcessGroup  # its own class, without real backends
    if backend in ("fake", "mpi") or in_python or group.size() == 1:
        return None
    orders = _orders.setdefault(group, {})  # one per backend: a group may have one for the host and one for devices
    if backend not in orders:
        limit = os.environ.get("UNSHARD_ORDER_TIMEOUT", PEER_SECONDS)
        seconds = group_timeout(group, device).total_seconds() / 2 if limit is None else float(limit)
        announcer, ranks = announcer_of_job(POLL_SECONDS), dist.get_process_group_ranks(group)
        requests = announcer.job.requests
        requests.patience = min(seconds, requests.patience or seconds)
        store = OrderStore(announcer.job, f"{group.group_name}/{backend}", ranks, dist.get_rank())
        progress = Progress(store.name)
        peers = Peers(store, announcer, progress, min(WARN_SECONDS, seconds))
        # Gloo's ranks wait on the host for each collective, so they can look for errors meanwhile.
        orders[backend] = Order(store, peers, progress, waits_on_host=backend == "gloo", peer_seconds=seconds)
    return orders[backend]


def known_orders(groups: Iterable[Any]) -> list[Order]:
    """Return the orders that exist for `groups`. A group has an order only if a unit is sharded over it."""
    real = {group for group in groups if type(group) is dist.ProcessGroup}
    return [order for group in real for order in _orders.get(group, {}).values()]


def _all_orders() -> list[Order]:
    return [order for orders in list(_orders.values()) for order in orders.values()]


def largest_order() -> Order | None:
    """Return the order of the current job's largest process group, or None if the job has no orders."""
    orders = [order for order in _all_orders() if order.in_job]
    return max(orders, key=lambda order: len(order.ranks), default=None)


def job_failed() -> bool:
    """Return True if this rank has raised an error because of another rank, which may be lost."""
    return any(order.failed for order in _all_orders() if order.in_job)


def explained(error: RuntimeError) -> str:
    """Return a text that says how another rank caused a collective of this rank to fail with `error`.

    Return an empty string if no other rank seems to be the cause.
    """
    if order := largest_order():
        try:
            order.raise_failed(error, None)
        except UnshardError as found:
            return str(found)
        except RuntimeError:
            pass
    return ""


class Order:
    """The sequence of collectives that this rank issues in one process group.

    A rank decides from this sequence alone whether to compare its next collective, so ranks with equal sequences make
    the same decision. While labels are new, all ranks compare every collective. Later, a rank compares only collectives
    that it did not predict. Another rank may have predicted its own collective and may not compare it. So a rank that
    compares a collective waits until all ranks have joined the comparison.
    """

    def __init__(self, store: OrderStore, peers: Peers, progress: Progress, waits_on_host: bool, peer_seconds: float):
        self.poll_interval = timedelta(seconds=POLL_SECONDS)
        self.error = ""
        self.name, self.ranks, self.progress, self.waits_on_host = store.name, store.ranks, progress, waits_on_host
        self._store, self._peers, self._peer_seconds = store, peers, peer_seconds
        self._predictor, self._texts = progress.predictor, progress.texts
        self._step, self._calls = Label(lambda: STEP), dict[str, Label]()
        self._numbers = self._units = 0
        self._learning = True
        self._expected_in_a_row = 0
        self._checks = 0
        self._published = 0
        self._met, self._patience = -1, 1
        self._failure = ""

    def next_unit_number(self) -> int:
        """Return a new unit number. Ranks that create the same units in the same order assign the same numbers."""
        self._units += 1
        return self._units

    def check(self, label: Label, meet: bool = False) -> None:
        """Add a collective to the sequence, and compare it with other ranks if this rank did not predict it.

        Call this before issuing the collective of `label`. This method raises `OrderError` if another rank issues a
        different collective. If `meet` is True and the label is new, also wait until all ranks have joined.
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
        """Add an optimizer step to the sequence, and compare it like a collective.

        Call this before an optimizer steps parameters of this process group. Consecutive steps count as one, because
        ranks may divide their parameters among different numbers of optimizers.
        """
        number = self._step.number
        if number < 0 or self._predictor.latest != number:
            self.check(self._step)

    def compare_call(self, what: str) -> Label:
        """Add a call to the sequence, and compare it like a collective.

        Use this for calls that all ranks make together outside of forward and backward. `what` describes the call
        and must be one of a few constants: after a new text, the ranks compare every collective of an iteration.
        """
        label = self._calls.setdefault(what, Label(lambda: what))
        self.check(label)
        return label

    def meet(self, what: str) -> Label:
        """Call `compare_call`, and wait until all ranks have joined.

        The wait has the same time limit as a collective. Use this method for rare calls if this rank does not look for
        errors of other ranks while it waits for the collectives of the call.
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

    @contextmanager
    def noting(self) -> Iterator[list[Label]]:
        """Collect labels in a list instead of comparing them. The context manager yields this list."""
        noted: list[Label] = []

        def reraise(error: RuntimeError, label: Label | None, patient: bool = True) -> NoReturn:
            raise error

        # Attributes of the object hide the methods. With a flag, every collective of a step would have to read it.
        self.check = lambda label, meet=False: noted.append(label)  # type: ignore[method-assign]
        self.compare_step = lambda: noted.append(self._step)  # type: ignore[method-assign]
        # Other ranks do not need to know about failures of collectives that never run.
        self.raised = lambda text, left=False: True  # type: ignore[method-assign]
        self.raise_failed = reraise  # type: ignore[method-assign]
        try:
            yield noted
        finally:
            del self.check, self.compare_step, self.raised, self.raise_failed

    @property
    def in_job(self) -> bool:
        """True until this process leaves the job that the process group belongs to."""
        return not self._peers.announcer.has_left()

    @property
    def failed(self) -> bool:
        """True if this rank has raised an error about other ranks of the process group."""
        return self._peers.failed

    def _check_unexpected(self, label: Label, meet: bool) -> None:
        number, texts = label.number, self._texts
        position, known = self._predictor.position - 1, len(texts)
        allowed = self._checks < CHECKS_PER_LABEL * known + position // EXTRA_CHECK_EVERY
        all_check = self._learning and (allowed or not known)
        new = number not in texts
        if new:
            if known >= MAX_LABELS:  # drop the texts of deleted models
                for old in [each for each in texts if not self._predictor.knows(each)]:
                    del texts[old]
            texts[number] = f"{number}.{label.unit} {label.describe()}"
        # As many correct predictions in a row as there are labels cover a whole iteration.
        self._learning = new or (self._learning and self._expected_in_a_row < known)
        if not new:
            # Always compare steps: a step at the wrong point raises nowhere, but the weights are wrong.
            if not allowed and self._step.number not in (number, self._predictor.missed):
                return  # the order varies by design, or the program is very irregular
            self._checks += allowed
        self._compare(position)
        if meet or not (all_check and self.waits_on_host):
            self._wait_for_all(position, texts[number])

    def _compare(self, position: int) -> None:
        mine = self._texts[dict(self._predictor.last(RECENT))[position]]
        rank, theirs = self._store.publish(position, mine)
        self._published = max(self._published, position + 1)
        if theirs != mine:
            they, we = self._peers.places(rank, self._store.rank)
            self._publish_error(
                f"The ranks want different collectives: {they} wants to {shown(theirs, mine)}, {we} to "
                f"{shown(mine, theirs)}.\n{self._peers.lines(rank, position)}They differ at position "
                f"{self.progress.count_at(position)} of the process group of {named(self.ranks)}.\n"
                f"{self._peers.cause(mine, theirs)}"
            )

    def _wait_for_all(self, position: int, text: str) -> None:
        store, began, has_name = self._store, time.monotonic(), False
        next_look, counts = POLL_SECONDS, dict[int, int]()
        self._met, limit = position, self._patience * self._peer_seconds
        if store.join(position):
            return
        while not store.all_joined(position):
            waited = time.monotonic() - began
            self._raise_published_error()
            if waited > limit:
                store.add_name(position)
                missing = store.missing(position)
                self._publish_error(
                    f"Rank {store.rank} wants to {shown(text)}, but {named(missing)} did not join within {limit:g} s.\n"
                    f"This is position {self.progress.count_at(position)} of the process group of {named(self.ranks)}; "
                    f"{listed(self._peers.doing(missing))}.\n{self._peers.cause(text)}\nIf the others are only slow, "
                    "give init_process_group a longer timeout, or set UNSHARD_ORDER_TIMEOUT to a number of seconds."
                )
            if waited > POLL_SECONDS and not has_name:
                has_name = True
                store.add_name(position)
                _log.warning("rank %d waits for other ranks to %s as well", store.rank, shown(text))
                # Another rank may wait at an earlier position, where this rank expected its collective and published
                # nothing. Without this comparison, both ranks would wait until their timeouts.
                for earlier, number in self._predictor.last(RECENT):
                    if number in self._texts:
                        self._compare(earlier)
            if waited > POLL_SECONDS and (error := store.error_elsewhere()):
                self._publish_error(error)
            if waited > next_look and self.waits_on_host:
                next_look, before = waited + 3 * self._peers.announcer.interval, counts
                others = self._peers.others()
                if any(each.ended or before.get(each.rank) == each.count for each in others):
                    return  # a rank seems gone: the collective fails at once if the rank is gone, else it waits
                counts = {each.rank: each.count for each in others}
            time.sleep(min(0.25, waited / 4))  # grows with the wait, to lose little time and not to flood the store
        if has_name:
            store.remove_name(position)

    # -- errors while a rank waits --------------------------------------------------------------------------

    def compare_recent(self) -> None:
        """Look for errors and differences on other ranks. Call this repeatedly during a long wait.

        Raise an error if another rank has published an error, has stopped waiting, or has issued different collectives.
        This method also compares recent collectives that this rank predicted. Without this comparison, two ranks that
        issue different collectives would not notice the difference if each rank predicted its own collectives.
        """
        self._raise_published_error()
        if error := self._store.error_elsewhere():
            self._publish_error(error)
        for position, number in self._predictor.last(RECENT):
            if position >= self._published and number in self._texts:
                self._compare(position)
        if self._peers.any_gave_up():
            self.raise_failed(RuntimeError("Another rank has stopped waiting."), None)

    def raised(self, text: str, left: bool = False) -> bool:
        """Announce to the other ranks that an exception has left forward or backward on this rank.

        Always return True, because collectives are compared. For `left`, see `Transport.raised`.
        """
        if not self._peers.failed:  # otherwise the others have better information already
            with suppress(RuntimeError):  # the store may be gone
                self._peers.announcer.raised(text, left=left)
        return True

    def raise_failed(self, error: RuntimeError, label: Label | None, patient: bool = True) -> NoReturn:
        """Raise an error that names the ranks that a failed collective waited for, or `error` if no ranks are found.

        If `patient` is True, this method first waits to find out which ranks are alive. Pass False if other ranks
        cannot have caused the failure.
        """
        known = self.error
        with suppress(RuntimeError):  # the store may be gone as well
            known = known or self._store.error() or self._store.error_elsewhere()
        if known:
            self._raise(known)
        if not self._failure:
            what = self.progress.last_announced()[1] if label is None else label.describe()
            self._failure = self._peers.explain_failure(what, patient)
        if not self._failure:
            raise error
        self._peers.fail(self._failure)
        raise CollectiveError(self._failure) from error

    def _raise_published_error(self) -> None:
        if error := self._store.error():
            self._raise(error)

    def _publish_error(self, error: str) -> NoReturn:
        self._raise(self._store.publish_error(error))

    def _raise(self, error: str) -> NoReturn:
        self.error, text, first = error, error, min(self.ranks)
        self._peers.fail(error)
        with suppress(RuntimeError):
            self._store.acknowledge(error)
            # Give all ranks time to read the error, because the store may end with this process.
            limit = time.monotonic() + 2 * POLL_SECONDS
            while not self._store.acknowledged_by_all() and time.monotonic() < limit:
                time.sleep(0.02)
            if self._store.rank != first and self._store.acknowledged_by_all():
                text = without_remedy(error, first)
        raise OrderError(text)


Recorded = list[tuple[Order, list[Label]]]


@contextmanager
def recorded_collectives() -> Iterator[Recorded]:
    """Collect labels instead of comparing them. The context manager yields each `Order` with its list of labels.

    A captured step uses this context manager while it records. If a rank compared collectives during the recording and
    then failed midway, its sequence would be shorter than the sequences of the other ranks.
    """
    with ExitStack() as stack:
        yield [(order, stack.enter_context(order.noting())) for order in _all_orders()]


def check_replay(collectives: Recorded) -> None:
    """Compare the recorded `collectives` with other ranks. Call this before a replay, which issues them again.

    Raise an error if another rank issues different collectives.
    """
    for order, labels in collectives:
        for label in labels:
            order.check(label)
