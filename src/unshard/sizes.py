"""Reads sizes of memory and files, such as 80GiB. This module imports nothing that takes time."""

import re


def bytes_in(size: object) -> int:
    """Return the bytes in a positive number, or in a text such as 80GiB, 80GB or 512MB. Raise ValueError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(I?))?B?", str(size).strip().upper())
    found = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")) if match else 0
    if found < 1:
        raise ValueError(f"expected a size such as 80GiB or 512MB, got {size!r}")
    return found
