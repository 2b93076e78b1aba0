"""accelerate: `prepare`, gradient accumulation, clipping, `save_state` and `load_state`."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from outcome import Model, batches, let_accelerate_shard_on_the_cpu, loss_of, write
from torch.utils.data import DataLoader

let_accelerate_shard_on_the_cpu()
version = int(sys.argv[2])
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=version,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Block"],
    state_dict_type="SHARDED_STATE_DICT",
    use_orig_params=True,
)
accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.stack(batches(0, 16)).flatten(0, 1)  # accelerate gives each rank its part
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))


def train() -> list[float]:
    losses = []
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


losses = train()
folder = str(Path(sys.argv[1], "state"))
accelerator.save_state(folder)
first = train()
accelerator.load_state(folder)
again = train()
write("accelerate", model, losses + first, resumed=first == again)
accelerator.end_training()
