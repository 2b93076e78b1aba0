"""What programs do to a sharded model besides training it: it works, or it is said that it does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bed import world
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unshard import FullyShardedDataParallel as FSDP
from unshard import ShardingStrategy, fully_shard
from unshard.composable import fully_shard as legacy

KINDS = ["fully_shard", "flat", "originals", "legacy"]
kinds = pytest.mark.parametrize("kind", KINDS)


class Net(nn.Module):
    """Units `a` and `b`, and a root with `c`, which it keeps unsharded from forward to backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(7, 13), nn.Linear(13, 13), nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def build(kind: str) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank
        for name in ("a", "b"):
            setattr(model, name, sharded(getattr(model, name), kind))
        return sharded(model, kind)


def sharded(module: nn.Module, kind: str) -> Any:
    if kind == "plain":
        return module
    if kind in ("flat", "originals"):
        return FSDP(module, use_orig_params=kind == "originals")
    return (fully_shard if kind == "fully_shard" else legacy)(module)


def loss_of(model: nn.Module, step: int, kind: str) -> Tensor:
    """Of this rank's part of a batch; the unsharded model gets all of it."""
    dice = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 7, generator=dice), torch.randn(12, 5, generator=dice)
    rank, size = (0, 1) if kind == "plain" else (dist.get_rank(), dist.get_world_size())
    return F.mse_loss(model(x.chunk(size)[rank]), y.chunk(size)[rank])


def train(model: nn.Module, optimizer: Any, steps: Iterator[int] | range, kind: str) -> None:
    for step in steps:
        loss_of(model, step, kind).backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.05)


def values(model: nn.Module) -> dict[str, Tensor]:
    found = model.state_dict()
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def assert_as_plain(program: Callable[[str], nn.Module], kind: str) -> None:
    expected, found = values(program("plain")), values(program(kind))
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name} {text}"
        )


@contextmanager
def refused(kind: type[Exception], pattern: str) -> Iterator[None]:
    """On all ranks, so that all of them go on."""
    with pytest.raises(kind, match=pattern):
        yield


# -- optimizers of parameters that the model does not have any more ----------------------------------------------


@world(1, 2, 3)
def test_a_load_that_assigns_makes_an_older_optimizer_useless() -> None:
    """Stepping it is an error, because the model would not learn. One that is built afterwards trains."""
    model = build("fully_shard")
    old = adam(model)
    train(model, old, range(1), "fully_shard")
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()}, assign=True)
    loss_of(model, 1, "fully_shard").backward()
    with refused(RuntimeError, r"Adam holds 6 of its 6 parameters \(a\.weight.*assign=True.*Build the optimizer after"):
        old.step()
    new = adam(model)
    before = {name: each.clone() for name, each in values(model).items()}
    new.step()
    assert all(not torch.equal(before[name], value) for name, value in values(model).items())
    old.add_param_group({"params": list(model.parameters())})
    old.step()  # it has those of the model, too


@pytest.mark.parametrize("kind", ["flat", "originals", "legacy"])
@pytest.mark.filterwarnings("ignore")
@world(2)
def test_the_wrapper_keeps_its_parameters_when_a_load_assigns(kind: str) -> None:
    def program(kind: str) -> nn.Module:
        model = build(kind)
        optimizer = adam(model)
        train(model, optimizer, range(1), kind)
        halves = {name: each.clone() * 0.5 for name, each in model.state_dict().items()}
        model.load_state_dict(halves, assign=kind != "plain")
        train(model, optimizer, range(1, 3), kind)
        return model

    assert_as_plain(program, kind)


@pytest.mark.parametrize("kind", ["fully_shard", "originals"])
@world(2)
def test_an_assigned_parameter_and_an_older_optimizer(kind: str) -> None:
    model = build(kind)
    old = adam(model)
    train(model, old, range(1), kind)
    model.c.weight = nn.Parameter(model.c.weight.detach().clone())
    loss_of(model, 1, kind).backward()
    if model.c.weight.numel():
        with refused(RuntimeError, r"1 of its 6 parameters \(c\.weight\) as they were before"):
            old.step()


