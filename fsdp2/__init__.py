"""Fully sharded data parallel training for PyTorch.

The names and behaviour of ``torch.distributed.fsdp.fully_shard``, implemented anew: parameters
are gathered straight into place, and what does not change between steps is computed once.
"""

# First: it warns of a torch that was not tested before anything else can fail on it.
from .common.versions import __version__ as __version__  # isort: split

from . import optim, wrap
from .api.full_state import full_state_dict, iter_full_tensors, load_full_state_dict
from .api.fully_shard import fully_shard, replicate
from .api.functions import register_fsdp_forward_method, share_comm_ctx
from .api.initialization import broadcast_replicas, init_on_whole_tensors, materialize
from .api.module import FSDPModule, UnshardHandle
from .api.shard_model import shard_model
from .comm.store_exchange import RanksDisagreeError
from .common import torch_private as torch_private  # looks private names of torch up
from .describe.explain import explain
from .describe.explanation import Explanation
from .describe.rank_checks import check_ranks_agree, watch_ranks
from .estimation import Estimate, estimate
from .optim import clip_grad_norm_, get_total_norm
from .planner import Hardware, Plan, plan
from .policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from .profiling import Profile, profile
from .runtime.finalization import GradientReductionHandle
from .wrap import UnitDescription, units_of

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Estimate",
    "Explanation",
    "FSDPModule",
    "GradientReductionHandle",
    "Hardware",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Plan",
    "Profile",
    "RanksDisagreeError",
    "ShardPlacementResult",
    "UnitDescription",
    "UnshardHandle",
    "broadcast_replicas",
    "check_ranks_agree",
    "clip_grad_norm_",
    "estimate",
    "explain",
    "full_state_dict",
    "fully_shard",
    "get_total_norm",
    "init_on_whole_tensors",
    "iter_full_tensors",
    "load_full_state_dict",
    "materialize",
    "optim",
    "plan",
    "profile",
    "register_fsdp_forward_method",
    "replicate",
    "shard_model",
    "share_comm_ctx",
    "units_of",
    "watch_ranks",
    "wrap",
]


def __dir__() -> list[str]:
    """The public names and packages; what else is here serves those."""
    return sorted([*__all__, "__version__", "checkpoint", "custom", "experts", "testing"])
