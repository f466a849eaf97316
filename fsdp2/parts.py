"""The optional parts of the library that are on, in the order in which they are asked.

The kernel knows none of them: each registers itself where it is imported.
"""

from .features import (
    finalization,
    frozen_cache,
    functional_call,
    gather_budget,
    middle,
    parameter_hooks,
    partial_gradients,
    spmd_types,
    steps_in_backward,
)
from .features.early_free import early_free
from .features.side_by_side import units as side_by_side
from .features.tensor_subclasses import extension
from .guards import gathered_writes, lost_writes, optimizer_checks, requested_gradients, unwritten
from .guards.rank_agreement import first_forward, initial_values
from .runtime.events import registry
from .transports import custom
from .transports.compressed import transports as compressed
from .transports.host import exchange

# (Imports come in alphabetical order.)
PARTS = (
    *(custom, compressed, exchange),
    *(early_free, finalization, gather_budget, frozen_cache, functional_call),
    *(parameter_hooks, spmd_types, extension),
    *(partial_gradients, middle, side_by_side, steps_in_backward),
    *(first_forward, initial_values, gathered_writes, optimizer_checks, requested_gradients),
    *(lost_writes, unwritten),
)
registry.arrange([module.__name__ for module in PARTS])
