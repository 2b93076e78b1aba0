"""PyTorch's compiler meets modules that ours has sharded, and looks up PyTorch's own helpers by name."""

from __future__ import annotations

import copy

import pytest
import torch
from bed import world
from torch import nn

from unshard import dropin


# The compiler of torch 2.11 looks at the gradients of all tensors that it meets.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@world(2)
def test_compiled_blocks() -> None:
    with dropin.stand_in():
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
        reference = copy.deepcopy(model)
        for block in model:
            block.compile(backend="aot_eager")
            fully_shard(block)
        fully_shard(model)
        assert all(each._is_fsdp_managed_module and each._fsdp_use_orig_params for each in (model, *model))
        x = torch.randn(3, 6)
        for _ in range(2):
            for each in (model, reference):
                each(x).square().mean().backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
