"""What a program of this folder computed: losses, full weights, and whose FSDP it ran on. Rank 0 writes them."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor


def write(package: str, model: nn.Module, losses: list[float], **more: Any) -> None:
    """All ranks call this. The folder is the program's only argument."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        weights = {name: full(value) for name, value in model.state_dict().items()}
    else:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    bases = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    engines = {each.partition(".fsdp")[0] for each in bases if ".fsdp" in each}
    units = sum(any(".fsdp" in base.__module__ for base in type(module).__mro__) for module in model.modules())
    if dist.get_rank() == 0:
        folder = Path(sys.argv[1])
        torch.save(weights, folder / "weights.pt")
        told = {"versions": [version(package), torch.__version__], "engines": sorted(engines), "units": units}
        (folder / "outcome.json").write_text(json.dumps({**told, "losses": losses, **more}))


def full(value: Any) -> Any:
    """Gather a tensor. Those of torchao that are stored in int8 must be dequantized first."""
    if not isinstance(value, DTensor):
        return value
    local = value.to_local()
    if "dequantize" in vars(type(local)) and type(local) is not torch.Tensor:
        value = DTensor.from_local(
            local.dequantize(), value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
        )
    return value.full_tensor()


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """A model without attention, for libraries that bring none."""

    def __init__(self, vocabulary: int = 32, width: int = 24, depth: int = 3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(32, (2, 9), generator=generator) for _ in range(count)]


def llama(**more: Any) -> nn.Module:
    """A tiny Llama of transformers with random weights, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **more}))


def let_accelerate_shard_on_the_cpu() -> None:
    """accelerate uses FSDP only on accelerators. The state is shared with the Accelerator and with transformers."""
    from accelerate import DistributedType, PartialState

    state = PartialState(cpu=True)
    state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")


def let_torch_wrap_on_the_cpu() -> None:
    """PyTorch's FSDP1 refuses models on the CPU without `device_id`, which Lightning does not pass there."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_sharded_data_parallel

    if FullyShardedDataParallel.__module__.startswith("torch."):
        choose = fully_sharded_data_parallel._init_device_handle
        fully_sharded_data_parallel._init_device_handle = lambda state, module, ignored, device: choose(
            state, module, ignored, device or torch.device("cpu")
        )
