"""Which parameters of the small test models share a tensor of a collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from unshard.comm import process_group
from unshard.comm.transports import SoloTransport
from unshard.layout.collective_tensors import PACK_SMALL, PackingRule


@contextmanager
def path(way: str) -> Iterator[None]:
    """ "rows" sends even small parameters in regions of their own, as large ones are; "packed" packs even few. With
    "mixed" the matrices of most test models are large, and their vectors are packed.

    "ungrouped" is what a backend gets that takes one tensor per collective.
    """
    if way == "ungrouped":
        with mock.patch.object(process_group, "_grouping", lambda *unused: (False, False)):
            yield
        return
    below = {"rows": 0, "mixed": PACK_SMALL.below, "packed": process_group.ON_DEVICE.below}
    rule = PackingRule(below[way])
    with (
        mock.patch.object(process_group, "ON_DEVICE", rule),
        mock.patch.object(process_group, "ON_HOST", rule),
        mock.patch.object(SoloTransport, "traits", replace(SoloTransport.traits, packing=rule)),
    ):
        yield
