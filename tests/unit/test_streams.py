"""Streams at the end of a backward that is captured into a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from fsdp2.comm.streams import DeviceStreams
from fsdp2.testing.device import SimulatedDevice
from fsdp2.testing.order import Event, Record, Wait

OURS = {"gather", "reduce", "all"}


@pytest.mark.parametrize("capturing", [True, False])
def test_a_capture_ends_with_every_stream_forked_and_joined(capturing: bool) -> None:
    """CUDA refuses to end a capture with a stream unjoined, and to wait for one outside of it."""
    events: list[Event] = []
    device = SimulatedDevice(events.append)
    streams = DeviceStreams(torch.device("cpu"), device)
    device.capturing = capturing
    with streams.ending(streams.compute):
        pass
    recorded: dict[int, str] = {}
    forked, joined = set(), set()
    for event in events:
        if isinstance(event, Record):
            assert event.stream == "compute" or event.stream in forked
            recorded[event.event] = event.stream
        elif isinstance(event, Wait) and event.stream == "compute":
            joined.add(recorded[event.event])
        elif isinstance(event, Wait):
            assert recorded[event.event] == "compute"
            forked.add(event.stream)
    assert forked == joined == (OURS if capturing else set())
