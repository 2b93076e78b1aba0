"""What a policy can say beyond PyTorch's: overrides by name, buffers, full precision in eval, a narrow wire."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.models import CASES
from bed.parity import check_parity, each_unit
from bed.recorders import Collectives
from bed.stack import assert_at_rest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from unshard import MixedPrecisionPolicy, ReduceScatter, fully_shard
from unshard.engine.params import module_casts
from unshard.errors import ConflictError, OrderError

F32, F16, B16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


class Block(nn.Module):
    """A norm and a router that want full precision, between layers that do not."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.router = nn.Sequential(nn.Linear(2 * width, 5), nn.Tanh(), nn.Linear(5, 2 * width))
        self.down = nn.Linear(2 * width, width)
        self.seen: dict[str, torch.dtype] = {}
        for name in ("norm", "up", "router", "router.0", "router.2", "down"):
            self.get_submodule(name).register_forward_hook(self._see(name))

    def _see(self, name: str):
        def hook(module: nn.Module, args, output: torch.Tensor) -> None:
            self.seen[name] = next(module.parameters()).dtype
            self.seen[f"{name} in"], self.seen[f"{name} out"] = args[0].dtype, output.dtype

        return hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.norm(x))
        return self.down(x * self.router(x))


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """What the library warns of, even if it did so before in this process."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    module_casts._warn_once.cache_clear()
    logging.getLogger("unshard").addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger("unshard").removeHandler(handler)


def block() -> Block:
    torch.manual_seed(0)
    return Block()


def batch(rank: int | None = None) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(7 if rank is None else rank))


OVERRIDES = {"*norm*": F32, "router.*": F32}


# --- overrides ---------------------------------------------------------------------------------------------------


@world(2, 3)
def test_overrides_by_name() -> None:
    """Parameters that match are gathered, computed and reduced in their own dtype, in the same gather."""
    model = block()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(B16, overrides=OVERRIDES))
    with Collectives() as calls:
        out = model(batch())
        out.sum().backward()
    seen = model.seen
    assert {name: seen[name] for name in ("norm", "router.0", "router.2")} == dict.fromkeys(
        ("norm", "router.0", "router.2"), F32
    )
    assert seen["up"] == seen["down"] == B16
    # The router is one module: cast at its doors only, not between its layers.
    assert (seen["router in"], seen["router.0 out"], seen["router.2 in"]) == (F32, F32, F32)
    assert not model.router[2]._forward_pre_hooks and len(model.router._forward_pre_hooks) == 1
    assert seen["router.0 in"] == seen["norm in"] == F32
    assert seen["up in"] == seen["down in"] == out.dtype == B16
    assert [call.kind for call in calls.calls] == ["gather", "reduce_scatter", "reduce_scatter"]
    assert [call.dtypes for call in calls.calls[1:]] == [{F32}, {B16}]  # an exchange takes one tensor
    assert all(parameter.dtype == parameter.grad.dtype == F32 for parameter in model.parameters())


@world(2)
def test_patterns_mean_what_they_look_like() -> None:
    """A dot in front of a name at the top, a wrapper inside it, members of a list, and everything."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = block()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(B16, overrides={"*.router.*": F32}))
    model(batch())
    assert (model.seen["router.0"], model.seen["norm"]) == (F32, B16)
    inner = block()
    wrapped = checkpoint_wrapper(inner)
    fully_shard(wrapped, mp_policy=MixedPrecisionPolicy(B16, overrides={"norm*": F32}))
    wrapped(batch())
    assert (inner.seen["norm"], inner.seen["up"]) == (F32, B16)
    listed = block()
    fully_shard([listed.norm, listed.up], mp_policy=MixedPrecisionPolicy(B16, overrides={"0.*": F32}))
    fully_shard(listed, mp_policy=MixedPrecisionPolicy(B16))
    listed(batch())
    assert (listed.seen["norm"], listed.seen["up"]) == (F32, B16)


