"""Examples in docstrings run as they are printed, on two ranks."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.docstrings import examples, public_names
from bed.stack import Block, Stack, sharded
from bed.user_collectives import ignore_old_names
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import unshard
from unshard import FSDPMeshInfo, FullyShardedDataParallel, checkpoint

NOT_RUN = {
    "unshard.tools.doctor": "starts processes: tests/tools/test_diagnosis.py",
    "unshard.tools.plan": "needs a process without a job: tests/tools/test_memory_plan.py",
    "unshard.tools.program.Program": "needs a process without a job: tests/tools/test_program.py",
    "unshard.tools.verify": "starts processes: tests/tools/test_verification.py",
    "unshard.dropin.install": "changes this process: tests/dropin/test_install.py",
    "unshard.dropin.is_installed": "the same",
    "unshard.dropin.stand_in": "the same",
    "unshard.dropin.uninstall": "the same",
    "unshard.DataParallelMeshDims": "needs DTensors on the whole mesh: tests/distributed/fsdp2/test_meshes.py",
}
EXAMPLES = [
    (name, number)
    for name, each in public_names().items()
    if name not in NOT_RUN
    for number in range(len(examples(inspect.getdoc(each) or "")))
]


class Model(Stack):
    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(batch_of() if x is None else x)

    generate = forward


def batch_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 132, generator=torch.Generator().manual_seed(seed))


def names_for(name: str, code: str) -> dict[str, Any]:
    """What the examples assume: a model, which is sharded unless the code shards it, an optimizer, batches, files."""
    model: Any = Model()
    if not any(each in code for each in ("fully_shard(", "FullyShardedDataParallel(", "enable_wrap(", "Model()")):
        wraps = "FullyShardedDataParallel." in code or "ShardedGradScaler" in name
        model = FullyShardedDataParallel(model, use_orig_params=True) if wraps else sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of_model(model: nn.Module, batch: Any = None) -> torch.Tensor:
        return model(batch_of() if batch is None else batch).square().mean()

    def train(model: nn.Module) -> torch.Tensor:
        loss = loss_of_model(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def make() -> dict[str, Any]:
        model = sharded(Model())
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def train_run(run: dict[str, Any]) -> torch.Tensor:
        loss = loss_of_model(run["model"])
        loss.backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        return loss.detach()

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "expert"))
    modules = (unshard, unshard.wrap, unshard.optim, unshard.checkpoint, unshard.tools)
    found = {each: getattr(module, each) for module in modules for each in module.__all__}
    found |= {
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "functools": functools,
        "unshard": unshard,
        "checkpoint": checkpoint,
        "Shard": Shard,
        "Model": Model,
        "Block": Block,
    }
    found |= {"model": model, "optimizer": optimizer, "encoder": sharded(Stack()), "decoder": sharded(Stack())}
    found |= {"loss_of": loss_of_model, "evaluate": loss_of_model, "train": train, "make": make}
    found |= {"train_step": train_run if "make" in code else lambda batch: train(model)}
    found |= {"unwrapped": Stack(), "state": {"state": {}, "param_groups": [{"params": [0, 1]}]}}
    found |= {"loss_sum": lambda model, batch: (loss_of_model(model, batch), 6)}
    found |= {"batches": [batch_of(1), batch_of(2)], "micro_batches": [batch_of(1)], "tokens": batch_of(3)}
    found |= {"mesh": mesh, "experts": FSDPMeshInfo(mesh["expert"], 0), "moe": nn.Linear(4, 4), "own": set()}
    return found


def prepare_files(names: dict[str, Any]) -> None:
    """Checkpoints, exported weights and a state dict, as if earlier examples had written them."""
    model = sharded(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for folder in ("checkpoints", "other"):
        checkpoint.save(folder, step=1, model=model, optimizer=optimizer)
    state, names["state_dict"] = (
        checkpoint.full_state_dict(model),
        checkpoint.full_optimizer_state_dict(model, optimizer),
    )
    if dist.get_rank() == 0:
        torch.save(state, "model.pt")
        checkpoint.export("checkpoints", "weights")
    dist.barrier()


@ignore_old_names
@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:pin_memory=True needs an accelerator")
@world(2)
def test_examples(tmp_path: Path) -> None:
    failed = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, number in EXAMPLES:
            folder = tmp_path / f"{name}-{number}"
            folder.mkdir(exist_ok=True)
            dist.barrier()
            monkeypatch.chdir(folder)
            code = examples(inspect.getdoc(public_names()[name]) or "")[number]
            names = names_for(name, code)
            if "checkpoint" in name:
                prepare_files(names)
            if name == "unshard.checkpoint.export" and dist.get_rank():
                continue  # for one process
            try:
                exec(compile(code, name, "exec"), names)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
    assert len(EXAMPLES) > 60 and not failed, "\n".join(f"FOUND {name}: {text}" for name, text in failed.items())