@pytest.mark.parametrize("kind", ["fully_shard", "flat"])
@world(2)
def test_an_optimizer_built_between_two_calls(kind: str) -> None:
    """An error where a parameter would never learn; none where a module outside, or the optimizer, has it."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(sharded(first, kind), second)
    optimizer = adam(model)
    kept = nn.Linear(3, 3)
    kept.weight, kept.bias = second.weight, second.bias
    model[1] = sharded(second, kind)
    optimizer.step()  # the parameters of `kept`
    del kept
    optimizer.param_groups[0]["lr"] = 0.1
    other = adam(model)
    other.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    other.step()
    late = adam(nn.Sequential(model[0]))
    early = torch.optim.Adam([*late.param_groups[0]["params"], *(third := nn.Linear(3, 3)).parameters()])
    outer = sharded(third, kind)
    with refused(RuntimeError, r"before the model was sharded, which has replaced weight.*\(2 of its \d"):
        early.step()
    for parameter in outer.parameters():
        parameter.requires_grad_(False)
    early.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    early.step()  # frozen: it is not to be trained


# -- changes between forward and backward --------------------------------------------------------------------------


@kinds
@world(1, 2)
def test_a_conversion_between_forward_and_backward(kind: str) -> None:
    def program(kind: str) -> nn.Module:
        model = build(kind)
        optimizer = adam(model)
        train(model, optimizer, range(1), kind)
        if kind != "plain":
            loss = loss_of(model, 5, kind)
            model.double()
            with refused(RuntimeError, "changed between forward and backward, .*by .to.dtype.*run forward again"):
                loss.backward()
            model.float()
            model(torch.ones(1, 7))  # nothing comes back
            model.double()
            model.float()
        train(model, optimizer, range(1, 3), kind)
        return model

    assert_as_plain(program, kind)


@kinds
@world(2)
def test_freezing_while_the_root_is_kept_unsharded(kind: str) -> None:
    """The modules have unsharded parameters then; with one flat parameter there are none to freeze."""

    def program(kind: str) -> nn.Module:
        model = build(kind)
        optimizer = adam(model)
        train(model, optimizer, range(1), kind)
        loss_of(model, 5, kind)
        for parameter in model.a.parameters() if flat else model.c.parameters():
            parameter.requires_grad_(False)
        train(model, optimizer, range(1, 3), kind)
        loss_of(model, 5, kind)
        for parameter in model.a.parameters() if flat else model.c.parameters():
            parameter.requires_grad_(True)
        train(model, optimizer, range(3, 5), kind)
        return model

    flat = kind == "flat"
    assert_as_plain(program, kind)


@kinds
@world(2)
def test_freezing_a_resharded_unit_between_forward_and_backward(kind: str) -> None:
    """Autograd drops gradients of parameters that are frozen when it comes to them, and keeps those they have."""

    def program(kind: str) -> nn.Module:
        model = build(kind)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        loss_of(model, 5, kind).backward()
        frozen = list(model.b.parameters()) if flat else [model.b.weight]
        loss = loss_of(model, 6, kind)
        for parameter in frozen:
            parameter.requires_grad_(False)
        loss.backward()
        for parameter in frozen:
            assert parameter.grad is not None
            parameter.requires_grad_(True)
        optimizer.step()
        train(model, optimizer, range(1, 3), kind)
        return model

    flat = kind == "flat"
    assert_as_plain(program, kind)


@pytest.mark.parametrize("how", ["in place", "data"])
@world(1, 2)
def test_writes_to_unsharded_parameters_are_kept(how: str) -> None:
    def program(kind: str) -> nn.Module:
        model = build(kind)
        optimizer = adam(model)
        train(model, optimizer, range(1), kind)
        loss_of(model, 5, kind)
        weight = model.c.weight
        assert not isinstance(weight, DTensor)
        if how == "data":
            weight.data = torch.full_like(weight, 0.5)
        else:
            with torch.no_grad():
                weight.fill_(0.5)
        if kind != "plain":
            model.reshard()
        train(model, optimizer, range(1, 3), kind)
        return model

    assert_as_plain(program, "fully_shard")


@pytest.mark.parametrize("originals", [False, True])
@world(2)
def test_changes_of_a_wrapper_that_is_kept_unsharded(originals: bool) -> None:
    """SHARD_GRAD_OP: freezing after a backward without synchronisation is kept, and so are writes."""

    def program(kind: str) -> nn.Module:
        torch.manual_seed(3)
        model: Any = Net()
        if kind != "plain":
            options = {"use_orig_params": originals, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
            model.b = FSDP(model.b, **options)
            model = FSDP(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        with nullcontext() if kind == "plain" else model.no_sync():
            loss_of(model, 5, kind).backward()
        loss = loss_of(model, 6, kind)
        for parameter in model.b.parameters():
            parameter.requires_grad_(False)
        loss.backward()
        for parameter in model.b.parameters():
            assert not parameter.requires_grad
        optimizer.step()
        train(model, optimizer, range(1, 3), kind)
        with torch.no_grad():
            model(torch.ones(1, 7))
            for parameter in model.parameters():
                parameter.add_(1.0)
        return model

    assert_as_plain(program, "wrapper")


@world(1, 2, 3)
def test_writes_after_unshard_are_kept() -> None:
    model = build("fully_shard")
    for wait in (False, True):
        handle = model.a.unshard(async_op=wait)
        if handle is not None:
            handle.wait()
        with torch.no_grad():
            model.a.weight.fill_(float(wait))
        model.a.reshard()
        assert torch.equal(values(model)["a.weight"], torch.full((13, 7), float(wait)))


@kinds
@world(2)
def test_a_forward_that_writes_parameters(kind: str) -> None:
    """As every forward does it, the first one tells."""
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 4))
    model[0] = sharded(model[0], kind)
    model = sharded(model, kind)
    with pytest.warns(UserWarning, match=r"were written \((0\.)?weight.*max_norm"):
        model(torch.arange(8)).sum().backward()
    model(torch.arange(8)).sum().backward()


@pytest.mark.parametrize("kind", ["flat", "originals", "legacy"])
@world(2)  # one rank keeps all units unsharded, and warns
def test_data_that_is_assigned_while_the_root_is_kept_unsharded(kind: str) -> None:
    """The wrapper's parameters take it: after the backward that it came before, or refused in a second forward."""

    def program(kind: str) -> nn.Module:
        model = build(kind)
        optimizer = adam(model)
        train(model, optimizer, range(1), kind)
        loss = loss_of(model, 1, kind)
        if kind == "plain":
            loss.backward()
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        if kind != "plain":
            loss.backward()  # through the values of forward
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 5, kind)
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        if kind != "plain":
            with refused(RuntimeError, r"\(root\).*stayed unsharded.*`parameter.data = tensor`.*run forward again"):
                model(torch.ones(1, 7))
        train(model, optimizer, range(2, 3), kind)
        return model

    assert_as_plain(program, kind)


