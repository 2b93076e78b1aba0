"""Names without the parts that wrappers add, and the walk over the modules of one unit."""

from __future__ import annotations

from torch import nn

from unshard.names import ALL_PREFIXES, clean_tensor_name, modules_until


def test_prefixes_of_wrappers() -> None:
    name = "_fsdp_wrapped_module.a._checkpoint_wrapped_module._orig_mod.weight"
    assert clean_tensor_name(name) == "a._orig_mod.weight"
    assert clean_tensor_name(name, ALL_PREFIXES) == "a.weight"


def test_modules_until() -> None:
    """Parents first, each module once; a module that stops the walk hides what only it contains."""
    tied, hidden = nn.Linear(1, 1), nn.Linear(1, 1)
    stopped = nn.Sequential(hidden, tied)
    top = nn.Sequential(nn.Sequential(tied), stopped, tied)
    found = list(modules_until(top, lambda module: module is stopped))
    assert found == [("", top), ("0.", top[0]), ("0.0.", tied)]
    assert list(modules_until(top, lambda module: module is top)) == []
