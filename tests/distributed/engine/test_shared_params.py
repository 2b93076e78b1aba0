"""Parameters that modules of different units share: one unit owns them, the others use them."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bed import world
from bed.late import late_host
from bed.models import shard
from bed.parity import assert_close, train
from bed.recorders import Collectives
from bed.stack import assert_at_rest, assert_gradients, units
from bed.tied_units import shard_tied, sharded_tied, tie, tied_case, untied
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from unshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from unshard.errors import ArgumentError, UnsupportedError
from unshard.optim import GradScaler, clip_grad_norm_, flat

HOST = CPUOffloadPolicy(pin_memory=False)
ORDERS = ("tokens head", "head tokens", "tokens", "head")
B16, F32 = torch.bfloat16, torch.float32


def local_loss(model: nn.Module, step: int) -> torch.Tensor:
    case = tied_case()
    return case.loss(model, shard(case.batch(step), dist.get_rank(), dist.get_world_size()))


def whole_loss(model: nn.Module, step: int) -> torch.Tensor:
    return tied_case().loss(model, tied_case().batch(step))


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [None, "setattr", "register", "dict"])
@world(1, 2, 3, 4)
def test_parity(after: str | None) -> None:
    """SHP-02: every owner, tied before and after sharding; even and uneven rows; kept, resharded and offloaded."""
    kinds = [(False, {}), (True, {"reshard_after_forward": True}), (False, {"reshard_after_forward": False})]
    for order, (even, options) in zip(ORDERS, [*kinds, (True, {"offload_policy": HOST})], strict=True):
        case = tied_case(even)
        model = sharded_tied(order, after, even, **options)
        assert model.head.weight is model.tokens.weight
        record = train(model, case, 3, rank=dist.get_rank(), size=dist.get_world_size())
        assert_close(record, train(case.build(), case, 3))
        assert model.head.weight is model.tokens.weight
        assert len(list(model.parameters())) == sum(len(unit.params) for unit in units(model)) == 6
        assert_at_rest(model)


@pytest.mark.parametrize("in_eval", [False, True])
@world(2, 3)
def test_mixed_precision_is_that_of_one_unit(in_eval: bool) -> None:
    """Bit by bit what both modules in one unit give, with evaluation in between."""
    policy = MixedPrecisionPolicy(B16, F32, full_precision_in_eval=in_eval)
    for order, options in zip(ORDERS, [{}, {"reshard_after_forward": True}, {"offload_policy": HOST}, {}], strict=True):
        one = tied_case().build()
        for part in ([one.tokens, one.head], *one.hidden, one):
            fully_shard(part, mp_policy=policy, **options)
        outputs: list[list[torch.Tensor]] = []
        for model in (sharded_tied(order, "setattr", mp_policy=policy, **options), one):
            optimizer = torch.optim.SGD(model.parameters(), 0.5)
            outputs.append([])
            for step in range(2):
                local_loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                model.eval()
                with torch.no_grad():
                    outputs[-1].append(model(tied_case().batch(step)[0]))
                model.train()
            outputs[-1] += [each.detach().full_tensor() for each in model.parameters()]
        for mine, theirs in zip(*outputs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


# -- what a program may do between forward and backward ----------------------------------------------------------


def _several_forwards(model: nn.Module) -> None:
    losses = [whole_loss(model, step) for step in range(3)]
    sum(losses[1:], losses[0]).backward()


def _several_backwards(model: nn.Module) -> None:
    for loss in [whole_loss(model, step) for step in range(2)]:
        loss.backward()


def _accumulate(model: nn.Module) -> None:
    for step in range(3):
        if fully_shard.state(model):
            model.set_requires_gradient_sync(step == 2)
        whole_loss(model, step).backward()


def _evaluate_in_between(model: nn.Module) -> None:
    whole_loss(model, 0).backward()
    with torch.no_grad():
        model(tied_case().batch(0)[0])
    whole_loss(model, 1)  # no backward follows
    whole_loss(model, 2).backward()


def _recompute(reentrant: bool, model: nn.Module) -> None:
    def begin(tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(model.hidden[0](model.tokens(tokens)))

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        x = begin(tokens) if reentrant else checkpoint(begin, tokens, use_reentrant=False)
        x = x + checkpoint(model.hidden[1], x, use_reentrant=reentrant)
        return checkpoint(model.head, x, use_reentrant=reentrant)

    model.forward = forward
    for step in range(2):
        whole_loss(model, step).backward()


def _one_at_a_time(model: nn.Module) -> None:
    model.forward = lambda tokens: model.tokens(tokens).square()
    model(tied_case().batch(0)[0]).sum().backward()
    model.forward = lambda tokens: model.head(F.one_hot(tokens % 16, 16).float()).square()
    model(tied_case().batch(1)[0]).sum().backward()
    del model.forward
    whole_loss(model, 2).backward()


def _prefetch(model: nn.Module) -> None:
    if fully_shard.state(model.tokens) and fully_shard.state(model.head):
        model.tokens.set_modules_to_forward_prefetch([model.head, model.hidden[0]])
        model.head.set_modules_to_backward_prefetch([model.tokens, model.hidden[1]])
    for step in range(2):
        whole_loss(model, step).backward()


def _keep(model: nn.Module) -> None:
    """Kept after backward, and written to in between: the next forward has to gather again."""
    if fully_shard.state(model):
        model.set_reshard_after_backward(False)
    for step in range(2):
        whole_loss(model, step).backward()
        if fully_shard.state(model):
            for module in [each for each in model.modules() if fully_shard.state(each)]:
                module.reshard() if step else None
        with torch.no_grad():
            parameter = next(iter(model.parameters())) if not fully_shard.state(model) else _sharded_tokens(model)
            parameter.mul_(0.5)


def _sharded_tokens(model: nn.Module) -> nn.Parameter:
    return next(
        p.sharded for unit in units(model) for p in unit.params if p.name == "tokens.weight" or p.name == "head.weight"
    )


PROGRAMS: dict[str, Callable[[nn.Module], None]] = {
    "several forwards": _several_forwards,
    "several backwards": _several_backwards,
    "accumulate": _accumulate,
    "evaluate": _evaluate_in_between,
    "recompute": partial(_recompute, False),
    "recompute, reentrant": partial(_recompute, True),
    "one at a time": _one_at_a_time,
    "prefetch": _prefetch,
    "keep": _keep,
}


@pytest.mark.parametrize("program", PROGRAMS)
@world(2, 3)
def test_programs(program: str) -> None:
    """The gradients of the unsharded model, whichever module owns the weight."""
    for order, after in zip(ORDERS, (None, "setattr", None, "dict"), strict=True):
        for options in ({}, {"reshard_after_forward": True}):
            model, reference = sharded_tied(order, after, **options), tied_case().build()
            for each in (model, reference):
                PROGRAMS[program](each)
            for module in [each for each in model.modules() if fully_shard.state(each)]:
                module.reshard()
            assert_gradients(model, reference, rtol=1e-4, atol=1e-6)
            assert model.head.weight is model.tokens.weight
            assert_at_rest(model)


class _Oops(Exception):
    pass


def _fail(*unused: object) -> None:
    raise _Oops


@world(2)
def test_after_exceptions() -> None:
    """In forward inside both modules, and in backward between them."""
    for order in ORDERS:
        model, reference = sharded_tied(order), tied_case().build()
        for where in (model.tokens, model.head):
            hook = where.register_forward_hook(_fail)
            with pytest.raises(_Oops):
                whole_loss(model, 0)
            hook.remove()
        hook = model.hidden[0].register_full_backward_hook(_fail)
        with pytest.raises(_Oops):
            whole_loss(model, 0).backward()
        hook.remove()
        assert_at_rest(model)
        for each in (model, reference):
            each.zero_grad()
            whole_loss(each, 1).backward()
        assert_gradients(model, reference, rtol=1e-4, atol=1e-6)


@world(2)
def test_collectives() -> None:
    """A use is one all-gather, as of any unit, and each backward reduces the weight once, after its last use."""
    weight = tied_case().build().tokens.weight.numel()
    for order, reduce_unused in product(("tokens head", "head tokens"), (False, True)):
        model = sharded_tied(order, reshard_after_forward=True)
        model.set_reduce_scatter_unused_params(reduce_unused)
        for step in range(3):
            with Collectives() as calls:
                whole_loss(model, step).backward()
            gathers = [call for call in calls.of("gather") if call.bytes_out >= 4 * weight]
            reductions = [call for call in calls.of("reduce_scatter") if call.bytes_in >= 4 * weight // 2]
            assert (len(gathers), len(reductions)) == (4, 1)
    kept = sharded_tied(reshard_after_forward=False)
    with Collectives() as calls:
        whole_loss(kept, 0).backward()
    assert len([call for call in calls.of("gather") if call.bytes_out >= 4 * weight]) == 1


# -- state dicts, optimizers, copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("after", [None, "setattr"])
@world(1, 2, 3)
def test_state_dicts(after: str | None) -> None:
    """Both names are saved and loaded, before and after the first forward; optimizer state is there once."""
    reference = tied_case().build()
    full = reference.state_dict()
    for order in ORDERS:
        saved = sharded_tied(order, after)
        state = saved.state_dict()
        assert list(state) == list(full)
        for name, value in state.items():
            torch.testing.assert_close(value.full_tensor(), full[name], rtol=0, atol=0)
        local_loss(saved, 0).backward()
        optimizer = torch.optim.Adam(saved.parameters(), 0.1)
        optimizer.step()
        state, optim_state = get_state_dict(saved, optimizer)
        assert set(state) == set(full)
        assert sum(name in optim_state["state"] for name in ("tokens.weight", "head.weight")) == 1
        state, optim_state = copy.deepcopy(state), copy.deepcopy(optim_state)
        other = sharded_tied(ORDERS[1], after)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        resumed = torch.optim.Adam(other.parameters(), 0.1)
        result = set_state_dict(other, resumed, model_state_dict=state, optim_state_dict=optim_state)
        assert not result.missing_keys and not result.unexpected_keys
        for model, each in ((saved, optimizer), (other, resumed)):
            each.zero_grad()
            local_loss(model, 1).backward()
            each.step()
        for mine, theirs in zip(other.parameters(), saved.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor(), rtol=0, atol=0)
        mesh = other.head.bias.device_mesh
        for assign in (False, True):
            sharded = {name: distribute_tensor(value.clone(), mesh, (Shard(0),)) for name, value in full.items()}
            other.load_state_dict(sharded, strict=True, assign=assign)
            whole_loss(other, 0)
            torch.testing.assert_close(other.tokens.weight.full_tensor(), full["tokens.weight"], rtol=0, atol=0)
            assert other.head.weight is other.tokens.weight


@world(2)
def test_clipping_scaling_and_flat_optimizers() -> None:
    """The weight counts once, in norms and in scaling; the steps are those of the unsharded model."""
    for is_flat, order in ((False, "head tokens"), (True, "head tokens"), (True, "tokens")):
        model, reference = sharded_tied(order, "setattr"), tied_case().build()
        made = [torch.optim.AdamW(each.parameters(), 1e-2, fused=True) for each in (model, reference)]
        made[0] = flat(made[0]) if is_flat else made[0]
        for step in range(3):
            norms = []
            for each, optimizer in zip((model, reference), made, strict=True):
                scaler = GradScaler("cpu", init_scale=8.0)
                optimizer.zero_grad()
                scaler.scale(whole_loss(each, step)).backward()
                scaler.unscale_(optimizer)
                clip = clip_grad_norm_ if each is model else nn.utils.clip_grad_norm_
                norms.append(torch.as_tensor(clip(each.parameters(), 0.1)))
                scaler.step(optimizer)
            torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-4, atol=1e-5)


@world(2)
def test_steps_in_backward() -> None:
    """The same numbers as without."""
    for order in ("tokens head", "head tokens"):
        results = []
        for ahead in (False, True):
            with late_host():
                model = sharded_tied(order, "setattr", offload_policy=HOST)
                optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
                optimizer = flat(optimizer, step_in_backward=ahead)
                for step in range(4):
                    local_loss(model, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            results.append([each.detach().to_local().clone() for each in model.parameters()])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@world(2)
def test_what_the_head_had_is_dropped() -> None:
    """Its memory is freed, and an optimizer that still holds it is told."""
    model = shard_tied(untied(tied_case().build()))
    early = torch.optim.SGD(model.parameters(), 0.1)
    former = weakref.ref(model.head.weight.to_local().untyped_storage())
    tie(model)
    for step in range(2):
        whole_loss(model, step).backward()
        if step == 0:
            with pytest.warns(UserWarning, match=r"'head.weight' is 'tokens.weight' of unit 'tokens' now.*after tying"):
                early.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        early.step()
    del early
    gc.collect()
    assert former() is None
    assert [param.name for param in units(model)[-1].params] == ["head.bias"]


@world(2)
def test_ties_after_the_first_step() -> None:
    """Both units have run; one becomes the owner of the other's parameter, which an optimizer may have, too."""
    for how in ("setattr", "dict"):
        model, reference = shard_tied(untied(tied_case().build())), tied_case().build()
        whole_loss(model, 0).backward()
        model.zero_grad()
        tie(model, how)
        for each in (model, reference):
            optimizer = torch.optim.SGD(each.parameters(), 0.1)
            for step in range(2):
                optimizer.zero_grad()
                whole_loss(each, step).backward()
                optimizer.step()
        assert_gradients(model, reference, rtol=1e-4, atol=1e-6)
        assert_at_rest(model)


