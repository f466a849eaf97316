"""Checks the English of the pages, as far as a program can: ``python tools/prose.py [FILE ...]``.

Sentences are short, words are those of the field, lines and tables fit, and pages for users name no
tests. `--words` prints the size of each page. Without files: README.md, CONTRIBUTING.md,
SECURITY.md, CHANGELOG.md and docs/, which together have a limit.

A word is whatever stands between spaces and has a letter or digit; tables and code count.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SENTENCE_WORDS = 30
LINE_COLUMNS = 100
PAGE_LINES = 350
CELL_WORDS = 25
TABLE_COLUMNS = 6
# Of README.md and docs/.
ALL_WORDS = 45_000

# What is written here too often, and what engineers write.
INSTEAD = {
    r"\bbeside\b": "compared with, next to, or in addition to",
    r"\b(goes|go|went|going) on\b": "continue",
    r"\b(that|those) of\b": "the noun again, or a possessive",
    r"\bknows?\b(?! (what|which|how|that|the|whether|from|of))": "supports",
    r"\b(a|each|this|every) training\b(?! (run|step|loop|script|job|set|program))": "a run",
    r"\btrainings\b": "runs",
    r"\b(says|tells)\b": "prints, reports, or states",
    r"\bby (itself|themselves)\b": "alone, on its own, or nothing",
    r"\bof (its|their|his) own\b": "its own, separate",
    r"\bof which\b": "a second sentence",
    r"\bis to be\b": "must be, or should be",
    r"\bas well as\b": "and",
    r"\bbesides\b": "also, or except",
    r"\bin order to\b": "to",
    r"\butili[sz]e": "use",
}


class Finding(NamedTuple):
    """What is wrong in a line of a page."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


class Line(NamedTuple):
    """A line of a page, with its number, and what it is part of."""

    number: int
    text: str
    kind: str  # "prose", "heading", "table", "code" or "blank"
    generated: bool


def lines_of(page: Path) -> list[Line]:
    """The lines of a page, each with its kind."""
    found: list[Line] = []
    code = generated = False
    for number, text in enumerate(page.read_text().splitlines(), 1):
        fence = text.lstrip().startswith("```")
        if not code and text.startswith("<!--"):
            generated = (generated and ":end" not in text) or ":begin" in text
            kind = "blank"
        elif fence or code:
            code = code != fence
            kind = "code"
        elif not text.strip() or re.match(r":::|:[\w-]+:( |$)", text):  # or a directive
            kind = "blank"
        elif text.startswith("#"):
            kind = "heading"
        else:
            kind = "table" if text.lstrip().startswith("|") else "prose"
        found.append(Line(number, text, kind, generated))
    return found


def plain(text: str) -> str:
    """Prose without markup: a piece of code, or the target of a link, counts as nothing more."""
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*_]{1,3}(?=\w)|(?<=\w|[.:,])[*_]{1,3}", "", text)


def words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def paragraphs(lines: list[Line]) -> Iterator[tuple[int, str]]:
    """Line and text of each paragraph or item of a list."""
    first, text = 0, ""
    for line in lines:
        item = re.match(r"\s*([-*+]|\d+\.)\s+", line.text)
        if text and (line.kind != "prose" or item):
            yield first, text
            text = ""
        if line.kind == "prose":
            first = first if text else line.number
            text += " " + line.text[item.end() if item else 0 :].strip()
    if text:
        yield first, text


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph; what follows a colon or a semicolon is another one."""
    return re.split(r"(?<=[.!?:;])[)*_\"]*\s+(?=\S)", plain(text))


def is_long(line: str) -> bool:
    """Whether ``line`` could have been wrapped: a link may be longer than a line."""
    return len(line) > LINE_COLUMNS and " " in line.strip()[:LINE_COLUMNS]


def cells(row: str) -> list[str]:
    return [plain(cell) for cell in row.strip().strip("|").split(" | ")]


def check_prose(page: Path, lines: list[Line]) -> Iterator[Finding]:
    """Long sentences, and words that have a better one."""
    for first, text in paragraphs([line for line in lines if not line.generated]):
        for sentence in sentences(text):
            if (count := words(sentence)) > SENTENCE_WORDS:
                start = " ".join(sentence.split()[:6])
                yield Finding(page, first, f"a sentence of {count} words: {start} ...")
    for line in lines:
        if line.kind in ("code", "blank"):
            continue
        for pattern, better in INSTEAD.items():
            if match := re.search(pattern, plain(line.text), re.IGNORECASE):
                yield Finding(page, line.number, f'"{match[0]}": rather {better}')


def check_form(page: Path, lines: list[Line], for_users: bool) -> Iterator[Finding]:
    """Lines, tables and pages that are too long, and tests on pages for users."""
    for line in lines:
        if line.kind == "table":
            row = cells(line.text)
            if for_users and not line.generated:
                if len(row) > TABLE_COLUMNS:
                    yield Finding(page, line.number, f"a table of {len(row)} columns")
                for cell in row:
                    if words(cell) > CELL_WORDS:
                        yield Finding(page, line.number, f"a cell of {words(cell)} words")
        elif line.kind == "prose" and not line.generated and is_long(line.text):
            yield Finding(page, line.number, f"a line of {len(line.text)} columns")
        if for_users and line.kind != "code" and "tests/" in line.text:
            yield Finding(page, line.number, "a page for users names a file of tests")
    if for_users and len(lines) > PAGE_LINES:
        yield Finding(page, len(lines), f"more than {PAGE_LINES} lines")


def is_for_users(page: Path) -> bool:
    """Whether people who use the package read ``page``, not only those who change it."""
    inside = page.resolve().relative_to(ROOT) if page.resolve().is_relative_to(ROOT) else page
    return inside.name == "README.md" or (
        inside.parts[0] == "docs" and "developers" not in inside.parts
    )


def check(page: Path) -> list[Finding]:
    """What is wrong on a page."""
    lines = lines_of(page)
    return [*check_prose(page, lines), *check_form(page, lines, is_for_users(page))]


def counted() -> list[Path]:
    """The pages whose words have a limit."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python tools/prose.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("pages", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--words", action="store_true", help="print the number of words of each")
    options = parser.parse_args(arguments)
    others = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    pages = options.pages or [*counted(), *others]
    if options.words:
        for page in pages:
            print(f"{words(page.read_text()):7,}  {page}")
    findings = [str(finding) for page in pages for finding in check(page)]
    if not options.pages:
        total = sum(words(page.read_text()) for page in counted())
        print(f"{total:,} words in README.md and docs/, at most {ALL_WORDS:,}")
        if total > ALL_WORDS:
            findings.append(f"README.md and docs/ have {total - ALL_WORDS:,} words too many")
    print(*findings, sep="\n", end="\n" if findings else "")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
