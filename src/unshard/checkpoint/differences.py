"""How a checkpoint differs from what it is loaded into: one report for all ranks, before anything is changed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, listed


class LoadedNames(NamedTuple):
    """What was not loaded into a model."""

    missing: list[str]
    """Parameters and persistent buffers that nothing was there for, with `strict=False`."""
    unexpected: list[str]
    """Names that the model does not have, with `strict=False`."""
    non_persistent: list[str]
    """Buffers of the model that no state dict and no file has, because they are not persistent."""


_log = logging.getLogger("unshard")


@dataclass
class Differences:
    missing: dict[str, int] = field(default_factory=dict)
    """Names that the checkpoint lacks, and bytes."""
    unexpected: dict[str, int] = field(default_factory=dict)
    """Names in the checkpoint that nothing takes, and bytes."""
    wrong: list[str] = field(default_factory=list)
    """What cannot be loaded at all."""
    without_state: dict[str, int] = field(default_factory=dict)
    """Parameters whose optimizer has state for others only, and bytes. No reason to refuse: no loss may use them."""

    @staticmethod
    def of_all_ranks(each_rank: list[Differences]) -> Differences:
        """One report from those of all ranks."""
        return Differences(
            missing={name: nbytes for each in each_rank for name, nbytes in each.missing.items()},
            # What one rank does not take may be another's, in a pipeline.
            unexpected={
                name: nbytes
                for name, nbytes in each_rank[0].unexpected.items()
                if all(name in each.unexpected for each in each_rank)
            },
            wrong=list(dict.fromkeys(text for each in each_rank for text in each.wrong)),
            without_state={name: nbytes for each in each_rank for name, nbytes in each.without_state.items()},
        )

    def refuse(self, where: Path | str, strict: bool, what: str = "checkpoint", look: str = "") -> None:
        """Raise if there is anything to report. `look`: what tells the reader more."""
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
        """Say what is loaded otherwise than a reader may expect. To be called if nothing is refused."""
        for kind, names in (("missing in it", self.missing), ("of it unexpected here", self.unexpected)):
            if names:
                _log.warning("%s is loaded in part: %s %s: %s.", where, _counted(names), kind, listed(names))
        if self.without_state:
            _log.warning(
                "%s: the optimizer has no state for %s: %s. They begin without. If the run that was saved has trained "
                "them, it had lost their state.",
                *(where, _counted(self.without_state, "parameter", "parameters"), listed(self.without_state)),
            )


def _counted(names: dict[str, int], one: str = "entry", several: str = "entries") -> str:
    nbytes = sum(names.values())
    return f"{len(names)} {one if len(names) == 1 else several} ({nbytes} bytes)"
