"""A plan: the choice, and its form as text, tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from typing_extensions import override

from ..api.shard_model import shard_model
from ..render.text import plural, show_bytes, show_seconds, table
from .advice import SHOWN_PADDING, Padding
from .candidates import Candidate
from .hardware.hardware import Hardware
from .outcomes import PREDICTED, Outcome, all_dims, bound_sentence, bubble_told, figures_of
from .picture import draw
from .ranges import Range, range_figures
from .replay.schedules import rank_of_stage
from .simulation.loads import describe_sizes
from .simulation.simulate import SimulatedStep
from .staged_steps import SplitStages, block_types, blocks_in, wrap_of_stage
from .tensor_parallel import Parallelize
from .trace.checkpointing import apply_checkpointing


@dataclass(frozen=True)
class Split:
    """Batches of different sizes, for ranks of different speeds.

    Attributes:
        speeds: of each rank: ``split_batch(samples, split.speeds)`` divides any micro-batch.
        sizes: samples of each rank in a micro-batch, where the sample input is one rank's part.
        even_s: the predicted time of a step if all ranks had as many.
    """

    speeds: tuple[float, ...]
    sizes: list[int]
    even_s: float


@dataclass
class Plan:
    """What `plan` chose, why, and the alternatives.

    Attributes:
        kwargs: for ``shard_model(model, mesh, **plan.kwargs)``.
        mesh_shape: shape of the mesh: (ranks,) or (replicas, shards).
        activation_checkpointing: "none", "selective" or "full".
        checkpoint_modules: names of the modules to recompute.
        accumulation: how gradients of micro-batches are summed, as in `estimate`; `apply` makes
            the model do so if the training loop turns gradient sync off for all micro-batches but
            the last (``"every"``: for none). None: there is one.
        step: the simulated step; of the slowest ranks, if they differ.
        outcomes: all simulated candidates, the best first; those that do not fit come last.
        reasons: explanations as sentences.
        split: how to divide the batch; None: evenly.
        experts: names of the modules that `shard_experts` gets.
        expert_ranks: over which it distributes them: the mesh of experts is (ranks // expert_ranks,
            expert_ranks). None: there are none.
        tensor_ranks: that share the operators and one batch, for each rank of ``mesh_shape``.
        context_ranks: of the last dim of ``mesh_shape``, those that have parts of the same
            sequences; the training script splits them (torch's ``context_parallel`` over
            ``plan.make_mesh()["context"]``).
        parallelize: makes the model tensor-parallel over them; None: nothing does.
        padding: what uneven dims cost the fullest rank; None: nothing.
        range: of the time of a step, by what is not known of the hardware; None: all is known.
        pipeline_ranks: that have other stages, each with a mesh of ``mesh_shape``.
        schedule: of the pipeline, as in ``torch.distributed.pipelining``; None: there is none.
        stages_per_rank: of the pipeline.
        split_stages: makes its stages.
        bubble_s: how long a rank of the pipeline waits for others, the mean of all.
        stages: of each rank of the pipeline: "compute_s", "bubble_s", "peak_bytes" and
            "needed_bytes"; empty without one.
    """

    kwargs: dict[str, Any]
    mesh_shape: tuple[int, ...]
    activation_checkpointing: str
    checkpoint_modules: list[str]
    hardware: Hardware
    memory_budget: int
    chosen: Outcome
    step: SimulatedStep
    outcomes: list[Outcome]
    reasons: list[str] = field(default_factory=list)
    split: Split | None = None
    accumulation: str | None = None
    experts: list[str] = field(default_factory=list)
    expert_ranks: int | None = None
    tensor_ranks: int = 1
    context_ranks: int = 1
    parallelize: Parallelize | None = None
    padding: Padding | None = None
    range: Range | None = None
    pipeline_ranks: int = 1
    schedule: str | None = None
    stages_per_rank: int = 1
    split_stages: SplitStages | None = None
    bubble_s: float = 0.0
    stages: list[dict[str, float]] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return prod(self.mesh_shape) * self.tensor_ranks * self.pipeline_ranks

    @property
    def runner_up(self) -> Outcome | None:
        """The fastest of the other candidates that fit."""
        others = [o for o in self.outcomes if o is not self.chosen and o.fits]
        return min(others, key=lambda outcome: outcome.paced_s, default=None)

    def make_mesh(self, device_type: str = "cuda") -> Any:
        """The mesh of the plan, over all processes; "pipeline" is its first dim and "tensor" its
        last one, if it has these.

        With ``context_ranks``, "data" and "context" take the place of "shard".
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
        """Make ``model`` parallel, checkpoint activations and shard it, in place, as planned.

        Args:
            mesh: made by `make_mesh`; None makes it.

        Sequences of a plan with ``context_ranks`` are split by the training script, in each step.

        Returns:
            The sharded model; of a plan with ``pipeline_ranks``, the sharded stages of this rank,
            in order: those of ``torch.distributed.pipelining.PipelineStage``, whose schedule the
            training script makes.

        Raises:
            ValueError: for a plan with experts, of which only the model knows where their tokens
                travel.
        """
        if self.experts:
            whole, ranks, first, more = "the model", "ranks", "", ""
            if self.pipeline_ranks > 1:
                whole, ranks = "each stage of split_stages on this rank", "ranks of a stage"
            if self.tensor_ranks > 1:
                first = f"parallelize {whole} over {plural(self.tensor_ranks, 'rank')}, then "
                more = f" (and data_ranks={prod(self.mesh_shape)}, if they send parts of a batch)"
            raise ValueError(
                f"A plan with experts cannot be applied in one call: {first}call shard_experts for "
                f"'{self.experts[0]}' and the others with a mesh of ({ranks} // "
                f"{self.expert_ranks}, {self.expert_ranks}){more}, give {whole} mesh['ep'] for its "
                f"TokenExchange, then fully_shard the blocks and {whole} (see fsdp2.experts)"
            )
        mesh = self.make_mesh() if mesh is None else mesh
        if self.context_ranks > 1:
            mesh["data", "context"]._flatten("shard")
        if self.pipeline_ranks == 1:
            return self._shard(model, mesh, self.checkpoint_modules, self.kwargs["wrap"])
        assert self.split_stages is not None
        assert self.schedule is not None
        types = block_types(model)
        stages = self.split_stages(model, self.pipeline_ranks * self.stages_per_rank)
        rank = mesh.get_local_rank("pipeline")
        made = []
        for number, stage in enumerate(stages):
            if rank_of_stage(self.schedule, number, self.pipeline_ranks) == rank:
                wrap = wrap_of_stage(stage, self.kwargs["wrap"], types)
                made.append(self._shard(stage, mesh, blocks_in(stage, types), wrap))
        return made

    def _shard(self, model: Any, mesh: Any, checkpointed: Sequence[str], wrap: Any) -> Any:
        """A model, or a stage, with all dims of the plan's mesh."""
        if self.tensor_ranks > 1:
            assert self.parallelize is not None
            model = self.parallelize(model, mesh["tensor"]) or model
        if self.tensor_ranks > 1 or self.context_ranks > 1 or self.pipeline_ranks > 1:
            mesh = mesh[self._data_dims]
        if self.activation_checkpointing != "none":
            for name in checkpointed:
                module = model.get_submodule(name)
                module.forward = apply_checkpointing(module.forward, self.activation_checkpointing)
        made = shard_model(model, mesh, **{**self.kwargs, "wrap": wrap})
        if self.accumulation == "sharded":
            made.set_accumulate_sharded(True)
        return made

    def picture(self, path: str | Path) -> None:
        """Write the simulated step as a picture: streams over time, memory below."""
        draw(self.step, Path(path), title=_title(self), memory_budget=self.memory_budget)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-compatible data."""
        return _as_dict(self)

    @override
    def __str__(self) -> str:
        return _as_text(self)


# -- as text -----------------------------------------------------------------------------------


def reasons(made: Plan) -> list[str]:
    """One sentence per choice: the cost of the best alternatives."""
    lines = [bound_sentence(made.step)]
    chosen = made.chosen.candidate
    questions = (
        ("mesh", "Mesh", lambda c: (c.strategy, c.mesh)),
        ("checkpointing", "Checkpointing", lambda c: c.checkpointing),
        ("wrap", "Units", lambda c: c.wrap),
        ("reshard", "Resharding", lambda c: c.reshard),
        ("prefetch", "Prefetch", lambda c: c.prefetch),
        ("accumulation", "Accumulation", lambda c: c.accumulation),
        ("experts", "Experts", lambda c: c.expert_ranks),
        ("tensor", "Tensor parallel", lambda c: c.tensor_ranks),
        ("context", "Context parallel", lambda c: c.context_ranks),
        ("pipeline", "Pipeline", lambda c: (c.degrees.pipeline, c.pipeline)),
    )
    for _, title, key in questions:
        others: dict[Any, Outcome] = {}
        for outcome in made.outcomes:  # the best first
            if key(outcome.candidate) != key(chosen):
                others.setdefault(key(outcome.candidate), outcome)
        told = [
            f"{_value(title, o)} {_against(o, made)}{_besides(title, o, made)}"
            for o in list(others.values())[:3]
        ]
        if told:
            lines.append(f"{title}: {_value(title, made.chosen)}; {'; '.join(told)}.")
    return lines


def _value(title: str, outcome: Outcome) -> str:
    c = outcome.candidate
    shape = " x ".join(map(str, c.mesh))
    return {
        "Mesh": f"{c.strategy} {shape}",
        "Checkpointing": c.checkpointing,
        "Units": c.wrap,
        "Resharding": "default" if c.reshard is None else f"reshard_after_forward={c.reshard}",
        "Prefetch": str(c.prefetch),
        "Accumulation": str(c.accumulation),
        "Experts": f"over {plural(c.expert_ranks or 1, 'rank')}",
        "Tensor parallel": f"over {plural(c.tensor_ranks or 1, 'rank')}",
        "Context parallel": f"over {plural(c.context_ranks or 1, 'rank')}",
        "Pipeline": _pipeline(c),
    }[title]


def _pipeline(candidate: Candidate) -> str:
    if candidate.degrees.pipeline == 1:
        return "none"
    return f"over {plural(candidate.degrees.pipeline, 'rank')} ({candidate.pipeline})"


def _against(outcome: Outcome, made: Plan) -> str:
    if not outcome.fits:
        return f"needs {show_bytes(outcome.needed_bytes)}, more than the budget"
    slower = 100 * (outcome.paced_s / made.chosen.paced_s - 1)
    speed = f"is {abs(slower):.1f} % {'slower' if slower > 0 else 'faster'}"
    if abs(slower) < 0.05:
        speed = "is as fast"
    more = outcome.peak_bytes - made.chosen.peak_bytes
    memory = f"{show_bytes(abs(more))} {'more' if more > 0 else 'less'} memory"
    if abs(more) < 1e-3 * made.chosen.peak_bytes:
        memory = "the same memory"
    return f"{speed} with {memory}"


_TITLES = (
    *("Mesh", "Checkpointing", "Units", "Resharding", "Prefetch", "Accumulation", "Experts"),
    *("Tensor parallel", "Context parallel", "Pipeline"),
)


def _besides(title: str, outcome: Outcome, made: Plan) -> str:
    """What else differs: some choices only fit together with another one."""
    changed = [
        f"{other.lower()} {_value(other, outcome)}"
        for other in _TITLES
        if other != title and _value(other, outcome) != _value(other, made.chosen)
    ]
    return f" (and {', '.join(changed)})" if changed else ""


def _as_text(made: Plan) -> str:
    """The plan, the reasons, and the best alternatives."""
    facts = [
        ("Hardware", f"{made.hardware.name}, {_ranks(made)}"),
        ("Strategy", f"{made.kwargs['strategy']}, mesh {' x '.join(map(str, made.mesh_shape))}"),
        ("Units", made.chosen.candidate.wrap),
        ("Resharding", _value("Resharding", made.chosen)),
        ("Prefetch", _value("Prefetch", made.chosen)),
        ("Checkpointing", made.activation_checkpointing),
        ("Step", f"{show_seconds(made.chosen.seconds)}, {_rate(made)}"),
        ("Memory", _memory(made)),
    ]
    if made.range is not None:
        facts.insert(7, ("Range", str(made.range)))
    if made.accumulation is not None:
        facts.insert(6, ("Accumulation", made.accumulation))
    if limit := made.kwargs.get("max_gathered_bytes"):
        facts.insert(5, ("Gathered", f"at most {show_bytes(limit)} at any moment"))
    if made.experts:
        facts.insert(
            2, ("Experts", f"{len(made.experts)} modules, {_value('Experts', made.chosen)}")
        )
    if made.chosen.candidate.pipeline_ranks is not None:
        facts.insert(2, ("Pipeline", _value("Pipeline", made.chosen)))
        if made.stages:
            bubble = bubble_told(made.bubble_s, made.chosen.seconds, made.stages)
            facts.insert(-1, ("Bubble", bubble))
    if made.chosen.candidate.context_ranks is not None:
        facts.insert(2, ("Context parallel", _value("Context parallel", made.chosen)))
    if made.parallelize is not None:
        facts.insert(2, ("Tensor parallel", _value("Tensor parallel", made.chosen)))
    if made.padding is not None and made.padding.factor >= SHOWN_PADDING:
        facts.append(("Padding", str(made.padding)))
    if made.split is not None:
        facts.insert(2, ("Samples", describe_sizes(made.split.sizes)))
    lines = [table(facts, indent=0), "", "Why", *(f"  {reason}" for reason in made.reasons)]
    runner_up = made.runner_up
    if runner_up is not None:
        lines += ["", f"Runner-up: {runner_up}"]
    title = f"The best of {plural(len(made.outcomes), 'simulated configuration')}"
    lines += ["", title, _alternatives(made)]
    return "\n".join(lines)


def _alternatives(made: Plan) -> str:
    # Where steps have different numbers of samples, their times say nothing about speed.
    paced = len({outcome.candidate.degrees.ranks_per_batch for outcome in made.outcomes}) > 1
    paced = paced or made.parallelize is not None
    rows = [["", "step", *(["speed"] if paced else []), "exposed", "allocated", "reserved", ""]]
    for outcome in made.outcomes[:8]:
        speed = made.chosen.paced_s / outcome.paced_s
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


def _memory(made: Plan) -> str:
    chosen = made.chosen
    allocated, reserved = show_bytes(chosen.peak_bytes), show_bytes(chosen.reserved_bytes)
    libraries = show_bytes(chosen.needed_bytes - chosen.reserved_bytes)
    budget = show_bytes(made.memory_budget)
    return f"{allocated} allocated; {reserved} reserved + {libraries} of libraries of {budget}"


def _ranks(made: Plan) -> str:
    return f"{made.num_ranks} ranks"


def _rate(made: Plan) -> str:
    rate = made.step.flops / made.step.seconds / 1e12
    return f"{rate:.0f} TFLOPS per rank" if rate >= 10 else f"{rate:.2g} TFLOPS per rank"


def _as_dict(made: Plan) -> dict[str, Any]:
    """JSON-compatible data: names, numbers and sentences."""
    step = made.step
    policy = made.kwargs["mp_policy"]
    policies = ("mp_policy", "offload_policy", "comm_policy")
    kwargs = {
        k: "by parameter" if callable(v) and k == "shard_granularity" else v
        for k, v in made.kwargs.items()
        if k not in policies
    }
    narrow = made.kwargs.get("comm_policy")
    return {
        PREDICTED: 1,
        "hardware": made.hardware.name,
        "num_ranks": made.num_ranks,
        "mesh_shape": list(made.mesh_shape),
        "shard_model": kwargs,
        "param_dtype": None if policy.param_dtype is None else str(policy.param_dtype),
        "reduce_dtype": None if policy.reduce_dtype is None else str(policy.reduce_dtype),
        "comm_policy": None if narrow is None else str(narrow),
        "offload": type(made.kwargs["offload_policy"]).__name__ == "CPUOffloadPolicy",
        "activation_checkpointing": made.activation_checkpointing,
        "checkpoint_modules": made.checkpoint_modules,
        "accumulation": made.accumulation,
        "split": None if made.split is None else asdict(made.split),
        "step_s": made.chosen.seconds,
        **range_figures(made.range),
        **figures_of(step),
        "peak_bytes": made.chosen.peak_bytes,
        "reserved_bytes": made.chosen.reserved_bytes,
        "needed_bytes": made.chosen.needed_bytes,
        "experts": made.experts,
        "expert_ranks": made.expert_ranks,
        "tensor_ranks": made.tensor_ranks,
        "context_ranks": made.context_ranks,
        "pipeline_ranks": made.pipeline_ranks,
        "schedule": made.schedule,
        "stages_per_rank": made.stages_per_rank,
        "bubble_s": made.bubble_s,
        "stages": made.stages,
        "padding_bytes": 0 if made.padding is None else made.padding.nbytes,
        "padding_factor": 1.0 if made.padding is None else made.padding.factor,
        "memory_budget": made.memory_budget,
        "num_events": step.num_events,
        "reasons": made.reasons,
        "outcomes": [
            {
                **asdict(replace(o.candidate)),
                "step_s": o.seconds,
                "exposed_s": o.exposed_s,
                "peak_bytes": o.peak_bytes,
                "reserved_bytes": o.reserved_bytes,
                "needed_bytes": o.needed_bytes,
                "fits": o.fits,
            }
            for o in made.outcomes
        ],
    }


def _title(made: Plan) -> str:
    step = made.step
    shape = all_dims(made.mesh_shape, made.tensor_ranks, made.pipeline_ranks)
    exposed = f"{show_seconds(step.exposed_s)} of it waiting for communication"
    return (
        f"Predicted training step on {shape} GPUs ({made.hardware.name}): "
        f"{show_seconds(step.seconds)}, {exposed}; peak memory {show_bytes(step.peak.total)}"
    )
