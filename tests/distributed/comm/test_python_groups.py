"""Process groups that are written in Python."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import models, parity, world, wrapped
from bed.python_groups import NewNames, OldNames, PythonGroup, make
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unshard import FullyShardedDataParallel as FSDP
from unshard import fully_shard


@pytest.mark.parametrize("kind", [NewNames, OldNames], ids=lambda kind: kind.__name__)
@world(2)
def test_fully_shard_trains(kind: type[PythonGroup]) -> None:
    """A group that has only the names of torch 2.13, or only the older ones, without a name of its own."""
    group, case = make(kind), models.case("uneven")
    mesh = DeviceMesh.from_group(group, "cpu")

    def read(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Full tensors, over the default group: torch's own all-gather does not know the older names."""
        return [_full(each) for each in tensors]

    reference = parity.train(case.build(), case, 3)
    model = case.build()
    for unit in case.units(model):
        fully_shard(unit, mesh=mesh)
    record = parity.train(model, case, 3, rank=dist.get_rank(), size=2, read=read)
    parity.assert_close(record, reference)
    assert group.calls["gather"] and group.calls["reduce"]


def _full(tensor: torch.Tensor) -> torch.Tensor:
    pieces: list[torch.Tensor] = [torch.empty(0), torch.empty(0)]
    dist.all_gather_object(pieces, tensor.to_local())
    return torch.cat(pieces)


@pytest.mark.parametrize("kind", [NewNames, OldNames], ids=lambda kind: kind.__name__)
@world(2)
def test_the_wrapper_trains(kind: type[PythonGroup]) -> None:
    group, case = make(kind), models.case("uneven")
    model = case.build()
    wrapper = wrapped.wrap(model, case.units(model), process_group=group, sync_module_states=True, use_orig_params=True)
    reference = case.build()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (wrapper, reference)]
    for step in range(3):
        case.loss(wrapper, models.shard(case.batch(step), dist.get_rank(), 2)).backward()
        case.loss(reference, case.batch(step)).backward()
        norm = wrapper.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
        for each in optimizers:
            each.step()
            each.zero_grad()
    with FSDP.summon_full_params(wrapper):
        torch.testing.assert_close(list(wrapper.parameters()), list(reference.parameters()))
    assert group.calls["gather"] and group.calls["reduce"]
