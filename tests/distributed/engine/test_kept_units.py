"""Programs that write, freeze or step parameters of kept units, against the unsharded model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from torch import Tensor, nn

from unshard import FullyShardedDataParallel as FSDP
from unshard import MixedPrecisionPolicy, ShardingStrategy, fully_shard


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.frozen, self.outer = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.frozen(torch.tanh(self.inner(x)))))


def default(model: Net) -> Any:
    return each(model)


def kept(model: Net) -> Any:
    return each(model, reshard_after_forward=False)


def always_kept(model: Net) -> Any:
    model = each(model, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    return model


def sliced(model: Net) -> Any:
    """Slices need a divisor of the number of ranks; elsewhere this is the default."""
    return each(model, reshard_after_forward=2 if dist.get_world_size() == 4 else True)


def each(model: Net, **options: Any) -> Any:
    fully_shard(model.inner, **options)
    fully_shard(model.frozen, **options)
    return fully_shard(model, **options)


def wrapper(model: Net) -> Any:
    return wrapped(model, originals=True)


def flat_wrapper(model: Net) -> Any:
    return wrapped(model, originals=False)


def wrapped(model: Any, originals: bool) -> Any:
    options: Any = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": originals}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is one rank")
        model.inner, model.frozen = FSDP(model.inner, **options), FSDP(model.frozen, **options)
        return FSDP(model, **options)


CONFIGS = [default, kept, always_kept, sliced, wrapper, flat_wrapper]


class Run:
    """One model in training. `seen` is what the program could see of it."""

    def __init__(self, shard: Callable[[Net], Any] | None):
        torch.manual_seed(3)
        self.sharded = shard is not None
        self.model = Net() if shard is None else shard(Net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.5, momentum=0.9)
        self.seen: list[Tensor] = []

    def loss(self, seed: int) -> Tensor:
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(seed))
        if self.sharded:
            x = x.chunk(dist.get_world_size())[dist.get_rank()]
        return self.model(x).square().mean()

    def step(self, seed: int) -> None:
        self.loss(seed).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, mode: Any = torch.no_grad) -> None:
        with mode():
            self.seen.append(self.model(torch.ones(2, 5)).clone())

    @torch.no_grad()
    def write(self, factor: float = 0.5) -> None:
        for parameter in self.model.parameters():
            parameter.mul_(factor)

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        if isinstance(self.model, FSDP):
            with self.model.no_sync():
                yield
        elif self.sharded:
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)
        else:
            yield


def compare(program: Callable[[Run], None], shard: Callable[[Net], Any]) -> None:
    mine, reference = Run(shard), Run(None)
    for run in (mine, reference):
        run.step(1)
        program(run)
        run.evaluate()
        run.step(8)
        run.evaluate()
    assert len(mine.seen) >= 2
    for found, expected in zip(mine.seen, reference.seen, strict=True):
        where = f"{program.__name__}, {shard.__name__}"
        torch.testing.assert_close(
            found, expected, rtol=1e-5, atol=1e-5, msg=lambda text, where=where: f"{where}: {text}"
        )


# -- writes ----------------------------------------------------------------------------------------------------------


def write_after_a_dropped_graph(run: Run) -> None:
    run.loss(2)
    run.write()


def write_after_an_evaluation(run: Run) -> None:
    run.evaluate()
    run.write()
    run.evaluate()


def write_twice_around_a_backward(run: Run) -> None:
    run.loss(2)
    run.write(0.9)
    run.loss(3).backward()
    run.write(0.9)
    run.optimizer.step()
    run.optimizer.zero_grad()


def initialise(run: Run) -> None:
    run.evaluate()
    run.loss(2)
    for module in run.model.modules():
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)


def step_before_an_evaluation(run: Run) -> None:
    run.loss(2).backward()
    run.loss(3)
    run.optimizer.step()
    run.evaluate()
    run.optimizer.zero_grad()


def step_after_an_evaluation(run: Run) -> None:
    run.loss(2).backward()
    run.evaluate()
    run.optimizer.step()
    run.evaluate()
    run.optimizer.zero_grad()


def load_a_state_dict(run: Run) -> None:
    state = {name: each.clone() for name, each in run.model.state_dict().items()}
    run.step(2)
    run.evaluate()
    run.model.load_state_dict(state)


PROGRAMS = [
    write_after_a_dropped_graph,
    write_after_an_evaluation,
    write_twice_around_a_backward,
    initialise,
    step_before_an_evaluation,
    step_after_an_evaluation,
    load_a_state_dict,
]


@pytest.mark.parametrize("shard", CONFIGS)
@world(1, 2, 3, 4)
def test_writes_take_effect(shard: Callable[[Net], Any]) -> None:
    for program in PROGRAMS:
        if program in PROGRAMS[:4] and shard is sliced and dist.get_world_size() == 4:
            continue  # slices cannot be written: below
        if program is initialise and shard is flat_wrapper:
            continue  # its modules have views of the flat parameter while they are kept, and none later
        compare(program, shard)


def bf16(model: Net) -> Any:
    return each(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


@pytest.mark.parametrize(("shard", "written"), [(bf16, "outer.weight"), (sliced, "inner.weight")])
@world(4)
def test_writes_that_would_lose_precision_are_refused(shard: Callable[..., Any], written: str) -> None:
    """To the unit of the root, which is kept in bfloat16, and to slices. The model is as it was before the write."""
    run = Run(shard)
    run.step(1)
    run.evaluate()
    run.loss(2)
    with torch.no_grad():
        run.model.get_parameter(written).mul_(0.5)
    with pytest.raises(RuntimeError, match=rf"on rank \d: the program wrote '{written}' while.*dropped.*after reshard"):
        run.evaluate()
    run.evaluate()
    torch.testing.assert_close(run.seen[-1], run.seen[-2], rtol=0, atol=0)


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [kept, always_kept, sliced])
@world(2, 4, slow=[])
def test_parameters_read_after_a_step_are_new(shard: Callable[..., Any]) -> None:
    mine, reference = Run(shard), Run(None)
    for run in (mine, reference):
        run.loss(2).backward()
        run.evaluate()
        run.loss(3)
        run.optimizer.step()
    for found, expected in zip(mine.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-5)


@world(2)
def test_gradients_are_found_after_an_evaluation() -> None:
    """In the parameters that the model lists, so that programs can clip and scale them."""

    def program(run: Run) -> None:
        run.loss(2).backward()
        run.evaluate()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
        run.optimizer.step()
        run.optimizer.zero_grad()

    for shard in (default, kept, always_kept):
        compare(program, shard)


# -- freezing --------------------------------------------------------------------------------------------------------


def unfreeze_all(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.requires_grad_(False)
    run.loss(2)
    for parameter in run.model.parameters():
        parameter.requires_grad_(True)


def unfreeze_some(run: Run) -> None:
    for parameter in run.model.frozen.parameters():
        parameter.requires_grad_(False)
    run.step(2)
    run.loss(3)
    for parameter in run.model.frozen.parameters():
        parameter.requires_grad_(True)


def freeze_after_forward(run: Run) -> None:
    run.loss(2)
    for parameter in run.model.frozen.parameters():
        parameter.requires_grad_(False)
    run.step(3)


@pytest.mark.parametrize("shard", CONFIGS)
@world(1, 2, 3, 4, slow=[2, 3])
def test_freezing_takes_effect(shard: Callable[[Net], Any]) -> None:
    for program in (unfreeze_all, unfreeze_some, freeze_after_forward):
        compare(program, shard)


@world(2)
def test_a_frozen_base_is_gathered_once() -> None:
    """Steps of an optimizer that holds it do not make it stale; other writes do."""
    run = Run(always_kept)
    for parameter in run.model.inner.parameters():
        parameter.requires_grad_(False)
    run.step(1)
    sizes = []
    for change in (lambda: run.step(2), lambda: run.step(3), run.write):
        change()
        with Collectives() as seen:
            run.evaluate()
        sizes.append(sum(call.bytes_out for call in seen.of("gather")))
    assert 0 < sizes[0] == sizes[1] < sizes[2]


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@world(1, 2, 3, 4)
def test_evaluations_between_micro_batches_keep_their_sums(mode: Any) -> None:
    def program(run: Run) -> None:
        with run.unsynchronised():
            first = run.loss(2)
            run.evaluate(mode)
            first.backward()
            run.evaluate(mode)
            run.loss(3).backward()
            run.evaluate(mode)
        run.loss(4).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    for shard in CONFIGS:
        compare(program, shard)


@world(1, 2, 3, 4)
def test_a_graph_from_before_a_step_is_refused() -> None:
    """As autograd refuses it for the unsharded model, although another backward came between. Training goes on."""

    def program(run: Run) -> None:
        loss = run.loss(2)
        run.step(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        run.optimizer.zero_grad()

    for shard in CONFIGS:
        compare(program, shard)


@world(2)
def test_a_graph_of_parameters_that_are_not_stepped_is_kept() -> None:
    """Two optimizers, each after the backward of its own loss: legal without sharding, and so it is here."""

    def program(run: Run) -> None:
        outer = torch.optim.SGD(run.model.outer.parameters(), 0.1)
        inner = torch.optim.SGD(run.model.inner.parameters(), 0.1)
        run.model(torch.ones(2, 5))  # a graph that nobody uses
        hidden = run.model.inner(torch.ones(2, 5)).square().mean()
        run.loss(2).backward()
        outer.step()
        hidden.backward()
        inner.step()
        run.model.zero_grad()

    compare(program, default)
