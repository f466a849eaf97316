"""Tools to test `fsdp2`, and programs that use it, without the hardware it is for.

- `order`: a happens-before checker over a list of events; no torch.
- `recording`: runs training on the CPU as if on a device with streams, and records its order.

Example:
    >>> from fsdp2.testing import check, recording
    >>> with recording() as recorder:
    ...     train_some_steps()
    >>> assert check(recorder.events) == []
"""

from .order import Checker, Kind, Violation, check
from .recording import recording
from .trace import Recorder, UsedAfterFreeError

__all__ = [
    "Checker",
    "Kind",
    "Recorder",
    "UsedAfterFreeError",
    "Violation",
    "check",
    "recording",
]
