"""Names of parameters and buffers without what wrappers add to them."""

from __future__ import annotations

from ..engine.hooks import WRAPPED

WRAPPERS = (WRAPPED, "_checkpoint_wrapped_module.")


def clean_tensor_name(name: str) -> str:
    """The name in the module before it was wrapped, for sharding or for activation checkpointing."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
