"""Predicts configurations of one model on one kind of hardware, from traces that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..api.shard_model import Sharding
from ..policy import CPUOffloadPolicy, check_comm_policy
from ..render.text import plural
from .advice import padding_of
from .hardware.hardware import Hardware
from .outcomes import Candidate, outcome_of, range_of, slowest_first, stage_figures
from .prediction import Prediction
from .replay.pipeline import RankStage
from .replay.replay import Replay
from .replay.schedules import check_schedule
from .replay.setups import Setup, granularities, make_setup
from .simulation.loads import Load, batch_size, even_load, sizes_of, speeds_of
from .simulation.pipeline_times import replay_pipeline, simulate_pipeline, stages_of
from .simulation.simulate import SimulatedStep, Simulator
from .staged_steps import StagedSteps
from .trace.kernels import kernels_of
from .traces import TracedStage, TracedSteps
from .workload import Workload


class Configuration(NamedTuple):
    """A configuration to predict: the given workload and sharding, with the searched or varied
    values, and the mesh that shards."""

    workload: Workload
    sharding: Sharding
    mesh: tuple[int, ...]


# Arguments that a pipeline does not support, and why.
_OF_ONE_MODEL = {
    "offload_optimizer": "it brings back state of one optimizer for one model, not yet of stages",
    "max_device_bytes": "it is of one `shard_model`, and each stage has its own",
    "shard_granularity": "it goes by names of parameters, and stages have their own",
}


class Replays(NamedTuple):
    """The replayed steps of the ranks that differ; the hardware determines their times.

    Attributes:
        parts: the stages of a pipeline, or the model once for each load.
        loads: the loads of the ranks.
        made: the replays of a pipeline's ranks, or one per load.
    """

    parts: Sequence[RankStage]
    loads: Sequence[Load]
    made: Sequence[Replay]

    @property
    def setup(self) -> Setup:
        return self.parts[0].setup

    def steps(self, simulator: Simulator, by: float = 1.0) -> list[SimulatedStep]:
        """The simulated steps of the ranks that differ, the slowest first, or of the pipeline's
        ranks; ``by``: the relative speed of kernels."""
        if self.setup.workload.pipeline_ranks > 1:
            speed = by * min(load.speed for load in self.loads)
            schedule = self.setup.workload.schedule
            return simulate_pipeline(simulator, self.parts, schedule, self.made, speed=speed)
        return slowest_first(
            simulator.time_stages(each, speed=load.speed * by)
            for each, load in zip(self.made, self.loads, strict=True)
        )

    def stages(self, rank: int) -> list[RankStage]:
        """The stages of a rank of the pipeline; without one, the whole model."""
        if self.setup.workload.pipeline_ranks == 1:
            return [self.parts[0]]
        return stages_of(self.parts, self.setup.workload.schedule, rank)


class Predictor:
    """Traces and simulates steps of a workload; each step is traced once.

    Args:
        wraps: choices of units by label; None: the units of ``sharding``.
        search_units: whether ``wraps`` are the default choices of a search, so that stages get
            their own.
    """

    def __init__(
        self,
        workload: Workload,
        sharding: Sharding,
        hardware: Hardware,
        wraps: Mapping[str, Any] | None = None,
        *,
        search_units: bool = False,
    ) -> None:
        check_comm_policy(sharding.comm_policy)
        self.workload = replace(
            workload, kernels=kernels_of(workload.kernels, hardware.device_type)
        )
        self.sharding = sharding
        self.hardware = hardware
        self.simulator = Simulator(hardware, workload.optimizer)
        self.whole = TracedSteps(self.workload, sharding, wraps)
        self.staged: StagedSteps | None = None
        if workload.split_stages is not None:
            of_stages = None if search_units else self.whole.wraps
            self.staged = StagedSteps(self.workload, sharding, of_stages)
        self.granularity = granularities(
            workload.model, sharding.shard_granularity, self.whole.experts
        )

    @property
    def num_traced(self) -> int:
        return self.whole.num_traced + (self.staged.num_traced if self.staged else 0)

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.workload.samples or batch_size(self.workload.sample_input)

    def setup(self, of: Configuration, stage: TracedStage | None = None) -> Setup:
        """The setup of the model, or of a stage."""
        units, experts = self.whole.units[self.label_of(of)], self.whole.expert_units
        if stage is not None:
            units, experts = stage.units, stage.expert_units
        return make_setup(
            units, of.mesh, of.workload, of.sharding, experts=experts, granularity=self.granularity
        )

    def label_of(self, of: Configuration) -> str:
        """The label of its choice of units."""
        return self.whole.label_of(of.sharding.wrap)

    def parts(self, of: Configuration) -> list[RankStage]:
        """The stages of the pipeline, or the whole model."""
        if of.workload.pipeline_ranks == 1:
            stages = [self.whole.stage(of.workload, self.label_of(of))]
        else:
            assert self.staged is not None
            stages = self.staged.get(of.workload, self.label_of(of))
        setups = [self.setup(of, each) for each in stages]
        return [RankStage(i, s.trace, setups[i], s.split) for i, s in enumerate(stages)]

    def replay(
        self, of: Configuration, loads: Sequence[Load], *, keep_samples: bool = False
    ) -> Replays:
        """Replay the steps of ranks with these loads."""
        workload = of.workload
        if workload.pipeline_ranks > 1:
            parts = self.parts(of)
            made = replay_pipeline(
                self.simulator, parts, workload.schedule, keep_samples=keep_samples
            )
            return Replays(parts, loads, made)
        parts = []
        for load in loads:
            own = replace(workload, samples=load.samples or workload.samples)
            parts += self.parts(of._replace(workload=own))
        replay = self.simulator.replay_step
        made = [replay(each.trace, each.setup, keep_samples=keep_samples) for each in parts]
        return Replays(parts, loads, made)

    def predict(self, of: Configuration, budget: int, *, ranged: bool = False) -> Prediction:
        """Simulate one configuration; ``ranged``: with the range of its time."""
        self.check(of.workload, of.sharding)
        setup = self.setup(of)  # errors of arguments before a trace
        loads = even_load(speeds_of(self.hardware, setup.num_all_ranks))
        replays = self.replay(of, loads, keep_samples=True)
        mode = of.workload.activation_checkpointing
        candidate = Candidate(of.sharding.strategy, of.mesh, mode, self.label_of(of))
        return self.prediction(candidate, replays, budget, ranged=ranged)

    def prediction(
        self, candidate: Candidate, replays: Replays, budget: int, *, ranged: bool
    ) -> Prediction:
        """The figures of simulated steps."""
        made = replays.steps(self.simulator)
        outcome = outcome_of(candidate, made, budget)
        setup, workload = replays.setup, replays.setup.workload

        def seconds(hardware: Hardware, speed: float) -> float:
            steps = replays.steps(self.simulator.on(hardware), speed)
            return outcome_of(candidate, steps, budget).seconds

        samples, context, tokens = sizes_of(workload.sample_input)
        samples, context = workload.samples or samples, workload.context or context
        rate = None
        if samples is not None:
            rate = samples * workload.micro_batches * setup.num_batches / outcome.seconds
        fullest = max(range(len(made)), key=lambda i: made[i].needed_bytes)
        notes = [n for part in replays.parts for n in self.whole.notes(part.trace, self.hardware)]
        return Prediction(
            **vars(outcome),
            hardware=self.hardware,
            tensor_ranks=workload.tensor_ranks,
            context_ranks=workload.context_ranks,
            pipeline_ranks=workload.pipeline_ranks,
            choices=_told(setup, self.whole),
            samples_per_s=rate,
            tokens_per_s=rate * context if rate and context and tokens else None,
            bubble_s=sum(step.bubble_s for step in made) / len(made),
            memory_budget=budget,
            samples=samples,
            context=context,
            dtype=self.whole.dtype,
            step=made[0],
            stages=stage_figures(made) if workload.pipeline_ranks > 1 else [],
            padding=padding_of(replays.stages(fullest), made[fullest]),
            range=range_of(self.hardware, seconds) if ranged else None,
            notes=list(dict.fromkeys(notes)),
        )

    def check(self, workload: Workload, sharding: Sharding) -> None:
        """Check that the arguments fit each other, the model and the pipeline.

        Raises:
            ValueError: if they do not.
        """
        self.whole.check_ranks(workload)
        if workload.pipeline_ranks > 1:
            self.check_pipeline(workload, sharding)
            check_schedule(
                workload.schedule,
                workload.pipeline_ranks,
                workload.micro_batches,
                workload.stages_per_rank,
                compiled=bool(workload.compiled),
            )

    def check_pipeline(self, workload: Workload, sharding: Sharding) -> None:
        """Check that a pipeline supports the arguments, for all schedules.

        Raises:
            ValueError: if it does not.
        """
        told = f"pipeline_ranks={workload.pipeline_ranks}"
        if self.staged is None:
            raise ValueError(
                f"{told} needs split_stages=: a function of the model and a number of stages that "
                "returns these, in order"
            )
        if workload.max_saved_bytes is not None:
            raise ValueError(f"max_saved_bytes does not go together with {told}")
        given = (workload.offload_optimizer, sharding.max_device_bytes, self.granularity or None)
        for (name, reason), value in zip(_OF_ONE_MODEL.items(), given, strict=True):
            if value is not None:
                raise ValueError(
                    f"{name} does not go together with {told}: {reason}. Leave {name} or "
                    "pipeline_ranks out"
                )
        if not isinstance(workload.compiled, bool):
            raise ValueError(
                f"{told}: stages have other names, so compiled={workload.compiled!r} names no "
                "modules: pass True for the blocks, or False"
            )
        if workload.accumulation == "every":
            raise ValueError(
                f"{told}: torch's schedules do not reduce gradients in every micro-batch: pass "
                "accumulation='unsharded', or 'sharded' to sum on shards"
            )


def _told(setup: Setup, whole: TracedSteps) -> dict[str, Any]:
    """The values of a configuration, as JSON-compatible data."""
    workload, sharding = setup.workload, setup.sharding
    reshard: Any = sharding.reshard_after_forward
    if callable(reshard):
        reshard = "by unit"
    told: dict[str, Any] = {
        "strategy": sharding.strategy,
        "wrap": whole.label_of(sharding.wrap),
        "reshard_after_forward": "default" if reshard is None else reshard,
        "prefetch": sharding.prefetch,
        "micro_batches": workload.micro_batches,
        "accumulation": None if workload.micro_batches == 1 else workload.accumulation,
        "compiled": None,
    }
    if names := whole.compiled_modules(workload.compiled):
        told["compiled"] = "blocks" if workload.compiled is True else plural(len(names), "module")
    if whole.experts:
        told["expert_ranks"] = workload.expert_ranks
    if workload.parallelize is not None:
        told["tensor_ranks"] = workload.tensor_ranks
    if workload.context_ranks > 1:
        told["context_ranks"] = workload.context_ranks
    if workload.pipeline_ranks > 1:
        told |= {n: getattr(workload, n) for n in ("pipeline_ranks", "schedule", "stages_per_rank")}
    told["activation_checkpointing"] = workload.activation_checkpointing
    for name in ("param_dtype", "reduce_dtype"):
        if (dtype := getattr(sharding.mp_policy, name)) is not None:
            told[name] = str(dtype)[6:]
    if isinstance(sharding.offload_policy, CPUOffloadPolicy):
        told["offload"] = True
    if setup.granularity:
        told["shard_granularity"] = f"of {plural(len(setup.granularity), 'parameter')}"
    limits = {
        "max_device_bytes": sharding.max_device_bytes,
        "replicate_below": sharding.replicate_below or None,
        "comm_policy": sharding.comm_policy,
        "max_gathered_bytes": sharding.max_gathered_bytes,
        "offload_optimizer": workload.offload_optimizer,
        "max_saved_bytes": workload.max_saved_bytes,  # 0 is the tightest limit
    }
    for name, value in limits.items():
        if value is not None:
            told[name] = value if isinstance(value, int) else str(value)
    return told
