"""What users do to parameters and gradients at rest, and what must survive it: the traps of flat buffers."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.models import case
from bed.parity import check_parity, each_unit, train
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unshard import FSDPModule, fully_shard
from unshard.errors import ParameterError


def two_layers(first: int = 5, hidden: int = 170) -> nn.Sequential:
    """One weight above the packing threshold, small ones around it, sizes that two and three ranks do not divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(first, hidden), nn.Tanh(), nn.Linear(hidden, 131), nn.Linear(131, 3))


def sharded(model: nn.Sequential | None = None, **options: object) -> nn.Sequential:
    model = two_layers() if model is None else model
    fully_shard(model[2], **options)
    return fully_shard(model, **options)


def batch(step: int = 0, features: int = 5) -> torch.Tensor:
    return torch.randn(12, features, generator=torch.Generator().manual_seed(step))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int = 0) -> float:
    loss = model(batch(step)).square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


def assert_same(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == other.keys() and mine
    for name in mine:
        torch.testing.assert_close(mine[name], other[name], rtol=1e-5, atol=1e-7)


def assert_trains_like(model: nn.Module, reference: nn.Module, steps: int = 2) -> None:
    """Both take the same steps from where they are."""
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(steps):
        torch.testing.assert_close(one_step(model, mine, step), one_step(reference, theirs, step), rtol=1e-5, atol=0)
    assert_same(full_values(model), {name: p.detach() for name, p in reference.named_parameters()})


# --- parameters at rest -----------------------------------------------------------------------------------------------


@world(1, 2, 3, 4)
def test_parameters_are_dtensors_with_their_rows() -> None:
    """Contract MESH-01, LAY-01, LAY-02, LAY-05, FS-04 to FS-06."""
    reference = two_layers()
    model = sharded()
    assert list(model.state_dict()) == list(reference.state_dict())
    for parameter, original in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
        assert (parameter.shape, parameter.stride()) == (original.shape, original.stride())
        chunks = original.detach().chunk(dist.get_world_size())
        mine = dist.get_rank()
        expected = chunks[mine] if mine < len(chunks) else original.detach()[:0]
        torch.testing.assert_close(parameter.to_local().detach(), expected, rtol=0, atol=0)


@world(2)
def test_gradients_are_dtensors_like_their_parameters() -> None:
    """Contract RUN-10: after backward everything is sharded again."""
    model = sharded()
    one_step(model)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        assert parameter.grad.device_mesh == parameter.device_mesh
        assert parameter.grad.to_local().shape == parameter.to_local().shape


@pytest.mark.filterwarnings("ignore:A state dict of shards")
@world(2, 3)
def test_saved_state_dict_loads_and_holds_only_its_own_bytes(tmp_path: object) -> None:
    """Contract CLS-07, SDT-04: a parameter saves its own rows, not the whole shard it lies in."""
    model = sharded()
    one_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = full_values(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    held = sum(p.to_local().numel() * 4 for p in model.parameters())
    assert file.tell() < held + 3000 * len(before)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    other = sharded(two_layers())
    for parameter in other.parameters():
        nn.init.constant_(parameter, 7.0)
    objects = [id(parameter) for parameter in other.parameters()]
    other.load_state_dict(loaded)
    assert [id(parameter) for parameter in other.parameters()] == objects
    assert_same(full_values(other), before)
    assert_trains_like(other, _plain(before))


@pytest.mark.parametrize("value", ["dtensor", "plain"])
@pytest.mark.parametrize("when", ["before", "trained", "whole"])
@world(1, 2)
def test_data_that_a_dtensor_would_ignore_is_refused(value: str, when: str) -> None:
    """All units are looked at before the first forward, and one at each later one."""
    model = sharded()
    if when != "before":
        one_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    named = list(model.named_parameters())
    if when == "whole":
        model.unshard()
    for _, parameter in named:
        parameter.data = parameter.data.clamp_(0)  # its own storage
    if when != "before":
        model(batch())
        model.reshard()
    for name, parameter in named if when == "trained" else named[-1:]:
        last = name
        parameter.data = torch.zeros_like(parameter) if value == "dtensor" else torch.zeros(parameter.shape)
    with pytest.raises(
        ParameterError, match=rf"data = tensor` was used for '{last if when != 'trained' else ''}.*copy_"
    ):
        for _ in range(1 if when == "before" else 2):
            model(batch())


@world(2)
def test_data_that_a_dtensor_would_ignore_is_refused_by_state_dicts_and_conversions() -> None:
    model, reference = sharded(), two_layers()
    model(batch())
    model.reshard()
    weight = model[0].weight
    for use in (model.state_dict, model.double, lambda: copy.deepcopy(model)):
        weight.data = torch.zeros_like(weight)
        with pytest.raises(ParameterError, match=r"`parameter.data = tensor` was used for '0\.weight'"):
            use()
        use()  # undone
    model.float()
    model[0].weight = nn.Parameter(distribute_tensor(reference[0].weight.detach() * 2, weight.device_mesh, (Shard(0),)))
    with torch.no_grad():
        reference[0].weight.mul_(2)
    assert_trains_like(model, reference)


@world(2)
def test_one_saved_parameter_holds_only_its_own_bytes() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200)))
    for name, entry in model.state_dict().items():
        file = io.BytesIO()
        torch.save(entry, file)
        own = entry.to_local().numel() * 4
        assert own < file.tell() < own + 4000, name


