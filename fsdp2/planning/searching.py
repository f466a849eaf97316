"""The search of `plan`: which configurations it simulates, and the best of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..api.shard_model import Sharding
from ..features.gather_budget import GatherBudgetError
from ..render.text import plural, show_bytes
from .advice import advice
from .choices import Choices, Degree
from .hardware.hardware import Hardware
from .outcomes import (
    MOST_COMPARED,
    Candidate,
    Outcome,
    as_fast,
    outcome_of,
    simplicity,
    with_micro_batches,
)
from .pipeline_search import PipelineSearch
from .plan_report import Plan, reasons
from .predictor import Configuration, Predictor, Replays
from .simulation.loads import Load
from .trace.events import StepTrace

# Steps that differ by less than this count as equally fast.
SAME_SPEED = 0.005

# Pipelines are simulated if their estimate is within this factor of the fastest: at least one, and
# at most so many.
_CLOSE, _MOST_SIMULATED = 1.1, 3

# Without a pipeline, all micro-batches of a step except the first and the last are alike. If there
# are more than so many, steps with `FEW` of them and with one less give the time of each, and only
# the best configurations are simulated with all micro-batches.
MOST_REPLAYED, FEW = 8, 4


class Search:
    """Two rounds: meshes and checkpointing first, then the rest for the best of them.

    Args:
        sharding: the common settings of all configurations.
        budget: bytes that a rank may use.
    """

    def __init__(
        self,
        predictor: Predictor,
        sharding: Sharding,
        choices: Choices,
        budget: int,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.predictor = predictor
        self.sharding = sharding
        self.traces = predictor.whole
        self.simulator = predictor.simulator
        self.choices = choices
        self.budget = budget
        self.progress = progress
        self.degrees = [each for each in choices.degrees if each[2] in (None, 1)]
        self._expert_ranks = choices.expert_ranks.get(1, [None])  # without a pipeline

    def run(self, loads: Sequence[Load]) -> Plan:
        """The best configuration for ranks with these loads."""
        self.loads = loads
        self._replays: dict[Candidate, Replays] = {}
        self.outcomes: dict[Candidate, Outcome] = {}
        self._estimated: set[Candidate] = set()  # of these outcomes
        self._too_large: dict[Candidate, GatherBudgetError] = {}
        self.notes: list[str] = []
        modes = self.choices.modes
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
        choices, wraps = self.choices, [*self.traces.wraps]
        first = []
        for degree in self.degrees:
            ranks = self._expert_ranks[0]
            if len(self._expert_ranks) > 1:  # with the least activations
                tried = choices.first_round(modes[-1:], wraps[0], degree, self._expert_ranks)
                ranks = self._best_expert_ranks(tried, ranks)
            first += choices.first_round(modes, wraps[0], degree, [ranks])
        if not first:
            if len(choices.pipeline_ranks) > 1:
                return
            raise ValueError(choices.no_mesh())
        self._first_round(first)
        best = [o.candidate for o in self._ranked()[:3]]
        for start in best:
            self.simulate(choices.second_round(start, wraps))
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
        """Simulate the pipelines that may be the fastest, at least one.

        If a pipeline does not fit although its estimate did, continue with others that fit even if
        all need more than estimated.
        """
        search = PipelineSearch(
            self.predictor,
            self.choices,
            self.budget,
            self.configured,
            min(load.speed for load in self.loads),
        )
        for _ in range(_MOST_SIMULATED):
            left_out = self._simulate_pipelines(search, search.best(modes, self.progress))
            if not search.learn({c: o.needed_bytes for c, o in self.outcomes.items()}):
                break
        self.notes += left_out
        self.notes += search.refused

    def _simulate_pipelines(self, search: PipelineSearch, found: Sequence[Candidate]) -> list[str]:
        """Simulate those candidates that may be the fastest; returns why others are not."""
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
        first = self._trace_of(self._bare(working[0], self.degrees[0]), self.loads[0])
        self.notes += self.traces.notes(first, self.simulator.hardware)
        return tuple(working)

    def _trace_mode(self, mode: str) -> None:
        """Trace steps with each number of tensor and context ranks; those that fail are left
        out."""
        failed: dict[Degree, Exception] = {}
        for degree in self.degrees:
            try:
                for load in self.loads:
                    self._trace_of(self._bare(mode, degree), load)
            except (RuntimeError, ValueError) as error:  # for example, heads that cannot be divided
                failed[degree] = error
        if len(failed) == len(self.degrees):
            raise failed[self.degrees[0]]
        for degree, why in failed.items():
            self.degrees.remove(degree)
            kinds = {"Tensor parallelism": degree[0], "Context parallelism": degree[1]}
            told = [f"{k} over {plural(n, 'rank')}" for k, n in kinds.items() if n is not None]
            self.notes.append(f"{' and '.join(told)} is left out because it fails: {why}")

    def _bare(self, mode: str, degree: Degree) -> Candidate:
        """The choices that a trace depends on, with the first number of expert ranks."""
        number = self._expert_ranks[0]
        return Candidate("", (), mode, expert_ranks=number, tensor_ranks=degree[0],
                         context_ranks=degree[1])  # fmt: skip

    def _trace_of(self, candidate: Candidate, load: Load) -> StepTrace:
        workload = candidate.workload(self.predictor.workload)
        return self.traces.get(replace(workload, samples=load.samples or workload.samples))

    def configured(self, candidate: Candidate) -> Configuration:
        """The candidate as `Predictor` needs it."""
        return Configuration(
            candidate.workload(self.predictor.workload),
            candidate.sharding(self.sharding, self.traces.wraps[candidate.wrap]),
            candidate.mesh,
        )

    def _replay(self, candidate: Candidate, micro_batches: int | None = None) -> Replays:
        """The replays of a candidate; ``micro_batches``: fewer than all, without a pipeline."""
        if candidate in self._replays:
            return self._replays[candidate]
        of = self.configured(candidate)
        if micro_batches is not None:
            of = of._replace(workload=replace(of.workload, micro_batches=micro_batches))
        made = self.predictor.replay(of, self.loads)
        if candidate.is_pipeline:
            self._replays[candidate] = made
        return made

    def _outcome_of(self, candidate: Candidate, micro_batches: int | None = None) -> Outcome:
        steps = self._replay(candidate, micro_batches).steps(self.simulator)
        return outcome_of(candidate, steps, self.budget)

    def _outcome(self, candidate: Candidate) -> Outcome:
        """Simulated or, of a step with many micro-batches, estimated from steps with fewer."""
        num = self.predictor.workload.micro_batches
        if num <= MOST_REPLAYED or candidate.is_pipeline:
            return self._outcome_of(candidate)
        fewer, more = (self._outcome_of(candidate, n) for n in (FEW - 1, FEW))
        self._estimated.add(candidate)
        return with_micro_batches(fewer, more, num - FEW)

    def _simulate_the_best(self) -> None:
        """Simulate the configurations that compete for the best with all micro-batches."""
        while waiting := self._estimated.intersection(o.candidate for o in self._compared_ones()):
            for i, candidate in enumerate(waiting):
                self.progress(f"simulating: {candidate}", i, len(waiting))
                self.outcomes[candidate] = self._outcome_of(candidate)
            self._estimated -= waiting

    def _compared_ones(self) -> list[Outcome]:
        ranked = self._ranked()
        fastest = sorted((o for o in ranked if o.fits), key=lambda o: o.paced_s)
        return ranked[:MOST_COMPARED] + fastest[:MOST_COMPARED]

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
        """Simulate these; only one of many meshes if activations alone prevent a fit."""
        groups: dict[Any, list[Candidate]] = {}
        for each in starts:
            key = (each.checkpointing, each.tensor_ranks, each.context_ranks)
            groups.setdefault(key, []).append(each)
        least = {key: self._activation_bytes(group[0]) for key, group in groups.items()}
        limit = max(self.budget, min(least.values()))
        hopeful = [key for key, nbytes in least.items() if nbytes <= limit]
        self.simulate([c for key in hopeful for c in groups[key]])
        others = sorted(self.outcomes.values(), key=lambda o: o.needed_bytes)
        meshes = [o.candidate.mesh for o in others]  # the first needs the least memory
        for key, group in groups.items():
            if key not in hopeful:
                known = [c for c in group if c.mesh in meshes]
                group.sort(key=lambda c: -c.mesh[-1])
                self.simulate(sorted(known, key=lambda c: meshes.index(c.mesh))[:1] or group[:1])

    def _activation_bytes(self, candidate: Candidate) -> int:
        """Bytes of the activations alone, which do not depend on the mesh."""
        return max(self._trace_of(candidate, load).activation_peak for load in self.loads)

    def _advice(self, best: Outcome) -> str:
        """The causes of the memory need of the smallest configuration, and their remedies."""
        replays = self._replay(best.candidate)
        steps = replays.steps(self.simulator)
        fullest = max(range(len(steps)), key=lambda i: steps[i].needed_bytes)
        return advice(replays.stages(fullest), steps[fullest], best.candidate.checkpointing)

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

    def _paced_s(self, outcome: Outcome, hardware: Hardware, speed: float) -> float:
        """`Outcome.paced_s`, if kernels have this relative speed."""
        # Keep the replays of the few configurations that are compared so: only times change.
        candidate = outcome.candidate
        made = self._replays[candidate] = self._replay(candidate)
        steps = made.steps(self.simulator.on(hardware), speed)
        return outcome_of(candidate, steps, self.budget).paced_s

    def _with_the_simplest_first(self, ranked: list[Outcome]) -> list[Outcome]:
        """Move the simplest of the configurations that may be the fastest to the front."""
        fitting = sorted((o for o in ranked if o.fits), key=lambda o: o.paced_s)
        if not fitting:
            return ranked
        equal = as_fast(fitting, self.simulator.hardware, self._paced_s)
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
                raise ValueError(" ".join(self.notes) or self.choices.no_mesh())
            raise ValueError(str(min(self._too_large.values(), key=lambda e: e.least_bytes)))
        best = ranked[0]
        if not best.fits:
            raise ValueError(
                f"Nothing fits into {show_bytes(self.budget)} per rank: the minimum is "
                f"{show_bytes(best.needed_bytes)}, with {best.candidate}. {self._advice(best)}"
            )
        made = self._plan(ranked)
        made.reasons.extend([*reasons(made), *self.notes])
        if self._too_large:
            made.reasons.append(
                f"{plural(len(self._too_large), 'configuration')} have units that do not fit into "
                "max_gathered_bytes"
            )
        return made

    def _plan(self, ranked: list[Outcome]) -> Plan:
        candidate = ranked[0].candidate
        of = self.configured(candidate)
        replays = self.predictor.replay(of, self.loads, keep_samples=True)
        made = self.predictor.prediction(candidate, replays, self.budget, ranged=True)
        return Plan(
            **vars(made),
            workload=of.workload,
            sharding=of.sharding,
            checkpoint_modules=self.traces.blocks if candidate.checkpointing != "none" else [],
            experts=self.traces.experts,
            outcomes=ranked,
        )
