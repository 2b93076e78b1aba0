"""Train LoRA adapters on a Hugging Face model in 4 bits. The frozen 4-bit weights are sharded as they are.

torchrun --nproc-per-node=2 examples/recipes/qlora.py
"""

import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from unshard import fully_shard

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()

name = "tiny-llama"  # stands for a pretrained model, so that this program needs no download
if dist.get_rank() == 0:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(name)
dist.barrier()

# Quantize first, then add the adapters, then shard.
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantization, device_map={"": device})
model.train()  # from_pretrained returns a model in eval mode
torch.manual_seed(1)  # the same adapters on every rank
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))
for layer in model.base_model.model.model.layers:
    fully_shard(layer)
fully_shard(model)
trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2)

torch.manual_seed(2 + dist.get_rank())  # different data on every rank
for step in range(1, 31):
    tokens = (torch.randint(64, (8, 1)) + torch.arange(32)) % 64  # sequences that count up
    tokens = tokens.to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}  loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
