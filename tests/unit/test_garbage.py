"""When Python collects garbage: settings come back, and what was made in the context goes."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest

from fsdp2.common.garbage import no_full_collections, one_collection


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_no_full_collections_looks_at_young_objects_only() -> None:
    before = gc.get_threshold()
    old = [Node()]
    gc.collect()
    with suppress(KeyError), no_full_collections():
        full = gc.get_stats()[2]["collections"]
        dead, aged = weakref.ref(Node()), weakref.ref(old.pop())
        kept = [[] for _ in range(200_000)]  # so many that a full collection would be due
        assert dead() is None
        assert aged() is not None
        assert gc.get_stats()[2]["collections"] == full
        raise KeyError
    assert len(kept) == 200_000
    assert gc.get_threshold() == before


@pytest.mark.parametrize("enabled", [True, False])
def test_one_collection_at_the_end(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(KeyError), one_collection():
            dead = weakref.ref(Node())
            kept = [Node() for _ in range(10_000)]
            assert dead() is not None
            raise KeyError
        assert dead() is None
        assert all(node.me is node for node in kept)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
