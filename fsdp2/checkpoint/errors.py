"""Checkpoint errors, one class per remedy."""


class CheckpointError(RuntimeError):
    """Base class of this package's checkpoint errors."""


class CorruptCheckpoint(CheckpointError):
    """The files are damaged or not a checkpoint: load another one."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is intact but does not fit the model: names, shapes or dtypes differ."""


class CheckpointExists(CheckpointError):
    """A checkpoint of that name already exists; nothing was written into it."""


class CheckpointNotFound(CheckpointError):
    """There is no committed checkpoint of that name."""


def some(names, limit: int = 8) -> str:
    """Format names for a message, truncating long lists."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
