"""Train with `FullyShardedDataParallel`, save a checkpoint every few steps, and resume from the last one.

    torchrun --standalone --nproc-per-node=2 examples/resume_wrapper.py --steps 20
    torchrun --standalone --nproc-per-node=2 examples/resume_wrapper.py --steps 40    # goes on at step 20

Any number of processes can resume. It uses one GPU per process if there are enough, else the CPU.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from unshard import FullyShardedDataParallel as FSDP
from unshard import MixedPrecision, StateDictType
from unshard.optim import ShardedGradScaler
from unshard.wrap import ModuleWrapPolicy

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.contract(torch.relu(self.expand(self.norm(x))))


def build(device: torch.device) -> tuple[FSDP, torch.optim.Optimizer, ShardedGradScaler]:
    model = nn.Sequential(nn.Linear(8, WIDTH), *[Block() for _ in range(4)], nn.Linear(WIDTH, 1))
    # fp16 on GPUs, where the scaler is needed; CPUs compute in fp32 here.
    dtype = torch.float16 if device.type == "cuda" else None
    sharded = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),  # one unit per block
        mixed_precision=MixedPrecision(param_dtype=dtype),
        device_id=device,
        sync_module_states=True,  # all ranks start from the weights of rank 0
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    return sharded, optimizer, ShardedGradScaler(device=device.type, enabled=dtype is not None)


def save(folder: Path, step: int, model: FSDP, optimizer: torch.optim.Optimizer, scaler: ShardedGradScaler) -> None:
    """Write a new directory per step, so that an interrupted save leaves the checkpoint before it complete."""
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            "scaler": scaler.state_dict(),
            "step": step,
        }
        dcp.save(state, checkpoint_id=folder / f"step_{step}")
    if dist.get_rank() == 0:
        (folder / "last").write_text(str(step))  # only after all ranks have written their shards


def resume(folder: Path, model: FSDP, optimizer: torch.optim.Optimizer, scaler: ShardedGradScaler) -> int:
    """Load the last complete checkpoint and return its step, 0 if there is none."""
    if not (folder / "last").exists():
        return 0
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer, for_loading=True),
            "scaler": scaler.state_dict(),
            "step": 0,
        }
        dcp.load(state, checkpoint_id=folder / f"step_{(folder / 'last').read_text()}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
    scaler.load_state_dict(state["scaler"])
    return state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, save and resume with FullyShardedDataParallel.")
    parser.add_argument("--steps", type=int, default=20, help="step to train to")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    use_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")

    torch.manual_seed(0)  # two runs begin alike
    model, optimizer, scaler = build(device)
    begin = resume(args.folder, model, optimizer, scaler)
    if dist.get_rank() == 0:
        print(f"begin at step {begin}", flush=True)
    for step in range(begin, args.steps):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())  # different data on every rank
        inputs = torch.randn(32, 8, device=device)
        loss = nn.functional.mse_loss(model(inputs).float(), inputs.sum(1, keepdim=True).sin())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if (step + 1) % args.every == 0:
            save(args.folder, step + 1, model, optimizer, scaler)
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
