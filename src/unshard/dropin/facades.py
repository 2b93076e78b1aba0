"""The modules that take the places of PyTorch's, under their names."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import pkgutil
from types import FunctionType, ModuleType
from typing import Any

from ..errors import UnsupportedError
from .missing import MissingName

# Trees of PyTorch that are replaced, and where our names for them are.
TREES = {
    "torch.distributed.fsdp": "unshard.compat.torch_fsdp",
    "torch.distributed._composable.fsdp": "unshard.compat.torch_composable_fsdp",
}
PLAIN = (str, int, float, bool, type(None))


class Facade(ModuleType):
    """Holds our names; any other is looked up in PyTorch's module, to be explained or, for PyTorch itself, handed out.

    PyTorch's own modules get their own private helpers, which know nothing of ours: the compiler compares with some of
    them. Everybody else gets a `MissingName`.
    """

    _real: ModuleType
    _ours: ModuleType | None
    _missing: dict[str, MissingName]

    def __init__(self, real: ModuleType, ours: ModuleType | None):
        super().__init__(real.__name__, real.__doc__)
        vars(self).update({name: getattr(ours, name) for name in getattr(ours, "__all__", ())})
        vars(self).update(_real=real, _ours=ours, _missing={})
        self.__package__ = real.__package__
        self.__spec__ = importlib.machinery.ModuleSpec(real.__name__, None, is_package=hasattr(real, "__path__"))
        if ours is not None:
            self.__file__ = ours.__file__
        if hasattr(real, "__path__"):
            self.__path__ = []  # all its modules are in `sys.modules`; PyTorch's must not be found beside them
        if hasattr(real, "__all__"):
            self.__all__ = list(real.__all__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        real = self._real
        if not hasattr(real, name):
            raise AttributeError(
                f"module {self.__name__!r} (unshard stands in for it) has no attribute {name!r}, nor has PyTorch's own"
            )
        value = getattr(real, name)
        if _asked_by_torch() or is_foreign(value):
            return value
        return self._explained(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__") and name not in vars(self) and hasattr(self._real, name):
            raise UnsupportedError(
                f"{self.__name__}.{name} cannot be replaced: unshard stands in for torch.distributed.fsdp and has no "
                "such thing, so nothing would change."
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<module {self.__name__!r}, for which unshard stands in>"

    def __dir__(self) -> list[str]:
        return sorted(set(vars(self)) - {"_real", "_ours", "_missing"})

    def _explained(self, name: str) -> MissingName:
        if name not in self._missing:
            offered = ", ".join(sorted(getattr(self._ours, "__all__", ())))
            words = f"{self.__name__} offers: {offered}." if offered else f"Nothing of {self.__name__} is offered."
            self._missing[name] = MissingName(f"{self.__name__}.{name}", words)
        return self._missing[name]


def build() -> dict[str, Facade]:
    """A facade for every module of the trees, by name. Imports PyTorch's, so that they see nothing of ours."""
    real = {name: module for tree in TREES for name, module in _modules(tree).items()}
    facades = {name: Facade(module, _ours(name)) for name, module in real.items()}
    for name, facade in facades.items():
        parent, _, last = name.rpartition(".")
        if parent in facades and last not in vars(facades[parent]):
            vars(facades[parent])[last] = facade
    return facades


def is_own(value: Any) -> bool:
    """Whether a class or function is part of the trees."""
    return isinstance(value, type | FunctionType) and in_trees(value.__module__ or "")


def is_foreign(value: Any) -> bool:
    """Constants, and what PyTorch's modules have only imported from elsewhere."""
    if isinstance(value, ModuleType):
        return not in_trees(value.__name__)
    return isinstance(value, PLAIN) or not in_trees(getattr(value, "__module__", None) or "torch.distributed.fsdp")


def in_trees(module: str) -> bool:
    return any(module == tree or module.startswith(f"{tree}.") for tree in TREES)


def _modules(tree: str) -> dict[str, ModuleType]:
    package = importlib.import_module(tree)
    names = [info.name for info in pkgutil.walk_packages(package.__path__, f"{tree}.")]
    return {tree: package, **{name: importlib.import_module(name) for name in names}}


def _ours(name: str) -> ModuleType | None:
    tree = max((tree for tree in TREES if name.startswith(tree)), key=len)
    own = TREES[tree] + name[len(tree) :]
    try:
        return importlib.import_module(own)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{own}.".startswith(f"{error.name}."):
            raise
        return None


def _asked_by_torch() -> bool:
    """Whether the code that reads the attribute is PyTorch's."""
    frame: Any = inspect.currentframe()
    return is_torch(frame.f_back.f_back.f_globals.get("__name__") or "")


def is_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")
