"""The benchmarks run, count what they say they count, and write complete results.

Nothing here asserts a time.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import (
    choosing,
    copies,
    estimate,
    exchange,
    faults,
    floors,
    links,
    machine,
    performance,
    phases,
    policies,
    published,
    report,
    suite,
    uneven,
)
from benchmarks.ledger import Ledger
from benchmarks.models import LMConfig, StackConfig
from benchmarks.published_runs import Run
from benchmarks.ranks import run_ranks
from benchmarks.steps import DisagreementError, check_agreement
from benchmarks.variants import BASELINE, BEST_BASELINE, OURS, VARIANTS
from fsdp2.transports.host import sums
from fsdp2.transports.host.exchange import EXCHANGE_MAX_RANKS
from fsdp2.transports.host.sums import MEASURED_WHOLE_BYTES

MB = 1 << 20
TINY = suite.Settings(
    rounds=2,
    iters=1,
    lm=LMConfig(vocab=64, width=16, hidden=32, num_blocks=2, num_heads=2),
    stack=StackConfig(width=16, hidden=32, num_blocks=2, num_heads=2),
    batch_size=1,
    tokens=4,
    small_tokens=4,
)
# Gathered in forward and, blocks only, again in backward; reduced once; 4 bytes each.
TINY_BLOCK_NUMEL = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16
TINY_ROOT_NUMEL = 2 * 64 * 16 + 16


SHORT = ("hooks", "memory", "copies")  # times, bytes alive, bytes copied
FEW = ("plain", BASELINE, OURS)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((SHORT, FEW), id="some"),
        pytest.param((tuple(suite.MEASURES), VARIANTS), id="all", marks=pytest.mark.long),
    ],
)
def records(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The records of measures at a tiny size, after a trip through their files."""
    folder = tmp_path_factory.mktemp("results")
    measures, variants = request.param
    for name in measures:
        report.write_record(suite.run(name, replace(TINY, variants=variants)), folder)
    return {record["name"]: record for record in report.read_records(folder)}


def test_every_measure_writes_a_complete_record(records: dict[str, dict[str, Any]]) -> None:
    assert list(records) in (list(SHORT), list(suite.MEASURES))
    for name, record in records.items():
        assert {"date", "commit", "uncommitted_changes", "wall_to_cpu_time", "runs"} <= set(record)
        assert record["versions"]["torch"] == torch.__version__
        assert {"cpu", "cores", "memory_bytes", "load_average_before"} <= set(record["machine"])
        assert record["config"]["settings"]["lm"]["num_blocks"] == 2
        fewer = {"hooks": suite.HOOK_VARIANTS, "lm-2d": suite.TENSOR_PARALLEL_VARIANTS}
        compared = set(fewer.get(name, VARIANTS)) & set(record["config"]["settings"]["variants"])
        assert record["num_ranks"] == (4 if name == "lm-2d" else 2)
        for run in record["runs"].values():
            assert set(run) == compared
        for figure in record["figures"]:
            assert {BASELINE, OURS} <= set(figure["values"])
    targets = [f["target"] for r in records.values() for f in r["figures"] if f["target"]]
    if len(records) == len(suite.MEASURES):
        assert targets == [0.70, 0.70, 0.85, 0.25, 0.60, 0.05]


def test_timed_records_keep_every_round(records: dict[str, dict[str, Any]]) -> None:
    for name in records.keys() - {"memory", "copies"}:
        for run in records[name]["runs"].values():
            for result in run.values():
                assert [len(steps) for steps in result["rounds_s"]] == [1, 1]