@world(1, 2)
def test_after_assigned_data_was_refused_the_model_is_as_before() -> None:
    """All of it at once, with other shapes and dtypes, too; and what the error names works."""

    def program(kind: str) -> nn.Module:
        model = build(kind)
        optimizer = adam(model)
        train(model, optimizer, range(1), kind)
        if kind != "plain":
            for number, parameter in enumerate(model.parameters()):
                parameter.data = torch.zeros(2 + number, dtype=torch.float64 if number % 2 else torch.float32)
            with refused(
                RuntimeError, r"data = tensor` was used for .* and 3 more .*undone.*copy_.*to_local\(\)\.copy_"
            ):
                for _ in range(3):
                    model(torch.ones(1, 7))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter * 0.5)
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.copy_(local * 0.5)
        assert [parameter.shape for parameter in model.parameters()] == [each.shape for each in Net().parameters()]
        train(model, optimizer, range(1, 3), kind)
        return model

    assert_as_plain(program, "fully_shard")


@kinds
@world(1, 2)
def test_hooks_that_are_never_called(kind: str) -> None:
    """Once for a unit; a hook that was removed, and one that is called, are left alone."""
    model = build(kind)
    loss_of(model, 0, kind).backward()
    for parameter in model.parameters():
        parameter.register_hook(torch.abs).remove()
        if isinstance(parameter, DTensor) or parameter.numel():
            parameter.register_post_accumulate_grad_hook(torch.detach)
    for _ in range(3):
        loss_of(model, 0, kind).backward()
    for parameter in model.parameters():
        parameter.register_hook(torch.abs)
    with pytest.warns(
        UserWarning, match="register_hook are never called.*register_post_accumulate_grad_hook"
    ) as caught:
        for _ in range(6):
            loss_of(model, 0, kind).backward()
    assert len(caught) == 3


