"""Imports go one way, private torch APIs live in one folder, torch's FSDP is never used; tests share only helpers."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import unshard

PACKAGE = Path(unshard.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = Path(__file__).parent

# A module may import from its own layer and from those before it.
LAYERS = [
    "layout policies wrap names errors usage torch_private",
    "comm",
    "engine",
    "optim",
    "state",
    "fsdp2 fsdp1",
    "tools composable captured_step checkpoint",
    "dropin",
    "cli",
    "__main__",
]
BASE = {"policies", "wrap", "names", "errors", "torch_private"}  # these may import each other
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}


def layer_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[str]:
    """Absolute names of everything a file imports."""
    package = ["unshard", *file.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 20
    assert any("unshard.layout.rows" in imports(file) for file in FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_one_way(file: Path) -> None:
    own = layer_of(file)
    for name in imports(file):
        if name.startswith("unshard.") and own not in ("__init__", "_public"):
            other = name.split(".")[1]
            assert LAYER[other] <= LAYER[own], f"{own} imports {name}"
            same = LAYER[other] == LAYER[own]
            assert not same or other == own or {own, other} <= BASE, name
        if own == "layout":
            assert name.split(".")[0] != "torch", "layouts are integers only"
        assert not name.startswith(("torch.distributed.fsdp", "torch.distributed._composable")), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_only_the_surface_of_the_engine_is_imported(file: Path) -> None:
    if layer_of(file) != "engine":
        inner = [name for name in imports(file) if name.startswith("unshard.engine")]
        assert set(inner) <= {"unshard.engine.api"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_only_the_drop_in_names_what_it_replaces(file: Path) -> None:
    """Not in strings either, which `importlib` would take."""
    tree = ast.parse(file.read_text())
    words = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings may
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in words:
            names = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
            assert layer_of(file) == "dropin" or not node.value.startswith(names), f"line {node.lineno}"


# Private, but what every library that handles modules uses; there is no public spelling.
ALLOWED = {"_apply", "_current_frames", "_exit", "_fields", "_replace"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_private_torch_names_live_in_one_folder(file: Path) -> None:
    if layer_of(file) == "torch_private":
        return
    for name in imports(file):
        parts = name.split(".")
        assert parts[0] != "torch" or not any(part.startswith("_") for part in parts), name
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert node.attr in _own_private_names() | ALLOWED, f"line {node.lineno}: {ast.unparse(node)}"


@functools.cache
def _own_private_names() -> frozenset[str]:
    found = (name for file in FILES for node in ast.walk(ast.parse(file.read_text())) for name in _defined(node))
    return frozenset(name for name in found if name.startswith("_"))


def _defined(node: ast.AST) -> Iterator[str]:
    """Names the package itself defines: functions, and attributes assigned on self or as variables."""
    if isinstance(node, ast.FunctionDef):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        for each in ast.walk(target):
            if isinstance(each, ast.Attribute):
                yield each.attr
            elif isinstance(each, ast.Name):
                yield each.id


def test_no_test_imports_from_another_one() -> None:
    """Helpers lie in `tests/bed`. Read as text, so that programs inside strings count as well."""
    folders = "|".join(sorted({each.name for each in TESTS.rglob("*") if each.is_dir()} - {"bed", "__pycache__"}))
    wrong = re.compile(rf"^\s*(?:from|import) (?:tests|{folders}|test_\w+)\b.*", re.MULTILINE)
    found = {str(file.relative_to(TESTS)): wrong.findall(file.read_text()) for file in TESTS.rglob("*.py")}
    assert len(found) > 50
    assert not {file: lines for file, lines in found.items() if lines}
