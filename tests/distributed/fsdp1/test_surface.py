"""What a wrapped module looks like and offers: attributes, small methods, internals (contract C4, C7, C11)."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import weakref
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import models, world
from bed.models import CASES
from bed.recorders import Collectives
from bed.wrapped import full_gradients, full_parameters, wrap, wrap_case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from unshard import FlatParameter, MixedPrecision, ShardingStrategy
from unshard import FullyShardedDataParallel as FSDP
from unshard.fsdp1.state import _get_fsdp_handles, _get_fsdp_states, _get_fsdp_states_with_modules
from unshard.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

S = ShardingStrategy
half = torch.float16
flat_or_originals = pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
strategies = pytest.mark.parametrize(
    "strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda each: each.name
)


def small(originals: bool = False, **options: Any) -> FSDP:
    """Two units, the root's with two layers of 2 x 15 elements."""
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    module = nn.Sequential(nn.Linear(2, 5), inner, nn.Linear(5, 3))
    module.register_buffer("table", torch.ones(3))
    return wrap(module, [inner], use_orig_params=originals, **options)


@world(2)
def test_f1_43_f1_45_attributes_are_forwarded() -> None:
    model = small()
    assert isinstance(model.module, nn.Sequential) and model._fsdp_wrapped_module is model.module
    assert model[0] is model.module[0]
    assert model[2].out_features == 3 and model[1].module[0].in_features == 5
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = model.nonsense
    inner = model[1]
    assert FSDP.fsdp_modules(model) == [model, inner]
    assert model._is_root is None
    model(torch.ones(1, 2))
    assert model.check_is_root() and not inner.check_is_root()
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert FSDP.fsdp_modules(nn.Sequential(model)) == [model, inner]


@world(2)
def test_f1_44_names() -> None:
    w = "_fsdp_wrapped_module."
    model = small()
    assert [n for n, _ in model.named_parameters()] == [f"{w}_flat_param", f"{w}1.{w}_flat_param"]
    assert [n for n, _ in model.named_buffers()] == [f"{w}table"]
    with FSDP.summon_full_params(model):
        names = [n for n, _ in model.named_parameters()]
        assert names == ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.weight", "2.bias"]
        assert [n for n, _ in model.named_buffers()] == ["table"]
    model = small(originals=True)
    assert [n for n, _ in model.named_parameters()][:3] == [f"{w}0.weight", f"{w}0.bias", f"{w}1.{w}0.weight"]


@flat_or_originals
@world(2, 3)
def test_f1_46_apply_sees_full_parameters(originals: bool) -> None:
    model = small(originals)

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
            with torch.no_grad():
                module.weight.fill_(module.in_features)

    assert model.apply(fill) is model
    found = full_parameters(model)
    assert found["0.weight"].unique().tolist() == [2.0] and found["1.0.weight"].unique().tolist() == [5.0]
    with FSDP.summon_full_params(model), pytest.raises(RuntimeError, match="summon_full_params"):
        model.apply(fill)


@flat_or_originals
@world(2)
def test_f1_47_f1_48_conversion(originals: bool) -> None:
    """`.half()` before and after the first forward, and back."""
    model = small(originals)
    expected = {name: each.half() for name, each in full_parameters(model).items()}
    model.half()
    assert all(each.dtype == half for each in model.parameters())
    for name, each in full_parameters(model).items():
        assert torch.equal(each, expected[name])
    model(torch.ones(1, 2, dtype=half)).sum().backward()
    assert all(each.grad is None or each.grad.dtype == half for each in model.parameters())
    model.float()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert all(each.grad is None or each.grad.dtype == torch.float32 for each in model.parameters())
    assert [handle._orig_param_dtype for handle in _get_fsdp_handles(model)] == [torch.float32] * 2


