"""Train a convolutional tower with batch norm, which ranks without images skip.

    torchrun --standalone --nproc-per-node=2 examples/vision.py

Batch norm normalizes with the statistics of the local batch. `SyncBatchNorm` would wait for the ranks that skip the
tower. Running statistics therefore differ between ranks: average them before you evaluate or save.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import unshard
from unshard import checkpoint

VOCABULARY, WIDTH, SIZE, STEPS = 32, 64, 16, 100


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Captioner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.vision = nn.Sequential(convolution(3, 16), convolution(16, 32), nn.Flatten(), nn.Linear(32 * 16, WIDTH))
        self.text = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, images: Tensor | None = None) -> Tensor:
        features = self.embed(tokens)
        if images is not None:  # no dummy images: ranks without images skip the tower
            features = features + self.vision(images)
        return self.head(self.text(features))


def batch(images: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """The next token is the token plus 1, or plus the number (1 to 4) of the bright quarter of a noisy image."""
    tokens = torch.randint(VOCABULARY, (48,))
    if not images:
        return tokens, None, (tokens + 1) % VOCABULARY
    quarter = torch.randint(4, (48,))
    bright = F.one_hot(quarter, 4).view(-1, 1, 2, 2).repeat_interleave(SIZE // 2, 2).repeat_interleave(SIZE // 2, 3)
    return tokens, bright + torch.randn(48, 3, SIZE, SIZE), (tokens + 1 + quarter) % VOCABULARY


@torch.no_grad()
def average_running_statistics(model: nn.Module) -> None:
    """Average over all ranks, weighted by the number of batches that each rank has seen. Call this on all ranks."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            seen = module.num_batches_tracked.clone()
            dist.all_reduce(seen)
            if seen > 0:  # the same on all ranks
                for statistic in (module.running_mean, module.running_var):
                    statistic *= module.num_batches_tracked / seen
                    dist.all_reduce(statistic)


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights on every rank
    model = Captioner()
    for tower in (*model.vision[:2], model.text):
        unshard.fully_shard(tower)
    unshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + rank)  # different data on every rank
    for number in range(1, STEPS + 1):
        with unshard.step(model) as step:
            for _ in range(int(torch.randint(1, 4, ()))):
                tokens, images, targets = batch(images=bool(torch.rand(()) < 0.5))
                logits = model(tokens.to(device), None if images is None else images.to(device))
                step.backward(F.cross_entropy(logits, targets.to(device), reduction="sum"), weight=len(tokens))
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and number % 20 == 0:
            print(f"step {number}  loss {step.loss:.3f}, the mean over {step.weight:.0f} tokens", flush=True)

    average_running_statistics(model)
    model.eval()
    counts = torch.zeros(2, device=device)
    with unshard.inference(model):  # ranks may evaluate different numbers of batches
        for _ in range(2 + rank):
            tokens, images, targets = batch(images=True)
            right = model(tokens.to(device), images.to(device)).argmax(1) == targets.to(device)
            counts += torch.tensor([right.sum(), right.numel()], device=device)
    dist.all_reduce(counts)
    state = checkpoint.full_state_dict(model)  # on all ranks; the weights are on rank 0
    if rank == 0:
        print(f"{counts[0] / counts[1]:.0%} of {counts[1]:.0f} image captions are right", flush=True)
        torch.save(state, "vision.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
