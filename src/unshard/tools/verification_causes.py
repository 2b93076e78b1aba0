"""Finds out by experiments why a sharded run and the unsharded one differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import listed
from ..state.boxes import full_box
from .verification_runs import Pieces, Reference, Start, Step, Tensors, aliases_of, buffers_of, parameters_of

CLOSE = 0.02  # of the weights that a gradient gives to ranks
EVEN = 0.01  # of the share of a rank: `weights_of` allows as large a remainder


@dataclass(frozen=True)
class Difference:
    """The first value that differs. Differences are relative to the norm of the tensor, or to the loss."""

    what: str
    """"loss", "gradient" or "parameter"."""
    name: str
    """The parameter. For a loss, the first parameter whose gradient differs in the same step."""
    step: int
    """Steps count from 1. 0 is before training."""
    difference: float
    tolerance: float


@dataclass(frozen=True)
class Run:
    """The comparison for one number of ranks."""

    ranks: int
    differs: Difference | None = None
    causes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def agree(self) -> bool:
        return self.differs is None


@dataclass
class Case:
    """What the search for causes knows about the first step that differs."""

    reference: Reference
    starts: list[Start]
    step: int
    dumps: list[Step] = field(default_factory=list)
    own: list[Tensors] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    found: list[Difference] = field(default_factory=list)
    before: Tensors = field(default_factory=dict)
    random: str = ""


def put_together(pieces: Sequence[Pieces]) -> dict[str, list[torch.Tensor]]:
    """Put the parts of all ranks together. There are several copies if parameters are not sharded, or replicated."""
    found: dict[str, list[torch.Tensor]] = {}
    for name in dict.fromkeys(name for each in pieces for name in each):
        parts = [part for each in pieces for part in each.get(name, ())]
        shape = [max(b + n for b, n in zip(*dims, strict=True)) for dims in _dimensions(box for box, _ in parts)]
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for box, values in parts:
            place = box.slices_in(full_box(shape))
            free = next((each for each in copies if not each[1][place].any()), None)
            if free is None:
                free = (torch.zeros(shape, dtype=values.dtype), torch.zeros(shape, dtype=torch.bool))
                copies.append(free)
            free[0][place] = values
            free[1][place] = True
        found[name] = [each for each, _ in copies]
    return found


def _dimensions(boxes: Iterable[Any]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    both = list(boxes)
    begins, sizes = zip(*[each.begin for each in both], strict=True), zip(*[each.size for each in both], strict=True)
    return list(zip(begins, sizes, strict=True))


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as float64 on the host. A complex number becomes two."""
    tensor = tensor.detach().cpu()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def weights_of(own: Sequence[Tensors], gradients: Tensors, names: Iterable[str]) -> list[float] | None:
    """Return the weights with which the gradients of ranks add up to `gradients`. Return None if they do not."""
    like = {name: each[name] for name in names for each in own if name in each}
    if not like:
        return None
    columns = [_in_a_row(each, like) for each in own]
    matrix, target = torch.stack(columns, 1), _in_a_row(gradients, like)
    weights = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution
    rest = (matrix @ weights - target[:, None]).norm()
    singular = torch.linalg.svdvals(matrix)
    if len(target) <= len(own) or singular[-1] <= 1e-4 * singular[0]:
        return None  # other weights would do as well
    if not rest <= 1e-2 * max(float(target.norm()), 1e-2 * float(matrix.norm())):
        return None
    return [float(each) for each in weights.flatten()]


def _in_a_row(tensors: Tensors, like: Tensors) -> torch.Tensor:
    return torch.cat([in_float64(tensors.get(name, torch.zeros_like(each))).reshape(-1) for name, each in like.items()])


def shown(weights: Sequence[float]) -> str:
    return "(" + ", ".join(f"{0.0 if abs(each) < 5e-4 else each:.3g}" for each in weights) + ")"


# -- causes -------------------------------------------------------------------------------------------------


def causes_of(case: Case) -> list[str]:
    found: list[str] = []
    for search in _SEARCHES:
        found += [text for text in search(case) if text not in found]
    return found or [
        "No known cause applies. Compare the named tensor in both runs, starting with the hooks of its module."
    ]


