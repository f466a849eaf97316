"""The measures of a profile as a table."""

from __future__ import annotations

from ..render.text import plain_table, plural, show_bytes
from .events import Recording
from .measures import Measures, Traffic, UnitMeasures

_HEADER = (
    "unit", "forward", "backward",
    "gathers", "time", "sent", "rate", "exposed",
    "reduces", "time", "sent", "rate", "exposed",
)  # fmt: skip
_RIGHT = frozenset(map(str, range(1, len(_HEADER))))


def as_text(recording: Recording, measures: Measures) -> str:
    """The table, with a summary above and notes below."""
    rows = [_row(unit) for unit in (*measures.units, measures.total)]
    return "\n".join(
        [*_head(measures), "", plain_table(_HEADER, rows, _RIGHT), "", *_notes(measures)]
    )


def _head(measures: Measures) -> list[str]:
    steps = measures.steps
    if not steps:
        return [f"Rank {measures.rank} on {measures.device}: no step was recorded"]
    exposed = sum(step.exposed_s for step in steps) / len(steps)
    lines = [
        f"Rank {measures.rank} on {measures.device}, mean of {plural(len(steps), 'step')}: "
        f"{_ms(measures.step_s)} ms, of which compute waited for communication "
        f"{_ms(exposed)} ms ({100 * exposed / max(measures.step_s, 1e-12):.1f} %)"
    ]
    gathered = max(step.peak_gathered_bytes for step in steps)
    line = f"Peak memory, at unit boundaries: {show_bytes(gathered)} of gathered parameters"
    totals = [step.peak_bytes for step in steps if step.peak_bytes is not None]
    if totals:
        of = "the process" if measures.host_timed else "the device"
        line += f"; {show_bytes(max(totals))} in total ({of})"
    return [*lines, line]


def _row(unit: UnitMeasures) -> tuple[str, ...]:
    backward = unit.backward_s + unit.recompute_s
    return (
        unit.name,
        _ms(unit.forward_s),
        _ms(backward),
        *_columns(unit.gather),
        *_columns(unit.reduce),
    )


def _columns(traffic: Traffic) -> tuple[str, ...]:
    if not traffic.count:
        return ("-", "", "", "", _ms(traffic.exposed_s) if traffic.exposed_s else "")
    rate = traffic.bandwidth
    return (
        f"{traffic.count:.4g}",
        _ms(traffic.seconds),
        show_bytes(traffic.sent_bytes),
        "" if rate is None else f"{show_bytes(rate)}/s",
        _ms(traffic.exposed_s),
    )


def _notes(measures: Measures) -> list[str]:
    total = measures.total
    lines = [
        "Times in ms; all values per step. Forward and backward: compute in the unit itself, "
        "without waits",
        f"(recomputation, {_ms(total.recompute_s)} ms, is in backward). Sent: by this rank. Rate: "
        "sent / time.",
        "Exposed: time that compute waited for it.",
    ]
    if total.all_reduce.count:
        both, part = total.reduce, total.all_reduce
        lines.append(
            f"Of the reduces, {part.count:.4g} are all-reduces over replicas: {_ms(part.seconds)} "
            f"of {_ms(both.seconds)} ms, {show_bytes(part.sent_bytes)} of "
            f"{show_bytes(both.sent_bytes)}, exposed {_ms(part.exposed_s)} of "
            f"{_ms(both.exposed_s)} ms."
        )
    if measures.host_timed:
        launch = total.gather.launch_s + total.reduce.launch_s
        lines.append(
            "Timed on the host, which sees the end of a message only when it waits for it: times "
            "are upper bounds,"
        )
        lines.append(
            f"rates lower bounds. Launching took the host {_ms(launch)} ms, which forward and "
            "backward include."
        )
    return lines


def _ms(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
