"""Docstrings of public names say what the arguments are and which errors they raise, and functions have an example."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

from bed.docstrings import examples, public_names

NAMES = public_names()

# Objects that programs get from a function or only derive from, and options whose example is elsewhere.
NO_EXAMPLE = {
    "unshard.CapturedStep": "capture",
    "unshard.Comm": "AllGather",
    "unshard.FlatParameter": "FullyShardedDataParallel",
    "unshard.FullOptimStateDictConfig": "FullStateDictConfig",
    "unshard.GradientReductionHandle": "FSDPModule.finalize_backward",
    "unshard.LocalOptimStateDictConfig": "FullStateDictConfig",
    "unshard.LocalStateDictConfig": "FullStateDictConfig",
    "unshard.OffloadPolicy": "CPUOffloadPolicy",
    "unshard.OptimStateDictConfig": "FullStateDictConfig",
    "unshard.ShardedOptimStateDictConfig": "ShardedStateDictConfig",
    "unshard.StateDictConfig": "FullStateDictConfig",
    "unshard.StateDictSettings": "FullyShardedDataParallel.get_state_dict_type",
    "unshard.UnshardHandle": "FSDPModule.unshard",
    "unshard.checkpoint.ResumeReport": "prove_resume",
    "unshard.tools.PrecisionAudit": "precision_audit",
    "unshard.tools.PrecisionReport": "precision",
}
MADE_BY_TORCH = {"unshard.FlatParameter"}  # the arguments are those of a tensor


def documented(name: str) -> str:
    """The docstring, with that of `__init__` and, for a method, of the class."""
    each = NAMES[name]
    texts = [inspect.getdoc(each)]
    if inspect.isclass(each) and each.__init__.__doc__ and "__init__" in vars(each):
        texts.append(each.__init__.__doc__)
    if (owner := name.rpartition(".")[0]) in NAMES:
        texts.append(inspect.getdoc(NAMES[owner]))
    return "\n".join(text or "" for text in texts)


def is_error(each: Any) -> bool:
    return inspect.isclass(each) and issubclass(each, BaseException)


def test_arguments_are_documented() -> None:
    missing = {}
    for name, each in NAMES.items():
        text = documented(name)
        assert text.strip(), name
        is_result = name in NO_EXAMPLE and "returns" in text
        if is_result or is_error(each) or name in MADE_BY_TORCH or hasattr(each, "__members__"):  # an enum
            continue
        parameters = inspect.signature(each).parameters.values()
        named = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        if lacking := [one for one in named if one != "self" and not re.search(rf"\b{one}\b", text)]:
            missing[name] = lacking
    assert len(NAMES) > 150 and not missing


def test_errors_are_documented() -> None:
    """Those that a function raises itself."""
    missing = {}
    for name, each in NAMES.items():
        function = inspect.unwrap(each)
        if not inspect.isfunction(function):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
        raised = {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
        if lacking := [error for error in raised if error not in documented(name)]:
            missing[name] = lacking
    assert not missing


def test_functions_and_classes_have_an_example() -> None:
    found = {name: each for name, each in NAMES.items() if name.rpartition(".")[0] not in NAMES and not is_error(each)}
    assert {name for name, each in found.items() if not examples(inspect.getdoc(each) or "")} == set(NO_EXAMPLE)
