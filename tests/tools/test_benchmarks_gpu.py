"""The benchmark for one GPU runs in small on the CPU, and its timelines are those of the traces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_session, timeline
from benchmarks.models import Block, StackConfig
from benchmarks.steps import DisagreementError
from benchmarks.variants import BASELINE, BEST_BASELINE, OURS

TINY = replace(
    gpu.SMALL,
    model=StackConfig(width=64, hidden=128, num_blocks=2, num_heads=4, num_kv_heads=2),
    tokens=8,
    world_sizes=(4,),
    loads=(0.5, 2.0),
    rounds=2,
    iters=1,
)
BLOCK_NUMEL = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64


@pytest.fixture(
    scope="module",
    params=[pytest.param(sizes, marks=pytest.mark.long) for sizes in ((4,), (4, 16))],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def small(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """The record of a tiny run, after a trip through JSON, and the folder of its pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    record = gpu.run(replace(TINY, world_sizes=request.param), folder)
    return json.loads(json.dumps(record, allow_nan=False)), folder


def test_a_run_leaves_a_complete_record(small: tuple[dict[str, Any], Path]) -> None:
    record, _ = small
    worlds = record["worlds"]
    assert record["name"] == "gpu-small"
    assert record["gpu"] is None
    assert record["versions"]["torch"] == torch.__version__
    assert worlds.keys() in ({"4"}, {"4", "16"})
    for world in worlds.values():
        assert set(world["variants"]) == set(gpu.NAMES)
        assert set(world["loads"]) == {"0.5", "2.0"}
        for seen in world["loads"].values():
            for run in seen["runs"].values():
                assert [len(steps) for steps in run["rounds_s"]] == [1, 1]
                assert [len(steps) for steps in run["host_rounds_s"]] == [1, 1]
    lines = gpu.table(record).splitlines()
    assert len(lines) == 2 + len(record["figures"]) == 2 + len(worlds) * (1 + 2 * 3)


def test_a_rank_holds_its_share_and_sends_what_a_real_one_would(
    small: tuple[dict[str, Any], Path],
) -> None:
    for world_size, world in small[0]["worlds"].items():
        n = int(world_size)
        ours, plain = world["variants"][OURS], world["variants"]["plain"]
        assert plain["parameter_bytes"] == 2 * 2 * BLOCK_NUMEL
        assert ours["parameter_bytes"] == 4 * 2 * BLOCK_NUMEL // n
        # Gathered in bf16 in forward and, but for the last block, in backward; reduced in fp32.
        whole = 2 * 3 * BLOCK_NUMEL + 4 * 2 * BLOCK_NUMEL
        assert ours["wire_bytes"] == pytest.approx(whole * (n - 1) / n, rel=0.01)
        assert plain["wire_bytes"] == 0


def test_the_bandwidth_makes_communication_take_the_load(
    small: tuple[dict[str, Any], Path],
) -> None:
    for world in small[0]["worlds"].values():
        half, twice = (world["loads"][load]["bandwidth"] for load in ("0.5", "2.0"))
        assert half == pytest.approx(4 * twice)


def test_a_picture_of_every_load(small: tuple[dict[str, Any], Path]) -> None:
    pytest.importorskip("matplotlib")
    names = sorted(path.name for path in small[1].glob("*.png"))
    assert names == sorted(
        f"gpu-small-{n}-ranks-load-{load}.png" for n in small[0]["worlds"] for load in ("0.5", "2")
    )
    for path in small[1].glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_variants_that_disagree_are_an_error() -> None:
    plain = {"loss": 1.0, "gradient_norm": 2.0}
    gpu.check_agreement({"plain": plain, OURS: {"loss": 1.001, "gradient_norm": 2.001}})
    for wrong in ({"loss": 1.1}, {"gradient_norm": float("nan")}):
        with pytest.raises(DisagreementError, match=f"{OURS}: {next(iter(wrong))}"):
            gpu.check_agreement({"plain": plain, OURS: plain | wrong})


@pytest.mark.parametrize(
    ("ours", "verdicts"), [(1.02, [True, True]), (1.03, [False, True]), (1.3, [False, False])]
)
def test_targets_are_judged_by_ratios_within_rounds(ours: float, verdicts: list[bool]) -> None:
    seconds = {"plain": 1.0, BASELINE: 1.2, BEST_BASELINE: 1.1, OURS: ours}
    runs = {
        name: {"rounds_s": [[s], [10 * s]], "host_rounds_s": [[s], [s]]}
        for name, s in seconds.items()
    }
    step, exposed, _ = gpu.timed_figures(runs, hides=True)
    assert list(step["targets"].values()) == verdicts
    assert exposed["values"][BASELINE] == pytest.approx(1e3 * (0.2 + 2.0) / 2)
    assert gpu.timed_figures(runs, hides=False)[0]["targets"] == {}


