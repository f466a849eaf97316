"""A plan: the choice, and its form as text, tables and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from typing_extensions import override

from ..api.shard_model import Sharding, shard_model
from ..render.text import plural, show_bytes, show_seconds, table
from .advice import SHOWN_PADDING
from .outcomes import Candidate, Outcome, bound_sentence, schedule_told
from .prediction import Prediction, bubble_told
from .replay.schedules import rank_of_stage
from .simulation.loads import describe_sizes
from .staged_steps import block_types, blocks_in, wrap_of_stage
from .trace.checkpointing import apply_checkpointing
from .workload import Workload


@dataclass(frozen=True)
class Split:
    """Batches of different sizes, for ranks of different speeds.

    Attributes:
        speeds: the speed of each rank. ``split_batch(samples, split.speeds)`` divides a micro-batch
            of any size.
        sizes: samples of each rank in a micro-batch whose even part is the sample input.
        even_s: the predicted seconds of a step in which all ranks have equal batches.
    """

    speeds: tuple[float, ...]
    sizes: list[int]
    even_s: float


@dataclass(frozen=True, kw_only=True)
class Plan(Prediction):
    """The result of `plan`: the `Prediction` of the best configuration, reasons and alternatives.

    Attributes:
        workload: the workload, with the chosen values.
        sharding: the sharding, with the chosen values; for ``shard_model(model, mesh,
            plan.sharding)``.
        checkpoint_modules: names of the modules to recompute.
        experts: names of the modules for `shard_experts`. Their mesh has the shape (ranks //
            expert_ranks, expert_ranks).
        outcomes: all simulated candidates, the best first; those that do not fit come last.
        reasons: the reasons for each choice, as sentences.
        split: how to divide the batch; None: evenly.
    """

    workload: Workload
    sharding: Sharding
    checkpoint_modules: list[str]
    experts: list[str]
    outcomes: list[Outcome]
    reasons: list[str] = field(default_factory=list)
    split: Split | None = None

    @property
    def chosen(self) -> Outcome:
        """The outcome of the plan."""
        return self.outcomes[0]

    @property
    def runner_up(self) -> Outcome | None:
        """The fastest of the other candidates that fit."""
        others = [o for o in self.outcomes if o is not self.chosen and o.fits]
        return min(others, key=lambda outcome: outcome.paced_s, default=None)

    def make_mesh(self, device_type: str = "cuda") -> Any:
        """Create the plan's mesh over all processes.

        Its dims are "pipeline" (if there is one), "replicate" (if there are replicas), "shard" and
        "tensor" (if there is one). With ``context_ranks``, "data" and "context" replace "shard".
        """
        from torch.distributed.device_mesh import init_device_mesh

        names, shape = self._data_dims, self.mesh_shape
        if self.context_ranks > 1:
            names = (*names[:-1], "data", "context")
            shape = (*shape[:-1], shape[-1] // self.context_ranks, self.context_ranks)
        if self.tensor_ranks > 1:
            names, shape = (*names, "tensor"), (*shape, self.tensor_ranks)
        if self.pipeline_ranks > 1:
            names, shape = ("pipeline", *names), (self.pipeline_ranks, *shape)
        return init_device_mesh(device_type, shape, mesh_dim_names=names)

    @property
    def _data_dims(self) -> tuple[str, ...]:
        return ("replicate", "shard") if len(self.mesh_shape) == 2 else ("shard",)

    def apply(self, model: Any, mesh: Any = None) -> Any:
        """Apply the plan to ``model`` in place: parallelize, checkpoint activations, and shard.

        If the plan has ``context_ranks``, the training script splits the sequences in each step.

        Args:
            mesh: the result of `make_mesh`; None calls it.

        Returns:
            The sharded model. For a plan with ``pipeline_ranks``, this rank's sharded stages in
            order; the training script passes them to
            ``torch.distributed.pipelining.PipelineStage`` and creates the schedule.

        Raises:
            ValueError: for a plan with experts, because only the model determines where their
                tokens are sent.
        """
        if self.experts:
            number = self.workload.expert_ranks
            whole, ranks, first, more = "the model", "ranks", "", ""
            if self.pipeline_ranks > 1:
                whole, ranks = "each stage of split_stages on this rank", "ranks of a stage"
            if self.tensor_ranks > 1:
                first = f"parallelize {whole} over {plural(self.tensor_ranks, 'rank')}, then "
                more = f" (and data_ranks={prod(self.mesh_shape)}, if they send parts of a batch)"
            raise ValueError(
                f"A plan with experts cannot be applied in one call: {first}call shard_experts for "
                f"'{self.experts[0]}' and the others with a mesh of ({ranks} // "
                f"{number}, {number}){more}, give {whole} mesh['ep'] for its "
                f"TokenExchange, then fully_shard the blocks and {whole} (see fsdp2.experts)"
            )
        mesh = self.make_mesh() if mesh is None else mesh
        if self.context_ranks > 1:
            mesh["data", "context"]._flatten("shard")
        if self.pipeline_ranks == 1:
            return self._shard(model, mesh, self.checkpoint_modules, self.sharding.wrap)
        split, schedule = self.workload.split_stages, self.workload.schedule
        assert split is not None
        types = block_types(model)
        stages = split(model, self.pipeline_ranks * self.workload.stages_per_rank)
        rank = mesh.get_local_rank("pipeline")
        made = []
        for number, stage in enumerate(stages):
            if rank_of_stage(schedule, number, self.pipeline_ranks) == rank:
                wrap = wrap_of_stage(stage, self.sharding.wrap, types)
                made.append(self._shard(stage, mesh, blocks_in(stage, types), wrap))
        return made

    def _shard(self, model: Any, mesh: Any, checkpointed: Sequence[str], wrap: Any) -> Any:
        """Apply the plan to a model, or a stage, over all dims of the plan's mesh."""
        if self.tensor_ranks > 1:
            assert self.workload.parallelize is not None
            model = self.workload.parallelize(model, mesh["tensor"]) or model
        if self.tensor_ranks > 1 or self.context_ranks > 1 or self.pipeline_ranks > 1:
            mesh = mesh[self._data_dims]
        mode = self.workload.activation_checkpointing
        for name in checkpointed if mode != "none" else ():
            module = model.get_submodule(name)
            module.forward = apply_checkpointing(module.forward, mode)
        made = shard_model(model, mesh, self.sharding, wrap=wrap)
        if self.workload.accumulation == "sharded":
            made.set_accumulate_sharded(True)
        return made

    @override
    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-compatible data."""
        return _as_dict(self)

    @override
    def __str__(self) -> str:
        return _as_text(self)


# -- as text -----------------------------------------------------------------------------------


def reasons(made: Plan) -> list[str]:
    """One sentence per choice, with the cost of the best alternatives."""
    lines = [bound_sentence(made.step)]
    for title in _QUESTIONS:
        others: dict[str, Outcome] = {}
        for outcome in made.outcomes:  # the best first
            if (value := _value(title, outcome)) != _value(title, made):
                others.setdefault(value, outcome)
        told = [
            f"{value} {_against(o, made)}{_besides(title, o, made)}"
            for value, o in list(others.items())[:3]
        ]
        if told:
            lines.append(f"{title}: {_value(title, made)}; {'; '.join(told)}.")
    return lines


def _ranks(number: int | None) -> str:
    return f"over {plural(number or 1, 'rank')}"


def _pipeline(candidate: Candidate) -> str:
    if not candidate.is_pipeline:
        return "none"
    how = schedule_told(candidate.schedule or "1F1B", candidate.stages_per_rank or 1)
    return f"{_ranks(candidate.pipeline_ranks)} ({how})"


# The choices by title, and the value of each in a candidate.
_QUESTIONS: dict[str, Callable[[Candidate], str]] = {
    "Mesh": lambda c: f"{c.strategy} {' x '.join(map(str, c.mesh))}",
    "Checkpointing": lambda c: c.checkpointing,
    "Units": lambda c: c.wrap,
    "Resharding": lambda c: (
        "default" if c.reshard is None else f"reshard_after_forward={c.reshard}"
    ),
    "Prefetch": lambda c: str(c.prefetch),
    "Accumulation": lambda c: str(c.accumulation),
    "Experts": lambda c: _ranks(c.expert_ranks),
    "Tensor parallel": lambda c: _ranks(c.tensor_ranks),
    "Context parallel": lambda c: _ranks(c.context_ranks),
    "Pipeline": _pipeline,
}


def _value(title: str, outcome: Outcome) -> str:
    return _QUESTIONS[title](outcome.candidate)


def _against(outcome: Outcome, made: Plan) -> str:
    if not outcome.fits:
        return f"needs {show_bytes(outcome.needed_bytes)}, more than the budget"
    slower = 100 * (outcome.paced_s / made.paced_s - 1)
    speed = f"is {abs(slower):.1f} % {'slower' if slower > 0 else 'faster'}"
    if abs(slower) < 0.05:
        speed = "is as fast"
    more = outcome.peak_bytes - made.peak_bytes
    memory = f"{show_bytes(abs(more))} {'more' if more > 0 else 'less'} memory"
    if abs(more) < 1e-3 * made.peak_bytes:
        memory = "the same memory"
    return f"{speed} with {memory}"


def _besides(title: str, outcome: Outcome, made: Plan) -> str:
    """The other choices that differ: some choices fit only in combination."""
    changed = [
        f"{other.lower()} {_value(other, outcome)}"
        for other in _QUESTIONS
        if other != title and _value(other, outcome) != _value(other, made)
    ]
    return f" (and {', '.join(changed)})" if changed else ""


def _as_text(made: Plan) -> str:
    """The plan, the reasons, and the best alternatives."""
    c, sharding = made.candidate, made.sharding
    facts: list[tuple[str, str | None]] = [
        ("Hardware", f"{made.hardware.name}, {made.num_ranks} ranks"),
        ("Strategy", f"{c.strategy}, mesh {' x '.join(map(str, c.mesh))}"),
        ("Samples", None if made.split is None else describe_sizes(made.split.sizes)),
        ("Tensor parallel", None if c.tensor_ranks is None else _ranks(c.tensor_ranks)),
        ("Context parallel", None if c.context_ranks is None else _ranks(c.context_ranks)),
        ("Pipeline", None if c.pipeline_ranks is None else _pipeline(c)),
        (
            "Experts",
            f"{len(made.experts)} modules, {_ranks(c.expert_ranks)}" if made.experts else None,
        ),
        ("Units", c.wrap),
        ("Resharding", _value("Resharding", made)),
        ("Prefetch", _value("Prefetch", made)),
        (
            "Gathered",
            f"at most {show_bytes(limit)} at any moment"
            if (limit := sharding.max_gathered_bytes)
            else None,
        ),
        ("Checkpointing", c.checkpointing),
        ("Accumulation", c.accumulation),
        ("Step", f"{show_seconds(made.seconds)}, {_rate(made)}"),
        ("Range", None if made.range is None else str(made.range)),
        ("Bubble", bubble_told(made) if made.stages else None),
        ("Memory", made.memory),
    ]
    if made.padding is not None and made.padding.factor >= SHOWN_PADDING:
        facts.append(("Padding", str(made.padding)))
    known = [(title, value) for title, value in facts if value is not None]
    lines = [table(known, indent=0), "", "Why", *(f"  {reason}" for reason in made.reasons)]
    runner_up = made.runner_up
    if runner_up is not None:
        lines += ["", f"Runner-up: {runner_up}"]
    title = f"The best of {plural(len(made.outcomes), 'simulated configuration')}"
    lines += ["", title, _alternatives(made)]
    return "\n".join(lines)


def _alternatives(made: Plan) -> str:
    # If steps have different numbers of samples, their times cannot be compared.
    paced = len({outcome.candidate.ranks_per_batch for outcome in made.outcomes}) > 1
    paced = paced or made.workload.parallelize is not None
    rows = [["", "step", *(["speed"] if paced else []), "exposed", "allocated", "reserved", ""]]
    for outcome in made.outcomes[:8]:
        speed = made.paced_s / outcome.paced_s
        rows.append(
            [
                str(outcome.candidate),
                show_seconds(outcome.seconds),
                *([f"{speed:.3f}"] if paced else []),
                show_seconds(outcome.exposed_s),
                show_bytes(outcome.peak_bytes),
                show_bytes(outcome.reserved_bytes),
                "" if outcome.fits else "does not fit",
            ]
        )
    return table(rows, right="12345"[: 5 if paced else 4])


def _rate(made: Plan) -> str:
    rate = made.step.flops / made.step.seconds / 1e12
    return f"{rate:.0f} TFLOPS per rank" if rate >= 10 else f"{rate:.2g} TFLOPS per rank"


def _as_dict(made: Plan) -> dict[str, Any]:
    """JSON-compatible data: names, numbers and sentences."""
    c, sharding = made.candidate, made.sharding
    policy, narrow, rows = sharding.mp_policy, sharding.comm_policy, sharding.shard_granularity
    told = {name: getattr(sharding, name) for name in _ALWAYS_TOLD}
    told |= {n: value for n in _TOLD if (value := getattr(sharding, n))}
    if rows is not None:
        told["shard_granularity"] = "by parameter" if callable(rows) else rows
    if sharding.max_device_bytes is not None:
        told["max_device_bytes"] = sharding.max_device_bytes
    return {
        **made.figures(),
        "shard_model": told,
        "param_dtype": None if policy.param_dtype is None else str(policy.param_dtype),
        "reduce_dtype": None if policy.reduce_dtype is None else str(policy.reduce_dtype),
        "comm_policy": None if narrow is None else str(narrow),
        "offload": type(sharding.offload_policy).__name__ == "CPUOffloadPolicy",
        "activation_checkpointing": c.checkpointing,
        "checkpoint_modules": made.checkpoint_modules,
        "accumulation": c.accumulation,
        "split": None if made.split is None else asdict(made.split),
        "experts": made.experts,
        "expert_ranks": c.expert_ranks,
        "tensor_ranks": made.tensor_ranks,
        "schedule": c.schedule,
        "stages_per_rank": c.stages_per_rank or 1,
        "num_events": made.step.num_events,
        "reasons": made.reasons,
        "outcomes": [
            {
                **asdict(o.candidate),
                "step_s": o.seconds,
                **{name: getattr(o, name) for name in _OUTCOME},
            }
            for o in made.outcomes
        ],
    }


# Fields of `Sharding` that a plan always reports, and fields that it reports unless default.
_ALWAYS_TOLD = ("strategy", "wrap", "reshard_after_forward", "prefetch")
_OUTCOME = ("exposed_s", "peak_bytes", "reserved_bytes", "needed_bytes", "fits")
_TOLD = ("replicate_below", "direct_min_bytes", "max_gathered_bytes")
