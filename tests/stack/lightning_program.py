"""Lightning: the Trainer with ModelParallelStrategy (FSDP2) or FSDPStrategy (FSDP1), and gradient accumulation."""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from outcome import Block, Model, batches, let_torch_wrap_on_the_cpu, loss_of, write
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

version = int(sys.argv[2])


class OnCpu(FSDPStrategy):
    """Lightning refuses its own class without an accelerator."""


class Program(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if version == 2 and not hasattr(self.model, "unshard"):
            for block in self.model.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, tokens: torch.Tensor, number: int) -> torch.Tensor:
        loss = loss_of(self.model, tokens)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self) -> None:
        model = self.trainer.strategy.model if version == 1 else self.model
        write("lightning", model, self.losses)


strategy: Any = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
if version == 1:
    let_torch_wrap_on_the_cpu()
    strategy = OnCpu(auto_wrap_policy=ModuleWrapPolicy({Block}))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_epochs=1,
    accumulate_grad_batches=2,
    default_root_dir=Path(sys.argv[1], "run"),
    enable_checkpointing=version == 2,  # on CPUs, its state dict crashes PyTorch's FSDP1 (SIGSEGV)
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = torch.stack(batches(0, 16)).flatten(0, 1)
trainer.fit(Program(), torch.utils.data.DataLoader(data, batch_size=2))