def test_the_memory_target_is_one_unit_below_torch() -> None:
    settings = replace(TINY, device="cuda")
    unit_bytes = 2 * BLOCK_NUMEL
    for ours, met in ((1e6 - unit_bytes, True), (1e6 - unit_bytes + 1, False)):
        peaks = {"plain": 0.0, BASELINE: 1e6, BEST_BASELINE: 2e6, OURS: ours}
        worlds = {"8": {"variants": {n: {"peak_bytes": p} for n, p in peaks.items()}, "loads": {}}}
        (figure,) = gpu.figures(worlds, settings)
        assert list(figure["targets"].values()) == [met]
    for variant in worlds["8"]["variants"].values():
        variant["reserved_bytes"] = 3e6
    _, reserved = gpu.figures(worlds, settings)
    assert set(reserved["values"].values()) == {3.0}
    assert "reserves" in reserved["title"]
    assert len(gpu.table({"figures": [figure, reserved]}).splitlines()) == 4


def test_as_many_blocks_as_fit_beside_each_other() -> None:
    # A block of 100 elements: 1,000 bytes in the plain model, 3 x 100 as shards of 8; 500 + 2,400
    # bytes once.
    assert gpu.blocks_in(2900 + 5 * 1300, [1500, 2500], 100, 8) == 5
    assert gpu.blocks_in(2900 + 5 * 1300 - 1, [1500, 2500], 100, 8) == 4


def test_a_block_with_fewer_key_heads_is_that_with_repeated_ones() -> None:
    torch.manual_seed(0)
    few, many = Block(16, 32, 4, 2), Block(16, 32, 4)
    state = few.state_dict()
    for name in ("wk.weight", "wv.weight"):
        heads = state[name].view(2, 4, 16)
        state[name] = heads.repeat_interleave(2, dim=0).reshape(16, 16)
    many.load_state_dict(state)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(few(x), many(x))


# ----------------------------------------------------------------------------- timelines


def kernel(stream: int, begin_us: float, end_us: float, cat: str = "kernel") -> dict[str, Any]:
    return {"cat": cat, "name": "k", "tid": stream, "ts": begin_us, "dur": end_us - begin_us}


def test_a_cuda_trace_becomes_lanes_by_stream() -> None:
    gather = kernel(20, 100, 300, "gpu_user_annotation") | {"name": "simulated::all_gather"}
    other = kernel(7, 0, 900, "gpu_user_annotation") | {"name": "ProfilerStep"}
    allocation = {"name": "[memory]", "ts": 150.0}
    events = [
        *(kernel(7, 200, 400), kernel(7, 350, 500), kernel(7, 600, 900)),
        *(kernel(20, 100, 250), kernel(20, 250, 300), gather, other),  # the spin, the copy
        kernel(20, 50, 60, "gpu_memcpy"),
        {"ph": "M", "name": "process_name"},
        allocation | {"args": {"Device Type": 1, "Total Allocated": 500}},
        allocation | {"ts": 250.0, "args": {"Device Type": 1, "Total Allocated": 800}},
        allocation | {"args": {"Device Type": 0, "Total Allocated": 7}},
    ]
    seen = timeline.from_cuda_trace(events)

    def in_us(lane: str) -> list[tuple[int, int]]:
        return [(round(begin * 1e6), round(end * 1e6)) for begin, end in seen.lanes[lane]]

    assert in_us(timeline.COMPUTE) == [(150, 450), (550, 850)]
    assert in_us("all_gather") == [(50, 250)]
    assert in_us(timeline.OTHER) == [(0, 10)]
    assert [num_bytes for _, num_bytes in seen.memory] == [0, 300]


def test_intervals_are_joined_and_intersected() -> None:
    one, other = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)], [(2.5, 5.5), (9.0, 10.0)]
    assert timeline.joined(one) == [(0.0, 3.0), (5.0, 6.0)]
    assert timeline.busy_s(one) == 4.0
    assert timeline.overlap_s(one, other) == pytest.approx(1.0)
    assert timeline.overlap_s(one, []) == 0.0


# ------------------------------------------------------------------------------- sessions

REPOSITORY = gpu_session.machine.REPOSITORY


def test_a_session_writes_down_each_step_when_it_ends(tmp_path: Path) -> None:
    """One that fails, one that takes too long, and one that no time is left for."""
    report = tmp_path / "gpu-session-A.json"
    copies = f"import shutil; shutil.copy({str(report)!r}, {str(tmp_path / 'copy.json')!r})"
    sleeps = "import time; print('began', flush=True); time.sleep(60)"
    todo = [
        gpu_session.Step("first", ("-c", "print('one line')"), 60, ("none.json",)),
        gpu_session.Step("second", ("-c", f"{copies}; raise SystemExit(3)"), 60, ("copy.json",)),
        gpu_session.Step("third", ("-c", sleeps), 3),
        gpu_session.Step("fourth", ("-c", ""), 60, needs="first"),
    ]
    returned = gpu_session.run(todo, "A", tmp_path, 600)
    assert json.loads(report.read_text()) == json.loads(json.dumps(returned))
    first, second, third, fourth = returned["steps"]
    assert (first["outcome"], first["last_lines"][1:]) == ("done", ["one line"])
    assert (first["results"], second["results"]) == ([], ["copy.json"])
    assert second["outcome"] == "failed with status 3"
    assert len(json.loads((tmp_path / "copy.json").read_text())["steps"]) == 1
    assert third["outcome"] == "ended after 3 s, its limit"
    assert third["last_lines"][1:] == ["began"]
    assert fourth["outcome"] == "not run: no test of 'first' has passed"
    (late,) = gpu_session.run(todo[:1], "A", tmp_path, gpu_session.LEAST_S / 2)["steps"]
    assert late == {"name": "first", "outcome": "not run: no time was left"}


