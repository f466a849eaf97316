"""`profile`: records the units of a model, step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import nn
from typing_extensions import override

from ..runtime.unit import Unit, units_in
from .events import Recording
from .measures import Measures, UnitMeasures, measure
from .recorder import ProfileRecorder

# `fsdp2.planning.compare` recognizes the JSON of a profile by this key; its value is the version.
MEASURED = "fsdp2_profile"

# Units that are being profiled.
_profiled: WeakSet[Unit] = WeakSet()


def profile(model: nn.Module) -> Profile:
    """Record time, bytes, bandwidth, waits and memory of a sharded model's units.

    For each unit and step, the profile measures compute time, the duration and bytes of gathers and
    reductions, how long compute waited for them (exposed time), and memory. Each rank records and
    reports only itself.

    Without a profile, there is no cost. On CUDA, times come from events on the streams that do the
    work. The host waits for the device once at the beginning, and once when the first result is
    requested. On the CPU, times are the host's. ``docs/profiling.md`` describes how each number is
    measured.

    Args:
        model: sharded by `fully_shard`, `shard_model` or `replicate`, or a module that contains
            such modules (``nn.ModuleDict({"generator": ..., "critic": ...})``), on one device.

    Returns:
        A context manager, which has the results after the ``with`` block; see `Profile`.

    Raises:
        ValueError: if nothing in the model is sharded.
        RuntimeError: on entry, if a unit of the model is already being profiled.

    Example:
        >>> train_step()  # the first step plans storages and finds the order: better left out
        >>> with fsdp2.profile(model) as p:
        ...     for _ in range(3):
        ...         train_step()
        >>> print(p.table())
        >>> p.save_json("profile.json")  # for fsdp2 compare
        >>> p.export_chrome_trace("trace.json")  # for https://ui.perfetto.dev
        >>> p.save_picture("profile.png")
    """
    units = units_in(model)
    if not units:
        raise ValueError(
            "The model is not sharded, so there are no units to profile: call fully_shard(model) "
            "or shard_model(model) first. For other models, use torch.profiler"
        )
    return Profile(model, units)


class Profile:
    """The context manager that `profile` returns; afterwards, it holds the results of this rank."""

    def __init__(self, model: nn.Module, units: list[Unit]) -> None:
        self._model: nn.Module | None = model
        self._found: list[Unit] = units
        self._recorder: ProfileRecorder | None = None
        self._running = False
        self._measures: Measures | None = None

    def __enter__(self) -> Profile:
        if self._model is None:
            raise RuntimeError("A profile records once: call fsdp2.profile(model) again")
        twice = [unit.name for unit in self._found if unit in _profiled]
        if twice:
            raise RuntimeError(
                f"Unit '{twice[0]}' is already being profiled: leave the other profile of this "
                "model first"
            )
        self._recorder = ProfileRecorder(self._model, self._found)
        self._model = None
        _profiled.update(self._found)
        self._running = True
        try:
            self._recorder.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._recorder is not None
        self._recorder.stop()
        _profiled.difference_update(self._found)
        self._found = []
        self._running = False

    def step(self) -> None:
        """Mark the end of a training step.

        Without this call, each step begins with a forward of a root. If optimizers step during the
        profile, only the first forward after an optimizer step counts.

        Raises:
            RuntimeError: outside the ``with`` block.
        """
        if not self._running or self._recorder is None:
            raise RuntimeError("step() must be called inside the with block of the profile")
        self._recorder.moment("step")

    @property
    def recording(self) -> Recording:
        """Everything that was recorded, event by event.

        Raises:
            RuntimeError: before the end of the ``with`` block.
        """
        if self._running or self._recorder is None:
            raise RuntimeError("Results are available only after the with block of the profile")
        return self._recorder.result()

    @property
    def measures(self) -> Measures:
        """Steps, units and totals; `Measures` describes each number."""
        recording = self.recording
        if self._measures is None:
            self._measures = measure(recording)
        return self._measures

    @property
    def units(self) -> tuple[UnitMeasures, ...]:
        """One `UnitMeasures` per unit, the root first, then in model order."""
        return self.measures.units

    def as_dict(self) -> dict[str, Any]:
        """The measures as dicts, lists, strings and numbers."""
        return self.measures.to_dict()

    def table(self) -> str:
        """The measures of this rank as a readable table."""
        from .report import as_text

        return as_text(self.recording, self.measures)

    @override
    def __str__(self) -> str:
        return self.table()

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

        The trace has one process, named after the rank. Its rows show compute, gathers,
        reduce-scatters, all-reduces and the host's launches; a counter shows memory. To combine
        traces of several ranks, join their ``traceEvents``. Each rank's clock begins when its own
        profile starts.

        Args:
            path: a file; missing parent folders are created.
        """
        from .trace import trace_events

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        trace = {"traceEvents": trace_events(self.recording), "displayTimeUnit": "ms"}
        path.write_text(json.dumps(trace))

    def save_json(self, path: str | Path) -> None:
        """Write the measures as JSON, for example for ``fsdp2 compare``.

        Args:
            path: a file; missing parent folders are created.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        made = {MEASURED: 1, "num_ranks": self.recording.num_ranks, **self.as_dict()}
        path.write_text(json.dumps(made))

    def save_picture(self, path: str | Path, step: int = -1) -> None:
        """Draw one step to a file: streams over time, and memory below.

        Args:
            path: a file; its suffix selects the format (``.png``, ``.svg``).
            step: which step; the last by default.

        Raises:
            ImportError: without matplotlib.
            IndexError: if there is no such step.
        """
        from .picture import draw

        draw(self.recording, self.measures, Path(path), step)