def _different_start(case: Case) -> Iterator[str]:
    if case.step:
        return
    first = case.starts[0].digests
    for rank, start in enumerate(case.starts):
        names = [name for name, digest in start.digests.items() if first.get(name) != digest]
        if names:
            yield (
                f"Rank {rank} initializes {listed(names)} with other values than rank 0. Seed the generators equally "
                "on all ranks before building, or call unshard.sync_module_states(model) before sharding."
            )
            return
    yield (
        f"shard changes the values of {case.found[0].name}, or converts them. Shard the model without changing "
        "values, or make the same change in the function that builds the model."
    )


def random_losses(reference: Reference) -> str:
    """Compute the same loss several times. Return two different losses, or "" if all are equal."""
    before = {**reference.parameters(), **buffers_of(reference.model)}
    before = {name: each.clone() for name, each in before.items()}
    losses = []
    for _ in range(3):
        losses.append(reference.gradients(reference.batch(0, 1), 0, 1)[0])
        reference.load(before)
    one, other = min(losses), max(losses)
    return f"{one:.6g} and {other:.6g}" if other - one > 1e-6 * abs(one) else ""


def _random_forward(case: Case) -> Iterator[str]:
    if case.random:
        yield (
            "Two forwards of the unsharded model with equal parameters, buffers and seeds have the losses "
            f"{case.random}: forward draws random numbers without a seed (dropout, sampling), or keeps state outside "
            "parameters and buffers. Draw from torch's default generator, or seed the generator in forward."
        )


def _untied(case: Case) -> Iterator[str]:
    sharded = case.starts[0].aliases
    groups: dict[str, list[str]] = {}
    for name, first in aliases_of(case.reference.model).items():
        groups.setdefault(first, []).append(name)
    for names in groups.values():
        if len({sharded.get(name, name) for name in names}) > 1:
            yield (
                f"{' and '.join(names)} are one tied parameter in the unsharded model and separate parameters in the "
                "sharded one, so each gets only part of the gradient. Tie them again before sharding, and keep "
                "modules that share a parameter in one unit."
            )


def _unmanaged(case: Case) -> Iterator[str]:
    names = [n for n in case.starts[0].unmanaged if n in {each.name for each in case.found if each.what != "loss"}]
    if names and case.step:
        yield (
            f"{listed(names)} belong to no unit (ignored, added after sharding, or the root was not sharded), so "
            "nobody reduces their gradients and every rank trains its own copy. Call fully_shard(model) last, leave "
            "them out of ignored_params, or reduce their gradients yourself."
        )


def _depends_on_rank(case: Case) -> Iterator[str]:
    if case.step != 1 or case.random or not any(each.what == "loss" for each in case.found):
        return
    ratios = [dump.loss / loss if loss else 1.0 for dump, loss in zip(case.dumps, case.losses, strict=True)]
    wrong = [rank for rank, ratio in enumerate(ratios) if abs(ratio - 1) > 1e-4]
    if wrong and len(wrong) < len(ratios):
        shown = ", ".join(f"{ratios[rank]:.4g} times as large on rank {rank}" for rank in wrong)
        yield (
            f"With equal parameters, the loss of the same batch is {shown}, and equal on the other ranks: the model "
            "or the loss depends on the rank (RANK, dist.get_rank()). Compute the same function on all ranks."
        )


