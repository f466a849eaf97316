"""Predicts the cost of sharded training without running it, and chooses how to shard.

`estimate` computes the memory and traffic of a step, and `predict` also its time. `sweep` compares
many configurations, and `plan` searches for the best one.
"""

from ..api.shard_model import Sharding
from .cluster import Cluster
from .comparison import Compared, Comparison, compare
from .estimating import Estimate, RankEstimate, TrafficRow, estimate
from .hardware.hardware import PRESETS, Hardware, find_hardware
from .hardware.measure import measure, write_hardware
from .outcomes import Outcome
from .plan_report import Plan, Split
from .planning import plan, predict, sweep
from .prediction import Prediction, Sweep
from .simulation.simulate import SimulatedStep, Simulator
from .trace.kernels import Kernels
from .trace.op_costs import register_cost
from .trace.optimizers import StateOffload
from .training_cost import Offer, TrainingCost, training_cost
from .workload import Workload

__all__ = [
    "PRESETS",
    "Cluster",
    "Compared",
    "Comparison",
    "Estimate",
    "Hardware",
    "Kernels",
    "Offer",
    "Outcome",
    "Plan",
    "Prediction",
    "RankEstimate",
    "Sharding",
    "SimulatedStep",
    "Simulator",
    "Split",
    "StateOffload",
    "Sweep",
    "TrafficRow",
    "TrainingCost",
    "Workload",
    "compare",
    "estimate",
    "find_hardware",
    "measure",
    "plan",
    "predict",
    "register_cost",
    "sweep",
    "training_cost",
    "write_hardware",
]
