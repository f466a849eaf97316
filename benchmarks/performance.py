"""The tables of docs/performance.md and of the README: `python -m benchmarks.performance`.

Made of the records that the other benchmarks left in `results/`, so that no figure is typed. A row
is a measure of `python -m benchmarks`; the peer is the better of FSDP1 and torch's FSDP2 with its
default and with its best settings, by the medians of the row. Sorted by the ratio to it, the worst
first. `--write` puts the tables between the marks in both files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .machine import REPOSITORY
from .report import number, read_records, row, sources, write_readme
from .variants import BASELINE, BEST_BASELINE, OURS

RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE, README = REPOSITORY / "docs" / "performance.md", REPOSITORY / "README.md"
MARKS = "<!-- performance:begin -->", "<!-- performance:end -->"
PEERS = ("FSDP1", BASELINE, BEST_BASELINE)
# Beside another row, of which they are a part or another view.
SECONDARY = (
    "CPU time of the same",
    "forward+backward of that stack",
    "moved inside an exchange",
    "largest single copy",
)
# Rows of the README: what a title begins with, and what is shown in its place.
IN_README = {
    "LM forward+backward, fp32": "forward and backward, language model of 34M parameters",
    "LM forward+backward, bf16": "the same, computing in bf16",
    "peak memory above own state, fp32": "peak memory of that model, beyond the rank's own shards",
    "peak memory above own state, bf16": "the same in bf16, gradients reduced in fp32",
    "hook time": "host time that sharding adds to a block of nine small parameters",
    "AdamW step": "AdamW step of 64 such blocks",
}

# How the page words a title, by its beginning: records, and tables of a whole suite, have others.
ON_PAGE = {
    "AdamW step of that stack": "AdamW step of the small blocks",
    "held between steps above own state": "memory between steps, beyond shards",
    "peak memory above own state": "peak memory in a step, beyond shards",
    "hook time per unit and step": "host time per small block and step",
    "2-D: tensor parallel x sharded LM forward+backward": (
        "LM forward+backward, tensor parallel x sharded"
    ),
    "copied outside collectives": "bytes copied outside collectives",
}
# What limits each measure of fsdp2, by the beginning of its title.
LIMITS = {
    "LM forward+backward, fp32": "copying each byte once, on the core that computes",
    "LM forward+backward, bf16": "casting shards, and copying as in fp32",
    "2-D": "DTensor's operators take half the time in both libraries",
    "hook time": "Python calls, torch's operators, first touch of memory",
    "AdamW step of that stack": "checking `.grad` and state of every parameter",
    "peak memory": "one prefetched unit, and one unit whose gradients are being reduced",
    "held between steps": "no memory is held",
    "copied outside": "small parameters, which are packed",
}  # fmt: skip


def rows_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per figure with a peer, the worst first."""
    rows = []
    for record in records:
        for figure in record["figures"]:
            values = figure["values"]
            peers = {name: values[name] for name in PEERS if name in values}
            title = figure["title"]
            if OURS not in values or not peers or title.startswith(SECONDARY):
                continue
            best = min(peers, key=lambda name: peers[name])
            rows.append({
                "title": title,
                "unit": figure["unit"],
                "ours": values[OURS],
                "peer": best,
                "theirs": peers[best],
                "torch FSDP2": min(peers[BASELINE], peers.get(BEST_BASELINE, peers[BASELINE])),
                "ratio": values[OURS] / peers[best] if peers[best] else None,
                "spread": figure["ratio_ranges"].get(OURS),
                "noisy": figure["too_noisy"],
                "limit": limit_of(figure["title"]),
            })  # fmt: skip
    return sorted(rows, key=lambda each: -(each["ratio"] or 0))


def limit_of(title: str) -> str:
    """What limits a measure.

    Raises:
        KeyError: if nothing is written about it.
    """
    beginning = _beginning(title, LIMITS)
    if beginning is None:
        raise KeyError(f"LIMITS in {Path(__file__).name} says nothing about {title!r}")
    return LIMITS[beginning]


def on_page(title: str) -> str:
    """A title as the page words it."""
    beginning = _beginning(title, ON_PAGE)
    return title if beginning is None else ON_PAGE[beginning] + title.removeprefix(beginning)


def _beginning(title: str, table: dict[str, str]) -> str | None:
    """The key of ``table`` with which ``title`` begins."""
    return next((key for key in table if title.startswith(key)), None)


def table(rows: list[dict[str, Any]], floors: dict[str, dict[str, Any]]) -> str:
    """All rows, with floors where there are any."""
    header = ["measure", OURS, "best baseline", f"{OURS} / baseline", f"{OURS} / floor"]
    lines = [row([*header, "what limits it"]), row(["---"] * (len(header) + 1))]
    for each in rows:
        floor = floors.get(each["title"])
        lines.append(row([
            f"{on_page(each['title'])}, {each['unit']}",
            number(each["ours"]),
            f"{number(each['theirs'])} ({each['peer']})",
            "too noisy" if each["noisy"] else number(each["ratio"]),
            "-" if floor is None else f"{floor['ratio']:.2f}",
            each["limit"],
        ]))  # fmt: skip
    return "\n".join(lines)


def beside_torch(rows: list[dict[str, Any]]) -> str:
    """The rows of the README: torch's FSDP2, with the better of its settings, and fsdp2.

    Raises:
        KeyError: if a row was not measured.
    """
    header = ["two CPU processes over gloo, one thread each", "torch FSDP2", OURS, ""]
    lines = [row(header), row(["---", "---:", "---:", "---"])]
    for beginning, title in IN_README.items():
        each = next((each for each in rows if each["title"].startswith(beginning)), None)
        if each is None:
            raise KeyError(f"IN_README in {Path(__file__).name}: no record has {beginning!r}")
        theirs, ours = each["torch FSDP2"], each["ours"]
        gain = f"{theirs / ours:.1f}x faster"
        if each["unit"] == "MB":
            gain = f"{100 * (1 - ours / theirs):.0f} % less"
        values = [f"{number(value)} {each['unit']}" for value in (theirs, ours)]
        lines.append(row([title, *values, gain]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/performance.md and README")
    options = parser.parse_args()
    records = read_records(RESULTS)
    path = RESULTS / "floors.json"
    floors = json.loads(path.read_text())["figures"] if path.exists() else []
    rows = rows_of(records)
    whole = table(rows, {each["title"]: each for each in floors})
    few = beside_torch(rows)
    print(f"{whole}\n\n{few}")
    if options.write:
        write_readme(PAGE, "\n".join([*sources(records), "", whole]), *MARKS)
        write_readme(README, few, *MARKS)


if __name__ == "__main__":
    main()
