"""The blocks of code on a page of the documentation, and where they come from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").exists())
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


class Block(NamedTuple):
    """A fenced block: the language after the fence, the code, and the heading it stands under."""

    language: str
    code: str
    heading: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, heading, language = [], "", None
    code: list[str] = []
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            if language is None:
                language, code = line[3:].strip(), []
            else:
                found.append(Block(language, "".join(code), heading))
                language = None
        elif language is not None:
            code.append(f"{line}\n")
        elif line.startswith("#"):
            heading = line.lstrip("# ")
    return found


def without_blocks(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def is_quoted(block: Block, page: Path) -> bool:
    """Whether a file that the page links to has the code of the block, however it is indented."""
    return any(_tokens(block.code) in _tokens(path.read_text()) for path in linked_files(page))


def _tokens(code: str) -> str:
    """Without what a formatter changes where there is more room: spaces and trailing commas."""
    return re.sub(r"\s+", "", code).replace(",)", ")")


def linked_files(page: Path) -> list[Path]:
    """The files of this repository that a page links to, other pages left out."""
    paths = [page.parent / target for target in LINK.findall(page.read_text())]
    return [path for path in paths if path.is_file() and path.suffix not in (".md", ".png")]


def commands(page: Path) -> list[str]:
    """The commands in blocks of shell: lines that end in a backslash are joined."""
    joined = (block.code.replace("\\\n", " ") for block in blocks(page) if block.language == "sh")
    lines = (line.split("  #")[0].strip() for code in joined for line in code.splitlines())
    return [re.sub(" +", " ", line) for line in lines if line]
