"""Side effects on the host prevent recordings; returned containers and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from bed.simulated_recorder import simulated_recorder
from torch import nn

from unshard import capture
from unshard.captured_step.recording import Recording
from unshard.captured_step.signature import Arguments


class Counting(torch.optim.Optimizer):
    """Its update depends on a counter on the host."""

    def __init__(self, parameters: Any, count: Callable[[Any], int]):
        super().__init__(parameters, {})
        self.count = count

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        factor = 1 / self.count(self.state)
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=factor)


def in_state(state: Any) -> int:
    state["step"] = state.get("step", 0) + 1
    return state["step"]


def in_a_list(state: Any) -> int:
    count = state.setdefault("all", {}).setdefault("step", [0])
    count[0] += 1
    return count[0]


@pytest.mark.parametrize("count", [in_state, in_a_list], ids=lambda each: each.__name__)
def test_counters_of_optimizers(count: Callable[[Any], int]) -> None:
    model = nn.Linear(4, 4)
    optimizer = Counting(model.parameters(), count)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with simulated_recorder() as happened:
        captured = capture(step, model, optimizer, warmup=2)
        captured(torch.ones(3, 4))
        with pytest.warns(UserWarning, match="Counting keeps 'step' on the host"):
            captured(torch.ones(3, 4))
        for _ in range(3):
            captured(torch.ones(3, 4))
        assert set(happened) == {"run"}


def test_gradients_between_calls() -> None:
    """For parameters that are not sharded, the program chooses the memory of gradients."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    with simulated_recorder() as happened:
        captured = capture(step, model, optimizer, warmup=1)
        with pytest.warns(UserWarning, match=r"not sharded has a gradient .* End the step with .*zero_grad"):
            captured(torch.ones(3, 4))
        for _ in range(3):
            captured(torch.ones(3, 4))
        assert set(happened) == {"run"}


def test_returned_containers_are_new_ones() -> None:
    """A program may change the one that it got."""
    loss: Any = torch.ones(())
    recording = Recording(Mock(), [], Mock(), {"loss": loss, "more": [loss]}, Mock())
    first = recording.replay([])
    first["more"].append(None)
    first.pop("loss")
    second = recording.replay([])
    assert second.keys() == {"loss", "more"} and second["loss"] is loss and second["more"] == [loss]


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    arguments = Arguments((numpy.int64(3), numpy.float32(1)), {})
    assert arguments.obstacle(torch.device("cpu"), lambda value: False) == ""
    assert arguments.signature() != Arguments((numpy.int64(4), numpy.float32(1)), {}).signature()


def test_the_default_dtype_is_part_of_the_signature() -> None:
    model = nn.Linear(4, 4)
    with simulated_recorder() as happened:
        captured = capture(lambda x: model(x) + torch.ones(4), model, warmup=1)
        with torch.no_grad():
            for _ in range(3):
                captured(torch.ones(3, 4))
            assert happened[-1] == "replay"
            torch.set_default_dtype(torch.float64)
            try:
                assert captured(torch.ones(3, 4, dtype=torch.float32)).dtype == torch.float64
            finally:
                torch.set_default_dtype(torch.float32)
        assert happened[-1] == "run"
