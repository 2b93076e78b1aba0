"""Uneven work for `unshard.step`: a model of two towers, samples that differ between ranks, the unsharded result."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bed.wrapped import full_parameters, wrap
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import unshard
from unshard import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from unshard.composable import fully_shard as legacy_fully_shard
from unshard.optim import clip_grad_norm_, flat

VOCAB, DIM = 29, 12


class Layer(nn.Module):
    def __init__(self, frozen: bool = False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM + 2), nn.Linear(2 * DIM + 2, DIM)
        self.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Towers(nn.Module):
    """A text model with a vision tower, which samples without an image skip."""

    def __init__(self, tied: bool = False, checkpoints: bool = False, frozen: bool = False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.text = nn.ModuleList(Layer(frozen and number == 1) for number in range(3))
        self.vision = nn.ModuleList(Layer() for _ in range(2))  # runs first, defined second
        self.head = nn.Linear(DIM, VOCAB, bias=not tied)
        self.unused = nn.Parameter(torch.ones(5))
        if tied:
            self.head.weight = self.embed.weight
        self.checkpoints = checkpoints

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)

    def forward(
        self, tokens: torch.Tensor, image: torch.Tensor | None = None, layers: tuple[int, ...] = (0, 1, 2)
    ) -> torch.Tensor:
        x = self.embed(tokens)
        if image is not None:
            seen = image.to(x.dtype)
            for layer in self.vision:
                seen = self.run(layer, seen)
            x = x + seen.mean(dim=0)
        for number in layers:
            x = self.run(self.text[number], x)
        return self.head(x)


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    image: torch.Tensor | None
    layers: tuple[int, ...]
    weight: int

    def loss(self, model: nn.Module, device: torch.device) -> torch.Tensor:
        """The sum over the tokens, times a factor that makes weights as different as lengths of texts are."""
        image = None if self.image is None else self.image.to(device)
        tokens = self.tokens.to(device)
        logits = model(tokens, image, self.layers)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens, reduction="sum") * (
            self.weight / len(tokens)
        )


def samples(rank: int, step: int, most: int, images: bool, seed: int = 0) -> list[Sample]:
    """The micro-batches of a rank: up to `most`, of different lengths and weights, some without an image."""
    chance = random.Random(f"{seed} {rank} {step}")
    values = torch.Generator().manual_seed(chance.randrange(2**31))
    found = []
    for _ in range(chance.randint(0, most)):
        tokens = torch.randint(VOCAB, (chance.randint(1, 9),), generator=values)
        has_image = images and chance.random() < 0.5
        image = torch.randn(3, DIM, generator=values, dtype=torch.float64) if has_image else None
        found.append(
            Sample(
                tokens,
                image,
                chance.choice([(0,), (0, 2), (1, 2), (0, 1, 2), (0, 1, 2)]),
                chance.choice([1, 3, 100, 10_000]),
            )
        )
    return found


Build = Callable[[], nn.Module]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def reference_steps(
    build: Build,
    make_optimizer: MakeOptimizer,
    work: list[list[list[Sample]]],
    device: torch.device,
    limit: float | None = None,
    keep: int = 1,
) -> Iterator[tuple[nn.Module, float, float]]:
    """Train one unsharded model on the samples of all ranks; yield it, the mean loss and the weight of each step.

    `keep`: gradients are cleared only every so many steps.
    """
    model = build()
    optimizer = make_optimizer(model.parameters())
    for number, ranks in enumerate(work):
        every = [sample for mine in ranks for sample in mine]
        total = sum(sample.weight for sample in every)
        loss = 0.0
        for sample in every:
            each = sample.loss(model, device)
            (each / total).backward()
            loss += each.item()
        if (number + 1) % keep == 0:
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
        yield model, loss / total if total else 0.0, total
        if (number + 1) % keep == 0:
            optimizer.zero_grad()


# -- sharded, beside the reference -------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """How the sharded model is built and trained."""

    front: str = "fully_shard"
    """"fully_shard", "wrapper" (one flat parameter), "originals" (`use_orig_params`) or "legacy"."""
    units: Any = "keep"
    known: bool = False
    """Pass `backwards`."""
    replicas: int = 1
    parallel: int = 1
    """Ranks of tensor parallelism, which have the same samples."""
    tied: bool = False
    checkpoints: bool = False
    frozen: bool = False
    offload: bool = False
    flat_optimizer: bool = False
    early: bool = False
    """The flat optimizer steps during backward."""
    limit: float | None = None
    """Clip the norm of gradients."""
    keep: int = 1
    """Clear gradients only every so many steps."""
    most: int = 4
    """Micro-batches of a rank."""

    def __str__(self) -> str:
        names = [
            field.name if value is True else str(value)
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return "-".join(names) or "plain"


FEATURES = [
    Setup(units=units, known=known, **{name: value})
    for units, known in (("keep", True), ("follow", False))
    for name, value in {
        "tied": True,
        "checkpoints": True,
        "frozen": True,
        "offload": True,
        "flat_optimizer": True,
        "limit": 0.5,
        "keep": 2,
        "most": 7,
    }.items()
]
"""Every other feature, with kept and with followed units."""


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer whose steps do not amplify rounding errors, as Adam's do for gradients near zero."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def build(setup: Setup, device: torch.device) -> Towers:
    torch.manual_seed(0)
    return Towers(setup.tied, setup.checkpoints, setup.frozen).double().to(device)


def shard(model: Towers, setup: Setup, device: torch.device) -> nn.Module:
    if setup.front == "legacy":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one rank
            for layer in (*model.text, *model.vision):
                legacy_fully_shard(layer)
            return legacy_fully_shard(model)
    if setup.front == "fully_shard":
        options: dict[str, Any] = (
            {"offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu")} if setup.offload else {}
        )
        if setup.replicas > 1:
            shape = (setup.replicas, dist.get_world_size() // setup.replicas)
            options["mesh"] = init_device_mesh(device.type, shape, mesh_dim_names=("replicas", "shards"))
        if setup.parallel > 1:
            shape = (dist.get_world_size() // setup.parallel, setup.parallel)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "parallel"))
            for layer in (*model.text, *model.vision):
                parallelize_module(layer, mesh["parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            options["mesh"] = mesh["data"]
        for layer in (*model.text, *model.vision):
            fully_shard(layer, **options)
        return fully_shard(model, **options)
    options = {"use_orig_params": setup.front == "originals", "device_id": None if device.type == "cpu" else device}
    if setup.offload:
        options["cpu_offload"] = CPUOffload(offload_params=True)
    return wrap(model, [*model.text, *model.vision, model], **options)


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        return full_parameters(model)
    found = dict(model.named_parameters())
    if all(isinstance(each, DTensor) for each in found.values()):
        return {name: full(each) for name, each in found.items()}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def check_parity(setup: Setup, device: torch.device, seeds: int = 1, tolerance: float = 1e-12) -> None:
    """Train with `unshard.step` and unsharded on the same samples; compare losses, gradients and parameters."""
    rank, ranks = dist.get_rank() // setup.parallel, dist.get_world_size() // setup.parallel
    for seed in range(seeds):
        # The third step has no work at all, and the fifth step only text.
        work = [
            [samples(each, step, 0 if step == 2 else setup.most, step != 4, seed) for each in range(ranks)]
            for step in range(6)
        ]
        reference = reference_steps(lambda: build(setup, device), make_optimizer, work, device, setup.limit, setup.keep)
        model = shard(build(setup, device), setup, device)
        optimizer: Any = make_optimizer(model.parameters())
        if setup.flat_optimizer:
            optimizer = flat(optimizer, step_in_backward=setup.early)
        for number, mine in enumerate(ranks_work[rank] for ranks_work in work):
            backwards = len(mine) if setup.known else None
            with unshard.step(model, units=setup.units, backwards=backwards) as step:
                for sample in mine:
                    step.backward(sample.loss(model, device), weight=sample.weight)
            truth, loss, weight = next(reference)
            where = f"{setup}, seed {seed}, step {number}"
            assert step.weight.item() == weight, where
            torch.testing.assert_close(step.loss.item(), loss, rtol=tolerance, atol=tolerance, msg=where)
            if setup.front == "fully_shard" and not setup.early and setup.limit is None:
                compare_gradients(model, truth, tolerance, where)
            if (number + 1) % setup.keep == 0:
                if setup.limit is not None:
                    clip_grad_norm_(model.parameters(), setup.limit)
                optimizer.step()
                optimizer.zero_grad()
        next(reference, None)  # lets the reference take its last step
        compare(full_values(model), dict(truth.named_parameters()), tolerance, f"{setup}, seed {seed}")


def full(each: DTensor) -> torch.Tensor:
    """The full tensor. NCCL has no collectives for tensors on the host, where offloaded ones are."""
    local = each.to_local().to(each.device_mesh.device_type)
    spec = each.device_mesh, each.placements
    return DTensor.from_local(local, *spec, shape=each.shape, stride=each.stride()).full_tensor()


def compare_gradients(model: nn.Module, truth: nn.Module, tolerance: float, where: str) -> None:
    theirs = {name: each.grad for name, each in truth.named_parameters()}
    mine = {name: each.grad for name, each in model.named_parameters()}
    assert {name for name, each in mine.items() if each is None} == {n for n, each in theirs.items() if each is None}
    compare(
        {name: full(each) for name, each in mine.items() if each is not None},
        {name: each for name, each in theirs.items() if each is not None},
        tolerance,
        where,
    )


def compare(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float, where: str) -> None:
    assert mine.keys() == theirs.keys(), where
    for name, each in theirs.items():
        difference, size = (mine[name].to(each.device) - each).norm().item(), each.norm().item()
        assert difference <= tolerance * max(size, 1.0), f"{where}: {name} differs by {difference:.2e} of {size:.2e}"
