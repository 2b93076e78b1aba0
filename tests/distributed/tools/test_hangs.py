"""The table of ranks names the rank that is missing, its line, and what it does instead of its collective."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bed import hanging
from bed.pool import JobFailed, Pool

SECONDS = 2.0
LIMIT = 30.0  # in which the rank must be named


@pytest.fixture
def ranks() -> Iterator[Pool]:
    """Workers of this test alone, which end by force."""
    workers = Pool(grace=20.0)
    yield workers
    workers.close()


def explained(ranks: Pool, cause: Callable[..., None], size: int, file: Path) -> dict[str, Any]:
    began = time.time()
    with pytest.raises(JobFailed) as caught:
        ranks.run(hanging.run, size, {"cause": cause, "file": str(file), "seconds": SECONDS})
    assert file.exists(), caught.value
    report = json.loads(file.read_text())
    assert file.stat().st_mtime - began < LIMIT
    assert report["kind"] == "hang" and report["missing"] == [size - 1], report["finding"]
    assert [row["rank"] for row in report["rows"]] == list(range(size))
    return report


# The state of the last rank, its line, and its latest unit.
CAUSES: list[Any] = [
    (hanging.sleeps, "sleeping, at the same line", "in sleeps", "(root)"),
    (hanging.takes_another_branch, "computing|its line changes", "in evaluates", "(root)"),
    (hanging.raises, "raised ValueError: bad data", "in raises", "blocks.2"),
    (hanging.is_killed, r"dead: .*(SIGKILL|is gone)", "in is_killed", "(root)"),
    (hanging.exits_early, "has ended", "in exits_early", "(root)"),
    (hanging.loads_data, "in its data loader, at the same line", "in __getitem__", "(root)"),
    (hanging.is_stopped, r"stopped \(SIGSTOP\)", "in is_stopped", "(root)"),
    (hanging.deadlocks, "deadlocked.*lock", "in deadlocks", "(root)"),
    (hanging.holds_the_global_lock, "silent .*global lock", "in holds_the_global_lock", "(root)"),
    (hanging.runs_another_model, "", "", ""),
    (hanging.gets_longer_batches, "", "", ""),
    (hanging.skips_a_unit, "", "", ""),
    (hanging.crashes_while_saving, "dead: .* while saving a checkpoint", "in state_dict", "(root)"),
]
QUICK = (hanging.loads_data, hanging.is_stopped)


@pytest.mark.parametrize(
    ("cause", "state", "line", "unit"),
    [pytest.param(*each, id=each[0].__name__, marks=() if each[0] in QUICK else pytest.mark.slow) for each in CAUSES],
)
def test_the_rank_that_is_missing_is_named(
    ranks: Pool, tmp_path: Path, cause: Callable[..., None], state: str, line: str, unit: str
) -> None:
    report = explained(ranks, cause, 3, tmp_path / "hang.json")
    print(json.dumps(report, indent=1)[:6000])
    last, first = report["rows"][-1], report["rows"][0]
    assert re.search(state, last["state"]), last
    assert re.search(rf"hanging.py:\d+ {line}", last["line"]), last
    assert unit in report["unit"]
    assert first["pid"] != last["pid"] > 0 and first["host"] == last["host"] != ""