# -- an optimizer's own state dict -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [False, True])
@kinds
@world(2, 3)
def test_state_that_one_rank_saved_and_all_load(kind: str, fresh: bool, tmp_path: Path) -> None:
    """A rank that did not save the state refuses it at the step, unless its shards are plain tensors of equal sizes.

    Each rank loads what it saved itself.
    """
    rank = dist.get_rank()
    model = build(kind)
    shapes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, [tuple(each.shape) for each in model.parameters()])
    optimizer = adam(model)
    train(model, optimizer, range(2), kind)
    torch.save(optimizer.state_dict(), tmp_path / f"{rank}.pt")
    dist.barrier()
    other = build(kind)
    loaded = adam(other)
    if not fresh:
        train(other, loaded, range(1), kind)
    loss_of(other, 1, kind).backward()
    loaded.load_state_dict(torch.load(tmp_path / "0.pt", weights_only=False))
    before = [parameter.detach().clone() for parameter in other.parameters()]
    if (rank and kind == "fully_shard") or shapes[rank] != shapes[0]:
        with refused(RuntimeError, r"Adam has .*loaded the state of (another rank|rank 0 on).*each rank can load only"):
            loaded.step()
        for parameter, value in zip(other.parameters(), before, strict=True):
            left, right = (each.to_local() if isinstance(each, DTensor) else each for each in (parameter, value))
            assert torch.equal(left, right)
    loaded.load_state_dict(torch.load(tmp_path / f"{rank}.pt", weights_only=False))
    other.load_state_dict(model.state_dict())
    for each, its in ((model, optimizer), (other, loaded)):
        each.zero_grad()
        train(each, its, range(2, 4), kind)
    assert all(torch.equal(value, values(other)[name]) for name, value in values(model).items())


# -- unsharded parameters of the wrapper --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flat", "originals", "legacy"])
@world(1, 2)
def test_data_assigned_to_summoned_parameters_is_trained_on(kind: str) -> None:
    """Also memory of other parameters and units, exchanged or transposed; what is not to be written back is lost."""

    def program(kind: str) -> nn.Module:
        model = build(kind)
        optimizer = adam(model)
        train(model, optimizer, range(1), kind)
        with nullcontext() if kind == "plain" else FSDP.summon_full_params(model):
            a, b, c = model.a, model.b, model.c
            a.weight.data = torch.eye(13, 7)
            a.bias.data, b.bias.data = b.bias.data, a.bias.data
            b.weight.data = b.weight.data.t()
            c.weight.data = c.weight.data.double()
            if kind == "plain":
                c.weight.data = c.weight.data.float()
        train(model, optimizer, range(1, 3), kind)
        if kind != "plain":
            with FSDP.summon_full_params(model, writeback=False):
                model.b.weight.data = torch.zeros(13, 13)
            with refused(AssertionError, r"b.weight' has the shape \(1, 13\) now, expected \(13, 13\)"):
                with FSDP.summon_full_params(model):
                    model.b.weight.data = torch.zeros(1, 13)
        train(model, optimizer, range(3, 5), kind)
        return model

    assert_as_plain(program, kind)
