"""Optimizers of all libraries: over plain DTensors and in our ways, none is silently wrong.

What is compared with one process, and how, is in `benchmarks/optimizer_training.py`.
"""

from __future__ import annotations

import importlib
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.optimizer_cases import LIBRARIES, cases
from benchmarks.optimizer_training import WAYS, judge, train_all
from benchmarks.optimizers import section
from harness import ours_only, run_on

pytestmark = ours_only("local_step, flat_step and whole_step")

DOCS = Path(__file__).parents[2] / "docs" / "optimizers.md"
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


def test_the_table_calls_nothing_wrong() -> None:
    """What is not right says so, when it runs."""
    lines = DOCS.read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    rows = [row for row in rows if len(row) == 1 + len(WAYS) and row[0] != "optimizer"]
    assert len(rows) > 200
    for name, plain, *ours in rows:
        assert re.match("right$|(refused|raises|warned): ", plain), (name, plain)
        for text in ours:
            assert re.match("right$|(refused|raises): ", text), (name, text)


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
    rows = {
        ranks: {"torch.optim/A": {way: [each.kind, each.text] for way in WAYS}}
        for ranks, each in {
            2: judge([refusal], 0),
            3: judge([right, off], 0),
        }.items()
    }
    text = section("torch.optim", ["A"], rows)
    assert re.search(r"\| A \| 2 ranks: refused: it b; 3 ranks: \*\*WRONG\*\* by 2e-01 \|", text)
