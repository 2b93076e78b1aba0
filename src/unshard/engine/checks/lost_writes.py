"""Writes to unsharded parameters and slices that cannot reach the sharded parameters."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ...errors import ParameterError, listed
from ...torch_private import stack_level_of_program

if TYPE_CHECKING:
    from ..unit import Unit


def refuse_lost_writes(unit: Unit, lost: list[str]) -> None:
    """`lost`: the names of the parameters, of this unit and of others."""
    raise ParameterError(
        f"{unit}: the program wrote {listed(map(repr, lost))} while the unit was kept for a later forward or backward. "
        "Modules then hold copies in the compute dtype, or slices, which cannot be copied back to the sharded "
        "parameters without losing precision. The writes are dropped, and the model stays usable. Write parameters "
        "while they are sharded: before forward, after backward, or after reshard() of the unit; with "
        "FullyShardedDataParallel, inside summon_full_params()."
    )


def warn_of_lost_writes(unit_name: str, written: list[str]) -> None:
    warnings.warn(
        f"Unsharded parameters of unit {unit_name!r} were written ({listed(written)}), and the writes are lost: "
        "modules have them only while the unit is unsharded, and the next all-gather takes the sharded ones. Write "
        "parameters while they are sharded: before forward, after a backward that reshards, or after reshard() of the "
        "unit. A parameter that forward itself writes, as nn.Embedding(max_norm=...) does, has to be left out of "
        "sharding.",
        stacklevel=stack_level_of_program(),
    )