@world(2)
def test_an_override_of_everything_is_the_units_own() -> None:
    """Inputs are not rounded on their way, and nothing is cast in between."""
    model, plain = block(), block()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(B16, overrides={"*": F32}))
    out = model(batch())
    assert out.dtype == B16 and torch.equal(out, plain(batch()).to(B16))
    assert set(model.seen.values()) == {F32}
    linear = fully_shard(nn.Linear(8, 8), mp_policy=MixedPrecisionPolicy(B16, overrides={"*": F32}))
    assert linear(batch()).dtype == B16


@world(2)
def test_overrides_without_a_param_dtype() -> None:
    """Outputs return to what the rest is stored in."""
    model = block().to(B16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(overrides={"router.*": F32}))
    out = model(batch().to(B16))
    assert (model.seen["router"], model.seen["down in"], out.dtype) == (F32, B16, B16)


@world(2, 3)
def test_overrides_compute_what_an_unsharded_model_would() -> None:
    model = block()
    reference = copy.deepcopy(model)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(B16, F32, overrides=OVERRIDES))
    for part in (reference.up, reference.down):
        part.to(B16)
    for part in (reference.norm, reference.router):
        part.register_forward_pre_hook(lambda module, args: (args[0].float(),))
        part.register_forward_hook(lambda module, args, output: output.to(B16))
    gradients: dict[str, torch.Tensor] = {}
    for rank in range(dist.get_world_size()):
        reference.zero_grad()
        reference(batch(rank).to(B16)).float().square().sum().backward()
        for name, parameter in reference.named_parameters():
            gradients[name] = gradients.get(name, 0) + parameter.grad.float() / dist.get_world_size()
    model(batch(dist.get_rank())).float().square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), gradients[name], rtol=1e-5, atol=1e-7, msg=name)


@world(2)
def test_an_override_may_be_a_policy() -> None:
    """And the first pattern that matches counts; a module of mixed parameters is not cast at its door."""
    model = block()
    own = MixedPrecisionPolicy(F64, F32, cast_forward_inputs=False)
    overrides = {"norm.*": MixedPrecisionPolicy(F64), "router.2.*": F16, "*.bias": F32, "router.0.*": own}
    fully_shard(model, mp_policy=MixedPrecisionPolicy(B16, overrides=overrides))
    state = fully_shard.state(model)
    dtypes = {
        param.name: state.unit.param_groups[0].sharded.shard.segments.dtypes(index)
        for index, param in enumerate(state.unit.param_groups[0].params)
    }
    assert (dtypes["router.2.weight"].compute, dtypes["router.2.bias"].compute) == (F16, F16)
    assert (dtypes["up.bias"].compute, dtypes["router.0.bias"].compute) == (F32, F32)
    assert (dtypes["router.0.weight"].compute, dtypes["router.0.weight"].reduce) == (F64, F32)
    with pytest.raises(RuntimeError, match="dtype"):
        model(batch())
    assert model.seen["norm in"] == model.seen["norm out"] == F64  # a policy without output_dtype returns what it has
    assert_at_rest(model)


@world(2)
def test_overrides_with_an_explicit_reduction() -> None:
    """A reduce_dtype of its own counts for all parameters; one equal to param_dtype only means "as they come"."""
    for policy, expected in (
        (MixedPrecisionPolicy(B16, B16, overrides=OVERRIDES), F32),
        (MixedPrecisionPolicy(F16, B16, overrides=OVERRIDES), B16),
    ):
        model = fully_shard(block(), mp_policy=policy)
        kinds = fully_shard.state(model).unit.param_groups[0].sharded.shard.segments.kinds
        assert {kind.reduce for kind in kinds if kind.compute == F32} == {expected}


