"""Chooses how to shard a model for given hardware, by simulation: see `plan`."""

from .hardware import PRESETS, Hardware, find_hardware
from .planning import Outcome, Plan, plan
from .report import Split
from .simulate import SimulatedStep, Simulator

__all__ = [
    "PRESETS",
    "Hardware",
    "Outcome",
    "Plan",
    "SimulatedStep",
    "Simulator",
    "Split",
    "find_hardware",
    "plan",
]
