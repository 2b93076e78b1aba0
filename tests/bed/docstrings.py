"""Public names, and the examples in their docstrings."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

import unshard
import unshard.composable
import unshard.dropin
import unshard.tools.program

MODULES = (unshard.tools, unshard.optim, unshard.checkpoint, unshard.wrap, unshard.dropin)


def public_names() -> dict[str, Any]:
    """Functions and classes by name, and the methods that the classes define and document."""
    found = {f"unshard.{name}": getattr(unshard, name) for name in unshard.__all__}
    for module in MODULES:
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    found["unshard.composable.fully_shard"] = unshard.composable.fully_shard
    found["unshard.tools.program.Program"] = unshard.tools.program.Program
    found = {name: each for name, each in found.items() if not inspect.ismodule(each)}
    for name, each in list(found.items()):
        for method, value in vars(each).items() if inspect.isclass(each) else ():
            function = getattr(value, "__func__", value)
            if method == getattr(function, "__name__", "") and not method.startswith("_") and function.__doc__:
                found[f"{name}.{method}"] = function
    return dict(sorted(found.items()))


def examples(doc: str) -> list[str]:
    """The blocks below `Example::`, and the code in lines such as "Example: `code`."."""
    blocks = re.findall(r"Example::\n\n((?:    .*\n?|\n)+)", doc)
    return [textwrap.dedent(block) for block in blocks] + re.findall(r"Example: `(.+?)`", doc, re.DOTALL)
