"""Installs the drop-in in child processes of a program that runs with the drop-in.

Python imports a module of this name at startup, and `unshard.dropin` puts this folder first on PYTHONPATH. This
module imports unshard only when the process imports PyTorch's FSDP, so other programs start as fast as before.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")


class InstallAtImport:
    """An import hook that installs the drop-in when PyTorch's FSDP is first imported."""

    unshard_dropin = True
    """`install` recognizes the hook by this attribute and removes it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith(PACKAGES):
            return None
        sys.meta_path.remove(self)
        if importlib.util.find_spec("unshard") is None:
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(HERE))))
        importlib.import_module("unshard.dropin").install(child_processes=True)
        return sys.modules[name].__spec__ if name in sys.modules else None


def import_next() -> None:
    """Remove this folder from `sys.path`, and import the `sitecustomize` that Python would have imported without it."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec(__name__, sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, InstallAtImport())
if __name__ == "sitecustomize":
    import_next()
