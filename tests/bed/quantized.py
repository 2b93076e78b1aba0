"""Models with quantised layers: those of bitsandbytes, where it is installed, and one that any machine has."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bed.runs import assert_same
from torch import Tensor, nn

import unshard
from unshard import checkpoint


def build_bitsandbytes(kind: str, seed: int) -> nn.Module:
    """`kind`: `int8`, or for four bits `nf4` or `fp4`, perhaps `double`, and the dtype that bytes are stored in.

    With `all` the other parameters have that dtype as well.
    """
    layers = importlib.import_module("bitsandbytes").nn
    words = kind.split()
    storage = next((dtype for dtype in (torch.float32, torch.bfloat16) if f"{dtype}"[6:] in words), torch.uint8)

    def linear(inputs: int, outputs: int, bias: bool) -> nn.Module:
        if "int8" in words:
            return layers.Linear8bitLt(inputs, outputs, bias, has_fp16_weights=False)
        return layers.Linear4bit(
            *(inputs, outputs, bias),
            compress_statistics="double" in words,
            quant_type=words[0],
            quant_storage=storage,
        )

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), linear(64, 32, True), nn.ReLU(), linear(32, 64, False), nn.Linear(64, 3))
    if "all" in words:
        model.to(storage)
    return model.to("cpu")  # quantises


def shard_layers(model: nn.Module, front_end: str, **options: Any) -> nn.Module:
    """`front_end`: `fully_shard`, or `originals` or `flat` for the wrapper; or `ignored`: packed weights unsharded."""
    if front_end == "originals":
        return unshard.FullyShardedDataParallel(model, use_orig_params=True, **options)
    if front_end == "flat":
        for number, each in enumerate(model):  # type: ignore[arg-type]
            if any(True for _ in each.parameters()):
                each.requires_grad_(False)
                model[number] = unshard.FullyShardedDataParallel(each, use_orig_params=False)  # type: ignore[operator]
        return model
    if front_end == "ignored":
        ignored = {each for each in model.parameters() if not each.requires_grad}
        return unshard.fully_shard(model, ignored_params=ignored, **options)
    for number in (1, 3):
        unshard.fully_shard(model[number], **options)  # type: ignore[operator]
    return unshard.fully_shard(model, **options)


class Quantized(nn.Module):
    """Eight bits, with scales that are neither parameters nor buffers."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(size, size, generator=generator)
        self.scale = weight.abs().amax(1, keepdim=True)
        self.weight = nn.Parameter((weight / self.scale * 127).to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * (self.scale / 127)).T


class SavesItself(Quantized):
    """Saves a copy: only the layer itself can load it."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        value = state_dict.get(f"{prefix}scale")
        super()._load_from_state_dict(state_dict, prefix, *args)
        if value is not None:
            self.scale = value.clone()
            unexpected = args[3]
            if f"{prefix}scale" in unexpected:
                unexpected.remove(f"{prefix}scale")


class SavesInHook(Quantized):
    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size, seed)
        self.register_state_dict_post_hook(_save_scale)


def _save_scale(module: Any, state_dict: Any, prefix: str, *unused: Any) -> None:
    state_dict[f"{prefix}scale"] = module.scale


class SavesOnly(SavesItself):
    """Cannot load what it saves."""

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)


class SavesText(Quantized):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}kind"] = "int8"


class Gptq(nn.Module):
    """As layers of GPTQ and AWQ: packed weights, zero points and scales in buffers."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("qweight", torch.randint(-128, 128, (size, size), generator=generator, dtype=torch.int32))
        self.register_buffer("qzeros", torch.randint(-8, 8, (size,), generator=generator, dtype=torch.int32))
        self.register_buffer("scales", torch.rand(size, generator=generator).half())
        self.register_buffer("g_idx", torch.randperm(size, generator=generator).to(torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.qweight - self.qzeros[self.g_idx.long()]) * self.scales
        return x @ weight.to(x.dtype).T


class WithExtraState(Quantized):
    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


STAND_INS: dict[str, type[nn.Module]] = {
    each.__name__: each for each in (SavesItself, SavesInHook, SavesOnly, SavesText, Gptq, WithExtraState)
}


def build_stand_in(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 10), STAND_INS[kind](10, seed), nn.ReLU(), STAND_INS[kind](10, seed + 1))


def check_checkpoints(build: Callable[[int], nn.Module], front_end: str, folder: Path) -> None:
    """Save a model in all ways, and load each into a model that was quantised from other weights."""
    reference, model = build(0), shard_layers(build(0), front_end)
    expected = dict(reference.state_dict())
    x = inputs().to(next(reference.parameters()).dtype)
    output = reference(x)
    assert torch.equal(model(x), output)
    assert not torch.equal(build(1)(x), output)

    full = checkpoint.full_state_dict(model)
    if dist.get_rank() == 0:
        assert front_end == "ignored" or list(full) == list(expected)
        assert_same(
            {name: bits(value) for name, value in full.items()}, {name: bits(each) for name, each in expected.items()}
        )
    else:
        full = {}
    saved = checkpoint.save(folder, model=model, step=1)
    saver = checkpoint.Saver(folder / "background")
    saver.save(model=model, step=1)
    saver.wait()
    if dist.get_rank() == 0:
        checkpoint.export(saved, folder / "export")
    dist.barrier()

    loads: list[Callable[[nn.Module], Any]] = [
        lambda other: checkpoint.load(saved, model=other),
        lambda other: checkpoint.load(folder / "background", model=other),
        lambda other: checkpoint.load_full_state_dict(other, full),
    ]
    if not any("_extra_state" in name for name in expected):
        loads.append(lambda other: checkpoint.load_safetensors(other, folder / "export"))
    for run_before in (False, True):
        for load in loads:
            other = shard_layers(build(1), front_end)
            if run_before:
                other(x)  # layers may keep what they compute with
            load(other)
            assert torch.equal(other(x), output)
            assert torch.equal(other(x), output)


def bits(value: Any) -> Any:
    """Packed values in a floating-point dtype may be NaN, which equals nothing."""
    return value.detach().contiguous().view(torch.uint8) if isinstance(value, Tensor) and value.ndim else value


def inputs() -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
