"""How a sharded model behaves while it runs: reuse, accumulation, freezing, checkpointing, exceptions, errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.stack import WIDTH, Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded, units
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from unshard import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, OptimizerOffloadPolicy, fully_shard
from unshard.comm import process_group
from unshard.engine.params import offload
from unshard.engine.states import Phase
from unshard.errors import ArgumentError, StateError

# --- forward and backward ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [None, True, False])
@world(2)
def test_what_modules_hold_at_every_stage(reshard: bool | None) -> None:
    """Contract RUN-02, RUN-10, RUN-28, RAF-01 to RAF-03."""
    model = sharded(reshard_after_forward=reshard)
    seen: list[nn.Parameter] = []
    model.blocks[1].first.register_forward_hook(lambda module, args, output: seen.append(module.weight))
    for _ in range(2):
        loss = loss_of(model)
        assert type(seen[-1]) is nn.Parameter and seen[-1].shape == (WIDTH, WIDTH)
        kept = {True: (), False: (model.head, model.blocks[0].first), None: (model.head,)}[reshard]
        for module in (model.head, model.blocks[0].first):
            assert isinstance(module.weight, DTensor) == (module not in kept)
        loss.backward()
        assert_at_rest(model)
        model.zero_grad()
    assert seen[0] is seen[1]
    assert seen[0].untyped_storage().nbytes() == 0


@pytest.mark.parametrize("reshard", [True, False])
@world(2, 3)
def test_a_module_called_several_times(reshard: bool) -> None:
    """Contract MUL-01 to MUL-03: one reduction, whatever the number of uses."""
    model, reference = Stack(), Stack()
    for each in (model, reference):
        each.run = lambda block, x: block(block(x) * 0.5)
    sharded(model, reshard_after_forward=reshard)
    for _ in range(2):
        with Collectives() as calls:
            loss_of(model).backward()
        assert len(calls.of("reduce_scatter")) == 4
        loss_of(reference).backward()
        assert_gradients(model, reference)
    assert_at_rest(model)


@world(2)
def test_two_forwards_before_one_backward() -> None:
    """Contract MUL-04."""
    model, reference = sharded(), Stack()
    (loss_of(model, 0) + loss_of(model, 1)).backward()
    (loss_of(reference, 0) + loss_of(reference, 1)).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)


@world(2)
def test_backward_twice_through_one_forward() -> None:
    """Contract RUN-18."""
    model, reference = sharded(), Stack()
    for each in (model, reference):
        loss = loss_of(each)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_gradients(model, reference)


@world(2)
def test_forwards_without_backward_do_no_harm() -> None:
    """Contract RUN-16, RUN-17, RUN-19, CM-17: eval, inference mode, a loss that is thrown away."""
    model, reference = Stack(), Stack()
    sharded(model)
    with torch.inference_mode():
        loss_of(model)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model), loss_of(reference))
    loss_of(model)
    for _ in range(2):
        loss_of(model).backward()
        loss_of(reference).backward()
    assert_gradients(model, reference)


def _halve_directly(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.mul_(0.5)


def _halve_locally(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).mul_(0.5)


def _halve_by_optimizer(parameters: list[nn.Parameter], **options: bool) -> None:
    for parameter in parameters:
        parameter.grad = parameter.detach() * 0.5
    torch.optim.SGD(parameters, lr=1.0, **options).step()
    for parameter in parameters:
        parameter.grad = None


def _halve_foreach(parameters: list[nn.Parameter]) -> None:
    _halve_by_optimizer(parameters, foreach=True)


@pytest.mark.parametrize("halve", [_halve_directly, _halve_locally, _halve_foreach])
@world(2)
def test_no_stale_weights_after_an_eval_forward(halve: Callable) -> None:
    """Contract CM-18, RAF-13 improved: weights that are kept after forward are gathered again if they have changed."""
    model, reference = sharded(reshard_after_forward=False), Stack()
    with torch.no_grad():
        loss_of(model)
        with Collectives() as calls:
            loss_of(model)
        assert calls.calls == []
        halve([param.sharded for unit in units(model) for param in unit.params])
        _halve_directly(list(reference.parameters()))
        torch.testing.assert_close(loss_of(model), loss_of(reference))


@world(2)
def test_inputs_of_every_shape() -> None:
    """Contract RUN-25, RUN-29: several tensors, keywords, containers, other values; unused outputs."""

    class Chatty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, pair: tuple, *, options: dict, name: str) -> dict:
            x = self.linear(pair[0]) * pair[1] + options["more"]
            return {"x": x, "unused": x * 2, "name": name, "none": None}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Chatty(), Chatty()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.inner[0]((x, x + 1), options={"more": x}, name="a")
            second = self.inner[1]((first["x"], x), options={"more": first["x"]}, name=first["name"])
            assert second["name"] == "a" and second["none"] is None
            return second["x"]

    model, reference = Outer(), Outer()
    for inner in model.inner:
        fully_shard(inner)
    fully_shard(model)
    x, y = batch(requires_grad=True), batch(requires_grad=True)
    for _ in range(2):
        model(x).square().mean().backward()
        reference(y).square().mean().backward()
    assert_gradients(model, reference)
    torch.testing.assert_close(x.grad, y.grad)
    assert_at_rest(model)


@world(2)
def test_a_unit_is_closed_as_soon_as_its_inputs_are_done() -> None:
    """Contract RUN-08, with several inputs, and again when a retained graph is run through a second time."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(x * y)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Sum()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = x * 2
            before.register_hook(lambda gradient: phases.append(fully_shard.state(self.inner).unit.phase))
            return self.inner(before, y=x)

    phases: list[Phase] = []
    model = Outer()
    fully_shard(model.inner)
    fully_shard(model)
    loss = model(batch(requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert phases == [Phase.IDLE, Phase.IDLE]


@world(2)
def test_after_a_forward_without_graph_everything_is_at_rest() -> None:
    """Contract LZY-06 improved: an optimizer built after a first evaluation gets the parameters it must step."""
    model, reference = sharded(), Stack()
    with torch.no_grad():
        loss_of(model)
    assert_at_rest(model)
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            loss_of(each).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model), loss_of(reference))


