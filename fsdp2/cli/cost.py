"""``fsdp2 cost``: days and cost of a run over a number of tokens, by number and type of GPU."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from ..render.text import status
from .model import ModelError
from .plan import (
    add_configurations,
    add_output,
    add_precision,
    answer,
    configurations,
    draw,
    list_of,
)

_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def add_cost(groups: Any) -> None:
    about = "compute the days and cost of a training run, by number and type of GPU"
    parser = groups.add_parser(
        "cost",
        help=about,
        description=f"{about[0].upper()}{about[1:]}. With LIST options, all combinations are "
        "computed and printed as a table.",
    )
    add_configurations(parser)
    parser.add_argument(
        "--hardware",
        type=partial(list_of, str),
        required=True,
        metavar="LIST",
        help="types of GPUs: h100,h200 or hardware files",
    )
    parser.add_argument(
        "--price",
        type=partial(list_of, parse_amount),
        required=True,
        metavar="LIST",
        help="price of one GPU for an hour, in any currency: one for all types, or one for each",
    )
    parser.add_argument(
        "--tokens",
        type=parse_amount,
        required=True,
        metavar="N",
        help="tokens to train on: 300B or 15T",
    )
    parser.add_argument(
        "--goodput",
        type=parse_amount,
        default=1.0,
        metavar="PART",
        help="fraction of the time that is spent in steps (default: 1)",
    )
    parser.add_argument(
        "--max-batch",
        type=parse_amount,
        metavar="N",
        help="leave out configurations with more tokens per step: 4M",
    )
    add_precision(parser)
    parser.add_argument(
        "--picture", metavar="FILE", help="also draw days and cost to a file: cost.png"
    )
    add_output(parser)
    parser.set_defaults(run=run_cost)


def parse_amount(text: str) -> float:
    """``15T`` is 15e12."""
    factor = _SUFFIXES.get(text[-1:].upper(), 0.0)
    try:
        value = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number such as 300B, 15T or 1e12"
        ) from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not positive and finite")
    return value


def run_cost(args: argparse.Namespace) -> int:
    """Sweep over all types of GPUs for a model created on the meta device."""
    from ..planning import Cluster, find_hardware, sweep, training_cost

    def make() -> Any:
        kinds = [find_hardware(name) for name in args.hardware]
        names = [hardware.name for hardware in kinds]
        if len(set(names)) < len(names):
            raise ModelError(f"--hardware has two of the same name: {', '.join(names)}")
        prices = args.price if len(args.price) > 1 else args.price * len(kinds)
        if len(prices) != len(kinds):
            raise ModelError(
                f"--price has {len(prices)} prices for {len(kinds)} kinds of GPUs: give one for "
                "all, or one for each"
            )
        workload, sharding, over = configurations(args)
        with status(args) as show:
            clusters = [
                Cluster(kind, args.world_size[0], memory_budget=args.memory) for kind in kinds
            ]
            tables = [sweep(workload, sharding, each, over, progress=show) for each in clusters]
        return training_cost(
            tables,
            args.tokens,
            dict(zip(names, prices, strict=True)),
            goodput=args.goodput,
            max_batch_tokens=args.max_batch,
        )

    return answer(args, make, draw if args.picture else None)
