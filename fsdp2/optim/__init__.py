"""Gradient norms and optimizer steps for parameters that are spread over ranks.

Built on DTensors only, so it works with `fsdp2.fully_shard`, torch's FSDP2, and any other sharding.
"""

# First: its error names all that this torch lacks.
from ..common import torch_private as torch_private  # isort: split

from .exchange import Layout
from .flat import flat_step
from .in_backward import step_in_backward
from .local import dtensor_step, local_step
from .muon import Muon, orthogonalize
from .norms import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from .quantized import block_rows
from .whole import WholeTask, run_whole
from .whole_step import whole_step

__all__ = [
    "Layout",
    "Muon",
    "WholeTask",
    "block_rows",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "dtensor_step",
    "flat_step",
    "get_total_norm",
    "local_step",
    "orthogonalize",
    "run_whole",
    "step_in_backward",
    "whole_step",
]