@world(2)
def test_overrides_survive_copies_and_checkpointing() -> None:
    model = fully_shard(block(), mp_policy=MixedPrecisionPolicy(B16, F32, overrides=OVERRIDES))
    twin = copy.deepcopy(model)
    expected = model(batch())
    model.seen, twin.seen = {}, {}
    torch.testing.assert_close(twin(batch()), expected, rtol=0, atol=0)
    assert twin.norm._forward_pre_hooks and twin.seen == {} != model.seen  # the hooks that look belong to the first
    outer = fully_shard(nn.Sequential(block()), mp_policy=MixedPrecisionPolicy(B16, F32, overrides=OVERRIDES))
    first: dict[str, torch.dtype] = {}
    x = batch().requires_grad_()
    out = checkpoint(outer, x, use_reentrant=False)
    first, outer[0].seen = outer[0].seen, {}
    out.float().sum().backward()
    assert first and {name: first[name] for name in outer[0].seen} == outer[0].seen


# --- buffers -----------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("scale", torch.tensor([0.3]))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("absent", None)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: buffer.dtype for name, buffer in self.named_buffers()}
        self.steps += 1
        if x.isnan().any():
            raise ValueError("not a number")
        return self.norm(self.linear((x * self.scale * self.inv_freq).to(x.dtype)))


@world(2)
def test_buffers_are_cast_for_forward_only() -> None:
    """Stored buffers keep dtype and digits; a rotary table is not rounded, and others not without a word."""
    torch.manual_seed(0)
    model = Rotary()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with warnings_logged() as records:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(B16, buffer_dtype=B16))
    if dist.get_rank() == 0:
        rounded, norms = records
        assert "rounds scale of Rotary" in rounded and "keep_buffers" in rounded
        assert "accumulates the statistics of norm" in norms and "overrides" in norms
    assert dist.get_rank() == 0 or not records
    stored = model.scale
    for _ in range(2):
        model(torch.randn(5, 4)).sum().backward()
    assert model.seen["scale"] == model.seen["norm.running_mean"] == B16
    assert (model.seen["inv_freq"], model.seen["steps"]) == (F32, torch.int64)
    assert model.scale is stored and {b.dtype for b in model.buffers()} == {F32, torch.int64}
    assert torch.equal(model.scale, before["scale"]) and torch.equal(model.inv_freq, before["inv_freq"])
    # What forward writes is kept, rounded as the user asked.
    assert model.steps == 2 and not torch.equal(model.norm.running_mean, before["norm.running_mean"])
    assert torch.equal(model.norm.running_mean, model.norm.running_mean.to(B16).float())
    assert model.state_dict()["scale"].dtype == F32
    with pytest.raises(ValueError, match="not a number"):
        model(torch.full((5, 4), torch.nan))
    assert model.scale is stored
    model.scale.fill_(0.7)  # a write between forwards is seen
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.eval()
        out = each(torch.ones(5, 4))
        assert each.seen["scale"] == B16
    assert not torch.equal(out, torch.zeros_like(out)) and twin.scale.dtype == F32
    with torch.inference_mode():
        model(torch.ones(5, 4))
    model.train()(torch.randn(5, 4)).sum().backward()


@world(1, 2)
def test_other_buffers_can_be_kept() -> None:
    model = Rotary()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(B16, buffer_dtype=B16, keep_buffers=["sc*"]))
    model(torch.randn(5, 4))
    assert (model.seen["scale"], model.seen["inv_freq"], model.seen["norm.running_var"]) == (F32, F32, B16)
    assert model.inv_freq.dtype == F32


