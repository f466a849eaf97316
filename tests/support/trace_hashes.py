"""What generated trainings do, step by step, as hashes: a change that only moves code keeps them.

A trace has every operation, allocation, free, wait and message in order (`fsdp2.testing`), so two
runtimes with the same traces do the same. `trace_hashes.json` has those of the last commit that
meant to change what happens::

    PYTHONPATH=.:tests/support python -m trace_hashes           # compare; exit 1 names what differs
    PYTHONPATH=.:tests/support python -m trace_hashes --write   # after a change that meant it

Traces are those of one version of torch: its operators are in them. A few plans are left out, whose
traces depend on the addresses that memory gets.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import torch

from kept_hashes import KeptHashes, hash_of_text
from stream_schedules import _SHAPES, Layer, Plan, plan_of, traced

KEPT = KeptHashes(Path(__file__).with_name("trace_hashes.json"))
# Plans by kind, each from a seed, and how many of them are kept.
KINDS: dict[str, tuple[int, Callable[[int], Plan]]] = {
    "device": (100, plan_of),
    "group": (40, lambda seed: dataclasses.replace(plan_of(seed), host="group", offload=False)),
    "exchange": (
        40,
        lambda seed: dataclasses.replace(plan_of(seed), host="exchange", offload=False),
    ),
    "budget": (20, lambda seed: dataclasses.replace(plan_of(seed), tight=True)),
}


def names() -> Iterator[str]:
    for kind, (count, _) in KINDS.items():
        for seed in range(count):
            yield f"{kind} {seed}"


def plan_named(name: str) -> Plan:
    kind, seed = name.split()
    return KINDS[kind][1](int(seed))


def warm_up() -> None:
    """Make the meshes that plans use: torch computes on them once per process, in the trace."""
    for shape in _SHAPES:
        for reshard in (None, 2):
            if reshard is None or shape[-1] > reshard:
                with traced(Plan(layers=(Layer(),), mesh=shape, reshard=reshard)):
                    pass


def hash_of(plan: Plan) -> str:
    """Of the trace of a plan. `warm_up` comes first."""
    # When a cycle is collected depends on what ran before, and small gradients are freed or not by
    # the addresses that they get.
    gc.collect()
    gc.disable()
    try:
        with (
            mock.patch("fsdp2.sharding.gradients.FREE_MIN_BYTES", 0),
            traced(plan) as recorder,
        ):
            lines = "\n".join(map(repr, recorder.events))
    finally:
        gc.enable()
    return hash_of_text(lines)


def _hashed(chosen: list[str]) -> dict[str, str]:
    torch.set_num_threads(1)
    warm_up()
    return {name: hash_of(plan_named(name)) for name in chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="keep what is found")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    before = {} if options.write else KEPT.read()
    chosen = [name for name in names() if options.write or name in before]
    found = hash_all(chosen, options.processes)
    if options.write:
        again = hash_all(chosen, options.processes)
        kept = {name: value for name, value in found.items() if again[name] == value}
        KEPT.write(kept)
        print(f"{len(kept)} of {len(chosen)} traces written: the others depend on addresses")
        return
    KEPT.compare(found, "traces")


def hash_all(chosen: list[str], processes: int) -> dict[str, str]:
    """The hashes of these plans, in several processes."""
    parts = [chosen[i :: 4 * processes] for i in range(4 * processes)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        found = {name: value for part in pool.map(_hashed, parts) for name, value in part.items()}
    return {name: found[name] for name in chosen}


if __name__ == "__main__":
    main()
