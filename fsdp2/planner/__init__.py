"""Chooses how to shard a model for given hardware, by simulation: see `plan`."""

from .comparison import Compared, Comparison, compare
from .hardware import PRESETS, Hardware, find_hardware
from .measure import measure, write_hardware
from .outcomes import Outcome
from .planning import plan
from .predicting import predict, sweep
from .prediction import Prediction, Sweep
from .report import Plan, Split
from .simulate import SimulatedStep, Simulator
from .training_cost import Offer, TrainingCost, training_cost

__all__ = [
    "PRESETS",
    "Compared",
    "Comparison",
    "Hardware",
    "Offer",
    "Outcome",
    "Plan",
    "Prediction",
    "SimulatedStep",
    "Simulator",
    "Split",
    "Sweep",
    "TrainingCost",
    "compare",
    "find_hardware",
    "measure",
    "plan",
    "predict",
    "sweep",
    "training_cost",
    "write_hardware",
]
