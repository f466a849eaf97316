"""Selects the pipelines to simulate, with estimates from their stages alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..features.gather_budget import GatherBudgetError
from ..render.text import plural
from .choices import Choices, Degree
from .outcomes import Candidate, schedule_told
from .predictor import Configuration, Predictor
from .replay.pipeline import RankStage
from .replay.schedules import LOOPED, SPLIT, check_schedule
from .simulation.pipeline_estimates import (
    PipelineEstimate,
    StageAlone,
    estimate_pipeline,
    stages_alone,
)

_Stages = tuple[list[RankStage], list[StageAlone]]


class PipelineSearch:
    """Finds the best pipeline over each number of ranks, choice by choice.

    The number of expert ranks is chosen first, since it determines padding and with it all else. It
    is chosen again when it is known how often parameters are gathered.

    Args:
        configured: the configuration of a candidate, for `Predictor`.
        speed: speed of the kernels of the slowest rank.

    Attributes:
        estimates: estimates of all pipelines that work.
        refused: why others do not work, as sentences.
    """

    def __init__(
        self,
        predictor: Predictor,
        choices: Choices,
        budget: int,
        configured: Callable[[Candidate], Configuration],
        speed: float,
    ) -> None:
        self.predictor = predictor
        self.simulator = predictor.simulator
        self.choices = choices
        self.budget = budget
        self.wraps = [] if predictor.staged is None else predictor.staged.labels
        self.speed = speed
        self._configured = configured
        self._stages: dict[tuple[Candidate, bool, bool], _Stages] = {}
        self.estimates: dict[Candidate, PipelineEstimate] = {}
        self.refused: dict[str, None] = {}
        self._needs = 1.0  # factor by which the need exceeds the estimate

    def paced_s(self, candidate: Candidate) -> float:
        """The approximate time of a step, as `Outcome.paced_s`."""
        return self.estimates[candidate].seconds * candidate.ranks_per_batch

    def needed_bytes(self, candidate: Candidate) -> float:
        """The approximate bytes that its fullest rank needs."""
        return self._needs * self.estimates[candidate].needed_bytes

    def learn(self, needed: Mapping[Candidate, int]) -> bool:
        """Learn from simulations how much the needed memory exceeds the estimate.

        Args:
            needed: bytes by candidate, of any kind.

        Returns:
            Whether a candidate that should fit does not, so that another one may be the best now.
        """
        wrong = [
            needed[candidate] / estimate.needed_bytes
            for candidate, estimate in self.estimates.items()
            if self.needed_bytes(candidate) <= self.budget < needed.get(candidate, 0)
        ]
        self._needs = max([self._needs, *wrong])
        return bool(wrong)

    def rank(self, candidate: Candidate) -> tuple[bool, float]:
        """The sort key of candidates, the best first."""
        needed = self.needed_bytes(candidate)
        if needed > self.budget:
            return True, needed
        return False, self.paced_s(candidate)

    def best(
        self, modes: Sequence[str], progress: Callable[[str, int, int], None]
    ) -> list[Candidate]:
        """The best candidates for each number of pipeline, tensor and context ranks, in order."""
        numbers = [number for number in self.choices.pipeline_ranks if number > 1]
        found: list[Candidate] = []
        for i, number in enumerate(numbers):
            progress(f"estimating pipelines over {number} ranks", i, len(numbers))
            for degree in self.choices.degrees:
                if degree[2] == number:
                    found += self._best_of(number, degree, modes)
        return sorted(found, key=self.rank)

    def _best_of(self, ranks: int, degree: Degree, modes: Sequence[str]) -> list[Candidate]:
        """The best one with these degrees; none if none works."""
        experts = self.choices.expert_ranks[ranks]
        if not experts:
            stage = plural(self.choices.num_ranks // ranks, "rank")
            why = f"a stage has {stage}, and no number of expert_ranks divides these"
            self._leave_out(plural(ranks, "rank"), why)
            return []
        starts = self.choices.first_round(modes, self.wraps[0], degree, experts[:1])
        pipelines = self._pipelines(ranks)
        if not starts or not pipelines:
            return []
        first = next((c for c in starts if c.strategy == "full"), starts[0])
        alike = [c for c in starts if (c.strategy, c.mesh) == (first.strategy, first.mesh)]
        number = self._expert_ranks(alike[-1], pipelines, experts)
        alike = [replace(c, expert_ranks=number) for c in alike]
        tried = [_with(c, each) for c in alike for each in pipelines]
        found = [c for c in tried if self._works(c)]
        if not found:
            return []
        best = min(found, key=self.rank)
        meshes = dict.fromkeys((c.strategy, c.mesh) for c in starts)
        best = self._vary(best, [replace(best, strategy=s, mesh=m) for s, m in meshes])
        reshards = self.choices.reshards_of(best)
        best = self._vary(best, [replace(best, reshard=each) for each in reshards])
        best = self._vary(best, [replace(best, expert_ranks=each) for each in experts])
        best = self._vary(best, [replace(best, wrap=wrap) for wrap in self.wraps])
        return [self._vary(best, [_with(best, each) for each in pipelines])]

    def _expert_ranks(
        self, start: Candidate, pipelines: Sequence[tuple[str, int]], experts: Sequence[int | None]
    ) -> int | None:
        """The best number of expert ranks for ``start``, the candidate with the least activations,
        in the first of these pipelines that works."""
        for each in pipelines if len(experts) > 1 else ():
            tried = [replace(_with(start, each), expert_ranks=number) for number in experts]
            if found := [c for c in tried if self._works(c)]:
                return min(found, key=self.rank).expert_ranks
        return experts[0]

    def _vary(self, best: Candidate, others: Sequence[Candidate]) -> Candidate:
        return min([best, *(c for c in others if self._works(c))], key=self.rank)

    def _pipelines(self, ranks: int) -> list[tuple[str, int]]:
        """The pipelines that can run over this number of ranks."""
        found, workload = [], self.predictor.workload
        for schedule, stages in self.choices.pipelines:
            try:
                check_schedule(
                    schedule,
                    ranks,
                    workload.micro_batches,
                    stages,
                    compiled=bool(workload.compiled),
                )
                found.append((schedule, stages))
            except ValueError as error:
                self._refuse(ranks, (schedule, stages), error)
        return found

    def _refuse(self, ranks: int, pipeline: tuple[str, int], error: Exception) -> None:
        self._leave_out(f"{plural(ranks, 'rank')} ({schedule_told(*pipeline)})", error)

    def _leave_out(self, over: str, why: object) -> None:
        self.refused[f"Pipeline over {over} is left out: {why}"] = None

    def _works(self, candidate: Candidate) -> bool:
        """Whether the candidate can be estimated; makes the estimate."""
        if candidate in self.estimates:
            return True
        assert candidate.schedule is not None
        try:
            parts, alone = self._alone(candidate)
        except (ValueError, RuntimeError) as error:  # such as a model that cannot be split so
            if isinstance(error, GatherBudgetError):
                error = ValueError("it has units that do not fit into max_gathered_bytes")
            pipeline = (candidate.schedule, candidate.stages_per_rank or 1)
            self._refuse(candidate.pipeline_ranks or 1, pipeline, error)
            return False
        # The parts may have been made for another schedule of the same kind.
        estimate = estimate_pipeline(self.simulator, parts, candidate.schedule, alone)
        self.estimates[candidate] = estimate
        return True

    def _alone(self, candidate: Candidate) -> _Stages:
        """Its stages, which depend only on the kind of schedule; equal stages are in it once."""
        schedule = candidate.schedule
        assert schedule is not None
        key = (replace(candidate, schedule=None), schedule in LOOPED, schedule in SPLIT)
        if key not in self._stages:
            parts = self.predictor.parts(self._configured(candidate))
            alone = stages_alone(self.simulator, parts, schedule, self.speed)
            self._stages[key] = (parts, alone)
        return self._stages[key]


def _with(candidate: Candidate, pipeline: tuple[str, int]) -> Candidate:
    schedule, stages = pipeline
    return replace(candidate, schedule=schedule, stages_per_rank=stages)
