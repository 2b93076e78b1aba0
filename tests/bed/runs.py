"""Runs to save and resume: model, optimizer, scheduler, scaler and data of every kind that checkpoints support."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from bed.models import CASES, Case, shard
from bed.wrapped import wrap_case
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unshard
from unshard import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OptimizerOffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from unshard import FullyShardedDataParallel as FSDP
from unshard.composable import fully_shard as legacy

CASE = CASES[1]  # uneven: some ranks have no elements of some parameters
BF16 = torch.bfloat16
WRAPPED = ("flat", "originals")


class Data:
    """Counts batches, and has a state of its own on each rank. It can be dealt out to another number of ranks."""

    def __init__(self) -> None:
        self.position, self.order = (
            0,
            torch.arange(3000) + dist.get_rank() if dist.is_initialized() else torch.arange(3),
        )
        self.states: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order, "nested": ({"a": [1, 2.5, None, True]}, b"x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["nested"] == ({"a": [1, 2.5, None, True]}, b"x")
        self.position, self.order = state["position"], state["order"]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        self.states = states
        self.position = states[0]["position"]


class TwoLayers(nn.Module):
    """For tensor parallelism: one weight is cut by columns, one by rows, and a norm is not cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(7)
        self.first, self.second = nn.Linear(7, width), nn.Linear(width, 7)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.norm(x)))).sum(-1, keepdim=True)


def two_layers(width: int) -> Case:
    return Case("two layers", lambda: TwoLayers(width), CASE.batch, CASE.loss, lambda model: [model])


