"""Imports go one way, private torch APIs live in one folder, torch's FSDP is never used; tests share only helpers."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import unshard

PACKAGE = Path(unshard.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = Path(__file__).parent

# A module may import from its own layer and from those before it.
LAYERS = [
    "layout policies wrap names errors sizes torch_private",
    "comm",
    "engine",
    "optim",
    "state",
    "fsdp2 fsdp1",
    "tools composable captured_step checkpoint uneven",
    "dropin",
    "cli",
    "__main__",
]
BASE = {"policies", "wrap", "names", "errors", "torch_private"}  # these may import each other
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}


def layer_of(file: Path) -> str:
    if file.name == "__main__.py":  # an entry point, also in a folder
        return "__main__"
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def place(file: Path, node: ast.AST | None = None) -> str:
    name = str(file.relative_to(PACKAGE))
    return f"{name}:{getattr(node, 'lineno', 0)}" if node else name


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text())))


def imports(file: Path) -> Iterator[str]:
    """Absolute names of everything a file imports."""
    package = ["unshard", *file.relative_to(PACKAGE).parent.parts]
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 20
    assert any("unshard.layout.shardings" in imports(file) for file in FILES)


def test_imports_go_one_way() -> None:
    wrong = []
    for file in FILES:
        own = layer_of(file)
        for name in imports(file):
            if name.startswith("unshard.") and own not in ("__init__", "_public"):
                other = name.split(".")[1]
                same = LAYER[other] == LAYER[own]
                if LAYER[other] > LAYER[own] or (same and other != own and not {own, other} <= BASE):
                    wrong.append(f"{place(file)} imports {name}")
            if own == "layout" and name.split(".")[0] == "torch":
                wrong.append(f"{place(file)} imports {name}; layouts are integers only")
            if name.startswith(("torch.distributed.fsdp", "torch.distributed._composable")):
                wrong.append(f"{place(file)} imports {name}")
    assert not wrong


def test_only_the_surface_of_the_engine_is_imported() -> None:
    wrong = [
        f"{place(file)} imports {name}"
        for file in FILES
        if layer_of(file) != "engine"
        for name in imports(file)
        if name.startswith("unshard.engine") and name != "unshard.engine.api"
    ]
    assert not wrong


def test_only_the_drop_in_names_what_it_replaces() -> None:
    """Not in strings either, which `importlib` would take."""
    names = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
    wrong = []
    for file in FILES:
        if layer_of(file) == "dropin":
            continue
        docstrings = {id(node.value) for node in nodes(file) if isinstance(node, ast.Expr)}  # these may name it
        for node in nodes(file):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
            if isinstance(text, str) and text.startswith(names):
                wrong.append(f"{place(file, node)}: {text!r}")
    assert not wrong


# Private, but what every library that handles modules uses; there is no public spelling.
ALLOWED = {"_apply", "_current_frames", "_exit", "_fields", "_replace"}


def test_private_torch_names_live_in_one_folder() -> None:
    allowed = _own_private_names() | ALLOWED
    wrong = []
    for file in FILES:
        if layer_of(file) == "torch_private":
            continue
        for name in imports(file):
            parts = name.split(".")
            if parts[0] == "torch" and any(part.startswith("_") for part in parts):
                wrong.append(f"{place(file)} imports {name}")
        for node in nodes(file):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if name.startswith("_") and not name.startswith("__") and name not in allowed:
                wrong.append(f"{place(file, node)}: {ast.unparse(node)}")
    assert not wrong


def _own_private_names() -> frozenset[str]:
    found = (name for file in FILES for node in nodes(file) for name in _defined(node))
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


def test_no_file_is_long() -> None:
    lengths = {place(file): len(file.read_text().splitlines()) for file in FILES}
    assert not {name: length for name, length in lengths.items() if length > 450}


def test_no_test_imports_from_another_one() -> None:
    """Helpers lie in `tests/bed`. Read as text, so that programs inside strings count as well."""
    folders = "|".join(sorted({each.name for each in TESTS.rglob("*") if each.is_dir()} - {"bed", "__pycache__"}))
    wrong = re.compile(rf"^\s*(?:from|import) (?:tests|{folders}|test_\w+)\b.*", re.MULTILINE)
    found = {str(file.relative_to(TESTS)): wrong.findall(file.read_text()) for file in TESTS.rglob("*.py")}
    assert len(found) > 50
    assert not {file: lines for file, lines in found.items() if lines}
