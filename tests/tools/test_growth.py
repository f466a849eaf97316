"""What grows with the number of ranks, and of parameters, grows no faster than it has to."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import DTensor

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about this package", allow_module_level=True)

from benchmarks.scale.curves import Curve, last_slope
from benchmarks.scale.growth import CURVES, POINTS, instructions

# The power of n with which each count may grow. Small n have constant parts, so the slopes are
# those between the last two points that are measured here.
LIMITS = {
    ("snapshot choice", "instructions to meet"): 1.05,
    ("snapshot choice", "instructions to choose"): 1.05,
    ("first forward", "requests of a rank"): 0.0,
    ("first forward", "bytes of a rank"): 0.05,
    ("first forward", "bytes of the last"): 1.05,
    ("late rank", "requests"): 0.3,  # by the logarithm
    ("sharding", "instructions"): 1.05,
    ("sharding in worlds", "instructions"): 0.05,
    ("state and norm", "state_dict instructions"): 1.05,
    ("state and norm", "clip_grad_norm_ instructions"): 1.05,
    ("watched hangs", "requests of a beat"): 0.0,
    ("watched hangs", "bytes of a beat"): 0.05,
    ("watched hangs", "requests of a rank to read all"): 0.0,
}


@pytest.mark.parametrize("name", sorted({name for name, _ in LIMITS}))
def test_slopes_stay_below_their_limits(name: str) -> None:
    counts = Curve(name, {n: CURVES[name](n) for n in POINTS[name][1:3]})
    for (curve, what), limit in LIMITS.items():
        if curve == name:
            assert last_slope(counts, what) <= limit, what


def test_a_rank_that_lost_others_reads_what_all_wrote_a_few_times() -> None:
    found = CURVES["watched hangs"](16)
    assert found["requests of a rank that lost others"] <= 50


def test_no_request_is_long() -> None:
    """A TCPStore takes time by the square of a request's length."""
    assert CURVES["first forward"](2048)["keys of the longest request"] <= 1024


def test_parameters_are_wrapped_without_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DTensor, "from_local", None)
    CURVES["sharding"](100)


def test_instructions_are_counted() -> None:
    few = instructions(lambda: sum(i for i in range(100)))
    many = instructions(lambda: sum(i for i in range(1000)))
    assert 900 <= many - few <= 9000
