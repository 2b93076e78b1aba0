"""What optimizers do to parameters that are sharded, seen through hooks on every optimizer's step."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import StateError
from .faces import full_name
from .writes import note_optimizer_step

# How many parameters an optimizer had when it was last looked at.
_checked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@cache
def watch_optimizers() -> None:
    """Once per process."""
    register_optimizer_step_pre_hook(_refuse_full_faces)
    register_optimizer_step_post_hook(note_optimizer_step)


def _refuse_full_faces(optimizer: Any, *unused: Any) -> None:
    """An optimizer that was built while parameters were gathered would step copies, and nothing would ever learn."""
    groups = optimizer.param_groups
    count = sum([len(group["params"]) for group in groups])
    if _checked.get(optimizer) == count:
        return
    for parameter in [parameter for group in groups for parameter in group["params"]]:
        if name := full_name(parameter):
            raise StateError(
                f"This {type(optimizer).__name__} holds the gathered parameter {name!r} instead of the sharded one, so "
                "its steps would be lost. Build optimizers while the model is at rest: before the first forward, or "
                "after backward or reshard()."
            )
    _checked[optimizer] = count
