"""`tools/prose.py`: it finds what it is there to find, and nothing in good English."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import ours_only
from tools import prose

pytestmark = ours_only("about the pages of this package")


def found(tmp_path: Path, text: str, name: str = "page.md") -> list[str]:
    page = tmp_path / name
    page.write_text(text)
    return [f"{each.line}: {each.text}" for each in prose.check(page)]


LONG = " ".join(["word"] * 31)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"\n{LONG[:80]}\n{LONG[80:]}.\n", "2: a sentence of 31 words"),
        (f"- short.\n- {LONG[:80]}\n  {LONG[80:]}.\n", "2: a sentence of 31 words"),
        ("The time beside torch's.\n", '1: "beside"'),
        ("| a |\n|---|\n| it goes on |\n", '3: "goes on"'),
        ("The size is that of the unit.\n", '1: "that of"'),
        ("A training stops.\n", '1: "A training"'),
        ("x " * 51 + ".\n", "1: a line of 103 columns"),
    ],
)
def test_faults_are_found(tmp_path: Path, text: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in found(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG[:74]}.\n{LONG[75:]}.\n",
        "```\nbeside that of what goes on\n```\n",
        "Call `beside()` of [a page](beside/that of.md).\n",
        f"<!-- t:begin -->\n{LONG}.\n<!-- t:end -->\n",
        "A training run of two hours.\n",
        "[" + "x" * 120 + "](y)\n",
    ],
)
def test_nothing_is_found_in_good_pages(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text) == []


def test_pages_for_users_have_more_limits(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "docs" / "developers").mkdir(parents=True)
    wide = "| a | b | c | d | e | f | g |\n"
    cell = f"| {' '.join(['word'] * 26)} |\n"
    text = f"{wide}{cell}See `tests/core/test_a.py`.\n" + "\n" * 350
    for_users = found(tmp_path, text, "docs/page.md")
    assert [line.partition(": ")[2] for line in for_users] == [
        "a table of 7 columns",
        "a cell of 26 words",
        "a page for users names a file of tests",
        "more than 350 lines",
    ]
    assert found(tmp_path, text, "docs/developers/page.md") == []


def test_words_in_all_have_a_limit(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/a.md"):
        (tmp_path / name).write_text("one two - | three\n")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "ALL_WORDS", 6)
    assert prose.main([]) == 0
    monkeypatch.setattr(prose, "ALL_WORDS", 5)
    assert prose.main([]) == 1
    assert "1 words too many" in capsys.readouterr().out