# --- gradients over several backwards ----------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@world(1, 2, 3)
def test_accumulation_with_communication(set_to_none: bool) -> None:
    """Contract ACC-01, ACC-09."""
    model, reference = sharded(), Stack()
    for _ in range(2):
        for seed in range(3):
            loss_of(model, seed).backward()
            loss_of(reference, seed).backward()
        assert_gradients(model, reference)
        model.zero_grad(set_to_none)
        reference.zero_grad(set_to_none)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@world(1, 2, 3)
def test_accumulation_without_communication(reduce_dtype: torch.dtype | None) -> None:
    """Contract ACC-02 to ACC-05: kept unsharded, reduced once."""
    model, reference = sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype)), Stack()
    for seed in range(3):
        model.set_requires_gradient_sync(seed == 2)
        with Collectives() as calls:
            loss_of(model, seed).backward()
        expected = 4 if seed == 2 and dist.get_world_size() > 1 else 0
        assert len(calls.of("reduce_scatter")) == expected
        assert (model.head.weight.grad is None) == (seed < 2)
        loss_of(reference, seed).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)


@pytest.mark.parametrize("set_to_none", [True, False])
@world(2)
def test_zero_grad_between_forward_and_backward(set_to_none: bool) -> None:
    """The root's parameters are unsharded then; the gradients of the sharded ones are cleared all the same."""
    model, reference = sharded(), Stack()
    for each in (model, reference):
        loss_of(each, 1).backward()
        loss = loss_of(each)
        each.zero_grad(set_to_none)
        loss.backward()
    assert_gradients(model, reference)


# --- frozen, tied and mixed --------------------------------------------------------------------------------------


