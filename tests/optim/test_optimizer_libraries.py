"""Optimizers of all libraries: over plain DTensors and in our ways, none is silently wrong.

What is compared with one process, and how, is in `benchmarks/optimizer_training.py`.
"""

from __future__ import annotations

import importlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine, optimizers
from benchmarks.optimizer_cases import LIBRARIES, cases
from benchmarks.optimizer_training import WAYS, judge, train_all
from benchmarks.report import write_record
from harness import ours_only, run_on

pytestmark = ours_only("local_step, flat_step and whole_step")

PAGE = machine.REPOSITORY / "docs" / "optimizers.md"
RESULTS = machine.REPOSITORY / "benchmarks" / "results"
# With what is expected of plain DTensors, local_step, flat_step and whole_step.
SOME: dict[tuple[str, str], tuple[str, str, str, str]] = {
    ("torch.optim", "AdamW"): ("right", "right", "right", "right"),
    ("torch.optim", "SGD"): ("right", "right", "right", "right"),
    ("torch.optim", "Adafactor"): ("any", "refused", "refused", "right"),
    ("torch.optim", "LBFGS"): ("refused", "refused", "refused", "refused"),
    ("pytorch_optimizer", "AdamMini"): ("any", "refused", "refused", "right"),
    ("pytorch_optimizer", "AggMo"): ("right", "right", "right", "right"),
    ("pytorch_optimizer", "AdaShift"): ("any", "refused", "refused", "right"),
    ("pytorch_optimizer", "Lamb"): ("any", "refused", "refused", "right"),
    ("pytorch_optimizer", "Prodigy"): ("any", "refused", "refused", "refused"),
    ("schedulefree", "AdamWScheduleFree"): ("right", "right", "right", "right"),
    ("timm.optim", "Muon"): ("right", "refused", "refused", "right"),
    ("torchao.optim", "AdamW8bit"): ("warned", "refused", "refused", "right"),
    ("bitsandbytes.optim", "AdamW8bit"): ("any", "refused", "refused", "right"),
}


def installed(library: str) -> bool:
    with suppress(ImportError):  # of the package, or of what it needs
        importlib.import_module(library)
        return True
    return False


@pytest.mark.long
def test_some_are_those_of_one_process_or_refused() -> None:
    chosen = [case for case in SOME if installed(case[0])]
    found = run_on(2, train_all, chosen)[0]
    for library, name in chosen:
        for way, wanted in zip(WAYS, SOME[library, name], strict=True):
            kind, text = found[f"{library}/{name}"][way]
            assert wanted in ("any", kind), f"{name}, {way}: {kind} {text}"


@pytest.mark.long
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.timeout(1800)
def test_none_is_silently_wrong(library: str, ranks: int) -> None:
    if not installed(library):
        pytest.skip(f"{library} is not installed")
    chosen = [(library, case.name) for case in cases(library)]
    found = run_on(ranks, train_all, chosen, timeout_s=1700, restart=True)[0]
    wrong = {
        f"{key}, {way}": found[key][way]
        for key in found
        for way in WAYS
        if found[key][way][0] == "wrong"
    }
    assert not wrong


# ------------------------------------------------------------------ what was measured, and the page


def recorded() -> dict[tuple[str, str], dict[str, str]]:
    """The outcomes of each optimizer of the record, by the way to step, all numbers of ranks."""
    record = json.loads((RESULTS / "optimizers.json").read_text())
    assert list(record["libraries"]) == list(LIBRARIES)
    return {
        (f"{library} {found['version']}", name): by_way
        for library, found in record["libraries"].items()
        for name, outcomes in found["outcomes"].items()
        for by_way in [outcomes["2, 3"]]  # alike on 2 and on 3 ranks
    }


def not_trained(by_way: dict[str, str]) -> bool:
    return all(re.match("not trained: .", outcome) for outcome in by_way.values())


def test_the_table_calls_nothing_wrong() -> None:
    """What is not right says so, when it runs."""
    trained = {key: by_way for key, by_way in recorded().items() if not not_trained(by_way)}
    assert len(trained) > 200
    for optimizer, by_way in trained.items():
        assert list(by_way) == list(WAYS)
        plain, *ours = by_way.values()
        assert re.match("right$|(refused|raises|warned): .", plain), (optimizer, plain)
        for outcome in ours:
            assert re.match("right$|(refused|raises): .", outcome), (optimizer, outcome)


