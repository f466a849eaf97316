"""Records the work of a model's units, step by step: see `profile`."""

from .events import Recording
from .measures import Measures, StepMeasures, Traffic, UnitMeasures
from .profiling import Profile, profile

__all__ = [
    "Measures",
    "Profile",
    "Recording",
    "StepMeasures",
    "Traffic",
    "UnitMeasures",
    "profile",
]
