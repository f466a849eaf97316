"""The benchmarks of scale: their arithmetic, their synthesised ranks beside real ones, and limits
to how the counts of saves and loads grow with the number of ranks.

Nothing here asserts a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about this package", allow_module_level=True)

from benchmarks.scale import checkpoint, synthesis
from benchmarks.scale import dcp as scale_dcp
from benchmarks.scale.__main__ import MODULES, curves_of, measure
from benchmarks.scale.counting import counting, isolated
from benchmarks.scale.curves import Counted, Curve, extrapolated, last_slope, slope, table
from harness import cpu_only, distributed

RANKS, TENSORS = (4, 16), 6

# LIMITS TO SLOPES, from 4 to 16 ranks and 6 tensors, of counts that are the same in every run. They
# are a little above what was measured when they were set. Whoever makes a count grow more slowly
# lowers its limit.
LIMITS = {
    ("save", "bytes written"): 0.1,
    ("save", "files opened"): 0.0,
    ("save", "names listed"): 0.0,
    ("waiting", "bytes read"): 0.0,
    ("waiting", "files opened"): 0.0,
    ("commit", "bytes read"): 1.1,
    ("commit", "bytes written"): 0.3,
    ("commit", "files opened"): 1.0,
    ("commit", "bytes beside data files"): 1.1,
    ("load", "bytes read besides data"): 0.05,
    ("load", "files opened"): 0.0,
    ("load", "names listed"): 0.0,
}


# -- arithmetic ---------------------------------------------------------------------------------


def made(count: Callable[[int], float]) -> Curve:
    return Curve("made up", {n: {"bytes": count(n)} for n in (64, 16, 256, 1024)})


@pytest.mark.parametrize(("power", "factor"), [(0, 7.0), (1, 3.0), (2, 0.5), (-1, 10.0)])
def test_the_slope_is_the_power_of_the_number_of_ranks(power: int, factor: float) -> None:
    curve = made(lambda n: factor * n**power)
    assert slope(curve, "bytes") == pytest.approx(power)
    assert last_slope(curve, "bytes") == pytest.approx(power)
    assert extrapolated(curve, "bytes", 16384) == pytest.approx(factor * 16384.0**power)


def test_the_last_slope_leaves_out_what_is_constant() -> None:
    curve = made(lambda n: 1000 + n)
    assert slope(curve, "bytes") < last_slope(curve, "bytes") < 1
    # From 1,256 and 2,024 bytes.
    assert last_slope(curve, "bytes") == pytest.approx(0.3441, abs=1e-4)
    assert extrapolated(curve, "bytes", 4096) == pytest.approx(2024 * 2024 / 1256)


def test_what_is_never_counted_has_slope_0_and_one_point_none() -> None:
    assert slope(made(lambda _: 0), "bytes") == 0
    assert slope(made(lambda n: n if n > 16 else 0), "bytes") == pytest.approx(1)
    for points in ({64: {"bytes": 1.0}}, {64: {"bytes": 1.0}, 256: {"bytes": 0.0}}):
        with pytest.raises(ValueError, match="only 1 of the points"):
            slope(Curve("short", points), "bytes")


def test_the_table_has_a_row_for_each_count() -> None:
    curve = Curve("made up", {n: {"bytes": 2.0 * n, "calls": 0.0} for n in (64, 128)})
    curve.points[128]["cpu s"] = 0.1234
    assert table(curve, far=(100, 1_000_000)).splitlines() == [
        "| made up | 64 | 128 | slope | last slope | 1,000,000, by arithmetic |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| bytes | 128 | 256 | 1.00 | 1.00 | 2 M |",
        "| cpu s | - | 0.123 | - | - | - |",
    ]


def test_counts_are_those_of_the_system(tmp_path: Path) -> None:
    assert isolated(count_known_calls, tmp_path) == {
        "bytes read": 1000,
        "bytes written": 3000,
        "reads": 1,
        "writes": 2,
        "files opened": 2,
        "names listed": 1,
    }


def count_known_calls(folder: Path) -> Counted:
    counted: Counted = {}
    with counting(counted):
        (folder / "file").write_bytes(bytes(1000))
        with (folder / "file").open("r+b", buffering=0) as file:
            file.read(1000)
            file.write(bytes(2000))
        list(folder.iterdir())
    assert counted.pop("cpu s") > 0
    assert counted.pop("peak bytes") >= 0
    return counted


# -- synthesised ranks --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["shared", "per-rank"])
def test_synthesised_manifests_are_those_of_real_saves(layout: str) -> None:
    """Of the first ranks, which write the scalars and the headers, and of the last."""
    compare_manifests(8, TENSORS, layout, (0, 1, 7))


def test_so_are_those_of_ranks_that_hold_fewer_rows_or_none() -> None:
    compare_manifests(5000, synthesis.LLAMA_8B, "auto", (0, 4500))


def compare_manifests(n: int, tensors: int, layout: str, ranks: tuple[int, ...]) -> None:
    made = isolated(made_manifests, n, tensors, layout, ranks)
    for rank in ranks:
        real = isolated(real_manifest, rank, n, tensors, layout)
        # The state of random numbers is that of a process, and so is who wrote it.
        assert replace(made[rank], small_files=real.small_files, writer=real.writer) == real


def made_manifests(
    n: int, tensors: int, layout: str, ranks: tuple[int, ...]
) -> dict[int, synthesis.Manifest]:
    own = saved_by(n // 2, n, tensors, layout)
    of_all = tuple(range(n))
    plans = {rank: synthesis.plan_of(own, rank, of_all, layout) for rank in ranks}
    return {rank: synthesis.manifest_of(own, rank, plan) for rank, plan in plans.items()}


def real_manifest(rank: int, n: int, tensors: int, layout: str) -> synthesis.Manifest:
    return saved_by(rank, n, tensors, layout).manifest


def saved_by(rank: int, n: int, tensors: int, layout: str) -> synthesis.OwnSave:
    with synthesis.rank_of(n, rank), checkpoint.scratch() as folder:
        model, optimizer = synthesis.build(tensors)
        synthesis.give_state(model, optimizer)
        return synthesis.save(model, optimizer, folder, layout)


@cpu_only("counts what processes tell each other")
@distributed(2)
def test_synthesised_metadata_of_dcp_are_those_of_a_real_save() -> None:
    model, optimizer = synthesis.build(TENSORS)
    synthesis.give_state(model, optimizer)
    state = scale_dcp.state_of(model, optimizer)
    with harness.shared_folder() as name:
        folder = Path(name)
        dcp.save(state, storage_writer=FileSystemWriter(folder / "real"))
        if dist.get_rank() == 0:
            plans = scale_dcp.plans_of_all(scale_dcp.plan_of(state), 2)
            plans, metadata = scale_dcp.global_plan(plans)
            results = scale_dcp.results_of_all(plans)
            scale_dcp.write_metadata(folder / "made", metadata, results)
            real, made = (FileSystemReader(folder / k).read_metadata() for k in ("real", "made"))
            assert made.state_dict_metadata == real.state_dict_metadata
            assert made.planner_data == real.planner_data
            assert made.storage_data.keys() == real.storage_data.keys()
            sizes = [(folder / kind / ".metadata").stat().st_size for kind in ("real", "made")]
            assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
        dist.barrier()


# -- curves -------------------------------------------------------------------------------------


# Those of other modules have tests of their own.
NAMES = [name for module in MODULES if not hasattr(module, "POINTS") for name in module.CURVES]


@pytest.fixture(scope="module")
def measured() -> dict[str, Curve]:
    found = {}
    for name in NAMES:
        ((title, num, point, _),) = curves_of([name], [TENSORS], "auto")
        assert (title, num) == (f"{name}, 6 tensors", TENSORS)
        found[name] = measure(title, num, point, RANKS, 10**6)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_curve_has_its_points(measured: dict[str, Curve], name: str) -> None:
    curve = measured[name]
    assert curve.ranks == list(RANKS)
    assert curve.points[4].keys() == curve.points[16].keys()
    assert all(counts["cpu s"] > 0 for counts in curve.points.values())
    assert len(table(curve).splitlines()) > 2  # a rank that waits opens nothing


def test_points_that_are_too_large_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    curve = measure("made up", 30, lambda n: {"bytes": n}, (4, 16), 200)
    assert curve == Curve("made up", {4: {"bytes": 4}})
    assert "left out on 16 ranks: --most 480 takes it in" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "key"), LIMITS)
def test_counts_do_not_grow_faster(measured: dict[str, Curve], name: str, key: str) -> None:
    assert slope(measured[name], key) <= LIMITS[name, key] + 1e-9
