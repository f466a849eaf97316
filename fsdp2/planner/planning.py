"""`plan`: chooses how to shard a model for given hardware by simulating steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from ..estimation.checkpointing import MODES
from ..estimation.events import StepTrace
from ..estimation.kernels import Kernels, kernels_of
from ..estimation.paged_state import StateOffload
from ..estimation.setups import check_number, make_setup
from ..estimation.shards import Setup
from ..estimation.trace_options import LossFn, TraceOptions
from ..policy import CommPolicy, MixedPrecisionPolicy, OffloadPolicy
from ..render.text import plural, show_bytes, show_seconds
from ..runtime.gather_budget import GatherBudgetError
from .advice import advice, padding_of
from .arguments import check_ranks, checked_budget
from .candidates import (
    SEARCHED,
    Candidate,
    Degrees,
    Fixed,
    first_round,
    second_round,
)
from .choices import (
    asked,
    checked_expert_ranks,
    checked_fixed,
    checked_modes,
    checked_ways,
    degrees_of,
    within_samples,
)
from .hardware import Hardware, find_hardware
from .loads import (
    Load,
    batch_size,
    describe_sizes,
    even_load,
    sizes_by_speed,
    speeds_of,
    uneven_loads,
)
from .model_steps import ModelSteps
from .outcomes import Outcome, outcome_of, simplicity, simulate_ranks
from .ranges import as_fast, range_of
from .report import Plan, Split, reasons
from .simulate import SimulatedStep, Simulator
from .tensor_parallel import Parallelize
from .traces import Compiled, Size, TracedSteps

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
    strategy: str | None = None,
    mesh_shape: int | Sequence[int] | None = None,
    wrap: Any = None,
    reshard_after_forward: Any = SEARCHED,
    prefetch: int | None = None,
    checkpoint: str | None = None,
    experts: Any = None,
    expert_ranks: int | Sequence[int] | None = None,
    parallelize: Parallelize | None = None,
    tensor_ranks: int | Sequence[int] = 1,
    context_ranks: int | Sequence[int] = 1,
    max_samples: int | None = None,
    max_gathered_bytes: int | None = None,
    max_saved_bytes: int | None = None,
    kernels: Kernels | None = None,
    fake: bool = True,
    unknown_costs: str = "error",
    compiled: Compiled = False,
    shard_granularity: Any = None,
    max_device_bytes: int | None = None,
    offload_optimizer: StateOffload | None = None,
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
        strategy: "full", "grad", "optimizer", "none" or "hybrid", as in `shard_model`, which is
            then not searched. None: "full", "hybrid" and "none" are tried.
        mesh_shape: number of ranks, or (replicas, shards), not searched. None: tried.
        wrap: units, as in `shard_model`, not searched. None: blocks, groups of them, and the whole
            model are tried.
        reshard_after_forward: a bool, a number of ranks or None (the default of the strategy), not
            searched. What is searched if nothing is said: default, False, and within nodes.
        prefetch: number of units to gather ahead, not searched. None: 1 and 2 are tried.
        checkpoint: the one mode of activation checkpointing, in place of
            ``activation_checkpointing``. Whatever is fixed, the rest is searched.
        experts: the modules that `shard_experts` gets, as in `predict`; None: there are none.
        expert_ranks: over which experts are distributed, or several numbers to choose from. None:
            the ranks of a node, as many as there can be, and one in between.
        parallelize: makes the model tensor-parallel, as in `predict`; `Plan.apply` calls it, too.
        tensor_ranks: consecutive ranks that share the operators and one batch, or several numbers
            to choose from; divisors of ``num_ranks``. The meshes are of the other ranks, so a step
            has fewer samples: the most samples in a second are what is chosen.
        context_ranks: over which each sequence is split, as in `predict`, or several numbers to
            choose from, like ``tensor_ranks``; of meshes, those whose last dim they divide.
        max_samples: of a step, that is of all batches of all micro-batches. Numbers of tensor and
            context ranks with which a step has more are left out. None: no limit.
        max_gathered_bytes: as in `shard_model`; fixed, not searched. Configurations with a unit
            that does not fit are left out.
        max_saved_bytes: as in `predict`; fixed, not searched. `Plan.apply` does not offload: the
            training script calls `offload_activations`.
        compiled: as in `predict`; fixed, not searched. `Plan.apply` does not compile: the training
            script calls ``block.compile()``.
        shard_granularity, max_device_bytes, offload_optimizer: as in `predict`; fixed. `Plan.apply`
            does not call `offload_optimizer`.
        progress: called with (current task, number done, total).

    Returns:
        The plan: ``plan.apply(model)`` in the training script, or ``shard_model(model, mesh,
        **plan.kwargs)``; print it for the reasons.

    Raises:
        ValueError: if nothing fits (names the least memory needed), for fixed choices that do not
            go together, or for arguments that `estimate` would reject.

    Example:
        >>> made = plan(model, tokens, "h100", 128, mp_policy=bf16, loss_fn=loss)
        >>> print(made)
        >>> made.picture("plan.png")
    """
    chosen_hardware = find_hardware(hardware)
    check_ranks(num_ranks, chosen_hardware)
    speeds = speeds_of(chosen_hardware, num_ranks)
    differ = len(set(speeds)) > 1
    samples = batch_size(sample_input) if differ else 0
    modes = checked_modes(activation_checkpointing, checkpoint)
    check_number("micro_batches", micro_batches)  # here, and not after all steps are traced
    ways = checked_ways(accumulation, micro_batches)
    if max_gathered_bytes is not None:
        check_number("max_gathered_bytes", max_gathered_bytes)
    budget = checked_budget(memory_budget, chosen_hardware)
    steps = ModelSteps(
        model,
        sample_input,
        TraceOptions(
            loss_fn=loss_fn,
            mp_policy=mp_policy,
            kernels=kernels_of(kernels, chosen_hardware.device_type),
            fake=fake,
            max_saved_bytes=max_saved_bytes,
        ),
        wrap=wrap,
        experts=experts,
        parallelize=parallelize,
        unknown_costs=unknown_costs,
        compiled=compiled,
        shard_granularity=shard_granularity,
    )
    traces = steps.whole
    degrees = degrees_of(tensor_ranks, context_ranks, traces, num_ranks)
    fixed = checked_fixed(strategy, mesh_shape, reshard_after_forward, prefetch, num_ranks, degrees)
    if max_samples is not None:
        check_number("max_samples", max_samples)
        of_rank = batch_size(sample_input) * micro_batches
        degrees = within_samples(degrees, of_rank * num_ranks, max_samples)
    search = _Search(
        traces,
        Simulator(chosen_hardware, optimizer),
        num_ranks,
        budget,
        {
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
            "comm_policy": comm_policy,
            "micro_batches": micro_batches,
            "max_gathered_bytes": max_gathered_bytes,
            "max_device_bytes": max_device_bytes,
            "offload_optimizer": offload_optimizer,
            "granularity": steps.granularity,
        },
        progress or (lambda what, done, total: None),
        ways,
        fixed,
        checked_expert_ranks(expert_ranks, traces, num_ranks, chosen_hardware),
        asked(degrees, parallelize is not None),
    )
    given = {"shard_granularity": shard_granularity, "max_device_bytes": max_device_bytes}
    search.told = {name: value for name, value in given.items() if value is not None}
    even = search.run(modes, even_load(speeds))
    if differ and even.tensor_ranks * even.context_ranks > 1:
        even.reasons.append(
            "Samples: as many on all ranks; with tensor or context parallelism nothing else."
        )
        return even
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


