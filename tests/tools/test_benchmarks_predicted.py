"""`benchmarks.predicted`: its arithmetic, a run of one model, and the page that has its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its own benchmarks", allow_module_level=True)

from benchmarks import machine, predicted
from benchmarks.predicted import Row, ordered, summary, table


def row(model: str, made: float, measured: float) -> Row:
    return Row(model, "full", 2, made, measured, 0.05)


ROWS = [row("a", 1.0, 1.0), row("a", 1.3, 2.0), row("b", 3.0, 2.1), row("b", 0.9, 1.05)]


def test_pairs_that_differ_are_ordered_right_or_wrong() -> None:
    # Of five pairs that differ by more than a tenth, all are ordered right: 2.0 and 2.1 are alike,
    # and so are 1.0 and 1.05.
    assert ordered(ROWS, within=False) == (4, 4)
    assert ordered(ROWS, within=True) == (2, 2)
    wrong = [*ROWS, row("a", 0.5, 4.0)]
    assert ordered(wrong, within=True) == (2, 4)
    assert ordered(wrong, within=False) == (4, 8)


def test_the_summary_has_errors_of_the_measured_step() -> None:
    told = summary(ROWS)
    # 0 %, -35 %, +43 %, -14 %
    assert "2 of 4 predictions are within 15 %" in told
    assert "median error 25 %" in told
    assert "up to ± 5 %" in told
    assert "| a | full | 2 | 1300 | 2000 (± 5 %) | -35 % |" in table(ROWS)


def test_the_table_of_the_page_has_a_line_for_each_model() -> None:
    lines = predicted.by_model({"2": ROWS, "4": ROWS[:2]}).splitlines()
    assert (
        lines[0]
        == "| model | 2 ranks: within 15 % | largest error | 4 ranks: within 15 % | largest error |"
    )
    assert lines[2:] == [
        "| a | 1 of 2 | -35 % | 1 of 2 | -35 % |",
        "| b | 1 of 2 | +43 % | 0 of 0 | - |",
    ]


def test_losses_that_differ_end_the_run() -> None:
    predicted.check_losses({"full": [1.0, 2.0], "grad": [1.0, 2.0]})
    with pytest.raises(RuntimeError, match=r"grad: loss 2\.1, of 'full' 2\.0"):
        predicted.check_losses({"full": [1.0, 2.0], "grad": [1.0, 2.1]})


@pytest.mark.long
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--rounds", "1", "--models", "wide MLP", "--output", str(tmp_path)]
    assert predicted.main(arguments) == 0
    printed = capsys.readouterr().out
    run = json.loads((tmp_path / "predicted.json").read_text())["runs"]["2"]
    rows = predicted.rows_of(run["results"])
    assert len(rows) == 4 * 2
    assert all(each.predicted > 0 and each.measured > 0 for each in rows)
    assert table(rows) in printed


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (["--models", "none"], "no model none: choose from language model"),
        (["--ranks", "3"], "--ranks: an even number"),
        (["--rounds", "1", "--iters", "1"], "at least two steps"),
    ],
)
def test_wrong_options(wrong: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        predicted.main(wrong)
    assert match in capsys.readouterr().err


def test_the_page_has_what_the_record_says() -> None:
    record = json.loads((machine.REPOSITORY / "benchmarks/results/predicted.json").read_text())
    page = (machine.REPOSITORY / "docs/planning/accuracy.md").read_text()
    begin, end = page.index(predicted.BEGIN), page.index(predicted.END)
    assert page[begin + len(predicted.BEGIN) : end].strip() == predicted.text_of(record).strip()
