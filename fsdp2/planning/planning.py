"""`plan`: chooses how to shard a model for given hardware by simulating steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..policy import CommPolicy, MixedPrecisionPolicy, OffloadPolicy, adopt_offload_policy
from ..render.text import show_seconds
from .arguments import check_ranks, checked_budget
from .candidates import SEARCHED
from .choices import (
    Choices,
    asked,
    checked_expert_ranks,
    checked_fixed,
    checked_modes,
    checked_ways,
    degrees_of,
    pipeline_ranks_of,
    pipelines_of,
    within_samples,
)
from .hardware.hardware import Hardware, find_hardware
from .model_steps import ModelSteps
from .plan_report import Plan, Split
from .replay.setups import check_number
from .searching import SAME_SPEED, Search
from .simulation.loads import (
    batch_size,
    describe_sizes,
    even_load,
    sizes_by_speed,
    speeds_of,
    uneven_loads,
)
from .simulation.simulate import Simulator
from .staged_steps import SplitStages
from .tensor_parallel import Parallelize
from .trace.checkpointing import MODES
from .trace.kernels import Kernels, kernels_of
from .trace.paged_state import StateOffload
from .trace.trace_options import LossFn, TraceOptions
from .traces import Compiled


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
    split_stages: SplitStages | None = None,
    pipeline_ranks: int | Sequence[int] | None = None,
    schedule: str | Sequence[str] | None = None,
    stages_per_rank: int | Sequence[int] | None = None,
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
            ``.json`` (see ``fsdp2.planning.find_hardware``) or a `Hardware`.
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
        expert_ranks: over which experts are distributed, or several numbers to choose from: those
            that divide the ranks of a stage, with context and tensor ranks. None: the ranks of a
            node, as many as there can be, and one in between.
        parallelize: makes the model tensor-parallel, as in `predict`; `Plan.apply` calls it, too.
        tensor_ranks: consecutive ranks that share the operators and one batch, or several numbers
            to choose from; divisors of ``num_ranks``. The meshes are of the other ranks, so a step
            has fewer samples: the most samples in a second are what is chosen.
        context_ranks: over which each sequence is split, as in `predict`, or several numbers to
            choose from, like ``tensor_ranks``; of meshes, those whose last dim they divide.
        split_stages: makes the stages of a pipeline, as in `predict`; `Plan.apply` calls it, too.
        pipeline_ranks: of a pipeline, as in `predict`, or several numbers to choose from, like
            ``tensor_ranks``. None: with ``split_stages``, 1, 2, 4, ..., as far as each rank has a
            block and a micro-batch.
        schedule: of pipelines, or several to choose from; None: all that `predict` knows.
        stages_per_rank: of looped schedules, or several numbers to choose from; None: 2.
        max_samples: of a step, that is of all batches of all micro-batches. Numbers of tensor,
            context and pipeline ranks with which a step has more are left out. None: no limit.
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
    samples = batch_size(sample_input) if len(set(speeds)) > 1 else 0
    modes = checked_modes(activation_checkpointing, checkpoint)
    check_number("micro_batches", micro_batches)  # here, and not after all steps are traced
    ways = checked_ways(accumulation, micro_batches)
    if max_gathered_bytes is not None:
        check_number("max_gathered_bytes", max_gathered_bytes)
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
        split_stages=split_stages,
        unknown_costs=unknown_costs,
        compiled=compiled,
        shard_granularity=shard_granularity,
    )
    piped = pipeline_ranks_of(pipeline_ranks, steps, num_ranks, micro_batches)
    degrees = degrees_of(tensor_ranks, context_ranks, piped, steps, num_ranks)
    fixed = checked_fixed(strategy, mesh_shape, reshard_after_forward, prefetch, num_ranks, degrees)
    if max_samples is not None:
        check_number("max_samples", max_samples)
        of_rank = batch_size(sample_input) * micro_batches
        degrees = within_samples(degrees, of_rank * num_ranks, max_samples)
    setup = {
        "mp_policy": mp_policy,
        "offload_policy": adopt_offload_policy(offload_policy),
        "comm_policy": comm_policy,
        "micro_batches": micro_batches,
        "max_gathered_bytes": max_gathered_bytes,
        "max_device_bytes": max_device_bytes,
        "offload_optimizer": offload_optimizer,
        "granularity": steps.granularity,
    }
    pipelines = {each.pipeline for each in degrees}
    for number in sorted(pipelines - {1}):
        only = ways[0] if len(ways) == 1 else None
        steps.check_pipeline(number, accumulation=only, compiled=compiled, setup=setup)
    given = {"shard_granularity": shard_granularity, "max_device_bytes": max_device_bytes}
    search = Search(
        steps,
        Simulator(chosen_hardware, optimizer),
        Choices(
            num_ranks,
            micro_batches,
            ways,
            fixed,
            checked_expert_ranks(
                expert_ranks, steps.whole, num_ranks, chosen_hardware, sorted(pipelines)
            ),
            degrees,
            pipelines_of(schedule, stages_per_rank),
            asked(degrees, parallelize is not None),
            bool(compiled),
        ),
        checked_budget(memory_budget, chosen_hardware),
        setup,
        {name: value for name, value in given.items() if value is not None},
        progress or (lambda what, done, total: None),
    )
    return _for_speeds(search, modes, speeds, samples)


def _for_speeds(
    search: Search, modes: tuple[str, ...], speeds: Sequence[float], samples: int
) -> Plan:
    """The plan; where speeds of ranks differ, with batches by speed if that is faster."""
    even = search.run(modes, even_load(speeds))
    if len(set(speeds)) == 1:
        return even
    if even.tensor_ranks * even.context_ranks * even.pipeline_ranks > 1:
        even.reasons.append(
            "Samples: as many on all ranks; with tensor or context parallelism, or a pipeline, "
            "nothing else."
        )
        return even
    return _divided(search, modes, even, speeds, samples)


def _divided(
    search: Search, modes: tuple[str, ...], even: Plan, speeds: Sequence[float], samples: int
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
