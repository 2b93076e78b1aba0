"""What a program may import, and how it is called."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from pathlib import Path

import pytest
from bed.programs import python

import unshard
from unshard.torch_private import versions

REPOSITORY = Path(__file__).parent.parent
PACKAGE = Path(unshard.__file__).parent

# The names of the surface, and those that programs of power users import from inside PyTorch's.
PUBLIC = (
    "fully_shard FSDPModule UnshardHandle register_fsdp_forward_method share_comm_ctx MixedPrecisionPolicy "
    "OffloadPolicy CPUOffloadPolicy DataParallelMeshDims"
)
POWER = (
    "Comm AllGather ReduceScatter ShardPlacementResult FSDPMeshInfo HSDPMeshInfo DDPMeshInfo get_cls_to_fsdp_cls "
    "disable_fsdp_module_new_init"
)

POLICIES = (
    "always_wrap_policy lambda_auto_wrap_policy transformer_auto_wrap_policy size_based_auto_wrap_policy enable_wrap "
    "wrap CustomPolicy ModuleWrapPolicy"
)


def test_public_names() -> None:
    """Contract FS-01, FS-02."""
    for name in (PUBLIC + " " + POWER).split():
        assert name in unshard.__all__ and hasattr(unshard, name), name
    assert len(set(unshard.__all__)) == len(unshard.__all__)


def test_the_types_of_every_public_name_are_checked() -> None:
    """`make types` checks that program. Without the names there, untyped ones would be `Any` in programs of users."""
    tree = ast.walk(ast.parse((REPOSITORY / "tests/typed_client.py").read_text()))
    used = {(ast.unparse(node.value), node.attr) for node in tree if isinstance(node, ast.Attribute)}
    packages = (unshard, unshard.checkpoint, unshard.optim, unshard.tools, unshard.wrap)
    names = {(each.__name__.rpartition(".")[2], name) for each in packages for name in each.__all__}
    modules = {("unshard", each.__name__.rpartition(".")[2]) for each in packages}
    assert len(names) > 80
    assert names - modules <= used


def test_names_of_the_tools() -> None:
    """Completion lists them, although most are imported at their first use."""
    assert set(unshard.tools.__all__) <= set(dir(unshard.tools))


def test_names_of_the_policies() -> None:
    """Contract F1-02."""
    assert set(unshard.wrap.__all__) == set(POLICIES.split())
    assert all(getattr(unshard.wrap, name).__module__ == "unshard.wrap" for name in POLICIES.split())


def test_arguments_of_fully_shard() -> None:
    """Contract ARG-01 to ARG-08."""
    parameters = inspect.signature(unshard.fully_shard).parameters
    assert list(parameters) == [
        "module",
        "mesh",
        "reshard_after_forward",
        "shard_placement_fn",
        "mp_policy",
        "offload_policy",
        "ignored_params",
        "dp_mesh_dims",
    ]
    keywords = [each for name, each in parameters.items() if name != "module"]
    assert all(each.kind is each.KEYWORD_ONLY and each.default is None for each in keywords)


LAZILY = """
import sys, unshard
assert unshard.__version__ and "torch" not in sys.modules
assert not hasattr(unshard, "__wrapped__") and "torch" not in sys.modules  # what tools look up in any module
unshard.capture = mine = object()
assert issubclass(unshard.errors.ArgumentError, ValueError)  # a module that is no public name
assert unshard.capture is mine and unshard.fully_shard.__module__ == "unshard.fsdp2.fully_shard"
assert set(unshard.__all__) | {"__version__"} <= set(dir(unshard)) and set(unshard.__all__) <= set(vars(unshard))
from unshard import *
assert FSDPModule is unshard.FSDPModule
try:
    unshard.no_such_name
except AttributeError as error:
    print(error)
