"""Compares a sharded run with the unsharded one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError, listed
from ..torch_private import BATCH_NORM_BASE
from .verification_causes import (
    CLOSE,
    EVEN,
    Case,
    Difference,
    Run,
    causes_of,
    in_float64,
    put_together,
    random_losses,
    shown,
    weights_of,
)
from .verification_runs import (
    Job,
    Reference,
    Start,
    Tensors,
    aliases_of,
    buffers_of,
    digest_of,
    map_tensors,
    mean_of,
    process_group,
    seed,
)

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_NOISE = 8  # how much larger than the effect of rounding errors a difference must be
_WHOLE = 1e-3  # tolerance for one large batch, which other kernels may compute


def compare(job: Job, world: int) -> Run:
    """Train the unsharded model on the batches of all ranks, and compare it with what the ranks noted."""
    with process_group(job, f"{world}-unsharded", 0, 1):
        return _compare(job, world)


def _compare(job: Job, world: int) -> Run:
    program = job.load()
    starts: list[Start] = [_load(job, world, "start", rank) for rank in range(world)]
    full = {name: copies[0] for name, copies in put_together([each.pieces for each in starts]).items()}
    reference, twin = (Reference(job, program, world, starts[0], full) for _ in range(2))
    notes: list[str] = []
    tolerance = _TOLERANCES.get(starts[0].narrowest, 5e-2) if job.tolerance is None else job.tolerance
    if starts[0].narrowest.itemsize < 4:
        notes.append(
            f"The sharded model computes in {starts[0].narrowest}, so differences below {tolerance:g} are not reported."
        )
    sizes = _Sizes(tolerance, reference.parameters())
    found = list(
        _differing("parameter", 0, put_together([each.pieces for each in starts]), sizes, aliases_of(reference.model))
    )
    if found:
        return Run(world, found[0], causes_of(Case(reference, starts, 0, found=found)), notes)
    random = random_losses(reference)
    whole = None if random else _whole_batch(reference, notes)
    for step in range(1, job.steps + 1):
        case = Case(reference, starts, step, random=random)
        case.before = {**reference.parameters(), **buffers_of(reference.model)}
        case.before = {name: each.clone() for name, each in case.before.items()}
        case.dumps = [_load(job, world, f"step{step}", rank) for rank in range(world)]
        _check_batches(reference, case, notes)
        case.found = _step_differences(case, twin, tolerance, notes)
        if case.found:
            return Run(world, _first(case.found), causes_of(case) + (whole.causes if whole else []), notes)
    return Run(world, whole.differs, whole.causes, notes) if whole else Run(world, notes=notes)


def _load(job: Job, world: int, what: str, rank: int) -> Any:
    return torch.load(job.file(world, what, rank), weights_only=False)


def _check_batches(reference: Reference, case: Case, notes: list[str]) -> None:
    digests = [each.batch_digest for each in case.dumps]
    again = [digest_of(reference.batch(rank, case.step)) for rank in range(reference.world)]
    if digests != again:
        raise ArgumentError(
            f"batch(rank, step) returned other values in another process at step {case.step}. It must depend on rank "
            "and step only, or draw from the generators that torch.manual_seed seeds."
        )
    note = "All ranks had the same batch, which hides errors in the reduction. Define a function batch(rank, step)."
    if len(digests) > 1 and len(set(digests)) == 1 and note not in notes:
        notes.append(note)


def _step_differences(case: Case, twin: Reference, tolerance: float, notes: list[str]) -> list[Difference]:
    """Run one step of the unsharded model, and return what differs from the sharded one.

    The twin computes with parameters that differ by a rounding error, which shows how much such an error matters. The
    optimizer gets the gradients of the sharded model: Adam would turn a rounding error into a whole step.
    """
    step, reference, aliases = case.step, case.reference, aliases_of(case.reference.model)
    case.losses, case.own = reference.backward(step)
    twin_losses, twin_own = case.losses, case.own
    if not case.random:
        twin.load(case.before)
        twin.perturb()
        twin_losses, twin_own = twin.backward(step)
    found = []
    for rank, dump in enumerate(case.dumps):
        scale = max(abs(case.losses[rank]), 1e-30)
        allowed = max(tolerance, _NOISE * abs(twin_losses[rank] - case.losses[rank]) / scale)
        difference = abs(dump.loss - case.losses[rank]) / scale
        if not difference <= allowed:
            found.append(Difference("loss", "", step, difference, allowed))
    mean = mean_of(case.own)
    gradients = put_together([each.gradients for each in case.dumps])
    absent = [name for name in gradients if aliases.get(name, name) not in mean]
    for name in mean:
        gradients.setdefault(name, [])  # a missing gradient counts as zero
    found += _differing("gradient", step, gradients, _Sizes(tolerance, mean, mean_of(twin_own)), aliases)
    if found:
        return found
    if absent:
        notes.append(
            f"Step {step}: {listed(absent)} got no gradient unsharded and zeros sharded. An optimizer with momentum or "
            "weight decay changes parameters with a zero gradient."
        )
    reference.step({aliases.get(name, name): copies[0] for name, copies in gradients.items() if copies})
    parameters = put_together([each.parameters for each in case.dumps])
    return list(_differing("parameter", step, parameters, _Sizes(tolerance, reference.parameters()), aliases))


def _first(found: Sequence[Difference]) -> Difference:
    first = found[0]
    names = [each.name for each in found if each.name]
    return Difference("loss", names[0], *_numbers(first)) if first.what == "loss" and names else first


def _numbers(each: Difference) -> tuple[int, float, float]:
    return each.step, each.difference, each.tolerance


class _Sizes:
    """Expected tensors, and how far from them a tensor may be because of rounding errors."""

    def __init__(self, tolerance: float, expected: Tensors, twin: Tensors | None = None):
        self.tolerance, self.expected, self.twin = tolerance, expected, twin or {}
        # A gradient that is zero in exact arithmetic is a difference of larger numbers.
        norms = [float(in_float64(each).norm()) for each in expected.values()] if twin else []
        self.floor = 4 * torch.finfo(torch.float32).eps * sum(each**2 for each in norms) ** 0.5

    def distance(self, name: str, copy: torch.Tensor | None) -> tuple[float, float]:
        """Return the distance of `copy` from the expected tensor and the largest allowed one, both relative."""
        expected = self.expected.get(name)
        if expected is None:
            return (0.0 if copy is None else float(in_float64(copy).norm())), self.floor
        expected = in_float64(expected)
        norm = float(expected.norm())
        noise = float((in_float64(self.twin[name]) - expected).norm()) if name in self.twin else 0.0
        allowed = max(self.tolerance * norm, _NOISE * noise, self.floor)
        difference = norm if copy is None else float((in_float64(copy) - expected).norm())
        return (difference / norm, allowed / norm) if norm else (difference, allowed)


def _differing(
    what: str, step: int, copies: dict[str, list[torch.Tensor]], sizes: _Sizes, aliases: dict[str, str]
) -> Iterator[Difference]:
    order = {name: number for number, name in enumerate(aliases)}
    for name in sorted(copies, key=lambda each: order.get(each, len(order))):
        for copy in copies[name] or (None,):
            difference, allowed = sizes.distance(aliases.get(name, name), copy)
            if not difference <= allowed:
                yield Difference(what, name, step, difference, allowed)
                break


# -- one batch of all ranks ---------------------------------------------------------------------------------


def _whole_batch(reference: Reference, notes: list[str]) -> Run | None:
    """Compare the mean over ranks with one batch of all ranks. Return a run if a known cause makes them differ."""
    if reference.world == 1:
        return None
    model, world = reference.model, reference.world
    buffers = buffers_of(model)
    dropout = [each for each in model.modules() if each.training and _draws(each)]
    norms = [each for each in model.modules() if isinstance(each, BATCH_NORM_BASE) and each.training]
    batches = [reference.batch(rank, 1) for rank in range(world)]
    why = ""
    try:
        for module in dropout:
            module.training = False  # not eval(), which changes the modules inside
        state = torch.get_rng_state()
        own = []
        for rank, batch in enumerate(batches):
            reference.set_buffers(buffers)
            state = _state_after_seed(rank)
            own.append(reference.gradients(batch, rank, 1))
            if not torch.equal(state, torch.get_rng_state()):
                why = "forward draws random numbers"
        found: dict[int, Difference] = {}
        wholes: dict[int, Tensors] = {}
        for dim in (0, 1) if not why else ():
            try:
                batch = map_tensors(lambda *each, dim=dim: _joined(each, dim), *batches)
                reference.set_buffers(buffers)
                wholes[dim] = reference.gradients(batch, 0, 1)[1]
            except Exception as error:
                why = why or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                continue
            difference = _whole_difference(wholes[dim], mean_of([each for _, each in own]))
            if difference is None:
                return None
            found[dim] = difference
        if found:
            run = _whole_cause(reference, norms, own, batches, wholes, found, buffers)
            if run is not None:
                return run
            why = "its gradients are no weighted mean of those of the ranks, so samples affect each other"
        notes.append(f"Not compared with one batch of all ranks: {why}.")
        return None
    finally:
        for module in dropout:
            module.training = True
        reference.set_buffers(buffers)


def _draws(module: nn.Module) -> bool:
    """Return True for dropout, also if the module has only its probability, as attention and LSTM do."""
    return "Dropout" in type(module).__name__ or any(
        "dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()
    )


def _state_after_seed(rank: int) -> torch.Tensor:
    seed(rank, 1)
    return torch.get_rng_state()


def _joined(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    if tensors[0].dim() == 0:
        if any(not torch.equal(each, tensors[0]) for each in tensors):
            raise ValueError("a number in the batch differs between ranks")
        return tensors[0]
    return torch.cat(list(tensors), min(dim, tensors[0].dim() - 1))


def _whole_difference(whole: Tensors, mean: Tensors) -> Difference | None:
    sizes = _Sizes(_WHOLE, mean, mean)
    copies = {name: [whole[name].cpu()] if name in whole else [] for name in {**mean, **whole}}
    return next(_differing("gradient", 1, copies, sizes, {name: name for name in mean}), None)


def _whole_cause(
    reference: Reference,
    norms: Sequence[nn.Module],
    own: Sequence[tuple[float, Tensors]],
    batches: Sequence[Any],
    wholes: dict[int, Tensors],
    found: dict[int, Difference],
    buffers: Tensors,
) -> Run | None:
    world, gradients = reference.world, [each for _, each in own]
    if norms and 0 in found:
        for module in norms:
            module.eval()
        try:
            reference.set_buffers(buffers)
            again = [reference.gradients(batch, rank, 1)[1] for rank, batch in enumerate(batches)]
            batch = map_tensors(lambda *each: _joined(each, 0), *batches)
            whole = reference.gradients(batch, 0, 1)[1]
        finally:
            for module in norms:
                module.train()
        if _whole_difference(whole, mean_of(again)) is None:
            names = [name for name, each in reference.model.named_modules() if each in set(norms)]
            text = (
                f"Batch norm ({listed(names)}) computes statistics of the local batch only, so {world} ranks differ "
                "from one batch of all ranks. In eval mode of these modules, both agree. Use "
                "nn.SyncBatchNorm.convert_sync_batchnorm(model) before sharding, or a norm without batch statistics."
            )
            return Run(world, found[0], [text])
        gradients, wholes = again, {0: whole}
    for dim, difference in found.items():
        weights = weights_of(gradients, wholes[dim], wholes[dim]) if dim in wholes else None
        if weights is None or all(abs(each * world - 1) < EVEN for each in weights):
            continue  # even weights explain no difference
        if all(abs(each - 1) < CLOSE for each in weights):
            text = (
                "The loss is a sum over samples, not a mean: one batch of all ranks has gradients that are "
                f"{world} times as large. Sharding averages over ranks. Divide the loss by the number of samples, or "
                "multiply it by the number of ranks."
            )
        elif abs(sum(weights) - 1) < CLOSE:
            text = (
                f"In one batch of all ranks, the ranks have the weights {shown(weights)}, but sharding gives "
                f"{1 / world:.3g} to each. The loss is no mean over samples: it may be a mean over tokens, and ranks "
                "have different numbers of tokens. Divide the sum of each rank by the mean number over ranks "
                "(see docs/uneven_steps.md)."
            )
        else:
            continue
        return Run(world, difference, [text])
    return None
