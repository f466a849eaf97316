"""Output of commands: readable sizes, aligned tables, progress, one-line errors."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

NEGATIVE, ERROR, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141  # exit codes


def fail(error: Exception | str, code: int = ERROR) -> int:
    """Print an error; returns the exit code."""
    print(f"fsdp2: error: {one_line(error)}", file=sys.stderr)
    return code


def one_line(error: Exception | str) -> str:
    """The message of an error, without errno numbers."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return shown(" ".join(text.split()))


def shown(text: str) -> str:
    """``text`` with control characters and characters that cannot be encoded escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def bytes_of(text: str) -> int:
    """``5GB``, ``1.5 MiB`` or a number, as bytes.

    Raises:
        ValueError: for anything else, and for less than one byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B?|B)?", text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 5GB or 500MiB")
    unit = (1024 if match[3] else 1000) ** ("KMGT".index(match[2]) + 1 if match[2] else 0)
    size = int(float(match[1]) * unit)
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return size


def show_bytes(num: float) -> str:
    """Format bytes in the largest unit that gives at least 1, with three digits: ``1.50 GiB``."""
    if num < 1024:
        return f"{num:.0f} B"
    units = ["TiB", "GiB", "MiB", "KiB"]
    unit = units.pop()
    num /= 1024
    while num >= 1024 and units:
        unit = units.pop()
        num /= 1024
    decimals = 2 if num < 10 else 1 if num < 100 else 0
    return f"{num:.{decimals}f} {unit}"


def show_seconds(seconds: float) -> str:
    """``1.23 s`` or ``12.3 ms``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def table(rows: Iterable[Sequence[str]], right: Collection[str] = "", indent: int = 2) -> str:
    """Columns of text, aligned.

    Args:
        right: the indices of the columns to align right, as digits.
    """
    cells = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = (
            cell.rjust(width) if str(i) in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append((" " * indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def plain_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ""
) -> str:
    """`table` with a header, not indented."""
    return table([header, *rows], right=right, indent=0)


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
    """Print a table: with rich if it is installed and the terminal is wide enough, otherwise as
    plain text."""
    plain = plain_table(header, rows, right)
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(plain)
        return
    console = Console()
    if not sys.stdout.isatty() or console.width < len(max(plain.splitlines(), key=len)) + 2:
        print(plain)
        return
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        justify: Any = "right" if str(i) in right else "left"
        drawn.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(shown(cell)) for cell in row))
    console.print(drawn)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on one line."""
    print(json.dumps(plain(value)))


def plain(value: Any) -> Any:
    """``value`` with infinities and NaNs as strings, since JSON has neither."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def plural(num: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"


@contextmanager
def progress(args: argparse.Namespace, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of bytes just processed; shows a progress bar, on a
    terminal only."""
    if not sys.stderr.isatty() or args.quiet or getattr(args, "json", False):
        yield lambda num: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        line = _Line(title, total)
        try:
            yield line.add
        finally:
            line.clear()
    else:
        options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "leave": False}
        with tqdm(desc=title, total=total, file=sys.stderr, **options) as bar:
            yield bar.update


@contextmanager
def status(args: argparse.Namespace) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function to call with (current task, number done, total); shows one line, on a
    terminal only."""
    if not sys.stderr.isatty() or args.quiet or args.json:
        yield lambda what, done, total: None
        return

    def show(what: str, done: int, total: int) -> None:
        text = shown(f"{done + 1} of {total}  {what}")[:100]
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


class _Line:
    """Progress on one line that is overwritten."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self._last_s = -math.inf
        self._start_s = time.monotonic()

    def add(self, num: int) -> None:
        self.done += num
        now = time.monotonic()
        if now - self._last_s < 0.1 and self.done < self.total:
            return
        self._last_s = now
        percent = 100 * self.done / max(self.total, 1)
        rate = show_bytes(self.done / max(now - self._start_s, 1e-9))
        of = f"{show_bytes(self.done)} of {show_bytes(self.total)}"
        print(f"\r\033[K{self.title} {percent:3.0f}%  {of}  {rate}/s", end="", file=sys.stderr)
        sys.stderr.flush()

    def clear(self) -> None:
        print("\r\033[K", end="", file=sys.stderr)
        sys.stderr.flush()
