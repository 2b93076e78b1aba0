"""Checkpoints that are damaged, or that somebody has written to do harm; functions that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unshard.checkpoint.manifest import MANIFEST, checksum_of


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest, and make its checksum right again. `edit` returns another value, or None."""
    path = folder / MANIFEST
    value = json.loads(path.read_text())["manifest"]
    changed = edit(value)
    write_manifest(folder, json.dumps(value if changed is None else changed))


def write_manifest(folder: Path, text: str) -> None:
    inner = text.encode()
    checksum = checksum_of(inner, "crc32", folder)
    (folder / MANIFEST).write_bytes(b'{"checksum": "crc32:%s", "manifest": %s}\n' % (checksum.encode(), inner))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def failing(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The function, which raises the `at`th time."""
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(28, "No space left on device")
        return function(*args, **kwargs)

    return wrapper
