"""`plan`: slowest ranks, collectives that take multiprocessors, hosts that launch too slowly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not plan", allow_module_level=True)

from by_keywords import plan
from fsdp2.planning import find_hardware
from fsdp2.planning.simulation.costs import stragglers_s
from models import LinearBlocks

H100 = find_hardware("h100")
QUIET: dict[str, Any] = {"multiprocessors": 0, "launch_s": 0, "call_host_s": 0, "jitter": 0}


def planned(num_ranks: int = 64, rows: int = 8192, **changes: Any) -> Any:
    with torch.device("meta"):
        model, batch = LinearBlocks(2048), torch.empty(rows, 2048)
    hardware = replace(H100, **{**QUIET, **changes})
    return plan(model, batch, hardware, num_ranks, activation_checkpointing=("none",))


def test_the_slowest_of_more_ranks_is_slower() -> None:
    times = [stragglers_s(4.0, n, H100) for n in (1, 2, 8, 512, 16384)]
    assert times[0] == 0
    assert times == sorted(times)
    assert times[1] == pytest.approx(0.05 * 2 * 0.564, rel=0.1)  # of two: 1 / sqrt(pi)
    assert times[3] == pytest.approx(0.05 * 2 * 3.04, rel=0.02)
    # Over a short step a rank is slow throughout; over a long one that evens out.
    assert stragglers_s(0.01, 512, H100) == pytest.approx(0.05 * 0.01 * 3.04, rel=0.02)
    assert stragglers_s(16.0, 512, H100) == pytest.approx(2 * times[3])


def test_the_wait_for_the_slowest_is_not_hidden_communication() -> None:
    quiet, made = planned().step, planned(jitter=0.05).step
    assert quiet.stragglers_s == 0
    assert made.stragglers_s > 0.05 * made.compute_s
    assert made.seconds == pytest.approx(quiet.seconds + made.stragglers_s)
    assert made.exposed_s == pytest.approx(quiet.exposed_s + made.stragglers_s)
    assert "for the slowest rank" in str(planned(jitter=0.05))
    alone = planned(1, jitter=0.05).step
    assert alone.stragglers_s == alone.exposed_s == 0


def test_collectives_take_multiprocessors_from_kernels() -> None:
    quiet, made = planned().step, planned(multiprocessors=132).step
    beside = min(sum(s for name, s in made.stream_s.items() if name != "compute"), made.compute_s)
    assert 0 < made.contention_s <= beside * 16 / 132 * (1 + 1e-9)
    assert made.compute_s == pytest.approx(quiet.compute_s + made.contention_s)
    assert planned(1, multiprocessors=132).step.contention_s == 0


def test_small_batches_wait_for_the_host() -> None:
    slow = {"launch_s": 100e-6, "call_host_s": 200e-6}
    made = planned(rows=64, **slow)
    assert made.step.host_s > made.step.compute_s
    assert made.step.seconds >= made.step.host_s
    assert "limited by the host" in str(made)
    # With enough to do for the GPU the host is ahead of it, whatever the launches take.
    large, quiet = planned(rows=2**18, **slow).step, planned(rows=2**18).step
    assert large.host_s > 0
    assert large.seconds == pytest.approx(quiet.seconds, rel=0.01)


def test_what_ranks_do_at_random_does_not_change_the_order() -> None:
    def order(**changes: Any) -> list[str]:
        return [str(o.candidate) for o in planned(**changes).outcomes]

    assert order(jitter=0.05) == order(jitter=0.05)
    assert order()[0] == order(jitter=0.05)[0]


def test_none_of_it_on_the_cpu() -> None:
    cpu = find_hardware("cpu")
    assert all(getattr(cpu, name) == 0 for name in QUIET)


@pytest.mark.long
def test_published_times_are_predicted() -> None:
    from benchmarks.published import ROWS, predict

    rows = [row for row in ROWS if row.what != "GiB"]
    assert len(rows) == 40
    for row in rows:
        within = 0.01 if row.calibrated else 0.14 if "Megatron" in row.source else 0.05
        assert predict(row) == pytest.approx(row.published, rel=within), row.run
