"""State dicts of sharded models, and models that were built on meta."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, mesh, sharded
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unshard import fully_shard
from unshard.errors import ParameterError


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


def ladder() -> nn.Sequential:
    """First dimensions of 2 to 5 rows."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(rows, rows + 1) for rows in range(1, 5)))


@pytest.mark.filterwarnings("ignore:A state dict of shards")
@world(1, 2, 3, 4)
def test_uneven_shards_survive_saving_and_loading() -> None:
    """Contract SDT-04, SDT-06, LAY-03: values and padding, at every number of rows around the number of ranks."""
    model, other = fully_shard(ladder()), fully_shard(ladder())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    objects = [id(parameter) for parameter in other.parameters()]
    other.load_state_dict(torch.load(file, weights_only=False))
    assert [id(parameter) for parameter in other.parameters()] == objects
    values = full_values(model)
    assert all(torch.equal(value, values[name]) for name, value in full_values(other).items())
    reference = ladder()
    reference.load_state_dict(values)
    for each in (other, reference):
        each(torch.ones(2, 1)).square().mean().backward()
    assert_gradients(other, reference)
    assert any(parameter.grad.full_tensor().any() for parameter in other.parameters())


def pickled(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@world(2, 3)
def test_pickling_shards_says_what_the_file_holds() -> None:
    """Once for each save, at the line that saves; whoever has made the entries whole hears nothing."""
    model = sharded(Stack(2))
    for state in (model.state_dict(), {"model": model.state_dict()}, copy.deepcopy(model.state_dict())):
        with pytest.warns(UserWarning, match=r"only its own shards.*unshard\.checkpoint\.full_state_dict\(") as caught:
            bytes_of_one = pickled(state)
        assert [each.filename for each in caught] == [__file__]
    loaded = torch.load(io.BytesIO(bytes_of_one))  # weights_only
    assert model.load_state_dict(loaded).missing_keys == []
    state = model.state_dict()
    for name in state:
        state[name] = state[name].full_tensor()
    assert torch.load(io.BytesIO(pickled(state))).keys() == state.keys()
    assert pickled(copy.deepcopy(state))


@world(1)
def test_one_rank_pickles_all_there_is() -> None:
    assert pickled(sharded(Stack(1)).state_dict())


@pytest.mark.filterwarnings("ignore:A state dict of shards")
@world(2, 3)
def test_shards_of_another_rank_are_refused() -> None:
    """Torch would copy the rows of the rank that saved them into those of the rank that loads them."""
    model = sharded(Stack(1))
    before = full_values(model)
    saved = [pickled(model.state_dict())]
    dist.broadcast_object_list(saved)
    loaded = torch.load(io.BytesIO(saved[0]))
    if dist.get_rank() == 0:
        model.load_state_dict(loaded)
    else:
        with pytest.raises(ParameterError, match=rf"rank {dist.get_rank()} holds the shards of rank 0 \('blocks"):
            model.load_state_dict(loaded)
    assert all(torch.equal(value, before[name]) for name, value in full_values(model).items())


@pytest.mark.filterwarnings("ignore:A state dict of shards")
@world(4)
def test_shards_of_a_replica_are_as_good() -> None:
    model = fully_shard(Stack(1), mesh=mesh(2))
    other = fully_shard(Stack(1), mesh=mesh(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    files: list[object] = [None] * 4
    dist.all_gather_object(files, pickled(model.state_dict()))
    other.load_state_dict(torch.load(io.BytesIO(files[dist.get_rank() % 2])))
    values = full_values(model)
    assert all(torch.equal(value, values[name]) for name, value in full_values(other).items())


@world(2)
def test_a_state_dict_needs_no_communication_and_stays_alive() -> None:
    """Contract SDT-01, SDT-03, SDT-11: taken once, it follows the training; a conversion ends that."""
    model = sharded(Stack(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Collectives() as calls:
        state = model.state_dict()
    assert calls.calls == [] and not any(entry.requires_grad for entry in state.values())
    for seed in range(2):
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert torch.equal(state[name].to_local(), parameter.detach().to_local())
    model.double()
    assert {entry.dtype for entry in state.values()} == {torch.float32}


@world(2)
def test_plain_tensors_are_not_loaded_into_shards() -> None:
    """Contract SDT-05: named, with the call that loads them; distributed ones are loaded."""
    model, reference = sharded(Stack(1)), Stack(1)
    nn.init.constant_(reference.head.weight, 0.25)
    before = full_values(model)
    for state in (reference.state_dict(), {"head.weight": reference.head.weight.detach()}):
        with pytest.raises(
            RuntimeError, match=r"plain tensor for '(blocks|head\.weight).* unshard\.checkpoint\.load_full_state_dict"
        ):
            model.load_state_dict(state, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in full_values(model).items())
    where = model.head.weight.device_mesh
    model.load_state_dict({n: distribute_tensor(v, where, (Shard(0),)) for n, v in reference.state_dict().items()})
    assert torch.equal(model(batch()), reference(batch()))


@world(2)
def test_a_full_state_dict_on_the_first_rank() -> None:
    """Contract SDT-08: every rank takes part in `full_tensor`, one keeps the result."""
    model, reference, full = sharded(Stack(1)), Stack(1), {}
    for name, entry in model.state_dict().items():
        value = entry.full_tensor()
        if dist.get_rank() == 0:
            full[name] = value.cpu()
    if dist.get_rank() == 0:
        assert full.keys() == reference.state_dict().keys()
        assert all(torch.equal(full[name], value) for name, value in reference.state_dict().items())


@world(2)
def test_missing_and_unexpected_keys_are_errors() -> None:
    """As in any module: strict unless told otherwise."""
    model = sharded(Stack(1))
    state = dict(model.state_dict())
    bias = state.pop("head.bias")
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*tail\.bias"):
        model.load_state_dict(state | {"head.bias": bias, "tail.bias": bias})
    assert model.load_state_dict(state, strict=False).missing_keys == ["head.bias"]


def on_meta() -> Stack:
    with torch.device("meta"):
        return Stack(1)


@world(1, 2, 3)
def test_a_partial_load_into_a_model_on_meta() -> None:
    """Contract SDT-07, META-04, LZY-08: what was not loaded stays on meta, and is named by the first forward."""
    model, reference = sharded(on_meta()), Stack(1)
    where = model.head.weight.device_mesh
    values = {n: distribute_tensor(v, where, (Shard(0),)) for n, v in reference.state_dict().items()}
    part = {name: value for name, value in values.items() if "second" not in name and "head" not in name}
    model.load_state_dict(part, strict=False, assign=True)
    assert model.blocks[0].second.weight.is_meta and not model.blocks[0].first.weight.is_meta
    with pytest.raises(ParameterError, match=r"(head|blocks\.0\.second)\.weight on meta"):
        model(batch())
    rest = {name: value for name, value in values.items() if name not in part}
    model.load_state_dict(rest, strict=False, assign=True)
    for each in (model, reference):
        loss_of(each).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # on a CPU mesh each rank draws its own
@pytest.mark.parametrize("replicas", [None, 1, 2])
@world(2, 4)
def test_a_model_on_meta_is_initialised_shard_by_shard(replicas: int | None) -> None:
    """Contract META-01 to META-03: `to_empty`, then each module's own initialisation, on DTensors.

    Which numbers a rank draws is DTensor's matter; that they are what the next forward computes with is ours.
    """
    model = sharded(on_meta(), **({} if replicas is None else {"mesh": mesh(replicas)}))
    for parameter in model.parameters():
        rows = parameter.shape[0]
        shards = dist.get_world_size() // (replicas or 1)
        assert parameter.is_meta and parameter.to_local().shape[0] <= -(-rows // shards)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    values = full_values(model)
    bound = 1 / 132**0.5
    for name, value in values.items():
        assert value.abs().max() <= bound and (value.numel() == 2 or value.std() > 0.3 * bound), name
    reference = Stack(1)
    reference.load_state_dict(values)
    for each in (model, reference):
        loss_of(each).backward()
    assert_gradients(model, reference)


class Rotary(nn.Module):
    """Buffers that a state dict does not hold, made in the constructor, as rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.arange(4.0) + 1, persistent=False)

    def reset_parameters(self) -> None:
        self.frequencies.copy_(torch.arange(4.0) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.frequencies)


@world(2)
def test_buffers_of_a_model_on_meta() -> None:
    """Contract META-06: `to_empty` makes room for them; filling it is the program's part, in place or by assignment."""
    torch.manual_seed(0)
    reference = nn.Sequential(Rotary(), Rotary())
    with torch.device("meta"):
        model = nn.Sequential(Rotary(), Rotary())
    for each in model:
        fully_shard(each)
    fully_shard(model)
    assert all(buffer.is_meta for buffer in model.buffers())
    model.to_empty(device="cpu")
    where = model[0].linear.weight.device_mesh
    state = {n: distribute_tensor(v, where, (Shard(0),)) for n, v in reference.state_dict().items()}
    model.load_state_dict(state)
    model[0].reset_parameters()
    model[1].frequencies = torch.arange(4.0) + 1
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), reference(x))
    assert not any(isinstance(buffer, DTensor) for buffer in model.buffers())
