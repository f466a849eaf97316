"""Saving and loading by one of n ranks: what the rank itself does, counted.

- save: one rank captures, plans and writes its part.
- waiting: a rank that has written looks whether all others have, and one has not. Every rank of a
  save looks once or more, and again every quarter of a second.
- commit: the rank that finds all markers commits. Others may at the same time.
- load: one rank opens the checkpoint, matches it with a model and an optimizer on as many ranks as
  saved, and reads its part.

What ranks tell each other over the key-value store is not part of any.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

from .counting import counting, isolated
from .curves import Counted, Curves
from .synthesis import (
    attempt_of,
    build,
    bytes_beside,
    checkpointer_of,
    give_state,
    load,
    rank_of,
    save,
    synthesise,
    without_marker_of,
)

LAYOUTS = ("auto", "shared", "per-rank")


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is removed at the end; TMPDIR says on which disk."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-scale-") as folder:
        yield Path(folder)


@lru_cache
def measured(n: int, tensors: int, layout: str) -> dict[str, Counted]:
    """All counts of one point: they are of the same checkpoint, which takes long to make."""
    with scratch() as root:
        counted = {"save": isolated(_save, root, n, tensors, layout)}
        counted["waiting"], counted["commit"] = isolated(_commit, root, n)
        counted["load"] = isolated(_load, root, n, tensors)
        return counted


def _save(root: Path, n: int, tensors: int, layout: str) -> Counted:
    counted: Counted = {}
    with rank_of(n, n // 2), scratch() as other:
        model, optimizer = build(tensors)
        give_state(model, optimizer)
        save(model, optimizer, other, layout, "first")  # and with it all that loads late
        with counting(counted):
            own = save(model, optimizer, other, layout)
        synthesise(root, own, layout)
    return counted


def _commit(root: Path, n: int) -> tuple[Counted, Counted]:
    waiting: Counted = {}
    counted: Counted = {}
    attempt = attempt_of(root, 0, tuple(range(n)))
    with without_marker_of(root, n - 1, n):
        for _ in range(n):  # until it knows which marker is missing
            attempt.commit()
        with counting(waiting):
            committed = attempt.commit()
    assert not committed
    with counting(counted):
        committed = attempt_of(root, 0, tuple(range(n))).commit()  # not one that has waited
    assert committed
    counted["bytes beside data files"] = bytes_beside(root)
    counted["files"] = float(sum(path.is_file() for path in root.rglob("*")))
    return waiting, counted


def _load(root: Path, n: int, tensors: int) -> Counted:
    counted: Counted = {}
    with rank_of(n, n // 2):
        model, optimizer = build(tensors)
        checkpoints = checkpointer_of(root)
        with counting(counted):
            loaded = load(checkpoints, model, optimizer)
        assert loaded.verified
        assert loaded.same_ranks
        assert len(optimizer.state) == tensors
    data = float(loaded.bytes_read)
    counted["bytes read besides data"] = counted["bytes read"] - data
    counted["bytes besides data, all ranks"] = n * counted["bytes read besides data"]
    counted["files opened, all ranks"] = n * counted["files opened"]
    return counted


def _point(which: str, n: int, tensors: int = 30, layout: str = "auto") -> Counted:
    return measured(n, tensors, layout)[which]


CURVES: Curves = {name: partial(_point, name) for name in ("save", "waiting", "commit", "load")}
