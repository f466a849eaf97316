"""Threads that serve or watch for as long as a program runs, and that nothing waits for.

If an error ends such a thread, Python prints it in the output of all ranks, and the program
continues without the thread. Without a watcher there are no warnings, and without a server other
ranks wait. So these threads work in turns, and an error ends only the current turn. Work that is
done once is submitted to a pool instead: the caller waits for it and gets its error.
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

    An error ends the turn in which it was raised. The first error is shown (see `tell`).

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
                tell(error, "The thread continues; its further errors are not shown.")
            time.sleep(_PAUSE_S)


def tell(error: BaseException, note: str) -> None:
    """Show an error as Python shows one that ends a thread, with a note: by `threading.excepthook`.

    Programs that log errors of threads have replaced it.
    """
    if isinstance(error, SystemExit):  # Python does not print this one
        error = RuntimeError(f"{error!r} in a thread does not end the process")
    error.add_note(note)
    thread = threading.current_thread()
    with suppress(Exception):  # of the hook, or of a stderr that is closed
        threading.excepthook(
            threading.ExceptHookArgs((type(error), error, error.__traceback__, thread))
        )


def submit(pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run ``call`` in a thread of ``pool``, or in this thread if the interpreter is exiting: pools
    then refuse tasks, and no thread can be started."""
    try:
        return pool.submit(call, *args)
    except RuntimeError:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*args))
        except BaseException as error:
            done.set_exception(error)
        return done
