"""Meshes that are made of others."""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

# The same object again while anybody holds it: comparing as many equal meshes as there are parameters takes
# milliseconds in every step. The key holds the meshes and they their roots, so no id is given to another one meanwhile.
_concatenated: weakref.WeakValueDictionary[Any, DeviceMesh] = weakref.WeakValueDictionary()


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The mesh that has the dimensions of all of these, which are slices of one; no public way. All versions."""
    if len(meshes) == 1:
        return meshes[0]
    key = tuple((id(root_mesh(mesh)), mesh) for mesh in meshes)
    mesh = _concatenated.get(key)
    if mesh is None:
        mesh = _concatenated[key] = DeviceMesh._concatenate(meshes)
    return mesh


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The mesh as one dimension of that name; torch's own users call this, too. All versions."""
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was sliced from, or itself. All versions."""
    return mesh._get_root_mesh()
