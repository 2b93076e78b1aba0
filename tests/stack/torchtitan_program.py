"""torchtitan: its Llama on the meta device, its sharding, its chunked loss and its clipping, in a loop of our own.

Its trainer needs an accelerator.
"""

import torch
import torch.distributed as dist
from outcome import write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
torch.manual_seed(0)
with torch.device("meta"):
    model = llama3_configs["debugmodel"](attn_backend="flex").build()
    for layer in model.layers.values():  # flex attention has no backward on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention(ScaledDotProductAttention.Config())
apply_fsdp_to_decoder(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
for module in model.modules():
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # Gloo has no PREMUL_SUM, which PyTorch's FSDP would use
model.to_empty(device="cpu")
with torch.no_grad():
    model.init_weights(buffer_device=torch.device("cpu"))
loss_of = ChunkedLossWrapper.Config(num_chunks=4).build()
loss_of.set_lm_head(model.lm_head)
model._skip_lm_head = True  # the loss runs the head, once per chunk
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(100 + dist.get_rank())
losses = []
for _ in range(3):
    tokens = torch.randint(2048, (1, 33), generator=generator)
    hidden = model(tokens[:, :-1])
    count = torch.tensor(2.0 * 32)
    loss = loss_of(hidden, tokens[:, 1:], count)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses += [loss.item(), norm.item()]
write("torchtitan", model, losses)
dist.destroy_process_group()
