"""The configurations that `plan` chooses from: given values, and built-in ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from ..api.shard_model import Sharding, find_strategy, with_fields
from ..common.checks import check_number
from ..common.suggestions import did_you_mean
from .cluster import Cluster
from .outcomes import Candidate
from .predictor import Predictor
from .replay.schedules import SCHEDULES, STAGES_PER_RANK, check_schedule_name
from .replay.setups import checked_mesh
from .trace.checkpointing import MODES
from .workload import Workload

# What `plan` searches.
OF_SHARDING = ("strategy", "wrap", "reshard_after_forward", "prefetch")
OF_WORKLOAD = (
    *("activation_checkpointing", "accumulation", "expert_ranks", "tensor_ranks", "context_ranks"),
    *("pipeline_ranks", "schedule", "stages_per_rank"),
)
_SEARCHED = (*OF_SHARDING, "mesh", *OF_WORKLOAD)


def given_of(
    workload: Workload, sharding: Sharding, over: Mapping[str, Sequence[Any]]
) -> dict[str, list[Any]]:
    """The given choices by field: ``over``, and values that are not the default.

    Raises:
        ValueError: for empty lists, and for unknown values.
        TypeError: for a field that is not searched, and for values of a wrong type.
    """
    found: dict[str, list[Any]] = {}
    for owner, names in ((sharding, OF_SHARDING), (workload, OF_WORKLOAD)):
        for name in names:
            if (value := getattr(owner, name)) != getattr(type(owner), name):
                found[name] = [value]
    for name, values in over.items():
        found[name] = values_of(name, values, _SEARCHED, "plan")
    for name in OF_WORKLOAD:
        for value in found.get(name, ()):
            with_fields(workload, {name: value})  # its checks
    for strategy in found.get("strategy", ()):
        find_strategy(strategy)
    for prefetch in found.get("prefetch", ()):
        check_number("prefetch", prefetch)
    for reshard in found.get("reshard_after_forward", ()):
        if not (reshard is None or isinstance(reshard, bool | int)):
            raise TypeError(
                "reshard_after_forward must be a bool, a number of ranks or None (the default), "
                f"got {reshard!r}: leave it out to have it searched"
            )
    return found


def values_of(name: str, values: Any, known: Sequence[str], who: str) -> list[Any]:
    """The values of a field in ``over``.

    Raises:
        ValueError: if there are none.
        TypeError: for a field that is not ``known``, or values that are not a list or tuple.
    """
    if name not in known:
        raise TypeError(f"{who} has no '{name}' to choose in over{did_you_mean(name, known)}")
    if not isinstance(values, list | tuple):
        raise TypeError(f"over: {name} must be a list of values, got {values!r}")
    if not values:
        raise ValueError(f"over: {name} is an empty list: give at least one value")
    return list(values)


# Tensor, context and pipeline ranks; None: not used.
Degree = tuple[int | None, int | None, int | None]


class Choices:
    """The choices of a search.

    Args:
        given: from `given_of`.
        samples: limit on the samples of a step, in units of one rank's batch; None: no limit.

    Attributes:
        num_ranks: number of all ranks.
        modes: kinds of activation checkpointing.
        accumulations: ways to sum gradients; None: there is one micro-batch.
        degrees: combinations of tensor, context and pipeline ranks for which there is a mesh.
        expert_ranks: the choices of expert ranks by number of pipeline ranks; None: experts have
            no separate mesh.
        pipelines: schedules, each with the number of stages per rank.

    Raises:
        ValueError: for choices that contradict each other or the number of ranks.
    """

    def __init__(
        self,
        predictor: Predictor,
        cluster: Cluster,
        given: dict[str, list[Any]],
        samples: int | None = None,
    ) -> None:
        self._predictor, self._traces = predictor, predictor.whole
        self._node = predictor.hardware.ranks_per_node
        self.given, self.num_ranks = given, _num_ranks(cluster, given)
        if cluster.mesh is not None:
            self.given = {**given, "mesh": [cluster.mesh]}
        found = self._all_degrees()
        self._check_meshes(found)
        if samples is not None:
            found = self._within(found, samples)
        asked = (
            predictor.workload.parallelize is not None,
            any(context > 1 for _, context, _ in found),
            any(pipeline > 1 for _, _, pipeline in found),
        )
        tensor, context, pipeline = (
            [number if is_asked else None for number in numbers]
            for is_asked, numbers in zip(asked, zip(*found, strict=True), strict=True)
        )
        self.degrees: list[Degree] = list(zip(tensor, context, pipeline, strict=True))
        self.modes = tuple(given.get("activation_checkpointing", MODES))
        ways = given.get("accumulation", ["unsharded", "sharded"])
        self.accumulations = ways if predictor.workload.micro_batches > 1 else [None]
        self.expert_ranks = self._all_expert_ranks()
        self.pipelines = _pipelines_of(given)

    @property
    def pipeline_ranks(self) -> list[int]:
        """All numbers of pipeline ranks, the smallest first."""
        return sorted({pipeline or 1 for _, _, pipeline in self.degrees})

    def first_round(
        self, modes: Sequence[str], wrap: str, degree: Degree, expert_ranks: Sequence[int | None]
    ) -> list[Candidate]:
        """All meshes with these checkpointing modes and expert ranks, and all ways to sum
        gradients."""
        tensor, context, pipeline = degree
        num_ranks = self.num_ranks // (pipeline or 1)
        own, node = num_ranks // (tensor or 1), max(1, self._node // (tensor or 1))
        prefetch, ways = self.given.get("prefetch", [1])[0], self.accumulations
        if pipeline not in (None, 1):
            ways = [way for way in ways if way != "every"]
        return [
            Candidate(strategy, mesh, mode, wrap, reshard, prefetch, way, ranks, *degree)
            for ranks in expert_ranks
            for strategy, mesh in self._meshes(own, node)
            if prod(mesh) * (tensor or 1) == num_ranks and mesh[-1] % (context or 1) == 0
            for reshard in self._reshards(strategy, mesh)[:1]
            for mode in modes
            for way in _useful(ways, strategy)
        ]

    def second_round(self, start: Candidate, wraps: Sequence[str]) -> list[Candidate]:
        """All choices of units, resharding and prefetch for one mesh and checkpointing mode."""
        prefetches = self.given.get("prefetch", [1] if start.strategy == "none" else [1, 2])
        return [
            replace(start, wrap=wrap, reshard=reshard, prefetch=prefetch)
            for wrap in wraps
            for reshard in self.reshards_of(start)
            for prefetch in prefetches
        ]

    def reshards_of(self, start: Candidate) -> list[bool | int | None]:
        """All choices of resharding for its mesh."""
        if "reshard_after_forward" in self.given:
            return self._reshards(start.strategy, start.mesh)
        reshards: list[bool | int | None] = [None]
        if start.strategy in ("full", "hybrid"):  # others are this setting
            reshards.append(False)
            shards, node = start.mesh[-1], max(1, self._node // (start.tensor_ranks or 1))
            if shards > node and shards % node == 0:
                reshards.append(node)
        return reshards

    def _reshards(self, strategy: str, mesh: tuple[int, ...]) -> list[bool | int | None]:
        """The given values that are possible with this mesh; otherwise the default."""
        return [
            each
            for each in self.given.get("reshard_after_forward", [None])
            if type(each) is not int or (strategy != "none" and mesh[-1] % each == 0)
        ]

    def _meshes(self, num_ranks: int, node: int) -> list[tuple[str, tuple[int, ...]]]:
        """Strategies with their meshes, unless these are given."""
        usual, names = list(meshes_of(num_ranks, node)), self.given.get("strategy")
        found: list[tuple[str, tuple[int, ...]]] = []
        if "mesh" in self.given:
            for mesh in map(checked_mesh, self.given["mesh"]):
                tried = names or (["hybrid"] if len(mesh) > 1 else ["none", "full"])
                found += [(name, mesh) for name in tried]
            return found
        for name in names or ():
            if name == "none":
                found.append((name, (num_ranks,)))
            elif name == "hybrid" and num_ranks <= node:
                found.append((name, (1, num_ranks)))  # as `shard_model` on one node
            else:
                same = {"full", "hybrid"} if name not in ("full", "hybrid") else {name}
                found += [(name, mesh) for other, mesh in usual if other in same]
        return found if names else usual

    def no_mesh(self) -> str:
        """The reason that there is no candidate."""
        told = f"No mesh of {self.num_ranks} ranks goes with"
        if reshards := self.given.get("reshard_after_forward"):
            named = reshards[0] if len(reshards) == 1 else reshards
            return f"{told} reshard_after_forward={named!r}: it must divide the number of shards"
        context = sorted({context or 1 for _, context, _ in self.degrees})
        return f"{told} context_ranks={context}: they must divide its last dim"

    # -- what there is to choose from ------------------------------------------------------------

    def _all_degrees(self) -> list[tuple[int, int, int]]:
        """All combinations of numbers of tensor, context and pipeline ranks."""
        given, num_ranks = self.given, self.num_ranks
        lists = {
            name: given.get(f"{name}_ranks", [1]) for name in ("tensor", "context", "pipeline")
        }
        if "pipeline_ranks" not in given and self._predictor.staged is not None:
            lists["pipeline"] = self._usual_pipeline_ranks()
        for name, numbers in lists.items():
            for each in numbers:
                own = with_fields(self._predictor.workload, {f"{name}_ranks": each})
                self._traces.check_ranks(own)
                if num_ranks % each:
                    raise ValueError(f"{name}_ranks={each} must divide num_ranks={num_ranks}")
        tensor, context, pipeline = lists.values()
        found = [each for each in product(tensor, context, pipeline) if num_ranks % prod(each) == 0]
        if not found:
            told = " times ".join(f"{k}_ranks={v}" for k, v in lists.items() if v != [1])
            raise ValueError(f"{told} must divide num_ranks={num_ranks}")
        return found

    def _usual_pipeline_ranks(self) -> list[int]:
        """1, 2, 4, ..., as long as each rank has a block and a micro-batch."""
        most = min(len(self._traces.blocks), self._predictor.workload.micro_batches)
        found = [1]
        while 2 * found[-1] <= most and self.num_ranks % (2 * found[-1]) == 0:
            found.append(2 * found[-1])
        return found

    def _check_meshes(self, degrees: Sequence[tuple[int, int, int]]) -> None:
        tensor, context, pipeline = (sorted(set(each)) for each in zip(*degrees, strict=True))
        for mesh in (checked_mesh(each, "mesh") for each in self.given.get("mesh", ())):
            shape = " x ".join(map(str, mesh))
            if all(prod(mesh) * t * p != self.num_ranks for t, _, p in degrees):
                found = {"tensor": tensor, "pipeline": pipeline}
                told = " and ".join(f"{n}_ranks={v}" for n, v in found.items() if v != [1])
                beside = f" with {told}" if told else ""
                raise ValueError(
                    f"mesh {shape} is not a mesh of num_ranks={self.num_ranks} ranks{beside}"
                )
            if all(mesh[-1] % each for each in context):
                raise ValueError(
                    f"context_ranks={context} must divide the last dim of mesh {shape}: "
                    "parameters are sharded over data and context ranks together"
                )

    def _within(
        self, degrees: Sequence[tuple[int, int, int]], most: int
    ) -> list[tuple[int, int, int]]:
        """The degrees with which a step has at most ``most`` samples."""
        micro_batches = self._predictor.workload.micro_batches
        samples = self._predictor.batch_size * micro_batches * self.num_ranks
        found = [each for each in degrees if samples // prod(each) <= most]
        if not found:
            least = samples // max(prod(each) for each in degrees)
            raise ValueError(
                f"A step has {least:,} samples or more, and max_samples={most:,}: give fewer "
                "ranks, more tensor_ranks or context_ranks, fewer micro-batches, or a sample_input "
                "with fewer samples"
            )
        return found

    def _all_expert_ranks(self) -> dict[int, list[int | None]]:
        """The possible numbers of expert ranks, by number of pipeline ranks, since each stage has
        its own mesh of experts; the list may be empty.

        Raises:
            ValueError: for more ranks than experts, and for a number that divides the ranks of no
                stage.
        """
        given, traces = self.given.get("expert_ranks"), self._traces
        of_stage = {number: self.num_ranks // number for number in self.pipeline_ranks}
        for each in given or ():
            traces.check_ranks(replace(traces.workload, expert_ranks=each, tensor_ranks=1))
            if all(ranks % each for ranks in of_stage.values()):
                least, ranks = next(iter(of_stage.items()))
                what = f"num_ranks={self.num_ranks}"
                if least > 1:
                    what = f"the ranks of a stage, {ranks} with pipeline_ranks={least}"
                raise ValueError(f"expert_ranks={each} must divide {what}")
        if not traces.experts:
            return {number: [None] for number in of_stage}
        if given is None:
            return {n: [*self._usual_expert_ranks(ranks)] for n, ranks in of_stage.items()}
        return {n: [e for e in given if ranks % e == 0] for n, ranks in of_stage.items()}

    def _usual_expert_ranks(self, num_ranks: int) -> list[int]:
        """The default numbers of expert ranks, which divide the experts evenly: within a node, the
        largest possible number, and one in between."""
        ranks, found, num_experts = min(self._node, num_ranks), [], self._traces.num_experts
        while ranks <= min(num_ranks, num_experts):
            if num_ranks % ranks == 0 and num_experts % ranks == 0:
                found.append(ranks)
            ranks *= 2
        found = found or [1]
        return sorted({found[0], found[len(found) // 2], found[-1]})


def _num_ranks(cluster: Cluster, given: Mapping[str, list[Any]]) -> int:
    """All ranks of a cluster."""
    if cluster.num_ranks is not None:
        return cluster.num_ranks
    of_each = [given.get(f"{name}_ranks", [1]) for name in ("tensor", "pipeline")]
    if any(len(numbers) > 1 for numbers in of_each):
        raise ValueError(
            "mesh is of one number of tensor_ranks and of pipeline_ranks: give num_ranks to "
            "choose from several, and over={'mesh': [...]}"
        )
    return prod(checked_mesh(cluster.mesh)) * prod(numbers[0] for numbers in of_each)


def _pipelines_of(given: Mapping[str, list[Any]]) -> list[tuple[str, int]]:
    """The possible pipelines: schedules, each with the number of stages per rank."""
    names, numbers = given.get("schedule", SCHEDULES), given.get("stages_per_rank")
    made = []
    for name in names:
        check_schedule_name(name)
        allowed = STAGES_PER_RANK[name]
        own = min(2, allowed.stop - 1)
        made += [(name, n) for n in numbers or [own] if n in allowed]
    if not made:
        raise ValueError(f"stages_per_rank={numbers!r} goes with none of the schedules {names}")
    return made


def meshes_of(num_ranks: int, ranks_per_node: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Strategies with their meshes: all ranks; replicas of 1, 2, 4, ... nodes."""
    if num_ranks > 1:
        yield "none", (num_ranks,)
    yield "full", (num_ranks,)
    shards = ranks_per_node
    while shards < num_ranks:
        if num_ranks % shards == 0:
            yield "hybrid", (num_ranks // shards, shards)
        shards *= 2


def _useful(accumulations: Sequence[str | None], strategy: str) -> Sequence[str | None]:
    """Leave out useless ways: without shards, reducing more than once saves no memory."""
    if strategy == "none" and "unsharded" in accumulations:
        return ("unsharded",)
    return accumulations
