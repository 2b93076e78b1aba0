"""A loss that is reached past what modules return: by what they left on themselves, or somewhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.wrapped import full_parameters
from torch import nn
from torch.utils.checkpoint import checkpoint

from unshard import FullyShardedDataParallel as FSDP
from unshard import ShardingStrategy, fully_shard
from unshard.engine.states import ParamState, Phase
from unshard.errors import StateError

WIDTH = 6
ELSEWHERE: list[torch.Tensor] = []
"""Where nobody who looks at modules will find it."""

HOWS = ("units", "units and root", "flat", "originals")


class Expert(nn.Module):
    """Its second result is for the loss; `place` says where it leaves it, `late` that it computes it last."""

    def __init__(self, place: str, late: bool = False) -> None:
        super().__init__()
        self.place, self.late = place, late
        self.first, self.second, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.kept: Any = None
        self.losses: list[torch.Tensor] = []
        self.named: dict[str, Any] = {}
        self.register_buffer("buffered", torch.zeros(()))

    def leave(self, x: torch.Tensor) -> None:
        # Reads weights in backward: of a layer, and without any input. A gradient that also comes from elsewhere.
        loss = self.gate(x).square().mean() + self.gate.weight.square().sum() + self.second.weight.pow(3).sum()
        if self.place == "attribute":
            self.kept = loss
        elif self.place == "list":
            self.losses.append(loss)
        elif self.place == "dict":
            self.named["balance"] = {"loss": loss}
        elif self.place == "buffer":
            self.buffered = loss
        else:
            ELSEWHERE.append(loss)

    def take(self) -> torch.Tensor:
        if self.place == "attribute":
            return self.kept
        if self.place == "list":
            return self.losses.pop()
        if self.place == "dict":
            return self.named.pop("balance")["loss"]
        return self.buffered if self.place == "buffer" else ELSEWHERE.pop(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.late:
            self.leave(x)
        y = x + self.second(torch.tanh(self.first(x)))
        if self.late:
            self.leave(x)
        return y


class Block(nn.Module):
    """A unit around a unit, with parameters of its own before it."""

    def __init__(self, place: str, late: bool) -> None:
        super().__init__()
        self.norm, self.expert = nn.LayerNorm(WIDTH), Expert(place, late)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.expert(self.norm(x))


class Model(nn.Module):
    """`cut` is the block whose result no gradient comes back to."""

    def __init__(self, place: str, late: bool = False, cut: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.place, self.late, self.cut = place, late, cut
        self.first, self.side, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block(place, late) for _ in range(3))
        self.kept: Any = None
        self.run: Callable[..., torch.Tensor] = lambda block, x: block(x)

    def leave(self, x: torch.Tensor) -> None:
        self.kept = self.side(x).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not self.late:
            self.leave(x)
        for number, block in enumerate(self.blocks):
            x = self.run(block, x)
            x = x.detach() if number == self.cut else x
        y = self.head(x)
        if self.late:
            self.leave(x)
        return y

    def loss(self, output: torch.Tensor, terms: str) -> torch.Tensor:
        """`terms`: of the output, the root's own, the experts', the second expert's."""
        left = [block.expert.take() for block in self.blocks]
        parts = {"output": output.square().mean(), "root": self.kept, "experts": sum(left), "expert": left[1] * 1.0}
        return sum(part for name, part in parts.items() if name in terms.split(" and "))


def wrapped(model: Model, how: str, **options: Any) -> nn.Module:
    if how.startswith("units"):
        for block in model.blocks:
            fully_shard(block.expert, **options)
            fully_shard(block, **options)
        return fully_shard(model, reshard_after_forward=True if how == "units and root" else None)
    options["use_orig_params"] = how == "originals"
    for number, block in enumerate(model.blocks):
        block.expert = FSDP(block.expert, **options)
        model.blocks[number] = FSDP(block, **options)
    return FSDP(model, **options)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(model: Model, top: nn.Module, terms: str, ranks: list[int], steps: int = 3) -> None:
    """With the mean of the losses of `ranks`."""
    optimizer = torch.optim.SGD(top.parameters(), lr=0.05)
    for step in range(steps):
        for rank in ranks:
            (model.loss(top(batch(step, rank)), terms) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def check(model: Model, how: str, terms: str, **options: Any) -> None:
    """As trained unsharded; afterwards everything is at rest."""
    reference = Model(model.place, model.late, model.cut)
    reference.run = model.run
    trained(reference, reference, terms, list(range(dist.get_world_size())))
    top = wrapped(model, how, **options)
    trained(model, top, terms, [dist.get_rank()])
    states = [fully_shard.state(each) for each in model.modules()] if how.startswith("units") else []
    states += [] if states else [each._state for each in FSDP.fsdp_modules(top)]
    for state in filter(None, states):
        assert (state.unit.param_state, state.unit.phase) == (ParamState.SHARDED, Phase.IDLE), state.unit
    if states and how.startswith("units"):
        found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    else:
        found = full_parameters(top)
    fresh = dict(Model(model.place).named_parameters())
    moved = 0
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name].detach(), parameter.detach(), rtol=1e-4, atol=1e-6, msg=name)
        moved += not torch.equal(parameter, fresh[name])
    assert moved > 3


