"""What `estimate`, `predict`, `sweep` and `plan` return, as hashes: to the last digit and word.

`plan_hashes.json` has those of the last commit that meant to change a number or a text::

    PYTHONPATH=.:tests/support python -m plan_hashes           # compare; exit 1 names what differs
    PYTHONPATH=.:tests/support python -m plan_hashes --write   # after a change that meant it

Traces, and so the numbers, are those of one version of torch.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from functools import cache
from pathlib import Path

from kept_hashes import KeptHashes, hash_of_text
from plan_cases import CASES

KEPT = KeptHashes(Path(__file__).with_name("plan_hashes.json"))


@cache
def _run_first() -> None:
    CASES["predict: ZBVZeroBubble"].run()


def hashes_of(name: str) -> dict[str, str]:
    """Of the numbers of a case, and of its text; or the error that it ends with."""
    # Small tensors are in reference cycles, more of them in the first run of a process. When these
    # are collected depends on what ran before.
    _run_first()
    gc.collect()
    gc.disable()
    try:
        made = CASES[name].run()
    except (ValueError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.enable()
    numbers = json.dumps(made.to_dict(), sort_keys=True, default=str)
    return {"numbers": hash_of_text(numbers), "text": hash_of_text(str(made))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="keep what is found")
    parser.add_argument("--times", action="store_true", help="print the seconds of each")
    options = parser.parse_args()
    found = {}
    for name in CASES:
        start = time.perf_counter()
        found[name] = hashes_of(name)
        if options.times:
            print(f"{time.perf_counter() - start:6.2f} s  {name}: {', '.join(found[name])}")
    if options.write:
        KEPT.write(found)
        print(f"{len(found)} cases written")
    else:
        KEPT.compare(found, "cases")


if __name__ == "__main__":
    main()
