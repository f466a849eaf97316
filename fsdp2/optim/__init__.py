"""Gradient norms and optimizer steps for parameters that are spread over ranks.

Built on DTensors alone, so it serves `fsdp2.fully_shard`, torch's own, and any other sharding.
"""

from .norms import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

__all__ = [
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_total_norm",
]
