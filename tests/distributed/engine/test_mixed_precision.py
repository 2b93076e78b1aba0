"""The casts that belong to the buffers, against a model that performs the same casts without sharding."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.recorders import Collectives
from torch import nn
from torch.distributed.tensor import DTensor

from unshard import MixedPrecisionPolicy, fully_shard

F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16


class Net(nn.Module):
    """Small enough for bf16 on any CPU; one weight is above the packing threshold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.table = nn.Parameter(torch.randn(5500, 6) / 6)
        self.last = nn.Linear(6, 3)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.seen = {"input": x.dtype, "weight": self.first.weight.dtype, "rows": rows.dtype}
        x = x.to(self.first.weight.dtype)
        return self.last(self.table[rows] * x).sum(0) + self.first(x).sum()


_net = functools.cache(Net)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(5)
    return torch.randn(4, 6, generator=dice), torch.randint(5500, (4,), generator=dice)


ORIGINAL, PARAM, REDUCE = (F32, B16, F16), (None, F32, B16, F16), (None, F32, B16, F16)


@pytest.mark.parametrize("original", ORIGINAL)
@pytest.mark.parametrize("param", PARAM)
@world(2)
def test_dtype_of_every_tensor(original: torch.dtype, param: torch.dtype | None) -> None:
    """The table MPT-01 to MPT-48 of the contract, four rows at a time, and the numbers that follow from it."""
    for reduce in REDUCE:
        _check_row(original, param, reduce)


def _check_row(original: torch.dtype, param: torch.dtype | None, reduce: torch.dtype | None) -> None:
    model = copy.deepcopy(_net()).to(original)
    compute = param or original
    reference = copy.deepcopy(model).to(compute)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce))
    x, rows = inputs()
    with Collectives() as calls:
        out = model(x, rows)
        out.sum().backward()
    # Without a param_dtype inputs are not cast; the model does it then.
    assert model.seen == {"input": param or F32, "weight": compute, "rows": torch.int64}
    assert out.dtype == compute
    gather, reduction = calls.calls
    assert (gather.kind, gather.dtypes) == ("gather", {compute})
    assert (reduction.kind, reduction.dtypes) == ("reduce_scatter", {reduce or compute})
    expected = reference(x.to(compute), rows)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    expected.sum().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.dtype == mine.grad.dtype == original
        # Both ranks saw the same batch: the mean is the gradient itself, cast to the reduce dtype and back.
        summed = theirs.grad.to(reduce or compute)
        torch.testing.assert_close(mine.grad.full_tensor(), summed.to(original), rtol=0, atol=0)
    model.set_requires_gradient_sync(False)
    model(x, rows).sum().backward()
    kept = fully_shard.state(model).unit.param_groups[0].gradients.unreduced.sums()
    assert len(kept) == 5 and {each.dtype for each in kept.values()} == {reduce or compute}


def test_reduction_of_every_row() -> None:
    """The column of the reductions in the table MPT-01 to MPT-48: only fp16 is summed and divided by hand."""
    rows = list(itertools.product(ORIGINAL, PARAM, REDUCE))
    assert len(rows) == 48
    with loopback.job(2) as group:
        for original, param, reduce in rows:
            model = nn.Linear(2, 2, bias=False, dtype=original)
            fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce))
            group.log.clear()
            model(torch.ones(1, 2, dtype=param or original)).sum().backward()
            (call,) = [call for call in group.log if call.kind == "reduce_scatter"]
            wire = reduce or param or original
            assert (call.dtypes, call.reduce) == ({wire}, "SUM" if wire == F16 else "AVG"), (original, param, reduce)


@world(2, 3)
def test_master_weights_keep_their_precision() -> None:
    """Small updates that bf16 would swallow add up in the fp32 master shard."""
    model = fully_shard(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=B16, reduce_dtype=F32))
    start, values = model.table.full_tensor().clone(), []
    optimizer = torch.optim.SGD([model.table], lr=1e-5)
    for _ in range(20):
        model(*inputs()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(model.table.full_tensor().clone())
    first, last = values[0] - start, values[-1] - start
    changed = first != 0
    assert last.dtype == F32 and changed.any()
    assert torch.equal(values[0].bfloat16(), start.bfloat16())  # one update is too small for bf16
    torch.testing.assert_close(last[changed], 20 * first[changed], rtol=0.05, atol=0)


@world(2)
def test_nested_policies_and_output_dtype() -> None:
    """Contract MP-03, MP-14, MP-20, MP-21, MP-24, MP-26."""
    seen = []
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(param_dtype=F16, output_dtype=F32))
    fully_shard(model[1], mp_policy=MixedPrecisionPolicy(param_dtype=B16))
    fully_shard(model[2], mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    fully_shard(model)
    out = model(torch.randn(3, 6))
    assert seen == [(F16, F16), (B16, B16), (torch.float64, torch.float64)]
    assert out.dtype == torch.float64
    out.sum().backward()
    assert all(parameter.grad.dtype == F32 for parameter in model.parameters())
    loose = fully_shard(nn.Linear(6, 6), mp_policy=MixedPrecisionPolicy(param_dtype=B16, cast_forward_inputs=False))
    with pytest.raises(RuntimeError, match=r"dtype"):
        loose(torch.randn(3, 6))
    assert loose(torch.randn(3, 6, dtype=B16)).dtype == B16


@world(2)
def test_unsynchronised_accumulation_in_the_reduce_dtype() -> None:
    """Contract MP-11, MP-12: bf16 gradients 256 and 1 add up to 256 in bf16 and to 257 in fp32."""
    for reduce, synchronise, expected in ((None, False, 256.0), (F32, False, 257.0), (None, True, 257.0)):
        model = nn.Linear(1, 1, bias=False)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=B16, reduce_dtype=reduce))
        model.set_requires_gradient_sync(synchronise)
        model(torch.tensor([[256.0]])).sum().backward()
        assert (model.weight.grad is not None) == synchronise
        model.set_requires_gradient_sync(True)
        model(torch.tensor([[1.0]])).sum().backward()
        assert isinstance(model.weight.grad, DTensor) and model.weight.grad.dtype == F32
        assert model.weight.grad.full_tensor().item() == expected, (reduce, synchronise)


@world(3)
def test_half_precision_sums_do_not_overflow() -> None:
    """Contract DIV-02: fp16 is divided before and after, so that a sum of large gradients stays finite."""
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=F16))
    scale = 40000.0 if dist.get_rank() < 2 else 1000.0
    model(torch.tensor([[scale]])).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor().item(), 27000.0, rtol=1e-3, atol=0)
