"""``fsdp2 compare``: compare a prediction with a profile; needs neither GPUs nor the model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..render.text import fail, print_json, shown


def add_compare(groups: Any) -> None:
    about = "compare a plan or a prediction with the profile of a run"
    parser = groups.add_parser(
        "compare",
        help=about,
        description=(
            f"{about[0].upper()}{about[1:]}: step time, compute, exposed communication and memory, "
            "with the error of each."
        ),
    )
    parser.add_argument(
        "predicted",
        type=Path,
        metavar="PREDICTED",
        help="file with the output of fsdp2 plan --json or fsdp2 predict --json",
    )
    parser.add_argument(
        "measured", type=Path, metavar="PROFILE", help="file written by save_json() of a profile"
    )
    parser.add_argument("--picture", metavar="FILE", help="also draw it to a file: compared.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> int:
    """Compare two files."""
    from ..planning.comparison import compare, read_json

    try:
        made = compare(read_json(args.predicted), read_json(args.measured))
    except ValueError as error:
        return fail(error)
    if args.json:
        print_json(made.to_dict())
    else:
        for line in str(made).splitlines():
            print(shown(line))
    if args.picture:
        try:
            made.picture(args.picture)
        except (ImportError, OSError, ValueError) as error:
            return fail(error)
    return 0
