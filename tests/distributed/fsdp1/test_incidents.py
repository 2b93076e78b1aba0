"""Failures of torch's own wrapper (2.13), as tests of ours: incidents 35 and 37. (34: `test_f1_91_rank0_only`.)"""

from __future__ import annotations

import pytest
import torch
from bed import world
from bed.models import case
from bed.wrapped import full_gradients, wrap_case

from unshard import FullOptimStateDictConfig, FullStateDictConfig, MixedPrecision, StateDictType
from unshard import FullyShardedDataParallel as FSDP

quiet = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@quiet
@world(2, 3)
def test_full_optimizer_state_on_the_host_keeps_the_moments_apart(originals: bool) -> None:
    each = case("transformer")
    model, plain = wrap_case(each, use_orig_params=originals), each.build()
    wrapped, reference = (torch.optim.Adam(it.parameters(), lr=1e-3) for it in (model, plain))
    for step in range(2):
        for it, optimizer in ((model, wrapped), (plain, reference)):
            each.loss(it, each.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    config = FullStateDictConfig(offload_to_cpu=True), FullOptimStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *config):
        found = FSDP.optim_state_dict(model, wrapped)["state"]
    assert len(found) == len(list(plain.parameters()))
    for name, parameter in plain.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(found[name][key], reference.state[parameter][key], rtol=1e-4, atol=1e-7)
        assert not torch.equal(found[name]["exp_avg"], found[name]["exp_avg_sq"])


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_a_forward_without_backward_does_not_keep_the_next_step_from_being_reduced(originals: bool) -> None:
    each = case("transformer")
    options = {"use_orig_params": originals, "mixed_precision": MixedPrecision(reduce_dtype=torch.float64)}
    model, plain = wrap_case(each, **options), each.build()
    each.loss(model, each.batch(0))  # a graph that nobody goes back through
    for step in (1, 2):
        for it in (model, plain):
            it.zero_grad()
            each.loss(it, each.batch(step)).backward()
        found = full_gradients(model)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