@world(4)
def test_f1_50_f1_52_original_parameters_are_rows_of_the_shard() -> None:
    """F1-50, F1-52, F1-55: 15, 5, 15 and 3 elements in 44, 11 on each rank; the objects stay the same."""
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    before = list(module.parameters())
    model = FSDP(module, use_orig_params=True)
    flat = model.params[0]
    assert flat._numels == (15, 5, 15, 3) and flat._numels_with_padding == (15, 1, 5, 3, 15, 1, 3, 1)
    assert flat._sharded_size == (11,) and flat._unpadded_unsharded_size == flat._padded_unsharded_size == (44,)
    lengths = [list(each.shape) for each in model.parameters()]
    expected = [[[11], [0], [0], [0]], [[4], [5], [0], [0]], [[0], [0], [9], [0]], [[0], [0], [6], [3]]]
    assert lengths == expected[dist.get_rank()]
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    base = flat._local_shard.untyped_storage().data_ptr()
    for each in model.parameters():
        assert not each.numel() or base <= each.data_ptr() < base + 44
    model(torch.ones(1, 3)).sum().backward()
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    for each in model.parameters():
        assert (each.grad is None) == (each.numel() == 0), "F1-64"
        assert each.grad is None or each.grad.shape == each.shape


@world(4)
def test_f1_51_flat_parameters() -> None:
    model = FSDP(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)))
    flat = model.params[0]
    assert flat._numels == (15, 5, 15, 3) == flat._numels_with_padding
    assert (flat._unpadded_unsharded_size, flat._padded_unsharded_size, flat._sharded_size) == ((38,), (40,), (10,))
    assert flat._shard_numel_padded == (2 if dist.get_rank() == 3 else 0)
    assert flat._fqns == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert flat._shapes == ((5, 3), (5,), (3, 5), (3,))
    assert [info.param_name for info in flat._param_infos] == ["weight", "bias"] * 2
    assert isinstance(flat, FlatParameter) and type(flat) is nn.Parameter, "FI-02"
    assert not isinstance(nn.Parameter(torch.ones(1)), FlatParameter)
    assert next(model.parameters()) is flat


@flat_or_originals
@world(2)
def test_fi_01_fi_10_handles_and_attributes(originals: bool) -> None:
    model = small(originals, mixed_precision=MixedPrecision(param_dtype=half))
    handles = _get_fsdp_handles(model)
    assert handles == [model._handle, model[1]._handle] == model._all_handles
    assert _get_fsdp_states(model) == _get_fsdp_states_with_modules(model)[0]
    assert _get_fsdp_states_with_modules(model)[1] == [model, model[1]]
    for handle in handles:
        flat = handle.flat_param
        assert flat.data_ptr() == flat._local_shard.data_ptr(), "FI-05"
        assert flat._mp_shard.untyped_storage().size() == 0 == flat._full_param_padded.untyped_storage().size()
        assert handle._fwd_bwd_param_dtype == handle._reduce_dtype == half
    assert [unit.params for unit in FSDP.fsdp_modules(model)] == [[handle.flat_param] for handle in handles]
    seen = []

    def look(module: nn.Module, args: Any) -> None:
        flat = model.params[0]
        seen.append((flat.data_ptr() != flat._local_shard.data_ptr(), flat.dtype, model.training_state.name))

    model.module.register_forward_pre_hook(look)
    model(torch.ones(1, 2)).sum().backward()
    assert seen == [(True, half, "FORWARD_BACKWARD")] and model.training_state.name == "IDLE"
    assert (model.world_size, model.rank, model.process_group) == (2, dist.get_rank(), dist.group.WORLD)
    assert (model._gradient_predivide_factor, model._gradient_postdivide_factor) == (2.0, 1.0)
    assert model._inter_node_pg is None and model.compute_device == torch.device("cpu")


