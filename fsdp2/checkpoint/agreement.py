"""Agreement of ranks without collectives, through the process group's key-value store.

Every backend's default process group has a key-value store. It carries a few bytes per save or
load: the name of the run, and which checkpoint is the latest. No tensors and no collectives are
involved; with one process, the store is not used either.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import secrets
import warnings
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..common.failures import explained
from ..common.stores import read, read_present, wait_for
from ..dtensor.placement import all_ranks, this_rank
from .errors import (
    CheckpointError,
    CheckpointExists,
    CheckpointMismatch,
    CheckpointNotFound,
    CorruptCheckpoint,
)

# By default group. Not by `id` of its store: a program that makes one group after another would be
# given an old nonce where a new store happens to lie at an old address, on some of the ranks only.
_runs: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
_alone: list[str] = []  # the nonce without a store, once there is one
_numbers: Counter[str] = Counter()  # without a store
_looks = itertools.count()
TIMEOUT = timedelta(minutes=10)
MAX_COUNTS = 4096  # names that are remembered, so that a long run does not fill the memory


class Counts:
    """Counts how often a set of ranks did each thing together.

    Only the last `MAX_COUNTS` different things are remembered. Each set of ranks is counted
    separately, so its ranks forget the same things at the same time.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[int, ...], dict[str, int]] = {}

    def next(self, ranks: tuple[int, ...], what: str) -> int:
        """Count ``what`` once more."""
        counts = self._of.setdefault(ranks, {})
        count = counts.pop(what, 0) + 1
        counts[what] = count  # last: dictionaries keep the order
        if len(counts) > MAX_COUNTS:
            del counts[next(iter(counts))]
        return count


_attempts, _questions = Counts(), Counts()


def the_store() -> dist.Store | None:
    """The key-value store of the default process group; None with one process."""
    if len(all_ranks()) == 1:
        return None
    return dist.distributed_c10d._get_default_store()


def run_nonce() -> str:
    """Random hexadecimal digits, equal on all ranks of this run and different in every run."""
    store = the_store()
    if store is None:
        if not _alone:
            _alone.append(secrets.token_hex(8))
        return _alone[0]
    group = dist.distributed_c10d._get_default_group()
    if group not in _runs:
        _runs[group] = _agree(store, "fsdp2/run", secrets.token_hex(8))
    return _runs[group]


def _agree(store: dist.Store, key: str, value: str) -> str:
    """The value proposed by whichever rank asks first."""
    with explained("agreeing on the name of the run, for checkpoints,", all_ranks()):
        if store.add(f"{key}/count", 1) == 1:
            store.set(f"{key}/value", value)
        store.wait([f"{key}/value"], TIMEOUT)
        return store.get(f"{key}/value").decode()


def next_nonce(path: Path, ranks: tuple[int, ...]) -> str:
    """A nonce for the next attempt of ``ranks`` to save ``path``: each rank counts the attempts.

    Attempts of other sets of ranks do not count, since only some of ``ranks`` took part in them.

    Where torchrun's agent keeps the store over restarts, and with it the name of the run, they get
    other nonces by the restart count. Elsewhere the count is left out: agents count only what fails
    on their own host, so after some faults hosts differ, and no save of theirs would ever be whole.
    """
    who = _digest(ranks)
    attempt = _attempts.next(ranks, os.path.abspath(path))
    restart = 0
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return f"{run_nonce()}{restart:04x}{who}-{attempt}"


def _digest(ranks: tuple[int, ...]) -> str:
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]


def said_by_first(about: str, value: str, ranks: tuple[int, ...]) -> str:
    """The value of the first of ``ranks``; the others wait for it. All ranks must call it.

    Args:
        about: what is asked, for messages; in the same words on all ranks.
    """
    store = the_store()
    if store is None or len(ranks) == 1:
        return value
    full_key = _question(about, ranks)
    with explained(f"hearing from rank {ranks[0]} {about}", ranks[:1]):
        if this_rank() == ranks[0]:
            store.set(full_key, value)
            return value
        store.wait([full_key], TIMEOUT)
        said = store.get(full_key).decode()
    _forget(store, full_key, len(ranks) - 1)
    return said


def _question(about: str, ranks: tuple[int, ...]) -> str:
    """The key of the next question of this kind."""
    # Of these ranks: others may ask the same, as stages of a pipeline do that save to one folder.
    return f"fsdp2/{about}/{_digest(ranks)}/{_questions.next(ranks, about)}"


def _forget(store: dist.Store, key: str, num_readers: int) -> None:
    """The last of so many that have read what is under ``key`` removes it."""
    with suppress(RuntimeError):  # its host may have ended: all has been said
        if store.add(f"{key}/read", 1) == num_readers:
            for each in (key, f"{key}/read"):
                _delete(store, each)


def _delete(store: dist.Store, key: str) -> None:
    with suppress(RuntimeError):  # not all stores can
        store.delete_key(key)


def told_by_all(
    about: str, value: str, ranks: tuple[int, ...], *, warn_after_s: float | None = None
) -> list[str]:
    """Exchange a value between ``ranks``, which must all call this; returns all values, in order.

    The first rank collects and passes them on, so that the operations of the store grow with n, not
    n * n. A value that consecutive ranks share is passed on once; where all differ, the bytes still
    grow with n * n.

    Args:
        about: what they are about to do, for messages; in the same words on all ranks.
        warn_after_s: after how long the first rank warns of those that have not come.
    """
    store = the_store()
    if store is None or len(ranks) == 1:
        return [value]
    full_key = _question(about, ranks)
    with explained(f"meeting the other ranks to {about}", ranks):
        own_key = f"{full_key}/{this_rank()}"
        store.set(own_key, value)
        if this_rank() == ranks[0]:
            keys = {rank: f"{full_key}/{rank}" for rank in ranks}
            _wait_for_all(store, keys, about, warn_after_s)
            found = [each.decode() for each in read(store, list(keys.values()))]
            runs = [[value, len(list(same))] for value, same in itertools.groupby(found)]
            store.set(f"{full_key}/all", json.dumps(runs))
            _delete(store, own_key)
            return found
        store.wait([f"{full_key}/all"], TIMEOUT)
        runs = json.loads(store.get(f"{full_key}/all").decode())
    _delete(store, own_key)
    _forget(store, f"{full_key}/all", len(ranks) - 1)
    return [value for value, num in runs for _ in range(num)]


