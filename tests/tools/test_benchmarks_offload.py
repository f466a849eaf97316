"""`benchmarks.offload` runs, and what it counts is what the page says of it."""

from __future__ import annotations

import re

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its own benchmarks", allow_module_level=True)

import testdev
from benchmarks import offload

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        testdev.why_not() is not None, reason=testdev.why_not() or "the test device is there"
    ),
]


def test_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    offload.main(["--rounds", "1"])
    printed = capsys.readouterr().out
    peaks = {
        found[1]: (float(found[2]), float(found[3]))
        for found in re.finditer(
            r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|$", printed, re.M
        )
    }
    plain, saved = peaks["all on the device"], peaks["save_on_cpu"]
    ours = [peaks[f"offload_activations, {n} MiB"] for n in offload.SIZES.limits]
    assert ours[0][0] < 0.25 * plain[0]
    assert ours[0][1] < 0.75 * saved[1]
    assert [copied for _, copied in ours] == sorted((c for _, c in ours), reverse=True)
