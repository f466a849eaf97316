"""`plan`: chooses how to shard a model for given hardware by simulating steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..estimation.checkpointing import MODES
from ..estimation.estimating import default_checkpoint_modules
from ..estimation.events import StepTrace
from ..estimation.kernels import Kernels, kernels_of
from ..estimation.replay import Setup
from ..estimation.setups import check_accumulation, check_number, make_setup
from ..estimation.tracing import LossFn, trace_step
from ..estimation.uncosted import check_choice, without_cost
from ..policy import CommPolicy, MixedPrecisionPolicy, OffloadPolicy
from ..render.text import plural, show_bytes, show_seconds
from ..runtime.gather_budget import GatherBudgetError
from ..wrap import UnitDescription, units_of
from .candidates import Candidate, first_round, second_round, wraps_of
from .hardware import Hardware, find_hardware
from .loads import (
    Load,
    batch_size,
    describe_sizes,
    even_load,
    sizes_by_speed,
    speeds_of,
    uneven_loads,
    with_samples,
)
from .report import Outcome, Plan, Split, reasons
from .simulate import SimulatedStep, Simulator

# Steps that differ by less than this count as equally fast.
SAME_SPEED = 0.005


def plan(
    model: nn.Module,
    sample_input: Any,
    hardware: str | Hardware,
    num_ranks: int,
    memory_budget: float | None = None,
    *,
    loss_fn: LossFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (has no state)
    comm_policy: CommPolicy | None = None,
    optimizer: Any = "adamw",
    activation_checkpointing: Sequence[str] = MODES,
    micro_batches: int = 1,
    accumulation: Sequence[str] = ("unsharded", "sharded"),
    max_gathered_bytes: int | None = None,
    kernels: Kernels | None = None,
    fake: bool = True,
    unknown_costs: str = "error",
    progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Choose units, resharding, prefetch, activation checkpointing and mesh for a model.

    A step is traced on fake tensors and simulated for every promising configuration: kernels take
    the time of their FLOPs or bytes, collectives that of a ring over the links, and streams wait
    for each other as in the library's runtime, which the simulation runs. The fastest configuration
    that fits into memory is chosen; among equally fast ones, the one that needs the least memory.

    Where `Hardware.speeds` differ, the step takes as long as the slowest rank. Each micro-batch of
    all ranks together is then also divided by speed (`split_batch`), and that is chosen if it is
    faster: see `Plan.split`.

    Args:
        model: not sharded; may be on the meta device. Unchanged afterwards.
        sample_input, loss_fn, optimizer, micro_batches, kernels, fake, unknown_costs: as in
            `estimate`; the batch is that of one rank if all have as many samples. To divide it, all
            tensors in it with as many rows as the first one count as samples.
        hardware: the name of a preset ("h100", "h200", "a100-80", "a100-40"), a file that ends in
            ``.json`` (see ``fsdp2.planner.find_hardware``) or a `Hardware`.
        num_ranks: number of GPUs. For several nodes, a multiple of the GPUs in a node.
        memory_budget: bytes of a GPU that a rank may use: what the allocator reserves, which is
            more than live tensors, and what CUDA, cuBLAS and NCCL hold. None: all of them.
        mp_policy, offload_policy, comm_policy: as in `fully_shard`; fixed, not searched.
        activation_checkpointing: the modes to choose from; see `estimate`.
        accumulation: the ways to sum gradients of micro-batches to choose from; see `estimate`.
            Sums of whole gradients communicate once a step, and need memory for the whole model.
        max_gathered_bytes: as in `shard_model`; fixed, not searched. Configurations with a unit
            that does not fit are left out.
        progress: called with (current task, number done, total).

    Returns:
        The plan: ``plan.apply(model)`` in the training script, or ``shard_model(model, mesh,
        **plan.kwargs)``; print it for the reasons.

    Raises:
        ValueError: if nothing fits (names the least memory needed), or for arguments that
            `estimate` would reject.

    Example:
        >>> made = plan(model, tokens, "h100", 128, mp_policy=bf16, loss_fn=loss)
        >>> print(made)
        >>> made.picture("plan.png")
    """
    chosen_hardware = find_hardware(hardware)
    _check_ranks(num_ranks, chosen_hardware)
    speeds = speeds_of(chosen_hardware, num_ranks)
    differ = len(set(speeds)) > 1
    samples = batch_size(sample_input) if differ else 0
    for mode in activation_checkpointing:
        if mode not in MODES:
            raise ValueError(f"activation_checkpointing must be one of {MODES}, got {mode!r}")
    check_choice(unknown_costs)
    kernels = kernels_of(kernels, chosen_hardware.device_type)
    check_number("micro_batches", micro_batches)  # here, and not after all steps are traced
    ways = _checked_ways(accumulation, micro_batches)
    if max_gathered_bytes is not None:
        check_number("max_gathered_bytes", max_gathered_bytes)
    budget = _checked_budget(memory_budget, chosen_hardware)
    search = _Search(
        model,
        Simulator(chosen_hardware, optimizer),
        num_ranks,
        budget,
        {
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
            "comm_policy": comm_policy,
            "micro_batches": micro_batches,
            "max_gathered_bytes": max_gathered_bytes,
        },
        lambda mode, blocks, modules, samples: trace_step(
            model,
            with_samples(sample_input, samples),
            modules,
            loss_fn=loss_fn,
            mp_policy=mp_policy,
            activation_checkpointing=mode,
            checkpoint_modules=blocks,
            kernels=kernels,
            fake=fake,
        ),
        progress or (lambda what, done, total: None),
        unknown_costs,
        ways,
    )
    modes = tuple(activation_checkpointing)
    even = search.run(modes, even_load(speeds))
    return _divided(search, modes, even, speeds, samples) if differ else even


