"""Predicts the memory and traffic of sharded training: see `estimate`."""

from .estimating import Estimate, RankEstimate, TrafficRow, estimate

__all__ = ["Estimate", "RankEstimate", "TrafficRow", "estimate"]