def _plain(values: dict[str, torch.Tensor]) -> nn.Sequential:
    model = two_layers()
    model.load_state_dict(values)
    return model


@world(2)
def test_state_dict_shares_storage_and_needs_no_communication() -> None:
    """Contract SDT-01, SDT-03, SDT-11."""
    model = sharded()
    entries = model.state_dict()
    one_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for name, parameter in model.named_parameters():
        assert not entries[name].requires_grad
        assert entries[name].to_local().data_ptr() == parameter.to_local().data_ptr()
        torch.testing.assert_close(entries[name].to_local(), parameter.to_local().detach(), rtol=0, atol=0)


@world(2)
def test_a_state_dict_taken_while_unsharded_holds_shards() -> None:
    """Contract SDT-02: the root keeps its parameters after forward; a state dict brings them back to rest."""
    model = sharded()
    loss = model(batch()).sum()
    assert not isinstance(model[0].weight, DTensor)
    entries = model.state_dict()
    assert all(isinstance(entry, DTensor) for entry in entries.values())
    assert isinstance(model[0].weight, DTensor)
    loss.backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("when", ["before", "after"])
@world(2, 3)
def test_to_dtype_after_sharding(when: str) -> None:
    """Contract CLS-08, CLS-09; CLS-10 improved: conversion after a forward works, keeping parameter objects."""
    model, reference = sharded(), two_layers()
    if when == "after":
        one_step(model)
        one_step(reference)
        model.zero_grad()
        reference.zero_grad()
    objects = [id(parameter) for parameter in model.parameters()]
    model.double()
    reference.double()
    assert [id(parameter) for parameter in model.parameters()] == objects
    assert all(parameter.dtype == torch.float64 for parameter in model.parameters())
    out, expected = model(batch().double()), reference(batch().double())
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    out.square().mean().backward()
    expected.square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-11, atol=1e-13)


@world(2)
def test_conversion_with_gradients_in_place() -> None:
    """`.to()` converts `.grad` as well; later gradients add up on top of the converted ones."""
    model = sharded()
    one_step(model)
    model.double()
    before = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
    model(batch().double()).square().mean().backward()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad.dtype == torch.float64
        torch.testing.assert_close(parameter.grad.full_tensor(), 2 * old, rtol=1e-5, atol=1e-8)


