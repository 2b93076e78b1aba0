"""Ties the pool of workers to the test session, and skips what the machine cannot run."""

import pytest
import torch
from bed import pool
from bed.worker import rewrite_helpers

rewrite_helpers()


def pytest_configure(config: pytest.Config) -> None:
    # Warnings that fail a test in the main process must fail it on a rank too.
    pool.shared().filters = (*config.getini("filterwarnings"), *(config.getoption("pythonwarnings") or ()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_unconfigure() -> None:
    pool.close_shared()
