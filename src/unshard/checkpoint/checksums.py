"""Checksums of the blocks of a file, so that a rank that reads some bytes verifies these and no others.

xxh3_64 if the package xxhash is installed, else CRC-32; the manifest says which. They find damage, not forgery.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from ..errors import CheckpointError

BLOCK_BYTES = 4 * 2**20


class Checksum(Protocol):
    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


class Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


DIGITS = {"xxh3_64": 16, "crc32": 8}
"""Hexadecimal digits of a checksum, by algorithm."""


def best_algorithm() -> str:
    try:
        importlib.import_module("xxhash")
    except ImportError:
        return "crc32"
    return "xxh3_64"


def maker_of(algorithm: str, where: object) -> Callable[[], Checksum]:
    """What makes a new checksum. `where`: the file that was written with this algorithm."""
    if algorithm == "crc32":
        return Crc32
    if algorithm != "xxh3_64":
        raise CheckpointError(f"{where} has checksums of the unknown kind {algorithm!r}; known: {', '.join(DIGITS)}.")
    try:
        xxhash: Any = importlib.import_module("xxhash")
    except ImportError as error:
        raise CheckpointError(
            f"{where} has checksums of the kind xxh3_64, and the package xxhash is not installed: pip install xxhash"
        ) from error
    return xxhash.xxh3_64


def checksum_of(data: Any, algorithm: str, where: object) -> str:
    checksum = maker_of(algorithm, where)()
    checksum.update(data)
    return checksum.hexdigest()


class BlockChecksums:
    """The checksums of consecutive blocks of what is passed to `update`."""

    def __init__(self, algorithm: str, where: object, block_bytes: int = BLOCK_BYTES):
        self._make, self._block_bytes = maker_of(algorithm, where), block_bytes
        self._open: Checksum | None = None
        self._left = 0
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        while data:
            if self._open is None:
                self._open, self._left = self._make(), self._block_bytes
            now = data[: self._left]
            self._open.update(now)
            self._left -= len(now)
            data = data[len(now) :]
            if not self._left:
                self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._done.append(self._open.hexdigest())
            self._open = None

    def finish(self) -> list[str]:
        self._close()
        return self._done
