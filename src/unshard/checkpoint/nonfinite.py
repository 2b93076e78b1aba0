"""Says that a model is saved whose parameters are not finite: a run that is resumed from it is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from ..errors import listed
from ..state.model import ModelState

_log = logging.getLogger("unshard")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


@torch.no_grad()
def nonfinite_parameters(state: ModelState) -> list[str]:
    """Parameters with elements on this rank that are NaN or infinite. Reads each of them once and copies nothing."""
    parameters = {f"model/{each.name}" for optimized in state.optimized.values() for each in optimized}
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for held in state.tensors:
        local = held.local
        if held.name in parameters and local.dtype in _DTYPES and local.numel() and not held.packed:
            numbers = torch.view_as_real(local) if local.is_complex() else local
            # Far quicker than isfinite() on the CPU. NaN is both the smallest and the largest.
            extremes = torch.stack(numbers.aminmax()).double()
            by_device.setdefault(local.device, []).append((held.name.removeprefix("model/"), extremes))
    found: list[str] = []
    for each in by_device.values():
        finite = torch.stack([extremes for _, extremes in each]).isfinite().all(1)
        found += [name for (name, _), good in zip(each, finite.tolist(), strict=True) if not good]  # one wait
    return found


def warn_of_nonfinite(what: str, ranks: Iterable[list[str]]) -> None:
    """One warning for the parameters that `nonfinite_parameters` found on each rank."""
    where: dict[str, list[int]] = {}
    for rank, names in enumerate(ranks):
        for name in names:
            where.setdefault(name, []).append(rank)
    if where:
        found = [f"{name} (rank {listed(where[name], most=4)})" for name in sorted(where)]
        _log.warning(
            "%s: %d parameters are not finite (NaN or infinity): %s. They are saved so, and a run that resumes here "
            "goes on with them. Load an earlier checkpoint.",
            *(what, len(found), listed(found)),
        )
