"""`unshard.tools.precision_audit`: what really happened in some steps, against the plan."""

from __future__ import annotations

import io
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.precision_model import Model, Narrow, batch, sharded
from bed.recorders import Collectives, TorchCalls
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from unshard import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard, tools
from unshard.engine import observer
from unshard.errors import StateError
from unshard.tools import PrecisionAudit, precision_audit

F32, F16, B16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
MIXED = MixedPrecisionPolicy(B16, F32, output_dtype=F32)

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(B16, F32, output_dtype=F32),
    "fp16": MixedPrecisionPolicy(F16, output_dtype=F32),
    "overrides": MixedPrecisionPolicy(B16, F32, output_dtype=F32, overrides={"*norm*": F32, "up.*": F64}),
    "wire": MixedPrecisionPolicy(B16, F32, output_dtype=F32, wire_dtype=B16),
    "buffers": MixedPrecisionPolicy(B16, F32, output_dtype=F32, buffer_dtype=B16),
    "eval": MixedPrecisionPolicy(B16, F32, output_dtype=F32, buffer_dtype=B16, full_precision_in_eval=True),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> float:
    loss = model(batch()).float().square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def found(audit: PrecisionAudit, unit: str, row: int = 0) -> dict[str, str]:
    """The cells of a line "found" of a unit's row in the table, by column."""
    lines = str(audit).splitlines()
    starts = [0] + [i + 2 for i in range(len(lines[1])) if lines[1][i : i + 2] == "  "]
    starts = [i for i in starts if lines[1][i : i + 1] == "-"]
    columns = list(zip(starts, [*starts[1:], None], strict=True))
    first = next(number for number, line in enumerate(lines) if line.startswith(unit))
    cells = lines[first + 1 + 2 * row]
    return {lines[0][a:b].strip(): cells[a:b].strip() for a, b in columns}


def assert_removed(model: nn.Module) -> None:
    assert observer.current is None and torch._C._len_torch_function_stack() == 0
    for module in model.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        assert not any("unshard.tools" in getattr(hook, "func", hook).__module__ for hook in hooks)


# --- honest steps ------------------------------------------------------------------------------------------------


# What is found of the first parameters of a block: gathered, computed, sent, added up.
FOUND = {
    "fp32": ("fp32", "fp32", "fp32", "fp32"),
    "bf16": ("bf16", "bf16", "fp32", "fp32"),
    "fp16": ("fp16", "fp16", "fp16", "fp16"),
    "overrides": ("bytes", "fp32", "fp32", "fp32"),
    "wire": ("bf16", "bf16", "bf16", "fp32"),
    "buffers": ("bf16", "bf16", "fp32", "fp32"),
    "eval": ("bf16, eval fp32", "bf16, eval fp32", "fp32", "fp32"),
}


