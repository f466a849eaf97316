"""Tools to test ``fsdp2``, and programs that use it, without the target hardware.

- `SimulatedGroup`: a process group in one process. Its collectives move as many bytes as real ones
  and take as long as they would on a `Link`.
- `check`: a happens-before checker for a list of events; does not need torch.
- `account_gradients`: follows every gradient that autograd produces, and raises if one is lost.
- `recording`: runs training on the CPU as if on a device with streams, and records its order.

Example:
    >>> from fsdp2.testing import check, recording
    >>> with recording() as recorder:
    ...     train_some_steps()
    >>> assert check(recorder.events) == []
"""

# First, because its error names everything that the installed torch lacks.
from ..common import torch_private as torch_private  # isort: split

from .gradients import account_gradients
from .ledger import GradientLostError
from .link import Link, Transfer
from .order import Checker, Kind, Violation, check
from .recording import recording
from .simulated import SimulatedGroup, simulated_mesh
from .trace import Recorder, UsedAfterFreeError

__all__ = [
    "Checker",
    "GradientLostError",
    "Kind",
    "Link",
    "Recorder",
    "SimulatedGroup",
    "Transfer",
    "UsedAfterFreeError",
    "Violation",
    "account_gradients",
    "check",
    "recording",
    "simulated_mesh",
]