SUITE = """
import ctypes, os
from pathlib import Path

import pytest

def test_passes():
    pass

def test_fails():
    assert Path("a") == Path("b")

def test_hangs_where_no_signal_is_heard():
    ctypes.PyDLL(None).sleep(1)  # with the lock of the interpreter
    ctypes.CDLL(None).pause()

def test_ends_the_process():
    os._exit(0)

@pytest.mark.skip("not here")
def test_is_left_out():
    pass

def test_comes_last():
    pass
"""
CONFTEST = """
import os, run_log

def pytest_configure(config):
    config.pluginmanager.register(run_log.RunLog(os.environ[run_log.VARIABLE]))
"""


def test_tests_go_on_after_one_that_hangs_and_one_that_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_session, "TEST_LIMIT_S", 3)
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    step = gpu_session.pytest("tests", (), 100, str(suite))
    # Without the harness, whose import takes longer than this.
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    step = replace(step, arguments=(*step.arguments, "-c", str(tmp_path / "pytest.ini")))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests" / "support"))
    (found,) = gpu_session.run([step], "A", tmp_path, 100)["steps"]
    log = (tmp_path / "gpu-session-A.log").read_text()
    names = {line.partition("::")[2]: line.partition(":")[0] for line in found["not_passed"]}
    assert found["tests"] == {"passed": 2, "failed": 1, "no end": 2, "skipped": 1}, log
    assert names == {
        "test_fails": "failed",
        "test_hangs_where_no_signal_is_heard": "no end",
        "test_ends_the_process": "no end",
    }
    assert found["outcome"] == "tests failed"
    # The text of a failure is there before the next test begins.
    failure, hang = log.index("PosixPath('a')"), log.index("::test_hangs")
    assert failure < hang
    assert "not here" in log


def test_the_parts_of_a_session_are_there() -> None:
    """Files and options that they name; what comes back; what must run runs within the time."""
    tests_named: dict[str, set[str]] = {}
    for parts in (gpu_session.PARTS, gpu_session.SMALL_PARTS):
        for part, make in parts.items():
            steps = make(Path("results"))
            for step in steps:
                named = {name for name in step.arguments if name.startswith("tests/")}
                assert all((REPOSITORY / name).exists() for name in named)
                assert bool(named) == step.tests
                tests_named.setdefault(part, set()).update(named)
                assert step.needs is None or step.needs in [other.name for other in steps]
                if "benchmarks.gpu" in step.arguments:
                    gpu.parse(list(step.arguments[2:]))
            assert 2 + sum(len(step.results) for step in steps) <= 8
            sure = [step for step in steps if step.limit_s < gpu_session.BUDGET_S]
            assert sum(step.limit_s for step in sure) <= gpu_session.BUDGET_S
    for name in ("test_one_rank_group", "test_cuda", "test_cuda_graphs"):
        assert f"tests/core/{name}.py" in tests_named["A"]


@pytest.mark.parametrize("part", gpu_session.PARTS)
def test_a_part_in_small(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, as on a GPU: into `$OUT`, of a commit that is told."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv(gpu_session.machine.COMMIT, "")  # is restored after the test
    code = gpu_session.main(["--small", "--part", part, "--commit", "abc123"])
    assert code == 0, capsys.readouterr().out
    report = json.loads((tmp_path / f"gpu-session-{part}.json").read_text())
    assert report["commit"] == "abc123"
    assert {step["outcome"] for step in report["steps"]} == {"done"}
    written = {path.name for path in tmp_path.iterdir()}
    steps = gpu_session.SMALL_PARTS[part](tmp_path)
    results = {name for step in steps for name in step.results}
    assert written == results | {f"gpu-session-{part}.json", f"gpu-session-{part}.log"}
    if part == "B":
        assert json.loads((tmp_path / "gpu-small.json").read_text())["commit"] == "abc123"


@pytest.mark.parametrize("has_torch", [True, False])
def test_make_takes_a_python_that_has_torch_before_it_installs_any(
    has_torch: bool, tmp_path: Path
) -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    shutil.copytree(REPOSITORY / "requirements", tmp_path / "requirements")
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\nexit {int(not has_torch)}\n")
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:{os.defpath}"}
    # (Without the environment of a `make` that runs the tests.)
    done = subprocess.run(
        ["make", "-n", "gpu", "PART=B"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    if has_torch:
        assert lines == ["python3 -m benchmarks.gpu_session --part B "]
    else:
        assert any("environment.py" in line for line in lines) or done.returncode
