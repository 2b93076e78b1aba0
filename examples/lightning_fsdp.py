"""Train with PyTorch Lightning, sharded by unshard without a change to the program.

    unshard run --nproc-per-node=2 examples/lightning_fsdp.py

The program is written for PyTorch's FSDP, which `unshard run` replaces. It needs `pip install lightning`.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, Dataset


class Counting(Dataset):
    """Pairs of tokens: each token is followed by the next one."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index % 32, (index + 1) % 32


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)]
        self.layers = nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32))

    def configure_model(self) -> None:
        """Shard the model. Lightning calls this once the ranks have a mesh."""
        if isinstance(self.layers, FSDPModule):  # Lightning calls this again for validation and tests
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.layers[1:3]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        tokens, targets = batch
        loss = nn.functional.cross_entropy(self.layers(tokens), targets)
        if index % 5 == 0:
            self.print(f"step {index}  loss {loss.item():.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with Lightning, sharded.")
    parser.add_argument("--steps", type=int, default=21)
    args = parser.parse_args()
    seed_everything(0, verbose=False)  # the same weights on every rank
    trainer = Trainer(
        accelerator="auto",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(Counting(), batch_size=64, shuffle=True))
    trainer.print(f"the layers are a {type(model.layers).__mro__[1].__module__}.FSDPModule", flush=True)


if __name__ == "__main__":
    main()
