"""What `fully_shard` takes, what it gives back, and which mesh it chooses by itself."""

from __future__ import annotations

import inspect
import socket

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.stack import WIDTH, Stack, assert_gradients, batch, loss_of, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from unshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from unshard.errors import ArgumentError, UnsupportedError


def test_only_the_module_is_positional() -> None:
    """Contract ARG-01 to ARG-07, OFF-01: names and defaults that programs for PyTorch's API rely on."""
    module, *others = inspect.signature(fully_shard).parameters.values()
    assert (module.name, module.kind, module.default) == ("module", module.POSITIONAL_OR_KEYWORD, module.empty)
    assert all(each.kind is each.KEYWORD_ONLY for each in others)
    defaults = {each.name: each.default for each in others}
    for name in ("mesh", "reshard_after_forward", "shard_placement_fn", "ignored_params"):
        assert defaults[name] is None
    assert defaults["mp_policy"] in (None, MixedPrecisionPolicy())
    assert defaults["offload_policy"] in (None, OffloadPolicy())
    assert isinstance(CPUOffloadPolicy(), OffloadPolicy) and CPUOffloadPolicy().pin_memory is True
    assert CPUOffloadPolicy(pin_memory=False) != CPUOffloadPolicy()


@world(2)
def test_policies_that_say_nothing_change_nothing() -> None:
    """Contract ARG-05, ARG-06."""
    model, plain = sharded(mp_policy=MixedPrecisionPolicy(), offload_policy=OffloadPolicy()), sharded()
    assert torch.equal(model(batch()), plain(batch()))


@world(2, 3)
def test_the_default_mesh_is_all_ranks() -> None:
    """Contract ARG-09, ARG-11."""
    layer = fully_shard(nn.Linear(5, 4))
    mesh = layer.weight.device_mesh
    kind = torch.accelerator.current_accelerator(check_available=True)
    assert (mesh.ndim, mesh.device_type) == (1, kind.type if kind else "cpu")
    assert mesh.mesh.tolist() == list(range(dist.get_world_size()))
    assert layer.weight.placements == (Shard(0),) and layer.weight.to_local().device.type == mesh.device_type


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch guesses the device of the group and says so
def test_without_a_process_group_the_call_makes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract ARG-10: as the environment of torchrun says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    assert not dist.is_initialized()
    try:
        layer = fully_shard(nn.Linear(3, 2))
        assert dist.get_world_size() == 1 and isinstance(layer.weight, DTensor)
    finally:
        dist.destroy_process_group()


class Branches(nn.ModuleList):
    """A container that can be called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(branch(x) for branch in self)


@world(2)
def test_containers_with_a_forward_of_their_own() -> None:
    """Contract ARG-13; ARG-14 improved: also a container inside a list is refused, for nothing would gather it."""
    torch.manual_seed(0)
    model = Branches([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)])
    reference = Branches([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)])
    reference.load_state_dict(model.state_dict())
    assert fully_shard(model) is model
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)
    layers = [nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])]
    with pytest.raises(ValueError, match=r"ModuleList.*no forward"):
        fully_shard(layers)
    assert type(layers[0]) is nn.Linear


@world(2)
def test_no_name_changes() -> None:
    """Contract FS-04 to FS-06: parameters, buffers, modules, their order, and the objects that are returned."""

    def build() -> Stack:
        model = Stack()
        model.register_buffer("statistics", torch.ones(2))
        model.blocks[1].register_buffer("mask", torch.ones(3), persistent=False)
        return model

    def names(model: nn.Module) -> list[list[str]]:
        walks = (model.named_parameters(), model.named_buffers(), model.named_modules(), model.state_dict().items())
        return [[name for name, _ in walk] for walk in walks]

    model = build()
    before = names(build())
    pair = [model.blocks[1], model.blocks[2]]
    assert fully_shard(model.blocks[0]) is model.blocks[0]
    assert fully_shard(pair) is pair
    assert fully_shard(model) is model
    assert names(model) == before
    loss_of(model).backward()
    assert names(model) == before


@world(2)
def test_torch_shards_a_module_inside() -> None:
    """The likely cause comes first, because the parameters look as if they were tensor parallel."""
    for options in ({}, {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))}):
        model = Stack(1)
        torch.distributed.fsdp.fully_shard(model.blocks[0], **options)
        expected = r"'blocks.0.first.weight' is already a DTensor.*\. If PyTorch's fully_shard was applied to"
        with pytest.raises(UnsupportedError, match=expected):
            fully_shard(model, **options)


@world(1)
def test_ignored_parameters_are_parameters() -> None:
    model = Stack(1)
    for wrong in ("head.weight", {"head.weight"}, [model.head], model.head.weight):
        with pytest.raises(ArgumentError, match="must be a set of parameters"):
            fully_shard(model, ignored_params=wrong)
    fully_shard(model, ignored_params={nn.Parameter(torch.zeros(2))})  # of another unit, say
