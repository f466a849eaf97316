"""Choices for one unit that follow from other choices."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from fsdp2.api.no_sync import keep_sync
from fsdp2.runtime.unit_config import UnitConfig


def test_a_backward_reduces_with_sync_or_where_gradients_accumulate_sharded() -> None:
    """In whatever order the two are set, and also after `no_sync` has set them back."""
    for sync, sharded, sync_first in product((True, False), repeat=3):
        config = UnitConfig()
        if sync_first:
            config.set_sync(sync)
        config.set_accumulate_sharded(sharded)
        if not sync_first:
            config.set_sync(sync)
        assert config.reduce_grads == (sync or sharded)
        assert replace(config).reduce_grads == (sync or sharded)
        restore = keep_sync(config)
        config.set_sync(not sync)
        assert config.reduce_grads == (not sync or sharded)
        restore()
        assert config.reduce_grads == (sync or sharded)
