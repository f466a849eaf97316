"""A prediction, and a table of many: the numbers and their text form."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from ..render.text import plural, show_bytes, show_seconds, table
from .advice import SHOWN_PADDING, Padding
from .hardware.hardware import Hardware
from .outcomes import PREDICTED, Outcome, Range, bound_of, bound_sentence, figures_of, range_figures
from .picture import draw
from .simulation.simulate import SimulatedStep

_RATES = ("samples", "context", "samples_per_s", "tokens_per_s", "flops_per_s", "bound")


@dataclass(frozen=True, kw_only=True)
class Prediction(Outcome):
    """The result of `predict`: time and memory of a training step; ``print`` shows it.

    Attributes:
        choices: the values of the configuration except the mesh, by name, as text for tables.
        samples_per_s: samples per second of all ranks; None: the sample input has no sample dim.
        tokens_per_s: tokens per second of all ranks, if the first tensor of the sample input has
            integers of shape (samples, positions).
        memory_budget: bytes that a rank may use.
        samples, context: sizes of a micro-batch of one rank, if known; with ``tensor_ranks`` or
            ``context_ranks``, of the ranks that share it.
        tensor_ranks: tensor-parallel ranks for each rank of ``mesh_shape``.
        context_ranks: context-parallel ranks within the last dim of ``mesh_shape``.
        pipeline_ranks: pipeline ranks; each stage has a mesh of ``mesh_shape``.
        bubble_s: seconds that a rank of the pipeline waits for other stages, averaged over ranks;
            part of ``exposed_s``.
        stages: for each rank of the pipeline, "compute_s", "bubble_s", "peak_bytes" and
            "needed_bytes"; empty without a pipeline.
        padding: the cost of uneven dims on the fullest rank; None: there is none.
        dtype: dtype of computation: of the policy, or of most parameters.
        step: the simulated step: of the slowest rank if ranks differ, or of the first rank of a
            pipeline.
        range: the range of the step time, from the uncertainty of the hardware's speeds; None: the
            speeds are known, or this is one of many predictions (`sweep`).
        notes: assumptions of the prediction, as sentences.
    """

    hardware: Hardware
    choices: dict[str, Any]
    samples_per_s: float | None
    tokens_per_s: float | None
    memory_budget: int
    samples: int | None
    context: int | None
    dtype: torch.dtype
    step: SimulatedStep
    padding: Padding | None = None
    tensor_ranks: int = 1
    context_ranks: int = 1
    pipeline_ranks: int = 1
    bubble_s: float = 0.0
    stages: list[dict[str, float]] = field(default_factory=list)
    range: Range | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """(ranks,) or (replicas, shards)."""
        return self.candidate.mesh

    @property
    def num_ranks(self) -> int:
        """Number of all ranks, including tensor and pipeline ranks."""
        return prod(self.mesh_shape) * self.tensor_ranks * self.pipeline_ranks

    @property
    def bound(self) -> str:
        """The bottleneck, "compute", "communication", "copies", "host" or "pipeline"."""
        return bound_of(self.step)

    @property
    def flops_per_s(self) -> float:
        """FLOP/s of a rank, including recomputation."""
        return self.step.flops / self.seconds if self.seconds else 0.0

    def picture(self, path: str | Path) -> None:
        """Draw the simulated step to a file: streams over time, memory below."""
        outer = [n for n in (self.pipeline_ranks,) if n > 1]
        inner = [n for n in (self.tensor_ranks,) if n > 1]
        dims = " x ".join(map(str, [*outer, *self.mesh_shape, *inner]))
        title = (
            f"Predicted training step on {dims} GPUs ({self.hardware.name}): "
            f"{show_seconds(self.seconds)}; peak memory {show_bytes(self.peak_bytes)}"
        )
        draw(self.step, Path(path), title=title, memory_budget=self.memory_budget)

    def figures(self) -> dict[str, Any]:
        """The numbers as JSON-compatible data."""
        return {
            PREDICTED: 1,
            "hardware": self.hardware.name,
            "mesh_shape": list(self.mesh_shape),
            "num_ranks": self.num_ranks,
            "context_ranks": self.context_ranks,
            "pipeline_ranks": self.pipeline_ranks,
            "bubble_s": self.bubble_s,
            "stages": self.stages,
            "step_s": self.seconds,
            **range_figures(self.range),
            **figures_of(self.step),
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "needed_bytes": self.needed_bytes,
            "padding_bytes": 0 if self.padding is None else self.padding.nbytes,
            "padding_factor": 1.0 if self.padding is None else self.padding.factor,
            "memory_budget": self.memory_budget,
        }

    def to_dict(self) -> dict[str, Any]:
        """The prediction as JSON-compatible data."""
        return {
            **self.figures(),
            **self.choices,
            **{name: getattr(self, name) for name in _RATES},
            "host_bytes": self.step.host_bytes,
            "fits": self.fits,
            "notes": self.notes,
        }

    @property
    def memory(self) -> str:
        """The memory needed, as text."""
        libraries = show_bytes(self.needed_bytes - self.reserved_bytes)
        return (
            f"{show_bytes(self.peak_bytes)} allocated; {show_bytes(self.reserved_bytes)} reserved "
            f"+ {libraries} of libraries of {show_bytes(self.memory_budget)}"
            + ("" if self.fits else ": does not fit")
        )

    @override
    def __str__(self) -> str:
        facts = [
            ("Hardware", f"{self.hardware.name}, {plural(self.num_ranks, 'rank')}"),
            ("Mesh", " x ".join(map(str, self.mesh_shape))),
            *((_title(k), str(v)) for k, v in self.choices.items() if v is not None),
            ("Step", f"{show_seconds(self.seconds)}, {_rates(self)}"),
            *([] if self.range is None else [("Range", str(self.range))]),
            ("Exposed", f"{show_seconds(self.exposed_s)} of communication and waiting"),
            *([("Bubble", bubble_told(self))] if self.stages else []),
            ("Memory", self.memory),
            *([("Host memory", _host_memory(self))] if self.step.host_bytes else []),
        ]
        if self.padding is not None and self.padding.factor >= SHOWN_PADDING:
            facts.append(("Padding", str(self.padding)))
        return "\n".join([table(facts, indent=0), "", bound_sentence(self.step), *self.notes])


@dataclass(frozen=True)
class Sweep:
    """The result of `sweep`: predictions of many configurations; ``print`` shows a table.

    Attributes:
        predictions: the predictions of all configurations that can run, in the order of ``over``;
            the last field changes fastest.
        failed: configurations that cannot run, with the reason: a model that behaves differently
            when it is recomputed, or a unit that does not fit into ``max_gathered_bytes``.
        num_traced: the number of steps that were traced for all of them.
        columns: the names of the values in which the configurations differ.
    """

    predictions: list[Prediction]
    failed: list[tuple[dict[str, Any], str]]
    num_traced: int
    columns: tuple[str, ...]

    @property
    def best(self) -> Prediction | None:
        """The prediction that fits with the most samples per second, or with the shortest step if
        samples are not known. None if nothing fits."""
        fitting = [p for p in self.predictions if p.fits]
        return max(fitting, key=lambda p: (p.samples_per_s or 0.0, -p.seconds), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON-compatible data."""
        return {
            "predictions": [p.to_dict() for p in self.predictions],
            "failed": [{**what, "why": why} for what, why in self.failed],
            "num_traced": self.num_traced,
        }

    @override
    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [(*map(_title, self.columns), *_HEADER)]
        rows += [(*(_cell(p, name) for name in self.columns), *_row(p)) for p in self.predictions]
        right = [str(i) for i in range(len(rows[0]) - 2)]
        lines = [table(rows, right=right, indent=0)]
        for what, why in self.failed:
            told = ", ".join(f"{name} {value}" for name, value in what.items())
            lines.append(f"Cannot run: {told}: {why}")
        notes = dict.fromkeys(note for p in self.predictions for note in p.notes)
        return "\n".join([*lines, *notes])


