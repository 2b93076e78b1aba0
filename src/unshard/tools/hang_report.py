"""The table that says which rank is missing in a collective, and what it does instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import __version__
from ..comm.order.peers import REMEDIES, named
from ..comm.order.sequence import shown
from .hang_facts import DATA, LOCK, SLEEP
from .hang_waits import Record, Waits, every, has_raised, issued_by, place_in, stalled
from .precision_report import table

_ROWS_ALONE = 8  # with more ranks, equal rows share a line
_UNITS = re.compile(r"units? ('.*')")

_SAME_LENGTH = "Let every rank run the same number of steps, and restart the job from a checkpoint."
_SAME_ORDER = (
    "Every rank must run the same units in the same order. Look for a branch that depends on the rank or its data."
)
_CUT_OFF = "Look at the host of each silent rank, and at its network. If a network works again, the job goes on."
_LOST = {
    "dead:": "End the job on all ranks, and restart it from a checkpoint.",
    "stopped": "Continue the process with `kill -CONT`, and find out who stopped it.",
    "silent": "Look at the process on its host, for example with `py-spy dump --pid`.",
    "raised": "Training can continue only if every rank raises at the same point. End the job and restart it.",
    "has ended": _SAME_LENGTH,
    "has left": _SAME_LENGTH,
    "has announced nothing": "Start unshard on every rank, and shard the same modules on all of them.",
}
"""What to do about a missing rank whose state begins with one of these texts."""
_BUSY = {
    DATA: "Look for a loader worker that hangs, slow storage, or fewer batches than on the other ranks.",
    LOCK: "Look for a lock, queue or thread that never becomes free; other threads of the rank are shown below.",
    "a checkpoint": "Look for slow storage, and for a checkpoint that only some ranks save or load.",
    "slow:": "Look for work that only this rank does, such as an evaluation, and for a slow host.",
    "in torch.distributed.": "Look for a torch.distributed call that only some ranks make, or make in another order.",
    "in a collective, at": "Every rank of this collective has issued it, but data does not arrive: look at the network "
    "between the hosts. If it works again, the job goes on.",
    SLEEP: "Look at the line of the missing rank: what does it wait for that the others do not?",
    "(computing)": "Look at the line of the missing rank for a loop that does not end, and for work that only it does.",
    **dict.fromkeys(("waits for", "in forward", "in backward", "in a collective"), _SAME_ORDER),
    "": "Look at the line of the missing rank: what does it wait for that the others do not?",
}
"""What to do about any other missing rank: the first text that is in its state."""


@dataclass
class HangRow:
    """What one rank does."""

    rank: int
    host: str = ""
    pid: int = 0
    state: str = ""
    waits_for: str = ""
    """The collective that the rank waits in."""
    unit: str = ""
    """The unit of the rank's latest collective."""
    last: str = ""
    """The rank's latest collective."""
    position: int = -1
    line: str = ""
    stack: list[str] = field(default_factory=list)
    """The main thread: the user's lines first, innermost first. Lines of libraries are in parentheses."""
    threads: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class HangReport:
    """Which ranks are missing in a collective, and what every rank does. `reason` says why the report was made."""

    reason: str
    finding: str
    position: int = -1
    collective: str = ""
    unit: str = ""
    missing: list[int] = field(default_factory=list)
    rows: list[HangRow] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "hang", "unshard": __version__, **asdict(self)}

    def __str__(self) -> str:
        head = ("rank", "host", "pid", "state", "last announced", "position", "line")
        lines = [f"unshard: {self.reason}", "", *table(head, self._cells(), numbers=(5,)), "", self.finding]
        for row in self.rows:
            for name, stack in ({"main thread": row.stack} | row.threads).items():
                if stack:
                    lines += ["", f"rank {row.rank}, {name}:", *(f"    {each}" for each in stack)]
        return "\n".join(lines)

    def _cells(self) -> list[list[str]]:
        sets: dict[Any, list[HangRow]] = {}
        for row in self.rows:
            alone = row.rank if len(self.rows) <= _ROWS_ALONE or row.rank in self.missing else -1
            sets.setdefault((alone, row.state, row.last, row.position, row.line), []).append(row)
        cells = []
        for rows in sets.values():
            first, hosts = rows[0], sorted({row.host for row in rows})
            host = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
            pid = str(first.pid or "-") if len(rows) == 1 else f"{len(rows)} processes"
            position = str(first.position) if first.position >= 0 else "-"
            cells.append(
                [_ranges([row.rank for row in rows]), host or "-", pid, first.state, first.last, position, first.line]
            )
        return cells