def test_the_page_shows_the_record_and_nothing_else() -> None:
    shown: dict[tuple[str, str], list[str]] = {}
    library = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            library = line.lstrip("# ")
        row = line.strip("| ").split(" | ")
        if len(row) == 1 + len(WAYS) and row[-1] != "optimizers" and row[0] != "---":
            for name in row[-1].split(", "):
                assert (library, name) not in shown
                shown[library, name] = row[:-1]
        elif line.startswith("Not trained: "):
            for names in re.findall(r"([\w, ]+) \([^()]+\)", line.removeprefix("Not trained: ")):
                shown |= {(library, name.strip()): ["not trained"] * 4 for name in names.split(",")}
    assert shown == {
        optimizer: [outcome.split(": ")[0] for outcome in by_way.values()]
        for optimizer, by_way in recorded().items()
    }
    assert optimizers.tables(optimizers.read(RESULTS)) in PAGE.read_text()


def test_the_page_has_advice_for_every_refusal() -> None:
    table = PAGE.read_text().partition("| the error contains |")[2].partition("\n\n")[0]
    parts = [
        part
        for line in table.splitlines()
        for part in re.findall("`(.*?)`", line[: line.find(" | ")])
    ]
    assert len(parts) > 8
    for optimizer, by_way in recorded().items():
        for outcome in by_way.values():
            if outcome.startswith("refused"):
                assert any(part in outcome for part in parts), (optimizer, outcome)


def outcome_of_all(kind: str, text: str) -> dict[str, list[str]]:
    return {way: [kind, text] for way in WAYS}


def test_what_is_measured_again_replaces_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, refused = outcome_of_all("right", ""), outcome_of_all("refused", "it b")

    def measured(**by_name: dict[str, list[str]]) -> Any:
        found = {f"timm.optim/{name}": by_way for name, by_way in by_name.items()}
        return optimizers.measured("timm.optim", list(by_name), {2: found, 3: found})

    monkeypatch.setattr(optimizers.metadata, "version", lambda package: "1.0")
    record = optimizers.merged(optimizers.read(tmp_path), "timm.optim", measured(B=right, A=right))
    record = optimizers.merged(record, "timm.optim", measured(A=refused))
    write_record(record, tmp_path)
    library = optimizers.read(tmp_path)["libraries"]["timm.optim"]
    assert library["outcomes"] == {
        "A": {"2, 3": dict.fromkeys(WAYS, "refused: it b")},
        "B": {"2, 3": dict.fromkeys(WAYS, "right")},
    }
    assert [source["optimizers"] for source in library["sources"]] == [["B", "A"], ["A"]]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{optimizers.BEGIN}\nold\n{optimizers.END}\nafter\n")
    arguments = ["--only-table", "--write", str(page), "--output", str(tmp_path)]
    assert optimizers.main(arguments) == 0
    before, text, after = re.split("<!-- .* -->\n", page.read_text())
    assert (before, after) == ("before\n", "after\n")
    assert text == f"{optimizers.tables(record)}\n"
    assert "| refused | refused | refused | refused | A |" in text
    # Rows of another version do not stay.
    monkeypatch.setattr(optimizers.metadata, "version", lambda package: "2.0")
    record = optimizers.merged(record, "timm.optim", measured(A=right))
    assert record["libraries"]["timm.optim"]["outcomes"].keys() == {"A"}


def test_verdicts() -> None:
    right, off = {"error": 1e-9}, {"error": 0.25}
    refusal: dict[str, Any] = {"raised": "TypeError: A is not elementwise: it b", "at": "fsdp2"}
    raw: dict[str, Any] = {"raised": "IndexError: c", "at": "torch"}
    waited: dict[str, Any] = {"raised": "RuntimeError: Timed out", "at": "waiting"}
    assert judge([right, right], 1e-5).kind == "right"
    assert judge([right, off], 1e-5).kind == "wrong"
    assert judge([right, {"error": float("inf")}], 1e-5).kind == "wrong"
    assert judge([{**off, "warned": ["that"]}, right], 1e-5).kind == "warned"
    assert judge([{**right, "warned": ["that"]}], 1e-5).kind == "right"
    assert judge([refusal, refusal], 1e-5).kind == "refused"
    assert judge([waited, raw], 1e-5).text == "IndexError: c (in torch)"
    found = {
        ranks: {"torch.optim/A": outcome_of_all(each.kind, each.text)}
        for ranks, each in {2: judge([refusal], 0), 3: judge([right, off], 0)}.items()
    }
    library = optimizers.measured("torch.optim", ["A"], found)
    cells = " | ".join(["2 ranks: refused; 3 ranks: **WRONG**"] * len(WAYS))
    assert f"| {cells} | A |" in optimizers.section("torch.optim", library)
    assert "A, flat_step, 3 ranks: wrong: by 2e-01" in optimizers.printed(library)
