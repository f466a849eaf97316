"""Every cell of the tables in docs/subclasses.md: tensor subclasses beside one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import harness
from subclass_matrix import RESUMING, TRAINING, begin, go_on, outcome, train, written
from subclass_models import ROWS

PAGE = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists()) / "docs"


def cells(columns: dict[str, Any]) -> Any:
    """All that there is to run. By default every row, and every column, now and then."""
    found = []
    for i, row in enumerate(ROWS):
        needs = ROWS[row].needs_torchao
        for j, column in enumerate(columns):
            if outcome(row, column) is None:
                continue
            # (Ranks import torchao once, in 3 seconds each: by default two of them.)
            default = column == "2 ranks" if needs else (i + j) % 3 == 0
            marks = [] if default else [pytest.mark.long]
            if needs and importlib.util.find_spec("torchao") is None:
                marks.append(pytest.mark.skip("torchao is not installed"))
            found.append(pytest.param(row, column, marks=marks))
    return pytest.mark.parametrize(("row", "column"), found)


def check(found: list[Any], expected: float | str | None) -> None:
    assert expected is not None
    if isinstance(expected, str):
        assert any(expected in text for text in found), found
        return
    for losses, rest in found:
        assert losses <= expected
        assert rest <= 100 * expected


@cells(TRAINING)
def test_training_is_that_of_one_process(row: str, column: str) -> None:
    found = harness.run_on(TRAINING[column].ranks, train, row, column)
    check(found, outcome(row, column))
    if isinstance(found[0], str):
        assert found == [found[0]] * len(found)  # no rank waits for one that has raised


@cells(RESUMING)
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, row: str, column: str) -> None:
    """On another number of ranks, as if one process had never been interrupted."""
    before, after = RESUMING[column]
    harness.run_on(before.ranks, begin, row, column, str(tmp_path))
    found = harness.run_on(after.ranks, go_on, row, column, str(tmp_path))
    check(found, outcome(row, column))


def test_the_page_has_the_table() -> None:
    text = (PAGE / "subclasses.md").read_text()
    assert written(text) == text
    shown: dict[str, list[str]] = {}
    both: tuple[dict[str, Any], ...] = (TRAINING, RESUMING)
    for line in text.splitlines():
        names, *cells = line.strip("| ").split(" | ")
        if len(cells) == 2 and set(names.split("; ")) <= ROWS.keys():
            shown |= dict.fromkeys(names.split("; "), cells)
    assert shown.keys() == ROWS.keys()
    for row, cells in shown.items():
        for columns, cell in zip(both, cells, strict=True):
            usual, *others = cell.split("; ")
            words = dict.fromkeys((column.replace(",", "") for column in columns), usual)
            for word, listed in (other.split(": ") for other in others):
                assert words.keys() >= set(listed.split(", "))
                words |= dict.fromkeys(listed.split(", "), word)
            for column, word in zip(columns, words.values(), strict=True):
                wanted = outcome(row, column)
                assert word == (
                    "does not apply"
                    if wanted is None
                    else "refused"
                    if isinstance(wanted, str)
                    else f"within {wanted:g}"
                    if wanted
                    else "equal"
                )
