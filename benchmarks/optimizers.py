"""Trains with optimizers of several libraries over sharded parameters and tabulates the results.

    python -m benchmarks.optimizers [LIBRARY ...] [--only NAME ...] [--ranks N ...] [--write FILE]

Each optimizer runs with its defaults on 2 and on 3 ranks, over plain DTensors and with
`fsdp2.optim.local_step`, `flat_step` and `whole_step`, and is compared with one process. The text
of docs/optimizers.md around the tables is written by hand.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .optimizer_cases import LIBRARIES, cases
from .optimizer_training import WAYS, train_all
from .ranks import run_ranks

RANKS = (2, 3)
LONGEST = 150  # characters of a message in the table
PROPERTIES = "elementwise|independent of shapes|one that steps each parameter on its own"
RULE = "|---" * (1 + len(WAYS)) + "|"  # below the names of the columns


def cell(by_ranks: dict[int, Sequence[str]]) -> str:
    """The cell for one way of stepping."""
    texts = {ranks: _text(*outcome) for ranks, outcome in by_ranks.items()}
    if len({(kind, text[:40]) for kind, text in by_ranks.values()}) == 1 or _both_wrong(by_ranks):
        return next(iter(texts.values()))
    return "; ".join(f"{ranks} ranks: {text}" for ranks, text in texts.items())


def _both_wrong(by_ranks: dict[int, Sequence[str]]) -> bool:
    return all(kind == "wrong" for kind, _ in by_ranks.values())


def _text(kind: str, text: str) -> str:
    # Of a refusal only the reason, without the optimizer's name and the advice.
    if kind == "refused":
        text = text.removeprefix("TypeError: ")
    text = re.sub(rf".* is not ({PROPERTIES}): ", "", text)
    text = re.sub(r".*so its steps are not those of one process: for '.*' of", "with", text)
    ends = r"\. It would see|\. whole_step steps parameters| See docs/| Please |\. fsdp2\.optim\."
    text = re.split(ends, text)[0]
    text = text.replace("|", "/").replace("<", "&lt;")
    if len(text) > LONGEST:
        text = text[:LONGEST].rstrip() + " ..."
    text = text.replace("](", "]\\(")  # a shape and a placement, not a link
    if kind == "wrong":
        return f"**WRONG** {text}"
    return f"{kind}: {text}" if text else kind


def section(library: str, names: Sequence[str], outcomes: dict[int, dict[str, Any]]) -> str:
    """The table of a library, with its heading."""
    version = metadata.version(library.split(".")[0]).split("+")[0]
    lines = [
        f"## {library} {version}\n",
        "| optimizer | plain DTensors | `local_step` | `flat_step` | `whole_step` |",
        RULE,
    ]
    for name in names:
        row = {ranks: found[f"{library}/{name}"] for ranks, found in outcomes.items()}
        cells = [cell({ranks: by_way[way] for ranks, by_way in row.items()}) for way in WAYS]
        if cells[0].startswith("not trained"):
            cells[1:] = [""] * (len(cells) - 1)
        fewer = "" if set(outcomes) == set(RANKS) else f" ({', '.join(map(str, outcomes))} ranks)"
        lines.append(f"| {name}{fewer} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(file: Path, library: str, text: str) -> None:
    """Insert rows into the table of a library; they replace rows of the same optimizers."""
    parts = [part.rstrip() + "\n" for part in re.split(r"(?m)^(?=## )", file.read_text())]
    for i, part in enumerate(parts):
        if part.startswith(f"## {library} "):
            parts[i] = _merged(part, text)
            break
    else:
        parts.append(text)
    file.write_text("\n".join(parts))


def _merged(old: str, new: str) -> str:
    heading, rows = _rows(new)
    old_heading, old_rows = _rows(old)
    if heading == old_heading:  # the same version and columns
        rows = {**old_rows, **rows}
    return heading + "".join(f"{rows[name]}\n" for name in sorted(rows))


def _rows(section: str) -> tuple[str, dict[str, str]]:
    heading, _, rows = section.partition(RULE + "\n")
    lines = [line for line in rows.splitlines() if line.startswith("| ")]
    return f"{heading}{RULE}\n", {re.split(r" \(| \| ", line)[0]: line for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("libraries", nargs="*", default=[], help=", ".join(LIBRARIES))
    parser.add_argument("--only", nargs="*", default=[], help="names of optimizers")
    parser.add_argument("--write", type=Path, help="file whose tables are replaced")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for library in options.libraries or LIBRARIES:
        try:
            names = [case.name for case in cases(library)]
        except ImportError:
            continue
        names = [name for name in names if not options.only or name in options.only]
        found = {
            ranks: run_ranks(train_all, ranks, {"found": [(library, name) for name in names]})
            for ranks in options.ranks
        }
        text = section(library, names, found)
        print(text, flush=True)
        if options.write:
            write(options.write, library, text)


if __name__ == "__main__":
    main()
