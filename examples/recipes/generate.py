"""Sample from a Hugging Face model with `generate()` between training steps.

torchrun --nproc-per-node=2 examples/recipes/generate.py
"""

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import unshard

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()

torch.manual_seed(0)  # the same weights on every rank
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))  # or AutoModelForCausalLM.from_pretrained(name)
for layer in model.model.layers:
    unshard.fully_shard(layer)
unshard.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

torch.manual_seed(1 + dist.get_rank())  # different data on every rank
for step in range(1, 61):
    tokens = (torch.randint(64, (8, 1)) + torch.arange(32)) % 64  # sequences that count up
    tokens = tokens.to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        model.eval()
        with unshard.inference(model):  # gathers the whole model once; on all ranks
            for _ in range(1 + dist.get_rank()):  # inside, ranks may call the model any number of times
                prompt = torch.randint(64, (1, 1)).to(device)
                sampled = model.generate(prompt, max_new_tokens=8, do_sample=False, synced_gpus=False)
        model.train()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.3f}  sampled {sampled[0].tolist()}", flush=True)
dist.destroy_process_group()
