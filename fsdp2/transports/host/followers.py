"""Threads that do what follows once messages have come.

gloo reports a message only to a thread that waits for it. Without these threads, data to send on,
or to add up and send, would wait until its rank waits for that exchange, perhaps at the end of
backward.

A thread does its steps one after the other, in the order of their begin. So no step may wait for
what a later step of another rank's thread sends: what depends on each other has another purpose,
and with it another thread.

The threads end before the interpreter does. Python ends a thread that comes back from C++ after
that by unwinding its stack, and torch's code on it is not made for that: the process would abort,
and its exit code would be lost. So at exit the messages that a thread waits for are cut off.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
import torch.distributed as dist

from ...comm.streams import Finish

_LONGEST_END_S = 5.0  # at exit, for all threads together
_CUT_TAGS = 8  # more than the network interfaces that a group of gloo has messages on
_UNUSED_TAG = (1 << 31) - 1 - _CUT_TAGS  # and above


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
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._job is not None
        try:
            self._finish = self._job()
        except BaseException as error:  # raised by who waits
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


def follow(
    owner: object,
    purpose: str,
    job: Callable[[], Finish | None],
    group: dist.ProcessGroup | None = None,
) -> Step:
    """Do ``job`` in the thread that ``owner`` has for ``purpose``, as long as ``owner`` lives.

    Args:
        group: of gloo, whose messages ``job`` waits for.
    """
    step = Step(job)
    with _lock:  # a thread may follow itself, say to relay the sums that it has made
        waiting = _waiting.setdefault(purpose, WeakKeyDictionary())
        if owner not in waiting:
            steps: _Queue = queue.SimpleQueue()
            thread = threading.Thread(
                target=_run_all, args=(steps,), name=f"fsdp2 {purpose}", daemon=True
            )
            thread.start()
            _threads[thread] = steps
            finalize(owner, steps.put, None)
            waiting[owner] = steps
        if group is not None:
            _groups.add(group)
        waiting[owner].put(step)
    return step


@torch.no_grad()
def _run_all(steps: _Queue) -> None:
    while (step := steps.get()) is not None:
        step.run()
        del step


def _end_all() -> None:
    """End all threads, those too that wait for messages that may never come."""
    with _lock:
        threads, groups = dict(_threads), list(_groups)
        _waiting.clear()
    for steps in threads.values():
        steps.put(None)
    end = time.monotonic() + _LONGEST_END_S
    for tag in range(_CUT_TAGS):
        if not any(thread.is_alive() for thread in threads):
            return
        # Steps that are over in a moment need no messages cut off.
        for thread in threads:
            thread.join(0.01)
        if any(thread.is_alive() for thread in threads):
            for group in groups:
                _cut_off(group, tag)
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _cut_off(group: dist.ProcessGroup, tag: int) -> None:
    """Make every wait for messages of ``group`` raise, also in other threads.

    A receive that times out closes the connections of its group, as gloo has no other way to end
    one. (Those on one of the network interfaces, which it takes by turns, by tag.)
    """
    peer = next(rank for rank in range(group.size()) if rank != group.rank())
    with suppress(RuntimeError):  # that one
        group.recv([torch.empty(1)], peer, _UNUSED_TAG + tag).wait(timedelta(milliseconds=1))


def _start_anew() -> None:
    """In a fork, which has no other threads, and where one of them may have had the lock."""
    global _lock
    _lock = threading.Lock()
    _waiting.clear()
    _threads.clear()
    _groups.clear()


_lock = threading.Lock()
_waiting: dict[str, WeakKeyDictionary[object, _Queue]] = {}
_threads: WeakKeyDictionary[threading.Thread, _Queue] = WeakKeyDictionary()
_groups: WeakSet[dist.ProcessGroup] = WeakSet()
atexit.register(_end_all)
os.register_at_fork(after_in_child=_start_anew)
