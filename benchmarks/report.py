"""Results as JSON files and as one Markdown table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import machine
from .suite import MEASURES
from .variants import BASELINE, BEST_BASELINE, OURS, VARIANTS

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

# A plain step that takes this many times its CPU time shared its core with something else.
BUSY = 1.15


class ReadmeError(RuntimeError):
    """The README has no place for the table."""


def write_record(record: dict[str, Any], folder: Path) -> Path:
    """Writes one measure's record to `folder/NAME.json`; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['name']}.json"
    # In one step: a run that is ended while it writes leaves what was there.
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(path)
    return path


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All records in a folder, in the order of the suite."""
    paths = [folder / f"{name}.json" for name in MEASURES]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def table(records: list[dict[str, Any]]) -> str:
    """The Markdown table of all figures, with what it was measured on above it."""
    columns = [*VARIANTS, f"{OURS} / {BASELINE}", f"{OURS} / its better setting", "target"]
    lines = [*sources(records), "", row(["measure", *columns]), row(["---"] * (len(columns) + 1))]
    for record in records:
        lines += [figure_row(figure) for figure in record["figures"]]
    return "\n".join(lines)


def sources(records: list[dict[str, Any]]) -> list[str]:
    """One line for every machine, version and commit that the records come from."""
    lines: dict[str, list[str]] = {}
    for record in records:
        versions, about = record["versions"], record["machine"]
        commit = (record["commit"] or "no commit")[:12]
        changed = " with uncommitted changes" if record["uncommitted_changes"] else ""
        settings = record["config"]["settings"]
        line = (
            f"{about['cpu']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB; "
            f"{record.get('num_ranks', settings['world_size'])} ranks of one thread over gloo; "
            f"torch {versions['torch']}, Python {versions['python']}; "
            f"{record['date'][:10]}, commit {commit}{changed}"
        )
        if not versions["fully_shard_from"].startswith("fsdp2"):
            line += f"; **fully_shard is {versions['fully_shard_from']}'s**"
        if record["wall_to_cpu_time"] > BUSY:
            line += (
                f"; **busy machine: plain took {record['wall_to_cpu_time']:.2f} x its CPU time**"
            )
        lines.setdefault(line, []).append(record["name"])
    if len(lines) == 1:
        return [f"{line}." for line in lines]
    found = [f"{', '.join(names)}: {line}." for line, names in lines.items()]
    return [*(f"{line}\\" for line in found[:-1]), found[-1]]  # each on a line


def figure_row(figure: dict[str, Any]) -> str:
    """One row: the values of all variants, and what became of the target."""
    values, ratios = figure["values"], figure["ratios"]
    cells = [number(values.get(name)) for name in VARIANTS]
    ratio = "-"
    if OURS in ratios:
        low, high = figure["ratio_ranges"][OURS]
        spread = f" ({number(low)} to {number(high)})" if low != high else ""
        ratio = f"{number(ratios[OURS])}{spread}"
    better = min(ratios.get(BASELINE, 1.0), ratios.get(BEST_BASELINE, 1.0))
    against_better = number(ratios[OURS] / better) if OURS in ratios and better > 0 else "-"
    target = "-"
    if figure["target"] is not None:
        verdict = "too noisy to tell"
        if not figure["too_noisy"]:
            verdict = "met" if OURS in ratios and ratios[OURS] <= figure["target"] else "not met"
        target = f"{figure['target']:.2f}, {verdict}"
    return row([f"{figure['title']}, {figure['unit']}", *cells, ratio, against_better, target])


def number(value: float | None) -> str:
    """A value with three digits that count; a dash where there is none."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def row(cells: list[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def write_readme(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Puts `text` between two markers of a README.

    Raises:
        ReadmeError: There is no README, or it lacks the markers.
    """
    if not path.exists():
        raise ReadmeError(f"{path.name} does not exist")
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ReadmeError(f"{path.name} lacks {begin} and {end}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def measured_on(record: dict[str, Any]) -> str:
    """The machine, torch, the date and the commit of a record."""
    about = record["machine"]
    return (
        f"{about['cpu']}, {about['cores']} cores; torch {record['versions']['torch']}; "
        f"{record['date'][:10]}, commit {(record['commit'] or 'none')[:12]}."
    )


def show_table(
    options: argparse.Namespace,
    name: str,
    text_of: Callable[[dict[str, Any]], str],
    begin: str,
    end: str,
) -> None:
    """Prints what ``text_of`` makes of the record ``name``; puts it in the docs if it is to."""
    text = text_of(json.loads((options.output / f"{name}.json").read_text()))
    print(text)
    if options.write_docs:
        write_readme(machine.REPOSITORY / "docs" / "performance.md", text, begin, end)
