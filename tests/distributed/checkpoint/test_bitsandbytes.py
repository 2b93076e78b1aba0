"""Models that bitsandbytes has quantised: they train, and their checkpoints have the scales of the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.quantized import bits, build_bitsandbytes, check_checkpoints, inputs, shard_layers
from bed.world import mostly_slow
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from unshard import MixedPrecision, MixedPrecisionPolicy, checkpoint, fully_shard
from unshard.errors import ArgumentError, UnsupportedError

pytest.importorskip("bitsandbytes")
# On one rank the wrapper shards nothing; exports warn that safetensors files are of one rank; and so on.
quiet = pytest.mark.filterwarnings("ignore")

FOUR_BITS = [
    f"{kind}{double} {storage}"
    for kind in ("nf4", "fp4")
    for double in ("", " double")
    for storage in ("uint8", "float32", "bfloat16")
]
QUICK = ["nf4 double uint8", "fp4 float32", "int8"]


def build(kind: str) -> Callable[[int], nn.Module]:
    return partial(build_bitsandbytes, kind)


@pytest.mark.parametrize("kind", mostly_slow([*FOUR_BITS, "int8"], QUICK))
@world(1, 2, 3, 4)
def test_fully_shard(kind: str, tmp_path: Path) -> None:
    check_checkpoints(build(kind), "fully_shard", tmp_path)


FLOATS = [f"{kind} all" for kind in FOUR_BITS if not kind.endswith("uint8")]


@quiet
@pytest.mark.parametrize("front_end", ["originals", "flat"])
@pytest.mark.parametrize("kind", mostly_slow(FLOATS, ["nf4 double float32 all"]))
@world(1, 2, 3, 4)
def test_wrapper(kind: str, front_end: str, tmp_path: Path) -> None:
    """A flat parameter has one dtype: packed weights are stored in that of the others."""
    check_checkpoints(build(kind), front_end, tmp_path)


@pytest.mark.parametrize("kind", mostly_slow([*FOUR_BITS, "int8"], ["nf4 double uint8", "int8"]))
@world(3)
def test_weights_that_are_not_sharded(kind: str, tmp_path: Path) -> None:
    check_checkpoints(build(kind), "ignored", tmp_path)


FRONT_ENDS = [("nf4 double uint8", "fully_shard"), ("int8", "fully_shard"), ("nf4 double float32", "originals")]


@quiet
@pytest.mark.parametrize(("kind", "front_end"), FRONT_ENDS)
@world(1, 3)
def test_state_dicts_of_sharded_models(kind: str, front_end: str, tmp_path: Path) -> None:
    reference = build(kind)(0)
    model = shard_layers(build(kind)(0), front_end)
    expected, found = reference.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    for name in set(expected) - dict(reference.named_parameters()).keys():
        assert torch.equal(bits(found[name]), bits(expected[name])), name
    for run_before in (False, True):
        other = shard_layers(build(kind)(1), front_end)
        if run_before:
            other(inputs())
        other.load_state_dict(copy.deepcopy(found))
        assert torch.equal(other(inputs()), reference(inputs()))
    if kind == "int8":
        return  # torch's helpers look for an attribute SCB of the layer, also of the unsharded one
    other = shard_layers(build(kind)(1), front_end)
    set_model_state_dict(other, get_model_state_dict(model))
    assert torch.equal(other(inputs()), reference(inputs()))


@quiet
@pytest.mark.parametrize("kind", ["nf4 float32", "fp4 double bfloat16", "nf4 double uint8", "int8"])
@world(1, 2, slow=(1,))
def test_packed_weights_are_not_cast(kind: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for each in (policy, MixedPrecisionPolicy(param_dtype=torch.float32), MixedPrecisionPolicy()):
        reference, model = build(kind)(0), shard_layers(build(kind)(0), "fully_shard", mp_policy=each)
        dtype = each.param_dtype or torch.float32
        for name, parameter in reference.named_parameters():
            if parameter.requires_grad or name.endswith("bias"):
                parameter.data = parameter.data.to(dtype)
        expected, found = reference(inputs().to(dtype)), model(inputs())
        assert torch.equal(found, expected)
        expected.sum().backward()
        found.sum().backward()
        assert model[0].weight.grad is not None and reference[0].weight.grad is not None  # type: ignore[index]
        gradient = model[0].weight.grad.full_tensor()  # type: ignore[index]
        assert torch.equal(gradient, reference[0].weight.grad.to(gradient.dtype))  # type: ignore[index]
        assert torch.equal(model(inputs()), found)  # after a backward


@quiet
@world(2)
def test_wrapper_refuses_to_cast_packed_weights() -> None:
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"'1\.weight' of Sequential has packed.*quant_storage=torch\.bfloat16"):
        shard_layers(build("nf4 float32")(0), "originals", mixed_precision=mixed)


@quiet
@pytest.mark.parametrize("kind", ["nf4 double uint8", "int8"])
@world(2)
def test_copies(kind: str) -> None:
    model = shard_layers(build(kind)(0), "fully_shard")
    copied = copy.deepcopy(model)
    output = model(inputs())
    assert torch.equal(copied(inputs()), output)
    checkpoint.load_full_state_dict(copied, build(kind)(1).state_dict())
    assert torch.equal(copied(inputs()), build(kind)(1)(inputs()))
    assert torch.equal(model(inputs()), output)


@quiet
@world(2)
def test_int8_weights_that_a_layer_has_taken_are_refused() -> None:
    model = build("int8")(0)
    model(inputs())
    with pytest.raises(UnsupportedError, match="moved its weights to its own state"):
        fully_shard(model)


@quiet
@pytest.mark.parametrize("kind", ["nf4 float32", "int8"])
@world(2)
def test_export_casts_no_quantised_weights(kind: str, tmp_path: Path) -> None:
    model = shard_layers(build(kind)(0), "fully_shard")
    checkpoint.save(tmp_path, model=model, step=1)
    if dist.get_rank() == 0:
        checkpoint.export(tmp_path, tmp_path / "export", dtype="bfloat16")
    dist.barrier()
    other = shard_layers(build(kind)(1), "fully_shard")
    checkpoint.load_safetensors(other, tmp_path / "export")
    expected = build(kind)(0).state_dict()
    for name, value in checkpoint.full_state_dict(other, rank0_only=False).items():
        if name.startswith(("1.weight", "3.", "1.SCB")):
            assert torch.equal(bits(value), bits(expected[name])), name
        elif value.is_floating_point():
            assert torch.equal(value, expected[name].bfloat16().to(value.dtype)), name
