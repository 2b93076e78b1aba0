"""The methods of a sharded module, each by what it changes: collectives, memory, gradients."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.stack import WIDTH, Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded, units
from bed.user_collectives import ToyGather
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from unshard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from unshard.fsdp2.module import disable_fsdp_module_new_init, get_cls_to_fsdp_cls


def count(kind: str, function) -> int:
    with Collectives() as calls:
        function()
    return len(calls.of(kind))


@world(2)
def test_reshard_after_forward_can_be_switched() -> None:
    """Contract API-07, RAF-15, RAF-16."""
    model, reference = sharded(), Stack()
    for reshard, gathers in ((True, 8), (False, 4), (True, 8)):
        model.set_reshard_after_forward(reshard)
        assert count("gather", lambda: loss_of(model).backward()) == gathers
        loss_of(reference).backward()
        assert_gradients(model, reference)
    with pytest.raises(ValueError, match="reshard_after_forward"):
        model.set_reshard_after_forward(2)


@world(2)
def test_one_gather_for_a_whole_accumulation() -> None:
    """Contract API-08, ACC-10, CM-27: parameters stay unsharded between the backwards of one iteration."""
    model, reference = sharded(reshard_after_forward=False), Stack()
    for _ in range(2):
        gathers = 0
        for seed in range(3):
            model.set_requires_gradient_sync(seed == 2)
            model.set_reshard_after_backward(seed == 2)
            gathers += count("gather", lambda seed=seed: loss_of(model, seed).backward())
            loss_of(reference, seed).backward()
        assert gathers == 4
        assert_gradients(model, reference)
        assert_at_rest(model)


@pytest.mark.parametrize("async_op", [False, True])
@world(2)
def test_backwards_that_the_program_ends(async_op: bool) -> None:
    """As the pipelines of torch 2.15 do: unreduced gradients of all backwards, and one call at the end."""
    model, reference = sharded(reshard_after_forward=False), Stack()
    model.finalize_backward()  # before the first forward: no effect
    for _ in range(2):
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        for seed in range(3):
            loss_of(model, seed).backward()
            loss_of(reference, seed).backward()
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        handle = model.finalize_backward(async_op=async_op)
        assert (handle is not None) == async_op
        if handle is not None:
            handle.wait()
        model.set_manual_backward_finalization(False)
        assert_gradients(model, reference)
        assert_at_rest(model)
    loss_of(model, 3).backward()  # ends by itself again
    loss_of(reference, 3).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)
    model.set_keep_unsharded_storage(False)
    with pytest.raises(NotImplementedError, match=r"unshard\.capture"):
        model.set_keep_unsharded_storage(True)


@world(2)
def test_pipeline_like_order_of_backwards() -> None:
    """Contract API-04, ACC-11: several forwards, then their backwards, only the last of which synchronises."""
    model, reference = sharded(), Stack()
    for _ in range(2):
        losses = [loss_of(model, seed) for seed in range(3)]
        for number, loss in enumerate(losses):
            last = number == 2
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            loss.backward()
            loss_of(reference, number).backward()
        assert_gradients(model, reference)
        assert_at_rest(model)


@world(2)
def test_an_embedding_needs_no_weights_in_backward() -> None:
    """Contract API-21, CM-21."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 2))
    reference = nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 2))
    reference.load_state_dict(model.state_dict())
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    model[0].set_unshard_in_backward(False)
    tokens = torch.arange(12)
    for step in range(2):
        loss = model(tokens).square().mean()
        assert count("gather", loss.backward) == 1, step
        reference(tokens).square().mean().backward()
        assert_gradients(model, reference)
    assert_at_rest(model)


@world(2)
def test_chosen_prefetches() -> None:
    """Contract API-09, API-10, CM-32, CM-38: in the order of the list, with unchanged counts and numbers."""
    model, reference = sharded(reshard_after_forward=True), Stack()
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch(blocks[:2])
    blocks[0].set_modules_to_forward_prefetch([blocks[2]])
    blocks[1].set_modules_to_forward_prefetch([])
    blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    seen: list[str] = []
    blocks[0].register_forward_pre_hook(lambda *unused: seen.append(str([u.param_state.value for u in units(model)])))
    for _ in range(2):
        with Collectives() as calls:
            loss_of(model).backward()
        assert len(calls.of("gather")) == 8
        loss_of(reference).backward()
        assert_gradients(model, reference)
    # While block 0 computes: the root and itself unsharded, block 1 gathered by the root, block 2 by block 0.
    assert seen == [str(["unsharded", "unsharded", "gathering", "gathering"])] * 2
    with pytest.raises(ValueError, match="fully_shard was applied"):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    assert_at_rest(model)


