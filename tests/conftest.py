"""Ties the pool of workers to the test session, and skips what the machine cannot run."""

import os
from collections.abc import Iterator

import pytest
import torch
from bed import pool, processes
from bed.quick import leave_few_quick
from bed.worker import rewrite_helpers

rewrite_helpers()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="how many processes run tests at once")


def pytest_configure(config: pytest.Config) -> None:
    # Warnings that fail a test in the main process must fail it on a rank too.
    pool.shared().filters = (*config.getini("filterwarnings"), *(config.getoption("pythonwarnings") or ()))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves the slow ones out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("keyword") and not any("::" in name for name in config.args):
        leave_few_quick(items)  # where tests are named, all their rows are wanted
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("processes")
    # With a CUDA device, one process: CUDA does not survive a fork, and tests measure the memory of the device.
    if count == 1 or session.config.option.collectonly or torch.cuda.is_available():
        return None
    processes.run(session, count, pool.close_shared)
    return True


def pytest_unconfigure() -> None:
    pool.close_shared()


@pytest.fixture(autouse=True)
def _leaves_no_variables() -> Iterator[None]:
    """Commands that tests call in this process set variables, which later tests and all ranks would inherit."""
    yield
    for name in [name for name in os.environ if name.startswith("UNSHARD_")]:
        del os.environ[name]
