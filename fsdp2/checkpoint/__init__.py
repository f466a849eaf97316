"""Sharded checkpoints: ordinary safetensors files, written and read without communication.

`save_model` and `load_model` handle weights, `Checkpointer` the exact state of training.
"""

from typing import TYPE_CHECKING, Any

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
from .saving.job import SaveHandle
from .weights import load_model, save_model

if TYPE_CHECKING:
    from ..snapshots import MemorySnapshots, Restored

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


def __getattr__(name: str) -> Any:
    """Snapshots build on checkpoints, so their names are imported at the first use."""
    if name not in ("MemorySnapshots", "Restored"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .. import snapshots

    return getattr(snapshots, name)
