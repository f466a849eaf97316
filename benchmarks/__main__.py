"""Command line of the benchmarks: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from . import report, suite
from .machine import REPOSITORY
from .ranks import progress
from .steps import DisagreementError
from .variants import BASELINE, OURS


def positive(text: str) -> int:
    """A positive whole number, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compares fsdp2 with plain training, DDP, FSDP1 and torch's FSDP2.",
    )
    parser.add_argument("measure", nargs="?", default="all", choices=[*suite.MEASURES, "all"])
    parser.add_argument("--rounds", type=positive, help="rounds of the timed measures")
    parser.add_argument("--iters", type=positive, help="timed steps per round and variant")
    parser.add_argument("--world-size", type=positive, default=2, help="ranks (default 2)")
    parser.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "benchmarks" / "results",
        metavar="DIR",
        help="where the JSON files go (default benchmarks/results)",
    )
    parser.add_argument(
        "--write-readme",
        action="store_true",
        help="put the table of all results in benchmarks/README.md",
    )
    parser.add_argument("--quick", action="store_true", help=f"only plain, {BASELINE} and {OURS}")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    options = parse(arguments)
    settings = suite.Settings(
        world_size=options.world_size, rounds=options.rounds, iters=options.iters
    )
    if options.quick:
        settings = replace(settings, variants=("plain", BASELINE, OURS))
    names = list(suite.MEASURES) if options.measure == "all" else [options.measure]
    try:
        for name in names:
            start = time.perf_counter()
            record = suite.run(name, settings)
            path = report.write_record(record, options.output)
            progress(f"{name}: {time.perf_counter() - start:.0f} s, written to {path}")
        records = report.read_records(options.output)
        print(report.table([r for r in records if r["name"] in names]))
        if options.write_readme:
            report.write_readme(REPOSITORY / "benchmarks" / "README.md", report.table(records))
    except (DisagreementError, report.ReadmeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