"""


def test_the_package_imports_torch_when_a_name_is_used() -> None:
    """So that the command line answers at once. A program sees no difference."""
    assert python("-c", LAZILY).stdout == "module 'unshard' has no attribute 'no_such_name'\n"


def test_every_package_can_be_imported_first() -> None:
    """Nothing depends on what `unshard/__init__.py` would have imported before."""
    names = [f"unshard.{each.stem}" for each in sorted(PACKAGE.glob("[a-z]*")) if each.name != "py.typed"]
    assert len(names) > 15
    assert python("-c", IMPORTS_EACH, *names).stdout.split() == ["ended", *["0"] * len(names)]


# Forks, so that torch is imported once.
IMPORTS_EACH = """
import importlib, os, sys
import torch.distributed.fsdp, torch.distributed.tensor
assert "unshard" not in sys.modules
found = ["ended"]
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        importlib.import_module(name)
        os._exit(0)
    found.append(os.waitpid(child, 0)[1])
print(*found)
"""


@pytest.mark.parametrize(
    ("version", "logged"),
    [
        ("2.11.0", False),
        ("2.11.0a0+git1234", False),
        ("2.15.7+cu130", False),
        ("2.15.0.dev20261001", False),
        ("2.16.0", True),
        ("2.16.0a0+git1234", True),
        ("2.16.0.dev20261201+cpu", True),
        ("3.0.0rc1", True),
        ("our-build", False),
    ],
)
def test_a_newer_torch_is_told_once(version: str, logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "unshard"):
        versions.check(version)
    assert [each.name for each in caplog.records] == ["unshard"] * logged
    if logged:
        assert f"torch {version} is newer" in caplog.text and "2.11 to 2.15" in caplog.text


def test_only_rank_0_tells(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RANK", "1")
    versions.check("2.99.0")
    assert not caplog.records


def test_an_old_torch_is_refused() -> None:
    for version in ("2.10.1+cu128", "1.13.0"):
        with pytest.raises(ImportError, match=f"needs torch 2.11 or newer, found torch {re.escape(version)}"):
            versions.check(version)


def test_the_versions_of_torch_agree() -> None:
    """Those of the dependency (no upper bound: pip would replace a newer torch), of `make test-versions` and of CI."""
    oldest, newest = (".".join(map(str, each)) for each in (versions.OLDEST, versions.NEWEST))
    assert re.findall(r'"(torch\b[^"]*)"', (REPOSITORY / "pyproject.toml").read_text())[0] == f"torch>={oldest}"
    pairs = re.search(r"^VERSIONS \?= (.+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert pairs is not None
    tested = [pair.split("-")[1].rpartition(".")[0] for pair in pairs[1].split()]
    assert tested[0] == oldest and tested[-1] == newest
    matrix = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    assert re.findall(r'"(.+?)"', re.findall(r"^ +torch: \[(.+)\]", matrix, re.MULTILINE)[0]) == [
        pair.split("-")[1] for pair in pairs[1].split()
    ]


def test_the_versions_of_python_agree() -> None:
    """Those of the dependency, of the classifiers and of CI."""
    project = (REPOSITORY / "pyproject.toml").read_text()
    matrix = re.search(r"^ +python: \[(.+)\]", (REPOSITORY / ".github/workflows/ci.yml").read_text(), re.MULTILINE)
    assert matrix is not None
    tested = re.findall(r'"(3\.\d+)"', matrix[1])
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == tested
    assert f'requires-python = ">={tested[0]}"' in project


def test_one_version() -> None:
    """The package says it, the build reads it there without importing torch, and the changelog begins with it."""
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert re.findall(r"^version\b.*", project, re.MULTILINE) == ['version = { attr = "unshard.__version__" }']
    body = ast.parse((REPOSITORY / "src/unshard/__init__.py").read_text()).body
    literals = [ast.literal_eval(each.value) for each in body if ast.unparse(each).startswith("__version__ = ")]
    assert literals == [unshard.__version__]  # setuptools imports the package for anything but a literal
    newest = re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == unshard.__version__
