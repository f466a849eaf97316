"""Configurations of one model on one kind of hardware, predicted from traces that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from ..api.shard_model import find_strategy
from ..common.suggestions import did_you_mean
from ..estimation.checkpointing import MODES
from ..estimation.kernels import Kernels, kernels_of
from ..estimation.pipeline import Part, check_schedule
from ..estimation.replay import Setup
from ..estimation.setups import check_number, checked_mesh, granularities, make_setup
from ..estimation.tracing import LossFn, trace_step
from ..policy import CPUOffloadPolicy, MixedPrecisionPolicy, check_comm_policy
from ..render.text import plural
from ..wrap import UnitDescription
from .advice import padding_of
from .arguments import check_ranks, checked_budget
from .candidates import Candidate, Degrees
from .hardware import Hardware
from .loads import even_load, sizes_of, speeds_of
from .outcomes import bound_of, outcome_of, simulate_ranks
from .pipeline_times import simulate_pipeline
from .prediction import Prediction, stage_figures
from .ranges import range_of
from .simulate import SimulatedStep, Simulator
from .stages import SplitStages, StagedSteps
from .tensor_parallel import Parallelize
from .traces import (
    ALONE,
    Compiled,
    Size,
    TracedSteps,
    check_context_ranks,
    check_expert_ranks,
    check_tensor_ranks,
)


class Pipeline(NamedTuple):
    """How a pipeline runs.

    Attributes:
        schedule: one of `SCHEDULES`.
        stages_per_rank: more than one with looped schedules.
    """

    schedule: str = "1F1B"
    stages_per_rank: int = 1


class Cells:
    """Predicts configurations of one model on one kind of hardware."""

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        hardware: Hardware,
        *,
        wrap: Any,
        mp_policy: MixedPrecisionPolicy,
        checkpoint_modules: Sequence[str] | None,
        max_saved_bytes: int | None,
        experts: Any,
        parallelize: Parallelize | None,
        split_stages: SplitStages | None,
        optimizer: Any,
        loss_fn: LossFn | None,
        memory_budget: float | None,
        kernels: Kernels | None,
        fake: bool,
        unknown_costs: str,
        shard_granularity: Any,
        **options: Any,
    ) -> None:
        check_comm_policy(options["comm_policy"])
        self.hardware = hardware
        self.budget = checked_budget(memory_budget, hardware)
        self._sample_input = sample_input
        self._simulator = Simulator(hardware, optimizer)
        self._dtype = mp_policy.param_dtype or _main_dtype(model)
        self._options = {"mp_policy": mp_policy, **options}
        self._max_saved_bytes = max_saved_bytes
        chosen = kernels_of(kernels, hardware.device_type)
        common: dict[str, Any] = {
            "loss_fn": loss_fn,
            "mp_policy": mp_policy,
            "kernels": chosen,
            "fake": fake,
            "max_saved_bytes": max_saved_bytes,
        }
        shared: dict[str, Any] = {
            "wrap": wrap,
            "checkpoint_modules": checkpoint_modules,
            "parallelize": parallelize,
            "unknown_costs": unknown_costs,
        }
        trace = partial(trace_step, **common)
        self.traces = TracedSteps(model, sample_input, trace, experts=experts, **shared)
        [self._label] = self.traces.units
        self._granularity = granularities(model, shard_granularity, self.traces.experts)
        self._staged: StagedSteps | None = None
        if split_stages is not None:
            self._staged = StagedSteps(
                model, sample_input, trace, split_stages=split_stages, **shared
            )

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
        work = (activation_checkpointing, size, degrees, compiled)
        parts = self._parts(work, pipeline, mesh, choices)
        setup = parts[0].setup
        all_ranks = setup.num_ranks * degrees.tensor * degrees.pipeline
        loads = even_load(speeds_of(self.hardware, all_ranks))
        candidate = Candidate(strategy, mesh, activation_checkpointing, self._label)

        def steps(simulator: Simulator, by: float = 1.0, **options: Any) -> list[SimulatedStep]:
            if degrees.pipeline > 1:
                speed = by * min(load.speed for load in loads)
                return simulate_pipeline(
                    simulator, parts, pipeline.schedule, speed=speed, **options
                )
            work = [(parts[0].trace, load.speed * by) for load in loads]
            return simulate_ranks(simulator, setup, work, **options)

        def seconds(hardware: Hardware, speed: float) -> float:
            made = steps(self._simulator.on(hardware), speed)
            return outcome_of(candidate, made, self.budget).seconds

        made = steps(self._simulator, keep_samples=True)
        outcome = outcome_of(candidate, made, self.budget)
        samples, context, tokens = sizes_of(self._sample_input)
        samples, context = size.samples or samples, size.context or context
        rate = None
        if samples is not None:
            rate = samples * setup.micro_batches * setup.num_batches / outcome.seconds
        fullest = max(range(len(made)), key=lambda i: made[i].needed_bytes)
        notes = [note for part in parts for note in self.traces.notes(part.trace, self.hardware)]
        return Prediction(
            hardware=self.hardware,
            mesh_shape=mesh,
            tensor_ranks=degrees.tensor,
            context_ranks=degrees.context,
            pipeline_ranks=degrees.pipeline,
            choices=self._told(
                self._chosen(choices, degrees, pipeline, compiled), activation_checkpointing
            ),
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
            dtype=self._dtype,
            step=made[0],
            stages=stage_figures(made) if degrees.pipeline > 1 else [],
            padding=padding_of(parts[fullest].trace, setup, made[fullest]),
            range=range_of(self.hardware, seconds) if ranged else None,
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
        check_expert_ranks(degrees.experts, self.traces)
        check_tensor_ranks(degrees.tensor, self.traces)
        check_context_ranks(degrees.context, self.traces)
        check_number("pipeline_ranks", degrees.pipeline)
        check_number("stages_per_rank", pipeline.stages_per_rank)
        check_number("micro_batches", choices["micro_batches"])
        if degrees.pipeline == 1:
            return
        told = f"pipeline_ranks={degrees.pipeline}"
        if self._staged is None:
            raise ValueError(
                f"{told} needs split_stages=: a function of the model and a number of stages that "
                "returns these, in order"
            )
        if self.traces.experts:
            raise ValueError("Experts on a mesh of their own and pipelines do not go together")
        if self._max_saved_bytes is not None:
            raise ValueError(f"max_saved_bytes does not go together with {told}")
        self._check_beside_stages(told)
        if not isinstance(compiled, bool):
            raise ValueError(
                f"{told}: stages have names of their own, so that compiled={compiled!r} names no "
                "modules: pass True for the blocks, or False"
            )
        if choices["accumulation"] == "every":
            raise ValueError(
                f"{told}: torch's schedules do not reduce gradients in every micro-batch: pass "
                "accumulation='unsharded', or 'sharded' to sum on shards"
            )
        check_schedule(
            pipeline.schedule,
            degrees.pipeline,
            choices["micro_batches"],
            pipeline.stages_per_rank,
        )

    def _check_beside_stages(self, pipeline: str) -> None:
        reasons = {
            "offload_optimizer": "it brings back state of one optimizer for one model, not yet of "
            "stages",
            "max_device_bytes": "it is of one `shard_model`, and each stage has its own",
            "shard_granularity": "it goes by names of parameters, and stages have their own",
        }
        given = {
            "offload_optimizer": self._options["offload_optimizer"] is not None,
            "max_device_bytes": self._options["max_device_bytes"] is not None,
            "shard_granularity": bool(self._granularity),
        }
        for name, reason in reasons.items():
            if given[name]:
                raise ValueError(
                    f"{name} does not go together with {pipeline}: {reason}. Leave {name} or "
                    "pipeline_ranks out"
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
        mode, size, degrees, compiled = work

        def setup(units: Sequence[UnitDescription]) -> Setup:
            return make_setup(
                units,
                mesh[0] if len(mesh) == 1 else mesh,
                experts=self.traces.expert_units,
                expert_ranks=degrees.experts,
                tensor_ranks=degrees.tensor,
                context_ranks=degrees.context,
                pipeline_ranks=degrees.pipeline,
                granularity=self._granularity,
                **choices,
                **self._options,
            )

        if degrees.pipeline == 1:
            [units] = self.traces.units.values()
            made = setup(units)  # errors of arguments come before a trace
            return [Part(0, self.traces.get(mode, size, degrees, compiled), made)]
        assert self._staged is not None
        num_stages = degrees.pipeline * pipeline.stages_per_rank
        alone = Degrees(degrees.experts, degrees.tensor, degrees.context)
        stages = self._staged.get(num_stages, mode, size, alone, compiled=compiled is True)
        return [Part(i, stage.trace, setup(stage.units)) for i, stage in enumerate(stages)]

    def _chosen(
        self,
        choices: dict[str, Any],
        degrees: Degrees,
        pipeline: Pipeline,
        compiled: Compiled,
    ) -> dict[str, Any]:
        told = {"strategy": choices["strategy"], "wrap": self._label}
        told |= {name: value for name, value in choices.items() if name != "strategy"}
        told["compiled"] = None
        if names := self.traces.compiled_modules(compiled):
            told["compiled"] = "blocks" if compiled is True else plural(len(names), "module")
        if self.traces.experts:
            told["expert_ranks"] = degrees.experts
        if self.traces.parallelize is not None:
            told["tensor_ranks"] = degrees.tensor
        if degrees.context > 1:
            told["context_ranks"] = degrees.context
        if degrees.pipeline > 1:
            told["pipeline_ranks"] = degrees.pipeline
            told["schedule"] = pipeline.schedule
            told["stages_per_rank"] = pipeline.stages_per_rank
        return told

    @property
    def num_traced(self) -> int:
        return self.traces.num_traced + (self._staged.num_traced if self._staged else 0)

    def _told(self, choices: dict[str, Any], mode: str) -> dict[str, Any]:
        """What makes this configuration, as JSON-compatible data."""
        told = {**choices, "activation_checkpointing": mode}
        reshard = told["reshard_after_forward"]
        told["reshard_after_forward"] = "default" if reshard is None else reshard
        if callable(reshard):
            told["reshard_after_forward"] = "by unit"
        if told["micro_batches"] == 1:
            told["accumulation"] = None
        policy = self._options["mp_policy"]
        for name in ("param_dtype", "reduce_dtype"):
            if (dtype := getattr(policy, name)) is not None:
                told[name] = str(dtype)[6:]
        if isinstance(self._options["offload_policy"], CPUOffloadPolicy):
            told["offload"] = True
        if self._granularity:
            told["shard_granularity"] = f"of {plural(len(self._granularity), 'parameter')}"
        if self._options["max_device_bytes"] is not None:
            told["max_device_bytes"] = self._options["max_device_bytes"]
        for name in ("replicate_below", "comm_policy", "max_gathered_bytes", "offload_optimizer"):
            if value := self._options[name]:
                told[name] = value if isinstance(value, int) else str(value)
        if self._max_saved_bytes is not None:  # 0 is the tightest limit
            told["max_saved_bytes"] = self._max_saved_bytes
        return told


def _main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most elements of parameters."""
    found: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        found[param.dtype] += param.numel()
    return found.most_common(1)[0][0] if found else torch.float32


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
