"""Predictions of optimizer state elsewhere, of units that stay on the device, of uneven rows."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

import testdev
from benchmarks.estimate import Case, measure
from benchmarks.estimate import predict as predict_case
from by_keywords import estimate, make_setup, plan, predict, predict_planned, sweep, trace_step
from fsdp2 import CPUOffloadPolicy, explain, offload_optimizer, shard_model
from fsdp2.planning import StateOffload, find_hardware
from fsdp2.planning.replay.replay import params_on_host, placed_optimizer
from fsdp2.planning.replay.setups import granularities
from fsdp2.planning.simulation.simulate import optimizer_s
from fsdp2.planning.trace.optimizers import OptimizerCost, PagedPart, PagedState, PlacedOptimizer
from fsdp2.wrap import units_of
from harness import cached_mesh, run_on

H100 = find_hardware("h100")
HOST = CPUOffloadPolicy(pin_memory=False)
SMALL: dict[str, Any] = {"min_bytes": 512, "chunk_bytes": 20_000}
NEEDS_DEVICE = pytest.mark.skipif(testdev.why_not() is not None, reason=str(testdev.why_not()))


class Widths(nn.Module):
    """Blocks of 37 x 37, one of which is much larger, and one is frozen: without gradients."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [37, 37, 999, 37, 37]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(37, n), nn.Linear(n, 37)) for n in sizes
        )
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(37, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


BATCH = torch.empty(4, 37, device="meta")


def setup_of(num_ranks: int, *, rank: int = 0, device_type: str = "cuda", **options: Any) -> Any:
    model = Widths()
    rows = granularities(model, options.pop("shard_granularity", None))
    made = make_setup(
        units_of(model, "blocks.*"),
        num_ranks,
        device_type=device_type,
        granularity=rows,
        **options,
    )
    made = replace(made, rank=rank)
    names = [name for unit in made.units for name in unit.modules]
    return trace_step(model, BATCH, names, device_type=device_type), made


# -- which units stay ----------------------------------------------------------------------------


def _stay(limits: list[int]) -> list[list[str]]:
    found = []
    for limit in limits:
        model = shard_model(
            Widths(),
            cached_mesh(dist.get_world_size()),
            wrap="blocks.*",
            offload_policy=HOST,
            max_device_bytes=limit,
        )
        found.append([unit.name for unit in explain(model).units if unit.offload])
    return found


def test_the_units_that_stay_are_those_of_the_library() -> None:
    # Bytes of a small block on one of three ranks: two matrices of 13 rows, and two vectors.
    small = 2 * 4 * (2 * 13 * 37 + 2 * 13)
    limits = [0, small - 1, small, 2 * small, 3 * small, 10 * small, 1 << 30]
    real = run_on(3, _stay, limits)[0]
    assert len({tuple(names) for names in real}) > 4
    for limit, names in zip(limits, real, strict=True):
        trace, setup = setup_of(3, offload_policy=HOST, max_device_bytes=limit)
        away = params_on_host(trace, setup)
        units = {unit.name: unit.params for unit in setup.units}
        assert {name for name, params in units.items() if away.intersection(params)} == set(names)


def test_bytes_are_where_the_units_are() -> None:
    options: dict[str, Any] = {"wrap": "blocks.*"}
    whole = estimate(Widths(), 3, BATCH, **options).ranks[0]
    away = estimate(Widths(), 3, BATCH, offload_policy=HOST, **options).ranks[0]
    for limit in (0, 20_000, 1 << 30):
        made = estimate(
            Widths(), 3, BATCH, offload_policy=HOST, max_device_bytes=limit, **options
        ).ranks[0]
        assert made.parameters == whole.parameters
        assert made.optimizer == whole.optimizer
        on_host = {name: made.host.get(name, 0) for name in ("parameters", "optimizer state")}
        assert made.step.parts.get("parameters", 0) == whole.parameters - on_host["parameters"]
        if limit == 0:
            assert made == away
        elif limit == 20_000:
            assert 0 < on_host["parameters"] < whole.parameters
            assert 0 < on_host["optimizer state"] < whole.optimizer
        else:
            assert on_host == {"parameters": 0, "optimizer state": 0}
            assert made.peak.total == whole.peak.total
    with pytest.raises(ValueError, match="max_device_bytes limits what CPUOffloadPolicy leaves"):
        estimate(Widths(), 3, BATCH, max_device_bytes=0)


# -- state that is elsewhere ---------------------------------------------------------------------


def _counts(cases: list[dict[str, Any]], device: str) -> list[tuple[int, int, int]]:
    found = []
    for case in cases:
        policy = {"offload_policy": HOST} if case["host"] else {}
        model = shard_model(
            Widths().to(device), cached_mesh(dist.get_world_size()), wrap="blocks.*", **policy
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=0.01, foreach=False)
        with tempfile.TemporaryDirectory() as folder:
            to = folder if case["files"] else "cpu"
            offload_optimizer(optimizer, to, max_device_bytes=case["stays"], **SMALL)
            for _ in range(3):
                model(torch.randn(4, 37, device="cpu").to(device)).sum().backward()
                counts = vars(optimizer).get("_fsdp2_pager")
                if counts is not None:
                    counts.counts.back_peak = 0
                optimizer.step()
                optimizer.zero_grad()
            counts = vars(optimizer)["_fsdp2_pager"].counts
            found.append((counts.kept, counts.away, counts.back_peak))
    return found


CASES = [
    {"files": files, "host": host, "stays": stays}
    for files in (False, True)
    for host in (False, True)
    for stays in (0, 11_000, 60_000, 1 << 30)
]


def check_counts(device: str, cases: list[dict[str, Any]]) -> None:
    real = run_on(3, _counts, cases, device, device=device)[0]
    for case, (kept, away, back_peak) in zip(cases, real, strict=True):
        offload = StateOffload(
            "files" if case["files"] else "cpu", max_device_bytes=case["stays"], **SMALL
        )
        trace, setup = setup_of(
            3,
            device_type="cpu" if device == "cpu" else "cuda",
            offload_optimizer=offload,
            **({"offload_policy": HOST} if case["host"] else {}),
        )
        made = placed_optimizer(trace, setup, "adamw")
        assert made.paged is not None
        assert (made.paged.away, made.paged.back_peak) == (away, back_peak), case
        # `kept` counts what is aligned, and not what is too small to be anywhere else.
        whole = sum(2 * p.numel() * 4 for p in Widths().parameters() if p.requires_grad) / 3
        assert kept + away == pytest.approx(whole, rel=0.2)
        stays = sum(made.paged.kept) + sum(made.paged.host_kept)
        assert stays == pytest.approx(kept, abs=8_000)


@NEEDS_DEVICE
def test_what_is_away_and_what_a_step_brings_back_are_those_of_a_run() -> None:
    check_counts(testdev.NAME, CASES)


def test_the_same_on_the_cpu_where_only_files_are_elsewhere() -> None:
    check_counts("cpu", [case for case in CASES if not case["host"]])


def test_state_is_counted_where_it_is() -> None:
    options: dict[str, Any] = {"wrap": "blocks.*"}
    whole = estimate(Widths(), 3, BATCH, **options).ranks[0]
    none = estimate(
        Widths(), 3, BATCH, offload_optimizer=StateOffload(max_device_bytes=1 << 40), **options
    ).ranks[0]
    assert (none.optimizer, none.host) == (whole.optimizer, whole.host)
    offload = StateOffload(min_bytes=512, chunk_bytes=20_000)
    host = estimate(Widths(), 3, BATCH, offload_optimizer=offload, **options).ranks[0]
    away = host.host["optimizer state"]
    assert host.forward.parts["optimizer state"] == host.optimizer - away
    assert host.forward.total < whole.forward.total
    trace, setup = setup_of(3, offload_optimizer=offload)
    paged = placed_optimizer(trace, setup, "adamw").paged
    assert paged is not None
    assert away == paged.away
    back = max(
        sum(p.image for p in paged.parts[max(i - 1, 0) : i + 2]) + part.moment
        for i, part in enumerate(paged.parts)
    )
    others = ("parameters", "gradients", "inputs", "activations")
    rest = sum(host.step.parts[name] for name in others)
    assert host.step.total == rest + sum(paged.kept) + back
    files = estimate(
        Widths(), 3, BATCH, offload_optimizer=replace(offload, to="files"), **options
    ).ranks[0]
    assert files.host["optimizer state in files"] == away
    assert files.host["buffers of files"] == paged_in_files(offload).buffer_peak
    assert files.optimizer == host.optimizer
    assert files.step.total == host.step.total


def paged_in_files(offload: StateOffload) -> PagedState:
    trace, setup = setup_of(3, offload_optimizer=replace(offload, to="files"))
    paged = placed_optimizer(trace, setup, "adamw").paged
    assert paged is not None
    return paged


def test_a_step_takes_its_copies_where_they_are_longer() -> None:
    gigabyte = 10**9
    parts = tuple(PagedPart(gigabyte, gigabyte, gigabyte, 3 * gigabyte, 0) for _ in range(8))
    cost = OptimizerCost(8 * gigabyte, 0, 24 * gigabyte)
    step_s = 24 * gigabyte / (H100.memory_bandwidth * H100.memory_efficiency)
    assert optimizer_s(PlacedOptimizer(cost), H100) == pytest.approx(step_s)
    paged = PlacedOptimizer(cost, paged=PagedState((), (), parts))
    # Each part there and back on one stream, which hides all steps.
    assert optimizer_s(paged, H100) == pytest.approx(16 * gigabyte / H100.host_bandwidth)
    fast = replace(H100, host_bandwidth=1e18)
    assert optimizer_s(paged, fast) == pytest.approx(step_s, rel=1e-6)
    assert optimizer_s(paged, fast, 0.5) == pytest.approx(2 * step_s, rel=1e-6)
    files = PlacedOptimizer(cost, paged=PagedState((), (), parts, in_files=True))
    with pytest.raises(ValueError, match="does not say how fast its disk is"):
        optimizer_s(files, H100)
    disk = replace(fast, disk_read_bandwidth=4e9, disk_write_bandwidth=2e9)
    # Writes take the longest; before the first come two reads (the host waits) and a step.
    first = 2 / 4 + step_s / 8
    assert optimizer_s(files, disk) == pytest.approx(first + 8 / 2, rel=1e-3)
    both = PlacedOptimizer(cost, OptimizerCost(0, 0, 5 * gigabyte))
    assert optimizer_s(both, H100) == pytest.approx(step_s + 5 * gigabyte / H100.host_bandwidth)


# -- uneven rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows", [pytest.param(1, marks=pytest.mark.long), 64, pytest.param(96, marks=pytest.mark.long)]
)
def test_shards_of_blocks_of_rows_need_and_send_what_was_estimated(rows: int) -> None:
    case = Case("transformer", (3,), granularity=rows)
    predicted = predict_case(case)
    measured = run_on(3, _measure, asdict(case))[0]
    for key, value in measured.items():
        assert predicted[key] == pytest.approx(value, rel=0.02), key
    if rows > 1:
        assert predicted["state"] > predict_case(replace(case, granularity=1))["state"]


