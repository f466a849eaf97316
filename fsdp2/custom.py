"""Collectives and memory that users bring: `FSDPModule.set_custom_all_gather` and its like."""

# First: its error names all that this torch lacks.
from .common import torch_private as torch_private  # isort: split

from .comm.custom import AllGather as AllGather
from .comm.custom import Comm as Comm
from .comm.custom import ReduceScatter as ReduceScatter