def _ranges(ranks: list[int]) -> str:
    """Return `"0-2, 5"` for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def unit_in(text: str) -> str:
    """Return the names of the units in the description of a collective."""
    found = _UNITS.search(text)
    return found[1].replace("'", "") if found else ""


@dataclass
class Facts:
    """What the reporting rank knows. `answers` are those of other ranks to its request for stacks."""

    rank: int
    records: Mapping[int, Record]
    waits: Waits
    answers: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    silent: Mapping[int, float] = field(default_factory=dict)
    """For how many seconds ranks that announce nothing have been silent."""
    processes: Mapping[int, str] = field(default_factory=dict)
    """States of the processes of silent and ended ranks, from ranks on the same host."""
    texts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Latest collectives of the reporting rank, by process group and position."""
    error: str = ""


def report_of(facts: Facts, reason: str) -> HangReport:
    """Return the report. `reason` is its first line."""
    if not facts.waits.missing:
        _blame_different(facts)
    rows = [_row_of(rank, facts) for rank in sorted(facts.records)]
    report = HangReport(reason, "", missing=facts.waits.missing, rows=rows)
    group = _group_of(facts)
    if group:
        waiting = [rank for rank, others in facts.waits.edges.items() if group in others.values()]
        leader = facts.rank if facts.rank in waiting else min(waiting)
        texts = facts.texts if leader == facts.rank else facts.answers.get(leader, {}).get("recent", {})
        wanted = {int(position): text for position, text in texts.get(group, {}).items()}
        behind = min(_agreed(rank, group, wanted, facts) for rank in facts.waits.missing)
        report.position = min(behind + 1, max(place_in(facts.records[leader], group)[0], 1))
        text = wanted.get(report.position, "")
        report.collective = shown(text) if text else place_in(facts.records[leader], group)[1]
        report.unit = unit_in(report.collective)
        for row in rows:  # a rank has also announced the collectives that it prefetches
            if row.rank in waiting and row.rank in facts.waits.waiting:
                row.waits_for = report.collective
    report.finding = _finding(facts, report)
    return report


def _agreed(rank: int, group: str, wanted: Mapping[int, str], facts: Facts) -> int:
    """Return up to which position a missing rank has issued the collectives in `wanted`."""
    theirs = facts.answers.get(rank, {}).get("recent", {}).get(group, {})
    differing = [int(at) for at, text in theirs.items() if text and wanted.get(int(at), text) != text]
    return min(differing, default=max(place_in(facts.records.get(rank, {}), group)[0], 0) + 1) - 1


def _blame_different(facts: Facts) -> None:
    """If ranks have issued different collectives, call the smaller set of them missing."""
    sets: dict[tuple[int, str], dict[str, list[int]]] = {}
    for rank, answer in sorted(facts.answers.items()):
        for group, texts in answer["recent"].items():
            for position, text in texts.items():
                if text:
                    sets.setdefault((int(position), group), {}).setdefault(text, []).append(rank)
    for (_, group), by_text in sorted(sets.items()):
        if len(by_text) > 1:
            *fewer, most = sorted(by_text.values(), key=lambda ranks: (len(ranks), -ranks[0]))
            facts.waits.missing = sorted(rank for ranks in fewer for rank in ranks)
            facts.waits.edges = {rank: dict.fromkeys(facts.waits.missing, group) for rank in most}
            return


def _group_of(facts: Facts) -> str:
    """Return the process group in which the first missing rank is missing."""
    for rank in [facts.rank, *sorted(facts.waits.edges)]:
        for missing in facts.waits.missing:
            if group := facts.waits.edges.get(rank, {}).get(missing):
                return group
    return ""


def _row_of(rank: int, facts: Facts) -> HangRow:
    record, answer = facts.records[rank], facts.answers.get(rank, {})
    known = {**record.get("facts", {}), **answer.get("facts", {})}
    waited_in = [group for other, group in facts.waits.edges.get(rank, {}).items() if other in facts.waits.missing]
    groups = record.get("groups", {})
    group = (waited_in or [_group_of(facts)])[0]
    if group not in groups:
        group = max(groups, key=lambda name: groups[name][2], default="")
    issued, last = place_in(record, group)
    return HangRow(
        rank,
        host=known.get("host", ""),
        pid=known.get("pid", 0),
        state=_state_of(rank, facts, known),
        waits_for=last if rank in facts.waits.edges else "",
        unit=unit_in(last),
        last=last,
        position=issued,
        line=("" if _is_stale(rank, facts) else known.get("line")) or record.get("place", ""),
        stack=answer.get("stack", []),
        threads=answer.get("threads", {}),
    )


