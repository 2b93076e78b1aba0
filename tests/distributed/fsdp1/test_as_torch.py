"""The wrapper beside PyTorch's own: the same numbers, and errors of the same types."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from bed import world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import unshard
import unshard.wrap
from unshard import ShardingStrategy
from unshard.fsdp1.build import _compute_device
from unshard.fsdp1.groups import Groups

S = ShardingStrategy
flat_or_originals = pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
BOTH: tuple[Any, Any] = (unshard, torch_fsdp)


def with_gradients(library: Any, strategy: S, originals: bool) -> Any:
    """Two units and a parameter that no unit has; the gradients are random, and zero in the padding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5)), nn.Linear(5, 3), nn.Linear(3, 3))
    options = {
        "sharding_strategy": library.ShardingStrategy[strategy.name],
        "use_orig_params": originals,
        "ignored_states": [model[2].weight],
        "device_id": torch.device("cpu"),
    }
    wrapper = library.FullyShardedDataParallel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD
        model[0] = wrapper(model[0], **options)
        wrapped = wrapper(model, **options)
    for each in wrapped.parameters():
        if each.numel():
            each.grad = torch.randn_like(each)
    for unit in wrapper.fsdp_modules(wrapped) if not originals else ():
        flat = unit._handle.flat_param
        flat.grad[flat.numel() - flat._shard_numel_padded :] = 0
    return wrapped


@flat_or_originals
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.NO_SHARD], ids=lambda each: each.name)
@world(2, 3)
def test_f1_83_clipping_bit_for_bit(strategy: S, originals: bool) -> None:
    for order, limit in itertools.product((2.0, 1.0, 3.0, float("inf")), (0.01, 1e6)):
        results = []
        for library in BOTH:
            model = with_gradients(library, strategy, originals)
            norm = model.clip_grad_norm_(limit, order)
            results.append([norm, *(each.grad for each in model.parameters() if each.grad is not None)])
        mine, theirs = results
        assert len(mine) == len(theirs) > 1 and all(map(torch.equal, mine, theirs)), (order, limit)
    ours = with_gradients(unshard, strategy, originals)
    for wrong in (0, -1.0, "two", None):
        with pytest.raises(ValueError, match="norm_type must be"):
            ours.clip_grad_norm_(1.0, wrong)
    with pytest.raises(ValueError, match="max_norm must"):
        ours.clip_grad_norm_(-1.0)


# -- misuse ----------------------------------------------------------------------------------------------------------