@pytest.mark.parametrize("buffers", [1, 2, 5])
@world(2)
def test_several_reduce_buffers(buffers: int) -> None:
    """Contract API-19: numbers do not change."""
    model, reference = Stack(), Stack()
    sharded(model)
    model.set_reduce_scatter_max_input_buffers(buffers)
    for _ in range(2):
        loss_of(model).backward()
        loss_of(reference).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)
    for wrong, error in ((True, TypeError), (1.5, TypeError), (0, ValueError)):
        with pytest.raises(error):
            model.set_reduce_scatter_max_input_buffers(wrong)


class Experts(nn.Module):
    """Each rank may use another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](x)


@world(2)
def test_ranks_that_use_different_parameters() -> None:
    """Contract API-18, FRZ-09: zeros where a rank has no gradient; the mean over both."""
    model, references = fully_shard(Experts()), [Experts(), Experts()]
    model.set_reduce_scatter_unused_params(True)
    for _ in range(2):
        model(batch(), dist.get_rank()).square().mean().backward()
        for expert, reference in enumerate(references):
            (reference(batch(), expert).square().mean() / 2).backward()
    for index, mine in enumerate(model.parameters()):
        used = list(references[index // 2].parameters())[index]
        torch.testing.assert_close(mine.grad.full_tensor(), used.grad, rtol=1e-5, atol=1e-7)


@world(2)
def test_an_optimizer_inside_backward() -> None:
    """Contract RUN-21, INT-05: hooks on sharded parameters run when their gradient is there."""
    model, reference = sharded(), Stack()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    called: list[DTensor] = []

    def step(parameter: torch.Tensor) -> None:
        called.append(parameter)
        assert isinstance(parameter.grad, DTensor)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for seed in range(3):
        loss_of(model, seed).backward()
        assert len(called) == len(optimizers) * (seed + 1)
        assert all(parameter.grad is None for parameter in model.parameters())
        loss_of(reference, seed).backward()
        theirs.step()
        theirs.zero_grad()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), other.detach(), rtol=1e-5, atol=1e-7)


@world(2)
def test_another_method_as_forward() -> None:
    """Contract API-34, API-35."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(WIDTH, WIDTH)

        def encode(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
            """Documented."""
            if fail:
                raise KeyError("on purpose")
            return self.linear(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.encode(x))

    model, reference = fully_shard(Coder()), Coder()
    register_fsdp_forward_method(model, "encode")
    assert model.encode.__doc__ == "Documented." and model.encode.__name__ == "encode"
    model.encode(batch()).square().mean().backward()
    reference.encode(batch()).square().mean().backward()
    assert_gradients(model, reference)
    with pytest.raises(KeyError):
        model.encode(batch(), fail=True)
    assert_at_rest(model)
    with pytest.raises(ValueError, match="'decode'"):
        register_fsdp_forward_method(model, "decode")
    register_fsdp_forward_method(reference, "decode")
    gone = weakref.ref(model)
    gc.collect()
    del model
    assert gone() is None


@world(2)
def test_reset_and_shared_contexts() -> None:
    """Contract API-03, API-36, LZY-05."""
    model, reference = sharded(), Stack()
    model.set_requires_gradient_sync(False)
    loss_of(model, 7).backward()
    with pytest.raises(RuntimeError, match="not the root"):
        model.blocks[0].reset_iter_state()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)
    other = sharded()
    share_comm_ctx([model, other])
    share_comm_ctx([])
    loss_of(other).backward()
    assert_gradients(other, reference)
    with pytest.raises(ValueError, match="fully_shard was applied"):
        share_comm_ctx([reference])


@world(2)
def test_ignored_parameters_are_left_alone() -> None:
    """Contract SEL-06, SEL-09, SDT-09: unsharded, unreduced, plain in the state dict."""
    model = Stack()
    model.register_buffer("statistics", torch.ones(3))
    bias = model.blocks[0].first.bias
    for block in model.blocks:
        fully_shard(block, ignored_params={bias})
    fully_shard(model, ignored_params={bias})
    assert model.blocks[0].first.bias is bias and not isinstance(bias, DTensor)
    assert not isinstance(model.state_dict()["blocks.0.first.bias"], DTensor)
    assert not isinstance(model.state_dict()["statistics"], DTensor)
    loss_of(model, dist.get_rank()).backward()
    reference = Stack()
    loss_of(reference, dist.get_rank()).backward()
    torch.testing.assert_close(bias.grad, reference.blocks[0].first.bias.grad, rtol=1e-5, atol=1e-7)
    assert isinstance(model.blocks[0].first.weight.grad, DTensor)