def _state_of(rank: int, facts: Facts, known: dict[str, Any]) -> str:
    record, doing, process = facts.records[rank], known.get("doing", ""), facts.processes.get(rank, "")
    while_doing = f" while {doing}" if doing and not facts.error and not _is_stale(rank, facts) else ""
    if not record:
        return "has announced nothing: it has not sharded a module, or has not started"
    if record.get("ended"):
        return f"{record['ended']}{while_doing}" + (f"; {process}" if "killed" in process or "noted" in process else "")
    if rank in facts.silent:
        if process.startswith(("dead", "stopped")):
            return process + (f"; it was {doing}" if doing else "")
        seconds = facts.silent[rank]
        why = "holds Python's global lock, or cannot reach the store" if process else "killed, stopped, or cut off"
        known_state = process or "state unknown (no rank on its host)"
        return f"silent for {seconds:.0f} s: {known_state}; {why}; it was {doing or 'in the program'}"
    if has_raised(record):
        return f"raised {record['raised']}"
    if rank in facts.waits.edges and (rank not in facts.waits.missing or facts.waits.circular):
        return f"waits for {named(some_of_waited(facts, rank))}"
    if rank not in facts.waits.missing:
        return doing or "runs"
    return _busy(record, known)


def _is_stale(rank: int, facts: Facts) -> bool:
    """Return True if the rank has ended and what is known about its program may be older than its last collective."""
    record = facts.records[rank]
    return bool(record.get("ended")) and not record.get("place") and rank not in facts.answers


def some_of_waited(facts: Facts, rank: int) -> list[int]:
    """Return the ranks that `rank` waits for: those that nobody else holds up, if there are any."""
    others = sorted(facts.waits.edges[rank])
    return [each for each in others if each in facts.waits.missing] or others


def _busy(record: Record, known: dict[str, Any]) -> str:
    doing, age = known.get("doing") or "in the program", known.get("age", 0.0)
    if age < min(stalled(record) / 2, 4 * every(record)):
        return f"slow: {doing}; its line changes"
    if doing == LOCK:
        return f"deadlocked in user code? {doing}, at the same line for {age:.0f} s"
    return f"{doing}, at the same line for {age:.0f} s ({'computing' if known.get('busy') else 'blocked'})"


def _finding(facts: Facts, report: HangReport) -> str:
    missing, texts = facts.waits.missing, []
    if facts.error:
        error = facts.error
        for remedy in REMEDIES:
            error = error.replace(remedy, "").strip()
        texts.append(error)
    if not missing:
        positions = {issued_by(record) for record in facts.records.values()}
        where = "All ranks are at the same position." if len(positions) == 1 else "No rank waits for another one."
        return "\n".join([*texts, where])
    rows = {row.rank: row for row in report.rows}
    if facts.waits.circular:
        texts.append(f"{named(missing).capitalize()} wait for each other: their collectives differ in order.")
    differ = "want different collectives" in facts.error  # the error then says where
    said, differences = set(), [] if differ else _differences(facts)
    for rank in missing[:8]:
        row = rows[rank]
        text = f"Rank {rank}: {row.state}."
        if row.last:
            text += f" It last announced to {row.last} (position {row.position})."
        if row.line:
            text += f" Its line: {row.line}."
        texts.append(text)
        said.add(_advice(row.state, differ or bool(differences)))
    texts += differences
    if facts.waits.waiting and report.collective:
        waiting = facts.waits.waiting
        who = f"Rank {waiting[0]} waits" if len(waiting) == 1 else f"Ranks {_ranges(waiting)} wait"
        texts.append(f"{who} to {report.collective}, position {report.position}.")
    return "\n".join([*texts, *sorted(said)])


def _advice(state: str, differs: bool) -> str:
    if "cut off" in state:
        return _CUT_OFF
    if differs and state.startswith("has ended"):
        return _SAME_ORDER  # it ended because of the difference
    if lost := next((advice for begin, advice in _LOST.items() if state.startswith(begin)), ""):
        return lost
    return _SAME_ORDER if differs else next(advice for text, advice in _BUSY.items() if text in state)


def _differences(facts: Facts) -> list[str]:
    """Return where the collectives of a missing rank first differ from those of the reporting rank."""
    for rank in facts.waits.missing:
        for group, theirs in facts.answers.get(rank, {}).get("recent", {}).items():
            mine = facts.texts.get(group, {})
            for position, text in sorted((int(position), text) for position, text in theirs.items()):
                own = mine.get(position)
                if own and text and own != text:
                    return [
                        f"The ranks want different collectives at position {position}: rank {rank} wants to "
                        f"{shown(text, own)}, rank {facts.rank} to {shown(own, text)}."
                    ]
    return []
