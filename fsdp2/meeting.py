"""Ranks tell each other what they are about to do, through the key-value store they met by.

No collective: those are what hangs when ranks disagree. Linear in the number of ranks: the first
of them reads what every rank says, and writes down the verdict for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# How much longer than the first rank the others wait: it has to wait for all and to write.
_GRACE = timedelta(seconds=10)
_rounds: dict[tuple[int, str, tuple[int, ...]], int] = {}


class RanksDisagreeError(RuntimeError):
    """Ranks that have to do the same do not. The message, the same on all ranks, names them."""


class Meeting:
    """Some ranks that meet again and again, each as often as the others.

    Args:
        kind: what for; meetings of different kinds are counted apart.
        ranks: of the default group, this one among them.
        timeout_s: how long to wait for a rank that does not come, in seconds.
    """

    def __init__(self, kind: str, ranks: tuple[int, ...], timeout_s: float) -> None:
        self.kind, self.ranks = kind, ranks
        self.timeout = timedelta(seconds=timeout_s)
        self._store = dist.distributed_c10d._get_default_store() if len(ranks) > 1 else None

    def ask(self, mine: Any, judge: Callable[[Mapping[int, Any]], Any]) -> Any:
        """Meet, and let the first rank judge what all ranks say.

        Args:
            mine: what this rank says, as JSON can hold it.
            judge: gets what all said, by rank, and returns what JSON can hold.

        Returns:
            On every rank what the judge returned on the first.

        Raises:
            RanksDisagreeError: with the ranks that did not come.
        """
        if self._store is None:
            return judge({self.ranks[0]: mine})
        counter = (id(self._store), self.kind, self.ranks)
        number = _rounds[counter] = _rounds.get(counter, 0) + 1
        path = f"fsdp2/{self.kind}/{'-'.join(map(str, self.ranks))}"
        me = dist.get_rank()
        if me == self.ranks[0]:
            said, missing = self._hear(f"{path}/{number}")
            error = self._error(mine, said, missing) if missing else None
            verdict = None if missing else judge({me: mine, **said})
            self._store.set(f"{path}/{number}/verdict", json.dumps([error, verdict]))
            self._store.delete_key(f"{path}/{number - 1}/verdict")  # all have been here since
        else:
            self._store.set(f"{path}/{number}/{me}", json.dumps(mine))
            error, verdict = self._wait_for_verdict(f"{path}/{number}/verdict")
        if error is not None:
            raise RanksDisagreeError(error)
        return verdict

    def _hear(self, path: str) -> tuple[dict[int, Any], list[int]]:
        """What the other ranks say, and those that do not come."""
        assert self._store is not None
        said, missing = {}, []
        timeout = self.timeout
        for rank in self.ranks[1:]:
            key = f"{path}/{rank}"
            try:
                self._store.wait([key], timeout)
            except RuntimeError:  # (DistStoreError is one)
                missing.append(rank)
                timeout = timedelta(milliseconds=10)  # the others have had as long
                continue
            said[rank] = json.loads(self._store.get(key))
            self._store.delete_key(key)
        return said, missing

    def _error(self, mine: Any, said: Mapping[int, Any], missing: list[int]) -> str:
        came = name_ranks([self.ranks[0], *said])
        what = f"; {came} came to {mine['next']}" if "next" in mine else ""
        return f"Not there within {self.timeout}: {name_ranks(missing)}{what}"

    def _wait_for_verdict(self, key: str) -> tuple[str | None, Any]:
        assert self._store is not None
        try:
            self._store.wait([key], self.timeout + _GRACE)
        except RuntimeError:
            first = name_ranks(self.ranks[:1])
            return f"Not there within {self.timeout + _GRACE}: {first}", None
        error, verdict = json.loads(self._store.get(key))
        return error, verdict


def name_ranks(ranks: Any) -> str:
    """As in "rank 3" or "ranks 0, 1, 2 and 61 more"."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def differences(
    said: Mapping[int, Mapping[str, str]], *, missing: str | None = None, most: int = 5
) -> list[str]:
    """What ranks say differently under the same key, at most so many lines.

    Args:
        said: by rank.
        missing: what a rank says that does not have a key; None: it need not have it.
        most: number of lines.

    Example:
        >>> differences({0: {"a": "1"}, 1: {"a": "2"}})
        ['a: 1 (rank 0), 2 (rank 1)']
    """
    lines = []
    for key in dict.fromkeys(key for values in said.values() for key in values):
        by_value: dict[str, list[int]] = {}
        for rank, values in said.items():
            value = values.get(key, missing)
            if value is not None:
                by_value.setdefault(value, []).append(rank)
        if len(by_value) > 1:
            parts = [f"{value} ({name_ranks(ranks)})" for value, ranks in by_value.items()]
            lines.append(f"{key}: {', '.join(parts)}")
    more = len(lines) - most
    return lines[:most] + ([f"and {more} more"] if more > 0 else [])
