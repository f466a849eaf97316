"""Configurations of one model on one kind of hardware, predicted from traces that they share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ..api.shard_model import find_strategy
from ..common.suggestions import did_you_mean
from ..policy import CPUOffloadPolicy, check_comm_policy
from ..render.text import plural
from ..wrap import UnitDescription
from .advice import padding_of
from .arguments import check_ranks, checked_budget
from .candidates import Candidate, Degrees, Pipeline
from .hardware.hardware import Hardware
from .model_steps import ModelSteps
from .outcomes import bound_of, outcome_of, simulate_ranks, stage_figures
from .prediction import Prediction
from .ranges import range_of
from .replay.pipeline import Part
from .replay.schedules import SPLIT, check_schedule
from .replay.setups import check_number, checked_mesh, make_setup
from .replay.shards import Setup
from .simulation.loads import even_load, sizes_of, speeds_of
from .simulation.pipeline_times import RankOfPipeline, replay_pipeline, simulate_pipeline, stages_of
from .simulation.simulate import SimulatedStep, Simulator
from .trace.checkpointing import MODES
from .traces import ALONE, Compiled, Size


class Cells:
    """Predicts configurations of one model on one kind of hardware.

    Args:
        steps: of the model, with one choice of units.
        setup: fields of `Setup` that are the same for all configurations.
    """

    def __init__(
        self,
        steps: ModelSteps,
        hardware: Hardware,
        *,
        optimizer: Any,
        memory_budget: float | None,
        **setup: Any,
    ) -> None:
        check_comm_policy(setup["comm_policy"])
        self.hardware = hardware
        self.budget = checked_budget(memory_budget, hardware)
        self.steps = steps
        self._simulator = Simulator(hardware, optimizer)
        self._options = {"mp_policy": steps.options.mp_policy, **setup}
        [self._label] = steps.whole.units

    def predict(
        self,
        num_ranks: int | Sequence[int],
        size: Size,
        *,
        activation_checkpointing: str,
        pipeline: Pipeline,
        degrees: Degrees,
        compiled: Compiled = False,
        ranged: bool = False,
        **choices: Any,
    ) -> Prediction:
        """Simulate one configuration; ``ranged``: with the range of its time."""
        self._check(activation_checkpointing, pipeline, degrees, compiled, choices)
        strategy = choices["strategy"]
        mesh = mesh_of(num_ranks, strategy, self.hardware, degrees)
        parts = self._parts(
            (activation_checkpointing, size, degrees, compiled), pipeline, mesh, choices
        )
        setup = parts[0].setup
        all_ranks = setup.num_ranks * degrees.tensor * degrees.pipeline
        loads = even_load(speeds_of(self.hardware, all_ranks))
        candidate = Candidate(strategy, mesh, activation_checkpointing, self._label)

        replays: list[RankOfPipeline] = []
        if degrees.pipeline > 1:
            replays = replay_pipeline(self._simulator, parts, pipeline.schedule, keep_samples=True)

        def steps(simulator: Simulator, by: float = 1.0, **options: Any) -> list[SimulatedStep]:
            if replays:
                speed = by * min(load.speed for load in loads)
                return simulate_pipeline(simulator, parts, pipeline.schedule, replays, speed=speed)
            work = [(parts[0].trace, load.speed * by) for load in loads]
            return simulate_ranks(simulator, setup, work, **options)

        def seconds(hardware: Hardware, speed: float) -> float:
            made = steps(self._simulator.on(hardware), speed)
            return outcome_of(candidate, made, self.budget).seconds

        made = self._prediction(
            candidate, steps(self._simulator, keep_samples=True), parts, size, degrees, pipeline
        )
        told = self._told(choices, activation_checkpointing, degrees, pipeline, compiled)
        range = range_of(self.hardware, seconds) if ranged else None
        return replace(made, choices=told, range=range)

    def _prediction(
        self,
        candidate: Candidate,
        made: list[SimulatedStep],
        parts: Sequence[Part],
        size: Size,
        degrees: Degrees,
        pipeline: Pipeline,
    ) -> Prediction:
        """The figures of simulated steps."""
        setup, whole = parts[0].setup, self.steps.whole
        outcome = outcome_of(candidate, made, self.budget)
        samples, context, tokens = sizes_of(self.steps.sample_input)
        samples, context = size.samples or samples, size.context or context
        rate = None
        if samples is not None:
            rate = samples * setup.micro_batches * setup.num_batches / outcome.seconds
        fullest = max(range(len(made)), key=lambda i: made[i].needed_bytes)
        notes = [note for part in parts for note in whole.notes(part.trace, self.hardware)]
        return Prediction(
            hardware=self.hardware,
            mesh_shape=candidate.mesh,
            tensor_ranks=degrees.tensor,
            context_ranks=degrees.context,
            pipeline_ranks=degrees.pipeline,
            choices={},
            seconds=outcome.seconds,
            samples_per_s=rate,
            tokens_per_s=rate * context if rate and context and tokens else None,
            exposed_s=outcome.exposed_s,
            bubble_s=sum(step.bubble_s for step in made) / len(made),
            bound=bound_of(made[0]),
            peak_bytes=outcome.peak_bytes,
            reserved_bytes=outcome.reserved_bytes,
            needed_bytes=outcome.needed_bytes,
            memory_budget=self.budget,
            fits=outcome.fits,
            samples=samples,
            context=context,
            dtype=whole.dtype,
            step=made[0],
            stages=stage_figures(made) if degrees.pipeline > 1 else [],
            padding=padding_of(stages_of(parts, pipeline.schedule, fullest), made[fullest]),
            notes=list(dict.fromkeys(notes)),
        )

    def _check(
        self,
        mode: str,
        pipeline: Pipeline,
        degrees: Degrees,
        compiled: Compiled,
        choices: dict[str, Any],
    ) -> None:
        check_mode(mode)
        self.steps.check_degrees(degrees)
        check_number("stages_per_rank", pipeline.stages_per_rank)
        check_number("micro_batches", choices["micro_batches"])
        if degrees.pipeline == 1:
            return
        self.steps.check_pipeline(
            degrees.pipeline,
            accumulation=choices["accumulation"],
            compiled=compiled,
            setup=self._options,
        )
        check_schedule(
            pipeline.schedule,
            degrees.pipeline,
            choices["micro_batches"],
            pipeline.stages_per_rank,
            compiled=bool(compiled),
        )

    def _parts(
        self,
        work: tuple[str, Size, Degrees, Compiled],
        pipeline: Pipeline,
        mesh: tuple[int, ...],
        choices: dict[str, Any],
    ) -> list[Part]:
        """The stages of the pipeline, or all of the model; ``work`` is what `TracedSteps.get`
        takes."""
        degrees = work[2]

        def setup(units: Sequence[UnitDescription], experts: Collection[tuple[str, ...]]) -> Setup:
            return make_setup(
                units,
                mesh[0] if len(mesh) == 1 else mesh,
                experts=experts,
                expert_ranks=degrees.experts,
                tensor_ranks=degrees.tensor,
                context_ranks=degrees.context,
                pipeline_ranks=degrees.pipeline,
                granularity=self.steps.granularity,
                **choices,
                **self._options,
            )

        whole = self.steps.whole
        setup(whole.units[self._label], whole.expert_units)  # errors of arguments before a trace
        num_stages = 1 if degrees.pipeline == 1 else degrees.pipeline * pipeline.stages_per_rank
        apart = degrees.pipeline > 1 and pipeline.schedule in SPLIT
        stages = self.steps.get(num_stages, *work, splits_backward=apart)
        return [
            Part(i, s.trace, setup(s.units, s.expert_units), s.split) for i, s in enumerate(stages)
        ]

    def _told(
        self,
        choices: dict[str, Any],
        mode: str,
        degrees: Degrees,
        pipeline: Pipeline,
        compiled: Compiled,
    ) -> dict[str, Any]:
        """What makes this configuration, as JSON-compatible data."""
        told = {"strategy": choices["strategy"], "wrap": self._label, **choices}
        reshard = told["reshard_after_forward"]
        told["reshard_after_forward"] = "default" if reshard is None else reshard
        if callable(reshard):
            told["reshard_after_forward"] = "by unit"
        if told["micro_batches"] == 1:
            told["accumulation"] = None
        told["compiled"] = None
        whole = self.steps.whole
        if names := whole.compiled_modules(compiled):
            told["compiled"] = "blocks" if compiled is True else plural(len(names), "module")
        if whole.experts:
            told["expert_ranks"] = degrees.experts
        if whole.parallelize is not None:
            told["tensor_ranks"] = degrees.tensor
        if degrees.context > 1:
            told["context_ranks"] = degrees.context
        if degrees.pipeline > 1:
            told["pipeline_ranks"] = degrees.pipeline
            told |= {"schedule": pipeline.schedule, "stages_per_rank": pipeline.stages_per_rank}
        return {**told, "activation_checkpointing": mode, **self._told_of_all()}

    def _told_of_all(self) -> dict[str, Any]:
        """What all configurations have in common, as far as it is not the default."""
        told: dict[str, Any] = {}
        policy = self._options["mp_policy"]
        for name in ("param_dtype", "reduce_dtype"):
            if (dtype := getattr(policy, name)) is not None:
                told[name] = str(dtype)[6:]
        if isinstance(self._options["offload_policy"], CPUOffloadPolicy):
            told["offload"] = True
        if granularity := self.steps.granularity:
            told["shard_granularity"] = f"of {plural(len(granularity), 'parameter')}"
        if self._options["max_device_bytes"] is not None:
            told["max_device_bytes"] = self._options["max_device_bytes"]
        for name in ("replicate_below", "comm_policy", "max_gathered_bytes", "offload_optimizer"):
            if value := self._options[name]:
                told[name] = value if isinstance(value, int) else str(value)
        if (limit := self.steps.options.max_saved_bytes) is not None:  # 0 is the tightest limit
            told["max_saved_bytes"] = limit
        return told


def mesh_of(
    num_ranks: Any, strategy: str, hardware: Hardware, degrees: Degrees = ALONE
) -> tuple[int, ...]:
    """The mesh that shards parameters for a number of ranks, or the mesh that is given; of a
    pipeline, that of a stage."""
    if isinstance(num_ranks, list | tuple):
        mesh = checked_mesh(num_ranks)
        check_ranks(prod(mesh) * degrees.tensor * degrees.pipeline, hardware)
    else:
        check_ranks(num_ranks, hardware)
        rest = num_ranks
        for name in ("tensor", "pipeline"):
            number = getattr(degrees, name)
            if rest % number:
                raise ValueError(f"{name}_ranks={number} must divide num_ranks={num_ranks}")
            rest //= number
        mesh = (rest,)
        if find_strategy(strategy).hybrid:
            node = max(1, min(hardware.ranks_per_node // degrees.tensor, *mesh))
            mesh = (mesh[0] // node, node)
    if mesh[-1] % degrees.context:
        raise ValueError(
            f"context_ranks={degrees.context} must divide the last dim of the mesh, {mesh[-1]}: "
            "parameters are sharded over data and context ranks together"
        )
    return mesh


def check_mode(mode: Any) -> None:
    if mode not in MODES:
        hint = did_you_mean(str(mode), MODES)
        raise ValueError(f"activation_checkpointing must be one of {MODES}, got {mode!r}{hint}")
