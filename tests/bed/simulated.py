"""Training as one rank of a loop-back job, against the unsharded model that does what such a job does.

The loop-back group delivers as late as it may and leaves poison until then, so what trains right here waits for
everything it uses; and a job with one wait left out must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from bed import loopback
from bed.boom import Boom, boom, boom_in_backward
from bed.models import Case
from bed.parity import Record, local
from torch import nn

Shard = Callable[[nn.Module], object]


@torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)  # as in `parity.train`
def _steps(model: nn.Module, case: Case, device: str, steps: int, after: Callable[[], None]) -> Record:
    record, optimizer = Record(), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = case.loss(model, tuple(part.to(device) for part in case.batch(step)))
        loss.backward()
        record.losses.append(loss.item())
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        record.grads.append({name: local([grad])[0].detach().clone() for name, grad in grads.items()})
        optimizer.step()
        optimizer.zero_grad()
        after()
    record.params = {name: local([each.detach()])[0].clone() for name, each in model.named_parameters()}
    return record


def reference(case: Case, world: int, device: str = "cpu", steps: int = 3) -> Record:
    """What rank 0 of a job of `world` equal ranks computes, unsharded; its rows of gradients and parameters."""
    model = case.build().to(device)
    reference = loopback.LoopbackReference(model, world)
    record = _steps(model, case, device, steps, reference.make_shards_equal)
    record.grads = [{name: reference.piece(grad) for name, grad in grads.items()} for grads in record.grads]
    record.params = {name: reference.piece(each) for name, each in record.params.items()}
    return record


def run(
    case: Case,
    shard: Shard,
    world: int,
    device: str = "cpu",
    steps: int = 3,
    skip_wait: Iterable[int] = (),
    fail: Callable[[nn.Module], None] | None = None,
    delay: float = 0.0,
) -> tuple[Record, int]:
    """The same, sharded; also the number of collectives. `fail` runs a step that raises, before the others."""
    with loopback.job(world, device=device, delay=delay, skip_wait=skip_wait) as group:
        model = case.build().to(device)
        loopback.repeat_shards(model, world)
        shard(model)
        if fail is not None:
            fail(model)
        record = _steps(model, case, device, steps, lambda: None)
        left = set(group.unwaited()) - set(skip_wait)  # those left out on purpose must show in other ways
        assert not left, f"nobody waited for {sorted(left)}"
        return record, len(group.log)


def failing_steps(case: Case, where: Callable[[nn.Module], nn.Module], device: str) -> Callable[[nn.Module], None]:
    """A good step, one whose forward raises and one whose backward does, at the module `where`."""

    def attempt(model: nn.Module) -> None:
        with suppress(Boom):
            case.loss(model, tuple(part.to(device) for part in case.batch(0))).backward()
        model.zero_grad()

    def fail(model: nn.Module) -> None:
        attempt(model)
        module = where(model)
        handle = module.register_forward_pre_hook(boom)
        attempt(model)
        handle.remove()
        handle = module.register_forward_hook(boom_in_backward)
        attempt(model)
        handle.remove()

    return fail
