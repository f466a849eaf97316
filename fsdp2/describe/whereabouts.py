"""Where a rank is in its program, seen from another thread; the step itself records nothing.

The progress of a step (the number of backwards, the units of a forward, their states) is read from
the runtime. The operation that a rank waits for is read from the Python stacks of its threads.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from typing_extensions import override

from ..runtime.states import GATHERED
from ..runtime.unit import Unit

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
LOST = "the loss of other ranks"  # by which a rank ended
# What a rank that saves or loads waits for. The others may work on their parts for minutes.
CHECKPOINT = "all ranks to do their part of a checkpoint"
# Python waits indefinitely for a new thread to report that it runs. Without memory, it never does.
START = "a new thread to start, for which there may be no memory"
_OF_CHECKPOINTS = ("said_by_first", "told_by_all", "_agree", "SaveHandle.wait_committed")
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is.

    Attributes:
        step: number of backwards that have begun.
        phase: "forward", "backward", or "outside" of the model.
        units: how many units this forward has begun, or this backward has reduced.
        unit: the innermost unit that is computing; "" outside of the model.
        waits_for: the operation of other ranks that it waits for; "" if it does not wait.
        at: the line of the user's program, and the innermost function there: "train.py:88 in
            next_batch".
        ended: the error by which it left `watch_hangs`; "" if it did not. ``LOST``: an error of the
            communication, whose cause is another rank.
    """

    step: int
    phase: str
    units: int
    unit: str
    waits_for: str
    at: str
    ended: str = ""

    @property
    def order(self) -> tuple[int, int, int]:
        """The progress of a rank, which grows while the rank continues."""
        phases = {"outside": 0, "forward": 1, "backward": 2}
        # A step is counted when its backward begins. Its forward came before that.
        begun = self.step - (self.phase == "backward")
        return begun, phases[self.phase], self.units

    @override
    def __str__(self) -> str:
        ended = f", ended by {self.ended}" if self.ended else ""
        return self.place + (f", waiting for {self.waits_for}" if self.waits_for else "") + ended

    @property
    def place(self) -> str:
        """Phase, unit, step and line as text."""
        where = f"in {self.phase} of unit '{self.unit}'" if self.unit else "outside of the model"
        at = f", at {self.at}" if self.at else ""
        return f"{where}, step {self.order[0] + 1}{at}"


def look(units: Sequence[Unit], names: Mapping[Unit, str], thread: int) -> Whereabouts:
    """Where this process is.

    Args:
        units: of the model, with their names.
        thread: the identity of the training thread.
    """
    waits_for, at = "", ""
    for stack in _stacks(thread):
        waits_for = waits_for or _what_is_waited_for(stack, names)
        at = at or _line_of_user((frame, frame.f_lineno) for frame in stack)
    runtimes = {id(unit.runtime): unit.runtime for unit in units if unit.runtime is not None}
    step, phase, done, current = 0, "outside", 0, ""
    for runtime in runtimes.values():
        seen: Any = runtime
        step = max(step, seen.backward.number)
        if seen.in_backward:
            phase = "backward"
            done += sum(unit.step.reduced for unit in seen.units)
            begun = [unit for unit in seen.units if unit.step.backward_began]
            # An enclosing unit is in backward for as long as those inside are.
            current = next((names[u] for u in begun if not u.encloses and u in names), current)
            current = current or next((names[u] for u in begun if u in names), "")
        elif seen.schedule.root is not None:
            phase = "forward"
            order = list(seen.schedule.ran)
            done += len(order)
            current = names.get(order[-1], "") if order else ""
    return Whereabouts(step, phase, done, current or _gathered(units, names, phase), waits_for, at)


def _gathered(units: Sequence[Unit], names: Mapping[Unit, str], phase: str) -> str:
    """The unit to name where no unit is computing: between two units."""
    if phase == "outside":
        return ""
    return next((names[unit] for unit in units if unit.state in GATHERED), "(root)")


def _stacks(thread: int) -> list[list[FrameType]]:
    """The Python stacks of all threads, ``thread`` first; each has its innermost frame first."""
    # On devices, backward runs in separate threads, where hooks are Python again.
    frames = sys._current_frames()
    first = frames.pop(thread, None)
    mine = sys._getframe()
    others = [list(_up(f)) for f in frames.values()]
    ours = [s for s in others if mine not in s and any(_file(f).startswith(_OURS) for f in s)]
    return ([list(_up(first))] if first is not None else []) + ours


def _up(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _what_is_waited_for(stack: Sequence[FrameType], names: Mapping[Unit, str]) -> str:
    """Derive it from the functions of the library, and of torch.distributed, that wait."""
    for frame in stack:
        function = frame.f_code.co_qualname
        if _file(frame).startswith(_OURS):
            if function in ("Gather.wait", "Gather.launch") and frame.f_back is not None:
                unit = _local(frame.f_back, "self")  # which calls it
                return f"the all-gather of unit '{names.get(unit) or unit.name}'"
            if function == "ReductionsInFlight._complete_oldest":
                launched = _local(frame, "launched")
                if launched is not None:
                    return f"the reduction of unit '{launched.unit_name}'"
            if function.startswith("StoreExchange."):
                about = getattr(_local(frame, "self"), "_about", "")
                if about:
                    return f"all ranks to {about}"
            if function in _OF_CHECKPOINTS and _file(frame).startswith(_OURS + "checkpoint"):
                return CHECKPOINT
        if function == "Thread.start" and _file(frame) == threading.__file__:
            return START
        if _file(frame).startswith(_TORCH + "distributed" + os.sep):
            outer = _outermost_of_torch(stack)
            return f"torch.distributed, in {outer.f_code.co_name}()"
    return ""


def _local(frame: FrameType, name: str) -> Any:
    """A local variable; None where there is none (yet), as ``self`` in a comprehension.

    Only for frames of this package: until Python 3.13, a frame whose variables were read keeps
    their values, so a user's loss would outlive its step.
    """
    return frame.f_locals.get(name)


def _outermost_of_torch(stack: Sequence[FrameType]) -> FrameType:
    """The outermost function of torch.distributed around the innermost frame."""
    found = stack[0]
    for frame in stack:
        if _file(frame).startswith(_TORCH + "distributed" + os.sep):
            if frame.f_code.co_name != "wrapper":  # of a decorator
                found = frame
        elif not _file(frame).startswith(_TORCH):
            break
    return found


def line_of_error(error: BaseException) -> str:
    """The line of the user's program that raised it, or that called the function that did."""
    places = list(traceback.walk_tb(error.__traceback__))
    return _line_of_user(reversed(places))


def _line_of_user(places: Iterable[tuple[FrameType, int]]) -> str:
    """The place in the program that uses the libraries.

    Args:
        places: frames and lines, innermost first.
    """
    for frame, line in places:
        file = _file(frame)
        library = file.startswith((_OURS, _TORCH, _PYTHON, "<")) or "site-packages" in file
        if not library:
            return f"{os.path.basename(file)}:{line} in {frame.f_code.co_name}"
    return ""
