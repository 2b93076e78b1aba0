"""bitsandbytes: QLoRA by hand. Frozen 4-bit linear layers, sharded in their packed form, with trained adapters."""

import bitsandbytes
import torch
import torch.distributed as dist
from outcome import Model, batches, loss_of, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Adapted(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.base = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, compute_dtype=torch.float32, quant_storage=torch.float32
        )
        self.base.load_state_dict(linear.state_dict())
        self.base.to("cpu").requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


torch.manual_seed(0)
model = Model(width=64).requires_grad_(False)
for block in model.blocks:
    block.mlp[0], block.mlp[2] = Adapted(block.mlp[0]), Adapted(block.mlp[2])
mesh = init_device_mesh("cpu", (2,))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
losses = []
for tokens in batches(dist.get_rank(), 5):
    loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
write("bitsandbytes", model, losses, trained=len(trained))
dist.destroy_process_group()
