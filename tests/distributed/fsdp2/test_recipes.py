"""The listings of README.md and docs/recipes.md run as they are printed. Small stand-ins replace other libraries."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.programs import TORCHRUN, python
from torch import nn
from torch.nn import functional as F

from unshard import FSDPModule, fully_shard
from unshard.engine.hooks import state_of

REPOSITORY = Path(__file__).parents[3]


def listing(page: str, heading: str) -> str:
    """The Python listing below a heading."""
    _, _, rest = (REPOSITORY / page).read_text().partition(f"\n## {heading}\n")
    section = rest.partition("\n## ")[0]
    [found] = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return str(found)


def run(heading: str, **names: Any) -> dict[str, Any]:
    """Run a recipe with these names, and return all names that it has then."""
    names = {"torch": torch, "dist": dist, **names}
    exec(compile(listing("docs/recipes.md", heading), heading, "exec"), names)
    return names


# -- stand-ins ---------------------------------------------------------------------------------------------


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


class Adapted(nn.Module):
    """As peft's linear layers."""

    def __init__(self, base: nn.Linear, r: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, 8, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Peft(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.base_model.model(**inputs)


def get_peft_model(model: Any, config: Any) -> Peft:
    model.requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.model.layers:
        for name in config.target_modules:
            setattr(layer, name, Adapted(getattr(layer, name), config.r))
    return Peft(model)


class Packed(nn.Linear):
    """As a 4-bit layer of bitsandbytes: its weight is packed in bytes."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight = nn.Parameter(torch.randint(256, (32, 1), dtype=torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.stack([self.weight & 15, self.weight >> 4], 1)
        return F.linear(x, (pairs.view(8, 8).to(x.dtype) - 7.5) / 20, self.bias)


def from_pretrained(name: str, quantization_config: Any = None) -> Language:
    model = Language()
    if quantization_config is not None:
        assert quantization_config.load_in_4bit
        for layer in model.model.layers:
            layer.q_proj, layer.v_proj = Packed(), Packed()
    return model


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers, peft = ModuleType("transformers"), ModuleType("peft")
    vars(transformers)["AutoModelForCausalLM"] = SimpleNamespace(from_pretrained=from_pretrained)
    vars(transformers)["BitsAndBytesConfig"] = SimpleNamespace
    vars(peft).update(LoraConfig=SimpleNamespace, get_peft_model=get_peft_model)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "peft", peft)


# -- what they compute -------------------------------------------------------------------------------------


def batches_of(rank: int) -> list[torch.Tensor]:
    return list(torch.randint(16, (3, 4, 6), generator=torch.Generator().manual_seed(rank)))


def train_unsharded(model: nn.Module, lr: float, ranks: int = 2) -> None:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=lr)
    for batches in zip(*(batches_of(rank) for rank in range(ranks)), strict=True):
        for tokens in batches:
            (model(input_ids=tokens, labels=tokens).loss / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    theirs = dict(reference.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys() and len(theirs) > 2
    for name, mine in model.named_parameters():
        full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        torch.testing.assert_close(full, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


@world(2)
def test_hugging_face_models() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)
        model = run("Hugging Face models", name="tiny", batches=batches_of(dist.get_rank()))["model"]
    reference = Language()
    train_unsharded(reference, 1e-4)
    assert_equal(model, reference)


@world(2)
def test_lora() -> None:
    """The base stays gathered after a backward; the adapters do not."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)
        names = run("LoRA", model=Language(), batches=batches_of(dist.get_rank()))
    reference = get_peft_model(Language(), SimpleNamespace(r=8, target_modules=["q_proj", "v_proj"]))
    before = copy.deepcopy(reference)
    train_unsharded(reference, 1e-3)
    model, layer = names["model"], names["layer"]
    model(input_ids=batches_of(0)[0], labels=batches_of(0)[0]).loss.backward()
    assert state_of(layer).unit.param_state.name == "UNSHARDED"
    assert all(state_of(each).unit.param_state.name == "SHARDED" for each in names["adapters"])
    assert len(names["adapters"]) == 4 and len(names["trained"]) == 8
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert_equal(model, reference)
    moved = [name for name, each in before.named_parameters() if not torch.equal(each, reference.get_parameter(name))]
    assert len(moved) == 8


@world(2)
def test_qlora() -> None:
    """Packed weights stay what they were, and the adapters train."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)
        model = run("QLoRA", name="tiny")["model"]
    reference = get_peft_model(
        from_pretrained("tiny", SimpleNamespace(load_in_4bit=True)),
        SimpleNamespace(r=8, target_modules=["q_proj", "v_proj"]),
    )
    train_unsharded(reference, 1e-3)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    for tokens in batches_of(dist.get_rank()):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(model, reference)


@world(2)
def test_token_weighted_loss() -> None:
    """Ranks and micro-batches with different numbers of tokens: the mean over all of them."""

    def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(10 * rank + number))
        targets = tokens.clone()
        targets[0, : 1 + rank + 2 * number] = -100
        return tokens, targets

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))

    model, reference = fully_shard(build()), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run("Token-weighted loss", model=model, optimizer=optimizer, steps=[[batch(dist.get_rank(), n) for n in range(2)]])
    inputs, targets = (
        torch.cat(each) for each in zip(*(batch(rank, n) for rank in range(2) for n in range(2)), strict=True)
    )
    F.cross_entropy(reference(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    assert_equal(model, reference)


@world(2)
def test_generate_between_steps() -> None:
    model, reference = Language(), Language()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    tokens = batches_of(dist.get_rank())[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    names = run("Generate between steps", model=model, prompt=tokens)
    assert torch.equal(names["sampled"], reference.generate(tokens, 8, False))
    for layer in model.model.layers:
        assert state_of(layer).unit.param_state.name == "SHARDED" and state_of(layer).unit.options.reshard_after_forward
    assert model.training
    model(input_ids=tokens, labels=tokens).loss.backward()


@world(2)
def test_publishing_weights(tmp_path: Path) -> None:
    model, reference = fully_shard(Language()), Language()
    path = tmp_path / "model.pt"
    run("Publishing weights", model=model, path=path)
    if dist.get_rank() == 0:
        reference.load_state_dict(torch.load(path))
        assert torch.load(path).keys() == reference.state_dict().keys()


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.text = nn.Linear(8, 4), nn.Linear(3, 4)


@world(2)
def test_skipped_towers() -> None:
    """Rank 0 has images, rank 1 has none."""
    tokens, images = torch.ones(2, 3), torch.ones(5, 8)
    model, reference = Towers(), Towers()
    for tower in (model.vision, model.text):
        fully_shard(tower)
    output = run("Skipped towers", model=model, tokens=tokens, images=None if dist.get_rank() else images)["output"]
    output.square().sum().backward()
    both = reference.text(tokens) + reference.vision(images).mean(0), reference.text(tokens)
    (sum(each.square().sum() for each in both) / 2).backward()
    for name, mine in model.named_parameters():
        torch.testing.assert_close(mine.grad.full_tensor(), reference.get_parameter(name).grad)


def test_every_recipe_is_run() -> None:
    headings = re.findall(r"^## (.+)$", (REPOSITORY / "docs/recipes.md").read_text(), re.MULTILINE)
    run_here = re.findall(r'run\("([^"]+)"', Path(__file__).read_text())
    assert len(headings) == 7 and set(headings) == set(run_here)


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