def _measure(case: dict[str, Any]) -> dict[str, int]:
    return measure(case)


def test_the_rows_of_each_rank_and_padding() -> None:
    model, batch = nn.Linear(8, 100, bias=False), torch.empty(2, 8, device="meta")
    made = estimate(model, 4, batch, shard_granularity=32, optimizer="momentum")
    rows = {rank.rank: rank.optimizer // (8 * 4) for rank in made.ranks}
    assert rows == {0: 32, 3: 4}
    by_param = estimate(model, 4, batch, shard_granularity=lambda p: 64 if p.ndim > 1 else 1)
    assert by_param.ranks[0].optimizer // (8 * 4) >= 2 * 64
    assert by_param.ranks[-1].optimizer < 64
    told = predict(model, batch, H100, 4, shard_granularity=64)
    assert told.padding is not None
    assert told.padding.factor == pytest.approx(64 / 25)
    with pytest.raises(ValueError, match="shard_granularity"):
        estimate(model, 4, batch, shard_granularity=0)


# -- predict, sweep, plan, the command line ------------------------------------------------------


def test_predictions_and_plans_know_them() -> None:
    options: dict[str, Any] = {
        "wrap": "blocks.*",
        "offload_policy": CPUOffloadPolicy(),
        "max_device_bytes": 10_000,
        "shard_granularity": 16,
    }
    made = predict(Widths(), BATCH, "h100", 2, **options)
    assert made.step.host_bytes["parameters"] > 0
    assert "Host memory" in str(made)
    assert "Max device bytes" in str(made)
    assert made.to_dict()["max_device_bytes"] == 10_000
    same = sweep(Widths(), BATCH, "h100", [2, 8], **options).predictions[0]
    assert same.seconds == made.seconds
    del options["wrap"]
    chosen = plan(Widths(), BATCH, "h100", 2, checkpoint="none", **options)
    assert chosen.sharding.max_device_bytes == 10_000
    assert chosen.sharding.shard_granularity == 16
    assert predict_planned(chosen).seconds == chosen.step.seconds
    state = predict(Widths(), BATCH, "h100", 2, offload_optimizer=StateOffload(min_bytes=0))
    plain = predict(Widths(), BATCH, "h100", 2)
    assert state.seconds > plain.seconds
    assert state.step.host_bytes["optimizer state"] > 0
    assert "Offload optimizer" in str(state)
    with pytest.raises(TypeError, match="offload_optimizer must be a StateOffload"):
        predict(Widths(), BATCH, "h100", 2, offload_optimizer="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="to must be 'cpu' or 'files'"):
        StateOffload("disk")
    with pytest.raises(ValueError, match="chunk_bytes must not be negative"):
        StateOffload(chunk_bytes=-1)
