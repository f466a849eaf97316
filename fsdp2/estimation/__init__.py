"""Memory and traffic of sharded training, told before there is any: see `estimate`."""

from .estimating import Estimate, RankEstimate, TrafficRow, estimate

__all__ = ["Estimate", "RankEstimate", "TrafficRow", "estimate"]