@world(2, 3)
def test_freezing_and_unfreezing_while_training() -> None:
    """Contract FRZ-01 to FRZ-05; FRZ-06 improved: late unfreezing under mixed precision works."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float64)
    model, reference = Stack(), Stack().double()
    for each in (model, reference):
        each.blocks[1].requires_grad_(False)
        each.blocks[0].first.requires_grad_(False)
    sharded(model, mp_policy=policy)
    for frozen in (True, False, True):
        for each in (model, reference):
            each.blocks[1].requires_grad_(not frozen)
            each.zero_grad()
        loss_of(model).backward()
        reference(batch().double()).square().mean().backward()
        reference32 = copy.deepcopy(reference).float()
        for old, new in zip(reference.parameters(), reference32.parameters(), strict=True):
            new.grad = None if old.grad is None else old.grad.float()
        assert_gradients(model, reference32, rtol=1e-4)


@pytest.mark.parametrize("grouped", [True, False])
@world(2, 3)
def test_several_dtypes_in_one_unit(grouped: bool) -> None:
    """Contract SEL-12, MP-30 and MP-32 improved: trainable parameters of several dtypes, an integer one.

    One gather of bytes; one reduction, or one per dtype where a backend, or an exchange, takes one tensor at a time.
    """
    with mock.patch.object(process_group, "_exchange_is_faster", lambda *unused: not grouped):
        _check_several_dtypes(grouped)


def _check_several_dtypes(grouped: bool) -> None:

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.low = nn.Linear(WIDTH, WIDTH).bfloat16()
            self.high = nn.LayerNorm(WIDTH)
            self.wide = nn.Parameter(torch.randn(7, WIDTH).double())
            self.table = nn.Parameter(torch.arange(5) + 2**60, requires_grad=False)
            self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.high(self.low(x.bfloat16()).float()).double() + self.wide.sum(0)
            return y * (self.table[3] - 2**60) * self.flags[2]

    model, reference = fully_shard(Mixed()), Mixed()
    with Collectives() as calls:
        out = model(batch())
        out.square().mean().backward()
    assert [call.kind for call in calls.calls] == ["gather"] + ["reduce_scatter"] * (1 if grouped else 3)
    expected = reference(batch())
    expected.square().mean().backward()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert_gradients(model, reference, rtol=1e-2, atol=1e-5)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.grad is None or mine.grad.dtype == theirs.dtype


@world(2)
def test_a_parameter_in_two_units() -> None:
    """Contract LZY-09: the first unit owns it, the other uses it."""
    model, reference = Stack(), Stack()
    for each in (model, reference):
        each.blocks[1].first.weight = each.blocks[0].first.weight
    sharded(model)
    for each in (model, reference):
        loss_of(each).backward()
    assert_gradients(model, reference)
    assert [len(unit.params) for unit in units(model)] == [2, 4, 3, 4]


@world(2)
def test_parameters_without_elements_and_units_without_parameters() -> None:
    """Contract SEL-03, API-33."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.also_nothing = nn.Parameter(torch.empty(4, 0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.nothing.sum() + self.also_nothing.sum()

    model = nn.Sequential(nn.Linear(WIDTH, 3), Empty(), nn.Linear(3, 2))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(batch()).sum().backward()
    assert model[0].weight.grad is not None
    assert units(model)[0].params == []