class Noted:
    """Stands for an event of an accelerator."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


@world(2)
def test_the_next_forward_waits_for_the_optimizer() -> None:
    """Contract API-14, RUN-26."""
    model, event = sharded(), Noted()
    loss_of(model).backward()
    model.set_post_optim_event(event)
    assert event.waits == 0
    loss_of(model)
    loss_of(model)
    assert event.waits == 1


@world(1)
def test_mixed_classes() -> None:
    """Contract CLS-03 to CLS-05, API-25."""
    first, second = fully_shard(nn.Linear(2, 3)), fully_shard(nn.Linear(3, 2))
    assert type(first) is type(second) is get_cls_to_fsdp_cls()[nn.Linear]
    assert type(type(first)) is type
    assert first._get_fsdp_state() is fully_shard.state(first)
    assert type(type(first)(2, 2)) is nn.Linear
    with disable_fsdp_module_new_init():
        assert not hasattr(type(first)(2, 2), "weight")
    assert fully_shard.state(nn.Linear(1, 1)) is None


@world(2)
def test_memory_of_the_process_group() -> None:
    """Contract API-22 to API-24: nothing to take from Gloo, no symmetric memory without CUDA, numbers unchanged."""
    model, reference = sharded(), Stack()
    model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)
    model._set_unshard_async_op(True)
    for enable in (True, False):
        model.blocks[1].set_allocate_memory_from_process_group_for_comm(enable)
        loss_of(model).backward()
        loss_of(reference).backward()
    assert_gradients(model, reference)
    with pytest.raises(AssertionError, match="from a pool"):
        model.blocks[0].set_custom_all_gather(ToyGather())
    model.blocks[2].set_custom_all_gather(ToyGather())
    for refused in ("set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm"):
        with pytest.raises(AssertionError, match=r"'blocks.2' on rank \d has custom collectives"):
            getattr(model.blocks[2], refused)(True)
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        model.blocks[1].set_symm_mem_for_comm()
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)


class Window(nn.Linear):
    """Returns a view of what it computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, : WIDTH // 2]


@pytest.mark.parametrize("reshard", [True, False])
@world(2)
def test_a_view_that_is_overwritten(reshard: bool) -> None:
    """Contract RUN-22 improved: no warning is needed, for the gradients are right."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Window(WIDTH, WIDTH), nn.Linear(WIDTH // 2, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[1](self.layers[0](x)).mul_(2).relu_()
            return self.layers[2](x)

    model, reference = Model(), Model()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model)
    for _ in range(2):
        with Collectives() as calls:
            loss_of(model).backward()
        loss_of(reference).backward()
        assert len(calls.of("gather")) == (6 if reshard else 3)
        assert_gradients(model, reference)
    assert_at_rest(model)


@world(2)
def test_stages_are_logged_and_profiled() -> None:
    """Contract INT-10, under our own names; nothing is said unless somebody listens."""
    model, records = sharded(), []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("unshard")
    logger.addHandler(handler)
    loss_of(model).backward()
    assert records == []
    logger.setLevel(logging.DEBUG)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        loss_of(model).backward()
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)
    stages = [record.split(":")[0] for record in records]
    for stage in ("pre_forward", "post_forward", "pre_backward"):
        assert stages.count(stage) == 4, stage
    assert stages.count("root_pre_forward") == stages.count("root_post_backward") == 1
    assert stages.count("post_backward") >= 2  # units whose inputs need no gradient are closed by the root
    assert any("'blocks.1'" in record for record in records)
    assert "unshard::pre_backward (blocks.1)" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("to_none", [True, False])
@world(2)
def test_zero_grad_also_clears_sums_that_wait(to_none: bool, replicas: int) -> None:
    """Contract ACC-06 improved: what was not synchronised yet is dropped with the rest."""
    mesh = init_device_mesh("cpu", (replicas, 2 // replicas), mesh_dim_names=("replicate", "shard"))
    model, reference = sharded(mesh=mesh), Stack()
    loss_of(model, 5).backward()
    if replicas == 2:
        model.set_requires_all_reduce(False)
    else:
        model.set_requires_gradient_sync(False)
    loss_of(model, 6).backward()
    model.zero_grad(to_none)
    model.set_requires_gradient_sync(True)
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)


@world(2)
def test_an_optimizer_of_gathered_parameters_is_refused() -> None:
    """It would step copies that nobody looks at; the message says when to build it."""
    model, reference = sharded(), Stack()
    model.blocks[0].unshard()
    wrong = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"SGD holds the unsharded parameter 'first.weight'"):
        wrong.step()
    right = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    loss_of(reference).backward()
    for optimizer in (right, other):
        optimizer.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach())
    model.blocks[0].unshard()
    right.add_param_group({"params": [model.blocks[0].first.weight]})
    with pytest.raises(RuntimeError, match="unsharded parameter"):
        right.step()
