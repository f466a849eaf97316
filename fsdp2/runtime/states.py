"""The states of a communication unit: where its parameters are. `TRANSITIONS` has all changes."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where the parameters of a unit are."""

    SHARDED = "sharded"
    SECONDARY = "secondary"  # sharded, and the next gather is from a `SecondarySource`
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    PARTLY_FREED = "partly freed"  # unsharded, but for parameters that were freed early

    __hash__ = object.__hash__  # Enum's own is in Python; `TRANSITIONS` is asked in every hook


RESHARDED = (State.SHARDED, State.SECONDARY)  # no gathered storage
GATHERED = (State.UNSHARDED, State.PARTLY_FREED)  # gathered, and compute has waited for it

TRANSITIONS = {
    # (from, event): to
    (State.SHARDED, "start_unshard"): State.GATHERING,
    (State.SECONDARY, "start_unshard"): State.GATHERING,
    (State.GATHERING, "wait_unshard"): State.UNSHARDED,
    (State.UNSHARDED, "free_early"): State.PARTLY_FREED,
    (State.PARTLY_FREED, "free_early"): State.PARTLY_FREED,
    (State.UNSHARDED, "reshard"): State.SHARDED,
    (State.PARTLY_FREED, "reshard"): State.SHARDED,
    (State.SHARDED, "keep_secondary"): State.SECONDARY,
    (State.SECONDARY, "drop_secondary"): State.SHARDED,
}


class AfterForward(Enum):
    """What happens to gathered parameters when a forward of their unit ends."""

    KEEP = "keep"  # gathered and registered
    KEEP_TO_REPEAT = "keep to repeat"  # the same, until another unit runs or forward ends
    KEEP_FOR_BACKWARD = "keep for backward"  # gathered; users see the shards
    FREE = "free"
    FREE_TO_SECONDARY = "free to secondary"  # larger shards stay, for a cheaper gather
