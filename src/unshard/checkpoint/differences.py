"""Mismatches between a checkpoint and what it is loaded into: one report for all ranks, before anything changes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, listed


class LoadedNames(NamedTuple):
    """Names that were not loaded into a model."""

    missing: list[str]
    """Parameters and persistent buffers that the source lacks, with `strict=False`."""
    unexpected: list[str]
    """Names that the model lacks, with `strict=False`."""
    non_persistent: list[str]
    """Non-persistent buffers of the model, which no state dict or file contains."""


_log = logging.getLogger("unshard")


@dataclass
class Differences:
    missing: dict[str, int] = field(default_factory=dict)
    """Names that the checkpoint lacks, and their bytes."""
    unexpected: dict[str, int] = field(default_factory=dict)
    """Names that only the checkpoint has, and their bytes."""
    wrong: list[str] = field(default_factory=list)
    """Mismatches that `strict=False` does not allow, in words."""
    without_state: dict[str, int] = field(default_factory=dict)
    """Parameters without optimizer state while others have some, and their bytes. No error: they may be unused."""

    @staticmethod
    def of_all_ranks(each_rank: list[Differences]) -> Differences:
        """Combine the reports of all ranks."""
        return Differences(
            missing={name: nbytes for each in each_rank for name, nbytes in each.missing.items()},
            # With pipeline parallelism, another rank may need the name.
            unexpected={
                name: nbytes
                for name, nbytes in each_rank[0].unexpected.items()
                if all(name in each.unexpected for each in each_rank)
            },
            wrong=list(dict.fromkeys(text for each in each_rank for text in each.wrong)),
            without_state={name: nbytes for each in each_rank for name, nbytes in each.without_state.items()},
        )

    def refuse(self, where: Path | str, strict: bool, what: str = "checkpoint", look: str = "") -> None:
        """Raise if the checkpoint does not fit. `look`: advice to add to the error."""
        parts = []
        if strict and self.missing:
            parts.append(f"{_counted(self.missing)} missing in the {what}: {listed(self.missing)}.")
        if strict and self.unexpected:
            parts.append(f"{_counted(self.unexpected)} of the {what} unexpected here: {listed(self.unexpected)}.")
        if self.wrong:
            parts.append(f"{len(self.wrong)} cannot be loaded: {listed(self.wrong)}.")
        if parts:
            advice = "" if self.wrong else " Pass strict=False to load the rest."
            raise CheckpointError(f"{where} does not fit. {' '.join(parts)} Nothing was changed.{advice}{look}")

    def warn(self, where: Path) -> None:
        """Log what is not loaded. Call it after `refuse`."""
        for kind, names in (("missing in it", self.missing), ("of it unexpected here", self.unexpected)):
            if names:
                _log.warning("%s is partly loaded: %s %s: %s.", where, _counted(names), kind, listed(names))
        if self.without_state:
            _log.warning(
                "%s: the optimizer has no state for %s: %s. They start without state. If the saved run trained them, "
                "it lost their state.",
                *(where, _counted(self.without_state, "parameter", "parameters"), listed(self.without_state)),
            )


def _counted(names: dict[str, int], one: str = "entry", several: str = "entries") -> str:
    nbytes = sum(names.values())
    return f"{len(names)} {one if len(names) == 1 else several} ({nbytes} bytes)"