# --- activation checkpointing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("order", ["checkpoint outside", "checkpoint inside", "two units in one"])
@pytest.mark.parametrize("reentrant", [True, False])
@world(2)
def test_activation_checkpointing(reentrant: bool, order: str, reshard: bool) -> None:
    """Contract INT-01, CM-26: right gradients, and as many collectives as without checkpointing."""

    def saved(function: Callable, *args: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, *args, use_reentrant=reentrant)

    def inside(block: nn.Module) -> None:
        forward = block.forward
        block.forward = lambda x: saved(forward, x)

    class Pairs(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(0, 4, 2):
                x = saved(lambda x, i=i: self.blocks[i + 1](self.blocks[i](x)), x)
            return self.head(x)

    reference = Stack(4)
    model = Pairs(4) if order == "two units in one" else Stack(4)
    if order == "checkpoint outside":
        model.run = saved
    sharded(model, reshard_after_forward=reshard)
    if order == "checkpoint inside":
        for block in model.blocks:
            inside(block)
    for step in range(3):
        x, y = batch(step, requires_grad=True), batch(step, requires_grad=True)
        with Collectives() as calls:
            model(x).square().mean().backward()
        reference(y).square().mean().backward()
        assert len(calls.of("gather")) == (10 if reshard else 5)
        assert len(calls.of("reduce_scatter")) == 5
        torch.testing.assert_close(x.grad, y.grad)
    assert_gradients(model, reference)
    assert_at_rest(model)


@pytest.mark.parametrize("reentrant", [True, False])
@world(2)
def test_the_whole_model_inside_a_checkpoint(reentrant: bool) -> None:
    model, reference = sharded(), Stack()
    for _ in range(2):
        x, y = batch(requires_grad=True), batch(requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
        reference(y).square().mean().backward()
    assert_gradients(model, reference)
    assert_at_rest(model)


# --- exceptions --------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


@contextmanager
def failing(module: nn.Module, when: str):
    """`module` raises in its forward, or in its backward."""

    def raise_boom(*args: object) -> None:
        raise Boom

    if when == "forward":
        handle = module.register_forward_pre_hook(raise_boom)
    else:
        handle = module.register_forward_hook(lambda module, args, output: output.register_hook(raise_boom) and None)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("when", ["forward", "backward"])
@world(1, 2, 3)
def test_an_exception_leaves_the_model_ready(when: str, reshard: bool | None) -> None:
    """RUN-23 improved: in the middle of a step, with gathers and reductions in flight, on every rank."""
    model, reference = sharded(reshard_after_forward=reshard), Stack()
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    for attempt in range(3):
        with failing(model.blocks[1].second, when), pytest.raises(Boom):
            loss_of(model).backward()
        assert_at_rest(model)
        model.zero_grad()
        if attempt == 1:
            with torch.no_grad():
                torch.testing.assert_close(loss_of(model), loss_of(reference))
        for each in (model, reference):
            loss_of(each, attempt).backward()
        assert_gradients(model, reference)
        assert_at_rest(model)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()


@world(2)
def test_an_exception_in_forward_frees_memory_at_once() -> None:
    model = sharded()
    loss_of(model).backward()
    with failing(model.blocks[1].second, "forward"), pytest.raises(Boom):
        loss_of(model)
    assert_at_rest(model)


@world(2)
def test_a_forward_inside_an_except_block_is_no_failure() -> None:
    model, reference = sharded(), Stack()
    try:
        raise Boom
    except Boom:
        loss = loss_of(model)
    assert not isinstance(model.head.weight, DTensor)
    loss.backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)


@world(2)
def test_an_exception_the_parent_catches() -> None:
    """Only the failed unit is put to rest; the forward goes on without it."""

    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        try:
            return block(x)
        except Boom:
            return x

    model, reference = Stack(), Stack()
    for each in (model, reference):
        each.run = run
    sharded(model)
    for _ in range(2):
        for each in (model, reference):
            with failing(each.blocks[1].second, "forward"):
                loss_of(each).backward()
        assert_gradients(model, reference)
        assert_at_rest(model)


# --- unshard and reshard by hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
@world(2)
def test_unshard_by_hand(asynchronous: bool) -> None:
    """Contract API-01, API-02, API-30, API-31, LZY-14."""
    model = sharded()
    block = model.blocks[0]
    handle = block.unshard(async_op=asynchronous)
    if asynchronous:
        assert isinstance(block.first.weight, DTensor)
        handle.wait()
        handle.wait()
    torch.testing.assert_close(block.first.weight.detach(), Stack().blocks[0].first.weight.detach(), rtol=0, atol=0)
    block.reshard()
    block.reshard()
    assert isinstance(block.first.weight, DTensor)
    block.unshard(async_op=True)
    with Collectives() as calls:
        loss = loss_of(model)
    assert len(calls.calls) == 3
    loss.backward()
    assert_at_rest(model)


# --- arguments ---------------------------------------------------------------------------------------------------


@world(2)
def test_wrong_arguments() -> None:
    """Contract ARG-12, ARG-13, ARG-15, ARG-16, SEL-10, RAF-07."""
    model = Stack()
    with pytest.raises(ValueError, match=r"ModuleList.*each of its modules"):
        fully_shard(model.blocks)
    with pytest.raises(ValueError, match=r"1\.5"):
        fully_shard(model, reshard_after_forward=1.5)
    with pytest.raises(TypeError):
        fully_shard(model, init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="mp_policy must be"):
        fully_shard(model, mp_policy=torch.bfloat16)
    with pytest.raises(ValueError, match=r"such as unshard\.CPUOffloadPolicy\(\)"):
        fully_shard(model, offload_policy=True)
    with pytest.raises(TypeError, match="floating-point"):
        MixedPrecisionPolicy(param_dtype=torch.int8)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    sharded(model)
    with pytest.raises(AssertionError, match="once per module"):
        fully_shard(model)
    with pytest.raises(NotImplementedError, match=r"bottom-up"):
        fully_shard(model.head)
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"'scale'.*reshape\(1\)"):
        fully_shard(scalar)


