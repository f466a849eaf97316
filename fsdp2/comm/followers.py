"""Threads that do what follows once messages have come.

gloo tells of a message only who waits for it. What is to be sent on, or added up and sent, would
otherwise wait until its rank waits for that exchange, and that may be at the end of backward.

A thread does its steps one after the other, in the order of their begin. So no step may wait for
what a later step of another rank's thread sends: what depends on each other has another purpose,
and with it another thread.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary, finalize

import torch

from .streams import Finish


class Step:
    """Something that a thread does, and what is left to do afterwards.

    Args:
        job: waits for messages and does what follows; may return the function that finishes what
            it has begun.
    """

    def __init__(self, job: Callable[[], Finish | None]) -> None:
        self._job: Callable[[], Finish | None] | None = job
        self._is_over = threading.Event()
        self._finish: Finish | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        assert self._job is not None
        try:
            self._finish = self._job()
        except Exception as error:  # raised by who waits
            self._error = error
        finally:
            self._job = None  # it holds tensors
            self._is_over.set()

    def wait(self) -> None:
        """Wait for the thread, and finish what it has begun; raises its error.

        Who was interrupted, say by Ctrl-C, or got the error may wait once more.
        """
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            self._finish()
            self._finish = None


_Queue = queue.SimpleQueue[Step | None]


def follow(owner: object, purpose: str, job: Callable[[], Finish | None]) -> Step:
    """Do ``job`` in the thread that ``owner`` has for ``purpose``, as long as ``owner`` lives."""
    step = Step(job)
    with _lock:  # a thread may follow itself, say to relay the sums that it has made
        waiting = _waiting.setdefault(purpose, WeakKeyDictionary())
        if owner not in waiting:
            steps: _Queue = queue.SimpleQueue()
            threading.Thread(
                target=_run_all, args=(steps,), name=f"fsdp2 {purpose}", daemon=True
            ).start()
            finalize(owner, steps.put, None)
            waiting[owner] = steps
        waiting[owner].put(step)
    return step


@torch.no_grad()
def _run_all(steps: _Queue) -> None:
    while (step := steps.get()) is not None:
        step.run()
        del step


def _start_anew() -> None:
    """In a fork, which has no other threads, and where one of them may have had the lock."""
    global _lock
    _lock = threading.Lock()
    _waiting.clear()


_lock = threading.Lock()
_waiting: dict[str, WeakKeyDictionary[object, _Queue]] = {}
os.register_at_fork(after_in_child=_start_anew)
