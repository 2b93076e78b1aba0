"""`unshard.tools.precision`: the dtypes of every parameter on its way, and what is surprising about them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.precision_model import B16, F16, F32, F64, QUIET, Model, Narrow, batch, sharded
from bed.recorders import Collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.errors import ArgumentError
from unshard.tools import PrecisionReport, precision
from unshard.tools.precision_plan import Row


def report_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> PrecisionReport:
    return precision(model, optimizer, file=io.StringIO())


def dtypes(row: Row) -> tuple[torch.dtype | None, ...]:
    return (row.stored, row.gathered, row.computed, row.wire, row.reduced, row.kept, row.grad, row.updated)


def line(report: PrecisionReport, begin: str, table: int = 0) -> list[str]:
    """The cells of the line of a table that begins like this."""
    found = [each for each in str(report).splitlines() if each.startswith(begin)]
    return [cell.strip() for cell in found[table].split("  ") if cell.strip()]


# --- the table ---------------------------------------------------------------------------------------------------


@world(3)
def test_report_of_nested_policies() -> None:
    """Overrides, frozen and integer parameters, another policy on the root; before and after the first forward."""
    model = Model()
    model.tokens.weight.requires_grad_(False)
    model.steps = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    inner = MixedPrecisionPolicy(B16, F32, wire_dtype=B16, overrides={"norm.*": F32}, full_precision_in_eval=True)
    for block in model.blocks:
        fully_shard(block, mp_policy=inner)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(F64, output_dtype=F32, cast_forward_inputs=False))
    model.head.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    with Collectives() as calls:
        report = report_of(model)
    assert not calls.calls
    rows = {(row.unit, row.names): row for row in report.rows}
    assert len(rows) == 3 + 2 * 3
    integers, frozen = rows["", ("steps",)], rows["", ("tokens.weight",)]
    assert dtypes(integers) == (torch.int64,) * 3 + (None,) * 5 and not integers.state
    assert dtypes(frozen) == (F32, F64, F64) + (None,) * 5 and not frozen.trainable
    assert dtypes(rows["", ("head.weight", "head.bias")]) == (F32, F64, F64, F64, F64, F64, F32, F32)
    for number in range(3):
        norm, rest = (row for row in report.rows if row.unit == f"blocks.{number}")
        assert norm.names == (f"blocks.{number}.norm.weight", f"blocks.{number}.norm.bias") and norm.elements == 16
        assert dtypes(norm) == (F32,) * 8 and norm.state == (F32,) and not norm.state_exists
        assert rest.parameters == 4 and rest.elements == 8 * 16 * 2 + 16 + 8
        assert dtypes(rest) == (F32, B16, B16, B16, F32, F32, F32, F32)
    text = str(report)
    assert text.startswith("Precision of 4 units, 22 parameters, 1,023 elements; gradients are reduced over ")
    assert line(report, "blocks") == ["blocks.0 … blocks.2 (3 units)", "2", "16"] + ["fp32"] * 8 + ["fp32*"]
    assert line(report, "blocks", 1)[1:] == ["bf16", "not cast", "-", "-", "as stored (fp32)"]
    assert line(report, "  norm")[:3] == ["norm", "fp32", "bf16"]
    assert line(report, "(root)")[1:6] == ["1", "96", "fp32", "fp64", "fp64"]
    assert ["1", "3", *["int64"] * 3, *["-"] * 4, "frozen", "-"] in [each.split() for each in text.splitlines()]
    assert line(report, "(root)", 1) == ["(root)", "not cast", "fp32", "fp32", "fp32", "the same"]
    with torch.no_grad():
        model(batch())  # names of units and slots change with the first forward
    assert str(report_of(model)) == text


@world(2)
def test_report_of_buffers_and_optimizers() -> None:
    model = sharded(MixedPrecisionPolicy(B16, F32, output_dtype=F32, buffer_dtype=B16))
    assert line(report_of(model), "(root)", 1)[3:5] == ["fp32", "bf16+fp32"]
    optimizer = torch.optim.Adam(model.parameters())
    assert all(row.state == (F32,) and not row.state_exists for row in report_of(model, optimizer).rows)
    model(batch()).sum().backward()
    optimizer.step()
    report = report_of(model, optimizer)
    assert all(row.state == (F32,) and row.state_exists for row in report.rows) and len(report.rows) == 4
    assert not report.surprises and "No surprises." in str(report) and "fp32*" not in str(report)


@world(2)
def test_report_on_meta() -> None:
    with torch.device("meta"):
        model = Model()
    report = report_of(sharded(model=model))
    plain = report_of(sharded())
    assert str(report) == str(plain) and len(report.rows) == 4


@world(4)
def test_report_of_tensor_parallel_parameters() -> None:
    """Elements are the whole model's; gradients are reduced over the data-parallel ranks only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    report = report_of(sharded(model=model, mesh=mesh["dp"]))
    assert "reduced over 2 ranks" in str(report)
    assert [(row.parameters, row.elements) for row in report.rows if row.unit == "blocks.1"] == [(6, 296)]
    assert {dtypes(row) for row in report.rows} == {(F32, B16, B16) + (F32,) * 5}