class Writes(nn.Module):
    """Writes to its buffers in the ways that modules do."""

    def __init__(self, how: str):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how
        self.register_buffer("count", torch.full((1,), 256.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            self.count += 2
        elif self.how == "data":
            self.count.data = self.count.data + 2
        elif self.how == "replaced":
            self.count = self.count + 2
        else:
            self.count.resize_(2).fill_(258.0)
        return self.linear(x)


@pytest.mark.parametrize("how", ["in place", "data", "replaced", "resized"])
@world(1)
def test_what_forward_writes_is_kept(how: str) -> None:
    model = Writes(how)
    with warnings_logged() as records:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(B16, buffer_dtype=B16))
        for step in range(2):
            model(torch.randn(2, 4))
            expected = 258.0 if how == "resized" else 258.0 + 2 * step
            assert model.count.dtype == F32 and model.count[0] == expected
    assert any("writes to buffer 'count'" in record for record in records) is (how in ("in place", "data", "resized"))


@world(2)
def test_buffers_of_overridden_modules_are_theirs() -> None:
    """A batch norm in fp32 inside a bf16 unit: its statistics are those of the unsharded model, to the last digit."""
    policy = MixedPrecisionPolicy(B16, F32, buffer_dtype=B16, overrides={"1.*": F32})
    model, norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.01)), nn.BatchNorm1d(4, momentum=0.01)

    def beside(module: nn.Module, args: object, output: torch.Tensor) -> None:
        norm(output.float())

    model[0].register_forward_hook(beside)
    with warnings_logged() as records:
        fully_shard(model, mp_policy=policy)
    for step in range(20):
        model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step)) + 3)
    assert torch.equal(model[1].running_mean, norm.running_mean) and norm.running_mean.any()
    assert not records


# --- full precision in eval --------------------------------------------------------------------------------------


# Computed in fp64, because not every CPU multiplies larger matrices in bf16 without complaint.


@pytest.mark.parametrize("reshard", [True, False, 2])
@world(2, 4)
def test_full_precision_in_eval(reshard: bool | int) -> None:
    """In eval the very numbers of the unsharded model; back in training the policy's. Both can wait for backward."""
    case = CASES[0]
    model, plain = case.build(), case.build()
    full = MixedPrecisionPolicy(F64, F32, output_dtype=F32, full_precision_in_eval=True, overrides=OVERRIDES)
    if dist.get_world_size() == 2 and reshard == 2:
        pytest.skip("the whole group: nothing to slice")
    each_unit(case, fully_shard, mp_policy=full, reshard_after_forward=reshard)(model)
    inputs, _ = case.batch(0)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(inputs), plain(inputs), rtol=0, atol=0)
    rounded = model.train()(inputs)
    assert not torch.equal(rounded, plain(inputs))
    lower = case.build()
    each_unit(case, fully_shard, mp_policy=MixedPrecisionPolicy(F64, F32, F32, overrides=OVERRIDES))(lower)
    assert torch.equal(rounded, lower(inputs))
    # A validation between forward and backward does not disturb the graph.
    with torch.no_grad():
        assert torch.equal(model.eval()(inputs), plain(inputs))
    model.train()
    rounded.square().mean().backward()
    lower(inputs).square().mean().backward()
    for mine, theirs in zip(model.parameters(), lower.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor(), rtol=0, atol=0)
    assert_at_rest(model)


@world(2, 3)
def test_backward_in_eval_and_through_both_precisions() -> None:
    case = CASES[0]
    model, plain = case.build(), case.build()
    policy = MixedPrecisionPolicy(F64, B16, full_precision_in_eval=True)
    each_unit(case, fully_shard, mp_policy=policy)(model)
    inputs, _ = case.batch(0)
    model.eval()(inputs).square().mean().backward()
    plain(inputs).square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        # Reduced in bf16, as the policy says: one rounding; a mean of three rounds again.
        rtol = 0 if dist.get_world_size() == 2 else 2**-6
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.to(B16).float(), rtol=rtol, atol=0)
    model.zero_grad()
    trained, evaluated = model.train()(inputs), model.eval()(inputs)
    (trained - 2 * evaluated.double()).square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        found = mine.grad.full_tensor()  # (t - 2e)^2 is about e^2, its gradient that of e^2
        error = (found - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.1, error
    assert_at_rest(model)
    check_parity(
        case, each_unit(case, fully_shard, mp_policy=MixedPrecisionPolicy(full_precision_in_eval=True)), steps=2
    )


@world(2)
def test_a_change_of_mode_gathers_nothing_twice() -> None:
    case = CASES[0]
    model = case.build()
    each_unit(case, fully_shard, mp_policy=MixedPrecisionPolicy(F64, full_precision_in_eval=True))(model)
    inputs, _ = case.batch(0)
    with torch.no_grad():
        for mode in (True, True, False, False, True):
            with Collectives() as calls:
                model.train(mode)(inputs)
            assert [call.dtypes for call in calls.calls] == [{F64 if mode else F32}] * len(case.units(model))


@world(2)
def test_ranks_in_different_modes_raise() -> None:
    model = fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(B16, full_precision_in_eval=True))
    model.train(dist.get_rank() == 0)
    with pytest.raises(OrderError, match=r"as it is stored \(eval\)"):
        model(torch.randn(3, 4))


