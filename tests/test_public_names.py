"""What a program may import, and how it is called."""

from __future__ import annotations

import inspect

import unshard

# The names of the surface, and those that programs of power users import from inside PyTorch's.
PUBLIC = (
    "fully_shard FSDPModule UnshardHandle register_fsdp_forward_method share_comm_ctx MixedPrecisionPolicy "
    "OffloadPolicy CPUOffloadPolicy DataParallelMeshDims"
)
POWER = (
    "Comm AllGather ReduceScatter ShardPlacementResult FSDPMeshInfo HSDPMeshInfo DDPMeshInfo get_cls_to_fsdp_cls "
    "disable_fsdp_module_new_init"
)


def test_public_names() -> None:
    """Contract FS-01, FS-02."""
    for name in (PUBLIC + " " + POWER).split():
        assert name in unshard.__all__ and hasattr(unshard, name), name
    assert len(set(unshard.__all__)) == len(unshard.__all__)


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