@world(2)
def test_rank_0_prints() -> None:
    model = sharded()
    out = io.StringIO()
    report = precision(model, file=out)
    assert out.getvalue() == (f"{report}\n" if dist.get_rank() == 0 else "")
    assert "\n\n" in str(report) and len(report.rows) == 4


@world(1)
def test_models_that_are_not_sharded() -> None:
    for wrong in (nn.Linear(2, 2), "model"):
        with pytest.raises(ArgumentError, match=r"sharded model|fully_shard was applied"):
            precision(wrong)
    wrapper = nn.Sequential(nn.Tanh(), fully_shard(nn.Linear(4, 4), mp_policy=QUIET))
    assert [row.unit for row in report_of(wrapper).rows] == ["1"]


@world(2)
def test_units_of_several_modules_and_none() -> None:
    model = Model()
    fully_shard([model.tokens, model.head], mp_policy=QUIET)
    for block in model.blocks:
        fully_shard(block, mp_policy=QUIET)
    report = report_of(fully_shard(model, mp_policy=QUIET))
    assert line(report, "(root)")[1:4] == ["0", "0", "-"]
    assert line(report, "tokens, head")[1:4] == ["3", "132", "fp32"]
    assert not report.surprises


# --- surprises ---------------------------------------------------------------------------------------------------


def only(report: PrecisionReport, *parts: str) -> None:
    """One surprise, with these words in it, and in the text."""
    assert len(report.surprises) == 1, report.surprises
    assert all(part in report.surprises[0] for part in parts), report.surprises
    assert f"- {report.surprises[0]}" in str(report).splitlines()


POLICIES: list[tuple[dict[str, object], tuple[str, ...]]] = [
    ({}, ()),
    ({"param_dtype": F16}, ("fp16", "(root)", "GradScaler")),
    ({"reduce_dtype": F16}, ("fp16", "GradScaler")),
    (
        {"param_dtype": None, "reduce_dtype": B16},
        ("tokens.weight", "computed in fp32", "reduced in bf16", "reduce_dtype"),
    ),
    ({"param_dtype": None, "wire_dtype": B16}, ("tokens.weight", "wire_dtype rounds them to bf16")),
    ({"wire_dtype": B16}, ()),
    ({"output_dtype": None}, ("(root)", "returns bf16", "output_dtype=torch.float32")),
    ({"output_dtype": F16}, ("(root)", "returns fp16")),
    ({"overrides": {"*norm*": F32}}, ()),
    (
        {"overrides": {"*norm*": F32, "blocks.*": F32}},
        ("'blocks.*'", "overrides", "matches no parameter", "'(root)', "),
    ),
    ({"overrides": {"up.bias": F32}}, ("'blocks.0', 'blocks.1'", "'up.bias' in fp32", "module 'up'", "'up.*'")),
    ({"overrides": {"up.bias": B16}}, ()),
    ({"buffer_dtype": B16}, ()),
    ({"buffer_dtype": B16, "keep_buffers": ()}, ()),  # the rotary table is kept all the same
    ({"buffer_dtype": B16, "keep_buffers": ("inv*", "nix")}, ("'nix'", "keep_buffers", "no floating-point buffer")),
    ({"keep_buffers": ("scale",)}, ("'scale'", "no effect", "buffer_dtype")),
    ({"param_dtype": F64, "reduce_dtype": None}, ()),
]


@world(1)
def test_what_policies_surprise_with() -> None:
    """Each of these has one surprise; those without words have none."""
    for change, parts in POLICIES:
        policy = MixedPrecisionPolicy(**({"param_dtype": B16, "reduce_dtype": F32, "output_dtype": F32} | change))
        report = report_of(sharded(policy))
        assert len(report.surprises) == bool(parts), (change, report.surprises)
        only(report, *parts) if parts else none(report)


def none(report: PrecisionReport) -> None:
    assert not report.surprises and "No surprises." in str(report), report.surprises


@world(2)
def test_parameters_stored_in_16_bits() -> None:
    """A model that was converted before it was sharded learns in 16 bits, whatever the policy says."""
    model = sharded()
    model.head.to(B16)  # not through the root: the unit has not looked yet
    only(report_of(model), "Parameters 'head.weight', 'head.bias'", "stored in bf16", "param_dtype=torch.bfloat16")
    model.head.weight.requires_grad_(False)
    only(report_of(model), "Parameter 'head.bias'")
    model.head.float()
    none(report_of(model))