@flat_or_originals
@strategies
@world(1, 2, 3)
def test_f1_76_f1_79_summon_full_params(strategy: S, originals: bool) -> None:
    """Whole, in the original dtype; edits are kept, or not; the next forward sees them."""
    options = {"sharding_strategy": strategy, "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    model = small(originals, **options)
    x = torch.ones(1, 2)
    before = model(x)  # the root stays gathered
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        for parameter in model.parameters():
            assert parameter.dtype == torch.float32
            parameter.add_(1.0)
    cut = dist.get_world_size() > 1 and strategy is not S.NO_SHARD
    assert torch.equal(model(x), before) == cut, "writeback=False; what is not cut has no other place"
    before = model(x)
    with FSDP.summon_full_params(model), torch.no_grad():
        assert model.training_state.name == "SUMMON_FULL_PARAMS"
        model.module[0].weight.add_(1.0)
        model.module[1].module[0].weight = nn.Parameter(torch.zeros(5, 5))
        model.module[2].bias.data = torch.full((3,), 9.0)
    found = full_parameters(model)
    assert found["1.0.weight"].count_nonzero() == 0 and found["2.bias"].tolist() == [9.0] * 3
    assert not torch.equal(model(x), before), "F1-68, D-13: nothing stale"
    with FSDP.summon_full_params(model, recurse=False):
        inside = dict(model.named_parameters())
        assert inside["0.weight"].shape == (5, 2)
        rest = sum(each.numel() for name, each in inside.items() if name.startswith("1."))
        assert rest <= 30 + 2 or dist.get_world_size() == 1
    model(x).sum().backward()


@flat_or_originals
@world(2)
def test_f1_77_f1_78_f1_80_refusals_of_summon(originals: bool) -> None:
    model = small(originals)
    with pytest.raises(NotImplementedError, match="rank0_only"), FSDP.summon_full_params(model, rank0_only=True):
        pass
    if not originals:
        with pytest.raises(NotImplementedError, match="with_grads"), FSDP.summon_full_params(model, with_grads=True):
            pass
    with FSDP.summon_full_params(model), pytest.raises(AssertionError, match="nested"):
        with FSDP.summon_full_params(model):
            pass
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        shape = next(model.parameters()).shape
        assert (shape == (5, 2)) == (dist.get_rank() == 0)
    no_shard = small(originals, sharding_strategy=S.NO_SHARD)
    with pytest.raises(NotImplementedError, match="NO_SHARD"):
        with FSDP.summon_full_params(no_shard, writeback=False, rank0_only=True, offload_to_cpu=True):
            pass
    with pytest.warns(UserWarning, match="on every rank"):
        with FSDP.summon_full_params(model, offload_to_cpu=True):
            pass
    seen = []

    def inside(module: nn.Module, args: Any) -> None:
        with pytest.raises(AssertionError, match="computing"), FSDP.summon_full_params(model):
            pass
        seen.append(True)

    model.module.register_forward_pre_hook(inside)
    model(torch.ones(1, 2))
    assert seen
    with FSDP.summon_full_params(nn.Sequential(model)):  # a module that only contains wrapped ones
        assert model.module[0].weight.shape == (5, 2)
    with FSDP.summon_full_params(nn.Linear(2, 2)):
        pass


@world(1, 2, 3)
def test_f1_76_gradients_of_summoned_parameters() -> None:
    case = CASES[1]
    reference, model = case.build(), wrap_case(case, use_orig_params=True)
    with FSDP.summon_full_params(model, with_grads=True):
        assert all(each.grad is None for each in model.parameters())
    batch = case.batch(0)
    case.loss(reference, batch).backward()
    case.loss(model, models.shard(batch, dist.get_rank(), dist.get_world_size())).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
            parameter.grad.mul_(2.0)
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, 2 * reference.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@flat_or_originals
@strategies
@world(1, 2, 3)
def test_f1_83_f1_84_clipping(strategy: S, originals: bool) -> None:
    """The norm of the unsharded model's gradients, for several orders, and what is left of them."""
    case = CASES[1]
    for order, limit in itertools.product((2.0, 1.0, float("inf")), (0.01, 1e6)):
        reference, model = case.build(), wrap_case(case, sharding_strategy=strategy, use_orig_params=originals)
        batch = case.batch(0)
        case.loss(reference, batch).backward()
        case.loss(model, models.shard(batch, dist.get_rank(), dist.get_world_size())).backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit, order)
        torch.testing.assert_close(model.clip_grad_norm_(limit, order), expected, rtol=1e-5, atol=1e-6)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-7)
    with pytest.raises(RuntimeError, match="outermost"):
        model.module.layers[0].clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="outermost"), model.module.layers[0].no_sync():
        pass


