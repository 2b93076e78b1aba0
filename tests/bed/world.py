"""`@world(1, 2, 4)`: a pytest test whose body runs on every rank of worlds of these sizes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from bed import pool
from bed.worker import PATIENCE


def world(
    *sizes: int, backend: str = "gloo", timeout: float = PATIENCE, slow: Collection[int] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Run the decorated test once for each world size, as a job of the shared pool.

    The body finds its place with `dist.get_rank()` and `dist.get_world_size()`. Its arguments (parameters and
    fixtures) are pickled on the way to the ranks: `tmp_path` travels, `monkeypatch` does not. The body must be a
    function at the top of its module, for the workers import it by name.

    `slow`: sizes that are slow tests. Without it, 2 and 4 ranks are slow beside 3, which find nearly everything.
    """
    if not sizes or not all(isinstance(size, int) for size in sizes):
        raise TypeError("name the world sizes: @world(1, 2, 4)")

    def decorate(body: Callable[..., Any]) -> Any:
        if "." in body.__qualname__:
            raise TypeError(f"{body.__qualname__} is not at the top of its module: a worker could not import it")
        parameters = inspect.signature(body).parameters
        extra = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)

        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            __tracebackhide__ = True
            size = kwargs["world_size"] if "world_size" in parameters else kwargs.pop("world_size")
            marks = getattr(test, "pytestmark", [])
            filters = [line for mark in marks if mark.name == "filterwarnings" for line in mark.args]
            function = (body.__module__, body.__qualname__)
            pool.shared().run(function, size, kwargs, backend, timeout, filters)

        test.body = body  # type: ignore[attr-defined]
        if "world_size" not in parameters:
            test.__signature__ = inspect.Signature([*parameters.values(), extra])  # type: ignore[attr-defined]
        values = [pytest.param(size, id=f"{size}ranks", marks=_marks(size, sizes, backend, slow)) for size in sizes]
        return pytest.mark.parametrize("world_size", values)(test)

    return decorate


def _marks(size: int, sizes: tuple[int, ...], backend: str, slow: Collection[int]) -> list[pytest.MarkDecorator]:
    if backend == "nccl":
        return [pytest.mark.nccl_ranks] if size > 1 else []
    beside_three = not slow and 3 in sizes and size in (2, 4)
    return [pytest.mark.slow] if size in slow or beside_three else []


def mostly_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`; the tests of all but `quick` are slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]
