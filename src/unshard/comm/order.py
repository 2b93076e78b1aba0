"""Finds out that ranks want different collectives, before one is issued that would hang, crash or mix up numbers.

All ranks of a process group must issue the same collectives in the same order. In most steps they do what they did in
the step before, which each rank knows for itself: nothing is exchanged. What was not to be expected is compared over
the store of the process group first.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import OrderError
from ..torch_private import group_timeout
from .board import Board
from .forecast import Forecast
from .waiter import Waiter

SLICE = 5.0  # seconds that a rank waits before it looks whether something is wrong
PATIENCE: float | None = None  # seconds to wait for ranks that do not come; None: half the process group's timeout
PER_EVENT = 32  # how often an event may be checked, on the average ...
RARELY = 1000  # ... and beyond that, one event in so many
MANY = 1 << 14  # events that are known at most, unless all of them came lately
RECENT = 16  # collectives that one rank can be ahead of another that waits

_log = logging.getLogger("unshard")
_orders: weakref.WeakKeyDictionary[Any, dict[str, Order]] = weakref.WeakKeyDictionary()

_REMEDY = (
    "Every rank must run the same forwards and backwards in the same order: look for branches, loops and losses that "
    "depend on the rank or on its data. (Parameters that only some ranks use: set_reduce_scatter_unused_params.) The "
    "process group cannot be used any more; end the job."
)


class Event:
    """A collective that comes again and again: one object for each unit and purpose."""

    __slots__ = ("number", "reduces", "serial")

    def __init__(self, reduces: bool = False, serial: int = 0) -> None:
        self.serial = serial  # which unit of its process group, in the order they were made; names can be exchanged
        self.reduces = reduces
        self.number = -1  # given at the first use: then all ranks agree on it, whatever else they have made


def order_of(group: Any, backend: str, device: torch.device) -> Order | None:
    """The order of a process group's collectives; none where there are no real peers to disagree with."""
    in_python = type(group) is not dist.ProcessGroup  # somebody's own class, without real backends
    if backend not in ("gloo", "nccl") or in_python or group.size() == 1:
        return None
    orders = _orders.setdefault(group, {})  # one per backend: a group may have one for the host and one for devices
    if backend not in orders:
        patience = os.environ.get("UNSHARD_ORDER_TIMEOUT", PATIENCE)
        seconds = group_timeout(group, device).total_seconds() / 2 if patience is None else float(patience)
        board = Board(f"{group.group_name}/{backend}", dist.get_process_group_ranks(group), dist.get_rank())
        # Gloo's ranks wait on the host for each collective, and look around meanwhile.
        orders[backend] = Order(board, waits_on_host=backend == "gloo", patience=seconds)
    return orders[backend]


