"""The recipes of docs/uneven_steps.md: the listings before and after train and evaluate alike."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bed import world
from torch import nn

import unshard
from unshard import fully_shard

PAGE = (Path(__file__).parents[3] / "docs" / "uneven_steps.md").read_text()


def listings(heading: str) -> list[str]:
    section = re.split(r"^##", PAGE.partition(f" {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def run(code: str, **names: Any) -> dict[str, Any]:
    names = {"torch": torch, "dist": dist, "unshard": unshard, "itertools": itertools, **names}
    exec(compile(code, "docs/uneven_steps.md", "exec"), names)
    return names


def language() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    fully_shard(model[1])
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def texts(count: int, seed: int = 0) -> list[torch.Tensor]:
    """As many texts of different lengths, different ones on each rank."""
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return [torch.randint(16, (2, 3 + number + seed), generator=generator) for number in range(count)]


def assert_trained_alike(*models: nn.Module) -> None:
    first, second = (dict(model.named_parameters()) for model in models)
    for name, mine in first.items():
        torch.testing.assert_close(mine.full_tensor(), second[name].full_tensor(), msg=name)


def run_both(heading: str, **names: Any) -> list[dict[str, Any]]:
    found = []
    for code in listings(heading):
        model, optimizer = language()
        found.append(run(code, model=model, optimizer=optimizer, **names))
    before, after = found
    assert_trained_alike(before["model"], after["model"])
    return found


@world(2)
def test_token_mean() -> None:
    steps = []
    for seed in range(2):
        steps.append([(text, text.clone()) for text in texts(2, seed)])
        steps[-1][0][1][0, : 1 + dist.get_rank()] = -100
    run_both("Token mean over ranks and micro-batches", steps=steps)


@world(2)
def test_dynamic_batches() -> None:
    """Rank 0 has three micro-batches, rank 1 has one."""
    found = texts(3 - 2 * dist.get_rank())
    micro_batches = [(each, (each % 3 > 0).float(), (each - 8.0) / 8) for each in found]
    run_both("Dynamic batch sizes in RL", micro_batches=micro_batches)


@world(2)
def test_fp16_and_clipping() -> None:
    [code] = listings("Clipping, optimizers and fp16")
    model, optimizer = language()
    before = [each.full_tensor() for each in model.parameters()]
    run(code, model=model, optimizer=optimizer, steps=[[(text, text) for text in texts(dist.get_rank())]])
    assert not any(torch.equal(old, each.full_tensor()) for old, each in zip(before, model.parameters(), strict=True))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.text = nn.Linear(8, 4), nn.Linear(3, 4)


@world(2)
def test_skipped_towers() -> None:
    """Rank 0 has images, rank 1 has none."""
    models = []
    for code in listings("A vision tower that some ranks skip"):
        model = Towers()
        fully_shard(model.vision)
        fully_shard(model.text)
        models.append(fully_shard(model))
        run(code, model=model, tokens=torch.ones(2, 3), images=None if dist.get_rank() else torch.ones(5, 8))
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad.full_tensor())


def rows(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [(torch.randint(16, (4,), generator=generator), torch.arange(4)) for _ in range(count)]


@world(2)
def test_uneven_last_batch() -> None:
    """Rank 1 has two batches more. Before, it drops them; after, it trains on them."""
    batches = rows(3 + 2 * dist.get_rank())
    models = []
    for code in listings("Uneven last batch"):
        model, optimizer = language()
        steps: list[int] = []
        optimizer.register_step_post_hook(lambda *unused, steps=steps: steps.append(1))
        run(code, model=model, optimizer=optimizer, batches=batches)
        models.append((model, len(steps)))
    assert [count for _, count in models] == [3, 5]


@world(2)
def test_uneven_evaluation() -> None:
    batches = rows(1 + 3 * dist.get_rank())
    prompts = texts(dist.get_rank())
    means = []
    for code in listings("Uneven evaluation and `generate()`"):
        model, _ = language()
        generated = {"prompts": prompts, "generate": lambda model, prompt: model(prompt).argmax(-1)}
        names = run(code, model=model, batches=batches, **generated)
        means.append(names["mean"])
        assert model.training
    torch.testing.assert_close(*means)
    assert [each.shape for each in names.get("samples", [])] == [each.shape for each in prompts]
