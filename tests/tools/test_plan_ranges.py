"""What is not known of hardware: ranges of times, and choices that depend on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from by_keywords import plan, predict, sweep
from fsdp2 import MixedPrecisionPolicy
from fsdp2.planning import Hardware, find_hardware
from fsdp2.planning.outcomes import CLOSE, MOST_COMPARED, Candidate, Outcome, as_fast, range_of

H100 = find_hardware("h100")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))


def batch() -> Tensor:
    return torch.empty(4096, 4096, device="meta")


def predicted(hardware: Hardware = H100, **options: Any) -> Any:
    return predict(model(), batch(), hardware, 64, mp_policy=BF16, **options)


def test_a_prediction_is_a_range() -> None:
    made = predicted()
    assert made.range is not None
    assert made.range.fastest_s < made.seconds < made.range.slowest_s
    # Its ends are what such hardware is predicted to take.
    low = H100.links_range[0]
    slow = replace(
        H100,
        kernels_range=(1, 1),
        links_range=(1, 1),
        speeds=[H100.kernels_range[0]] * 8,
        node_bandwidth=H100.node_bandwidth * low,
        network_bandwidth=H100.network_bandwidth * low,
        node_latency_s=H100.node_latency_s / low,
        network_latency_s=H100.network_latency_s / low,
    )
    alone = predicted(slow)
    assert alone.range is None
    assert alone.seconds == pytest.approx(made.range.slowest_s)
    assert "Range" in str(made)
    assert "Range" not in str(alone)
    assert made.to_dict()["step_range_s"] == [made.range.fastest_s, made.range.slowest_s]
    assert alone.to_dict()["step_range_s"] is None
    of_many = sweep(model(), batch(), H100, [64], mp_policy=BF16).predictions[0]
    assert (of_many.range, of_many.seconds) == (None, made.seconds)


def test_what_drives_the_range() -> None:
    by_kernels = predicted(replace(H100, links_range=(1, 1)))
    assert by_kernels.range.links_s == 0 < by_kernels.range.kernels_s
    assert "speed of kernels" in str(by_kernels)
    by_links = predicted(replace(H100, kernels_range=(1, 1), network_bandwidth=1e9))
    assert by_links.range.kernels_s == 0 < by_links.range.links_s
    assert "speed of links" in str(by_links)


def test_hardware_whose_speeds_are_known_has_none() -> None:
    assert range_of(find_hardware("cpu"), lambda hardware, speed: 1.0) is None
    calibrated = range_of(find_hardware("h100-torchtitan"), lambda hardware, speed: 1 / speed)
    assert calibrated is not None
    assert calibrated.kernels_s == 0


def outcome(number: int, seconds: float) -> Outcome:
    return Outcome(Candidate("full", (8,), prefetch=1 + number), seconds, 0.0, 100, True, 100, 100)


def test_what_is_faster_only_where_links_are_slow_is_as_fast() -> None:
    first, never, slow_links, far = (outcome(i, s) for i, s in enumerate([1.0, 1.01, 1.02, 1.2]))

    def paced(each: Outcome, hardware: Hardware, speed: float) -> float:
        links = hardware.network_bandwidth / H100.network_bandwidth
        if each is slow_links:  # does not need them
            return 1.02 / speed
        return each.seconds / speed + 0.1 * (1 / links - 1)

    assert as_fast([first, never, slow_links, far], H100, paced) == [first, slow_links]
    known = replace(H100, kernels_range=(1, 1), links_range=(1, 1))
    assert as_fast([first, never, slow_links, far], known, paced) == [first]


def test_few_are_compared() -> None:
    asked: list[Outcome] = []

    def paced(each: Outcome, hardware: Hardware, speed: float) -> float:
        asked.append(each)
        return each.seconds

    many = [outcome(i, 1 + 0.001 * i) for i in range(20)] + [outcome(1, 1.01 * CLOSE)]
    assert as_fast(many, H100, paced) == many[:1]
    assert len({id(each) for each in asked}) == MOST_COMPARED
    asked.clear()
    assert as_fast([many[0], many[-1]], H100, paced) == many[:1]
    assert not asked


def test_a_plan_takes_the_simplest_of_what_is_as_fast() -> None:
    known = replace(H100, kernels_range=(1, 1), links_range=(1, 1), network_bandwidth=30e9)
    sure = plan(model(), batch(), known, 64, mp_policy=BF16, checkpoint="none")
    # With nearly anything possible, much of what is close is as fast.
    unknown = replace(known, kernels_range=(0.01, 100), links_range=(0.01, 100))
    unsure = plan(model(), batch(), unknown, 64, mp_policy=BF16, checkpoint="none")
    assert unsure.chosen.candidate.complexity <= sure.chosen.candidate.complexity
    assert unsure.chosen is unsure.outcomes[0]
    assert unsure.chosen.seconds <= CLOSE * sure.chosen.seconds
    assert sure.range is None
    assert unsure.range is not None
    assert unsure.to_dict()["step_range_s"][0] < unsure.chosen.seconds
    fastest = min(o.seconds for o in unsure.outcomes if o.fits)
    assert ("depends on what is not known" in str(unsure)) == (
        unsure.chosen.seconds > 1.005 * fastest
    )


@pytest.mark.parametrize("bad", [(0.5, 0.9), (1.1, 1.2), (0, 1), (1, 1e9), (1,), (0.5, 1, 2)])
def test_ranges_that_are_none(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="links_range must be two relative speeds with 1 between"):
        replace(H100, links_range=bad)
    file = tmp_path / "ours.json"
    file.write_text(json.dumps({"base": "h100", "links_range": bad}))
    with pytest.raises(ValueError, match="links_range"):
        find_hardware(str(file))


def test_ranges_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    file.write_text('{"base": "h100", "kernels_range": "all"}')
    with pytest.raises(ValueError, match="kernels_range has to be a list of two numbers"):
        find_hardware(str(file))
    file.write_text('{"base": "h100", "links_range": [0.5, 1]}')
    assert find_hardware(str(file)).links_range == (0.5, 1.0)