@world(2)
def test_f1_83_dtypes_and_ranks_without_gradients() -> None:
    """F1-83: half where all gradients are half; a rank without any takes part, with a warning."""
    config = MixedPrecision(half, half, keep_low_precision_grads=True)
    model = FSDP(nn.Linear(4, 4), mixed_precision=config)
    model(torch.ones(1, 4)).sum().backward()
    assert model.clip_grad_norm_(1.0).dtype == half
    model = FSDP(nn.Linear(1, 2, bias=False), use_orig_params=True)
    model(torch.ones(1, 1)).sum().backward()  # two elements, padded: on rank 0 and 1
    model = FSDP(nn.Linear(1, 1, bias=False), use_orig_params=True)
    model(torch.ones(1, 1)).sum().backward()
    if dist.get_rank() == 0:
        assert model.clip_grad_norm_(10.0).item() == pytest.approx(1.0)
    else:
        with pytest.warns(UserWarning, match="no gradients"):
            assert model.clip_grad_norm_(10.0).item() == pytest.approx(1.0)


@world(2, 3)
def test_f1_64_what_parameters_look_like_when() -> None:
    """With the original parameters: after forward unsharded where they are kept for backward, else and later rows."""
    for strategy, whole in ((S.FULL_SHARD, False), (S.SHARD_GRAD_OP, True)):
        model = small(originals=True, sharding_strategy=strategy)
        output = model(torch.ones(1, 2))
        for parameter in (model[0].weight, model[1].module[0].weight):
            assert (parameter.ndim == 2) == whole, strategy
        output.sum().backward()
        for parameter in model.parameters():
            assert parameter.ndim == 1
            assert (parameter.grad is None) == (parameter.numel() == 0)


@flat_or_originals
@world(2)
def test_f1_81_f1_82_unsynchronised_gradients_are_seen_and_cleared(originals: bool) -> None:
    """Whole, local, in the compute dtype; an optimizer's `zero_grad` clears them."""
    config = MixedPrecision(param_dtype=half, reduce_dtype=torch.float32)
    model = small(originals, mixed_precision=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((1, 2), float(dist.get_rank() + 1))
    for _ in range(2):
        with model.no_sync():
            model(x).sum().backward()
        sizes = {tuple(each.grad.shape) for each in model.parameters()}
        assert sizes == ({(33,), (30,)} if not originals else {(5, 2), (5,), (3, 5), (3,), (5, 5)})
        assert {each.grad.dtype for each in model.parameters()} == {half}
        optimizer.zero_grad()
        assert all(each.grad is None for each in model.parameters())
    model(x).sum().backward()
    once = full_gradients(model)
    assert all(each.dtype == torch.float32 for each in once.values())
    optimizer.zero_grad()
    for _ in range(2):
        with model.no_sync():
            model(x).sum().backward()
    model(x).sum().backward()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, 3 * once[name], rtol=1e-2, atol=1e-3)
    optimizer.step()


@flat_or_originals
@strategies
@world(2, 3)
def test_fi_11_a_reduce_scatter_that_is_replaced(originals: bool, strategy: S) -> None:
    """A program that puts its own function in the place of torch's sees every reduction, and may change it."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    original, seen = getattr(dist, name), []

    def noting(output: torch.Tensor, whole: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append((output.dtype, whole.dtype, whole.numel() // output.numel()))
        return original(output, whole, *args, **options)

    precision = MixedPrecision(reduce_dtype=torch.float64)
    gradients = []
    for replaced in (False, True):
        model = small(originals, sharding_strategy=strategy, mixed_precision=precision)
        x = torch.full((2, 2), 1.0 + dist.get_rank())
        for _ in range(2):
            with mock.patch.object(dist, name, noting) if replaced else nullcontext():
                model(x).square().sum().backward()
        gradients.append(full_gradients(model))
    assert seen == ([] if strategy is S.NO_SHARD else [(torch.float64, torch.float64, dist.get_world_size())] * 4)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@world(4)
def test_cm_50_cm_51_cm_52_collectives() -> None:
    """What is sent by three units, root included, in forward, backward and without synchronising."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    x = torch.ones(1, 4)
    for strategy, fwd, bwd, silent in (
        (S.FULL_SHARD, (3, 0, 0), (2, 3, 0), (3, 2)),
        (S.SHARD_GRAD_OP, (3, 0, 0), (0, 3, 0), (0, 0)),
        (S.NO_SHARD, (0, 0, 0), (0, 0, 3), (0, 0)),
        (S.HYBRID_SHARD, (3, 0, 0), (2, 3, 3), (3, 2)),
        (S._HYBRID_SHARD_ZERO2, (3, 0, 0), (0, 3, 3), (0, 0)),
    ):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        options: dict[str, Any] = {"sharding_strategy": strategy}
        if "HYBRID" in strategy.name:
            options["device_mesh"] = mesh
        model = wrap(module, [module[1], module[2]], **options)

        def counted(run: Any) -> tuple[Any, tuple[int, int, int]]:
            with Collectives() as seen:
                result = run()
            return result, tuple(len(seen.of(kind)) for kind in ("gather", "reduce_scatter", "all_reduce"))

        for _ in range(2):
            loss, found = counted(lambda model=model: model(x).sum())
            assert found == fwd, (strategy, "forward", found)
            _, found = counted(loss.backward)
            assert found == bwd, (strategy, "backward", found)
        with model.no_sync():
            model(x).sum().backward()
            loss, found = counted(lambda model=model: model(x).sum())
            assert found == (silent[0], 0, 0), (strategy, "silent forward", found)
            _, found = counted(loss.backward)
            assert found == (silent[1], 0, 0), (strategy, "silent backward", found)


