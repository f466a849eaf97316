"""Ctrl-C and SIGUSR1 as requests to save and stop. Importing this module makes them so.

SIGUSR1 is what a batch system can send before a job's time is up (see clusters/slurm.sbatch).

The module is imported before torch, whose import takes seconds, so that at no moment a signal ends
a rank in the middle of something.
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