@pytest.mark.parametrize("terms", ["output and experts and root", "experts", "expert", "root", "output and root"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("how", HOWS)
@world(2)
@pytest.mark.filterwarnings("ignore")
def test_what_is_left_on_modules(how: str, late: bool, terms: str) -> None:
    """The load-balancing loss of a mixture of experts, added to the loss of the output or alone."""
    check(Model("attribute", late), how, terms)


@pytest.mark.parametrize("terms", ["output and experts and root", "experts", "root"])
@pytest.mark.parametrize("how", HOWS)
@world(1, 3)
@pytest.mark.filterwarnings("ignore")
def test_with_one_rank_and_with_three(how: str, terms: str) -> None:
    check(Model("attribute", late=True), how, terms)


@pytest.mark.parametrize("place", ["list", "dict", "buffer"])
@pytest.mark.parametrize("how", ["units", "flat", "originals"])
@world(2)
@pytest.mark.filterwarnings("ignore")
def test_wherever_modules_keep_it(how: str, place: str) -> None:
    check(Model(place, late=True), how, "experts")


@pytest.mark.parametrize("terms", ["output and experts", "experts"])
@pytest.mark.parametrize("how", ["units", "flat", "originals"])
@world(2)
@pytest.mark.filterwarnings("ignore")
def test_units_that_are_recomputed(how: str, terms: str) -> None:
    model = Model("attribute", late=True)
    model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)
    check(model, how, terms)


@pytest.mark.parametrize("terms", ["output and experts and root", "experts", "root"])
@world(2, 3)
def test_sums_of_several_backwards(terms: str) -> None:
    """Of which the first ones are not synchronised."""
    model, reference = Model("attribute", late=True), Model("attribute", late=True)
    wrapped(model, "units")
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        for each in (model, reference):
            each.loss(each(batch(step, 0)), terms).backward()
    compared = 0
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6, msg=name)
            compared += 1
    assert compared > 3


