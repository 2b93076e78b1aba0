"""In which order collectives are issued: every rank must issue the same ones in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from bed import loopback
from bed.recorders import Call
from torch import nn

from unshard import fully_shard

SIZES = (4, 6, 10, 16, 2)  # every layer has another number of elements, by which it is known on the wire


class Layers(nn.Module):
    """Three layers and a root with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZES[i], SIZES[i + 1], bias=False) for i in range(3))
        self.last = nn.Parameter(torch.randn(SIZES[3], SIZES[4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.last


@contextmanager
def job(**options: object) -> Iterator[tuple[Layers, list[Call]]]:
    """The model after two steps: from the second on the order of forward is known."""
    with loopback.job(2) as group:
        model = Layers()
        names = {parameter.numel(): str(n) for n, layer in enumerate(model.layers) for parameter in layer.parameters()}
        names[model.last.numel()] = "root"
        assert len(names) == 4
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        model.names = names
        for _ in range(2):
            loss(model).backward()
            model.zero_grad()
        group.log.clear()
        yield model, group.log


def loss(model: Layers, seed: int = 0) -> torch.Tensor:
    return model(torch.randn(3, SIZES[0], generator=torch.Generator().manual_seed(seed))).square().mean()


def events(model: Layers, log: list[Call]) -> list[str]:
    """The collectives since the last look, as "gather 1" or "reduce root"."""
    found = []
    for call in log:
        elements = max(call.bytes_in, call.bytes_out) // 4
        kind = {"gather": "gather", "reduce_scatter": "reduce"}[call.kind]
        found.append(f"{kind} {model.names[elements]}")
    log.clear()
    return found


@pytest.mark.parametrize("reshard", [None, True, False])
def test_root_first_then_in_order_of_use(reshard: bool | None) -> None:
    """Contract CM-31, CM-30: the root's gather first, then every layer's."""
    with job(reshard_after_forward=reshard) as (model, log):
        loss(model)
        assert events(model, log) == ["gather root", "gather 0", "gather 1", "gather 2"]


@pytest.mark.parametrize(
    ("reshard", "expected"),
    [
        (True, "gather root, gather 2, gather 1, reduce 2, gather 0, reduce 1, reduce 0, reduce root"),
        (None, "gather 2, gather 1, reduce 2, gather 0, reduce 1, reduce 0, reduce root"),
        (False, "reduce 2, reduce 1, reduce 0, reduce root"),
    ],
    ids=["true", "none", "false"],
)
def test_backward_goes_back_one_ahead(reshard: bool | None, expected: str) -> None:
    """Contract CM-33 to CM-35, CM-30: the gather of the layer before is issued before gradients are computed."""
    with job(reshard_after_forward=reshard) as (model, log):
        for _ in range(2):
            out = loss(model)
            log.clear()
            out.backward()
            assert events(model, log) == expected.split(", ")


@pytest.mark.parametrize(
    ("reshard", "gathers"),
    [
        (True, "gather root, gather 2, gather 1, gather 0, gather 2, gather 1"),
        (None, "gather 2, gather 1, gather 0, gather 2, gather 1"),
        (False, "gather 2, gather 1"),
    ],
    ids=["true", "none", "false"],
)
def test_two_forwards_and_one_backward(reshard: bool | None, gathers: str) -> None:
    """Contract CM-36, MUL-02 to MUL-04: gathered for both uses, reduced once, when the gradients are complete.

    Layer 0 and the root have inputs without gradients: they stay unsharded until the end and need no second gather.
    """
    with job(reshard_after_forward=reshard) as (model, log):
        total = loss(model, 0) + loss(model, 1)
        forward = events(model, log)
        uses = 1 if reshard is False else 2
        assert [forward.count(f"gather {name}") for name in "012"] == [uses] * 3
        total.backward()
        assert events(model, log) == [*gathers.split(", "), "reduce 2", "reduce 1", "reduce 0", "reduce root"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_lists_of_prefetches_in_their_order(where: str) -> None:
    """Contract CM-32, API-09, API-10: gathered with the unit that names them, in the order of the list."""
    with job(reshard_after_forward=True) as (model, log):
        first, second, third = model.layers
        if where == "forward":
            model.set_modules_to_forward_prefetch([second, first])
            for layer in model.layers:
                layer.set_modules_to_forward_prefetch([])
            loss(model)
            assert events(model, log) == ["gather root", "gather 1", "gather 0", "gather 2"]
            return
        model.set_modules_to_backward_prefetch([first, third])
        third.set_modules_to_backward_prefetch([])
        second.set_modules_to_backward_prefetch([])
        out = loss(model)
        log.clear()
        out.backward()
        assert events(model, log) == [
            *("gather root", "gather 0", "gather 2", "reduce 2"),
            *("gather 1", "reduce 1", "reduce 0", "reduce root"),
        ]


def test_a_prefetch_for_nothing_costs_memory_and_no_more() -> None:
    """Contract CM-37: a unit that this backward does not use is kept for the next one, or dropped with the last."""
    with job(reshard_after_forward=True) as (model, log):
        first, _, third = model.layers
        model.set_modules_to_backward_prefetch([third, first])
        x = torch.randn(3, SIZES[0])

        def cut_short(x: torch.Tensor) -> torch.Tensor:
            """The gradient does not reach the first layer."""
            return torch.tanh(third(torch.tanh(model.layers[1](torch.tanh(first(x)).detach())))) @ model.last

        model.forward = cut_short  # type: ignore[method-assign]
        for last in (False, True):
            model.set_is_last_backward(last)
            out = model(x).sum()
            log.clear()
            out.backward()
            seen = events(model, log)
            assert seen.count("gather 0") == 1 and "reduce 0" not in seen
            unit = fully_shard.state(first).unit
            assert unit.param_state.value == ("sharded" if last else "gathering")
            model.zero_grad()
        assert unit.param_groups[0]._unsharded is not None and not unit.param_groups[0].held


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_few_reduce_buffers_at_a_time(buffers: int) -> None:
    """Contract CM-43, API-19: before the next gradients are packed, the oldest reduction has been waited for."""
    with loopback.job(2) as group:
        model = Layers()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        model.set_reduce_scatter_max_input_buffers(buffers)
        units = [fully_shard.state(module).unit for module in (model, *model.layers)]
        held: list[int] = []

        def look(*unused: object) -> None:
            held.append(
                sum(each._input.held for unit in units for each in unit.param_groups[0].gradients.reductions.values())
            )

        x = torch.randn(3, SIZES[0])
        for layer in model.layers:
            layer.register_full_backward_pre_hook(look)
        x.requires_grad_().register_hook(look)
        for _ in range(2):
            held.clear()
            model(x).square().mean().backward()
            # Nothing is reduced before the last layer; then one more under way per layer, up to the limit.
            assert held == [min(n, buffers) for n in range(4)]
        assert not any(
            each._input.held for unit in units for each in unit.param_groups[0].gradients.reductions.values()
        )
        assert group.unwaited() == []
