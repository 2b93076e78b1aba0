"""What programs get for a name that PyTorch has and we do not: an object that says so when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import UnsupportedError


class MissingName:
    """Can be imported, mentioned in annotations and derived from; every other use is an error that names it."""

    _path: str
    _offered: str

    def __init__(self, path: str, offered: str):
        vars(self).update(_path=path, _offered=offered)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"{self._path} is not there: unshard stands in for torch.distributed.fsdp and has no such thing. "
            f"{self._offered} Without unshard's drop-in the program gets PyTorch's own."
        )

    __call__ = __iter__ = __len__ = __contains__ = __getitem__ = __enter__ = __exit__ = _refuse
    __instancecheck__ = __subclasscheck__ = __setattr__ = __delattr__ = __reduce_ex__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself asks for these, and lives without
        self._refuse()

    def __or__(self, other: Any) -> MissingName:
        return self  # `X | None` in an annotation

    __ror__ = __or__

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        """A class may derive from it, since a library may define what its user never needs; but have no instances."""

        def __new__(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
            self._refuse()

        return (type(self._path.rpartition(".")[2], (), {"__new__": __new__}),)

    def __repr__(self) -> str:
        return f"<{self._path}, which unshard does not have>"