def device() -> str:
    """Where runs of this job are."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def on_cuda(case: Case) -> Case:
    return Case(
        case.name,
        lambda: case.build().cuda(),
        lambda *args: tuple(each.cuda() for each in case.batch(*args)),
        case.loss,
        case.units,
    )


def grid(*names: str) -> Any:
    """All ranks as a mesh with two ranks in the last dimension, if there are that many."""
    last = 2 if dist.get_world_size() % 2 == 0 else 1
    return init_device_mesh(device(), (dist.get_world_size() // last, last), mesh_dim_names=names)


def build_model(kind: str) -> tuple[nn.Module, Case]:
    """`kind`: a front-end, and words that say what is special."""
    words, case = kind.split(), CASE
    if "plain" in words:
        case = two_layers(8) if "tp" in words else case
        return case.build(), case
    if "tied" in words:
        case = CASES[2]
    if "convolution" in words:
        case = CASES[4]
    if "tp" in words or "tp10" in words:
        case = two_layers(10 if "tp10" in words else 8)
    if device() == "cuda":
        case = on_cuda(case)
    if words[0] in WRAPPED:
        return _wrapped(words, case), case
    options: dict[str, Any] = {}
    if "mixed" in words:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    if "offload" in words:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device() == "cuda")
    if "host" in words:
        options["offload_policy"] = OptimizerOffloadPolicy(pin_memory=device() == "cuda")
    if "hybrid" in words:
        options["mesh"] = grid("replicas", "shards")
    if "columns" in words:
        options["shard_placement_fn"] = _last_dim_if_even
    if "tp" in words or "tp10" in words:
        model, mesh = _tensor_parallel(case)
        return unshard.fully_shard(model, mesh=mesh["dp"]), case
    model = case.build()
    if "channels" in words:
        model = model.to(memory_format=torch.channels_last)
    for unit in case.units(model):
        legacy(unit) if "legacy" in words else unshard.fully_shard(unit, **options)
    return model, case


def _tensor_parallel(case: Case) -> tuple[nn.Module, Any]:
    mesh, model = grid("dp", "tp"), case.build()
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return parallelize_module(model, mesh["tp"], plan), mesh


def _last_dim_if_even(parameter: nn.Parameter) -> Shard | None:
    even = parameter.ndim > 1 and parameter.shape[-1] % dist.get_world_size() == 0
    return Shard(parameter.ndim - 1) if even else None


def _wrapped(words: list[str], case: Case) -> nn.Module:
    options: dict[str, Any] = {"use_orig_params": words[0] == "originals"}
    if "mixed" in words:
        options["mixed_precision"] = MixedPrecision(BF16, torch.float32, BF16)
    if "offload" in words:
        options["cpu_offload"] = CPUOffload(offload_params=True)
    if "hybrid" in words:
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = grid("replicas", "shards")
    if "whole" in words:
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    if "channels" in words:
        build = case.build
        case = Case(
            "channels", lambda: build().to(memory_format=torch.channels_last), case.batch, case.loss, case.units
        )
    if "tp" in words:
        model, mesh = _tensor_parallel(case)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return FSDP(model, device_mesh=mesh["dp"], **options)
    return wrap_case(case, **options)


@dataclass
class Run:
    """`kind`: that of the model, and of the optimizer after a comma."""

    kind: str
    lr: float = 0.1
    model: nn.Module = field(init=False)
    optimizer: Any = field(init=False)

    def __post_init__(self) -> None:
        of_model, _, of_optimizer = self.kind.partition(",")
        self.model, self.case = build_model(of_model)
        first, *others = self.model.parameters()
        groups = [{"params": [first], "lr": self.lr / 2}, {"params": others}] if others else [{"params": [first]}]
        if "sgd" in of_optimizer:
            self.optimizer = torch.optim.SGD(groups, self.lr, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(groups, self.lr, weight_decay=0.1, amsgrad=True)
        if "flat" in of_optimizer:
            self.optimizer = unshard.optim.flat(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.scaler = torch.amp.GradScaler(device(), init_scale=4.0, growth_interval=2)
        self.data = Data()

    def parts(self) -> dict[str, Any]:
        """The arguments of `save` and `load`."""
        names = ("model", "optimizer", "scheduler", "scaler", "data")
        return {name: getattr(self, name) for name in names}

    def train(self, steps: range) -> list[float]:
        """The losses, averaged over ranks."""
        losses, rank, size = [], dist.get_rank(), dist.get_world_size()
        if "tp" in self.kind:
            rank, size = rank // 2 if size % 2 == 0 else rank, max(size // 2, 1) if size % 2 == 0 else size
        for step in steps:
            loss = self.case.loss(self.model, shard(self.case.batch(step), rank, size))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": 4.0 * 2**step})
            self.data.position += 1
            mean = loss.detach().double().to(device())
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
        return losses

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer state in plain tensors by name, gathered, and everything else."""
        others = {"scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict()}
        return {**others, "position": self.data.position, **self._gathered()}

    def _gathered(self) -> dict[str, Any]:
        if self.kind.split()[0].split(",")[0] in (*WRAPPED, "legacy"):
            with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
                found = FSDP.optim_state_dict(self.model, self.optimizer)
                return {
                    "model": self.model.state_dict(),
                    "state": found["state"],
                    "groups": _sorted(found["param_groups"]),
                }
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        state = {
            names[each]: {key: full(value) for key, value in entry.items()}
            for each, entry in self.optimizer.state.items()
        }
        groups = [
            {**group, "params": [names[each] for each in group["params"]]} for group in self.optimizer.param_groups
        ]
        weights = {name: full(each) for name, each in self.model.state_dict().items()}
        return {"model": weights, "state": state, "groups": _sorted(groups)}


def _sorted(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": sorted(group["params"])} for group in groups]


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.to(device()).full_tensor().detach().clone()  # NCCL gathers nothing from the host
    return value.detach().clone() if isinstance(value, Tensor) else value


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Bitwise."""
    if isinstance(expected, dict):
        assert sorted(map(str, found)) == sorted(map(str, expected)), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{where}[{number}]")
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    else:
        assert found == expected, where


def kept_unsharded(kind: str) -> tuple[torch.Tensor, nn.Module, nn.Module]:
    """An input, a model whose units stay unsharded after forward, and the same one with zeros."""

    def build() -> nn.Module:
        if kind != "fully_shard":
            keep = ShardingStrategy.SHARD_GRAD_OP
            return wrap_case(CASE, use_orig_params=kind == "originals", sharding_strategy=keep)
        model = CASE.build()
        for unit in CASE.units(model):
            unshard.fully_shard(unit, reshard_after_forward=False)
        return model

    return torch.randn(3, 7, generator=torch.Generator().manual_seed(0)), build(), zeroed(build())


def zeroed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model
