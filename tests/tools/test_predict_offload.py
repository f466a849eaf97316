"""`max_saved_bytes`: predictions of training inside `offload_activations`."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

import testdev
from by_keywords import estimate, plan, predict, sweep, trace_step
from fsdp2 import fully_shard, offload_activations
from fsdp2.planning import Prediction, find_hardware
from fsdp2.planning.replay.device import Copy
from fsdp2.planning.trace.events import HostCopy, StepTrace
from harness import cached_mesh, run_on

WIDTH, ROWS = 128, 192
SAVED = WIDTH * ROWS * 4  # bytes of one activation: above what always stays
LIMITS = 0, 5 * SAVED, 12 * SAVED, 40 * SAVED, 1 << 30
H100 = find_hardware("h100")


class Block(nn.Module):
    """Saves inputs twice, views, halves of one tensor, a mask and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        hidden = (gate.sigmoid() * value).masked_fill(value > 2, 0.0)
        return x + self.down(hidden)


class Model(nn.Module):
    """Blocks, the last of which runs twice; the second under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate((*self.blocks, self.blocks[-1])):
            x = checkpoint(block, x, use_reentrant=False) if i == 1 else block(x)
        return self.head(x).tanh()


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


@functools.cache
def traced(limit: int | None, **options: Any) -> StepTrace:
    names = [f"blocks.{i}" for i in range(4)]
    batch = torch.empty(ROWS, WIDTH, device="meta")
    return trace_step(
        Model(), batch, names, loss_fn=loss_of, max_saved_bytes=limit, **options
    )  # fmt: skip


def copied(trace: StepTrace, kind: str) -> list[int]:
    return [e.nbytes for e in trace.events if isinstance(e, HostCopy) and e.kind == kind]


def _runs() -> None:
    """What a trace counts is what a run has counted, byte for byte."""
    for limit in LIMITS:
        model = Model().to(testdev.NAME)
        for block in model.blocks:
            fully_shard(block, mesh=cached_mesh(1))
        fully_shard(model, mesh=cached_mesh(1))
        offload = offload_activations(model, max_device_bytes=limit)
        with offload:
            loss = loss_of(model(torch.randn(ROWS, WIDTH, device="cpu").to(testdev.NAME)))
        loss.backward()
        made, found = traced(limit), offload.bytes
        assert sum(copied(made, "to host")) == found.to_host, limit
        assert sum(copied(made, "to device")) == found.to_device, limit
        assert made.host_bytes == found.host_peak, limit
        assert (found.to_host > 0) == (limit < 1 << 30)


@pytest.mark.skipif(testdev.why_not() is not None, reason=str(testdev.why_not()))
def test_the_copies_of_a_trace_are_those_of_a_run() -> None:
    run_on(1, _runs, device=testdev.NAME)


def test_what_is_away_has_no_memory_and_a_limit_that_is_never_reached_changes_nothing() -> None:
    without = traced(None)
    peaks = [traced(limit).activation_peak for limit in LIMITS]
    # To bring a tensor back takes its memory, while what is next waits beside it.
    assert all(less <= more + SAVED for less, more in itertools.pairwise(peaks))
    assert peaks[0] < 0.5 * without.activation_peak
    assert peaks[-1] == without.activation_peak
    # Beside the limit come what operators make at the moment, and what is on its way.
    for limit, peak in zip(LIMITS, peaks, strict=True):
        assert peak <= limit + 20 * SAVED
    on_cpu = traced(0, device_type="cpu")
    assert not copied(on_cpu, "to host")


# -- estimate, predict, plan ---------------------------------------------------------------------


_predicted: dict[str, Prediction] = {}  # several tests look at the same ones


def predicted(limit: int | None, hardware: Any = H100, **options: Any) -> Prediction:
    key = repr((limit, hardware, options))
    if key not in _predicted:
        batch = torch.empty(ROWS, WIDTH, device="meta")
        _predicted[key] = predict(
            Model(), batch, hardware, 8, loss_fn=loss_of, max_saved_bytes=limit, **options
        )
    return _predicted[key]


def test_compute_waits_for_copies_that_take_longer() -> None:
    usual, enough = predicted(None), predicted(1 << 30)
    assert (enough.seconds, enough.peak_bytes) == (usual.seconds, usual.peak_bytes)
    fast = replace(H100, host_bandwidth=1e18, kernel_s=1e-12, launch_s=0.0, call_host_s=0.0)
    slow = replace(H100, host_bandwidth=1e8)
    # Copies that take no time: nothing but the memory changes.
    assert predicted(0, fast).seconds == pytest.approx(predicted(None, fast).seconds, rel=1e-5)
    assert predicted(0, fast).peak_bytes < predicted(None, fast).peak_bytes
    late = predicted(0, slow)
    moved = sum(sum(copied(traced(0), kind)) for kind in ("to host", "to device"))
    assert late.seconds > 0.9 * moved / 1e8  # one after the other, on one stream
    assert late.bound == "copies"
    assert "limited by copies of activations" in str(late)
    assert "Max saved bytes" in str(late)
    # With room for copies under way, backward begins with what is there.
    assert predicted(40 * SAVED, slow).seconds < late.seconds


def test_copies_wait_for_what_they_copy_and_compute_for_what_it_reads() -> None:
    launches = predicted(0).step.launches
    copies = [launch for launch in launches if isinstance(launch.work, Copy)]
    assert {copy.stream for copy in copies} == {"copies"}
    waited_for = {n for launch in launches if launch.stream == "compute" for n in launch.after}
    assert copies
    assert waited_for >= {copy.number for copy in copies}
    for copy in copies:
        before = [x.number for x in launches[: copy.number] if x.stream == "compute"]
        assert set(before[-1:]) <= {*copy.after}  # the first one copies an input


def test_every_micro_batch_is_offloaded() -> None:
    slow = replace(H100, host_bandwidth=1e8)
    one, three = predicted(0, slow), predicted(0, slow, micro_batches=3)
    assert three.seconds == pytest.approx(3 * one.seconds, rel=0.05)
    assert three.peak_bytes < predicted(None, slow, micro_batches=3).peak_bytes


def test_estimates_say_what_is_in_host_memory() -> None:
    batch = torch.empty(ROWS, WIDTH, device="meta")
    made = estimate(Model(), 8, batch, loss_fn=loss_of, max_saved_bytes=0)
    assert made.ranks[0].host["activations"] == traced(0).host_bytes
    assert "activations on the host" in str(made)
    whole = estimate(Model(), 8, batch, loss_fn=loss_of)
    assert "activations" not in whole.ranks[0].host
    assert made.ranks[0].peak.total < whole.ranks[0].peak.total


def test_sweeps_plans_and_pictures_know_it(tmp_path: Path) -> None:
    batch = torch.empty(ROWS, WIDTH, device="meta")
    made = sweep(Model(), batch, "h100", [2, 8], loss_fn=loss_of, max_saved_bytes=0)
    assert [p.peak_bytes for p in made.predictions][1] == predicted(0).peak_bytes
    chosen = plan(Model(), batch, "h100", 8, loss_fn=loss_of, checkpoint="none", max_saved_bytes=0)
    freely = plan(Model(), batch, "h100", 8, loss_fn=loss_of, checkpoint="none")
    assert chosen.chosen.peak_bytes < freely.chosen.peak_bytes
    pytest.importorskip("matplotlib")
    predicted(0).picture(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 0


def test_limits_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="max_saved_bytes must not be negative"):
        traced(-1)
    with pytest.raises(TypeError, match="max_saved_bytes must be an int"):
        traced(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fake=False"):
        traced(0, fake=False)