def _divided(
    search: _Search, modes: tuple[str, ...], even: Plan, speeds: Sequence[float], samples: int
) -> Plan:
    """The plan with batches by speed, or ``even`` if that gains nothing."""
    sizes = sizes_by_speed(samples, speeds)

    def stay(why: str) -> Plan:
        even.reasons.append(f"Samples: {samples} on each rank; {why}.")
        return even

    if len(set(sizes)) == 1:
        return stay(
            "with so few the speeds of ranks make no difference: give sample_input more samples "
            "and use fewer micro-batches"
        )
    told = describe_sizes(sizes)
    try:
        made = search.run(modes, uneven_loads(sizes, speeds))
    except ValueError as error:
        return stay(f"by speed ({told}) does not work: {error}")
    except RuntimeError as error:  # the model or the loss expects a number of samples
        return stay(f"by speed ({told}) the model fails: {error}")
    if made.chosen.seconds >= even.chosen.seconds * (1 - SAME_SPEED):
        return stay(f"by speed ({told}) a step takes {show_seconds(made.chosen.seconds)}")
    made.split = Split(tuple(speeds), sizes, even.chosen.seconds)
    slower = 100 * (even.chosen.seconds / made.chosen.seconds - 1)
    made.reasons.append(
        f"Samples: by speed; {samples} on each rank is {slower:.1f} % slower "
        f"({show_seconds(even.chosen.seconds)} a step)."
    )
    return made


def _checked_ways(accumulation: Sequence[str], micro_batches: int) -> tuple[str | None, ...]:
    if isinstance(accumulation, str) or not accumulation:
        raise TypeError(f"accumulation must be a sequence of names, got {accumulation!r}")
    for way in accumulation:
        check_accumulation(way)
    return tuple(accumulation) if micro_batches > 1 else (None,)


def _checked_budget(budget: object, hardware: Hardware) -> int:
    if budget is None:
        return int(hardware.memory_bytes)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise TypeError(f"memory_budget must be a number of bytes or None, got {budget!r}")
    if not (budget >= 1 and math.isfinite(budget)):
        raise ValueError(
            f"memory_budget must be a positive number of bytes, got {budget}; None is the whole "
            "memory of the GPU"
        )
    return int(budget)