@world(2)
def test_inputs_in_eval() -> None:
    model = fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(B16, full_precision_in_eval=True)).eval()
    assert model(torch.randn(3, 4, dtype=B16)).dtype == F32
    assert model.train()(torch.randn(3, 4)).dtype == B16
    with Collectives() as calls:
        model.eval().unshard()
        model(torch.randn(3, 4))
    assert [call.dtypes for call in calls.calls] == [{F32}]


# --- the wire ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
@world(2, 3, 4)
def test_narrow_wire_wide_sum(replicas: int) -> None:
    """bf16 gradients sent as they are and added up in fp32: the numbers of an fp32 reduction for half the bytes."""
    size = dist.get_world_size()
    if size % replicas or size == replicas:
        pytest.skip("no such mesh")
    mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("r", "s")) if replicas > 1 else None
    sent, gradients = [], []
    for wire in (None, B16):
        model = block()
        policy = MixedPrecisionPolicy(B16, F32, wire_dtype=wire)
        fully_shard(model.up, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        with Collectives() as calls:
            model(batch(dist.get_rank())).sum().backward()
        sent.append(sum(call.bytes_in for call in calls.of("reduce_scatter")))
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])
        assert_at_rest(model)
    assert sent[1] * 2 == sent[0] > 0
    for narrow, wide in zip(*gradients, strict=True):
        torch.testing.assert_close(narrow, wide, rtol=1e-6, atol=1e-7)


@world(4)
def test_a_narrow_wire_does_not_round_the_sum() -> None:
    """256 + 1 + 1 + 1 is 259 in fp32, which bf16 does not have."""
    for policy, exact in (
        (MixedPrecisionPolicy(B16, F32, wire_dtype=B16), True),
        (MixedPrecisionPolicy(None, F32, wire_dtype=B16), True),
        (MixedPrecisionPolicy(B16), False),
    ):
        model = fully_shard(nn.Linear(1, 4, bias=False), mp_policy=policy)
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1)
        model(torch.tensor([[256.0 if dist.get_rank() == 0 else 1.0]])).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 1), 259.0)) is exact


@world(2)
def test_a_wire_with_overrides_and_accumulation() -> None:
    model, plain = block(), block()
    policy = MixedPrecisionPolicy(None, F32, wire_dtype=B16, overrides={"norm.*": F32})
    fully_shard(model, mp_policy=policy)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        model(batch(step)).sum().backward()
        plain(batch(step)).sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        expected = theirs.grad if name.startswith("norm") else theirs.grad.to(B16).float()
        torch.testing.assert_close(mine.grad.full_tensor(), expected, rtol=0, atol=0, msg=name)


class Own(ReduceScatter):
    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


@world(2)
def test_a_users_reduce_scatter_has_no_wire() -> None:
    model = fully_shard(block(), mp_policy=MixedPrecisionPolicy(B16, F32, wire_dtype=B16))
    with pytest.raises(ConflictError, match="wire_dtype"):
        model.set_custom_reduce_scatter(Own())
