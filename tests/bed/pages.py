"""Listings of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def listings(page: str, heading: str = "") -> list[str]:
    """The Python listings below a heading of level 2 or 3; without one, those before the first."""
    parts = re.split(r"^##+ (.+)\n", (REPOSITORY / page).read_text(), flags=re.MULTILINE)
    sections = dict(zip(["", *parts[1::2]], parts[::2], strict=True))
    return re.findall(r"^```python\n(.*?)^```", sections[heading], flags=re.MULTILINE | re.DOTALL)