class Order:
    """The stream of collectives of one process group, as this rank sees it.

    Whether an event is checked follows from the events before it alone, so ranks that agreed so far agree on that too.
    While there is something new, every event is checked, and each rank knows that the others check. Later, only what
    was not foretold is; other ranks may see nothing unusual and not come, so the rank waits until all have.
    """

    def __init__(self, board: Board, waits_on_host: bool, patience: float):
        self.slice = timedelta(seconds=SLICE)
        self.trouble = ""
        self._board = board
        self.waits_on_host, self._patience = waits_on_host, patience
        self._forecast = Forecast()
        self._texts: dict[int, str] = {}
        self._numbers = self._serials = 0
        self._learning = True
        self._foretold_in_a_row = 0
        self._checks = 0
        self._claimed = 0

    @cached_property
    def waiter(self) -> Waiter:
        return Waiter()

    def serial(self) -> int:
        """The number of the next unit that is made on this process group; all ranks make them in the same order."""
        self._serials += 1
        return self._serials

    def announce(self, event: Event, describe: Callable[[], str]) -> None:
        """To be called before the collective is issued; raises if another rank wants another one."""
        if self.trouble:
            raise OrderError(self.trouble)
        if event.number < 0:
            event.number, self._numbers = self._numbers, self._numbers + 1
        if not self._forecast.step(event.number):
            self._foretold_in_a_row = 0
        elif self._learning:
            self._foretold_in_a_row += 1
        else:
            return
        self._consider(event, describe)

    def _consider(self, event: Event, describe: Callable[[], str]) -> None:
        number = event.number
        position, known = self._forecast.position - 1, len(self._texts)
        allowed = self._checks < PER_EVENT * known + position // RARELY
        all_check = self._learning and (allowed or not known)
        new = number not in self._texts
        if new:
            if known >= MANY:  # models come and go; those long gone need no words
                self._texts = {each: text for each, text in self._texts.items() if self._forecast.knows(each)}
            self._texts[number] = f"{number}.{event.serial} {describe()}"
        # Once as many events as there are were foretold in a row, a whole iteration was.
        self._learning = new or (self._learning and self._foretold_in_a_row < known)
        if not new:
            if not allowed:
                return  # the order varies by design, or the program is very irregular
            self._checks += 1
        self._compare(position)
        if not (all_check and self.waits_on_host):
            self._meet(position, self._texts[number])

    def _compare(self, position: int) -> None:
        """Raise if this rank and the first to come there do different things at `position`."""
        number = dict(self._forecast.last(RECENT))[position]
        mine = self._texts[number]
        rank, theirs = self._board.claim(position, mine)
        self._claimed = max(self._claimed, position + 1)
        if theirs != mine:
            self._fail(
                f"The ranks want different collectives, at place {position} of the process group of "
                f"{_named(self._board.ranks)}: rank {rank} wants to {_shown(theirs, mine)}, rank "
                f"{self._board.rank} to {_shown(mine, theirs)}. {_REMEDY}"
            )

    def _meet(self, position: int, text: str) -> None:
        """Wait until all ranks have come to the same place."""
        board, began, signed = self._board, time.monotonic(), False
        if board.arrive(position):
            return
        while not board.complete(position):
            waited = time.monotonic() - began
            self._listen()
            if waited > self._patience:
                self._give_up(position, text)
            if waited > SLICE and not signed:
                signed = True
                board.sign(position)
                _log.warning("rank %d waits for other ranks to %s as well", board.rank, _shown(text))
            if waited > SLICE and (story := board.elsewhere()):
                self._fail(story)
            time.sleep(min(0.25, waited / 4))  # in proportion, so that little is lost and the store not flooded
        if signed:
            board.unsign(position)

    def _give_up(self, position: int, text: str) -> None:
        board = self._board
        board.sign(position)
        missing = board.missing(position)
        self._fail(
            f"Rank {board.rank} wants to {_shown(text)}, which it did not do at this point before (place "
            f"{position} of the process group of {_named(self._board.ranks)}), but within {self._patience:g} s "
            f"{_named(missing)} did not come to do the same. {_REMEDY} If the others are only slow, give "
            "init_process_group a longer timeout (half of it is waited here), or set UNSHARD_ORDER_TIMEOUT to seconds."
        )

    # -- a wait that takes long -----------------------------------------------------------------------------

    def look(self) -> None:
        """Raise if another rank has found trouble, or did something else lately. For ranks that wait for a collective.

        Afterwards compared are also events that were foretold; so two ranks that both do what they know, and not the
        same, are told as well.
        """
        self._listen()
        if story := self._board.elsewhere():
            self._fail(story)
        for position, number in self._forecast.last(RECENT):
            if position >= self._claimed and number in self._texts:
                self._compare(position)

    def _listen(self) -> None:
        story = self._board.trouble()
        if story:
            self._heard(story)

    def failed(self) -> None:
        """A collective failed: raise if that is because another rank has found trouble and ended."""
        story = self.trouble
        with suppress(RuntimeError):  # the store may be gone as well
            story = story or self._board.trouble() or self._board.elsewhere()
        if story:
            self._heard(story)

    def _fail(self, story: str) -> NoReturn:
        self._heard(self._board.tell(story))

    def _heard(self, story: str) -> NoReturn:
        """Wait a little for the others to hear it too, since the end of this process may take the store with it."""
        self.trouble = story
        with suppress(RuntimeError):
            self._board.heard(story)
            limit = time.monotonic() + 2 * SLICE
            while not self._board.heard_by_all() and time.monotonic() < limit:
                time.sleep(0.02)
        raise OrderError(story)


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def _shown(text: str, other: str = "") -> str:
    """Without the event's number, unless that is the difference: two models have units of the same name."""
    number, _, plain = text.partition(" ")
    return f"{plain} (the one numbered {number})" if plain == other.partition(" ")[2] else plain
