"""Train LoRA adapters on a frozen Hugging Face model that stays gathered, and save the adapters.

torchrun --nproc-per-node=2 examples/recipes/lora.py
"""

import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from unshard import checkpoint, fully_shard

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()

torch.manual_seed(0)  # the same weights on every rank
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
base = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))  # or AutoModelForCausalLM.from_pretrained(name)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))
for layer in base.model.layers:
    adapters = [module for name, module in layer.named_modules() if "lora_" in name and hasattr(module, "weight")]
    fully_shard(adapters)  # trainable: gathered and reduced in every step
    fully_shard(layer, reshard_after_forward=False)  # frozen: gathered in the first step, and then kept
    layer.set_reshard_after_backward(False, recurse=False)
fully_shard(model)
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2)

torch.manual_seed(1 + dist.get_rank())  # different data on every rank
for step in range(1, 31):
    tokens = (torch.randint(64, (8, 1)) + torch.arange(32)) % 64  # sequences that count up
    tokens = tokens.to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}  loss {loss.item():.3f}", flush=True)

state = checkpoint.full_state_dict(model)  # on all ranks; the weights are on rank 0
if dist.get_rank() == 0:
    model.save_pretrained("adapters", state_dict=state)  # writes the adapters only
dist.destroy_process_group()