@world(2, 3)
def test_load_with_assign_is_what_the_next_forward_uses() -> None:
    """Contract SDT-04: new parameter objects are adopted, and their values are the ones gathered."""
    model, reference = sharded(), two_layers()
    one_step(model)
    model.zero_grad()
    torch.manual_seed(9)
    fresh = {name: 0.1 * torch.randn_like(value) for name, value in reference.state_dict().items()}
    mesh = model[0].weight.device_mesh
    model.load_state_dict({n: distribute_tensor(v, mesh, (Shard(0),)) for n, v in fresh.items()}, assign=True)
    reference.load_state_dict(fresh)
    assert_same(full_values(model), fresh)
    assert_trains_like(model, reference)


@world(2)
def test_a_converted_submodule_is_noticed() -> None:
    """A conversion below the sharded module passes no code of ours until the next gather."""
    model, reference = sharded(), two_layers()
    model[3].weight.data.to_local().mul_(1.0)
    with torch.no_grad():
        model[3].weight = nn.Parameter(model[3].weight.detach() * 2)
        reference[3].weight.mul_(2)
    assert_trains_like(model, reference)


@world(2)
def test_replaced_parameters_get_a_clear_error() -> None:
    """Contract LZY-12, LZY-17 improved."""
    model = sharded()
    model[3].weight = nn.Parameter(torch.zeros(3, 131))
    with pytest.raises(ParameterError, match=r"'3.weight'.*not a DTensor.*distribute_tensor"):
        model(batch())
    model = sharded()
    mesh = model[0].weight.device_mesh
    model[3].weight = nn.Parameter(distribute_tensor(torch.zeros(4, 131), mesh, (Shard(0),)))
    with pytest.raises(ParameterError, match=r"'3.weight'.*shape \(4, 131\).*expected \(3, 131\)"):
        model(batch())


@world(2)
def test_lstm_weights_follow_the_parameters() -> None:
    """nn.LSTM keeps its weights in a list of its own and computes with that one."""
    recurrent = case("recurrent")
    model = recurrent.build()
    each_unit(recurrent, fully_shard)(model)
    train(model, recurrent, 1)
    for name, weight in zip(model.lstm._flat_weights_names, model.lstm._flat_weights, strict=True):
        assert weight is getattr(model.lstm, name)
        assert isinstance(weight, DTensor)


@world(1, 2)
def test_unsharded_parameters_in_a_chunk_of_their_own() -> None:
    """What an LSTM on a GPU does to its weights at its first forward, done here by hand."""
    recurrent = case("recurrent")
    model, reference = recurrent.build(), recurrent.build()
    each_unit(recurrent, fully_shard)(model)

    def compact(module: nn.Module, args: object) -> None:
        chunk = torch.cat([weight.detach().flatten() for weight in module._flat_weights])
        for weight, piece in zip(
            module._flat_weights, chunk.split([w.numel() for w in module._flat_weights]), strict=True
        ):
            weight.data = piece.view_as(weight)
        chunks.append(chunk.untyped_storage())
        handle.remove()

    chunks: list[torch.UntypedStorage] = []
    handle = model.lstm.register_forward_pre_hook(compact)
    batch = recurrent.batch(0)
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            loss = recurrent.loss(each, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        each.last_loss = loss.item()
    assert model.last_loss == pytest.approx(reference.last_loss, rel=1e-5)
    assert len(chunks) == 1 and chunks[0].nbytes() == 0


# --- gradients ---------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A parameter that forward uses only on demand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(5, 130)
        self.sometimes = nn.Linear(5, 130)
        self.large = nn.Parameter(torch.randn(130, 131))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.always(x) + self.sometimes(x) @ self.large[:, :130] if both else self.always(x)


@world(1, 2, 3)
def test_an_unused_parameter_has_no_gradient_and_delays_nobody() -> None:
    """Contract FRZ-08; the set of used parameters may change from step to step."""
    model, reference = nn.Sequential(Branches()), nn.Sequential(Branches())
    fully_shard(model[0])
    fully_shard(model)
    for both in (False, True, False):
        for each in (model, reference):
            each.zero_grad()
            each[0](batch(), both).square().mean().backward() if each is reference else _call(each, both)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)


