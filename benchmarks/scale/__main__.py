"""How costs grow with the number of ranks: `python -m benchmarks.scale --help`.

One process plays each of n ranks in turn, so n may be thousands on one machine. What is counted,
bytes, files and calls, is the same in every run; CPU seconds and memory are this machine's. The
slope says how a count grows: 0 constant, 1 with the number of ranks, 2 with its square.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from fsdp2.checkpoint import CheckpointError

from .. import machine
from ..ranks import progress
from .checkpoint import LAYOUTS
from .curves import Counted, Curve, table

# Where the curves are. Of another module only its name has to be added.
MODULES = [import_module(f".{name}", __package__) for name in ("checkpoint", "dcp", "growth")]

RANKS, TENSORS = (16, 64, 256, 1024), (30, 1000)
QUICK_TENSORS = (30,)
MOST = 100_000  # ranks x tensors of a point: more take a minute each, and gigabytes


def curves_of(
    names: Sequence[str], tensors: Sequence[int], layout: str
) -> Iterator[tuple[str, int, Callable[[int], Counted], Sequence[int]]]:
    """Title, tensors (0: of no model), how to count a point, and the usual points, of all curves
    with these names."""
    for module in MODULES:
        for name, point in module.CURVES.items():
            if names and name not in names:
                continue
            takes = inspect.signature(point).parameters
            points = getattr(module, "POINTS", {}).get(name, RANKS)
            options: dict[str, Any] = {"layout": layout} if "layout" in takes else {}
            which = f", {layout}" if options and layout != "auto" else ""
            if "tensors" not in takes:
                yield name + which, 0, partial(point, **options), points
                continue
            for num in tensors:
                title = f"{name}, {num:,} tensors{which}"
                yield title, num, partial(point, tensors=num, **options), points


def measure(
    title: str, tensors: int, point: Callable[[int], Counted], ranks: Sequence[int], most: int
) -> Curve:
    """Count every point that is small enough and can be made."""
    curve = Curve(title)
    for n in ranks:
        if n * tensors > most:
            progress(f"{title}: left out on {n:,} ranks: --most {n * tensors} takes it in")
            continue
        progress(f"{title}: {n:,} ranks")
        try:
            curve.points[n] = point(n)
        except (CheckpointError, MemoryError, OSError) as error:
            progress(f"{title}: nothing on {n:,} ranks: {type(error).__name__}: {error}")
    return curve


def main() -> None:
    names = [name for module in MODULES for name in module.CURVES]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--curve", action="append", choices=names, help="may be repeated; else all")
    parser.add_argument("--ranks", type=_numbers, help=f"default: {RANKS}, or the curve's own")
    parser.add_argument("--tensors", type=_numbers, help=f"of the model; default: {TENSORS}")
    parser.add_argument("--layout", choices=LAYOUTS, default="auto")
    parser.add_argument("--most", type=int, default=MOST, help="ranks x tensors of a point")
    parser.add_argument("--quick", action="store_true", help="two points, one model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all counts")
    options = parser.parse_args()
    tensors = options.tensors or (QUICK_TENSORS if options.quick else TENSORS)
    record = machine.describe()
    found = []
    for title, num, point, points in curves_of(options.curve or (), tensors, options.layout):
        usual = points[:2] if options.quick else points
        curve = measure(title, num, point, sorted(options.ranks or usual), options.most)
        found.append(curve)
        if curve.points:
            print(f"{table(curve)}\n", flush=True)
    if options.json is not None:
        record["curves"] = [{"name": curve.name, "points": curve.points} for curve in found]
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
