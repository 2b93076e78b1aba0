"""Prepares the docstrings of the package for the reference pages."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from typing import Any

import griffe


class PublicNames(griffe.Extension):
    """Makes the names that `unshard.tools` imports on first use known, and blocks after `::` listings."""

    def on_package(self, *, pkg: griffe.Module, loader: Any, **kwargs: Any) -> None:
        if pkg.name == "unshard":
            tools = pkg["tools"]
            tools.exports = [each for each in tools.exports if isinstance(each, str)]
            for name, module in ast.literal_eval(str(tools["_MODULES"].value)).items():
                tools.set_member(name, griffe.Alias(name, f"unshard.tools.{module}.{name}"))
                tools.exports.append(name)
            adopt_functions(pkg["fsdp1.wrapper.FullyShardedDataParallel"])
            # Griffe does not follow an `import *` of another `import *`.
            for name in exported(pkg["_public"]):
                if name not in pkg.members:
                    pkg.set_member(name, griffe.Alias(name, f"unshard._public.{name}"))

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"::\n\n((?:    .*\n?|\n)+)", fenced, obj.docstring.value)


def adopt_functions(cls: Any) -> None:
    """Make attributes such as `summon_full_params = staticmethod(summon_full_params)` methods."""
    for name, member in list(cls.members.items()):
        match = re.fullmatch(r"(staticmethod\()?([\w.]+)\)?", str(member.value)) if member.is_attribute else None
        if match is None or name.startswith("_") or match[2] == "None":
            continue
        module, _, function = match[2].rpartition(".")
        scope = cls.parent[module].final_target if module else cls.parent
        found = copy.copy(scope[function].final_target if scope[function].is_alias else scope[function])
        found.labels = {*found.labels, "staticmethod"} if match[1] else found.labels
        cls.set_member(name, found)


def exported(module: Any) -> Iterator[str]:
    if module.exports is None:
        yield from (name for name, each in module.members.items() if not each.is_alias and each.is_class)
    for each in module.exports or ():
        if isinstance(each, str):
            yield each
        else:  # `__all__ += other.__all__`
            yield from exported(module[each.parent.name].final_target)


def fenced(match: re.Match[str]) -> str:
    code = "\n".join(line.removeprefix("    ") for line in match[1].rstrip().splitlines())
    return f":\n\n```python\n{code}\n```\n\n"
