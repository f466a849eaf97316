"""Ctrl-C as a request. Importing this module is what makes it one.

It is imported before torch, whose import takes seconds, so that there is no moment at which
Ctrl-C ends a rank in the middle of something.
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
