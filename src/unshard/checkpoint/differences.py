"""How a checkpoint differs from what it is loaded into: one report for all ranks, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError, listed


@dataclass
class Differences:
    missing: dict[str, int] = field(default_factory=dict)
    """Names that the checkpoint lacks, and bytes."""
    unexpected: dict[str, int] = field(default_factory=dict)
    """Names in the checkpoint that nothing takes, and bytes."""
    wrong: list[str] = field(default_factory=list)
    """What cannot be loaded at all."""

    def refuse(self, others: list[Differences], folder: Path, strict: bool) -> None:
        """Raise if there is anything to report. `others`: those of all ranks, this one included."""
        missing = {name: nbytes for each in others for name, nbytes in each.missing.items()}
        # What one rank does not take may be another's, in a pipeline.
        unexpected = {
            name: nbytes
            for name, nbytes in others[0].unexpected.items()
            if all(name in each.unexpected for each in others)
        }
        wrong = list(dict.fromkeys(text for each in others for text in each.wrong))
        parts = []
        if strict and missing:
            parts.append(f"{_counted(missing)} missing in the checkpoint: {listed(missing)}.")
        if strict and unexpected:
            parts.append(f"{_counted(unexpected)} of the checkpoint unexpected here: {listed(unexpected)}.")
        if wrong:
            parts.append(f"{len(wrong)} cannot be loaded: {listed(wrong)}.")
        if parts:
            advice = "" if wrong else " Pass strict=False to load the rest."
            raise CheckpointError(
                f"{folder} does not fit. {' '.join(parts)} Nothing was changed.{advice} `unshard checkpoint inspect "
                f"{folder}` lists what it holds."
            )


def _counted(names: dict[str, int]) -> str:
    nbytes = sum(names.values())
    return f"{len(names)} {'entry' if len(names) == 1 else 'entries'} ({nbytes} bytes)"
