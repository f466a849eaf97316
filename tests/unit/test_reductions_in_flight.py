"""How many reductions may be in flight, and what becomes of them when a launch raises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdp2.comm.streams import Streams
from fsdp2.runtime.reduction import ReductionsInFlight


class FakeReduction:
    """Notes what is done with it."""

    scatter = replicate = None

    def __init__(self, log: list[str], name: str, nbytes: int = 1, *, raises: bool = False) -> None:
        self.log, self.name, self.nbytes, self.raises = log, name, nbytes, raises
        self.bucket = SimpleNamespace(params=[SimpleNamespace(fqn=f"{name}.weight")])
        self.plan = SimpleNamespace(present=(0,))
        self.added: list[Any] = []

    def collides(self) -> bool:
        return False

    def launch(self, streams: Streams) -> None:
        self.log.append(f"launch {self.name}")
        if self.raises:
            raise RuntimeError("no memory")

    def complete(self, streams: Streams) -> list[Any]:
        self.log.append(f"complete {self.name}")
        return []

    def discard(self, streams: Streams) -> None:
        self.log.append(f"discard {self.name}")


def launch(flying: ReductionsInFlight, *given: Any, max_units: int | None = None) -> None:
    flying.launch(given, Streams(), unit_name="layer", max_units=max_units)


def test_room_is_made_before_a_launch() -> None:
    log: list[str] = []
    flying = ReductionsInFlight(max_bytes=4)
    for name, nbytes in (("a", 2), ("b", 2), ("c", 3)):
        launch(flying, FakeReduction(log, name, nbytes))
    assert log == ["launch a", "launch b", "complete a", "complete b", "launch c"]
    assert len(flying) == 1


def test_the_number_of_units_may_be_limited_instead() -> None:
    log: list[str] = []
    flying = ReductionsInFlight(max_bytes=1)
    for name in "abc":
        launch(flying, FakeReduction(log, name, 9), max_units=2)
    assert log == ["launch a", "launch b", "complete a", "launch c"]


def test_a_launch_that_raises_is_discarded_with_those_before_it() -> None:
    log: list[str] = []
    flying = ReductionsInFlight(max_bytes=9)
    with pytest.raises(RuntimeError, match="no memory"):
        launch(flying, FakeReduction(log, "a"), FakeReduction(log, "b", raises=True))
    flying.discard(Streams())
    assert log == ["launch a", "launch b", "discard a", "discard b"]  # b may have begun
    assert len(flying) == 0
