"""`estimate`, `predict`, `sweep`, `plan` and what they are made of, with all fields as keywords.

Most tests vary one or two fields of a workload, a sharding or a cluster beside the usual ones.
These functions sort keywords by the dataclass that has the field.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch import nn

import fsdp2
from fsdp2.planning import Cluster, Estimate, Plan, Prediction, Sharding, Sweep, Workload
from fsdp2.planning.replay import setups
from fsdp2.planning.replay.schedules import SPLIT
from fsdp2.planning.replay.setups import Setup
from fsdp2.planning.staged_steps import StagedSteps
from fsdp2.planning.trace import tracing
from fsdp2.planning.trace.events import StepTrace
from fsdp2.planning.trace.trace_options import TraceOptions
from fsdp2.planning.traces import TracedStage

_SHARDING = {field.name for field in fields(Sharding)}
_CLUSTER = {field.name for field in fields(Cluster)}
_OTHERS = {"progress", "max_samples", "device_type", "ranks_per_node", "experts", "granularity"}
# What a plan may choose from several values of.
_SEVERAL = (
    *("activation_checkpointing", "accumulation", "expert_ranks", "tensor_ranks", "context_ranks"),
    *("pipeline_ranks", "schedule", "stages_per_rank"),
)
# Of a plan, where None would be a choice.
SEARCHED: Any = object()
# The order of a table.
_SWEPT = (
    *("num_ranks", "samples", "context", "activation_checkpointing", "strategy"),
    *("reshard_after_forward", "prefetch", "micro_batches", "accumulation", "expert_ranks"),
    *("tensor_ranks", "compiled", "context_ranks", "pipeline_ranks", "schedule"),
    "stages_per_rank",
)


def sorted_by_owner(
    model: Any, sample_input: Any, options: dict[str, Any]
) -> tuple[Workload, Sharding]:
    """The workload and the sharding that have these fields."""
    how = {name: value for name, value in options.items() if name in _SHARDING}
    rest = {name: value for name, value in options.items() if name not in _SHARDING}
    return Workload(model, sample_input, **rest), Sharding(**how)


def _taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options.pop(name) for name in names if name in options}


def estimate(model: Any, mesh_shape: Any, sample_input: Any, **options: Any) -> Estimate:
    others = _taken(options, "device_type", "ranks_per_node")
    return fsdp2.estimate(*sorted_by_owner(model, sample_input, options), mesh_shape, **others)


def _cluster(hardware: Any, num_ranks: Any, budget: Any) -> Cluster:
    if isinstance(num_ranks, list | tuple):
        return Cluster(hardware, mesh=num_ranks, memory_budget=budget)
    return Cluster(hardware, num_ranks, memory_budget=budget)


def predict(
    model: Any, sample_input: Any, hardware: Any, num_ranks: Any, **options: Any
) -> Prediction:
    cluster = _cluster(hardware, num_ranks, options.pop("memory_budget", None))
    return fsdp2.predict(*sorted_by_owner(model, sample_input, options), cluster)


def sweep(model: Any, sample_input: Any, hardware: Any, num_ranks: Any, **options: Any) -> Sweep:
    """A list is several values."""
    budget = options.pop("memory_budget", None)
    others = _taken(options, "progress")
    options["num_ranks"] = num_ranks
    over = {name: options.pop(name) for name in _SWEPT if isinstance(options.get(name), list)}
    alone = options.pop("num_ranks", None)
    cluster = Cluster(hardware, 1, memory_budget=budget)
    if alone is not None:
        cluster = _cluster(hardware, alone, budget)
    workload, sharding = sorted_by_owner(model, sample_input, options)
    return fsdp2.planning.sweep(workload, sharding, cluster, over, **others)


def plan(
    model: Any,
    sample_input: Any,
    hardware: Any,
    num_ranks: int,
    memory_budget: float | None = None,
    **options: Any,
) -> Plan:
    """What is given is not searched, also if it is the default; a list or tuple is searched.

    ``checkpoint`` is the one mode of activation checkpointing, ``mesh_shape`` the mesh.
    """
    over = {}
    renamed = {"checkpoint": "activation_checkpointing", "mesh_shape": "mesh"}
    options = {renamed.get(name, name): value for name, value in options.items()}
    for name in ("strategy", "wrap", "reshard_after_forward", "prefetch", "mesh", *_SEVERAL):
        if name in options:
            value = options.pop(name)
            if value is SEARCHED or (value is None and name != "reshard_after_forward"):
                continue
            several = name in _SEVERAL and isinstance(value, list | tuple)
            over[name] = list(value) if several else [value]
    others = _taken(options, "progress", "max_samples")
    workload, sharding = sorted_by_owner(model, sample_input, options)
    cluster = Cluster(hardware, num_ranks, memory_budget=memory_budget)
    return fsdp2.plan(workload, cluster, sharding, over=over, **others)


def make_setup(units: Any, mesh_shape: Any, **options: Any) -> Setup:
    """Of no model in particular: the units say all."""
    others = _taken(options, "experts", "granularity", "device_type", "ranks_per_node")
    workload, sharding = sorted_by_owner(nn.Identity(), None, options)
    return setups.make_setup(units, mesh_shape, workload, sharding, **others)


def trace_step(model: Any, sample_input: Any, modules: Any, **options: Any) -> StepTrace:
    others = _taken(options, "mp_policy", "device_type", "experts", "context", "stage")
    workload = Workload(model, sample_input, **options)
    return tracing.trace_step(TraceOptions(workload, **others), modules)


class Stages:
    """The stages of a model by their number, with one choice of units."""

    def __init__(
        self, model: nn.Module, sample_input: Any, device_type: str = "cuda", **options: Any
    ) -> None:
        self._workload, sharding = sorted_by_owner(model, sample_input, options)
        self.traced = StagedSteps(self._workload, sharding, {"given": sharding.wrap}, device_type)

    def get(
        self, num_stages: int, *, splits_backward: bool = False, **options: Any
    ) -> list[TracedStage]:
        schedule = SPLIT[0] if splits_backward else "1F1B"
        own = replace(self._workload, pipeline_ranks=num_stages, schedule=schedule, **options)
        return self.traced.get(own, "given")

    @property
    def num_traced(self) -> int:
        return self.traced.num_traced


def predict_planned(made: Plan) -> Prediction:
    """What `predict` says of the configuration that was chosen."""
    cluster = Cluster(made.hardware, mesh=made.mesh_shape, memory_budget=made.memory_budget)
    return fsdp2.predict(made.workload, made.sharding, cluster)
