"""Protocols for user-provided collectives and memory, as for `FSDPModule.set_custom_all_gather`."""

# First: its error names all that this torch lacks.
from .common import torch_private as torch_private  # isort: split

from .comm.custom import AllGather as AllGather
from .comm.custom import Comm as Comm
from .comm.custom import ReduceScatter as ReduceScatter