@world(2)
def test_meta_copies_and_deletion() -> None:
    reference = tied_case().build()
    with torch.device("meta"):
        model = tied_case().build()
    shard_tied(model)
    model.to_empty(device="cpu")
    mesh = model.head.bias.device_mesh
    full = {name: distribute_tensor(value, mesh, (Shard(0),)) for name, value in reference.state_dict().items()}
    model.load_state_dict(full)
    whole_loss(model, 0)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.tokens.weight is not model.tokens.weight
    for each in (model, twin, reference):
        whole_loss(each, 0).backward()
    for each in (model, twin):
        assert_gradients(each, reference, rtol=1e-4, atol=1e-6)
    assert copy.deepcopy(model.tokens).weight is not model.tokens.weight
    with pytest.raises(UnsupportedError, match=r"'head'.*without.*'tokens'"):
        copy.deepcopy(model.head)
    gc.disable()
    try:
        alive = [weakref.ref(unit) for unit in (*units(model), *units(twin))]
        del model, twin, each
        assert len(alive) == 10 and all(ref() is None for ref in alive)
    finally:
        gc.enable()


# -- refusals ----------------------------------------------------------------------------------------------------


@world(4)
def test_refusals() -> None:
    """Before the first step, with both units and the parameter."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policies = [{"mp_policy": MixedPrecisionPolicy(param_dtype=each)} for each in (B16, None)]
    for first, second in (policies, ({}, {"mesh": grid})):
        model = tied_case().build()
        fully_shard(model.tokens, **first)
        with pytest.raises(ArgumentError, match=r"'weight' \(unit 'Embedding'\).*'weight' \(unit 'Linear'\)"):
            fully_shard(model.head, **second)
        late = untied(tied_case().build())
        fully_shard(late.tokens, **first)
        fully_shard(late.head, **second)
        fully_shard(late)
        tie(late)
        with pytest.raises(ArgumentError, match=r"'tokens.weight' \(unit 'tokens'\).*'head.weight' \(unit 'head'\)"):
            whole_loss(late, 0)
    apart = tied_case().build()
    fully_shard(apart.tokens)
    fully_shard(apart.head)
    with pytest.raises(ArgumentError, match=r"Units '\(root\)' and 'Linear' share parameters \(weight\)"):
        apart.tokens(tied_case().batch(0)[0])
