"""Fully sharded data parallel training for PyTorch.

The names and behaviour of ``torch.distributed.fsdp.fully_shard``, implemented anew: parameters
are gathered straight into place, and what does not change between steps is computed once.
"""

from . import wrap
from .fully_shard import fully_shard, replicate
from .module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from .wrap import UnitDescription, units_of

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "UnitDescription",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "units_of",
    "wrap",
]
__version__ = "0.1.0"
