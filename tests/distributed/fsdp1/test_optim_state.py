"""Optimizer state of wrapped models by original names, of all kinds, at other numbers of ranks (contract C9)."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import models, world
from bed.models import CASES, Case
from bed.wrapped import full_parameters, wrap, wrap_case
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from unshard import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from unshard import FullyShardedDataParallel as FSDP

S = ShardingStrategy
UNSHARDED, LOCAL, SHARDED = StateDictType
quiet = pytest.mark.filterwarnings("ignore")
flat_or_originals = pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(case: Case, steps: int = 2, **options: Any) -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrap_case(case, **options)
    optimizer = adam(model)
    run(model, optimizer, case, range(steps))
    return model, optimizer


def run(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, steps: Any) -> None:
    for step in steps:
        batch = case.batch(step)
        if isinstance(model, FSDP):
            batch = models.shard(batch, dist.get_rank(), dist.get_world_size())
        case.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def reference(case: Case, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = case.build()
    optimizer = adam(model)
    run(model, optimizer, case, range(steps))
    return model, optimizer


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}


def same_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, states in expected.items():
        assert found[name].keys() == states.keys()
        for key, value in states.items():
            torch.testing.assert_close(found[name][key], value, rtol=1e-4, atol=1e-6)


@flat_or_originals
@quiet
@world(1, 2, 3)
def test_f1_99_f1_100_full(originals: bool) -> None:
    """Names and shapes of the unwrapped model; loaded again, training goes on as if nothing had been."""
    for case, strategy in ((CASES[1], S.FULL_SHARD), (CASES[1], S.NO_SHARD), (CASES[2], S.SHARD_GRAD_OP)):
        plain, stepper = reference(case)
        model, optimizer = trained(case, use_orig_params=originals, sharding_strategy=strategy)
        found = FSDP.optim_state_dict(model, optimizer)
        same_states(found["state"], by_name(plain, stepper))
        assert sorted(found["param_groups"][0]["params"]) == sorted(name for name, _ in plain.named_parameters())
        assert found["param_groups"][0]["lr"] == 1e-2
        again = wrap_case(case, use_orig_params=originals, sharding_strategy=strategy)
        again.load_state_dict(model.state_dict())
        other = adam(again)
        other.load_state_dict(FSDP.optim_state_dict_to_load(again, other, found))
        run(again, other, case, range(2, 4))
        run(plain, stepper, case, range(2, 4))
        for name, parameter in full_parameters(again).items():
            torch.testing.assert_close(parameter, plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)


@flat_or_originals
@quiet
@world(2, 3)
def test_f1_99_sharded(originals: bool) -> None:
    """ShardedTensors, or DTensors with a mesh."""
    case = CASES[1]
    plain, stepper = reference(case)
    for mesh in (None, init_device_mesh("cpu", (dist.get_world_size(),))):
        model, optimizer = trained(case, use_orig_params=originals, device_mesh=mesh)
        with FSDP.state_dict_type(model, SHARDED):
            found = FSDP.optim_state_dict(model, optimizer)
            kind = ShardedTensor if mesh is None else DTensor
            assert all(isinstance(each["exp_avg"], kind) for each in found["state"].values())
            loaded = FSDP.optim_state_dict_to_load(
                model, optimizer, copy.deepcopy(found) if mesh is not None else found
            )
        before = optimizer.state_dict()
        assert loaded["state"].keys() >= before["state"].keys()
        for key, states in before["state"].items():
            for name, value in states.items():
                torch.testing.assert_close(loaded["state"][key][name], value, rtol=0, atol=0)
        same_states(FSDP.optim_state_dict(model, optimizer)["state"], by_name(plain, stepper))
    model, optimizer = trained(case, use_orig_params=originals)
    with FSDP.state_dict_type(model, LOCAL):  # there is no flat state: sharded, as in PyTorch
        found = FSDP.optim_state_dict(model, optimizer)
        assert all(isinstance(each["exp_avg"], ShardedTensor) for each in found["state"].values())
        again = adam(model)
        again.load_state_dict(FSDP.optim_state_dict_to_load(model, again, found))
    same_states(FSDP.optim_state_dict(model, again)["state"], by_name(plain, stepper))


@flat_or_originals
@quiet
@world(2)
def test_f1_101_rank0_only(originals: bool) -> None:
    """The others get an empty one, and give it back to be filled."""
    case = CASES[1]
    model, optimizer = trained(case, use_orig_params=originals)
    expected = FSDP.optim_state_dict(model, optimizer)
    with FSDP.state_dict_type(
        model, UNSHARDED, FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    ):
        found = FSDP.optim_state_dict(model, optimizer)
        assert (found == {}) == (dist.get_rank() == 1)
        other = adam(model)
        FSDP.optim_state_dict_to_load(model, other, found, load_directly=True)
    same_states(FSDP.optim_state_dict(model, other)["state"], expected["state"])


@quiet
@world(2, 4)
def test_f1_104_other_kinds_and_sizes(tmp_path: Any) -> None:
    """From flat to original parameters and back, and from two ranks to four: what is saved knows neither."""
    case = CASES[1]
    plain, stepper = reference(case)
    further = reference(case, 4)
    for originals in (False, True):
        model, optimizer = trained(case, use_orig_params=originals)
        state, weights = FSDP.optim_state_dict(model, optimizer), model.state_dict()
        other = wrap_case(case, use_orig_params=not originals)
        other.load_state_dict(weights)
        stepped = adam(other)
        FSDP.optim_state_dict_to_load(other, stepped, state, load_directly=True)
        same_states(FSDP.optim_state_dict(other, stepped)["state"], by_name(plain, stepper))
        run(other, stepped, case, range(2, 4))
        same_states(FSDP.optim_state_dict(other, stepped)["state"], by_name(*further))
        same_states(state["state"], by_name(plain, stepper))  # what was loaded is nobody's to count on
        unsharded = case.build()
        again = adam(unsharded)
        again.load_state_dict(FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, unsharded))
        run(unsharded, again, case, range(2, 3))
        assert {each["step"].item() for each in again.state.values()} == {3}


class Some(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.rare, self.own = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.used(x))


@quiet
@world(2)
def test_f1_104_missing_states_and_unmanaged_parameters() -> None:
    """Parameters without state stay without; ignored ones are saved as they are."""
    module = Some()
    model = wrap(module, [], use_orig_params=True, ignored_modules=[module.own])
    optimizer = adam(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = FSDP.optim_state_dict(model, optimizer)
    assert sorted(found["state"]) == ["own.bias", "own.weight", "used.bias", "used.weight"]
    assert len(found["param_groups"][0]["params"]) == 6
    other = adam(model)
    FSDP.optim_state_dict_to_load(model, other, found, load_directly=True)
    same_states(FSDP.optim_state_dict(model, other)["state"], found["state"])
    empty = adam(model)
    assert FSDP.optim_state_dict(model, empty)["state"] == {}


@flat_or_originals
@world(2)
def test_f1_102_older_methods(originals: bool) -> None:
    """Each with a warning: full, sharded, scattered, and for a model that is not wrapped."""
    case = CASES[1]
    plain, stepper = reference(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = trained(case, use_orig_params=originals)
    with pytest.warns(FutureWarning, match="full_optim_state_dict"):
        full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    same_states(full["state"], by_name(plain, stepper))
    with pytest.warns(FutureWarning, match="deprecated"):
        root = FSDP.full_optim_state_dict(model, optimizer)
        assert (root == {}) == (dist.get_rank() == 1)
        sharded = FSDP.sharded_optim_state_dict(model, optimizer)
        for pieces in (
            FSDP.shard_full_optim_state_dict(full, model, optim=optimizer),
            FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer),
            FSDP.scatter_full_optim_state_dict(root if dist.get_rank() == 0 else None, model, optim=optimizer),
        ):
            other = adam(model)
            other.load_state_dict(pieces)
            same_states(FSDP.optim_state_dict(model, other)["state"], full["state"])
        by_id = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=stepper)
        fresh = adam(plain)
        fresh.load_state_dict(by_id)
        same_states(by_name(plain, fresh), full["state"])
        back = FSDP.rekey_optim_state_dict(fresh.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=fresh)
        assert back["state"].keys() == full["state"].keys()
    with pytest.warns(FutureWarning, match=r"optim_input|shard_full") as seen:
        FSDP.shard_full_optim_state_dict(full, model, optim_input=[*model.parameters()], optim=optimizer)
    assert any("optim_input" in str(each.message) for each in seen)


@flat_or_originals
@quiet
@world(2)
def test_f1_102_older_methods_without_the_optimizer(originals: bool) -> None:
    """Then it is one of all the model's parameters in their order, in the groups that the state dict has."""
    case = CASES[1]
    plain, stepper = reference(case)
    model, optimizer = trained(case, use_orig_params=originals)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    on_root = full if dist.get_rank() == 0 else None
    listed = list(model.parameters())
    for pieces in (
        FSDP.shard_full_optim_state_dict(full, model),
        FSDP.scatter_full_optim_state_dict(on_root, model),
        FSDP.shard_full_optim_state_dict(full, model, optim_input=listed),
        FSDP.shard_full_optim_state_dict(full, model, optim_input=[{"params": listed}]),
    ):
        other = adam(model)
        other.load_state_dict(pieces)
        same_states(FSDP.optim_state_dict(model, other)["state"], full["state"])
    numbers = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain)
    fresh = adam(plain)
    fresh.load_state_dict(numbers)
    same_states(by_name(plain, fresh), full["state"])
    back = FSDP.rekey_optim_state_dict(stepper.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
    same_states(back["state"], full["state"])


@flat_or_originals
@quiet
@world(2)
def test_f1_102_groups_without_the_optimizer(originals: bool) -> None:
    case = CASES[1]
    model = wrap_case(case, use_orig_params=originals)

    def divided() -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        return torch.optim.AdamW([{"params": parameters[1::2], "lr": 0.5}, {"params": parameters[::2]}], lr=1e-2)

    optimizer = divided()
    run(model, optimizer, case, range(2))
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    other = divided()
    other.load_state_dict(FSDP.shard_full_optim_state_dict(full, model))
    assert [group["lr"] for group in other.param_groups] == [0.5, 1e-2]
    same_states(FSDP.optim_state_dict(model, other)["state"], full["state"])


@flat_or_originals
@quiet
@world(2)
def test_strangers_are_refused(originals: bool) -> None:
    """An optimizer of another model's parameters, or of those that wrapping has replaced: never an empty state."""
    module = nn.Linear(3, 3)
    early, other = adam(module), adam(nn.Linear(3, 3))
    model = FSDP(module, use_orig_params=originals)
    state = FSDP.optim_state_dict(model, adam(model))
    for call in (
        lambda optimizer: FSDP.optim_state_dict(model, optimizer),
        lambda optimizer: FSDP.optim_state_dict_to_load(model, optimizer, state),
    ):
        with pytest.raises(ValueError, match="2 of the parameters of this AdamW are not in the model"):
            call(other)
        if originals:
            call(early)  # the parameters are still the same
        else:
            with pytest.raises(ValueError, match=r"before the model was sharded, which has replaced weight, bias"):
                call(early)


@quiet
@world(2)
def test_steps_of_replaced_parameters() -> None:
    """They would change nothing: an error, unless the optimizer has the new ones, too. Also with fully_shard."""
    for shard in (lambda each: FSDP(each), fully_shard):
        module = nn.Linear(3, 3)
        early = adam(module)
        module(torch.ones(1, 3)).sum().backward()
        early.step()  # before: as ever
        model = shard(module)
        with pytest.raises(
            RuntimeError, match=r"before the model was sharded.*weight, bias.*2 of its 2 .*model.parameters\(\)"
        ):
            early.step()
        early.add_param_group({"params": list(model.parameters())})
        early.step()
    model = FSDP(module := nn.Linear(3, 3), use_orig_params=True)
    optimizer = adam(module)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@flat_or_originals
@world(1, 2)
def test_optimizers_over_whole_parameters(originals: bool) -> None:
    """They see this rank's elements only, and say nothing. A rank alone has all of them."""
    whole = dist.get_world_size() == 1
    for kind, over in ((torch.optim.LBFGS, "inner products"), (torch.optim.Adafactor, "rows and columns")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if whole else "error")
            model = FSDP(nn.Linear(4, 4), use_orig_params=originals)
        optimizer = kind(model.parameters())

        def closure(model: nn.Module = model) -> torch.Tensor:
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            return loss

        closure()
        with nullcontext() if whole else pytest.warns(UserWarning, match=f"{over}.* has only its own elements of"):
            optimizer.step(closure)


@flat_or_originals
@quiet
@world(2)
def test_states_of_wrong_shapes_are_refused(originals: bool) -> None:
    case = CASES[1]
    model, optimizer = trained(case, use_orig_params=originals)
    found = FSDP.optim_state_dict(model, optimizer)
    name = next(name for name, each in found["state"].items() if each["exp_avg"].ndim == 1)
    shape = tuple(found["state"][name]["exp_avg"].shape)
    for wrong in ((3,), (2, shape[0] // 2), (shape[0] + 1,), (1,)):
        bad = copy.deepcopy(found)
        bad["state"][name]["exp_avg"] = torch.zeros(wrong)
        with pytest.raises(ValueError) as caught:
            FSDP.optim_state_dict_to_load(model, optimizer, bad)
        assert all(str(part) in str(caught.value) for part in (repr(name), "'exp_avg'", wrong, shape))
    for key in (None, "step", "exp_avg"):
        bad = copy.deepcopy(found)
        del (bad["state"] if key is None else bad["state"][name])[name if key is None else key]
        if originals:
            FSDP.optim_state_dict_to_load(model, optimizer, bad)
        else:
            with pytest.raises(ValueError, match=f"not for {name}"):
                FSDP.optim_state_dict_to_load(model, optimizer, bad)


@quiet
@world(2)
def test_arguments_of_optim_state_dict_to_load() -> None:
    model = FSDP(nn.Linear(3, 3))
    optimizer = adam(model)
    state = FSDP.optim_state_dict(model, optimizer)
    with pytest.raises(ValueError, match="the other way round"):
        FSDP.optim_state_dict_to_load(model, state, optimizer)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be what optim_state_dict"):
        FSDP.optim_state_dict_to_load(model, optimizer, {"model": {}})
    with pytest.raises(ValueError, match="got a list"):
        FSDP.optim_state_dict_to_load(model, optimizer, [])  # type: ignore[arg-type]


WHOLE = ("0.weight", "0.bias", "1.weight", "1.bias")


@pytest.mark.parametrize("cleared", [True, False])
@quiet
@world(2, 3)
def test_state_of_unsharded_parameters_is_refused(cleared: bool) -> None:
    """An optimizer that was stepped before the model was wrapped, with parameters that are still the same."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    early = adam(module)
    module(torch.ones(1, 5)).sum().backward()
    early.step()
    state = early.state_dict()
    if cleared:
        early.zero_grad()
    model = FSDP(module, use_orig_params=True)
    early.zero_grad()
    model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        early.step()
    local, rank = tuple(module[0].weight.shape), dist.get_rank()
    for part in ("AdamW", "'0.weight'", "'exp_avg'", "(5, 5)", f"{local} on rank {rank}", "optim_state_dict_to_load"):
        assert part in str(caught.value), part
    late = adam(model)
    late.step()
    late.load_state_dict(state)  # the state dict of the unsharded model as it is
    with pytest.raises(RuntimeError, match=r"AdamW.*'0\.weight'.*optim_state_dict_to_load"):
        late.step()
    whole = {"state": dict(zip(WHOLE, state["state"].values(), strict=True)), "param_groups": state["param_groups"]}
    whole["param_groups"][0]["params"] = list(WHOLE)
    late.load_state_dict(FSDP.optim_state_dict_to_load(model, late, whole))
    late.step()


@quiet
@world(2, 3)
def test_unsharded_state_of_dtensors_is_refused() -> None:
    """The same with `fully_shard`: a state dict of the unsharded model, loaded as it is."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    early = adam(module)
    module(torch.ones(1, 5)).sum().backward()
    early.step()
    model = fully_shard(module)
    with pytest.raises(RuntimeError, match=r"before the model was sharded.*0\.weight"):
        early.step()
    late = adam(model)
    late.load_state_dict(early.state_dict())
    model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        late.step()
    for part in ("AdamW", "'0.weight'", "'exp_avg'", "(5, 5)", "DTensor", "set_optimizer_state_dict"):
        assert part in str(caught.value), part
    late = adam(model)
    late.step()
    late.load_state_dict(
        late.state_dict()
    )  # looked at again: the shape of a DTensor is that of the unsharded parameter
    late.step()
