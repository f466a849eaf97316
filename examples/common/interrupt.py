"""Handle Ctrl-C and SIGUSR1 as requests to save and stop, as soon as this module is imported.

A batch system can send SIGUSR1 before a job's time is up (see clusters/slurm.sbatch).

Import this module before torch. The import of torch takes seconds, in which a signal would end the
rank.
"""

from __future__ import annotations

import signal

_requested = False


def stop_requested() -> bool:
    """Whether this process was asked to stop."""
    return _requested


def _request(*_: object) -> None:
    global _requested
    _requested = True


signal.signal(signal.SIGINT, _request)
signal.signal(signal.SIGUSR1, _request)