class _Search:
    """Two rounds: meshes and checkpointing first, then the rest for the best of them."""

    def __init__(
        self,
        traces: TracedSteps,
        simulator: Simulator,
        num_ranks: int,
        budget: int,
        options: dict[str, Any],
        progress: Callable[[str, int, int], None],
        accumulations: Sequence[str | None],
        fixed: Fixed,
        expert_ranks: Sequence[int | None],
        degrees: list[tuple[int | None, int | None]],
    ) -> None:
        self.traces = traces
        self.simulator = simulator
        self.num_ranks = num_ranks
        self.budget = budget
        self.options = options
        self.progress = progress
        self.accumulations = accumulations
        self.fixed = fixed
        self.expert_ranks = expert_ranks
        self.degrees = degrees
        self.told: dict[str, Any] = {}  # further arguments of `shard_model`

    def run(self, modes: tuple[str, ...], loads: Sequence[Load]) -> Plan:
        """The best configuration for ranks with these loads."""
        self.loads = loads
        self.outcomes: dict[Candidate, Outcome] = {}
        self._too_large: dict[Candidate, GatherBudgetError] = {}
        self.notes: list[str] = []
        node = self.simulator.hardware.ranks_per_node
        if not self.traces.blocks:
            modes = tuple(mode for mode in modes if mode == "none") or modes[:1]
        modes = self._trace(modes)
        wraps = tuple(self.traces.wraps)
        starts = partial(
            first_round,
            num_ranks=self.num_ranks,
            ranks_per_node=node,
            accumulations=self.accumulations,
            fixed=self.fixed,
            wrap=wraps[0],
            degrees=self.degrees,
        )
        if not starts(modes):
            raise ValueError(self._no_mesh())
        ranks = self.expert_ranks[0]
        if len(self.expert_ranks) > 1:  # on one mesh and with the least activations
            tried = starts(modes[-1:], expert_ranks=self.expert_ranks)
            mesh = next((c.mesh for c in tried if c.strategy != "none"), tried[0].mesh)
            self._simulate([c for c in tried if c.mesh == mesh and c.strategy != "none"] or tried)
            ranks = self._ranked()[0].candidate.expert_ranks if self.outcomes else ranks
        self._first_round(starts(modes, expert_ranks=(ranks,)))
        best = [o.candidate for o in self._ranked()[:3]]
        for start in best:
            own = max(1, node // (start.tensor_ranks or 1))
            self._simulate(second_round(start, wraps, own, self.fixed))
        return self._conclude()

    def _no_mesh(self) -> str:
        told = f"No mesh of {plural(self.num_ranks, 'rank')} goes with"
        if self.fixed.reshard is not SEARCHED:
            told += f" reshard_after_forward={self.fixed.reshard!r}"
            return f"{told}: it must divide the number of shards"
        context = sorted({context or 1 for _, context in self.degrees})
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
        return Degrees(self.expert_ranks[0] or 1, tensor or 1, context or 1)

    def _steps(self, candidate: Candidate, **options: Any) -> list[SimulatedStep]:
        work = [(self._trace_of(candidate, load), load.speed) for load in self.loads]
        return simulate_ranks(self.simulator, self.setup(candidate), work, **options)

    def _trace_of(self, candidate: Candidate, load: Load) -> StepTrace:
        return self.traces.get(candidate.checkpointing, Size(load.samples), candidate.degrees)

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
            self.outcomes[candidate] = outcome_of(candidate, steps, self.budget)

    def _first_round(self, starts: Sequence[Candidate]) -> None:
        """Simulate these; but where recomputation decides that nothing fits, one of many meshes."""
        groups: dict[Any, list[Candidate]] = {}
        for each in starts:
            key = (each.checkpointing, each.tensor_ranks, each.context_ranks)
            groups.setdefault(key, []).append(each)
        least = {key: self._activation_bytes(group[0]) for key, group in groups.items()}
        limit = max(self.budget, min(least.values()))
        hopeful = [key for key, nbytes in least.items() if nbytes <= limit]
        self._simulate([c for key in hopeful for c in groups[key]])
        others = sorted(self.outcomes.values(), key=lambda o: o.needed_bytes)
        meshes = [o.candidate.mesh for o in others]  # the first needs the least: so does it here
        for key, group in groups.items():
            if key not in hopeful:
                known = [c for c in group if c.mesh in meshes]
                group.sort(key=lambda c: -c.mesh[-1])
                self._simulate(sorted(known, key=lambda c: meshes.index(c.mesh))[:1] or group[:1])

    def _activation_bytes(self, candidate: Candidate) -> int:
        """What activations alone need, whatever the mesh."""
        return max(self._trace_of(candidate, load).activation_peak for load in self.loads)

    def setup(self, candidate: Candidate) -> Setup:
        """The candidate's sharding setup."""
        return make_setup(
            self.traces.units[candidate.wrap],
            candidate.mesh[0] if len(candidate.mesh) == 1 else candidate.mesh,
            strategy=candidate.strategy,
            reshard_after_forward=candidate.reshard,
            prefetch=candidate.prefetch,
            accumulation=candidate.accumulation or "unsharded",
            experts=self.traces.expert_units,
            expert_ranks=candidate.expert_ranks or 1,
            tensor_ranks=candidate.tensor_ranks or 1,
            context_ranks=candidate.context_ranks or 1,
            **self.options,
        )

    def _advice(self, best: Outcome) -> str:
        """What takes the memory of the configuration that needs the least, and what helps."""
        candidate = best.candidate
        step = max(self._steps(candidate), key=lambda step: step.needed_bytes)
        trace, setup = self._trace_of(candidate, self.loads[0]), self.setup(candidate)
        return advice(trace, setup, step, candidate.checkpointing)

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
        simulator = Simulator(hardware, self.simulator.optimizer)
        work = [(self._trace_of(candidate, load), load.speed * speed) for load in self.loads]
        steps = simulate_ranks(simulator, self.setup(candidate), work)
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
        ranked = self._with_the_simplest_first(self._ranked())
        if not ranked:
            raise ValueError(str(min(self._too_large.values(), key=lambda e: e.least_bytes)))
        best = ranked[0]
        if not best.fits:
            raise ValueError(
                f"Nothing fits into {show_bytes(self.budget)} per rank: the minimum is "
                f"{show_bytes(best.needed_bytes)}, with {best.candidate}. {self._advice(best)}"
            )
        candidate = best.candidate
        step = self._steps(candidate, keep_samples=True)[0]
        policy = self.options["comm_policy"]
        made = Plan(
            kwargs={
                "strategy": candidate.strategy,
                "wrap": self.traces.wraps[candidate.wrap],
                "reshard_after_forward": candidate.reshard,
                "prefetch": candidate.prefetch,
                "mp_policy": self.options["mp_policy"],
                "offload_policy": self.options["offload_policy"],
                **({} if policy is None else {"comm_policy": policy}),
                **{k: v for k, v in self.options.items() if k == "max_gathered_bytes" and v},
                **self.told,
            },
            mesh_shape=candidate.mesh,
            activation_checkpointing=candidate.checkpointing,
            accumulation=candidate.accumulation,
            checkpoint_modules=self.traces.blocks if candidate.checkpointing != "none" else [],
            hardware=self.simulator.hardware,
            memory_budget=self.budget,
            chosen=best,
            step=step,
            range=range_of(self.simulator.hardware, partial(self._seconds, candidate)),
            outcomes=ranked,
            experts=self.traces.experts,
            expert_ranks=candidate.expert_ranks,
            tensor_ranks=candidate.tensor_ranks or 1,
            context_ranks=candidate.context_ranks or 1,
            parallelize=self.traces.parallelize,
            padding=padding_of(
                self._trace_of(candidate, self.loads[0]), self.setup(candidate), step
            ),
        )
        made.reasons = reasons(made) + self.notes
        if self._too_large:
            made.reasons.append(
                f"{plural(len(self._too_large), 'configuration')} have units that do not fit into "
                "max_gathered_bytes"
            )
        return made
