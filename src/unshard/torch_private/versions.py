"""Defines the supported versions of torch. Importing this module checks the installed version."""

from __future__ import annotations

import logging
import os
import re

import torch

OLDEST, NEWEST = (2, 11), (2, 15)
"""The first and the last tested version.

Only the first two numbers of a version count, so 2.15.1+cu130 is 2.15.
"""


def check(version: str) -> None:
    """Raise an error if torch is too old. Log a warning on rank 0 if torch is newer than the tested versions.

    This function does not use `warnings`, because programs that turn warnings into errors would fail at import.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:  # a custom build
        return
    found = int(match[1]), int(match[2])
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    if found < OLDEST:
        raise ImportError(f"unshard needs torch {oldest} or newer, found torch {version}. Upgrade torch.")
    if found > NEWEST and os.environ.get("RANK", "0") == "0":
        logging.getLogger("unshard").warning(
            "torch %s is newer than the versions that this unshard was tested with (%s to %s). unshard uses some "
            "private APIs of torch. If an error names one, upgrade unshard or install torch %s.",
            *(version, oldest, newest, newest),
        )


check(torch.__version__)
