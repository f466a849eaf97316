"""Ranks compare what they are about to do, through the process group's key-value store.

This does not use collectives, which hang if ranks disagree. Each rank writes a few checksums under
its key and increments a counter. The last rank reads and compares all checksums and writes the
verdict, for which the others wait. So a meeting takes four short requests per rank, and one long
request by the last rank, for any number of ranks. The compared text itself is sent only if the
checksums differ, and only by one rank of each kind.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import zlib
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ...common.failures import ADVICE, explained
from ...common.stores import read_present

# How much longer than the timeout a rank waits for the verdict of the one that compares.
GRACE_S = 10.0
# Details are compared for at most this many kinds of ranks: there may be as many kinds as ranks,
# and one rank reads them all.
MAX_KINDS = 8
MAX_LINES = 5  # of differences
TITLE = "Ranks disagree about the model:"

Topics = Mapping[str, Mapping[str, str]]
# Keyed by default group, whose store has the keys. Not per `StoreExchange`: two models over the
# same ranks share a path, and rounds of a later one must not find the keys of an earlier one.
_rounds: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


class RanksDisagreeError(RuntimeError):
    """Ranks differ where they must agree. The message names the ranks and the difference."""


def can_meet(backend: str) -> bool:
    """Whether the ranks are separate processes that share a store.

    Args:
        backend: of the ranks' group.
    """
    # In worlds of one process (fake, threads, simulations) the other ranks would never come.
    if backend in ("fake", "threaded"):
        return False
    try:
        store: Any = dist.distributed_c10d._get_default_store()
    except (RuntimeError, ValueError, KeyError):  # MPI has none
        return False
    # Only stores that other processes can reach: a HashStore belongs to this process.
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore | dist.FileStore)


class StoreExchange:
    """A set of ranks that meet repeatedly, each the same number of times.

    Args:
        purpose: meetings for different purposes are counted separately.
        ranks: numbers in the default group, including this rank's.
        timeout_s: how long to wait for a rank that does not come, in seconds.
        warn_after_s: after how many seconds one of the waiting ranks names those that are missing.
    """

    def __init__(
        self,
        purpose: str,
        ranks: tuple[int, ...],
        timeout_s: float,
        *,
        warn_after_s: float | None = None,
    ) -> None:
        self.ranks = ranks
        self.timeout_s, self._warn_after_s = timeout_s, warn_after_s
        self._store: Any = None
        if len(ranks) > 1:
            self._store = dist.distributed_c10d._get_default_store()
            self._counts = _rounds.setdefault(dist.distributed_c10d._get_default_group(), Counter())
            self._me = dist.get_rank()
        # A digest: a store moves keys with every request, and thousands of ranks make a long one.
        name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        self._path = f"fsdp2/{purpose}/{len(ranks)}-{name}"

    def compare(self, topics: Topics, about: str) -> dict[str, list[str]]:
        """`say` and `hear`."""
        self.say(topics, about)
        return self.hear()

    def say(self, topics: Topics, about: str) -> None:
        """Join the meeting; the last rank to join compares the topics of all.

        Args:
            topics: by topic, values of this rank by name. Ranks that have a topic must have the
                same values; other ranks need not have it. All ranks must have all names of the
                topic "".
            about: what this rank is about to do, for errors: "run the first forward".
        """
        if self._store is None:
            return
        self._counts[self._path] += 1
        self._round = self._counts[self._path]
        self._base = f"{self._path}/{self._round}"
        self._topics, self._about = topics, about
        texts = {topic: repr(sorted(held.items())).encode() for topic, held in topics.items()}
        checksums = {topic: f"{zlib.crc32(text):08x}" for topic, text in texts.items()}
        with explained(self._what, None):
            # First write, then count: the rank that counts last reads what all have written. Then
            # claim, since a rank whose time is up may be writing another verdict just now.
            self._store.set(self._key(self._me), json.dumps([self._round, checksums]))
            if self._store.add(f"{self._base}/count", 1) == len(self.ranks) and self._claim():
                self._judge()

    def hear(self) -> dict[str, list[str]]:
        """Wait for the verdict.

        Returns:
            By topic, the differences between ranks, one line each; the same on every rank.

        Raises:
            RanksDisagreeError: with the ranks that did not come.
        """
        if self._store is None:
            return {}
        with explained(self._what, None):
            verdict = self._wait_for_verdict()
            if "asked" in verdict:
                if self._me in verdict["asked"]:
                    self._store.set(f"{self._base}/details/{self._me}", json.dumps(self._topics))
                if verdict["by"] == self._me:
                    self._judge_details(verdict)
                # Longer than the rank that collects the details waits for the slowest of them.
                if not self._wait(f"{self._base}/differences", self.timeout_s + GRACE_S):
                    raise RanksDisagreeError(
                        f"{self._here}, but ranks differ, and {name_ranks(verdict['asked'])} did "
                        "not say in what"
                    )
                verdict = json.loads(self._store.get(f"{self._base}/differences"))
        if "missing" in verdict:
            raise RanksDisagreeError(self._text_of_missing(verdict["missing"]))
        return verdict.get("differences", {})

    # -- waiting ------------------------------------------------------------------------------

    @property
    def _what(self) -> str:
        return f"meeting the other ranks to {self._about}"

    def _key(self, rank: int) -> str:
        # Without the round: each rank overwrites its key in the next round, so the store does not
        # grow. No rank does so early, as it first waits for the verdict of this round.
        return f"{self._path}/said/{rank}"

    def _wait(self, key: str, timeout_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError:  # (a DistStoreError; of a FileStore a plain RuntimeError)
            # The key may exist by now, or this may be another error. Ask once more.
            return self._store.check([key])
        return True

    def _wait_for_verdict(self) -> dict[str, Any]:
        key, left_s, warn_s = f"{self._base}/verdict", self.timeout_s, self._warn_after_s
        there = False
        if warn_s is not None and warn_s < left_s:
            there = self._wait(key, warn_s)
            left_s -= warn_s
            # One warning for all ranks that wait, not one from each of thousands.
            if not there and self._store.add(f"{self._base}/warned", 1) == 1:
                warnings.warn(
                    f"{self._here}, but {name_ranks(self._missing())} did not come within "
                    f"{warn_s:g} s. Still waiting, for up to {self.timeout_s:g} s",
                    stacklevel=2,
                )
        if not there and not self._wait(key, left_s):
            # One of the waiting ranks decides for all. If each checked for itself, one could see
            # the last rank come and another not, and the ranks would diverge.
            if self._claim():
                missing = self._missing()
                if missing:
                    self._store.set(key, json.dumps({"missing": missing}))
                else:
                    self._judge()  # all have come, but the last one died before it claimed
            if not self._wait(key, GRACE_S):
                return {"missing": self._missing()}
        return json.loads(self._store.get(key))

    def _missing(self) -> list[int]:
        """Ranks that have not come to this round."""
        said = read_present(self._store, [self._key(rank) for rank in self.ranks])
        return [r for r in self.ranks if json.loads(said.get(self._key(r), "[0]"))[0] < self._round]

    @property
    def _here(self) -> str:
        return f"Rank {self._me} is about to {self._about}, as all ranks have to at the same time"

    def _text_of_missing(self, missing: list[int]) -> str:
        late = f" within {self.timeout_s:g} s"
        if missing == [self._me]:
            return f"{self._here}, but it did not come{late}: the others have given up"
        return f"{self._here}, but {name_ranks(missing)} did not come{late}. {ADVICE}"

    # -- comparing ----------------------------------------------------------------------------

    def _claim(self) -> bool:
        """Whether this rank is the one to write the verdict."""
        # (`add` is atomic in the store.)
        return self._store.add(f"{self._base}/claim", 1) == 1

    def _judge(self) -> None:
        """Compare the checksums of all ranks; for the one that has the claim."""
        said = read_present(self._store, [self._key(rank) for rank in self.ranks]).values()
        checksums = {rank: json.loads(data)[1] for rank, data in zip(self.ranks, said, strict=True)}
        kinds = kinds_of(checksums)
        verdict: dict[str, Any] = {}
        if kinds:
            shown = {topic: by_kind[:MAX_KINDS] for topic, by_kind in kinds.items()}
            asked = sorted({ranks[0] for by_kind in shown.values() for ranks in by_kind})
            verdict = {"asked": asked, "by": self._me}
            self._kinds = shown
        self._store.set(f"{self._base}/verdict", json.dumps(verdict))
        for key in ("count", "claim", "verdict", "differences", "warned"):
            # Of the previous round: all ranks have left it, since all have come to this one.
            self._store.delete_key(f"{self._path}/{self._round - 1}/{key}")

    def _judge_details(self, verdict: Mapping[str, Any]) -> None:
        """Compare one rank of each kind; the others of its kind have the same."""
        said, silent = {}, []
        for rank in verdict["asked"]:
            key = f"{self._base}/details/{rank}"
            if self._wait(key, self.timeout_s):
                said[rank] = json.loads(self._store.get(key))
                self._store.delete_key(key)
            else:
                silent.append(rank)
        found: dict[str, Any] = {"missing": silent}
        if not silent:
            found = {"differences": {}}
            for topic, kinds in self._kinds.items():
                of_kinds = {tuple(ranks): said[ranks[0]][topic] for ranks in kinds}
                lines = differences(of_kinds, missing=None if topic else "nothing")
                if lines:
                    found["differences"][topic] = lines
        self._store.set(f"{self._base}/differences", json.dumps(found))


def kinds_of(checksums: Mapping[int, Mapping[str, str]]) -> dict[str, list[list[int]]]:
    """For each topic on which ranks differ, its kinds: lists of ranks with equal checksums.

    Args:
        checksums: by rank and topic.

    Example:
        >>> kinds_of({0: {"a": "1"}, 1: {"a": "2"}, 2: {"a": "1", "b": "3"}})
        {'a': [[0, 2], [1]]}
    """
    by_topic: dict[str, dict[str, list[int]]] = {}
    for rank, said in checksums.items():
        for topic, checksum in said.items():
            by_topic.setdefault(topic, {}).setdefault(checksum, []).append(rank)
    return {topic: list(kinds.values()) for topic, kinds in by_topic.items() if len(kinds) > 1}


def name_ranks(ranks: Any) -> str:
    """Text for ``ranks``: "rank 3" or "ranks 0, 1, 2 and 61 more"."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def differences(
    said: Mapping[tuple[int, ...], Mapping[str, str]],
    *,
    missing: str | None = None,
    most: int = MAX_LINES,
) -> list[str]:
    """Differences between the values of ranks under the same key, in at most ``most`` lines.

    Args:
        said: values by key, for each tuple of ranks that have the same values.
        missing: the text for ranks that do not have a key; None: they need not have it.
        most: maximum number of lines.

    Example:
        >>> differences({(0, 2): {"a": "1"}, (1,): {"a": "2"}})
        ['a: 1 (ranks 0, 2), 2 (rank 1)']
    """
    lines = []
    for key in dict.fromkeys(key for values in said.values() for key in values):
        by_value: dict[str, list[int]] = {}
        for ranks, values in said.items():
            value = values.get(key, missing)
            if value is not None:
                by_value.setdefault(value, []).extend(ranks)
        if len(by_value) > 1:
            parts = [f"{value} ({name_ranks(ranks)})" for value, ranks in by_value.items()]
            lines.append(f"{key}: {', '.join(parts)}")
    more = len(lines) - most
    return lines[:most] + ([f"and {more} more"] if more > 0 else [])