@flat_or_originals
@world(2)
def test_f1_71_several_forwards_and_unused_outputs(originals: bool) -> None:
    torch.manual_seed(3)
    model = small(originals)
    reference = nn.Sequential(nn.Linear(2, 5), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 3))
    reference.load_state_dict({name: each for name, each in model.state_dict().items() if name != "table"})
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    for net in (model, reference):
        (net(x).sum() + net(2 * x).square().sum()).backward()
        net(x)
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


@flat_or_originals
@world(2)
def test_f1_68_what_is_kept_does_not_go_stale(originals: bool) -> None:
    """After a forward without backward the root stays gathered; an optimizer's step, or a write, is seen."""
    model = small(originals)
    x = torch.ones(1, 2)
    model(x).sum().backward()
    first = model(x)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert not torch.equal(model(x), first)
    second = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert not torch.equal(model(x), second)


@world(2)
def test_f1_75_parameters_that_were_given_other_memory() -> None:
    model = small(originals=True)
    x = torch.ones(1, 2)
    before = model(x)
    before.sum().backward()
    weight = model[0].weight
    weight.data = torch.zeros_like(weight)
    after = model(x)
    assert not torch.equal(after, before)
    after.sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert not weight.numel() or weight.count_nonzero(), "the optimizer writes to what is gathered"
    weight.data = torch.zeros(weight.numel() + 1)
    with pytest.raises(RuntimeError, match="elements of it"):
        model(x)


@flat_or_originals
@world(2)
def test_a_model_is_freed_at_once(originals: bool) -> None:
    """No cycle keeps it until the garbage collector comes."""
    model = small(originals)
    model(torch.ones(1, 2)).sum().backward()
    gone = [weakref.ref(model), weakref.ref(model.module), weakref.ref(model._state.unit)]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [each() for each in gone] == [None] * 3
    finally:
        gc.enable()


@world(2)
def test_a_model_that_a_policy_wrapped_is_freed_at_once() -> None:
    """Nor does the walk over its modules."""
    gc.collect()
    gc.disable()
    try:
        model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        sized = functools.partial(size_based_auto_wrap_policy, min_num_params=5)
        other = FSDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), auto_wrap_policy=sized)
        gone = [weakref.ref(each) for root in (model, other) for each in root.modules()]
        del model, other
        assert len(gone) == 12 and not any(each() is not None for each in gone)
    finally:
        gc.enable()


@flat_or_originals
@world(2)
def test_memory_at_rest_and_unsharded(originals: bool) -> None:
    """ME-30, ME-31: a shard at rest; unsharded buffers empty; placeholders and views take nothing."""
    model = small(originals)
    model(torch.ones(1, 2)).sum().backward()
    for handle in _get_fsdp_handles(model):
        flat = handle.flat_param
        assert flat.untyped_storage().nbytes() >= flat._sharded_size[0] * 4
        assert flat._full_param_padded.untyped_storage().size() == 0
        assert flat.numel() == flat._sharded_size[0] == flat.grad.numel()
    if not originals:
        placeholder = model.module[0].weight
        assert placeholder.shape == (5, 2) and placeholder.untyped_storage().nbytes() == 4
        assert "weight" not in dict(model.module[0].named_parameters())


