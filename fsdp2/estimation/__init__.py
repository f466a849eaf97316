"""Predicts the memory and traffic of sharded training: see `estimate`."""

from .estimating import Estimate, RankEstimate, TrafficRow, estimate
from .op_costs import register_cost

__all__ = ["Estimate", "RankEstimate", "TrafficRow", "estimate", "register_cost"]
