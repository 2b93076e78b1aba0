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
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...errors import OrderError, listed
from ...torch_private import group_timeout
from ..interface import Label
from .polling import WaitThread
from .predictor import SequencePredictor
from .store import OrderStore

POLL_SECONDS = 5.0  # that a rank waits before it looks whether something is wrong
PEER_SECONDS: float | None = None  # to wait for ranks that do not come; None: half the process group's timeout
CHECKS_PER_LABEL = 32  # how often a label may be checked, on the average ...
EXTRA_CHECK_EVERY = 1000  # ... and beyond that, one collective in so many
MAX_LABELS = 1 << 14  # whose texts are kept, unless all of them were used lately
RECENT = 16  # collectives that one rank can be ahead of another that waits

_log = logging.getLogger("unshard")
_orders: weakref.WeakKeyDictionary[Any, dict[str, Order]] = weakref.WeakKeyDictionary()

_REMEDY = (
    "Every rank must run the same forwards and backwards in the same order: look for branches, loops and losses that "
    "depend on the rank or on its data. (Parameters that only some ranks use: set_reduce_scatter_unused_params.) The "
    "process group cannot be used any more; end the job."
)


def order_of(group: Any, backend: str, device: torch.device) -> Order | None:
    """The order of a process group's collectives; none where there are no real peers to differ from."""
    in_python = type(group) is not dist.ProcessGroup  # somebody's own class, without real backends
    if backend not in ("gloo", "nccl") or in_python or group.size() == 1:
        return None
    orders = _orders.setdefault(group, {})  # one per backend: a group may have one for the host and one for devices
    if backend not in orders:
        limit = os.environ.get("UNSHARD_ORDER_TIMEOUT", PEER_SECONDS)
        seconds = group_timeout(group, device).total_seconds() / 2 if limit is None else float(limit)
        store = OrderStore(f"{group.group_name}/{backend}", dist.get_process_group_ranks(group), dist.get_rank())
        # Gloo's ranks wait on the host for each collective, and can look for errors meanwhile.
        orders[backend] = Order(store, waits_on_host=backend == "gloo", peer_seconds=seconds)
    return orders[backend]


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
        self._store = store
        self.waits_on_host, self._peer_seconds = waits_on_host, peer_seconds
        self._predictor = SequencePredictor()
        self._texts: dict[int, str] = {}
        self._numbers = self._units = 0
        self._learning = True
        self._expected_in_a_row = 0
        self._checks = 0
        self._published = 0

    @cached_property
    def wait_thread(self) -> WaitThread:
        return WaitThread()

    def next_unit_number(self) -> int:
        """The number of the next unit that is made on this process group; all ranks make them in the same order."""
        self._units += 1
        return self._units

    def check(self, label: Label) -> None:
        """To be called before the collective is issued; raises if another rank issues another one."""
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
        self._check_unexpected(label)

    def _check_unexpected(self, label: Label) -> None:
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
            if not allowed:
                return  # the order varies by design, or the program is very irregular
            self._checks += 1
        self._compare(position)
        if not (all_check and self.waits_on_host):
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
                f"{_named(self._store.ranks)}: rank {rank} wants to {_shown(theirs, mine)}, rank "
                f"{self._store.rank} to {_shown(mine, theirs)}. {_REMEDY}"
            )

    def _wait_for_all(self, position: int, text: str) -> None:
        """Wait until all ranks have joined at the same position."""
        store, began, named = self._store, time.monotonic(), False
        if store.join(position):
            return
        while not store.all_joined(position):
            waited = time.monotonic() - began
            self._raise_published_error()
            if waited > self._peer_seconds:
                self._fail_for_missing(position, text)
            if waited > POLL_SECONDS and not named:
                named = True
                store.add_name(position)
                _log.warning("rank %d waits for other ranks to %s as well", store.rank, _shown(text))
            if waited > POLL_SECONDS and (error := store.error_elsewhere()):
                self._publish_error(error)
            time.sleep(min(0.25, waited / 4))  # in proportion, so that little is lost and the store not flooded
        if named:
            store.remove_name(position)

    def _fail_for_missing(self, position: int, text: str) -> None:
        store = self._store
        store.add_name(position)
        missing = store.missing(position)
        self._publish_error(
            f"Rank {store.rank} wants to {_shown(text)}, which it did not do at this point before (position "
            f"{position} of the process group of {_named(store.ranks)}), but within {self._peer_seconds:g} s "
            f"{_named(missing)} did not come to do the same. {_REMEDY} If the others are only slow, give "
            "init_process_group a longer timeout (half of it is waited here), or set UNSHARD_ORDER_TIMEOUT to seconds."
        )

    # -- a wait that takes long -----------------------------------------------------------------------------

    def compare_recent(self) -> None:
        """For ranks that wait for a collective: raise if another rank has an error, or issued another one lately.

        Recent collectives that were expected are compared too; so two ranks that both issue what they expect, and not
        the same, find out as well.
        """
        self._raise_published_error()
        if error := self._store.error_elsewhere():
            self._publish_error(error)
        for position, number in self._predictor.last(RECENT):
            if position >= self._published and number in self._texts:
                self._compare(position)

    def raise_known_error(self) -> None:
        """For a collective that failed: raise if that is because another rank has an error and ended."""
        error = self.error
        with suppress(RuntimeError):  # the store may be gone as well
            error = error or self._store.error() or self._store.error_elsewhere()
        if error:
            self._raise(error)

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


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {listed(ranks, 16)}"


def _shown(text: str, other: str = "") -> str:
    """Without the label's number, unless that is the difference: two models have units of the same name."""
    number, _, plain = text.partition(" ")
    return f"{plain} (the one numbered {number})" if plain == other.partition(" ")[2] else plain
