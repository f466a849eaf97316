"""The optional parts of the library that are active, in the order in which they are called.

The kernel depends on none of them: each registers itself when it is imported.
"""

from torch import nn

from .api import comm_settings, default_step, library_methods, lookups, no_sync, torch_errors
from .api.module import add_methods
from .features import (
    deferred_weight_grads,
    double_backward,
    finalization,
    frozen_cache,
    functional_call,
    gather_budget,
    inplace_inputs,
    middle,
    parameter_hooks,
    partial_gradients,
    replaced_params,
    secondary_shards,
    spmd_types,
    steps_in_backward,
    transforms,
    unused_parameters,
)
from .features.early_free import early_free
from .features.side_by_side import units as side_by_side
from .features.tensor_subclasses import extension
from .guards import gathered_writes, lost_writes, optimizer_checks, requested_gradients, unwritten
from .guards.rank_agreement import first_forward, initial_values
from .runtime.events import registry
from .transports import custom
from .transports.compressed import checks as comm_policies
from .transports.compressed import transports as compressed
from .transports.host import exchange

# (Imports come in alphabetical order.)
PARTS = (
    *(custom, compressed, comm_policies, exchange),
    *(secondary_shards, early_free, deferred_weight_grads, unused_parameters, finalization),
    *(gather_budget, frozen_cache, functional_call),
    *(replaced_params, parameter_hooks, spmd_types, extension),
    *(partial_gradients, double_backward, middle, side_by_side, steps_in_backward),
    inplace_inputs,
    transforms,
    *(first_forward, initial_values, gathered_writes, optimizer_checks, requested_gradients),
    *(lost_writes, unwritten, library_methods, lookups, default_step, torch_errors),
)
registry.arrange([module.__name__ for module in PARTS])


class PartMethods(nn.Module):
    """The methods that parts give to sharded modules."""

    # How it communicates.
    set_custom_all_gather = comm_settings.set_custom_all_gather
    set_custom_reduce_scatter = comm_settings.set_custom_reduce_scatter
    set_comm_policy = comm_settings.set_comm_policy
    set_all_reduce_hook = comm_settings.set_all_reduce_hook
    set_gradient_divide_factor = comm_settings.set_gradient_divide_factor
    set_reduce_scatter_divide_factor = comm_settings.set_reduce_scatter_divide_factor
    set_force_sum_reduction_for_comms = comm_settings.set_force_sum_reduction_for_comms
    set_separate_reduce_scatter_group = comm_settings.set_separate_reduce_scatter_group
    set_reduce_scatter_max_input_buffers = comm_settings.set_reduce_scatter_max_input_buffers
    set_allocate_memory_from_process_group_for_comm = (
        comm_settings.set_allocate_memory_from_process_group_for_comm
    )
    set_symm_mem_for_comm = comm_settings.set_symm_mem_for_comm
    set_reduce_scatter_unused_params = unused_parameters.set_reduce_scatter_unused_params
    # What is reduced.
    no_sync = no_sync.no_sync
    # What stays gathered, and for how long.
    set_max_gathered_bytes = gather_budget.set_max_gathered_bytes
    set_keep_frozen_gathered = frozen_cache.set_keep_frozen_gathered
    # The caller ends iterations.
    set_manual_backward_finalization = finalization.set_manual_backward_finalization
    finalize_backward = finalization.finalize_backward
    # Errors with advice.
    load_state_dict = torch_errors.load_state_dict


add_methods({name: each for name, each in vars(PartMethods).items() if not name.startswith("_")})