@pytest.mark.parametrize("terms", ["output and experts", "expert"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("how", HOWS)
@world(2)
@pytest.mark.filterwarnings("ignore")
def test_a_unit_whose_output_gets_no_gradient(how: str, late: bool, terms: str) -> None:
    check(Model("attribute", late, cut=1), how, terms)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@world(1, 2, 3)
@pytest.mark.filterwarnings("ignore")
def test_what_is_left_where_nobody_looks(how: str, late: bool) -> None:
    """Besides what is returned: a unit is unsharded before any part of its backward runs, also before a later one."""
    check(Model("elsewhere", late), how, "output and experts")


class Plain(nn.Module):
    """Units in a row; the second one's result gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts, self.head = nn.ModuleList(Expert("elsewhere") for _ in range(3)), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.experts
        return self.head(third(second(first(x)).detach()))


def plain(how: str, kept: bool = False) -> nn.Module:
    model = Plain()
    if how == "units":
        for expert in model.experts:
            fully_shard(expert, reshard_after_forward=not kept)
        return fully_shard(model)
    strategy = ShardingStrategy.SHARD_GRAD_OP if kept else ShardingStrategy.FULL_SHARD
    options: dict[str, Any] = {"use_orig_params": how == "originals", "sharding_strategy": strategy}
    for number, expert in enumerate(model.experts):
        model.experts[number] = FSDP(expert, **options)
    return FSDP(model, **options)


@pytest.mark.parametrize("how", ["units", "flat", "originals"])
@world(2, 3)
@pytest.mark.filterwarnings("ignore")
def test_gradients_of_a_unit_that_was_not_gathered_are_refused(how: str) -> None:
    """Its gather is under way, so that backward reads memory instead of parameters and would not notice."""
    model = plain(how)
    for _ in range(2):
        ELSEWHERE.clear()
        loss = model(batch(0, 0)).square().mean() + ELSEWHERE[1]
        with pytest.raises(
            StateError, match=r"Unit 'experts\.1' on rank .* was not unsharded.*attribute.*SHARD_GRAD_OP"
        ):
            loss.backward()
    ELSEWHERE.clear()
    model(batch(0, 0)).square().mean().backward()  # ready again


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("how", ["units", "flat", "originals"])
@world(2)
@pytest.mark.filterwarnings("ignore")
def test_they_are_right_where_units_are_kept_unsharded(how: str, alone: bool) -> None:
    """As the message says. `alone`: backward comes to no output at all, only to the inputs."""
    model, reference = plain(how, kept=True), Plain()
    for top in (model, reference):
        optimizer = torch.optim.SGD(top.parameters(), lr=0.05)
        for step in range(2):
            ELSEWHERE.clear()
            loss = top(batch(step, 0).requires_grad_()).square().mean() + ELSEWHERE[1]
            (ELSEWHERE[0] if alone else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    if how == "units":
        found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    else:
        found = full_parameters(model)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name].detach(), parameter.detach(), rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("next_is", ["step", "forward"])
@pytest.mark.parametrize("how", ["units", "flat", "originals"])
@world(1, 2)
@pytest.mark.filterwarnings("ignore")
def test_a_backward_that_nobody_saw_is_not_forgotten(how: str, next_is: str) -> None:
    """It used nothing but parameters of the root, which is kept unsharded."""
    layer = Expert("elsewhere")
    model = fully_shard(layer) if how == "units" else FSDP(layer, use_orig_params=how == "originals")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, 0))
    ELSEWHERE.pop().backward()
    if next_is == "forward":
        model(batch(0, 0))
    with pytest.raises(
        StateError, match=r"Unit '\(root\)' on rank .* not reduced over the ranks\. Return the tensor.*reshard\(\)"
    ):
        optimizer.step()
    ELSEWHERE.clear()
    model(batch(0, 0)).sum().backward()
    optimizer.step()
    ELSEWHERE.clear()


@pytest.mark.parametrize("between", ["nothing", "a step of others", "an evaluation", "a second forward"])
@world(1, 2)
def test_a_backward_of_parameters_before_that_of_the_output(between: str) -> None:
    """The second backward takes what the first one has left."""
    results = []
    for sharded in (False, True):
        torch.manual_seed(4)
        model = nn.Linear(WIDTH, 3)
        if sharded:
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = nn.Parameter(torch.ones(2))
        other = torch.optim.SGD([plain], lr=0.1)
        for step in range(2):
            loss = model(batch(step, 0)).square().mean()
            model.weight.square().sum().backward()
            if between == "a step of others":
                plain.sum().backward()
                other.step()
            elif between == "an evaluation":
                with torch.no_grad():
                    model(batch(7, 0))
            elif between == "a second forward":
                loss = loss + model(batch(8, 0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([each.full_tensor() if sharded else each for each in model.parameters()])  # type: ignore[operator]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


@world(2)
def test_ordinary_outputs_are_returned_as_they_are() -> None:
    """No node is added where the output is what was computed last, and nothing is gathered for what is left."""
    model, seen = Model("attribute"), []
    for block in model.blocks:
        fully_shard(block)
        block.register_forward_hook(lambda module, args, output: seen.append(output))
    fully_shard(model)
    with Collectives() as calls:
        loss = model.loss(model(batch(0, 0)), "output and experts")
        loss.backward()
    assert [type(each.grad_fn).__name__ for each in seen] == ["AddBackward0"] * 3
    assert (len(calls.of("gather")), len(calls.of("reduce_scatter"))) == (7, 4)


@world(2)
def test_what_was_there_before_does_not_begin_a_backward() -> None:
    """A unit that keeps its input, or a view of it, is not gathered again when its backward is over."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
        layer.register_forward_pre_hook(lambda module, args: setattr(module, "seen", [args[0], args[0][:1]]))
    fully_shard(model)
    for _ in range(3):
        loss = model(batch(0, 0)).sum()
        with Collectives() as calls:
            loss.backward()
        assert (len(calls.of("gather")), len(calls.of("reduce_scatter"))) == (3, 3)


class Reporter(nn.Module):
    """Its head is frozen and after everything that learns; the loss is left where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.tanh(self.head(torch.tanh(self.body(x))))
        ELSEWHERE.append(result.square().sum())
        return result.detach()


@world(2)
def test_a_frozen_root_is_kept_for_a_loss_that_is_left_elsewhere() -> None:
    plain, model = Reporter(), Reporter()
    for unit in (model.body, model):
        fully_shard(unit)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            each(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH))
            ELSEWHERE.pop().backward()
        for mine, theirs in zip(model.body.parameters(), plain.body.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]
