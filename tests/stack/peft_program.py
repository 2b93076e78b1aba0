"""peft: LoRA on a frozen base, sharded by hand. Saves the adapter."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from outcome import batches, llama, write
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

mesh = init_device_mesh("cpu", (2,))
model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for layer in model.base_model.model.model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
losses = []
for tokens in batches(dist.get_rank(), 6):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    losses.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).full_tensor().item())
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
adapter = get_peft_model_state_dict(model, state)
if dist.get_rank() == 0:
    torch.save(adapter, Path(sys.argv[1], "adapter.pt"))
write("peft", model, losses, adapter=sorted(adapter))
dist.destroy_process_group()