@world(2)
def test_a_child_that_ran_first() -> None:
    """Contract LZY-02, LZY-03."""
    model = sharded()
    model.blocks[0](batch())
    with pytest.raises(StateError, match=r"Unit 'blocks.0' ran its own forward"):
        model(batch())
    model = sharded()
    loss_of(model).backward()
    model.blocks[0](batch()).sum().backward()
    assert_at_rest(model)


@world(2)
def test_offload_to_the_host_on_a_cpu_mesh() -> None:
    """Contract OFF-06."""
    model, reference = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), Stack()
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is page-locked memory")
@pytest.mark.parametrize("policy", [CPUOffloadPolicy(), OptimizerOffloadPolicy()])
@world(2)
def test_page_locked_memory_without_an_accelerator(policy: OffloadPolicy) -> None:
    """Contract OFF-06: one warning per process, however many units there are."""
    offload._warn_of_unpinned.cache_clear()
    with pytest.warns(UserWarning, match="pin_memory=True needs an accelerator") as warned:
        model, reference = sharded(offload_policy=policy), Stack()
        sharded(offload_policy=policy)
    assert len(warned) == 1 and warned[0].filename.endswith(("stack.py", "test_fully_shard.py"))
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)


@world(4)
def test_a_mesh_of_some_ranks() -> None:
    """Contract MESH-06: two disjoint groups of two, each with its own gradients."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))["shard"]
    model, reference = sharded(mesh=mesh), Stack()
    loss_of(model, rank // 2).backward()
    loss_of(reference, rank // 2).backward()
    assert_gradients(model, reference)


def _wider(rank: int) -> nn.Module:
    return nn.Linear(4, 6 + 2 * rank)


def _more(rank: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + rank)))


def _other_dtype(rank: int) -> nn.Module:
    return nn.Linear(4, 4, dtype=torch.float64 if rank else torch.float32)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_wider, r"rank 0 .* 'weight' of shape \(6, 4\).*, rank 1 has .* shape \(8, 4\)"),
        (_more, r"rank 0 .* nothing more, rank 1 has parameter '2.weight'"),
        (_other_dtype, r"rank 0 .* torch.float32.*, rank 1 has .* torch.float64"),
    ],
)
@world(2, 3)
def test_ranks_that_disagree_raise_at_once(build: Callable, message: str) -> None:
    """On every rank, before anything is changed, instead of a hang at the first forward."""
    model = build(min(dist.get_rank(), 1))
    with pytest.raises(ArgumentError, match=message):
        fully_shard(model)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@world(2)
def test_ranks_with_another_order_of_units() -> None:
    model = Stack()
    with pytest.raises(
        ArgumentError, match=r"disagree about the module .*rank 0 .* module Block, rank 1 has module Linear"
    ):
        fully_shard(model.head if dist.get_rank() else model.blocks[0])
