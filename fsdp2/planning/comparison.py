"""Compares a prediction with a profile: step, compute, waits and memory, each with its error.

Both are JSON, so they may come from different machines; nothing here runs a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from ..render.text import plain_table, plural, show_bytes, show_seconds
from ..render.timeline import pyplot_for_files, write
from .outcomes import PREDICTED
from .prediction import Prediction
from .simulation.unit_figures import OUTSIDE

_MEASURED = "fsdp2_profile"
_SECONDS, _BYTES, _COUNT = "seconds", "bytes", "count"
_SHOW: dict[str, Callable[[float], str]] = {
    _SECONDS: show_seconds,
    _BYTES: show_bytes,
    _COUNT: lambda value: f"{value:.4g}",
}


@dataclass(frozen=True)
class Compared:
    """One figure.

    Attributes:
        unit: name of the model's unit; empty for the whole step.
        what: name of the figure.
        kind: "seconds", "bytes" or "count".
        predicted, measured: the values per step.
    """

    unit: str
    what: str
    kind: str
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """The relative error, positive if the prediction is too high; None if the measurement is
        zero and the prediction is not."""
        if self.measured:
            return self.predicted / self.measured - 1
        return None if self.predicted else 0.0


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`; ``print`` shows it.

    Attributes:
        step: figures of the whole step.
        units: figures of the units that are in both.
        warnings: differences that limit the comparison, as sentences.
    """

    step: list[Compared]
    units: list[Compared]
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-compatible data."""

        def rows(figures: list[Compared]) -> list[dict[str, Any]]:
            return [{**asdict(each), "error": each.error} for each in figures]

        return {"step": rows(self.step), "units": rows(self.units), "warnings": self.warnings}

    def picture(self, path: str | Path) -> None:
        """Draw predicted and measured times and bytes of the step and its units to a file.

        Args:
            path: a file; its suffix selects the format (``.png``, ``.svg``).

        Raises:
            ImportError: without matplotlib (``pip install fsdp2[plots]``).
        """
        _draw(self.step, self.units, Path(path))

    @override
    def __str__(self) -> str:
        header = ("step", "predicted", "measured", "error")
        lines = [plain_table(header, [_row(each.what, each) for each in self.step], "123"), ""]
        rows: list[tuple[str, ...]] = []
        last = ""
        for each in self.units:
            rows.append((each.unit if each.unit != last else "", *_row(each.what, each)))
            last = each.unit
        if rows:
            lines += [plain_table(("unit", "", *header[1:]), rows, "234"), ""]
        lines += self.warnings
        return "\n".join(lines).rstrip("\n")


def compare(predicted: Prediction | Mapping[str, Any], measured: Mapping[str, Any]) -> Comparison:
    """Compare a prediction with a profile of the same step.

    Measured times are means over the profiled steps of one rank; predicted times belong to the
    fullest, slowest rank. The memory of a unit is its gathered parameters and, on GPUs, the
    allocator's peak when compute enters or leaves the unit. A profile on the CPU measures the
    memory of the whole process, which is not predicted, so it is left out with a warning. The row
    "outside units" predicts only the loss, but measures everything outside units. Predicted bytes
    of gathers include the padding of uneven dims; measured bytes do not.

    Args:
        predicted: the result of `plan` or `predict`, or its ``to_dict()``.
        measured: ``as_dict()`` of a profile (`fsdp2.profile`), or the contents of its
            ``save_json()`` file.

    Raises:
        ValueError: if either is something else, lacks data because an older fsdp2 made it, or has
            no step; if they differ in the number of ranks or the stages of a pipeline, or have no
            unit in common.

    Example:
        >>> with torch.device("meta"):
        ...     workload = fsdp2.planning.Workload(Model(), tokens, loss_fn=loss)
        >>> cluster = fsdp2.planning.Cluster("h100", 1)
        >>> step = fsdp2.predict(workload, fsdp2.planning.Sharding(), cluster)
        >>> with fsdp2.profile(model) as p:  # a sharded Model
        ...     train_step()
        >>> print(fsdp2.planning.compare(step, p.as_dict()))
    """
    if isinstance(predicted, Prediction):
        predicted = predicted.to_dict()
    _check(predicted, PREDICTED, "prediction", "fsdp2 plan --json or fsdp2 predict --json prints")
    _check(measured, None, "profile", "Profile.save_json writes")
    try:
        return _compare(predicted, measured)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else f"a wrong value ({error})"
        raise ValueError(
            f"The prediction or the profile has {what}: was it edited? Make it again"
        ) from error


def _compare(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> Comparison:
    if not measured["steps"]:
        raise ValueError("The profile has no step: train inside of its with block")
    ranks = measured.get("num_ranks")
    if ranks is not None and ranks != predicted["num_ranks"]:
        raise ValueError(
            f"The prediction is for {predicted['num_ranks']} ranks, the profile of {ranks}: "
            "predict with --world-size of the run"
        )
    _check_stage(predicted, measured)
    theirs = {unit["name"]: unit for unit in predicted["units"] if unit["name"] != OUTSIDE}
    ours = {unit["name"]: unit for unit in measured["units"]}
    common = [name for name in ours if name in theirs]
    if not common or (common == ["(root)"] and len(ours) > 1 and len(theirs) > 1):
        raise ValueError(
            f"The units have no name in common: the prediction has {_few(theirs)}, the profile "
            f"{_few(ours)}. Were they made of the same model, with the same wrap=?"
        )
    on_device = not measured["host_timed"]
    warnings = _warnings(predicted, measured, theirs, ours)
    units = [each for name in common for each in _unit(name, theirs[name], ours[name], on_device)]
    return Comparison(_step(predicted, measured, on_device), units, warnings)


def read_json(path: str | Path) -> Any:
    """The contents of a JSON file.

    Raises:
        ValueError: if it is not JSON.
        OSError: if it cannot be read.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _check(data: object, key: str | None, name: str, source: str) -> None:
    """Check that ``data`` is a prediction (marked by ``key``) or a profile."""
    needed = ("steps", "units", "total", "host_timed") if key is None else ("units", "num_ranks")
    if not isinstance(data, Mapping):
        raise ValueError(f"The {name} is a {type(data).__name__}, not an object as {source}")
    if (PREDICTED in data) if key is None else (_MEASURED in data):
        other = "prediction" if key is None else "profile"
        raise ValueError(f"The {name} is a {other}: the prediction comes first, then the profile")
    if "predictions" in data:
        raise ValueError(
            "The prediction is a table of several: compare one, of a single configuration"
        )
    missing = [each for each in needed if each not in data]
    if missing:
        raise ValueError(
            f"The {name} has no {missing[0]!r}: it has to be what {source} (of this version of "
            "fsdp2)"
        )
    version = data.get(key or _MEASURED, 1)
    if version != 1:
        raise ValueError(
            f"The {name} has format {version!r}, this fsdp2 reads 1: make it again, or update"
        )


