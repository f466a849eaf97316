"""Protocols for user-provided collectives and memory, as for `FSDPModule.set_custom_all_gather`."""

# First: its error names all that this torch lacks.
from .common import torch_private as torch_private  # isort: split

from .transports.custom import AllGather as AllGather
from .transports.custom import Comm as Comm
from .transports.custom import ReduceScatter as ReduceScatter
