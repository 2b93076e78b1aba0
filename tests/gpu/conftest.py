"""These tests need a CUDA device. Several ranks of NCCL share one, with the help of CUDA's multi-process service."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bed import pool

from benchmarks import mps


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("nccl_ranks") and not mps.is_there():
            item.add_marker(pytest.mark.skip(reason=f"needs {mps.CONTROL}"))


@pytest.fixture(scope="session", autouse=True)
def _workers_share_the_device() -> Iterator[None]:
    if not torch.cuda.is_available() or not mps.is_there():
        yield
        return
    with mps.running() as environment:
        pool.shared().use(environment)
        yield
        pool.shared().use({})