def _call(model: nn.Module, both: bool) -> None:
    model[0](batch(), both).square().mean().backward()


@world(2, 3)
def test_gradients_accumulate_over_changing_sets() -> None:
    """Contract ACC-01: what a step adds to, what it finds empty."""
    model, reference = fully_shard(Branches()), Branches()
    for both in (False, True, True, False):
        model(batch(), both).square().mean().backward()
        reference(batch(), both).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("held", ["grad", "local", "view", "detached"])
@world(1, 2)
def test_a_held_gradient_does_not_change(held: str) -> None:
    """Gradient objects are reused from step to step, but never under the eyes of somebody who kept one."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one_step(model)
    look = {
        "grad": lambda grad: grad,
        "local": lambda grad: grad.to_local(),
        "view": lambda grad: grad.to_local()[1:],
        "detached": lambda grad: grad.detach(),
    }[held]
    kept = [look(parameter.grad) for parameter in model.parameters()]
    values = [each.to_local().clone() if isinstance(each, DTensor) else each.clone() for each in kept]
    optimizer.step()
    optimizer.zero_grad()
    for step in range(1, 4):
        one_step(model, optimizer, step)
    for each, value in zip(kept, values, strict=True):
        now = each.to_local() if isinstance(each, DTensor) else each
        torch.testing.assert_close(now, value, rtol=0, atol=0)


@world(2)
def test_gradient_objects_are_reused_and_their_memory_released() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one_step(model)
    objects = [id(parameter.grad) for parameter in model.parameters()]
    storages = [parameter.grad.to_local().untyped_storage() for parameter in model.parameters()]
    del storages[1:]
    weak = storages.pop()
    assert weak.nbytes() > 0
    del weak
    optimizer.zero_grad()
    loss = model(batch()).sum()
    shards = [s for r in fully_shard.state(model).unit.param_groups[0].gradients.reductions.values() for s in r.grads]
    assert shards and all(shard.buffer.storage.nbytes() == 0 for shard in shards)
    loss.backward()
    assert [id(parameter.grad) for parameter in model.parameters()] == objects


@world(2, 3)
def test_padding_and_gaps_stay_zero() -> None:
    """Flat optimizers, clips and scalers will read them."""
    model = sharded(two_layers(hidden=173))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(10):
        one_step(model, optimizer, step)
    one_step(model)
    checked = torch.zeros(1)
    for module in (model, model[2]):
        unit = fully_shard.state(module).unit
        checked += _assert_zero_outside(
            unit.param_groups[0].sharded.shard.memory, [param.local for param in unit.params]
        )
        for reduction in unit.param_groups[0].gradients.reductions.values():
            for shard in (shard for shard in reduction.grads if shard.attached):
                flat = torch.empty(0, dtype=torch.uint8).set_(shard.buffer.storage)
                checked += _assert_zero_outside(flat, shard.locals)
    dist.all_reduce(checked)
    assert checked.item() > 0  # the last rank has padding


def _assert_zero_outside(flat: torch.Tensor, inside: list[torch.Tensor]) -> int:
    """Every byte of `flat` that belongs to no parameter; returns how many there are."""
    covered = torch.zeros(flat.numel(), dtype=torch.bool)
    for tensor in inside:
        if tensor.numel():
            begin = tensor.data_ptr() - flat.data_ptr()
            covered[begin : begin + tensor.numel() * tensor.element_size()] = True
    assert covered.any()
    assert not flat[~covered].any()
    return int((~covered).sum())


@world(2)
def test_gradients_can_be_copied_and_saved() -> None:
    model = sharded()
    one_step(model)
    for parameter in model.parameters():
        assert parameter.grad.storage_offset() == parameter.grad.to_local().storage_offset()  # torch.compile asserts it
        file = io.BytesIO()
        torch.save(parameter.grad, file)
        nbytes = parameter.grad.to_local().nbytes
        assert nbytes < file.tell() < nbytes + 8000  # of this gradient alone, and what torch adds
        file.seek(0)
        for copied in (copy.deepcopy(parameter.grad), torch.load(file, weights_only=False)):
            torch.testing.assert_close(copied.to_local(), parameter.grad.to_local(), rtol=0, atol=0)
            assert copied.placements == parameter.grad.placements and copied.shape == parameter.shape


# --- lifetime ----------------------------------------------------------------------------------------------------


@world(2)
def test_a_model_that_never_ran_is_freed_at_once() -> None:
    sharded()
    gc.collect()
    gc.disable()
    try:
        model = sharded()
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


@world(2)
def test_deleting_the_model_frees_it_without_the_garbage_collector() -> None:
    """Contract ME-17: no reference leads back up."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer)
    one_step(model)
    unit = fully_shard.state(model[2]).unit
    watched = [
        weakref.ref(unit),
        weakref.ref(unit.param_groups[0].gradients),
        weakref.ref(model[2]),
        weakref.ref(model),
    ]
    del unit
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        assert [each() for each in watched] == [None] * 4
    finally:
        gc.enable()


