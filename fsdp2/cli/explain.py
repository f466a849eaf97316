"""``fsdp2 explain``: the units of a model for a number of ranks, without starting processes."""

from __future__ import annotations

import argparse
from typing import Any

from ..render.text import fail, plain_table, print_json, show_table
from .model import ModelError, add_model, load_model, parse_number, sharding_options


def add_explain(groups: Any) -> None:
    about = "show the units of a model, their bytes and the traffic of a step"
    parser = groups.add_parser("explain", help=about, description=f"{about[0].upper()}{about[1:]}")
    add_model(parser)
    parser.add_argument(
        "--ranks-per-node",
        type=parse_number,
        metavar="G",
        help="ranks per host, to batch gathers and count the traffic between hosts (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--params", action="store_true", help="list every parameter")
    parser.set_defaults(run=run_explain)


def run_explain(args: argparse.Namespace) -> int:
    """Explain a model created on the meta device."""
    from ..describe.explain import explain

    try:
        options = sharding_options(args)
        found = explain(load_model(args.model), ranks_per_node=args.ranks_per_node, **options)
    except (ModelError, ValueError, TypeError) as error:
        return fail(error)
    if args.json:
        print_json(found.to_dict())
        return 0
    head, *notes = found.notes()
    print(f"{head}\n")
    header, rows, right = found.rows()
    show_table(header, rows, right)
    if args.params:
        print()
        listed = [
            (
                param.name,
                str(list(param.shape)),
                param.dtype,
                ", ".join(param.placements),
                {True: "direct", False: "packed", None: "not gathered"}[param.direct],
                "" if param.trained else "frozen",
            )
            for unit in found.units
            for param in unit.params
        ]
        print(plain_table(("parameter", "shape", "dtype", "placements", "gather", ""), listed))
    print("\n" + "\n".join(notes))
    return 0
