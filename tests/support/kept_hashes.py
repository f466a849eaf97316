"""Hashes in a file, of what one version of torch leads to: a change that moves code keeps them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_TORCH = torch.__version__.split("+")[0]


def hash_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class KeptHashes:
    """The hashes of one file, by name; with the version of torch that they are of."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> dict[str, Any]:
        """Those that were kept last, without the version."""
        return {name: kept for name, kept in self._all().items() if name != "torch"}

    def are_of_another_torch(self) -> bool:
        return self._all()["torch"] != _TORCH

    def write(self, found: Mapping[str, Any]) -> None:
        self._file.write_text(json.dumps({"torch": _TORCH} | dict(found), indent=1) + "\n")

    def compare(self, found: Mapping[str, Any], what: str) -> None:
        """Print how many of ``found``, each a ``what``, are as they were kept.

        Raises:
            SystemExit: with the names of the others.
        """
        kept = self.read()
        differs = [name for name in found if found[name] != kept.get(name)]
        print(f"{len(found) - len(differs)} of {len(found)} {what} are unchanged")
        if differs:
            raise SystemExit("differ: " + "; ".join(differs))

    def _all(self) -> dict[str, Any]:
        return json.loads(self._file.read_text())
