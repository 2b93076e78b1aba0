"""Fine-tune a Hugging Face model in your own training loop, and save it for `from_pretrained`.

torchrun --nproc-per-node=2 examples/recipes/hugging_face.py
"""

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from unshard import checkpoint, fully_shard

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()

torch.manual_seed(0)  # the same weights on every rank
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))  # or AutoModelForCausalLM.from_pretrained(name)
for layer in model.model.layers:  # GPT-2 has them in model.transformer.h
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

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
    model.save_pretrained("fine-tuned", state_dict=state)
dist.destroy_process_group()
