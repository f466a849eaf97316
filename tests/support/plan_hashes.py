"""What `estimate`, `predict`, `sweep` and `plan` return, as hashes: to the last digit and word.

`plan_hashes.json` has those of the last commit that meant to change a number or a text::

    PYTHONPATH=.:tests/support python -m plan_hashes           # compare; exit 1 names what differs
    PYTHONPATH=.:tests/support python -m plan_hashes --write   # after a change that meant it

Traces, and so the numbers, are those of one version of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch

from plan_cases import CASES

FILE = Path(__file__).with_name("plan_hashes.json")


def hashes_of(name: str) -> dict[str, str]:
    """Of the numbers of a case, and of its text; or the error that it ends with."""
    try:
        made = CASES[name].run()
    except (ValueError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    numbers = json.dumps(made.to_dict(), sort_keys=True, default=str)
    return {"numbers": _hash(numbers), "text": _hash(str(made))}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def known() -> dict[str, Any]:
    """Hashes by name, as they were recorded; and ``"torch"``, the version that they are of."""
    return json.loads(FILE.read_text())


def torch_version() -> str:
    return torch.__version__.split("+")[0]


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
        FILE.write_text(json.dumps({"torch": torch_version()} | found, indent=1) + "\n")
        print(f"{len(found)} cases written")
        return
    before = known()
    differs = [name for name in CASES if found[name] != before.get(name)]
    print(f"{len(CASES) - len(differs)} of {len(CASES)} cases are unchanged")
    if differs:
        raise SystemExit("differ: " + "; ".join(differs))


if __name__ == "__main__":
    main()
