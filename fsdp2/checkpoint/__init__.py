"""Sharded checkpoints: ordinary safetensors files, written and read without communication.

`save_model` and `load_model` handle weights, `Checkpointer` the exact state of training.
"""

# First: its error names all that this torch lacks.
from ..common import torch_private as torch_private  # isort: split

from .checkpointer import Checkpointer, Loaded, peek
from .errors import (
    CheckpointError,
    CheckpointExists,
    CheckpointMismatch,
    CheckpointNotFound,
    CorruptCheckpoint,
)
from .loading.restore import LoadReport
from .memory_snapshots import MemorySnapshots, Restored
from .saving.job import SaveHandle
from .weights import load_model, save_model

__all__ = [
    "CheckpointError",
    "CheckpointExists",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "Checkpointer",
    "CorruptCheckpoint",
    "LoadReport",
    "Loaded",
    "MemorySnapshots",
    "Restored",
    "SaveHandle",
    "load_model",
    "peek",
    "save_model",
]