@world(1, 2, 3)
def test_meta_initialisation() -> None:
    """Contract META-01, META-02, LZY-08: built on meta, sharded, materialised, initialised, trained."""
    with torch.device("meta"):
        model = two_layers()
    sharded(model)
    assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in model.parameters())
    with pytest.raises(ParameterError, match=r"0.weight on meta.*to_empty"):
        model(batch())
    model.to_empty(device="cpu")
    reference = two_layers()
    mesh = model[0].weight.device_mesh
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), reference.parameters(), strict=True):
            parameter.copy_(distribute_tensor(value.detach(), mesh, (Shard(0),)))
    assert_trains_like(model, reference)


@world(2)
def test_meta_model_loaded_with_assign() -> None:
    """Contract META-05."""
    with torch.device("meta"):
        model = two_layers()
    sharded(model)
    reference = two_layers()
    mesh = model[0].weight.device_mesh
    values = {n: distribute_tensor(v.detach(), mesh, (Shard(0),)) for n, v in reference.named_parameters()}
    model.load_state_dict(values, assign=True)
    assert_trains_like(model, reference)


@world(2)
def test_meta_tied_weights_stay_tied() -> None:
    tied = case("tied")
    with torch.device("meta"):
        model = tied.build()
    each_unit(tied, fully_shard)(model)
    model.to_empty(device="cpu")
    assert model.head.weight is model.tokens.weight
    reference = tied.build()
    mesh = model.head.weight.device_mesh
    state = {n: distribute_tensor(v, mesh, (Shard(0),)) for n, v in reference.state_dict().items()}
    model.load_state_dict(state, assign=True)
    train(model, tied, 1)
    assert model.head.weight is model.tokens.weight


@world(2)
def test_optimizer_state_round_trip() -> None:
    """Contract SDT-10: optimizer state is DTensors and needs nothing special."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer)
    other = sharded()
    other.load_state_dict(model.state_dict())
    resumed = torch.optim.AdamW(other.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # loading shares tensors otherwise
    assert one_step(model, optimizer, 5) == one_step(other, resumed, 5)
    assert_same(full_values(model), full_values(other))


@world(2)
def test_check_parity_of_the_padded_path_with_fsdp_module() -> None:
    """Class mixing, contract CLS-01 to CLS-04."""
    model = sharded()
    assert isinstance(model, FSDPModule) and isinstance(model, nn.Sequential)
    assert type(model).__name__ == "FSDPSequential" and type(model[2]).__name__ == "FSDPLinear"
    assert type(model[0]) is nn.Linear
    assert type(model[:2]) is nn.Sequential
    uneven = case("uneven")
    check_parity(uneven, each_unit(uneven, fully_shard), steps=2)