@world(2)
def test_f1_73_a_step_inside_backward() -> None:
    """Hooks on the original parameters run when their gradients are there."""
    model = small(originals=True)
    steps = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters() if each.numel()}

    def step(parameter: torch.Tensor) -> None:
        steps[parameter].step()
        steps[parameter].zero_grad()

    for each in steps:
        each.register_post_accumulate_grad_hook(step)
    before = full_parameters(model)
    reference = copy.deepcopy(before)
    model(torch.ones(1, 2)).sum().backward()
    assert all(each.grad is None for each in model.parameters())
    after = full_parameters(model)
    assert any(not torch.equal(after[name], reference[name]) for name in after)


class Several(nn.Module):
    """Layers of the kinds that reach their weights in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.recurrent, self.attention = nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2)
        self.conv, self.head = nn.Conv1d(3, 3, 1), nn.Linear(4, 4, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.recurrent(self.norm(self.embed(tokens)))
        return self.generate(self.conv(self.attention(x, x, x)[0]))

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def check_errors_of_sharded_parameters(model: FSDP, tokens: torch.Tensor, x: torch.Tensor) -> None:
    inside = model.module
    for call, name in (
        (lambda: inside(tokens), "embed.weight"),
        (lambda: model.generate(x), "head.weight"),
        (lambda: inside.norm(x), "norm"),
        (lambda: inside.recurrent(x), "recurrent"),
        (lambda: inside.attention(x, x, x), "attention"),
        (lambda: inside.conv(x), "conv"),
        (lambda: inside.head.weight + 1, "head.weight"),
        (lambda: x @ inside.head.weight, "head.weight"),
        (lambda: inside.head.weight.sum(), "head.weight"),
        (lambda: inside.head.weight.data.tolist(), "head.weight"),
        (lambda: torch.stack([x[0, 0], inside.norm.bias]), "norm.bias"),
        (lambda: copy.deepcopy(inside.head), "head.weight"),
    ):
        with pytest.raises(RuntimeError, match=f"Parameter '{name}.*model.module.*summon_full_params"):
            call()
    weight = inside.head.weight
    assert isinstance(weight, torch.Tensor) and "PlaceholderParam" in repr(weight) and len(weight) == 4
    assert weight.shape == weight.size() == (4, 4) and weight.dtype == torch.float32 and weight.ndim == 2
    assert weight.device.type == "cpu" and weight.is_floating_point() and weight.numel() == 16
    assert not weight.requires_grad and weight.grad is None and weight.detach().shape == (4, 4)
    assert weight in {weight} and not weight.is_cuda and weight.data.dtype == torch.float32


@pytest.mark.filterwarnings("ignore")
@world(2)
def test_parameters_used_past_the_wrapper() -> None:
    """A flat unit at rest: to compute with its parameters is an error that names them and the remedy."""
    model = FSDP(Several())
    tokens, x = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, 4)
    check_errors_of_sharded_parameters(model, tokens, x)
    with torch.no_grad():
        model(tokens)
    check_errors_of_sharded_parameters(model, tokens, x)
    model(tokens).sum().backward()
    check_errors_of_sharded_parameters(model, tokens, x)
    model.double().float()
    check_errors_of_sharded_parameters(model, tokens, x)
    with FSDP.summon_full_params(model):
        assert model.module(tokens).isfinite().all() and model.generate(x).isfinite().all()
    check_errors_of_sharded_parameters(model, tokens, x)


@flat_or_originals
@world(1, 2)
@pytest.mark.filterwarnings("ignore")
def test_f1_76_names_below_a_root_without_parameters(originals: bool) -> None:
    """Original names, as the peer has them, although there is nothing to gather for the root itself."""
    model = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2), use_orig_params=originals)), use_orig_params=originals)
    with FSDP.summon_full_params(model):
        assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
        assert model.training_state.name == "SUMMON_FULL_PARAMS"
    assert model.training_state.name == "IDLE"
    assert all("_fsdp_wrapped_module" in name for name, _ in model.named_parameters())
