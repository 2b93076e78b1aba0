"""Listings of README.md and docs/recipes/ run as they are printed. A small model stands in for transformers.

`tests/test_examples.py` runs the programs of docs/recipes/.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.programs import TORCHRUN, python
from torch import nn
from torch.nn import functional as F

from unshard import fully_shard
from unshard.engine.hooks import state_of

REPOSITORY = Path(__file__).parents[3]


def listing(page: str, heading: str) -> str:
    """The Python listing below a heading."""
    _, _, rest = (REPOSITORY / page).read_text().partition(f"\n## {heading}\n")
    section = rest.partition("\n## ")[0]
    [found] = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return str(found)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.v_proj(torch.tanh(self.q_proj(x)))


class Language(nn.Module):
    """As the causal language models of transformers: `model.layers`, a loss, `generate`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(16, 8)
        self.model.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        logits = self.lm_head(x)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)

    def generate(self, tokens: torch.Tensor, max_new_tokens: int, do_sample: bool) -> torch.Tensor:
        for _ in range(max_new_tokens):
            best = self(tokens).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, best], 1)
        return tokens


@world(2)
def test_generate_on_models_that_do_not_fit() -> None:
    """The layers are gathered for each token, and stay sharded."""
    model, reference = Language(), Language()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(dist.get_rank()))
    model(input_ids=tokens, labels=tokens).loss.backward()
    code = listing("docs/recipes/generate.md", "Models that do not fit on one device")
    names: dict[str, Any] = {"torch": torch, "model": model, "prompt": tokens}
    exec(compile(code, "docs/recipes/generate.md", "exec"), names)
    assert torch.equal(names["sampled"], reference.generate(tokens, 8, False))
    assert all(state_of(layer).unit.param_state.name == "SHARDED" for layer in model.model.layers)
    assert model.training
    model(input_ids=tokens, labels=tokens).loss.backward()


def test_the_program_of_the_readme(tmp_path: Path) -> None:
    text = (REPOSITORY / "README.md").read_text()
    program = tmp_path / "train.py"
    program.write_text(listing("README.md", "Use"))
    command, *expected = re.findall(r"^```\n(\$ torchrun.*?)^```", text, re.MULTILINE | re.DOTALL)[0].splitlines()
    printed = python("-W", "ignore", *TORCHRUN, program).stdout.splitlines()
    assert command.endswith(program.name) and len(printed) == len(expected)
    numbers = r"\d+\.\d+"
    for line, shown in zip(printed, expected, strict=True):
        assert re.sub(numbers, "", line) == re.sub(numbers, "", shown)
        found, loss = (float(re.search(numbers, each)[0]) for each in (line, shown))
        assert found == pytest.approx(loss, abs=0.01)
