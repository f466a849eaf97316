"""The measurement of loads by ranks of one host that want the same bytes."""

from __future__ import annotations

import sys

import pytest

from benchmarks import replicas


def test_what_ranks_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each replica reads all that it wants; where bytes are handed on, they are read once."""
    monkeypatch.setattr(sys, "argv", ["replicas", "--ranks", "2", "--size", "1", "--rounds", "1"])
    replicas.main()
    lines = [
        line.split(" | ") for line in capsys.readouterr().out.splitlines() if "shards |" in line
    ]
    read = {(case.lstrip("| "), way): float(by_ranks) for case, way, by_ranks, *_ in lines}
    for way in (replicas.LOAD, replicas.UNVERIFIED):
        assert read["1 replicas of 2 shards", way] == pytest.approx(1, abs=0.05)
        assert read["2 replicas of 1 shards", way] == pytest.approx(2, abs=0.05)
    for case in ("1 replicas of 2 shards", "2 replicas of 1 shards"):
        assert read[case, replicas.HANDED_ON] == pytest.approx(1, abs=0.05)
