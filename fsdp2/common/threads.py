"""Threads that serve or watch for as long as a program runs, and for which nobody waits.

Python prints what ends such a thread among the output of all ranks, and the program goes on without
it: a watcher that is gone warns of nothing, and a server that is gone leaves other ranks waiting.
So these threads work in turns, and an error ends its turn only. What a thread does once is for
somebody who waits for it, and who gets its error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

_PAUSE_S = 0.1  # after an error: a turn that fails at once must not keep a core busy


def work_in_turns(name: str, turn: Callable[[], bool]) -> threading.Thread:
    """Start a thread that calls ``turn`` until that returns False.

    An error ends the turn in which it was raised. The first one is told (see `tell`).

    Args:
        name: of the thread.
    """
    thread = threading.Thread(target=_run, args=(turn,), name=name, daemon=True)
    thread.start()
    return thread


def _run(turn: Callable[[], bool]) -> None:
    told = False
    while True:
        try:
            if not turn():
                return
        except BaseException as error:
            if not told:
                told = True
                tell(error, "The thread goes on; further errors of it are not shown.")
            time.sleep(_PAUSE_S)


def tell(error: BaseException, note: str) -> None:
    """Show an error as Python shows one that ends a thread, with a note: by `threading.excepthook`.

    Programs that log errors of threads have replaced it.
    """
    if isinstance(error, SystemExit):  # of which Python says nothing
        error = RuntimeError(f"{error!r} in a thread does not end the process")
    error.add_note(note)
    thread = threading.current_thread()
    with suppress(Exception):  # of the hook, or of a stderr that is closed
        threading.excepthook(
            threading.ExceptHookArgs((type(error), error, error.__traceback__, thread))
        )


def submit(pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run ``call`` in a thread of ``pool``; in this thread if the interpreter is exiting and only
    waits for this one, because pools then refuse tasks and no thread can be started."""
    try:
        return pool.submit(call, *args)
    except RuntimeError:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*args))
        except BaseException as error:
            done.set_exception(error)
        return done
