"""`unshard.tools.watch`: values that are planted not to be finite are named, and nothing else changes."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bed import world
from bed.recorders import Collectives, TorchCalls
from bed.stack import WIDTH, Block, Stack, batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from unshard import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from unshard.engine import observer, side_stream
from unshard.engine.hooks import state_of
from unshard.engine.packing import Packing
from unshard.engine.reduction import Reduction
from unshard.errors import ArgumentError, StateError
from unshard.optim import GradScaler
from unshard.tools import nonfinite_checks, watch, watching
from unshard.tools.nonfinite import Finding, Seen, Stage, findings_of, first_stage
from unshard.tools.nonfinite_checks import Batch, Record, batches_of
from unshard.tools.rank_reports import Exchange
from unshard.tools.watching import Watch

F16 = torch.float16


class Times(torch.autograd.Function):
    """Multiplies the gradient, and only the gradient, by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Planted(Block):
    """A block whose output, or the gradient of whose weight `first`, is multiplied by a number."""

    output = weight = 1.0

    def forward(self, x: Tensor) -> Tensor:
        first = F.linear(x, Times.apply(self.first.weight, self.weight), self.first.bias)
        return x + self.second(torch.tanh(first)) * self.output


class Model(Stack):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Planted() for _ in range(3))


def fully_sharded(model: Model, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def wrapped(originals: bool) -> Any:
    def shard(model: Model, reduce_dtype: torch.dtype | None = None) -> nn.Module:
        options = {"use_orig_params": originals, "mixed_precision": MixedPrecision(reduce_dtype=reduce_dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one rank
            for number, block in enumerate(model.blocks):
                model.blocks[number] = FullyShardedDataParallel(block, **options)
            return FullyShardedDataParallel(model, **options)

    return shard


@contextmanager
def kernel() -> Iterator[None]:
    """Pack as on a device, where a kernel finds the largest values."""
    fill = Packing.fill

    def by_kernel(self: Packing, gradients: Any) -> list[int]:
        assert len(gradients) == len(self._shard.shardings)
        self.largest = torch.stack([gradients[index].float().abs().amax() for index in range(len(gradients))])
        return fill(self, gradients)

    with mock.patch.object(Packing, "fill", by_kernel), mock.patch.object(Watch, "_check_gradients", no_local_checks):
        yield


def no_local_checks(self: Watch, stage: Stage, *rest: Any) -> None:
    assert stage is not Stage.LOCAL
    CHECK_GRADIENTS(self, stage, *rest)


CHECK_GRADIENTS = Watch._check_gradients
SHARD = {"rows": fully_sharded, "flat": wrapped(True), "one flat parameter": wrapped(False)}


def block(model: nn.Module, number: int) -> Planted:
    return next(
        each for index, each in enumerate(m for m in model.modules() if isinstance(m, Planted)) if index == number
    )


def train(model: nn.Module, steps: int, plant: Any = None, scaler: Any = None) -> torch.optim.Optimizer:
    """`plant(step)` is called before each step, the first of which is number 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        if plant is not None:
            plant(step)
        loss = model(batch(step)).float().square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return optimizer


@contextmanager
def logged() -> Iterator[list[str]]:
    """Yield the messages that unshard logs in the block."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unshard").addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger("unshard").removeHandler(handler)


def last() -> int:
    return dist.get_world_size() - 1


@pytest.mark.parametrize("kind", ["rows", pytest.param("one flat parameter", marks=pytest.mark.slow)])
@pytest.mark.parametrize("exact", [False, True], ids=["late", "exact"])
@world(1, 2, 3, 4, slow=(1, 2, 4))
def test_forward(kind: str, exact: bool, caplog: Any = None) -> None:
    model = SHARD[kind](Model())

    def plant(step: int) -> None:
        block(model, 1).output = math.nan if step == 2 and dist.get_rank() == last() else 1.0

    with watch(model, exact=exact) as watched:
        train(model, 3, plant)
    first = watched.findings[0]
    assert (first.step, first.what, first.unit, first.parameter) == (2, "forward output", "blocks.1", None)
    assert first.ranks == (last(),) and first.dtype == "fp32" and 0 < first.largest_finite < 10
    assert first.elements == (6 * WIDTH if exact else None)
    # The optimizer has stepped with NaN, so the weights of all units are NaN in the next step.
    assert [(each.step, each.what, each.unit) for each in watched.findings[1:]] == [(3, "forward output", "blocks.0")]
    assert watched.findings[1].ranks == tuple(range(dist.get_world_size()))
    assert watched.steps == 3
    text = str(watched)
    alone = " alone" if last() else ""
    assert f"Step 2: rank {last()}{alone} got NaN in forward: output of unit 'blocks.1'" in text or exact


@world(2)
def test_the_module_inside_the_unit() -> None:
    model = Model()
    model.blocks[2].second.register_forward_hook(lambda module, args, output: output.div(0.0))
    with watch(fully_sharded(model), exact=True) as watched:
        train(model, 1)
    assert (watched.findings[0].unit, watched.findings[0].module) == ("blocks.2", "blocks.2.second")
    assert (
        "became infinite in forward: output of module 'blocks.2.second' of unit 'blocks.2'" in watched.findings[0].text
    )


class WithStem(Model):
    """A module of the root runs before the first unit, and `mask` is infinite in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mask, self.factor = nn.Linear(WIDTH, WIDTH), nn.Threshold(math.inf, math.inf), 1.0
        self.stem.register_forward_hook(lambda module, args, output: output[:4] * self.factor)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x).clamp(max=self.mask(x)[0, 0]))


@world(1, 2, 3)
def test_a_module_of_the_root(tmp_path: Path) -> None:
    """It runs before the first unit, which gets its NaN."""
    model = fully_sharded(WithStem())
    largest = [0.0]
    model.stem.register_forward_hook(lambda module, args, output: largest.append(output.abs().max().item()))

    def plant(step: int) -> None:
        model.factor = math.nan if step == 3 and dist.get_rank() == last() else 1.0

    with watch(model, dump=tmp_path / "dump") as watched:
        train(model, 3, plant)
    (found,) = watched.findings
    assert (found.step, found.unit, found.module, found.ranks) == (3, "(root)", "stem", (last(),))
    assert found.elements == 4 * WIDTH and found.largest_finite == pytest.approx(max(largest[:3]))
    assert "got NaN in forward: output of module 'stem' of unit '(root)' (fp32, 528 elements)" in found.text
    if dist.get_rank() == last():
        (file,) = (tmp_path / "dump").glob(f"rank{last()}-*.pt")
        saved = torch.load(file)
        assert saved["unit"] == "blocks.0" and saved["inputs"][0].isnan().all()


@pytest.mark.parametrize("kind", ["rows", *(pytest.param(each, marks=pytest.mark.slow) for each in list(SHARD)[1:])])
@world(1, 2, 3, 4, slow=(1, 2, 4))
def test_local_gradient(kind: str) -> None:
    model = SHARD[kind](Model())

    def plant(step: int) -> None:
        block(model, 2).weight = math.inf if step == 3 and dist.get_rank() == last() else 1.0

    with watch(model, exact=step_is_exact(kind)) as watched:
        train(model, 3, plant)
    assert_local_gradient(watched.findings, step_is_exact(kind))


@world(1, 2)
def test_local_gradient_found_by_the_kernel() -> None:
    model = fully_sharded(Model())

    def plant(step: int) -> None:
        block(model, 2).weight = math.inf if step == 3 and dist.get_rank() == last() else 1.0

    with kernel(), watch(model) as watched:
        train(model, 3, plant)
    assert_local_gradient(watched.findings, False)


def assert_local_gradient(findings: list[Finding], exact: bool) -> None:
    (found,) = findings
    assert (found.step, found.what, found.unit) == (3, "local gradient", "blocks.2")
    assert found.parameter == "blocks.2.first.weight" and found.ranks == (last(),)
    assert 0 < found.largest_finite < 10
    assert (found.elements is not None) == exact
    alone = " alone" if last() else ""
    assert f"rank {last()}{alone} " in found.text and "in blocks.2.first.weight" in found.text


def step_is_exact(kind: str) -> bool:
    return kind == "flat"


@pytest.mark.parametrize("kind", ["rows", *(pytest.param(each, marks=pytest.mark.slow) for each in list(SHARD)[1:])])
@world(1, 2, 3, 4, slow=(2, 4))
def test_overflow_in_the_reduction(kind: str) -> None:
    """Local gradients are finite in fp32, and too large for the fp16 that is sent."""
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=F16)} if kind == "rows" else {"reduce_dtype": F16}
    model = SHARD[kind](Model(), **options)

    def plant(step: int) -> None:
        block(model, 1).weight = 1e12 if step == 2 else 1.0

    with watch(model) as watched:
        train(model, 2, plant)
    (found,) = watched.findings
    assert (found.step, found.what, found.unit) == (2, "reduced gradient", "blocks.1")
    assert found.parameter == "blocks.1.first.weight" and found.dtype == "fp16"
    assert found.largest_finite > 65504 and set(found.ranks) <= set(range(dist.get_world_size()))
    assert "only in the fp16 reduction of blocks.1.first.weight" in found.text
    assert "local gradients of all ranks were finite" in found.text


@world(2, 3)
def test_the_loss() -> None:
    model = fully_sharded(Model())
    with watch(model) as watched:
        (model(batch()).square().mean() * (math.inf if dist.get_rank() == 1 else 1.0)).backward()
        model.zero_grad()
    (found,) = watched.findings
    assert (found.what, found.unit, found.parameter, found.ranks) == ("output gradient", "(root)", None, (1,))


@world(2)
def test_the_input() -> None:
    model = fully_sharded(Model())
    with watch(model) as watched:
        for step in (1, 2):
            inputs = batch(step)
            inputs[0, 0] = math.inf if (step, dist.get_rank()) == (2, 1) else 0.0
            model(inputs).square().mean().backward()
            model.zero_grad()
    (found,) = watched.findings
    assert (found.what, found.ranks) == ("forward output", (1,)) and found.largest_finite is not None
    assert "; an input of the model was " in found.text
    with pytest.raises(StateError, match="This watch has ended"), watched:
        pass
    with watch(model) as watched, torch.no_grad():
        model(batch())
    assert str(watched).startswith("No step was watched.")


@pytest.mark.parametrize("ranks", [1, 2])
@world(2)
def test_an_exception_in_the_block(ranks: int) -> None:
    """Rank 0 alone knows only of the reduced gradients. If all ranks leave the block, it hears of the loss in time."""
    model = fully_sharded(Model())
    patience = mock.patch.object(watching, "_AFTER_ERROR", timedelta(seconds=60 if ranks == 2 else 0))
    with patience, logged() as records, pytest.raises(ZeroDivisionError), watch(model) as watched:
        (model(batch()).square().mean() * (math.inf if dist.get_rank() == 1 else 1.0)).backward()
        if dist.get_rank() == 1:
            watched._exchange._store.wait(["ended 0"])  # rank 0 leaves the block first
            if ranks == 1:
                dist.barrier()  # rank 0 has logged
        1 / 0  # noqa: B018
    if dist.get_rank() == 0:
        (text,) = records
        assert text == f"watch: {watched.findings[0].text}"
        assert ("rank 1 alone became infinite in the gradient of the loss" in text) == (ranks == 2)
        assert ("local gradients of rank 0 were finite; not all ranks have reported" in text) == (ranks == 1)
        if ranks == 1:
            dist.barrier()


@world(2)
def test_a_watch_on_one_rank() -> None:
    """Its findings claim nothing about the other rank, and the next watch on both ranks is right."""
    model, logs = fully_sharded(Model()), []
    scaler = GradScaler("cpu", init_scale=1024.0)

    def plant(step: int) -> None:
        block(model, 0).weight = math.inf if step == 2 and dist.get_rank() == 1 else 1.0

    for watches in (dist.get_rank() == 0, True):
        with logged() as records:
            watched = watch(model, scaler=scaler) if watches else None
            train(model, 4, plant, scaler)
            if watched is not None:
                watched.stop()
        logs.append(records)
        dist.barrier()
    assert watched is not None and "rank 1 alone became infinite in blocks.0.first.weight" in watched.findings[0].text
    if dist.get_rank() == 0:
        (absent, alone), (both,) = logs
        assert "these ranks have no watch: 1." in absent and both == f"watch: {watched.findings[0].text}"
        assert "not all ranks have reported" in alone and "all ranks were" not in alone


@world(1, 3)
def test_skipped_steps(caplog: Any = None) -> None:
    model = fully_sharded(Model())
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def plant(step: int) -> None:
        block(model, 0).weight = math.inf if step in (2, 3) and dist.get_rank() == last() else 1.0

    with logged() as records, watch(model, scaler=scaler) as watched:
        train(model, 5, plant, scaler)
    scales = [(row["step"], row["scale"], row["skipped"]) for row in watched.scaler]
    assert scales == [(2, 512, True), (3, 256, True), (5, 512, False)] and watched.scaler[-1]["why"] == ""
    (found,) = watched.findings  # the second one is the same again
    assert watched.scaler[0]["why"] == found.text and f"rank {last()}" in found.text
    assert records == ([f"watch: {found.text}"] if dist.get_rank() == 0 else [])
    assert json.loads(json.dumps(watched.to_dict()))["findings"][0]["parameter"] == "blocks.0.first.weight"


@world(3)
def test_findings_are_logged_while_training() -> None:
    """Two steps later, without `stop`, rank 0 has the reports of all ranks."""
    model = fully_sharded(Model())
    scaler = GradScaler("cpu", init_scale=1024.0)

    def plant(step: int) -> None:
        block(model, 0).weight = math.inf if step == 2 and dist.get_rank() else 1.0

    with logged() as records:
        watched = watch(model, scaler=scaler)
        train(model, 6, plant, scaler)
        assert len(records) == (dist.get_rank() == 0)
        assert all("ranks 1, 2 " in each for each in records), records
        watched.stop()
        watched.stop()
    assert len(records) == (dist.get_rank() == 0)
    assert observer.current is None


@world(2)
def test_nothing_changes(tmp_path: Path) -> None:
    """The same numbers bit by bit, the same collectives, no hook left."""
    runs = []
    for on in (False, True):
        model = fully_sharded(Model())
        train(model, 1)
        hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
        watched = watch(model) if on else None
        with Collectives() as seen:
            train(model, 2)
        if watched is not None:
            watched.stop()
            assert watched.findings == [] and "All values were finite." in str(watched) and watched.steps == 2
        assert hooks == [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
        runs.append((seen.calls, [each.to_local().clone() for each in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@world(1)
def test_calls_per_step() -> None:
    """One check per unit, however many parameters it has, and four more in the step. The host reads the values."""
    counts = []
    for on in (False, True):
        model = fully_sharded(Model())
        watched = watch(model) if on else None
        train(model, 4)  # the host has read the values of two steps
        with TorchCalls() as seen:
            train(model, 1)
        counts.append(seen.counts)
        if watched is not None:
            watched.stop()
    added = {name: count for name in counts[1] if (count := counts[1][name] - counts[0].get(name, 0))}
    # Local gradients of four units; inputs, outputs, the gradient of the output, and reduced gradients.
    assert added.pop("aten._foreach_norm") == 4 + 4, added
    assert added.pop("aten.stack") == 4 + 4 and added.pop("aten.cat") == 1, added
    assert sum(added.values()) <= 4, added  # `max`, its value, and `maximum` on the host


@pytest.mark.parametrize("packing", [nullcontext, kernel])
@world(2)
def test_the_largest_value_before(packing: Any) -> None:
    """It is the largest one of all earlier steps, and values of one step do not overwrite those of another."""
    largest = []
    for factors in ([50.0, 1.0, 7.0, 1.0], [50.0, 1.0, 7.0, 1.0, math.inf]):
        model = fully_sharded(Model())
        with packing(), watch(model) as watched:
            for step, factor in enumerate(factors, 1):
                block(model, 2).weight = factor
                model(batch(step)).square().mean().backward()
                if factor == 50.0:
                    weight = model.blocks[2].first.weight.grad
                    largest.append(weight.full_tensor().abs().max().item() if factors[-1] == 1.0 else None)
                model.zero_grad()
    (found,) = watched.findings
    assert (found.step, found.parameter) == (5, "blocks.2.first.weight")
    assert found.largest_finite == pytest.approx(largest[0], rel=1e-4)  # both ranks have the same batch


@pytest.mark.parametrize("stage", ["forward", "local", "reduced"])
@world(2)
def test_large_tensors(stage: str) -> None:
    """Each of them is checked alone, with the same finding."""
    found = []
    for large in (nonfinite_checks._LARGE, 30):  # the matrices have more elements, and the biases fewer
        model = fully_sharded(Model(), mp_policy=MixedPrecisionPolicy(reduce_dtype=F16 if stage == "reduced" else None))
        with mock.patch.object(nonfinite_checks, "_LARGE", large), TorchCalls() as seen, watch(model) as watched:
            for step in range(1, 4):
                bad = step == 3 and (dist.get_rank() == 1 or stage == "reduced")
                block(model, 1).output = math.nan if bad and stage == "forward" else 1.0
                block(model, 1).weight = {"local": -math.inf, "reduced": 1e12}.get(stage, 1.0) if bad else 1.0
                model(batch(step)).square().mean().backward()
                model.zero_grad()
        assert ("aten.linalg_vector_norm" in seen.counts) == (large == 30), seen.counts
        found.append(watched.findings)
    assert found[0] == found[1] and [each.step for each in found[0]] == [3]


@world(2)
def test_when_gradients_are_checked() -> None:
    """When the side stream has packed them: values that its kernel found are complete then."""
    events: list[str] = []

    def noted(name: str, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            events.append(name)
            return method(*arguments)

        return call

    with side_stream.simulating_device():
        model = fully_sharded(Model())
        for shards in {group.shards for each in (model, *model.blocks) for group in state_of(each).unit.param_groups}:
            shards.traits = replace(shards.traits, waits_in_stream=True)
        with (
            mock.patch.object(Reduction, "_pack", noted("pack", Reduction._pack)),
            mock.patch.object(side_stream._SimulatedEvent, "wait", noted("wait", lambda event: None)),
            mock.patch.object(Batch, "maxima", noted("check", Batch.maxima)),
            mock.patch.object(observer, "WatchedWork", side_effect=AssertionError),  # nothing follows collectives
            watch(model) as watched,
        ):
            model(batch()).square().mean().backward()
        assert watched.findings == [] and watched.steps == 1
    packed = [number for number, name in enumerate(events) if name == "pack"]
    # The last two reductions use no side stream.
    following = [events[number + 1 : number + 3] for number in packed]
    assert following[:2] == [["wait", "check"]] * 2 and [each[0] for each in following[2:]] == ["check"] * 2, events


@world(1)
def test_an_exception_in_forward() -> None:
    """The watch keeps neither outputs nor their graph."""
    model = fully_sharded(Model())

    def fail(*unused: Any) -> None:
        raise ZeroDivisionError

    with watch(model) as watched:
        handle = model.blocks[2].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(batch())
        assert watched._forwards == []
        handle.remove()
        train(model, 2)
    assert watched.findings == [] and watched.steps == 2


@world(1, 2)
def test_an_exception_in_backward() -> None:
    """The step is not counted, and later ones are checked."""
    model = fully_sharded(Model())

    def fail(gradient: Tensor) -> None:
        raise ValueError("planted")

    with watch(model) as watched:
        for step in range(1, 6):
            inputs = batch(step).requires_grad_()
            if step == 2:
                inputs.register_hook(fail)  # the last gradient: units have delivered theirs
            block(model, 1).weight = math.nan if step == 4 else 1.0
            with pytest.raises(ValueError) if step == 2 else nullcontext():
                model(inputs).square().mean().backward()
            model.zero_grad()
        assert len(watched._record.batches) < 20
    assert watched.steps == 4 and [(each.step, each.what) for each in watched.findings] == [(3, "local gradient")]


@world(2)
def test_what_is_a_step() -> None:
    """Accumulation and recomputed forwards belong to their step; evaluations belong to none."""
    model = Model()
    model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)
    fully_sharded(model)
    with watch(model) as watched:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(3):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                block(model, 1).weight = math.inf if (step, micro, dist.get_rank()) == (1, 0, 1) else 1.0
                model(batch(micro)).square().mean().backward()
            with torch.no_grad():
                block(model, 1).output = math.nan
                model(batch())
                block(model, 1).output = 1.0
            if step != 1:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert [(each.step, each.what, each.ranks) for each in watched.findings] == [(2, "local gradient", (1,))]
    assert watched.steps == 3


@world(2)
def test_recomputed_forwards() -> None:
    """Values that only a recomputation of activation checkpointing sees are not outputs of the model."""
    model = Model()
    model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)
    fully_sharded(model)
    with watch(model) as watched, set_checkpoint_early_stop(False):
        loss = model(batch()).square().mean()
        block(model, 1).output = math.nan
        loss.backward()
    assert watched.findings == []


@world(2)
def test_dump(tmp_path: Path) -> None:
    model = fully_sharded(Model())
    rank = dist.get_rank()

    def plant(step: int) -> None:
        block(model, 1).weight = math.inf if step in (2, 3) and rank == 1 else 1.0

    scaler = GradScaler("cpu", init_scale=1024.0)
    with watch(model, scaler=scaler, dump=tmp_path) as watched:
        train(model, 4, plant, scaler)
    dist.barrier()
    saved = torch.load(tmp_path / "rank1-step2-blocks.1.pt")
    assert (saved["step"], saved["unit"]) == (2, "blocks.1")
    assert saved["inputs"][0].shape == (6, WIDTH) and saved["inputs"][0].isfinite().all()
    bad = saved["gradients"]["blocks.1.first.weight"]
    assert bad.shape == (WIDTH, WIDTH) and not bad.isfinite().all()
    assert watched.findings[0].elements == int((~bad.isfinite()).sum())
    # Rank 0 has only the reduced gradients, which are not finite on its side either.
    assert {each.name for each in tmp_path.iterdir()} <= {f"rank{r}-step2-blocks.1.pt" for r in range(2)}


@world(1)
def test_a_dump_that_cannot_be_saved(tmp_path: Path) -> None:
    """A warning, not the end of the training."""
    model = fully_sharded(Model())
    with watch(model, dump=tmp_path / "dump") as watched, mock.patch.object(nonfinite_checks, "_log") as log:
        (tmp_path / "dump").rmdir()
        (tmp_path / "dump").touch()
        train(model, 2, lambda step: setattr(block(model, 1), "output", math.nan if step == 2 else 1.0))
    assert watched.findings[0].unit == "blocks.1"
    log.warning.assert_called_once()


@world(2)
def test_several_models_and_late_reads() -> None:
    """Only the model that is watched counts; `findings` may be read at any time."""
    model, other = fully_sharded(Model()), fully_sharded(Model())
    block(other, 0).weight = math.nan
    with watch(model) as watched:
        train(other, 1)
        assert watched.findings == []
        train(model, 1)
        assert watched.findings == []
        block(model, 0).weight = math.inf
        train(model, 1)
        dist.barrier()
        own = [each.parameter for each in watched.findings]
        assert own == ["blocks.0.first.weight"]
        train(model, 1)
    assert [each.step for each in watched.findings] == [2, 3]


@world(2)
def test_a_rank_that_leaves_early() -> None:
    exchange = Exchange()
    dist.barrier()
    if dist.get_rank() == 0:
        assert not exchange.end(timedelta(seconds=0.1))
    dist.barrier()
    if dist.get_rank() == 1:
        exchange.report(1, [seen(Stage.LOCAL)])
        assert exchange.end()
    dist.barrier()
    exchange.read()
    assert list(exchange.reports[1]) == [1]


def seen(stage: Stage, position: int = 1, parameter: str = "a", nan: bool = False) -> Seen:
    return Seen(stage, position, "unit", parameter, "fp16", nan, 2, 1.0)


def test_the_order_of_checks() -> None:
    """The order of the program decides, also between units and between dtypes."""
    record = Record(1)
    wide, narrow = torch.ones(2), torch.ones(2, dtype=F16)
    places = [("first", "a", F16), ("first", "b", F16), ("second", "c", F16)]
    (*batches,) = batches_of(Stage.LOCAL, [narrow, wide, narrow], places.__getitem__)
    record.batches, record.starts = batches * 2, [0] * len(batches) + [3] * len(batches)
    names = [name for _, check in record.checks for name in check.names]
    assert names == ["a", "c", "b"] * 2
    found = list(record.seen([1.0, math.inf, math.nan] + [math.inf] * 3, None))
    by_order = sorted((each.position, each.parameter, each.nan) for each in found)
    assert by_order == [(1, "b", True), (2, "c", False), (3, "a", False), (4, "b", False), (5, "c", False)]


def test_inputs_are_no_findings() -> None:
    """A mask is infinite in every step."""
    mask, output = Seen(Stage.INPUT, 0, "", "0", "fp32", False, None, math.inf), seen(Stage.FORWARD, 1, "")
    assert first_stage([mask]) == [] and first_stage([mask, output]) == [output]
    assert first_stage([replace(mask, largest_finite=2.0, nan=True), output]) == [replace(output, input="NaN")]


def test_modules_alone_are_no_findings() -> None:
    """A module may return a mask."""
    unit, module, gradient = seen(Stage.FORWARD, 2, ""), seen(Stage.FORWARD, 1, "mask"), seen(Stage.LOCAL)
    assert first_stage([module]) == [] and first_stage([module, gradient]) == [gradient]
    assert first_stage([module, unit, gradient]) == [module, unit]
    assert first_stage([replace(module, largest_finite=math.inf), unit]) == [unit]


def test_the_first_call_of_a_module() -> None:
    first = seen(Stage.FORWARD, 1, "a")
    (found,) = findings_of({1: {0: [first, replace(first, position=2, elements=9)]}}, 1)
    assert found.elements == first.elements


def test_the_first_place_wins() -> None:
    reports = {
        5: {
            0: [seen(Stage.REDUCED, 0, "b")],
            2: [seen(Stage.LOCAL, 2, "b"), replace(seen(Stage.LOCAL, 7, "c"), start=5)],
            1: [seen(Stage.LOCAL, 2, "b")],
        },
        6: {1: [seen(Stage.LOCAL, 2, "b")]},
        9: {1: [seen(Stage.LOCAL, 2, "b")]},
        10: {1: [seen(Stage.LOCAL, 1, "a")]},
    }
    found = findings_of(reports, 4)
    assert [(each.step, each.parameter, each.ranks, each.elements) for each in found] == [
        (5, "b", (1, 2), 4),
        (9, "b", (1,), 2),
        (10, "a", (1,), 2),
    ]
    follows = ["Values of step 9 may have reached the parameters." in each.text for each in found]
    assert follows == [False, False, True]
    assert found[0].text.startswith("Step 5: ranks 1, 2 became infinite in b: ")
    assert findings_of({1: {r: [seen(Stage.LOCAL)] for r in range(2)}}, 2)[0].text.startswith("Step 1: all ranks ")


def test_the_first_gradient_of_a_unit() -> None:
    """An infinity turns into NaN, and backward begins at the end. The text does not hide the others."""
    unit = [seen(Stage.LOCAL, 1, "a", nan=True), seen(Stage.LOCAL, 2, "b"), seen(Stage.LOCAL, 3, "c")]
    unit += [seen(Stage.LOCAL, 4, "d", nan=True), replace(seen(Stage.LOCAL, 9, "e"), start=8)]
    (found,) = findings_of({3: {0: unit, 1: unit[:1]}}, 4)
    assert (found.parameter, found.ranks) == ("c", (0,))
    assert "rank 0 alone became infinite in c: " in found.text, found.text
    assert "; non-finite gradients of other parameters in the unit: 3; " in found.text, found.text


@world(1)
def test_bad_arguments() -> None:
    model = fully_sharded(Model())
    with pytest.raises(ArgumentError, match="optimizer must be"):
        watch(model, "adam")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="scaler must be"):
        watch(model, scaler=1.0)
    with pytest.raises(ArgumentError, match="contains no module"):
        watch(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="dump must be a folder, got int"):
        watch(model, dump=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="dump must be a folder that this rank can create: "):
        watch(model, dump="/dev/null/dump")
    assert observer.current is None


@world(1)
def test_a_recording_is_refused() -> None:
    from unshard.engine.side_stream import recording_step

    model = fully_sharded(Model())
    with watch(model), recording_step(), pytest.raises(StateError, match=r"unshard\.capture"):
        model(batch())
