"""Predicts the memory and traffic of sharded training: see `estimate`."""

from .estimating import Estimate, RankEstimate, TrafficRow, estimate
from .kernels import Kernels
from .op_costs import register_cost
from .paged_state import StateOffload

__all__ = [
    "Estimate",
    "Kernels",
    "RankEstimate",
    "StateOffload",
    "TrafficRow",
    "estimate",
    "register_cost",
]
