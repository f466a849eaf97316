"""What goes wrong with checkpoints, by what the user has to do about it."""


class CheckpointError(RuntimeError):
    """Anything that this package raises about a checkpoint."""


class CorruptCheckpoint(CheckpointError):
    """The files are not what was written, or are no checkpoint: load another one."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is sound but is not one of this model: names, shapes or dtypes differ."""


class CheckpointExists(CheckpointError):
    """There is a checkpoint of that name already; nothing was written into it."""


class CheckpointNotFound(CheckpointError):
    """There is no committed checkpoint of that name."""


def some(names, limit: int = 8) -> str:
    """A list of names for a message, cut where it gets long."""
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
