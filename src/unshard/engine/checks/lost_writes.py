"""Writes to unsharded parameters, which no sharded parameter ever gets."""

from __future__ import annotations

import warnings

from ...errors import listed
from .caller import stack_level_of_program


def warn_of_lost_writes(unit_name: str, written: list[str]) -> None:
    warnings.warn(
        f"Unsharded parameters of unit {unit_name!r} were written ({listed(written)}), and the writes are lost: "
        "modules have them only while the unit is unsharded, and the next all-gather takes the sharded ones. Write "
        "parameters while they are sharded: before forward, after a backward that reshards, or after reshard() of the "
        "unit. A parameter that forward itself writes, as nn.Embedding(max_norm=...) does, has to be left out of "
        "sharding.",
        stacklevel=stack_level_of_program(),
    )