def _check_stage(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Check the rank of the profile: a pipeline's prediction has its first rank's units."""
    first = predicted["num_ranks"] // predicted.get("pipeline_ranks", 1)
    rank = measured.get("rank", 0)
    if rank >= first:
        raise ValueError(
            f"The profile is of rank {rank}, which has other stages than the prediction: use the "
            f"profile of a rank below {first}, that is of a rank of the first stage"
        )


def _step(
    predicted: Mapping[str, Any], measured: Mapping[str, Any], on_device: bool
) -> list[Compared]:
    theirs = [unit for unit in predicted["units"] if unit["name"] != OUTSIDE]
    outside = [unit for unit in predicted["units"] if unit["name"] == OUTSIDE]
    total, steps = measured["total"], measured["steps"]

    def mean(name: str) -> float:
        return sum(step[name] for step in steps) / len(steps)

    def both(kind: str, name: str) -> tuple[float, float]:
        mine = [total["gather"]] if kind == "gather" else [total["reduce_scatter"]]
        mine += [total["all_reduce"]] if kind == "reduce" else []
        return sum(unit[kind][name] for unit in theirs), sum(each[name] for each in mine)

    backward_s = total["backward_s"] + total["recompute_s"]
    # On the host, compute launches communication. The profile counts this in forward and backward,
    # but it is exposed communication: nothing else can run in this time.
    kinds = ("gather", "reduce_scatter", "all_reduce")
    launch_s = 0.0 if on_device else sum(total[kind]["launch_s"] for kind in kinds)
    compute_s = total["forward_s"] + backward_s - launch_s
    optimizer_s, waited_s = mean("optimizer_s"), mean("exposed_s")
    rows = [
        ("step", _SECONDS, predicted["step_s"], measured["step_s"]),
        ("compute", _SECONDS, sum(u["forward_s"] + u["backward_s"] for u in theirs), compute_s),
        ("forward", _SECONDS, sum(u["forward_s"] for u in theirs), total["forward_s"]),
        ("backward", _SECONDS, sum(u["backward_s"] for u in theirs), backward_s),
        (
            "outside units",
            _SECONDS,
            sum(unit["forward_s"] + unit["backward_s"] for unit in outside),
            max(0.0, measured["step_s"] - total["forward_s"] - backward_s - optimizer_s - waited_s),
        ),
        ("optimizer", _SECONDS, predicted["optimizer_s"], optimizer_s),
        ("exposed communication", _SECONDS, predicted["waited_s"], waited_s + launch_s),
    ]
    for kind, several in (("gather", "gathers"), ("reduce", "reductions")):
        rows.append((several, _COUNT, *both(kind, "count")))
        rows.append((f"time of {several}", _SECONDS, *both(kind, "seconds")))
        rows.append((f"sent by {several}", _BYTES, *both(kind, "sent_bytes")))
    gathered = max(step["peak_gathered_bytes"] for step in steps)
    rows.append(("peak of gathered", _BYTES, predicted["peak_gathered_bytes"], gathered))
    totals = [step["peak_bytes"] for step in steps if step["peak_bytes"] is not None]
    if on_device and totals:
        borders = max(unit["peak_bytes"] for unit in predicted["units"])
        rows.append(("peak at unit boundaries", _BYTES, borders, max(totals)))
    return _figures("", rows)


def _unit(
    name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any], on_device: bool
) -> list[Compared]:
    reduces = (ours["reduce_scatter"], ours["all_reduce"])
    exposed = theirs["gather"]["exposed_s"] + theirs["reduce"]["exposed_s"]
    waited = ours["gather"]["exposed_s"] + sum(each["exposed_s"] for each in reduces)
    rows: list[tuple[str, str, float, float]] = [
        ("forward", _SECONDS, theirs["forward_s"], ours["forward_s"]),
        ("backward", _SECONDS, theirs["backward_s"], ours["backward_s"] + ours["recompute_s"]),
        ("exposed", _SECONDS, exposed, waited),
        ("gathered", _BYTES, _each(theirs["gather"]), _each(ours["gather"])),
    ]
    if on_device and ours.get("peak_bytes") is not None:
        rows.append(("memory", _BYTES, theirs["peak_bytes"], ours["peak_bytes"]))
    return _figures(name, rows)


def _figures(unit: str, rows: Iterable[tuple[str, str, Any, Any]]) -> list[Compared]:
    made = [Compared(unit, *row) for row in rows]
    for each in made:
        if not isinstance(each.predicted, float | int) or not isinstance(
            each.measured, float | int
        ):
            raise TypeError(f"{each.what}: {each.predicted!r}, {each.measured!r}")
    return made


def _each(traffic: Mapping[str, Any]) -> float:
    return traffic["nbytes"] / traffic["count"] if traffic["count"] else 0.0


def _warnings(
    predicted: Mapping[str, Any],
    measured: Mapping[str, Any],
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
) -> list[str]:
    """Differences between the two that the figures alone do not show."""
    told = []
    for mine, others, who in ((theirs, ours, "prediction"), (ours, theirs, "profile")):
        alone = [name for name in mine if name not in others]
        if alone:
            told.append(f"Only the {who} has {plural(len(alone), 'unit')} {_few(alone)}.")
    counts = [
        name
        for name in theirs
        if name in ours and theirs[name]["gather"]["count"] != ours[name]["gather"]["count"]
    ]
    if counts:
        told.append(
            f"Predicted were {theirs[counts[0]]['gather']['count']:.4g} gathers of "
            f"'{counts[0]}' in a step, measured {ours[counts[0]]['gather']['count']:.4g} "
            f"({len(counts)} units differ): was it the same number of micro-batches, resharding "
            "and checkpointing?"
        )
    if measured["host_timed"]:
        told.append(
            "The profile was timed on the host: times of gathers and reductions are upper bounds, "
            "their launches are in forward and backward of units (of the step, in exposed "
            "communication), and memory includes the whole process, so it is not compared."
        )
    if all(not step["optimizer_s"] for step in measured["steps"]) and predicted["optimizer_s"]:
        told.append("No optimizer stepped during the profile.")
    return told


def _few(names: Any) -> str:
    names = [f"'{name}'" for name in names]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _row(what: str, each: Compared) -> tuple[str, ...]:
    show = _SHOW[each.kind]
    error = "" if each.error is None else f"{100 * each.error:+.1f} %"
    return what, show(each.predicted), show(each.measured), error


_PALE, _STRONG = "#a9c6e2", "#6d9bc8"  # colors of predictions, of measurements
_MOST_UNITS = 40  # whose names are still readable


def _draw(step: Sequence[Compared], units: Sequence[Compared], path: Path) -> None:
    """Write three rows of bars: the step's times, the units' times, and bytes in memory.

    Raises:
        ImportError: without matplotlib (``pip install fsdp2[plots]``).
    """
    pyplot = pyplot_for_files()
    figure, axes = pyplot.subplots(3, 1, figsize=(13, 11))
    times = [each for each in step if each.kind == "seconds"]
    _bars(axes[0], [each.what for each in times], times, 1e3, "Step, ms")
    names = list(dict.fromkeys(each.unit for each in units))[:_MOST_UNITS]
    by_unit = {(each.unit, each.what): each for each in units}
    # Forward and backward in one row: they differ by less than units do.
    whats, title = ("forward", "backward"), "Units, forward and backward, ms"
    labels = [f"{name}\n{what}" for name in names for what in whats]
    _bars(axes[1], labels, [by_unit[name, w] for name in names for w in whats], 1e3, title)
    what = "memory" if (names[0], "memory") in by_unit else "gathered"
    peaks = [each for each in step if each.kind == "bytes" and each.what.startswith("peak")]
    labels = [each.what for each in peaks] + [f"{name}\n{what}" for name in names]
    bytes_of = [*peaks, *(by_unit[name, what] for name in names)]
    _bars(axes[2], labels, bytes_of, 2**-20, "Memory, MiB")
    figure.suptitle("Predicted and measured", x=0.01, ha="left", fontweight="bold")
    figure.tight_layout()
    write(figure, path)


def _bars(
    axis: Any, labels: Sequence[str], figures: Sequence[Compared], scale: float, title: str
) -> None:
    places = range(len(figures))
    predicted = [scale * each.predicted for each in figures]
    measured = [scale * each.measured for each in figures]
    axis.bar([x - 0.2 for x in places], predicted, 0.4, color=_PALE, label="predicted")
    axis.bar([x + 0.2 for x in places], measured, 0.4, color=_STRONG, label="measured")
    for x, each in zip(places, figures, strict=True):
        if each.error is not None:
            height = scale * max(each.predicted, each.measured)
            axis.text(x, height, f"{100 * each.error:+.0f} %", ha="center", va="bottom", fontsize=7)
    turned = 90 if len(labels) > 12 else 0
    axis.set_xticks(list(places), labels, fontsize=7, rotation=turned)
    axis.set_title(title, loc="left")
    axis.margins(y=0.15)
    axis.legend()
