"""The modules that replace PyTorch's modules in `sys.modules`, and objects for names that unshard lacks."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import pkgutil
import sys
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from ..errors import UnsupportedError

# PyTorch packages that are replaced.
PACKAGES = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
# The files with our names. PyTorch modules that are not listed use the file of the nearest enclosing package.
FILES = {
    "torch.distributed.fsdp": "unshard.dropin.torch_fsdp",
    "torch.distributed.fsdp.wrap": "unshard.dropin.torch_fsdp.wrap",
    "torch.distributed.fsdp._fully_shard": "unshard.dropin.torch_fsdp._fully_shard",
    "torch.distributed._composable.fsdp": "unshard.dropin.torch_fsdp._fully_shard",
}


class StandInModule(ModuleType):
    """Replaces one PyTorch module. It has our names, and a `MissingName` for each FSDP name that only PyTorch has.

    For a name that only PyTorch has, PyTorch's own code gets PyTorch's object, because `torch.compile` compares
    functions with such objects.
    """

    _real: ModuleType
    _ours: dict[str, Any]
    _missing: dict[str, MissingName]

    def __init__(self, real: ModuleType):
        super().__init__(real.__name__, real.__doc__)
        file, ours = _our_names(real)
        vars(self).update(ours)
        vars(self).update(_real=real, _ours=ours, _missing={})
        self.__file__ = file
        self.__package__ = real.__package__
        self.__spec__ = importlib.machinery.ModuleSpec(real.__name__, _Loader(), is_package=hasattr(real, "__path__"))
        if hasattr(real, "__path__"):
            self.__path__ = []  # every module inside is in `sys.modules`; the import system must not find PyTorch's
        if hasattr(real, "__all__"):
            self.__all__ = list(real.__all__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        real = self._real
        if not hasattr(real, name):
            raise AttributeError(
                f"module {self.__name__!r} (replaced by unshard) has no attribute {name!r}, nor has PyTorch's own"
            )
        value = getattr(real, name)
        return value if _caller_is_torch() or not _is_fsdp(value) else self.missing(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__") and name not in vars(self) and hasattr(self._real, name):
            raise UnsupportedError(
                f"{self.__name__}.{name} cannot be assigned: unshard replaces torch.distributed.fsdp and does not have "
                "this name, so the assignment would have no effect. Run without the drop-in to change PyTorch's own."
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"<module {self.__name__!r}, replaced by unshard>"

    def __dir__(self) -> list[str]:
        return sorted(set(vars(self)) - {"_real", "_ours", "_missing"})

    def missing(self, name: str) -> MissingName:
        if name not in self._missing:
            self._missing[name] = MissingName(f"{self.__name__}.{name}", sorted(self._ours))
        return self._missing[name]


class _Loader(importlib.abc.Loader):
    """Completes an import that started before `install`, by returning the stand-in from `sys.modules`."""

    def create_module(self, spec: Any) -> Any:
        return sys.modules[spec.name]

    def exec_module(self, module: Any) -> None:
        """Do nothing, because the stand-in is complete."""


class MissingName:
    """Stands in for an object that PyTorch has and unshard does not.

    Programs import names that they never use. They may import this object, use it in annotations and subclass it.
    Every other use raises an error.
    """

    _path: str
    _available: list[str]

    def __init__(self, path: str, available: list[str]):
        vars(self).update(_path=path, _available=available)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        module = self._path.rpartition(".")[0]
        raise UnsupportedError(
            f"{self._path} is not available: unshard replaces torch.distributed.fsdp and does not have this name. "
            f"Available in {module}: {', '.join(self._available) or 'no names'}. Run without the drop-in to use "
            "PyTorch's own."
        )

    __call__ = __iter__ = __len__ = __contains__ = __getitem__ = __enter__ = __exit__ = _refuse
    __instancecheck__ = __subclasscheck__ = __setattr__ = __delattr__ = __reduce_ex__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself looks these up, and they are optional
        self._refuse()

    def __or__(self, other: Any) -> MissingName:
        return self  # `X | None` in an annotation

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        """Allow subclasses, because libraries define subclasses that programs never use. Refuse to create instances."""

        def __new__(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
            self._refuse()

        return (type(self._path.rpartition(".")[2], (), {"__new__": __new__}),)

    def __repr__(self) -> str:
        return f"<{self._path}, which unshard does not have>"


def build() -> dict[str, StandInModule]:
    """Build a stand-in for every module of `PACKAGES`."""
    # Import all of PyTorch's modules before any is replaced, so that none of them imports ours.
    real = [module for package in PACKAGES for module in _modules(package)]
    stand_ins = {module.__name__: StandInModule(module) for module in real}
    for name, stand_in in stand_ins.items():
        parent, _, last = name.rpartition(".")
        if parent in stand_ins:
            vars(stand_ins[parent]).setdefault(last, stand_in)
    return stand_ins


def in_packages(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in PACKAGES)


def is_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


def is_defined_in_packages(value: Any) -> bool:
    """Return True if `value` is a class or function of PyTorch's FSDP."""
    return isinstance(value, type | FunctionType) and in_packages(value.__module__ or "")


def _is_fsdp(value: Any) -> bool:
    """Return True if PyTorch's FSDP defines `value`. Return False for constants and for objects of other packages."""
    if isinstance(value, ModuleType):
        return in_packages(value.__name__)
    if value is None or isinstance(value, str | int | float | bool):
        return False
    module = getattr(value, "__module__", None)
    return not module or in_packages(module)


def _modules(package: str) -> list[ModuleType]:
    top = importlib.import_module(package)
    found = pkgutil.walk_packages(top.__path__, f"{package}.")
    return [top, *(importlib.import_module(each.name) for each in found)]


def _our_names(real: ModuleType) -> tuple[str, dict[str, Any]]:
    """Return the path of the file that has our names for a PyTorch module, and a dict of these names.

    For a module in `FILES`, these are the names in `__all__` of its file. Any other module uses the file of the nearest
    enclosing package, and gets those globals that the PyTorch module also has.
    """
    name = real.__name__
    while name not in FILES:
        name = name.rpartition(".")[0]
    ours = importlib.import_module(FILES[name])
    if name == real.__name__:
        names = ours.__all__
    else:
        names = [each for each in vars(ours).keys() & vars(real).keys() if not each.startswith("__")]
    found = {each: getattr(ours, each) for each in names}
    return str(ours.__file__), {each: value for each, value in found.items() if not isinstance(value, ModuleType)}


def _caller_is_torch() -> bool:
    # The stand-in's `__getattr__` calls this function, so the second frame above is the code that reads a name.
    frame: Any = inspect.currentframe()
    return is_torch(frame.f_back.f_back.f_globals.get("__name__") or "")
