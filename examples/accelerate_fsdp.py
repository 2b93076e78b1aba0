"""Train with Hugging Face Accelerate, sharded by unshard without a change to the program.

    unshard run --nproc-per-node=2 examples/accelerate_fsdp.py

The program is written for PyTorch's FSDP, which `unshard run` replaces. It needs `pip install accelerate` and one GPU
per process: Accelerate does not shard on CPUs.
"""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with Accelerate, sharded.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", help="save the weights here, as safetensors files of the unsharded model")
    args = parser.parse_args()
    set_seed(0)  # the same weights on every rank
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],  # one unit per block
        state_dict_type="FULL_STATE_DICT",
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = nn.Sequential(nn.Embedding(32, 64), Block(), Block(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.arange(4096) % 32
    data = DataLoader(TensorDataset(tokens, (tokens + 1) % 32), batch_size=64, shuffle=True)  # the next token follows
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    for step, (inputs, targets) in zip(range(1, args.steps + 1), data, strict=False):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            accelerator.print(f"step {step}  loss {loss.item():.3f}", flush=True)
    if args.folder:
        accelerator.save_model(model, args.folder)
    accelerator.end_training()


if __name__ == "__main__":
    main()
