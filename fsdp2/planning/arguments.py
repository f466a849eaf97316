"""Checks of arguments that `plan` and `predict` have in common."""

from __future__ import annotations

import math
from typing import Any

from .hardware.hardware import Hardware


def checked_budget(budget: object, hardware: Hardware) -> int:
    """Bytes of a GPU that a rank may use; None: all of them.

    Raises:
        ValueError: if it is not a positive number.
        TypeError: if it is no number.
    """
    if budget is None:
        return int(hardware.memory_bytes)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise TypeError(f"memory_budget must be a number of bytes or None, got {budget!r}")
    if not (budget >= 1 and math.isfinite(budget)):
        raise ValueError(
            f"memory_budget must be a positive number of bytes, got {budget}; None is the whole "
            "memory of the GPU"
        )
    return int(budget)


def check_ranks(num_ranks: Any, hardware: Hardware) -> None:
    """Check a number of ranks.

    Raises:
        ValueError: if several nodes would not be full.
        TypeError: if it is not an int.
    """
    if not isinstance(num_ranks, int) or isinstance(num_ranks, bool):
        raise TypeError(f"num_ranks must be an int, got {num_ranks!r}")
    node = hardware.ranks_per_node
    if num_ranks < 1 or (num_ranks > node and num_ranks % node):
        raise ValueError(
            f"num_ranks must be positive, and a multiple of the {node} GPUs of a node if there are "
            f"several nodes; got {num_ranks}"
        )