def bubble_told(made: Prediction) -> str:
    """The waiting time and the memory of a pipeline's ranks, as text."""
    peaks = ", ".join(show_bytes(int(stage["peak_bytes"])) for stage in made.stages)
    share = 100 * made.bubble_s / made.seconds
    return (
        f"{show_seconds(made.bubble_s)} ({share:.0f} % of the step) of waiting for "
        f"other stages; allocated by rank: {peaks}"
    )


# -- as text -------------------------------------------------------------------------------------

_HEADER = ("Step", "Samples/s", "Tokens/s", "Exposed", "Allocated", "Reserved", "Bound", "")
_TITLES = {"num_ranks": "Ranks", "activation_checkpointing": "Checkpointing", "wrap": "Units"}


def _title(name: str) -> str:
    return _TITLES.get(name, name.replace("_", " ").capitalize())


def _cell(made: Prediction, name: str) -> str:
    if name in made.choices:
        value = made.choices[name]
        return "-" if value is None else str(value)
    value = getattr(made, name, None)
    return "-" if value is None else str(value)


def _row(made: Prediction) -> tuple[str, ...]:
    return (
        show_seconds(made.seconds),
        _rate(made.samples_per_s),
        _rate(made.tokens_per_s),
        show_seconds(made.exposed_s),
        show_bytes(made.peak_bytes),
        show_bytes(made.reserved_bytes),
        made.bound,
        "" if made.fits else "does not fit",
    )


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _rates(made: Prediction) -> str:
    told = [f"{made.flops_per_s / 1e12:.3g} TFLOPS per rank"]
    for name, value in (("samples", made.samples_per_s), ("tokens", made.tokens_per_s)):
        if value is not None:
            told.append(f"{_rate(value)} {name}/s")
    return ", ".join(told)


def _host_memory(made: Prediction) -> str:
    told = ", ".join(f"{show_bytes(n)} of {name}" for name, n in made.step.host_bytes.items())
    return told if made.pipeline_ranks == 1 else f"{told}, on the first rank"
