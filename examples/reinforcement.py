"""Reinforcement learning: sample, score, take a policy-gradient step, and publish the weights.

    torchrun --standalone --nproc-per-node=2 examples/reinforcement.py

The policy learns to count: from a first token, each next token is the last one plus 1, and it must say STOP at 10.
Ranks sample different numbers of answers with different lengths. Every token of all ranks has the same weight.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import unshard
from unshard import checkpoint

GOAL, STOP, VOCABULARY, WIDTH = 10, 11, 12, 64
LONGEST, STEPS = 16, 80


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def build() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY))


def sample(model: nn.Module, first: Tensor) -> Tensor:
    """Return a batch of answers. Each begins with its first token, and has STOP after its end."""
    answers = first.unsqueeze(1)
    while answers.shape[1] < LONGEST and not (answers[:, -1] == STOP).all():  # its length differs between ranks
        following = torch.distributions.Categorical(logits=model(answers[:, -1])).sample()
        following = following.masked_fill(answers[:, -1] == STOP, STOP)
        answers = torch.cat([answers, following.unsqueeze(1)], dim=1)
    return answers


def score(answers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reward of each token that the policy chose, and 1 where it chose one, else 0."""
    last, chosen = answers[:, :-1], answers[:, 1:]
    return (chosen == last + 1).float(), (last != STOP).float()  # GOAL + 1 is STOP


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights on every rank
    policy = build()
    for block in policy[1:3]:
        unshard.fully_shard(block)
    unshard.fully_shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

    torch.manual_seed(1 + rank)  # different answers on every rank
    for number in range(1, STEPS + 1):
        with unshard.inference(policy):  # gathers the policy once; then forwards send nothing
            prompts = [torch.randint(GOAL, (16,)).to(device) for _ in range(1 + (rank + number) % 3)]
            batches = [sample(policy, first) for first in prompts]

        # The advantage of a token is its reward minus the mean reward of all tokens of all ranks.
        sums = sum(torch.stack([(rewards * mask).sum(), mask.sum()]) for rewards, mask in map(score, batches))
        dist.all_reduce(sums)
        mean = sums[0] / sums[1]
        with unshard.step(policy) as step:
            for answers in batches:
                rewards, mask = score(answers)
                chances = policy(answers[:, :-1]).log_softmax(-1).gather(-1, answers[:, 1:, None]).squeeze(-1)
                step.backward(-(chances * (rewards - mean) * mask).sum(), weight=mask.sum())
        unshard.optim.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        if number % 20 == 0:
            state = checkpoint.full_state_dict(policy)  # on all ranks; the weights are on rank 0
            if rank == 0:
                torch.save(state, "policy.pt.new")
                os.replace("policy.pt.new", "policy.pt")  # readers never see half a file
                print(f"step {number}  mean reward {mean:.2f} of {step.weight:.0f} tokens  published", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
