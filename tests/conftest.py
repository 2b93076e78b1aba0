"""Ties the pool of workers to the test session."""

import pytest

from bed import pool


def pytest_configure(config: pytest.Config) -> None:
    # Warnings that fail a test in the main process must fail it on a rank too.
    pool.shared().filters = (*config.getini("filterwarnings"), *(config.getoption("pythonwarnings") or ()))


def pytest_unconfigure() -> None:
    pool.close_shared()