@world(1)
def test_doubles_by_accident() -> None:
    model = Model()
    model.blocks[1].norm.bias = nn.Parameter(torch.zeros(8, dtype=F64))
    model.scale = model.scale.double()
    report = report_of(sharded(model=model))
    assert len(report.surprises) == 2 and all("fp64" in each for each in report.surprises)
    assert "'blocks.1.norm.bias'" in report.surprises[0] and "Buffers 'scale'" in report.surprises[1]


@world(2)
def test_buffers_that_a_conversion_rounded() -> None:
    """Known from when they were sharded, by copies, too; one in 16 bits from the start only if it is a table."""
    model = sharded()
    model.blocks[0].register_buffer("late", torch.ones(3, dtype=B16))
    none(report_of(model))
    for each in (model, copy.deepcopy(model)):
        each.to(B16).float()
        none(report_of(each))  # its digits are lost, but no dtype tells
        each.to(B16)
        mended, rounded = report_of(each).surprises, "Buffers 'inv_freq', 'scale': fp32 when they were sharded and bf16"
        assert len(mended) == 2 and mended[1].startswith(rounded) and "recompute the buffers" in mended[1]
    born = Model()
    born.inv_freq, born.scale = born.inv_freq.to(B16), born.scale.to(B16)
    only(report_of(sharded(model=born)), "'inv_freq'", "stored in bf16", "fp32")


@world(1)
def test_tables_and_statistics_that_forward_sees_rounded() -> None:
    model = Model()
    model.register_buffer("freqs", torch.ones(3))
    policy = MixedPrecisionPolicy(B16, F32, F32, buffer_dtype=B16)
    only(report_of(sharded(policy, model)), "'freqs'", "sees them in bf16", "keep_buffers")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fully_shard(model, mp_policy=policy)
    only(report_of(model), "'1.running_mean', '1.running_var' add up in bf16", "overrides")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(B16, F32, F32, buffer_dtype=B16, overrides={"1.*": F32}))
    none(report_of(model))
    for wrong in (3, "x", [torch.optim.SGD(model.parameters())]):
        with pytest.raises(ArgumentError, match=r"one torch\.optim\.Optimizer"):
            precision(model, wrong)


@world(2)
def test_parameters_in_no_unit() -> None:
    model = Model()
    ignored = {model.head.bias}
    sharded(model=model, ignored_params=ignored)
    model.blocks[1].register_parameter("extra", nn.Parameter(torch.zeros(3)))
    model.alias = model.tokens.weight  # a second name is no second parameter
    only(report_of(model), "'blocks.1.extra'", "head.bias", "not reduced", "ignored_params")
    model.head.bias.requires_grad_(False)
    del model.blocks[1].extra
    none(report_of(model))
    model.unshard()
    none(report_of(model))
    assert all(row.stored == F32 for row in report_of(model).rows)


@world(2)
def test_optimizers_of_other_parameters() -> None:
    model = Model()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded(model=model)
    only(report_of(model, early), "SGD holds 21 parameters", "as they were before sharding", "after fully_shard")
    none(report_of(model))
    none(report_of(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    model.unshard()
    gathered = torch.optim.SGD(model.head.parameters(), lr=0.1)
    model.reshard()
    only(report_of(model, gathered), "SGD holds 2 parameters", "'head.weight', 'head.bias'")


@world(2)
def test_narrow_optimizer_state() -> None:
    model = sharded()
    for kind, parts in ((torch.optim.SGD, ()), (Narrow, ("momentum_buffer", "bf16", "tokens.weight"))):
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        none(report_of(model, optimizer))
        model(batch()).sum().backward()
        optimizer.step()
        only(report_of(model, optimizer), *parts) if parts else none(report_of(model, optimizer))
        assert all(row.state == ((B16,) if parts else (F32,)) for row in report_of(model, optimizer).rows)


def test_sums_in_16_bits_over_many_ranks() -> None:
    for size, policy, surprised in ((16, B16, True), (8, B16, False), (16, F32, False)):
        with loopback.job(size):
            report = report_of(sharded(MixedPrecisionPolicy(B16, policy, output_dtype=F32)))
        assert f"over {size} ranks" in str(report)
        only(report, "16 bits over 16 ranks", "(root)", "reduce_dtype") if surprised else none(report)


@world(1)
def test_full_precision_in_eval_of_some_units() -> None:
    model = Model()
    full = MixedPrecisionPolicy(B16, F32, output_dtype=F32, full_precision_in_eval=True)
    for block in model.blocks:
        fully_shard(block, mp_policy=QUIET)
    only(report_of(fully_shard(model, mp_policy=full)), "full_precision_in_eval", "'(root)'")
    none(report_of(sharded(full)))