def test_copies_of_torch_fsdp2_are_what_its_algorithm_needs(
    records: dict[str, dict[str, Any]],
) -> None:
    run = records["copies"]["runs"]["fp32"]
    gathered = 2 * 2 * TINY_BLOCK_NUMEL + TINY_ROOT_NUMEL
    reduced = 2 * TINY_BLOCK_NUMEL + TINY_ROOT_NUMEL
    # A rank copies in its half, copies out all, and lays out all gradients once.
    expected = 4 * (gathered // 2 + gathered + reduced)
    assert expected <= run[BASELINE]["above_plain_bytes"] < 1.01 * expected
    assert run["plain"]["above_plain_bytes"] == 0


def test_memory_peak_holds_at_least_the_gathered_root(
    records: dict[str, dict[str, Any]],
) -> None:
    run = records["memory"]["runs"]["fp32"]
    state = 4 * (2 * TINY_BLOCK_NUMEL + TINY_ROOT_NUMEL) // 2
    for name in run.keys() - {"plain", "DDP", BEST_BASELINE}:
        assert run[name]["parameter_bytes"] == run[name]["gradient_bytes"] == state
        assert run[name]["peak_bytes"] >= 4 * TINY_ROOT_NUMEL
        assert sum(alive["bytes"] for alive in run[name]["alive_at_peak"]) > 0


def test_table_has_a_row_for_every_figure(records: dict[str, dict[str, Any]]) -> None:
    table = report.table(list(records.values()))
    for record in records.values():
        for figure in record["figures"]:
            assert f"| {figure['title']}, {figure['unit']} |" in table


def test_target_is_met_only_up_to_its_number() -> None:
    values = dict.fromkeys(VARIANTS, 10.0)
    for ours, verdict in ((7.0, "0.70, met"), (7.1, "0.70, not met")):
        figure = suite.counted_figure("x", "MB", values | {OURS: ours}, 1.0, target=0.7)
        assert report.figure_row(figure).endswith(f"| {verdict} |")


def test_ratios_are_taken_within_a_round() -> None:
    rounds = {BASELINE: [1.0, 2.0, 4.0], OURS: [0.5, 1.0, 1.0]}
    figure = suite.timed_figure("x", "ms", rounds, 1e3)
    assert figure["ratios"][OURS] == 0.5
    assert figure["ratio_ranges"][OURS] == [0.25, 0.5]
    assert figure["values"][OURS] == 1000.0


def test_times_that_drown_in_noise_meet_no_target() -> None:
    rounds = {BASELINE: [1.0, 2.0], OURS: [0.1, -0.1]}
    figure = suite.timed_figure("x", "us", rounds, 1e6, target=0.25)
    assert report.figure_row(figure).endswith("| 0.25, too noisy to tell |")


def test_readme_table_replaces_the_old_one(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    with pytest.raises(report.ReadmeError, match="does not exist"):
        report.write_readme(readme, "new")
    readme.write_text("before\n")
    with pytest.raises(report.ReadmeError, match="lacks"):
        report.write_readme(readme, "new")
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_readme(readme, "new")
    assert readme.read_text() == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"


def test_disagreeing_variants_are_an_error() -> None:
    plain = {"losses": [2.0], "gradient_norms": [1.0]}
    check_agreement({"plain": plain, OURS: plain}, bf16=False)
    for wrong in ({"losses": [2.1]}, {"gradient_norms": [float("nan")]}):
        with pytest.raises(DisagreementError, match=f"{OURS}: {next(iter(wrong))}"):
            check_agreement({"plain": plain, OURS: plain | wrong}, bf16=False)


def test_ledger_counts_what_is_alive() -> None:
    with Ledger() as ledger:
        a = torch.ones(MB // 4)
        b = a + a
        assert ledger.live_bytes[-1] == 2 * MB
        b.untyped_storage().resize_(0)
        ledger.sample("freed")
        assert ledger.live_bytes[-1] == MB
        b.untyped_storage().resize_(MB)
        ledger.sample("allocated")
        assert ledger.live_bytes[-1] == 2 * MB
        b.view(2, -1)  # a view is no memory
        assert ledger.live_bytes[-1] == 2 * MB
        part = a.untyped_storage()[: MB // 2]  # nor is a storage that is a slice of another
        torch.empty(0).set_(part, 0, (MB // 8,), (1,)).add_(1)
        assert ledger.live_bytes[-1] == 2 * MB
        box = [b]
        del b
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        with ledger.paused():
            a.mul(2)
        ledger.sample("freed by another thread")
        assert ledger.live_bytes[-1] == MB
    assert max(ledger.live_bytes) == 2 * MB


def test_ledger_finds_the_memory_of_a_slice() -> None:
    with Ledger() as ledger:
        whole = torch.zeros(MB // 4)
        made = ledger.now
        half = torch.empty(0).set_(whole.untyped_storage()[: MB // 2], 0, (MB // 8,), (1,))
        own = torch.ones(4)
    assert ledger.histories[ledger.history_of(half)].range_at(made) == (0, 0)  # cut later
    assert ledger.memory_of(half) == ledger.memory_of(whole) == ledger.history_of(whole)
    assert ledger.memory_of(own) == ledger.history_of(own) != ledger.memory_of(whole)


def test_ledger_agrees_with_the_allocator() -> None:
    class MallInfo(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in (
                *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
                *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
            )
        ]

    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("needs mallinfo2 of glibc 2.33")
    library.mallinfo2.restype = MallInfo

    def used_bytes() -> int:
        info = library.mallinfo2()
        return info.uordblks + info.hblkhd

    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    x = torch.randn(512, 1024)
    model(x).sum().backward()  # whatever is made once
    gc.collect()  # what earlier tests left is not freed while this one counts
    with Ledger() as ledger:
        model(x)  # makes the parameters and the input known
        ledger.sample("start")
        before, start = used_bytes(), ledger.live_bytes[-1]
        y = model(x)
        assert used_bytes() - before == pytest.approx(ledger.live_bytes[-1] - start, abs=MB // 4)
        y.sum().backward()
        model.zero_grad()
        del y
        ledger.sample("end")
        # Gradients were there before the start, unknown to the ledger; they are gone now.
        gradients = sum(p.nbytes for p in model.parameters())
        grown = ledger.live_bytes[-1] - start - gradients
        assert used_bytes() - before == pytest.approx(grown, abs=MB // 4)


def test_copies_are_counted_once_and_by_place() -> None:
    a, b = torch.ones(100), torch.ones(100)
    out = torch.empty(2, 100)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        with record_function("outer (unit 3)"):
            torch.cat([a, b])  # 800 bytes
            a.to(torch.bfloat16)  # 200 bytes written
        torch.ops.aten._chunk_cat.out([a, b], 0, 2, out=out)  # 800, however it is done inside
        torch.ops.aten._foreach_copy_([a], [b])  # 400
        a.add(b).view(10, 10)  # no copy
        with record_function(copies.EXCHANGE):
            a.copy_(b)  # 400
        with record_function(copies.WAIT):
            a[:50].clone()  # 200
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    counted = copies.count_copies(profiler.profiler.kineto_results.experimental_event_tree())
    assert counted["outside_bytes"] == 800 + 200 + 800 + 400
    assert counted["exchange_bytes"] == 400
    assert counted["transport_bytes"] == 200
    assert counted["largest_bytes"] == 800
    inside = {(e["operator"], e["inside"]): e["bytes"] for e in counted["outside"]}
    assert inside["aten::cat", "outer"] == 800


def test_the_floor_of_a_step_sends_the_bytes_of_the_step() -> None:
    arguments = {"bf16": False, "config": TINY.lm, "rounds": 1, "iters": 1}
    found = run_ranks(floors.measure_lm, 2, arguments)
    assert found["messages"]["sent_bytes"] == found[OURS]["sent_bytes"] > 0
    assert all(found[name]["rounds_s"] for name in ("plain", "messages", OURS))


def test_the_page_has_the_tables_of_the_records() -> None:
    rows = performance.rows_of(report.read_records(performance.RESULTS))  # each has its limit
    figures = json.loads((performance.RESULTS / "floors.json").read_text())["figures"]
    of_rows = {figure["title"] for figure in figures} & {row["title"] for row in rows}
    assert len(of_rows) >= 5
    table = performance.table(rows, {figure["title"]: figure for figure in figures})
    assert table in performance.PAGE.read_text()
    assert performance.beside_torch(rows) in performance.README.read_text()


def test_a_figure_without_a_limit_is_an_error() -> None:
    with pytest.raises(KeyError, match="says nothing about 'new'"):
        performance.limit_of("new")


def test_results_are_json_without_special_numbers(records: dict[str, dict[str, Any]]) -> None:
    for record in records.values():
        json.dumps(record, allow_nan=False)


def test_a_policy_pays_from_the_fastest_link_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast, slow = [1.0, 1.0, 1.0], [8.0, 8.0, 8.0]
    slower = {"slower": [9.0, 9.0, 9.0]}
    runs = {
        policies.FULL: {"seconds": {"fast": fast, "slow": slow, **slower}},
        "int8": {
            "seconds": {"fast": [1.5, 0.9, 1.2], "slow": [4.0, 2.0, 7.0], "slower": [3.0] * 3}
        },
    }
    for made in runs.values():
        made |= {"told": 10**6, "counted": 1.1e6, "loss": 2.0}
    assert policies.begins_to_pay(runs, "int8", ["fast", "slow", "slower"]) == "slow"
    assert policies.begins_to_pay(runs, "int8", ["fast"]) == "none of these"
    *_, last = policies.table({"fp32": runs}, ["fast", "slow"]).splitlines()
    assert last == (
        "| fp32 | int8 | 1.00 | 1.10 | 1200, 1.20 (0.90 to 1.50) | 4000, 0.50 (0.25 to 0.88) "
        "| slow | 2.000 |"
    )
    monkeypatch.setattr(policies, "PAGE_SPEEDS", ("slow", "not measured"))
    assert policies.page_table({"fp32 compute": runs}).splitlines() == [
        "| computes in, policy | MB sent | slow | pays up to |",
        "| --- | --- | --- | --- |",
        "| fp32, no policy | 1.00 | 8000 | - |",
        "| fp32, int8 | 1.00 | 4000, 0.50 | slow |",
    ]


def test_strategies_on_links_are_compared_within_rounds() -> None:
    runs = {
        links.TORCH: {"seconds": {"fast": [2.0, 2.0, 9.0]}, "peak": None},
        links.BASE: {"seconds": {"fast": [1.0, 2.0, 3.0]}, "peak": 5 * 10**7},
    }
    for made in runs.values():
        made |= {"sent": 10**7, "loss": 2.0}
    first, second = links.table(runs, ["fast"]).splitlines()[2:]
    assert first == "| torch FSDP2 | 10.00 | - | 2000, 2.00 (1.00 to 3.00) | 2.000 |"
    assert second == "| full | 10.00 | 50.0 | 2000 | 2.000 |"
    brief, _ = links.table(runs, ["fast"], brief=True).splitlines()[2:]
    assert brief == "| torch FSDP2 | 10.00 | - | 2000, 2.00 |"


def test_the_page_has_a_column_for_each_example() -> None:
    def made(*rounds: float) -> dict[str, Any]:
        return {"rounds_s": [[r] for r in rounds], "peak": 2 * 10**6, "sent": 10**6}

    results = {
        "a": {"DDP": made(1, 2, 3), "full": made(2, 2, 9)},
        "b": {"DDP": made(1), "bf16": made(0.5)},
    }
    assert choosing.page_table(results).splitlines()[2:] == [
        "| DDP | 1.00, 2, 1 | 1.00, 2, 1 |",
        "| full | 2.00, 2, 1 |  |",
        "| bf16 |  | 0.50, 2, 1 |",
    ]


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("choosing", "choosing"),
        ("links", "choosing"),
        ("policies", "communication"),
        ("faults", "faults"),
    ],
)
def test_pages_have_the_tables_of_the_results_that_are_kept(name: str, page: str) -> None:
    record = json.loads((machine.REPOSITORY / f"benchmarks/results/{name}.json").read_text())
    made = {
        "choosing": lambda: choosing.page_table(record["results"]),
        "links": lambda: links.table(record["results"], list(links.SPEEDS), brief=True),
        "policies": lambda: policies.page_table(record["results"]),
        "faults": lambda: "\n".join(faults.page_table(record)),
    }
    assert made[name]() in (machine.REPOSITORY / f"docs/{page}.md").read_text()


def test_exchanges_are_used_as_far_as_the_measurement_that_is_kept_says() -> None:
    record = json.loads((machine.REPOSITORY / "benchmarks/results/exchange.json").read_text())
    assert exchange.limit_of(record["results"]) == EXCHANGE_MAX_RANKS
    assert (
        exchange.table(record["results"])
        in (machine.REPOSITORY / "benchmarks/README.md").read_text()
    )


def test_all_reduces_are_one_exchange_as_far_as_the_measurement_that_is_kept_says() -> None:
    record = json.loads((machine.REPOSITORY / "benchmarks/results/phases.json").read_text())
    one_host, hosts = (phases.limits_of(record["results"])[place] for place in phases.PLACES)
    assert {True: one_host, False: hosts} == MEASURED_WHOLE_BYTES
    page = (machine.REPOSITORY / "benchmarks/README.md").read_text()
    assert phases.table(record["results"]) in page


def test_one_exchange_is_used_up_to_where_it_gains_most() -> None:
    def rows(*ratios: float) -> dict[str, Any]:
        return {str(2**i): [[ratio], [1.0], [1.0]] for i, ratio in enumerate(ratios)}

    found = {"4": rows(0.5, 1.1, 0.5, 1.2), "8": rows(1.2, 1.1), "16": rows(0.9, 0.9)}
    assert phases.limits_of({"hosts": found}) == {"hosts": {4: 4, 8: 0, 16: 2}}


def test_the_limit_of_one_exchange_by_ranks() -> None:
    measured = {True: {4: 400, 8: 100}, False: {4: 40}}
    with mock.patch.object(sums, "MEASURED_WHOLE_BYTES", measured):
        found = [sums.whole_bytes(n, one_host=True) for n in (3, 4, 5, 8, 16, 32)]
        assert found == [400, 400, 100, 100, 50, 25]
        assert sums.whole_bytes(5, one_host=False) == 32


def test_the_limit_of_exchanges_is_where_one_of_both_ways_begins_to_lose() -> None:
    def rounds(reads: float, messages: float) -> dict[str, Any]:
        """Times over gloo's of one row; another row is won by far."""
        return {
            "65536 all-gather": [[reads, reads], [messages, messages], [1.0, 1.0]],
            "65536 all-reduce": [[0.5, 0.5], [0.5, 0.5], [1.0, 1.0]],
        }

    assert exchange.limit_of({"2": rounds(1.9, 1.9), "4": rounds(0.1, 2.1)}) == 2
    assert exchange.limit_of({"2": rounds(2.1, 0.1), "4": rounds(0.1, 0.1)}) == 1
    assert exchange.limit_of({"2": rounds(0.1, 0.1), "16": rounds(0.1, 0.1)}) == 16
    without_reads = {"2": {"1 x": [[1.0], [2.0]]}, "4": {"1 x": [[3.0], [2.0]]}}
    assert exchange.limit_of(without_reads) == 2


def test_a_strategy_on_links_has_its_peak() -> None:
    assert links._peak(links.TORCH, links.VARIANTS[links.TORCH]) is None
    full, grad = (links._peak(name, links.VARIANTS[name]) for name in ("full", "grad"))
    assert full is not None
    assert grad is not None
    assert 10**7 < full < grad


def test_hosts_of_different_speeds_are_planned_as_measured(tmp_path: Path) -> None:
    examined = {
        "flops": {"0": 4e10, "1": 2.01e10},
        "links": [{"bytes_per_s": 3e9}, {"bytes_per_s": 2e9}],
    }
    made = uneven.hardware_of(examined)
    assert made["speeds"] == [1.0, 0.5]
    assert made["network_bandwidth"] == 2e9
    file = tmp_path / "hardware.json"
    file.write_text(json.dumps(made))
    planned = uneven._plan(file)
    assert planned["split"]["sizes"] == [16, 8]
    assert planned["step_s"] / planned["split"]["even_s"] == pytest.approx(2 / 3, rel=0.05)


def test_batches_by_speed_are_compared_within_rounds() -> None:
    runs = {
        uneven.EVEN: {"sizes": [12, 12], "gradient_error": 0.0, "seconds": [2.0, 4.0, 8.0]},
        uneven.BY_SPEED: {"sizes": [16, 8], "gradient_error": 2e-7, "seconds": [1.5, 2.4, 4.0]},
    }
    told = uneven.table({"results": runs, "hardware": {"speeds": [1.0, 0.5]}, "predicted": 0.66})
    first, second, _, last = told.splitlines()[2:]
    assert first == "| equal batches | 12 + 12 | 4000 | 0e+00 |"
    assert second == "| batches by speed | 16 + 8 | 2400, 0.60 (0.50 to 0.75) | 2e-07 |"
    assert last.endswith("speed shortens the step by 40 %; the plan predicted 34 %.")


def _published(
    hardware: str,
    what: str,
    measured: float,
    found: float,
    efficiency: float | None = None,
    needed_bytes: int = 90,
    **row: Any,
) -> Any:
    run = asdict(Run("m", hardware, 8, 1, "none"))
    row = {"what": what, "published": measured, "calibrated": False, "source": "s", **row}
    row["run"] = run
    return {
        "needed_bytes": needed_bytes,
        "memory_bytes": 100,
        "row": row,
        "predicted": found,
        "error": found / measured - 1,
        "efficiency": found / 100 if efficiency is None else efficiency,
    }


def test_published_rows_are_summed_up_without_those_that_were_fitted() -> None:
    speed = "TFLOPS/GPU"
    rows = [
        _published("a100-x", speed, 10, 15, calibrated=True),
        _published("a100-x", speed, 20, 22),
        _published("a100-y", speed, 40, 30),
        _published("h100", "GiB", 80, 72),
    ]
    told = published.summary(rows)
    left = "without the calibrated ones: median error"
    assert f"A100, speed, 2 rows {left} 17.5 %, 90th percentile 25.0 %." in told
    assert f"H100, memory, 1 row {left} 10.0 %, 90th percentile 10.0 %." in told
    assert "efficiency of 3 runs, calibrated rows included: 1.00." in told
    assert "3 of 3 are in the right order" in told
    rows[2] = _published("a100-y", speed, 40, 14)
    assert "1 of 3 are in the right order" in published.summary(rows)
    rows[2]["row"]["source"] = "another program"
    assert "1 of 1 are in the right order" in published.summary(rows)
    # Of seconds, less is more.
    rows = [
        _published("a100-x", "s/step", 2, 1, efficiency=0.8),
        _published("a100-x", "s/step", 4, 3, efficiency=0.5),
        _published("a100-x", speed, 30, 30, efficiency=0.3),
    ]
    assert "efficiency of 3 runs, calibrated rows included: 1.00." in published.summary(rows)
    assert "All 3 runs fit: the fullest GPU of one needs 90 % of its memory." in told
    rows.append(_published("h100", "GiB", 80, 72, needed_bytes=104))
    rows.append(_published("h100", "ms/block", 8, 9, needed_bytes=200))
    refused = "Of 2 runs, these would be refused: m, 8 GPUs, 1 sequence each (104 % of its memory)."
    assert refused in published.summary(rows)
    assert published.rank_correlation([(1, 1), (2, 3), (2, 2), (4, 4)]) == pytest.approx(0.9486833)


def test_published_errors_are_told_by_source_and_figure_without_calibrated_rows() -> None:
    speed, paper = "TFLOPS/GPU", {"source": "Megatron"}
    rows = [
        _published("a100-x", speed, 10, 15, calibrated=True, where="table 1", **paper),
        _published("a100-x", speed, 20, 22, where="table 1", **paper),
        _published("a100-y", speed, 40, 30, where="table 2", **paper),
        _published("h100", "GiB", 80, 72, where="section 3", **paper),
    ]
    first, second = published.digest(rows).splitlines()[2:]
    assert "(https://arxiv.org/abs/2205.05198), tables 1 and 2 |" in first
    assert first.endswith("| TFLOPS/GPU | 3 | 1 | 17.5 % | -25.0 % |")
    assert second.endswith("section 3 | GiB | 1 | 0 | 10.0 % | -10.0 % |")


def test_published_rows_name_where_their_figures_are() -> None:
    for each in published.ROWS:
        assert each.source in published.SOURCES
        assert re.fullmatch(r"(table|section) [\d.]+", each.where)


def test_estimates_are_told_by_figure_with_the_case_of_the_largest_error() -> None:
    same = dict.fromkeys([*estimate.COLUMNS, "all_gather", "reduce_scatter", "all_reduce"], 1000)
    less = same | {"backward": 970}
    cases = [
        {"name": "one", "measured": same, "predicted": same},
        {"name": "other", "measured": same, "predicted": less},
    ]
    lines = estimate.digest(cases).splitlines()
    assert "| peak in backward | 2 | 1 | -3.00 % | other |" in lines
    assert "| gradients | 2 | 2 | 0.00 % | - |" in lines


@pytest.mark.parametrize(
    ("name", "page", "told"),
    [
        ("published", "accuracy", lambda record: published.text_of(published.results_of(record))),
        ("estimate", "accuracy", lambda record: estimate.digest(record["results"])),
        ("uneven", "hardware", uneven.text_of),
    ],
)
def test_pages_on_planning_have_what_records_say(name: str, page: str, told: Any) -> None:
    record = json.loads((machine.REPOSITORY / f"benchmarks/results/{name}.json").read_text())
    text = (machine.REPOSITORY / f"docs/planning/{page}.md").read_text()
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    assert text[text.index(begin) + len(begin) : text.index(end)].strip() == told(record).strip()
