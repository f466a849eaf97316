"""Fully sharded data parallel training for PyTorch.

The names and behaviour of ``torch.distributed.fsdp.fully_shard``, implemented anew: parameters
are gathered straight into place, and what does not change between steps is computed once.
"""

from .full_state import full_state_dict, iter_full_tensors, load_full_state_dict
from .fully_shard import fully_shard
from .initialization import init_on_whole_tensors
from .module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "UnshardHandle",
    "full_state_dict",
    "fully_shard",
    "init_on_whole_tensors",
    "iter_full_tensors",
    "load_full_state_dict",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
__version__ = "0.1.0"
