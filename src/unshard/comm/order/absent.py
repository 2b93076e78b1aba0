"""Which ranks a failed collective waited for, and what is known of them. Pure: works on announcements."""

from __future__ import annotations

from ...errors import listed
from .announcements import RECENT, Announcement


def raised_alone(each: Announcement, mine: Announcement) -> bool:
    """Whether an exception left a step of a rank lately, where none left this rank's."""
    return bool(each.raised) and each.raised_after >= mine.issued - RECENT and each.raised_after != mine.raised_after


def absent_ranks(
    others: list[Announcement], mine: Announcement, fresh: set[int], silent: set[int], now: float
) -> dict[int, str]:
    """The ranks that a collective of this rank waits for, and in words what they do instead.

    `fresh`: ranks that have announced something since the collective failed; of others it is not known whether they
    are behind. `silent`: ranks that have announced nothing for so long that their processes may have ended. A rank that
    has only given up waiting for another one is not named, unless no other can be.
    """
    causes: dict[int, str] = {}
    gave_up: dict[int, str] = {}
    for each in others:
        if each.waited_for and raised_alone(each, mine):
            gave_up[each.rank] = described(each, mine, False, now)
        elif (
            each.ended
            or each.rank in silent
            or (each.rank in fresh and each.issued < mine.issued)
            or (raised_alone(each, mine) and not each.waited_for)
        ):
            causes[each.rank] = described(each, mine, each.rank in silent, now)
    return causes or gave_up


def raised_lately(announcements: list[Announcement], now: float) -> str:
    """In words, which ranks an exception left lately, unless it left all of them at the same point."""
    position = max(each.issued for each in announcements)
    recent = [each for each in announcements if each.raised and each.raised_after >= position - RECENT]
    if len(recent) == len(announcements) and len({each.raised_after for each in recent}) == 1:
        return ""
    return "; ".join(f"rank {each.rank} raised {each.raised}, {_ago(each.raised_at, now)}" for each in recent)


def described(each: Announcement, mine: Announcement, silent: bool, now: float) -> str:
    facts = []
    if raised_alone(each, mine):
        facts.append(f"raised {each.raised}, {_ago(each.raised_at, now)}")
    if each.ended:
        facts.append(each.ended)
    elif silent and each.count:
        facts.append(
            f"shows no sign of life since {now - each.written:.0f} s (its process was killed, or it runs code that "
            "never releases Python's global lock)"
        )
    if each.issued < 0 and not each.ended:
        facts.append(
            "has not sharded any module over this process group: it ended before it did, or runs PyTorch's FSDP (start "
            "all ranks with `unshard run`)"
        )
    elif each.last:
        facts.append(f"last announced to {each.last}, {_ago(each.since, now)}")
    if each.place:
        facts.append(f"{'was last seen' if silent or each.ended else 'is now'} at {each.place}")
    return f"rank {each.rank} " + "; ".join(facts)


def _ago(then: float, now: float) -> str:
    return f"{max(0.0, now - then):.0f} s ago"


def named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {listed(ranks, 16)}"
