"""The search of `plan`: which configurations it simulates, and the best of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..features.gather_budget import GatherBudgetError
from ..render.text import plural, show_bytes
from .advice import advice, padding_of
from .candidates import (
    SEARCHED,
    Candidate,
    Degrees,
    first_round,
    second_round,
)
from .choices import Choices
from .hardware.hardware import Hardware
from .model_steps import ModelSteps
from .outcomes import (
    Outcome,
    outcome_of,
    simplicity,
    simulate_ranks,
    slowest_first,
    stage_figures,
    with_micro_batches,
)
from .pipeline_search import PipelineSearch
from .plan_report import Plan, reasons
from .ranges import MOST_COMPARED, as_fast, range_of
from .replay.pipeline import Part
from .replay.schedules import SPLIT
from .replay.setups import make_setup
from .replay.shards import Setup
from .simulation.loads import Load
from .simulation.pipeline_times import RankOfPipeline, replay_pipeline, simulate_pipeline, stages_of
from .simulation.simulate import SimulatedStep, Simulator, StagesReplay
from .staged_steps import TracedStage
from .trace.events import StepTrace
from .traces import Size

# Steps that differ by less than this count as equally fast.
SAME_SPEED = 0.005

# Of pipelines, those are simulated whose estimate is within this factor of the fastest, but at most
# so many; and at least one of all.
_CLOSE, _MOST_SIMULATED = 1.1, 3

# Without a pipeline, all micro-batches of a step but the first and the last are alike. If there are
# more than so many, steps with `FEW` of them and one less tell how long each takes, and only the
# best configurations are simulated with all.
MOST_REPLAYED, FEW = 8, 4


class Search:
    """Two rounds: meshes and checkpointing first, then the rest for the best of them.

    Args:
        setup: fields of `Setup` that are the same for all configurations.
        told: further arguments of `shard_model`, for the plan.
    """

    def __init__(
        self,
        steps: ModelSteps,
        simulator: Simulator,
        choices: Choices,
        budget: int,
        setup: dict[str, Any],
        told: dict[str, Any],
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.steps = steps
        self.traces = steps.whole
        self.simulator = simulator
        self.choices = choices
        self.budget = budget
        self.options = setup
        self.told = told
        self.progress = progress
        self.degrees = choices.pairs(1)
        self._expert_ranks = choices.expert_ranks.get(1, [None])  # without a pipeline

    def run(self, modes: tuple[str, ...], loads: Sequence[Load]) -> Plan:
        """The best configuration for ranks with these loads."""
        self.loads = loads
        self._replays: dict[Candidate, list[RankOfPipeline]] = {}
        self._kept_replays: dict[Candidate, list[StagesReplay]] = {}
        self.outcomes: dict[Candidate, Outcome] = {}
        self._estimated: set[Candidate] = set()  # of these outcomes
        self._too_large: dict[Candidate, GatherBudgetError] = {}
        self.notes: list[str] = []
        if not self.traces.blocks:
            modes = tuple(mode for mode in modes if mode == "none") or modes[:1]
        if self.degrees:
            modes = self._trace(modes)
            self._search_whole(modes)
        if all(load.samples is None for load in loads):  # batches of one size
            self._search_pipelines(modes)
        return self._conclude()

    def _search_whole(self, modes: tuple[str, ...]) -> None:
        """Simulate configurations without a pipeline."""
        choices, node = self.choices, self.simulator.hardware.ranks_per_node
        wraps = tuple(self.traces.wraps)
        starts = partial(
            first_round,
            num_ranks=choices.num_ranks,
            ranks_per_node=node,
            accumulations=choices.accumulations,
            fixed=choices.fixed,
            wrap=wraps[0],
            pipeline_ranks=1 if "pipeline" in choices.asked else None,
        )
        first = []
        for pair in self.degrees:
            ranks = self._expert_ranks[0]
            if len(self._expert_ranks) > 1:  # with the least activations
                tried = starts(modes[-1:], expert_ranks=self._expert_ranks, degrees=[pair])
                ranks = self._best_expert_ranks(tried, ranks)
            first += starts(modes, expert_ranks=(ranks,), degrees=[pair])
        if not first:
            if len(choices.pipeline_ranks) > 1:
                return
            raise ValueError(self.no_mesh())
        self._first_round(first)
        best = [o.candidate for o in self._ranked()[:3]]
        for start in best:
            own = max(1, node // (start.tensor_ranks or 1))
            self.simulate(second_round(start, wraps, own, choices.fixed))
        if best and len(self._expert_ranks) > 1:  # again, for how often they are gathered now
            chosen = self._ranked()[0].candidate
            self.simulate([replace(chosen, expert_ranks=each) for each in self._expert_ranks])

    def _best_expert_ranks(self, tried: list[Candidate], usual: int | None) -> int | None:
        """The number of expert ranks of the best of these on one mesh."""
        if not tried:
            return usual
        mesh = next((c.mesh for c in tried if c.strategy != "none"), tried[0].mesh)
        tried = [c for c in tried if c.mesh == mesh and c.strategy != "none"] or tried
        self.simulate(tried)
        found = [o.candidate.expert_ranks for o in self._ranked() if o.candidate in tried]
        return found[0] if found else usual

    def _search_pipelines(self, modes: tuple[str, ...]) -> None:
        """Simulate the pipelines that may be the fastest, and at least one.

        If estimates said that one fits and it does not, others come next: those that fit although
        all need more than estimated.
        """
        search = PipelineSearch(
            self.simulator,
            self.choices,
            self.budget,
            self.parts,
            self.steps.stage_wraps,
            min(load.speed for load in self.loads),
        )
        for _ in range(_MOST_SIMULATED):
            left_out = self._simulate_pipelines(search, search.best(modes, self.progress))
            if not search.learn({c: o.needed_bytes for c, o in self.outcomes.items()}):
                break
        self.notes += left_out
        self.notes += search.refused

    def _simulate_pipelines(self, search: PipelineSearch, found: Sequence[Candidate]) -> list[str]:
        """Simulate of these those that may be the fastest; says why others are not."""
        left_out = []
        for i, candidate in enumerate(found):
            fitting = [o.paced_s for o in self.outcomes.values() if o.fits]
            fastest = min(fitting, default=None)
            late, _ = search.rank(candidate)
            if fastest is not None and not late:
                late = search.paced_s(candidate) > _CLOSE * fastest or i >= _MOST_SIMULATED
            if i == 0 or not late:
                self.simulate([candidate])
                continue
            needed = search.needed_bytes(candidate)
            why = f"is {search.paced_s(candidate) / (fastest or 1.0):.2f} times as slow as the best"
            if needed > self.budget:
                why = f"needs {show_bytes(needed)}, more than the budget"
            left_out.append(f"Not simulated, because it {why} by its stages alone: {candidate}")
        return left_out

    def no_mesh(self) -> str:
        choices = self.choices
        told = f"No mesh of {plural(choices.num_ranks, 'rank')} goes with"
        if choices.fixed.reshard is not SEARCHED:
            told += f" reshard_after_forward={choices.fixed.reshard!r}"
            return f"{told}: it must divide the number of shards"
        context = sorted({each.context for each in choices.degrees})
        return f"{told} context_ranks={context}: they must divide its last dim"

    def _trace(self, modes: tuple[str, ...]) -> tuple[str, ...]:
        """Trace steps of all loads; returns the modes in which the model works."""
        working = []
        for i, mode in enumerate(modes):
            self.progress(f"tracing a step, checkpointing '{mode}'", i, len(modes))
            try:
                self._trace_mode(mode)
                working.append(mode)
            except RuntimeError as error:  # the model behaves differently when recomputed
                if mode == "none" or len(modes) == 1:
                    raise
                self.notes.append(f"Checkpointing '{mode}' is left out because it fails: {error}")
        size = Size(self.loads[0].samples)
        first = self.traces.get(working[0], size, self._degrees(*self.degrees[0]))
        self.notes += self.traces.notes(first, self.simulator.hardware)
        return tuple(working)

    def _trace_mode(self, mode: str) -> None:
        """Trace steps with each number of tensor and context ranks; those that fail are left
        out."""
        failed: dict[tuple[int | None, int | None], Exception] = {}
        for pair in self.degrees:
            try:
                for samples in {load.samples for load in self.loads}:
                    self.traces.get(mode, Size(samples), self._degrees(*pair))
            except (RuntimeError, ValueError) as error:  # heads that cannot be divided, say
                failed[pair] = error
        if len(failed) == len(self.degrees):
            raise failed[self.degrees[0]]
        for (tensor, context), why in failed.items():
            self.degrees.remove((tensor, context))
            kinds = {"Tensor parallelism": tensor, "Context parallelism": context}
            told = [f"{k} over {plural(n, 'rank')}" for k, n in kinds.items() if n is not None]
            self.notes.append(f"{' and '.join(told)} is left out because it fails: {why}")

    def _degrees(self, tensor: int | None, context: int | None) -> Degrees:
        """The same with the first number of expert ranks."""
        return Degrees(self._expert_ranks[0] or 1, tensor or 1, context or 1)

    def _steps(
        self,
        candidate: Candidate,
        *,
        keep_samples: bool = False,
        micro_batches: int | None = None,
    ) -> list[SimulatedStep]:
        """Of ranks that differ; ``micro_batches``: of a step without a pipeline, if not all."""
        if candidate.degrees.pipeline > 1:
            return self._pipeline_steps(candidate, self.simulator, keep_samples=keep_samples)
        work = [(self._trace_of(candidate, load), load.speed) for load in self.loads]
        setup = self.setup(candidate)
        if micro_batches is not None:
            setup = replace(setup, micro_batches=micro_batches)
        return simulate_ranks(self.simulator, setup, work, keep_samples=keep_samples)

    def _outcome(self, candidate: Candidate) -> Outcome:
        """Simulated or, of a step with many micro-batches, estimated from steps with fewer."""
        num = self.options["micro_batches"]
        if num <= MOST_REPLAYED or candidate.degrees.pipeline > 1:
            return outcome_of(candidate, self._steps(candidate), self.budget)
        fewer, more = (
            outcome_of(candidate, self._steps(candidate, micro_batches=n), self.budget)
            for n in (FEW - 1, FEW)
        )
        self._estimated.add(candidate)
        return with_micro_batches(fewer, more, num - FEW)

    def _simulate_the_best(self) -> None:
        """Simulate with all micro-batches what is compared with the best."""
        while waiting := self._estimated.intersection(o.candidate for o in self._compared_ones()):
            for i, candidate in enumerate(waiting):
                self.progress(f"simulating: {candidate}", i, len(waiting))
                steps = self._steps(candidate)
                self.outcomes[candidate] = outcome_of(candidate, steps, self.budget)
            self._estimated -= waiting

    def _compared_ones(self) -> list[Outcome]:
        ranked = self._ranked()
        fastest = sorted((o for o in ranked if o.fits), key=lambda o: o.paced_s)
        return ranked[:MOST_COMPARED] + fastest[:MOST_COMPARED]

    def _steps_on(
        self, candidate: Candidate, simulator: Simulator, by: float
    ) -> list[SimulatedStep]:
        """The same where hardware is slower or faster; ``by``: the relative speed of kernels."""
        if candidate.degrees.pipeline > 1:
            return self._pipeline_steps(candidate, simulator, by)
        # Of the few configurations that are compared so, replays are kept: only times change.
        replays = self._kept_replays.get(candidate)
        if replays is None:
            setup = self.setup(candidate)
            replays = self._kept_replays[candidate] = [
                simulator.replay_step(self._trace_of(candidate, load), setup) for load in self.loads
            ]
        return slowest_first(
            simulator.time_stages(made, speed=load.speed * by)
            for made, load in zip(replays, self.loads, strict=True)
        )

    def _pipeline_steps(
        self,
        candidate: Candidate,
        simulator: Simulator,
        by: float = 1.0,
        *,
        keep_samples: bool = False,
    ) -> list[SimulatedStep]:
        parts, schedule = self.parts(candidate), candidate.pipeline.schedule
        if keep_samples:
            replays = replay_pipeline(simulator, parts, schedule, keep_samples=True)
        elif candidate in self._replays:
            replays = self._replays[candidate]
        else:
            replays = self._replays[candidate] = replay_pipeline(simulator, parts, schedule)
        speed = by * min(load.speed for load in self.loads)
        return simulate_pipeline(simulator, parts, schedule, replays, speed=speed)

    def parts(self, candidate: Candidate) -> list[Part]:
        """The stages of a pipeline, or all of the model."""
        size = Size(self.loads[0].samples)
        made = self.steps.get(
            candidate.num_stages, candidate.checkpointing, size, candidate.degrees,
            wrap=candidate.wrap, splits_backward=candidate.schedule in SPLIT,
        )  # fmt: skip
        return [Part(i, s.trace, self.setup(candidate, s), s.split) for i, s in enumerate(made)]

    def _trace_of(self, candidate: Candidate, load: Load) -> StepTrace:
        return self.traces.get(candidate.checkpointing, Size(load.samples), candidate.degrees)

    def simulate(self, candidates: Sequence[Candidate]) -> None:
        tried = self.outcomes.keys() | self._too_large.keys()
        fresh = [c for c in dict.fromkeys(candidates) if c not in tried]
        for i, candidate in enumerate(fresh):
            self.progress(f"simulating: {candidate}", i, len(fresh))
            try:
                self.outcomes[candidate] = self._outcome(candidate)
            except GatherBudgetError as error:
                self._too_large[candidate] = error

    def _first_round(self, starts: Sequence[Candidate]) -> None:
        """Simulate these; but where recomputation decides that nothing fits, one of many meshes."""
        groups: dict[Any, list[Candidate]] = {}
        for each in starts:
            key = (each.checkpointing, each.tensor_ranks, each.context_ranks)
            groups.setdefault(key, []).append(each)
        least = {key: self._activation_bytes(group[0]) for key, group in groups.items()}
        limit = max(self.budget, min(least.values()))
        hopeful = [key for key, nbytes in least.items() if nbytes <= limit]
        self.simulate([c for key in hopeful for c in groups[key]])
        others = sorted(self.outcomes.values(), key=lambda o: o.needed_bytes)
        meshes = [o.candidate.mesh for o in others]  # the first needs the least: so does it here
        for key, group in groups.items():
            if key not in hopeful:
                known = [c for c in group if c.mesh in meshes]
                group.sort(key=lambda c: -c.mesh[-1])
                self.simulate(sorted(known, key=lambda c: meshes.index(c.mesh))[:1] or group[:1])

    def _activation_bytes(self, candidate: Candidate) -> int:
        """What activations alone need, whatever the mesh."""
        return max(self._trace_of(candidate, load).activation_peak for load in self.loads)

    def setup(self, candidate: Candidate, stage: TracedStage | None = None) -> Setup:
        """The candidate's sharding setup; of the whole model, or a stage."""
        return make_setup(
            self.traces.units[candidate.wrap] if stage is None else stage.units,
            candidate.mesh[0] if len(candidate.mesh) == 1 else candidate.mesh,
            strategy=candidate.strategy,
            reshard_after_forward=candidate.reshard,
            prefetch=candidate.prefetch,
            accumulation=candidate.accumulation or "unsharded",
            experts=self.traces.expert_units if stage is None else stage.expert_units,
            expert_ranks=candidate.expert_ranks or 1,
            tensor_ranks=candidate.tensor_ranks or 1,
            context_ranks=candidate.context_ranks or 1,
            pipeline_ranks=candidate.pipeline_ranks or 1,
            **self.options,
        )

    def _advice(self, best: Outcome) -> str:
        """What takes the memory of the configuration that needs the least, and what helps."""
        candidate = best.candidate
        step, parts = self._fullest(candidate, self._steps(candidate))
        return advice(parts, step, candidate.checkpointing)

    def _fullest(
        self, candidate: Candidate, steps: Sequence[SimulatedStep]
    ) -> tuple[SimulatedStep, list[Part]]:
        """The step that needs the most memory, and what it is of."""
        step = max(steps, key=lambda step: step.needed_bytes)
        parts = self.parts(candidate)
        return step, stages_of(parts, candidate.pipeline.schedule, steps.index(step))

    def _ranked(self) -> list[Outcome]:
        """Outcomes, best first; those that do not fit come last, by memory needed."""
        fitting = [o for o in self.outcomes.values() if o.fits]
        others = [o for o in self.outcomes.values() if not o.fits]
        others.sort(key=lambda o: o.needed_bytes)
        if not fitting:
            return others
        fitting.sort(key=lambda o: o.paced_s)
        fastest = fitting[0].paced_s
        same = [o for o in fitting if o.paced_s <= fastest * (1 + SAME_SPEED)]
        same.sort(key=simplicity)
        rest = sorted((o for o in fitting if o not in same), key=lambda o: o.paced_s)
        return same + rest + others

    def _seconds(self, candidate: Candidate, hardware: Hardware, speed: float) -> float:
        """Of a step, if kernels have this relative speed."""
        steps = self._steps_on(candidate, self.simulator.on(hardware), speed)
        return outcome_of(candidate, steps, self.budget).seconds

    def _with_the_simplest_first(self, ranked: list[Outcome]) -> list[Outcome]:
        """Of those that are as fast as the fastest, for all that is known of the hardware."""
        fitting = sorted((o for o in ranked if o.fits), key=lambda o: o.paced_s)
        if not fitting:
            return ranked
        equal = as_fast(
            fitting,
            self.simulator.hardware,
            lambda o, *case: (
                self._seconds(o.candidate, *case) * o.candidate.degrees.ranks_per_batch
            ),
        )
        first = min([ranked[0], *equal], key=simplicity)
        if first.paced_s > fitting[0].paced_s * (1 + SAME_SPEED):
            self.notes.append(
                f"Faster by so little that it depends on what is not known of the hardware: "
                f"{fitting[0]}"
            )
        return [first, *(o for o in ranked if o is not first)]

    def _conclude(self) -> Plan:
        self._simulate_the_best()
        ranked = self._with_the_simplest_first(self._ranked())
        if not ranked:
            if not self._too_large:
                raise ValueError(" ".join(self.notes) or self.no_mesh())
            raise ValueError(str(min(self._too_large.values(), key=lambda e: e.least_bytes)))
        best = ranked[0]
        if not best.fits:
            raise ValueError(
                f"Nothing fits into {show_bytes(self.budget)} per rank: the minimum is "
                f"{show_bytes(best.needed_bytes)}, with {best.candidate}. {self._advice(best)}"
            )
        made = self._plan(best, ranked)
        made.reasons = reasons(made) + self.notes
        if self._too_large:
            made.reasons.append(
                f"{plural(len(self._too_large), 'configuration')} have units that do not fit into "
                "max_gathered_bytes"
            )
        return made

    def _plan(self, best: Outcome, ranked: list[Outcome]) -> Plan:
        candidate, hardware = best.candidate, self.simulator.hardware
        steps = self._steps(candidate, keep_samples=True)
        fullest, parts = self._fullest(candidate, steps)
        piped = candidate.degrees.pipeline > 1
        shown = steps[0]
        return Plan(
            kwargs=self._kwargs(candidate),
            mesh_shape=candidate.mesh,
            activation_checkpointing=candidate.checkpointing,
            accumulation=candidate.accumulation,
            checkpoint_modules=self.traces.blocks if candidate.checkpointing != "none" else [],
            hardware=hardware,
            memory_budget=self.budget,
            chosen=best,
            step=shown,
            range=range_of(hardware, partial(self._seconds, candidate)),
            outcomes=ranked,
            experts=self.traces.experts,
            expert_ranks=candidate.expert_ranks,
            tensor_ranks=candidate.tensor_ranks or 1,
            context_ranks=candidate.context_ranks or 1,
            parallelize=self.traces.parallelize,
            padding=padding_of(parts, fullest if piped else shown),
            pipeline_ranks=candidate.pipeline_ranks or 1,
            schedule=candidate.schedule,
            stages_per_rank=candidate.stages_per_rank or 1,
            split_stages=self.steps.split_stages,
            stages=stage_figures(steps) if piped else [],
            bubble_s=sum(step.bubble_s for step in steps) / len(steps),
        )

    def _kwargs(self, candidate: Candidate) -> dict[str, Any]:
        """Arguments of `shard_model`."""
        policy = self.options["comm_policy"]
        return {
            "strategy": candidate.strategy,
            "wrap": self.traces.wraps[candidate.wrap],
            "reshard_after_forward": candidate.reshard,
            "prefetch": candidate.prefetch,
            "mp_policy": self.options["mp_policy"],
            "offload_policy": self.options["offload_policy"],
            **({} if policy is None else {"comm_policy": policy}),
            **{k: v for k, v in self.options.items() if k == "max_gathered_bytes" and v},
            **self.told,
        }