def _check_ranks(num_ranks: Any, hardware: Hardware) -> None:
    if not isinstance(num_ranks, int) or isinstance(num_ranks, bool):
        raise TypeError(f"num_ranks must be an int, got {num_ranks!r}")
    node = hardware.ranks_per_node
    if num_ranks < 1 or (num_ranks > node and num_ranks % node):
        raise ValueError(
            f"num_ranks must be positive, and a multiple of the {node} GPUs of a node if there are "
            f"several nodes; got {num_ranks}"
        )


def _together_s(steps: Sequence[SimulatedStep]) -> float:
    """The time of ranks that wait for each other: where gradients are summed, and after the step
    of the optimizer."""
    if len(steps) == 1:
        return steps[0].seconds
    backward = max(step.seconds - step.optimizer_s for step in steps)
    return backward + max(step.optimizer_s for step in steps)


class _Search:
    """Two rounds: meshes and checkpointing first, then the rest for the best of them."""

    def __init__(
        self,
        model: nn.Module,
        simulator: Simulator,
        num_ranks: int,
        budget: int,
        options: dict[str, Any],
        trace: Callable[[str, list[str], list[str], int | None], StepTrace],
        progress: Callable[[str, int, int], None],
        unknown_costs: str,
        accumulations: Sequence[str | None] = (None,),
    ) -> None:
        self.model = model
        self.simulator = simulator
        self.num_ranks = num_ranks
        self.budget = budget
        self.options = options
        self.progress = progress
        self.accumulations = accumulations
        auto = units_of(model, "auto")
        self.blocks = default_checkpoint_modules(model, auto)
        self.wraps = wraps_of(auto, self.blocks)
        self.units: dict[str, tuple[UnitDescription, ...]] = {
            label: tuple(units_of(model, wrap)) for label, wrap in self.wraps.items()
        }
        self._make_trace = trace
        self._unknown_costs = unknown_costs
        self._traces: dict[tuple[str, int | None], StepTrace] = {}

    def run(self, modes: tuple[str, ...], loads: Sequence[Load]) -> Plan:
        """The best configuration for ranks with these loads."""
        self.loads = loads
        self.outcomes: dict[Candidate, Outcome] = {}
        self._too_large: dict[Candidate, GatherBudgetError] = {}
        self.notes: list[str] = []
        node = self.simulator.hardware.ranks_per_node
        if not self.blocks:
            modes = tuple(mode for mode in modes if mode == "none") or modes[:1]
        modes = self._trace(modes)
        self._simulate(first_round(modes, self.num_ranks, node, self.accumulations))
        best = [o.candidate for o in self._ranked()[:3]]
        self._simulate([c for start in best for c in second_round(start, tuple(self.wraps), node)])
        return self._conclude()

    def _trace(self, modes: tuple[str, ...]) -> tuple[str, ...]:
        """Trace steps of all loads; returns the modes in which the model works."""
        names = [n for units in self.units.values() for u in units for n in u.modules]
        working = []
        for i, mode in enumerate(modes):
            self.progress(f"tracing a step, checkpointing '{mode}'", i, len(modes))
            try:
                for samples in {load.samples for load in self.loads}:
                    if (mode, samples) not in self._traces:
                        made = self._make_trace(mode, self.blocks, names, samples)
                        self._traces[mode, samples] = made
                        without_cost(made, self._unknown_costs)  # an error before more traces
                working.append(mode)
            except RuntimeError as error:  # the model behaves differently when recomputed
                if mode == "none" or len(modes) == 1:
                    raise
                self.notes.append(f"Checkpointing '{mode}' is left out because it fails: {error}")
        first = self._traces[working[0], self.loads[0].samples]
        self.notes += [*first.notes, *without_cost(first, "list"), *self._other_rates(first)]
        return tuple(working)

    def _other_rates(self, trace: StepTrace) -> list[str]:
        """What is said of dtypes whose FLOP/s the hardware does not have."""
        hardware = self.simulator.hardware
        return [
            f"Hardware '{hardware.name}' has no FLOP/s of {str(dtype)[6:]}: multiplications in it "
            f"take the time of {str(hardware.rate_of(dtype))[6:]}"
            for dtype in trace.matmul_dtypes
            if hardware.rate_of(dtype) != dtype
        ]

    def _steps(self, candidate: Candidate, **options: Any) -> list[SimulatedStep]:
        """Of each load, the slowest first."""
        setup = self.setup(candidate)
        steps = [
            self.simulator.run(
                self._traces[candidate.checkpointing, load.samples],
                setup,
                speed=load.speed,
                **options,
            )
            for load in self.loads
        ]
        return sorted(steps, key=lambda step: -step.seconds)

    def _simulate(self, candidates: Sequence[Candidate]) -> None:
        tried = self.outcomes.keys() | self._too_large.keys()
        fresh = [c for c in dict.fromkeys(candidates) if c not in tried]
        for i, candidate in enumerate(fresh):
            self.progress(f"simulating: {candidate}", i, len(fresh))
            try:
                steps = self._steps(candidate)
            except GatherBudgetError as error:
                self._too_large[candidate] = error
                continue
            fullest = max(steps, key=lambda step: step.needed_bytes)
            self.outcomes[candidate] = Outcome(
                candidate,
                _together_s(steps),
                steps[0].exposed_s,
                max(step.peak.total for step in steps),
                fullest.needed_bytes <= self.budget,
                fullest.reserved,
                fullest.needed_bytes,
            )

    def setup(self, candidate: Candidate) -> Setup:
        """The candidate's sharding setup."""
        return make_setup(
            self.units[candidate.wrap],
            candidate.mesh[0] if len(candidate.mesh) == 1 else candidate.mesh,
            strategy=candidate.strategy,
            reshard_after_forward=candidate.reshard,
            prefetch=candidate.prefetch,
            accumulation=candidate.accumulation or "unsharded",
            **self.options,
        )

    def _ranked(self) -> list[Outcome]:
        """Outcomes, best first; those that do not fit come last, by memory needed."""
        fitting = [o for o in self.outcomes.values() if o.fits]
        others = [o for o in self.outcomes.values() if not o.fits]
        others.sort(key=lambda o: o.needed_bytes)
        if not fitting:
            return others
        fastest = min(o.seconds for o in fitting)
        same = [o for o in fitting if o.seconds <= fastest * (1 + SAME_SPEED)]
        same.sort(key=lambda o: (o.candidate.complexity, o.peak_bytes, o.seconds))
        rest = sorted((o for o in fitting if o not in same), key=lambda o: o.seconds)
        return same + rest + others

    def _conclude(self) -> Plan:
        ranked = self._ranked()
        if not ranked:
            raise ValueError(str(min(self._too_large.values(), key=lambda e: e.least_bytes)))
        best = ranked[0]
        if not best.fits:
            raise ValueError(
                f"Nothing fits into {show_bytes(self.budget)} per rank: the minimum is "
                f"{show_bytes(best.needed_bytes)}, with {best.candidate}. Use more ranks, a "
                "smaller batch, or offload_policy=CPUOffloadPolicy()"
            )
        candidate = best.candidate
        step = self._steps(candidate, keep_samples=True)[0]
        policy = self.options["comm_policy"]
        made = Plan(
            kwargs={
                "strategy": candidate.strategy,
                "wrap": self.wraps[candidate.wrap],
                "reshard_after_forward": candidate.reshard,
                "prefetch": candidate.prefetch,
                "mp_policy": self.options["mp_policy"],
                "offload_policy": self.options["offload_policy"],
                **({} if policy is None else {"comm_policy": policy}),
                **{k: v for k, v in self.options.items() if k == "max_gathered_bytes" and v},
            },
            mesh_shape=candidate.mesh,
            activation_checkpointing=candidate.checkpointing,
            accumulation=candidate.accumulation,
            checkpoint_modules=self.blocks if candidate.checkpointing != "none" else [],
            hardware=self.simulator.hardware,
            memory_budget=self.budget,
            chosen=best,
            step=step,
            outcomes=ranked,
        )
        made.reasons = reasons(made) + self.notes
        if self._too_large:
            made.reasons.append(
                f"{plural(len(self._too_large), 'configuration')} have units that do not fit into "
                "max_gathered_bytes"
            )
        return made
