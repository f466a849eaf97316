"""Chooses how to shard a model for given hardware, by simulation: see `plan`."""

from .hardware import PRESETS, Hardware, find_hardware
from .outcomes import Outcome
from .planning import plan
from .predicting import predict, sweep
from .prediction import Prediction, Sweep
from .report import Plan, Split
from .simulate import SimulatedStep, Simulator

__all__ = [
    "PRESETS",
    "Hardware",
    "Outcome",
    "Plan",
    "Prediction",
    "SimulatedStep",
    "Simulator",
    "Split",
    "Sweep",
    "find_hardware",
    "plan",
    "predict",
    "sweep",
]
