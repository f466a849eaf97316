"""`benchmarks.zoo`: variants train alike, and what was measured is what docs say."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from benchmarks import machine, zoo
from benchmarks.host_ranks import ratios
from benchmarks.variants import BEST_BASELINE, OURS
from benchmarks.zoo_models import ENTRIES
from harness import distributed, ours_only

pytestmark = ours_only("its own benchmarks")


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads((machine.REPOSITORY / "benchmarks/results/zoo.json").read_text())


@pytest.mark.parametrize("setting", ["accumulate 4", "checkpointing"])
@distributed(2)
def test_variants_train_alike(setting: str) -> None:
    entry, how = ENTRIES["U-Net"], zoo.SETTINGS[setting]
    names = (zoo.PLAIN, BEST_BASELINE, OURS)
    losses = [zoo.loss_of(zoo.Run(zoo.build(n, entry, how), entry, how)) for n in names]
    for loss in losses[1:]:
        assert abs(loss - losses[0]) <= 1e-5 * abs(losses[0])


def test_the_table_in_the_docs_is_that_of_the_results(record: dict[str, Any]) -> None:
    page = (machine.REPOSITORY / "docs/performance.md").read_text()
    assert zoo.describe(record) in page


def test_all_models_are_measured(record: dict[str, Any]) -> None:
    assert record["cells"].keys() == ENTRIES.keys()
    measured = {name for cells in record["cells"].values() for name in cells}
    assert measured <= zoo.SETTINGS.keys()
    assert zoo.QUICK in set.intersection(*map(set, record["cells"].values()))


# Reductions of several small units are in flight while the largest one computes, each with a buffer
# for a sum that is added to ``.grad``; torch's are over before backward goes on.
LARGER = {("U-Net", "accumulate 4, reduce each"): 1.05}


def test_no_cell_is_slower_or_larger_than_torchs(record: dict[str, Any]) -> None:
    for model, cells in record["cells"].items():
        for setting, found in cells.items():
            ours, base = found[OURS], found[BEST_BASELINE]
            time = statistics.median(ratios(ours["rounds_s"], base["rounds_s"]))
            assert time <= 0.95, (model, setting)
            most = LARGER.get((model, setting), 1.0)
            assert ours["peak_bytes"] <= most * base["peak_bytes"], (model, setting)


def test_tables_have_what_was_measured_and_its_commits() -> None:
    rounds = {"rounds_s": [1.0, 1.0], "peak_bytes": 100, "loss_error": 1e-3}
    ours = {"rounds_s": [0.5, 0.7], "peak_bytes": 90, "loss_error": 2e-5}
    found = {BEST_BASELINE: rounds, OURS: ours}
    cells = {
        "LSTM": {"2 ranks, bf16": {**found, "commit": "b" * 40}},
        "BERT": {"2 ranks": {**found, zoo.DDP: rounds, "commit": "a" * 40}},
    }
    about = {"cpu": "a CPU", "cores": 2}
    record = {"cells": cells, "machine": about, "versions": {"torch": "2.15"},
              "date": "2026-11-29T00:00", "commit": "a" * 40}  # fmt: skip
    first, main, _, ddp, _, errors = zoo.describe(record).split("\n\n")
    assert f"commit {'a' * 12}. Some cells: earlier commits." in first
    assert main.splitlines()[0] == "| model | 2 ranks | 2 ranks, bf16 |"
    assert main.splitlines()[2:] == ["| BERT | 0.60 / 0.90 | - |", "| LSTM | - | 0.60 / 0.90 |"]
    assert ddp.splitlines()[0] == "| model | 2 ranks |"
    assert ddp.splitlines()[2] == "| BERT | 1.00 / 1.00 |"
    assert errors.splitlines()[3] == "| LSTM | 0.002 % / 0.100 % |"