def _gradient_weights(case: Case) -> Iterator[str]:
    first = next((each for each in case.found if each.what == "gradient"), None)
    built, updated = _differing_buffers(case)
    if first is None or case.random or built or (updated and case.step > 1):
        return  # ranks that compute with different buffers say nothing about the reduction
    aliases = aliases_of(case.reference.model)
    name, world = aliases.get(first.name, first.name), case.reference.world
    copies = put_together([each.gradients for each in case.dumps]).get(first.name, [])
    found = [weights_of(case.own, {name: each}, [name]) for each in copies] or [weights_of(case.own, {}, [name])]
    weights = [each for each in found if each is not None]
    if len(weights) < len(found):
        return
    one = weights[0]
    if len(weights) == world and all(_near(w, _unit(rank, world)) for rank, w in enumerate(weights)):
        yield f"The gradient of {first.name} on each rank is that of its own batch only: nobody reduces it."
    elif all(abs(each) < CLOSE for each in one):
        yield f"The gradient of {first.name} is missing, or zero. Check requires_grad, hooks and detach()."
    elif max(one) - min(one) < CLOSE:
        yield (
            f"The gradient of {first.name} is {sum(one):.3g} times the mean over ranks. Check the divide factor "
            "(set_gradient_divide_factor), the scale of the loss, and accumulation."
        )
    else:
        lost = [str(rank) for rank, each in enumerate(one) if abs(each) < CLOSE]
        which = f" Nothing of rank {', '.join(lost)} arrives." if lost else ""
        yield (
            f"In the gradient of {first.name}, ranks have the weights {shown(one)} instead of {1 / world:.3g} "
            f"each.{which} Check hooks that change gradients, and losses that are scaled differently on ranks."
        )


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) < CLOSE for a, b in zip(one, other, strict=True))


def _unit(rank: int, world: int) -> list[float]:
    return [float(each == rank) for each in range(world)]


def _differing_buffers(case: Case) -> tuple[list[str], list[str]]:
    """Return the buffers that differ between ranks after the step: those that were built so, and the others."""
    first, built, updated = case.dumps[0].buffers if case.dumps else {}, list[str](), list[str]()
    for name, value in first.items():
        if any(name in each.buffers and not torch.equal(value, each.buffers[name]) for each in case.dumps[1:]):
            values = {each.digests.get(name) for each in case.starts}
            (built if len(values) > 1 else updated).append(name)
    return built, updated


def _buffers(case: Case) -> Iterator[str]:
    built, names = _differing_buffers(case)
    if built:
        yield (
            f"Ranks build buffers {listed(built)} with different values, and sharding does not make them equal. Build "
            "them from values that are equal on all ranks, or call unshard.sync_module_states(model) before sharding."
        )
    if names:
        yield (
            f"Buffers {listed(names)} differ between ranks, because each rank updates them with its own batches, and "
            "nothing averages buffers. If forward reads them, ranks compute with different values. Average them over "
            "ranks after the update, or derive them from values that are equal on all ranks."
        )


def _frozen(case: Case) -> Iterator[str]:
    before = {name: each.requires_grad for name, each in parameters_of(case.reference.model).items()}
    names = [name for name, trained in case.starts[0].trained.items() if before.get(name, trained) != trained]
    if names:
        yield (
            f"requires_grad of {listed(names)} differs: shard freezes or unfreezes them. Set requires_grad in the "
            "function that builds the model."
        )


def _written_in_forward(case: Case) -> Iterator[str]:
    if not case.step:
        return
    reference = case.reference
    reference.load(case.before)
    reference.loss(reference.batch(0, case.step), 0, case.step)
    after = reference.parameters()
    names = [name for name, each in after.items() if not torch.equal(each.cpu(), case.before[name].cpu())]
    if names:
        yield (
            f"Forward writes to {listed(names)} in place. In a sharded model, such writes change temporary copies "
            "only. Write between steps, or keep the value in a buffer."
        )


def _optimizer(case: Case) -> Iterator[str]:
    if not case.step or case.random or any(each.what != "parameter" for each in case.found):
        return
    name = case.found[0].name
    parameter = parameters_of(case.reference.model).get(name)
    if parameter is not None and parameter.is_complex():
        yield (
            f"{name} is complex. Adam and other optimizers of torch step a complex DTensor as real numbers, which "
            "changes only a temporary copy. Store real and imaginary part as one real parameter, and call "
            "torch.view_as_complex in forward."
        )
    yield (
        f"Losses and gradients agree, but optimizer.step() does not update {name} equally. Build the optimizer from "
        "the sharded model. Optimizers that use norms or products of whole tensors see only shards."
    )


_SEARCHES: tuple[Callable[[Case], Iterator[str]], ...] = (
    _different_start,
    _random_forward,
    _untied,
    _unmanaged,
    _depends_on_rank,
    _gradient_weights,
    _buffers,
    _frozen,
    _written_in_forward,
    _optimizer,
)
