"""What a program may import, and how it is called."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import unshard

REPOSITORY = Path(__file__).parent.parent

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
