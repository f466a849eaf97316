"""Runs many random programs and counts: ``python -m program_runs --seeds 1 2 --programs 200``.

With tests/support and the repository on the path. Each failure is printed with its program; the
rest goes on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from harness import RankError, run_on, stop_all
from program_grammar import sample
from programs import Program, run


def failures(
    programs: Sequence[Program], *, until_s: float = float("inf"), first_only: bool = False
) -> tuple[int, int]:
    """How many ran before that moment of `time.monotonic`, and how many of them failed.

    Args:
        first_only: stop at the first failure.
    """
    failed = 0
    for number, program in enumerate(programs):
        if time.monotonic() > until_s:
            return number, failed
        try:
            run_on(program.world_size, run, program, timeout_s=60)
        except RankError as error:
            failed += 1
            print(f"program {number}: {program}\n{error}\n", flush=True)
            if first_only:
                return number + 1, failed
    return len(programs), failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--programs", type=int, default=100, help="per seed")
    parser.add_argument("--families", nargs="+", default=[], help="of operations; default: all")
    parser.add_argument("--minutes", type=float, default=60, help="for all of them")
    parser.add_argument("--first-failure", action="store_true", help="stop there")
    options = parser.parse_args()
    until_s = time.monotonic() + 60 * options.minutes
    try:
        for first in options.seeds:
            programs = sample(options.programs, first, options.families)
            ran, failed = failures(programs, until_s=until_s, first_only=options.first_failure)
            print(f"seed {first}: {ran} programs, {failed} failed", flush=True)
    finally:
        stop_all()


if __name__ == "__main__":
    main()
