"""Installs the drop-in in Python processes that a program started with it starts.

Python imports a module of this name when it starts. `unshard.dropin` puts this folder first on PYTHONPATH. Nothing is
imported before the process imports PyTorch's FSDP; programs that do not use it pay nothing.
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
    """Finds PyTorch's FSDP once: it installs the drop-in, which puts modules of unshard in its place."""

    unshard_dropin = True
    """By this attribute, `install` finds and removes it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith(PACKAGES):
            return None
        sys.meta_path.remove(self)
        if importlib.util.find_spec("unshard") is None:
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(HERE))))
        importlib.import_module("unshard.dropin").install(child_processes=True)
        return sys.modules[name].__spec__ if name in sys.modules else None


def import_next() -> None:
    """Import the `sitecustomize` that the process would have without this folder, and leave no trace of the folder."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec(__name__, sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, InstallAtImport())
if __name__ == "sitecustomize":
    import_next()
