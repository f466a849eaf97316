"""Trains with optimizers of several libraries over sharded parameters and tabulates the results.

    python -m benchmarks.optimizers [LIBRARY ...] [--only NAME ...] [--ranks N ...] [--write FILE]
    python -m benchmarks.optimizers --only-table [--write FILE]

Each optimizer runs with its defaults on 2 and on 3 ranks, over plain DTensors and with
`fsdp2.optim.local_step`, `flat_step` and `whole_step`, and is compared with one process. Outcomes
are printed in full. With `--write` they replace those of the same optimizers in
`results/optimizers.json`, and FILE gets the tables of that record: optimizers with the same
outcomes share a row. The text of docs/optimizers.md around the tables is written by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from . import machine
from .optimizer_cases import LIBRARIES, cases
from .optimizer_training import WAYS, train_all
from .ranks import run_ranks
from .report import row, write_readme, write_record

RANKS = (2, 3)
USUAL = ", ".join(map(str, RANKS))
PLAIN = next(iter(WAYS))
BEGIN, END = "<!-- optimizers:begin -->", "<!-- optimizers:end -->"
NOT_TRAINED = "not trained"
# Of the rows of a table: the best first.
KINDS = ("right", "warned", "raises", "refused", "wrong")

Record = dict[str, Any]
# Of an optimizer, by numbers of ranks ("2, 3"): what became of each way to step, as "kind: text".
Outcomes = dict[str, dict[str, str]]


# -- the record -----------------------------------------------------------------------------------


def measured(library: str, names: Sequence[str], found: dict[int, dict[str, Any]]) -> Record:
    """The part of the record that is one library's.

    Args:
        found: what `train_all` returned on so many ranks.
    """
    return {
        "version": metadata.version(library.split(".")[0]).split("+")[0],
        "torch": metadata.version("torch").split("+")[0],
        "sources": [{**machine.describe(), "optimizers": list(names)}],
        "outcomes": {
            name: _joined({ranks: each[f"{library}/{name}"] for ranks, each in found.items()})
            for name in names
        },
    }


def _joined(by_ranks: dict[int, dict[str, Sequence[str]]]) -> Outcomes:
    """The outcomes, once for all numbers of ranks if they agree."""
    # Messages of the same error name ranks and sizes.
    alike = {
        tuple((kind, text[:40]) for kind, text in by_way.values()) for by_way in by_ranks.values()
    }
    found = {
        str(ranks): {way: f"{kind}: {text}" if text else kind for way, (kind, text) in ways.items()}
        for ranks, ways in by_ranks.items()
    }
    return {", ".join(found): next(iter(found.values()))} if len(alike) == 1 else found


def merged(record: Record, library: str, new: Record) -> Record:
    """The record with what was measured of a library; it replaces rows of the same optimizers."""
    old = record["libraries"].get(library)
    if old is not None and (old["version"], old["torch"]) == (new["version"], new["torch"]):
        outcomes = {**old["outcomes"], **new["outcomes"]}
        if outcomes.keys() != new["outcomes"].keys():
            new = {**new, "sources": [*old["sources"], *new["sources"]], "outcomes": outcomes}
    new = {**new, "outcomes": dict(sorted(new["outcomes"].items()))}
    libraries = {**record["libraries"], library: new}
    known = [name for name in LIBRARIES if name in libraries]
    return {**record, "libraries": {name: libraries[name] for name in known}}


def read(folder: Path) -> Record:
    """The record in a folder; one of no library if there is none."""
    path = folder / "optimizers.json"
    if not path.exists():
        return {"name": "optimizers", "libraries": {}}
    return json.loads(path.read_text())


# -- the tables -----------------------------------------------------------------------------------


def tables(record: Record) -> str:
    """Markdown: a table for each library, under its heading."""
    libraries = record["libraries"]
    usual = libraries.get("torch.optim", {}).get("torch")
    return "\n\n".join(section(name, found, usual) for name, found in libraries.items())


def section(name: str, library: Record, usual_torch: str | None = None) -> str:
    """The table of a library: a row for all optimizers with the same outcomes."""
    torch = "" if library["torch"] == usual_torch else f", with torch {library['torch']}"
    by_cells: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    for optimizer, outcomes in library["outcomes"].items():
        ranks = ", ".join(outcomes)
        shown = optimizer if ranks == USUAL else f"{optimizer} ({ranks} ranks)"
        plain = next(iter(outcomes.values()))[PLAIN].split(": ")
        if plain[0] == NOT_TRAINED:
            left_out[plain[1]].append(shown)  # of a message only the beginning
        else:
            by_cells[tuple(_cell(outcomes, way) for way in WAYS)].append(shown)
    lines = [
        f"### {name} {library['version']}{torch}",
        "",
        row([PLAIN, *(f"`{way}`" for way in WAYS if way != PLAIN), "optimizers"]),
        row(["---"] * (1 + len(WAYS))),
    ]
    lines += [row([*each, ", ".join(by_cells[each])]) for each in sorted(by_cells, key=_rank)]
    if left_out:
        parts = [f"{', '.join(names)} ({reason})" for reason, names in left_out.items()]
        lines += ["", f"Not trained: {'; '.join(parts)}."]
    return "\n".join(lines)


def _cell(outcomes: Outcomes, way: str) -> str:
    """What became of a way to step, in a word, or one for each number of ranks."""
    kinds = {ranks: _kind(by_way[way]) for ranks, by_way in outcomes.items()}
    if len(set(kinds.values())) == 1:
        return next(iter(kinds.values()))
    return "; ".join(f"{ranks} ranks: {kind}" for ranks, kind in kinds.items())


def _kind(outcome: str) -> str:
    kind = outcome.split(": ")[0]
    return "**WRONG**" if kind == "wrong" else kind


def _rank(shown: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(KINDS.index(cell) if cell in KINDS else len(KINDS) for cell in shown), shown


def printed(library: Record) -> str:
    """All outcomes, with what was raised in full."""
    return "\n".join(
        f"{name}, {way}, {ranks} ranks: {outcome}"
        for name, outcomes in library["outcomes"].items()
        for ranks, by_way in outcomes.items()
        for way, outcome in by_way.items()
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("libraries", nargs="*", default=[], help=", ".join(LIBRARIES))
    parser.add_argument("--only", nargs="*", default=[], help="names of optimizers")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--only-table", action="store_true", help="print what was measured before")
    parser.add_argument("--write", type=Path, help="update the record, and the tables in this file")
    results = machine.REPOSITORY / "benchmarks" / "results"
    parser.add_argument("--output", type=Path, default=results, help="folder of the record")
    options = parser.parse_args(arguments)
    if options.only_table:
        text = tables(read(options.output))
        print(text)
        if options.write:
            write_readme(options.write, text, BEGIN, END)
        return 0
    warnings.simplefilter("ignore")
    for library in options.libraries or LIBRARIES:
        try:
            names = [case.name for case in cases(library)]
        except ImportError:
            continue
        names = [name for name in names if not options.only or name in options.only]
        if not names:
            continue
        found = {
            ranks: run_ranks(train_all, ranks, {"found": [(library, name) for name in names]})
            for ranks in options.ranks
        }
        new = measured(library, names, found)
        print(printed(new), flush=True)
        if options.write:
            record = merged(read(options.output), library, new)
            write_record(record, options.output)
            write_readme(options.write, tables(record), BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
