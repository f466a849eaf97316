"""Fully sharded data parallel training for PyTorch.

The names and behaviour of ``torch.distributed.fsdp.fully_shard``, implemented anew: parameters
are gathered straight into place, and what does not change between steps is computed once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# First: it warns of a torch that was not tested before anything else can fail on it.
from .common.versions import __version__ as __version__

# Public names are imported at their first use (PEP 562). Importing any file of a package runs its
# __init__.py, so this is what lets `fsdp2 --help` do without torch, and a training script without
# the planner. Type checkers read the imports; `_HOME` says the same at run time, and
# tests/unit/test_imports.py compares the two.
if TYPE_CHECKING:
    from . import optim, planning, profiling, wrap
    from .api.deterministic import deterministic
    from .api.forward_methods import register_fsdp_forward_method
    from .api.full_state import full_state_dict, iter_full_tensors, load_full_state_dict
    from .api.fully_shard import fully_shard
    from .api.functions import share_comm_ctx
    from .api.initialization import broadcast_replicas, init_on_whole_tensors, materialize
    from .api.merging import merge_units
    from .api.module import FSDPModule, UnshardHandle
    from .api.replicate import replicate
    from .api.shard_model import Sharding, shard_model
    from .batches import split_batch
    from .describe.explain import explain
    from .describe.explanation import Explanation
    from .describe.hangs import HangReport, HangWarning, watch_hangs
    from .describe.rank_checks import check_ranks_agree, watch_ranks
    from .features.finalization import GradientReductionHandle
    from .guards.rank_agreement.store_exchange import RanksDisagreeError
    from .offload.activations import ActivationBytes, offload_activations
    from .offload.optimizer_state import offload_optimizer
    from .optim import clip_grad_norm_
    from .planning import estimate, plan, predict
    from .policy import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardPlacementResult,
    )
    from .profiling import profile
    from .transports.compressed.policy import CommPolicy

__all__ = [
    "ActivationBytes",
    "CPUOffloadPolicy",
    "CommPolicy",
    "DataParallelMeshDims",
    "Explanation",
    "FSDPModule",
    "GradientReductionHandle",
    "HangReport",
    "HangWarning",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RanksDisagreeError",
    "ShardPlacementResult",
    "Sharding",
    "UnshardHandle",
    "broadcast_replicas",
    "check_ranks_agree",
    "clip_grad_norm_",
    "deterministic",
    "estimate",
    "explain",
    "full_state_dict",
    "fully_shard",
    "init_on_whole_tensors",
    "iter_full_tensors",
    "load_full_state_dict",
    "materialize",
    "merge_units",
    "offload_activations",
    "offload_optimizer",
    "optim",
    "plan",
    "planning",
    "predict",
    "profile",
    "profiling",
    "register_fsdp_forward_method",
    "replicate",
    "shard_model",
    "share_comm_ctx",
    "split_batch",
    "watch_hangs",
    "watch_ranks",
    "wrap",
]

# The file or folder that defines each name.
_HOME = {
    "ActivationBytes": "offload.activations",
    "CPUOffloadPolicy": "policy",
    "CommPolicy": "transports.compressed.policy",
    "DataParallelMeshDims": "policy",
    "Explanation": "describe.explanation",
    "FSDPModule": "api.module",
    "GradientReductionHandle": "features.finalization",
    "HangReport": "describe.hangs",
    "HangWarning": "describe.hangs",
    "MixedPrecisionPolicy": "policy",
    "OffloadPolicy": "policy",
    "RanksDisagreeError": "guards.rank_agreement.store_exchange",
    "ShardPlacementResult": "policy",
    "Sharding": "api.shard_model",
    "UnshardHandle": "api.module",
    "broadcast_replicas": "api.initialization",
    "check_ranks_agree": "describe.rank_checks",
    "clip_grad_norm_": "optim",
    "deterministic": "api.deterministic",
    "estimate": "planning",
    "explain": "describe.explain",
    "full_state_dict": "api.full_state",
    "fully_shard": "api.fully_shard",
    "init_on_whole_tensors": "api.initialization",
    "iter_full_tensors": "api.full_state",
    "load_full_state_dict": "api.full_state",
    "materialize": "api.initialization",
    "merge_units": "api.merging",
    "offload_activations": "offload.activations",
    "offload_optimizer": "offload.optimizer_state",
    "plan": "planning",
    "predict": "planning",
    "profile": "profiling",
    "register_fsdp_forward_method": "api.forward_methods",
    "replicate": "api.replicate",
    "shard_model": "api.shard_model",
    "share_comm_ctx": "api.functions",
    "split_batch": "batches",
    "watch_hangs": "describe.hangs",
    "watch_ranks": "describe.rank_checks",
}
_MODULES = (
    "checkpoint",
    "custom",
    "experts",
    "optim",
    "planning",
    "policy",
    "profiling",
    "testing",
    "wrap",
)
# Names that were here before 0.1.0, and go with 0.2.0.
_MOVED = {
    "Cluster": "planning",
    "Estimate": "planning",
    "Hardware": "planning",
    "Kernels": "planning",
    "Plan": "planning",
    "Prediction": "planning",
    "Profile": "profiling",
    "StateOffload": "planning",
    "Sweep": "planning",
    "TrainingCost": "planning",
    "UnitDescription": "wrap",
    "Workload": "planning",
    "get_total_norm": "optim",
    "register_cost": "planning",
    "sweep": "planning",
    "training_cost": "planning",
    "units_of": "wrap",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _MOVED:
        import warnings

        home = _MOVED[name]
        warnings.warn(f"fsdp2.{name} is fsdp2.{home}.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(import_module(f".{home}", __name__), name)
    if name not in _HOME:
        from .common.suggestions import did_you_mean

        hint = "" if name.startswith("_") else did_you_mean(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    # An ImportError with all private names that this torch lacks comes before any other error.
    import_module(".common.torch_private", __name__)
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    """The public names and packages; what else is here serves those."""
    return sorted({*__all__, *_MODULES, "__version__"})