class Use:
    """What misuses are made of, with one library or the other."""

    def __init__(self, library: Any):
        self.library, self.fsdp = library, library.FullyShardedDataParallel
        self.wrap = unshard.wrap if library is unshard else torch_wrap
        self.strategies, self.types = library.ShardingStrategy, library.StateDictType

    def one(self, module: nn.Module | None = None, **options: Any) -> Any:
        return self.fsdp(nn.Linear(4, 4) if module is None else module, device_id=torch.device("cpu"), **options)

    def inner(self, call: Callable[[Any], Any]) -> None:
        """`call` with a unit that is not the root."""
        model = self.one(nn.Sequential(self.one(), nn.Linear(4, 4)))
        model(torch.ones(1, 4))
        call(model.module[0])

    def summon(self, inside: Callable[[Any], Any] = lambda model: None, **options: Any) -> None:
        model = self.one(use_orig_params=options.pop("use_orig_params", False))
        with self.fsdp.summon_full_params(model, **options):
            inside(model)

    def set_type(self, name: str, **options: Any) -> None:
        self.fsdp.set_state_dict_type(self.one(), self.types[name], **options)

    def disagree(self) -> None:
        model = self.one(nn.Sequential(self.one(), nn.Linear(4, 4)))
        self.fsdp.set_state_dict_type(model.module[0], self.types.SHARDED_STATE_DICT)
        self.fsdp.get_state_dict_type(model)

    def load_local_with_mesh(self) -> None:
        model = self.one(device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        with self.fsdp.state_dict_type(model, self.types.LOCAL_STATE_DICT):
            model.state_dict()

    def under_one_root(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        self.one(nn.Sequential(self.one(**first), nn.Linear(4, 4)), **second)(torch.ones(1, 4))

    def hook_twice(self) -> None:
        model = self.one()
        for _ in range(2):
            model.register_comm_hook(None, lambda *tensors: None)

    def load_changed(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Load optimizer state after `change`."""
        model = self.one()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        states = self.fsdp.optim_state_dict(model, optimizer)
        change(states["state"])
        self.fsdp.optim_state_dict_to_load(model, optimizer, states)

    def nested_enable_wrap(self) -> None:
        with self.wrap.enable_wrap(wrapper_cls=self.fsdp), self.wrap.enable_wrap(wrapper_cls=self.fsdp):
            pass


def layers(change: Callable[[Any], Any]) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    change(module)
    return module


def entered(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


MISUSES: dict[str, Callable[[Use], Any]] = {
    "apply while summoned": lambda use: use.summon(lambda model: model.apply(print)),
    "summon while summoned": lambda use: use.summon(lambda model: entered(use.fsdp.summon_full_params(model))),
    "writeback of one rank": lambda use: use.summon(rank0_only=True),
    "gradients of a flat parameter": lambda use: use.summon(with_grads=True),
    "offloaded gradients": lambda use: use.summon(with_grads=True, offload_to_cpu=True, use_orig_params=True),
    "the state at rest": lambda use: use.one()._assert_state([]),
    "a hook twice": Use.hook_twice,
    "a hook that is none": lambda use: use.one().register_comm_hook(None, 3),
    "a hook inside": lambda use: use.inner(lambda unit: unit.register_comm_hook(None, print)),
    "no_sync inside": lambda use: use.inner(lambda unit: entered(unit.no_sync())),
    "clipping inside": lambda use: use.inner(lambda unit: unit.clip_grad_norm_(1.0)),
    "both ignored": lambda use: use.one(ignored_modules=[], ignored_states=[]),
    "parameters as modules": lambda use: use.one(layer := nn.Linear(4, 4), ignored_modules=[layer.weight]),
    "ignored_modules without a list": lambda use: use.one(ignored_modules=3),
    "ignored_states without a list": lambda use: use.one(ignored_states=3),
    "parameters and modules": lambda use: use.one(layer := nn.Linear(4, 4), ignored_states=[layer, layer.weight]),
    "tensors ignored": lambda use: use.one(ignored_states=[torch.ones(2)]),
    "a unit ignored": lambda use: use.one(nn.Sequential(unit := use.one()), ignored_states=[unit]),
    "group and mesh": lambda use: use.one(process_group=dist.group.WORLD, device_mesh=mesh()),
    "hybrid without groups": lambda use: use.one(sharding_strategy=use.strategies.HYBRID_SHARD),
    "hybrid with a group": lambda use: use.one(
        sharding_strategy=use.strategies.HYBRID_SHARD, process_group=dist.group.WORLD
    ),
    "hybrid with numbers": lambda use: use.one(sharding_strategy=use.strategies.HYBRID_SHARD, process_group=(1, 2)),
    "hybrid in one dimension": lambda use: use.one(sharding_strategy=use.strategies.HYBRID_SHARD, device_mesh=mesh()),
    "two dtypes": lambda use: use.one(layers(lambda module: module[0].double())),
    "frozen beside trained": lambda use: use.one(layers(lambda module: module[0].requires_grad_(False))),
    "a scalar": lambda use: use.one(layers(lambda m: m.register_parameter("s", nn.Parameter(torch.tensor(1.0))))),
    "integers": lambda use: use.one(
        layers(lambda m: m.register_parameter("i", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)))
    ),
    "a policy that is none": lambda use: use.one(auto_wrap_policy=3),
    "a class as policy": lambda use: use.one(auto_wrap_policy=nn.Linear),
    "what a policy returns": lambda use: use.one(
        nn.Sequential(nn.Linear(4, 4)), auto_wrap_policy=use.wrap.CustomPolicy(lambda module: 3)
    ),
    "a policy over units": lambda use: use.one(
        nn.Sequential(use.one()), auto_wrap_policy=use.wrap.ModuleWrapPolicy({nn.Linear})
    ),
    "classes of a policy": lambda use: use.wrap.ModuleWrapPolicy(3),
    "enable_wrap twice": Use.nested_enable_wrap,
    "a configuration of another type": lambda use: use.set_type(
        "FULL_STATE_DICT", state_dict_config=use.library.ShardedStateDictConfig()
    ),
    "an optimizer's of another type": lambda use: use.set_type(
        "FULL_STATE_DICT", optim_state_dict_config=use.library.ShardedOptimStateDictConfig()
    ),
    "types of state dicts": Use.disagree,
    "local with a mesh": Use.load_local_with_mesh,
    "use_orig_params differs": lambda use: use.under_one_root({"use_orig_params": True}, {"use_orig_params": False}),
    "limit_all_gathers differs": lambda use: use.under_one_root({}, {"limit_all_gathers": False}),
    "a graph of gradients": lambda use: use.one()(torch.ones(1, 4)).pow(2).sum().backward(create_graph=True),
    "nothing to load": lambda use: use.one().load_state_dict({}),
    "state of another shape": lambda use: use.load_changed(lambda state: state["weight"].update(exp_avg=torch.ones(3))),
    "state of some": lambda use: use.load_changed(lambda state: state["weight"].pop("exp_avg")),
    "different steps": lambda use: use.load_changed(lambda state: state["weight"].update(step=torch.tensor(7.0))),
    "different numbers": lambda use: use.load_changed(
        lambda state: [state[name].update(own=number) for number, name in enumerate(("weight", "bias"))]
    ),
}


@pytest.mark.filterwarnings("ignore")
@world(2)
def test_misuse_raises_what_pytorch_raises() -> None:
    """Programs catch what PyTorch raises: ours are subclasses of it."""
    wrong = {}
    for name, misuse in MISUSES.items():
        raised: list[Any] = []
        for library in (torch_fsdp, unshard):
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # of PyTorch's own assertions
                try:
                    misuse(Use(library))
                    raised.append(None)
                except Exception as error:
                    raised.append(error)
        theirs, mine = raised
        if theirs is None or not isinstance(mine, type(theirs)):
            wrong[name] = (theirs, mine)
    assert not wrong, wrong


@world(2, 3)
def test_f1_20_ranks_may_ignore_different_modules() -> None:
    """As long as what they shard is the same; what differs is named."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    reference = nn.Sequential(first, last)
    reference(torch.ones(size, 4)).sum().backward()
    expected = torch.cat([each.grad.reshape(-1) for each in reference.parameters()]) / size
    extra = [nn.Identity() if number % 2 else nn.Dropout(0.0) for number in range(rank + 1)]
    model = nn.Sequential(first, *extra, last)
    first.other = nn.Linear(rank + 1, 2)
    wrapped = unshard.FullyShardedDataParallel(model, ignored_modules=[*extra, first.other])
    wrapped(torch.ones(1, 4)).sum().backward()
    flat = wrapped._handle.flat_param
    mine = expected[rank * flat.numel() :][: flat.numel()]
    torch.testing.assert_close(flat.grad[: mine.numel()], mine)
    layer = nn.Linear(4, 4 if rank == 0 else 5)
    with pytest.raises(ValueError, match=r"rank 0 of the group has .*\(4, 4\), rank 1 has .*\(5, 4\)"):
        unshard.FullyShardedDataParallel(layer)


def test_f1_22_a_module_that_stays_on_the_cpu() -> None:
    with (
        mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cuda")),
        mock.patch("unshard.fsdp1.build.served_device_types", return_value=["cpu"]),
        pytest.warns(UserWarning, match="stays on the CPU"),
    ):
        assert _compute_device(None, Groups(S.FULL_SHARD, None), []) == torch.device("cpu")
