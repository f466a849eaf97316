"""Fully sharded data parallel training for PyTorch.

The names and behaviour of ``torch.distributed.fsdp.fully_shard``, implemented anew: parameters
are gathered straight into place, and what does not change between steps is computed once.
"""

from . import wrap
from .estimation import Estimate, estimate
from .explain import explain
from .fully_shard import fully_shard, replicate
from .module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .planner import Hardware, Plan, plan
from .policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from .reports import Explanation
from .strategies import shard_model
from .wrap import UnitDescription, units_of

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "Estimate",
    "Explanation",
    "FSDPModule",
    "Hardware",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Plan",
    "ShardPlacementResult",
    "UnitDescription",
    "UnshardHandle",
    "estimate",
    "explain",
    "fully_shard",
    "plan",
    "register_fsdp_forward_method",
    "replicate",
    "shard_model",
    "share_comm_ctx",
    "units_of",
    "wrap",
]
__version__ = "0.1.0"