@world(2)
def test_honest_steps() -> None:
    """No differences in training, accumulation, recomputation and evaluation; all stages were seen."""
    assert POLICIES.keys() == FOUND.keys()
    for name, policy in POLICIES.items():
        model = sharded(policy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with precision_audit(model, optimizer) as audit:
            train(model, optimizer)
        assert (name, audit.differences, audit.steps) == (name, [], 3)
        assert not [each for each in audit.surprises if "step" in each or "autocast" in each]
        rounded = [each for each in audit.surprises if "sums of several backwards" in each]
        assert len(rounded) == (name == "wire") and all("fp32, were rounded to bf16" in each for each in rounded)
        cells = found(audit, "blocks.0 … blocks.2")
        assert tuple(cells[stage] for stage in ("gathered", "computed", "wire", "reduced")) == FOUND[name]
        assert cells["sums kept"] == cells["reduced"] and cells["over replicas"] == "-"
        assert cells[".grad"] == cells["updated"] == cells["optimizer state"] == "fp32"
        assert_removed(model)


def train(model: Model, optimizer: torch.optim.Optimizer) -> None:
    step(model, optimizer)
    model.set_requires_gradient_sync(False)
    step(model)
    model.set_requires_gradient_sync(True)
    step(model, optimizer)
    checkpoint(model.blocks[0], torch.randn(3, 8, requires_grad=True), use_reentrant=False).sum().backward()
    model.eval()
    step(model, optimizer)
    with torch.no_grad():
        model(batch())


@world(2)
def test_honest_steps_of_the_wrapper() -> None:
    """Its policy keeps sums in the compute dtype, may keep `.grad` there, and casts the inputs of the root only."""
    for use_orig_params, low in itertools.product((True, False), (True, False)):
        precision = MixedPrecision(B16, F32, keep_low_precision_grads=low)
        options = {"mixed_precision": precision, "use_orig_params": use_orig_params}
        inner = FullyShardedDataParallel(nn.Linear(4, 4), **options)
        model = FullyShardedDataParallel(nn.Sequential(inner, nn.Tanh(), nn.Linear(4, 4)), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rows = tools.precision(model, optimizer, file=io.StringIO()).rows
        assert [(row.reduced, row.kept, row.grad) for row in rows] == [(F32, B16, B16 if low else F32)] * 2
        with precision_audit(model) as audit:
            with model.no_sync():
                model(torch.ones(2, 4)).sum().backward()
            model(torch.ones(2, 4)).sum().backward()
        assert audit.differences == []
        cells = found(audit, "(root)")
        assert (cells["wire"], cells["reduced"], cells["sums kept"]) == ("fp32", "fp32", "bf16")
        if use_orig_params:
            assert cells[".grad"] == ("bf16" if low else "fp32")
        boundary = next(line.split() for line in str(audit).split("inputs planned")[1].splitlines() if "(root)" in line)
        assert boundary[1:3] == ["bf16", "bf16"]
        assert_removed(model)


@world(4)
def test_honest_steps_with_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    for policy, expected in ((MIXED, "fp32"), (MixedPrecisionPolicy(B16, output_dtype=F32), "bf16")):
        model = sharded(policy, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with precision_audit(model, optimizer) as audit:
            model.set_requires_all_reduce(False)
            step(model)
            model.set_requires_all_reduce(True)
            step(model, optimizer)
        assert audit.differences == []
        cells = found(audit, "blocks.0")
        assert cells["over replicas"] == cells["reduced"] == expected and cells[".grad"] == "fp32"


@world(4)
def test_honest_steps_with_slices() -> None:
    model = sharded(MIXED, reshard_after_forward=2)
    with precision_audit(model) as audit:
        step(model)
    assert audit.differences == [] and found(audit, "blocks.0")["gathered"] == "bf16"


def parallel(mesh: DeviceMesh) -> Model:
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(MIXED, model, mesh=mesh["dp"])


@world(4)
def test_honest_steps_with_tensor_parallelism() -> None:
    model = parallel(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    with precision_audit(model, optimizer) as audit:
        step(model, optimizer)
    assert audit.differences == [] and found(audit, "blocks.0")["computed"] == "bf16"


@world(2)
def test_an_audit_changes_nothing() -> None:
    """The same losses, collectives and torch calls with and without; none left behind after an exception."""
    plain, watched = (sharded(MIXED, _seeded()) for _ in range(2))
    losses, calls, counts = [], [], []
    for model in (plain, watched):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        with precision_audit(model, optimizer) if model is watched else nullcontext():
            with Collectives() as seen:
                losses.append([step(model, optimizer) for _ in range(2)])
            with TorchCalls() as counted:
                step(model, optimizer)
        calls.append(seen.calls)
        counts.append(counted.counts)
    assert losses[0] == losses[1] and calls[0] == calls[1] and len(calls[0]) > 0
    assert counts[0] == counts[1]
    with pytest.raises(ZeroDivisionError), precision_audit(watched):
        raise ZeroDivisionError
    assert_removed(watched)
    with precision_audit(watched):
        with pytest.raises(StateError, match="is active"), precision_audit(plain):
            raise AssertionError
        assert observer.current is not None  # the refused one did not end this one
    assert_removed(watched)
    assert step(plain) == step(watched)


def _seeded() -> Model:
    torch.manual_seed(0)
    return Model()


@world(2)
def test_other_models_are_not_looked_at() -> None:
    mine, other = sharded(MIXED), sharded(MixedPrecisionPolicy(F64, output_dtype=F32))
    with precision_audit(mine, torch.optim.SGD(mine.parameters(), lr=0.1)) as audit:
        step(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert audit.differences == [] and audit.steps == 0
    assert found(audit, "blocks.0")["gathered"] == found(audit, "blocks.0")["updated"] == "-"
    assert any("SGD never stepped" in each for each in audit.surprises)


# --- planted differences -----------------------------------------------------------------------------------------


@world(2)
def test_autocast_is_found() -> None:
    model = sharded(MixedPrecisionPolicy())
    with precision_audit(model) as audit, torch.autocast("cpu", B16):
        step(model)
    apart = [each for each in audit.differences if "module 'blocks.1.up'" in each]
    assert apart and "planned in fp32, found bf16" in apart[-1] and "autocast to bf16" in apart[-1]
    assert any("ran inside autocast" in each for each in audit.surprises)
    assert "Differences:" in str(audit) and f"- {audit.differences[0]}" in str(audit).splitlines()
    with precision_audit(model) as audit:
        step(model)
    assert audit.differences == [] and "No differences." in str(audit) and audit.surprises == []


class Stubborn(nn.Linear):
    """Knows better which precision it needs."""

    back = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = nn.functional.linear(x.float(), self.weight.float(), self.bias.float())
        return out.to(x.dtype) if self.back else out


@world(2)
def test_a_module_that_casts_its_weight_is_found() -> None:
    model = Model()
    model.head = Stubborn(8, 4)
    sharded(MixedPrecisionPolicy(B16, F32), model)
    with precision_audit(model) as audit:
        step(model)
    *casts, output = audit.differences
    assert output == "Unit '(root)', module 'head': outputs planned in bf16, found fp32."
    model.head.back = True  # it hides what it does
    with precision_audit(model) as audit:
        step(model)
    assert audit.differences == casts and len(casts) == 2
    assert casts[0].startswith(
        "Unit '(root)': 'head.weight' planned to be computed with in bf16, found converted to fp32"
    )
    with precision_audit(model) as audit:
        model.unshard()
        model.head.weight.float()  # to look at it, between steps
    assert audit.differences == []


def _narrow_gradient(parameter: torch.Tensor) -> None:
    parameter.grad_dtype = None
    parameter.grad = parameter.grad.to(B16)


@world(2)
def test_a_hook_that_converts_a_gradient_is_found() -> None:
    model = sharded(MIXED)
    model.head.weight.register_post_accumulate_grad_hook(_narrow_gradient)
    with precision_audit(model) as audit:
        step(model)
    assert audit.differences == ["Unit '(root)': .grad planned fp32, found bf16 ('head.weight')."]
    assert found(audit, "(root)")[".grad"] == "bf16+fp32"


@world(2)
def test_an_optimizer_with_narrow_state_is_found() -> None:
    model = sharded(MIXED)
    optimizer = Narrow(model.head.parameters(), lr=0.1, momentum=0.9)
    with precision_audit(model, optimizer) as audit:
        step(model, optimizer)
    expected = "Unit '(root)': optimizer state planned fp32, found bf16 ('head.weight', 'head.bias')."
    assert audit.differences == [expected] and audit.steps == 1
    assert any("momentum_buffer" in each and "bf16" in each for each in audit.surprises)
    assert any("no optimizer that stepped holds them" in each and "tokens" in each for each in audit.surprises)


@world(2)
def test_inputs_outputs_and_buffers_that_a_user_casts_are_found() -> None:
    """By hooks that run behind ours."""
    model = Model()
    policy = MixedPrecisionPolicy(B16, F32, output_dtype=F32, buffer_dtype=B16)
    fully_shard(model.blocks[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0].float(),))
    model.blocks[0].norm.register_forward_hook(lambda module, args, output: output.to(B16))
    model.blocks[0].norm.register_forward_pre_hook(lambda module, args: (args[0].to(B16),))
    model.blocks[0].register_forward_hook(lambda module, args, output: output.to(B16))
    model.register_forward_pre_hook(lambda module, args: module._buffers.update(scale=module.scale.float()))
    with precision_audit(model) as audit:
        step(model)
    assert audit.differences == [
        "Unit '(root)': buffer 'scale' planned bf16, found fp32 in forward.",
        "Unit 'blocks.0': inputs planned bf16, found fp32.",
        "Unit 'blocks.0': outputs planned fp32, found bf16.",
    ]


@world(2)
def test_steps_without_a_backward() -> None:
    """Nothing was seen of gradients, and that is no difference."""
    model = sharded(MIXED)
    with precision_audit(model) as audit, torch.no_grad():
        model(batch())
    cells = found(audit, "(root)")
    assert audit.differences == [] and cells["gathered"] == "bf16" and cells["wire"] == cells[".grad"] == "-"
    assert dist.get_world_size() == 2 and "Steps of an optimizer: none." in str(audit)
