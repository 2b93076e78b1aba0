"""Switches of sharded modules: whom they reach, that they are silent, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bed import world
from bed.recorders import Collectives
from bed.stack import Stack, assert_gradients, loss_of, mesh, sharded, units
from torch import nn

from unshard import fully_shard

RECURSIVE = {
    "set_requires_gradient_sync": (False, "synchronize"),
    "set_requires_all_reduce": (False, "all_reduce"),
    "set_reshard_after_forward": (True, "reshard_after_forward"),
    "set_reshard_after_backward": (False, "reshard_after_backward"),
    "set_reduce_scatter_unused_params": (True, "reduce_unused"),
    "set_reduce_scatter_max_input_buffers": (2, "reduce_buffers"),
}
SINGLE_BY_DEFAULT = {
    "set_gradient_divide_factor": (3.0, "divide_factor"),
    "set_reduce_scatter_divide_factor": (3.0, "divide_factor"),
    "set_force_sum_reduction_for_comms": (True, "force_sum"),
    "set_all_reduce_hook": (print, "all_reduce_hook"),
}
SINGLE = {"set_unshard_in_backward": (False, "unshard_in_backward")}


@world(2)
def test_whom_a_switch_reaches_and_that_it_sends_nothing() -> None:
    """Contract API-38, API-39: every sharded module below, or with `recurse=False` one; no collective."""
    for name, (value, option) in (RECURSIVE | SINGLE_BY_DEFAULT | SINGLE).items():
        for recurse in (False,) if name in SINGLE else (True, False, None):
            model = Stack()
            fully_shard(model.blocks[1].first)
            fully_shard(model.blocks[1])
            fully_shard(model)
            arguments = {} if recurse is None or name in SINGLE else {"recurse": recurse}
            if recurse is None:  # the default, which is PyTorch's
                recurse = name in RECURSIVE
            with Collectives() as calls:
                getattr(model.blocks[1], name)(value, **arguments)
            reached = [getattr(unit.options, option) == value for unit in units(model)]
            assert reached == [False, True, recurse], (name, recurse)
            assert calls.calls == []
    for name in SINGLE:
        with pytest.raises(TypeError):
            getattr(model, name)(SINGLE[name][0], recurse=False)


@pytest.mark.parametrize("name", [*(name for name in RECURSIVE if "buffers" not in name), "set_is_last_backward"])
@world(1)
def test_switches_take_truth_values_only(name: str) -> None:
    """Contract API-07: `set_requires_gradient_sync(1)` is a mistake more often than not."""
    layer = fully_shard(nn.Linear(2, 2))
    for wrong in (1, None, "True"):
        with pytest.raises(ValueError, match="must be True or False"):
            getattr(layer, name)(wrong)


def _prefetch(setter: str) -> Callable[[nn.Module], None]:
    return lambda model: getattr(model, setter)([model.blocks[0], nn.Linear(1, 1)])


@pytest.mark.parametrize("setter", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
@world(2)
def test_prefetch_lists_are_checked_before_they_count(setter: str) -> None:
    """Contract API-09, API-10: a module that is not sharded is refused and nothing is changed."""
    model, reference = sharded(), Stack()
    with pytest.raises(ValueError, match="fully_shard was applied"):
        _prefetch(setter)(model)
    options = fully_shard.state(model).unit.options
    assert options.forward_prefetch is None and options.backward_prefetch is None
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)


@world(4)
def test_a_stream_for_the_hook_and_replicas() -> None:
    """Contract API-13: our own all-reduce leaves no room for a hook on another stream."""
    model = sharded(mesh=mesh(2))
    with pytest.raises(ValueError, match="replicas"):
        model.set_all_reduce_hook(lambda gradients: None, stream=object())


@world(2)
def test_the_largest_number_of_buffers_counts() -> None:
    """Contract API-19: the most that any module asks for, as it was at the first forward."""
    model, reference = sharded(), Stack()
    model.blocks[2].set_reduce_scatter_max_input_buffers(3, recurse=False)
    for number in range(2):
        loss_of(model).backward()
        loss_of(reference).backward()
        assert fully_shard.state(model).find_root(model).reductions._most == 3
        if number == 0:
            model.set_reduce_scatter_max_input_buffers(1)
    assert_gradients(model, reference)


@world(2)
def test_a_hook_sees_the_sum_before_the_division() -> None:
    """Contract API-13: with summing collectives the hook's tensor is the sum, in the reduce dtype."""
    layer, seen = fully_shard(nn.Linear(1, 2, bias=False)), []
    layer.set_force_sum_reduction_for_comms(True)
    layer.set_all_reduce_hook(lambda flat: seen.append(flat.clone()))
    layer(torch.full((1, 1), 3.0)).sum().backward()
    assert len(seen) == 1 and seen[0].ndim == 1 and seen[0][0].item() == 6.0
    assert layer.weight.grad.full_tensor().tolist() == [[3.0]] * 2
