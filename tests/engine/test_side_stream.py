"""Events of side streams, without a device: in which stream they are recorded, and waited for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from unshard.engine import side_stream as stream
from unshard.engine.side_stream import StreamEvent


class Event:
    """Notes the streams it is given."""

    def __init__(self, device: torch.device) -> None:
        self.streams: list[Any] = []

    def record(self, stream: Any = None) -> None:
        self.streams.append(stream)

    wait = record


@pytest.mark.parametrize(("current", "expected"), [(1, None), (0, "the stream of cuda:1")])
def test_events_are_recorded_in_the_stream_of_their_device(current: int, expected: str | None) -> None:
    """Events take None for the stream of the current device, which may be another one than the unit's."""
    with (
        mock.patch.object(torch, "Event", Event),
        mock.patch.object(torch.accelerator, "current_stream", lambda device: f"the stream of {device}"),
        mock.patch.object(stream, "current_device_index", lambda: current),
    ):
        event = StreamEvent(torch.device("cuda", 1))
        event.record().wait()
    assert event.event.streams == [expected, expected]  # type: ignore[attr-defined]
