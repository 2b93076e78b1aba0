"""The table of ranks on NCCL, where the host runs ahead of the collectives and then blocks in CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bed import hanging
from bed.programs import PACKAGES, free_port

from benchmarks import mps

pytestmark = pytest.mark.nccl_ranks
RANKS, SECONDS, PATIENCE = 3, 3.0, 60.0
AT_ONCE = 5  # jobs; each starts three processes, most of whose time goes into imports and CUDA
BED = str(Path(hanging.__file__).parents[1])


def explained(cause: str, folder: Path) -> tuple[dict[str, Any] | None, str]:
    """The report of a job, and what its ranks printed. They do without CUDA's multi-process service."""
    file, output = folder / f"{cause}.json", folder / f"{cause}.txt"
    common = {
        **os.environ,
        **mps.SOCKETS,
        "PYTHONPATH": os.pathsep.join([BED, PACKAGES]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
    }
    with output.open("w") as text:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "bed.hanging", cause, str(file), str(SECONDS)],
                env={**common, **mps.host_of(rank), "RANK": str(rank), "LOCAL_RANK": "0"},
                stdout=text,
                stderr=text,
            )
            for rank in range(RANKS)
        ]
        try:
            for each in ranks:
                each.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for each in ranks:
                each.kill()
                each.wait()
    return json.loads(file.read_text()) if file.exists() else None, output.read_text(errors="replace")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any] | None, str]]:
    folder, names = tmp_path_factory.mktemp("hangs"), [each[0].__name__ for each in hanging.CAUSES]
    with ThreadPoolExecutor(AT_ONCE) as executor:
        return dict(zip(names, executor.map(lambda name: explained(name, folder), names), strict=True))


@pytest.mark.parametrize("cause", [each[0] for each in hanging.CAUSES], ids=lambda cause: cause.__name__)
def test_the_rank_that_is_missing_is_named(
    reports: dict[str, tuple[dict[str, Any] | None, str]], cause: Callable[..., None]
) -> None:
    report, output = reports[cause.__name__]
    assert report is not None, output
    hanging.check_report(report, cause, RANKS)
