"""Train models that do not fit on one device. Parameters, gradients and optimizer state are sharded over ranks."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._public import *
    from ._public import __all__ as __all__

__version__ = "0.2.0"

if not TYPE_CHECKING:  # type checkers see the names above; with `__getattr__`, every other name would be `Any`

    def __getattr__(name: str) -> Any:
        """Import all public names when the first one is used, so that `unshard --help` does not import torch."""
        if name == "__all__" or not name.startswith("__"):
            public = importlib.import_module("._public", __name__)
            for each in ("__all__", *public.__all__):
                globals().setdefault(each, getattr(public, each))  # keep what a program has assigned
            if name in globals():  # also modules that are not public names, such as `unshard.errors`
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
