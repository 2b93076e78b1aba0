"""Direct preference optimization (DPO): a policy learns to prefer the chosen answers, relative to a frozen reference.

torchrun --nproc-per-node=2 examples/recipes/dpo.py
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from unshard import fully_shard

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()

torch.manual_seed(0)  # the same weights on every rank
blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)]
policy = nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32))
reference = copy.deepcopy(policy).requires_grad_(False)  # before sharding; in practice, the model after fine-tuning
for model in (policy, reference):
    for block in model[1:3]:
        fully_shard(block)
    fully_shard(model)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)


def log_probability(model, tokens):
    """Return the log-probability of each sequence, given its first token."""
    logits = model(tokens[:, :-1]).log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None]).sum((1, 2))


torch.manual_seed(1 + dist.get_rank())  # different data on every rank
for step in range(1, 21):
    prompts, counter = torch.randint(32, (16, 1)), torch.arange(8)
    chosen, rejected = (prompts + counter) % 32, (prompts - counter) % 32  # counting up, counting down
    pairs = torch.cat([chosen, rejected]).to(device)  # one forward for both
    with torch.no_grad():
        before = log_probability(reference, pairs)
    better, worse = (log_probability(policy, pairs) - before).chunk(2)
    margin = 0.1 * (better - worse)
    loss = -F.logsigmoid(margin).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 0:
        right = (margin > 0).float().mean()
        print(f"step {step}  loss {loss.item():.3f}  margin {margin.mean():.2f}  preferred {right:.0%}", flush=True)
dist.destroy_process_group()