def _wait_for_all(
    store: dist.Store, keys: dict[int, str], about: str, warn_after_s: float | None
) -> None:
    """Wait for the keys of all ranks; where some do not come, say which."""
    limits = [TIMEOUT]
    if warn_after_s is not None:
        limits.insert(0, timedelta(seconds=warn_after_s))
    while limits:
        limit = limits.pop(0)
        try:
            wait_for(store, list(keys.values()), limit)
        except RuntimeError as error:
            there = read_present(store, list(keys.values()))
            absent = [rank for rank, key in keys.items() if key not in there]
            if not absent:
                return  # the last came within the limit
            text = (
                f"Rank {this_rank()} is about to {about}, as all ranks have to, and after "
                f"{limit.total_seconds():g} s these have not come: {', '.join(map(str, absent))}"
            )
            if not limits:
                raise CheckpointError(text) from error
            warnings.warn(f"{text}. Still waiting", stacklevel=5)
        else:
            break


class Together:
    """Work that ranks do in phases: either all of them finish a phase, or none.

    A context. Each `tell` inside ends a phase, and leaving the context ends the last one. An error
    on one rank is raised on all of them at the end of the phase. Checkpoint errors keep their
    class.

    Args:
        about: what they do, for messages: "load ...".
        ranks: the ranks, which must all enter the context.

    Like this::

        with Together(f"load from {root}", ranks) as ranks_too:
            read_and_check()
            ranks_too.tell()  # no rank has changed anything, or all continue
            change()
    """

    def __init__(self, about: str, ranks: tuple[int, ...]) -> None:
        self._about, self._ranks = about, ranks
        self._over = False

    def tell(self, value: str = "", *, warn_after_s: float | None = None) -> list[str]:
        """End a phase; returns the value of each rank.

        Raises:
            CheckpointError: if a rank has failed in it.
        """
        return self._meet(["", "", value], warn_after_s)

    def _meet(self, mine: list[str], warn_after_s: float | None = None) -> list[str]:
        self._over = True  # if this raises: on all ranks, or the others cannot be told
        said = told_by_all(self._about, json.dumps(mine), self._ranks, warn_after_s=warn_after_s)
        told = list(map(cache(json.loads), said))  # nearly always the same
        for rank, (kind, text, _) in zip(self._ranks, told, strict=True):
            if kind:
                raise _KINDS.get(kind, CheckpointError)(f"Rank {rank}: {text}")
        self._over = False
        return [value for _, _, value in told]

    def __enter__(self) -> Together:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None:
            self.tell()
        elif isinstance(error, Exception) and not self._over:
            name = type(error).__name__
            text = str(error) if name in _KINDS else f"{name}: {error}"
            with suppress(RuntimeError):  # this rank's own error is the one to be raised
                self._meet([name, text, ""])


_KINDS = {
    kind.__name__: kind
    for kind in (
        CheckpointError, CheckpointExists, CheckpointMismatch, CheckpointNotFound,
        CorruptCheckpoint,
    )
}  # fmt: skip


def added(key: str, num: int) -> int:
    """Add to a number that all ranks of this run share, at first 0; returns the sum."""
    store = the_store()
    if store is not None:
        with explained("telling the other ranks of a snapshot", None):
            return store.add(f"fsdp2/{key}", num)
    _numbers[key] += num
    return _numbers[key]


def forget(key: str) -> None:
    """Remove a number of `added` that no rank needs any more."""
    store = the_store()
    if store is not None:
        _delete(store, f"fsdp2/{key}")
    _numbers.pop(key, None)


def check_shared(folder: Path, ranks: tuple[int, ...]) -> None:
    """Check that all ranks see the same folder: the first writes a file, the others look for it.

    Raises:
        CheckpointError: on a rank that does not see it, as with a folder on a node's own disk.
    """
    if len(ranks) == 1:
        return
    # A new name for every call, of all ranks: the first may be one call ahead of the others.
    about = f"what to look for in {folder}"
    token = f".fsdp2-seen-{run_nonce()}-{this_rank()}-{next(_looks)}"
    if this_rank() == ranks[0]:
        try:
            (folder / token).touch()
        except OSError as error:
            said_by_first(about, "", ranks)
            raise CheckpointError(f"{folder} cannot be written to: {error}") from error
    name = said_by_first(about, token, ranks)
    if not name:
        raise CheckpointError(f"Rank {ranks[0]} cannot write to {folder}")
    # Listing the folder refreshes what network file systems have cached of it.
    if name not in os.listdir(folder):
        raise CheckpointError(
            f"Rank {this_rank()} does not see in {folder} what rank {ranks[0]} wrote there: a "
            "checkpoint needs a folder that all nodes share"
        )
    store, seen = the_store(), f"fsdp2/seen/{name}/{folder}"
    with explained(f"looking at {folder}", ranks):
        is_last = store is not None and store.add(seen, 1) == len(ranks)
    if store is not None and is_last:
        (folder / name).unlink(missing_ok=True)
        _delete(store, seen)
