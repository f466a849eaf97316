"""`estimate`: predicts memory and traffic of sharded training without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..dtensor.boxes import entries_per_part
from ..policy import (
    CommPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    adopt_offload_policy,
    check_comm_policy,
)
from ..transports.host.topology import split_by_link
from ..wrap import units_of
from .estimate_report import Estimate, RankEstimate, TrafficRow
from .replay.replay import Replay, params_on_host, replay
from .replay.setups import granularities, make_setup
from .replay.shards import Setup, shard_shape, with_rank
from .trace.events import StepTrace
from .trace.expert_units import experts_of, with_experts
from .trace.kernels import Kernels, kernels_of
from .trace.optimizers import OptimizerCost, optimizer_cost, param_costs
from .trace.paged_state import PlacedOptimizer, StateOffload, paged_state
from .trace.trace_options import LossFn, TraceOptions
from .trace.tracing import trace_step
from .trace.uncosted import check_choice, without_cost


def estimate(
    model: nn.Module,
    mesh_shape: int | Sequence[int],
    sample_input: Any,
    *,
    loss_fn: LossFn | None = None,
    strategy: str = "full",
    wrap: Any = "auto",
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (has no state)
    reshard_after_forward: Any = None,
    prefetch: int = 1,
    replicate_below: int = 0,
    direct_min_bytes: int | None = None,
    comm_policy: CommPolicy | None = None,
    max_gathered_bytes: int | None = None,
    activation_checkpointing: str = "none",
    checkpoint_modules: Sequence[str] | None = None,
    max_saved_bytes: int | None = None,
    experts: Any = None,
    expert_ranks: int = 1,
    micro_batches: int = 1,
    accumulation: str = "unsharded",
    optimizer: Any = "adamw",
    device_type: str = "cuda",
    kernels: Kernels | None = None,
    ranks_per_node: int = 8,
    fake: bool = True,
    unknown_costs: str = "error",
    compiled: bool | Sequence[str] = False,
    shard_granularity: Any = None,
    max_device_bytes: int | None = None,
    offload_optimizer: StateOffload | None = None,
) -> Estimate:
    """Estimate memory and traffic of one training step, without running or sharding ``model``.

    One step runs on fake tensors, which have shapes and no memory. It is then replayed through the
    library's own runtime, so the numbers include what the runtime does: it gathers one unit ahead,
    keeps the last unit for backward, frees embeddings and heads early, and limits the reductions in
    flight. Needs no process group and no GPU; takes seconds for any number of ranks.

    Args:
        model: not sharded; may be on the meta device. Unchanged afterwards.
        mesh_shape: number of ranks, or (replicas, shards) for HSDP.
        sample_input: the batch of one rank: a tensor, a tuple of positional arguments or a dict of
            keyword arguments; tensors may be on the meta device.
        loss_fn: a function of the model's output that returns the loss. None: the output's
            ``loss``, the output itself if it is one number, or the sum of its tensors.
        strategy, wrap, mp_policy, offload_policy, reshard_after_forward: as in `shard_model`.
        prefetch, replicate_below, direct_min_bytes: as in `shard_model`.
        comm_policy, max_gathered_bytes: as in `shard_model`.
        activation_checkpointing: "none", "full" or "selective"; "selective" keeps the results of
            attention and of every second matrix multiplication. Checkpointing inside the model is
            taken into account in any case.
        checkpoint_modules: names of the modules to recompute. None: the blocks, meaning all units
            except the root that have parameters and inputs that need gradients.
        max_saved_bytes: the ``max_device_bytes`` of an `offload_activations` around forward and
            loss. None: activations stay on the device, as on the CPU in any case.
        experts: the modules that `shard_experts` gets before the others become units: names,
            patterns or classes, as in ``wrap``. None: experts are parameters like others.
        expert_ranks: consecutive ranks over which experts are distributed, a divisor of the ranks;
            those with the same experts shard them. Forward must make a `TokenExchange` (without a
            mesh here), whose tokens are taken to be spread evenly over experts.
        micro_batches: forwards and backwards per optimizer step.
        accumulation: how gradients of micro-batches are summed:

            - ``"unsharded"``: whole gradients, reduced in the last micro-batch
              (``model.set_requires_gradient_sync(False)``, or ``no_sync()``, in all others);
            - ``"sharded"``: the same calls, after ``model.set_accumulate_sharded(True)``: every
              micro-batch reduce-scatters into shards, and the last all-reduces over replicas;
            - ``"every"``: every micro-batch reduces completely; what a loop does that calls none
              of these.
        optimizer: "adamw", "sgd", "momentum", an optimizer class, a function of the parameters, or
            None.
        device_type: the device of the run. "cpu" models gloo: up to 32 ranks read what they need
            from each other's memory within a node, and send each shard, and a node's sum of each
            gradient, once to each other node.
        kernels: which attention kernel, and whether norms are fused. None: those that
            ``device_type`` runs.
        ranks_per_node: determines which traffic leaves a node; ranks are numbered node by node.
        fake: False runs one real step on the CPU, with all the memory that it needs; required for
            models whose shapes depend on their data.
        unknown_costs: what to do about operators whose FLOPs nobody has said (`register_cost`), if
            they are more than 1 % of the bytes of a step: "error", or "list" to go on without their
            FLOPs. They are listed in any case.
        compiled: whether `torch.compile` makes one graph of each block (the modules that
            ``checkpoint_modules=None`` stands for), or the names of the modules that it compiles.
            Pointwise operators and reductions are then fused, and torch's partitioner decides what
            is saved for backward.
        shard_granularity, max_device_bytes: as in `shard_model`.
        offload_optimizer: an `offload_optimizer`; None: state stays where its parameters are.

    Returns:
        The estimate. Peaks are of live tensors; ``reserved`` is what torch's allocator holds for
        them. Neither includes memory of CUDA, cuBLAS and NCCL (1 to 3 GB of a GPU: `plan` counts
        it) or scratch memory inside kernels.

    Raises:
        ValueError: for a mesh or a strategy that does not fit, a model that is already sharded,
            shapes that depend on data (with ``fake``), a step without a loss, operators without a
            cost, or modules that cannot be compiled.
        RuntimeError: if a unit does not fit into ``max_gathered_bytes``, with the least that works.
        TypeError: for arguments of the wrong type.

    Example:
        >>> with torch.device("meta"):
        ...     model = Transformer(config)
        >>> batch = torch.empty(1, 8192, dtype=torch.long, device="meta")
        >>> print(estimate(model, 1024, batch, loss_fn=lambda out: out.float().mean()))
    """
    check_comm_policy(comm_policy)
    check_choice(unknown_costs)
    kernels = kernels_of(kernels, device_type)
    names = experts_of(model, experts)
    units = with_experts(units_of(model, wrap), names)
    setup = make_setup(
        units,
        mesh_shape,
        strategy=strategy,
        reshard_after_forward=reshard_after_forward,
        device_type=device_type,
        mp_policy=mp_policy,
        offload_policy=adopt_offload_policy(offload_policy),
        prefetch=prefetch,
        replicate_below=replicate_below,
        direct_min_bytes=direct_min_bytes,
        comm_policy=comm_policy,
        micro_batches=micro_batches,
        accumulation=accumulation,
        max_gathered_bytes=max_gathered_bytes,
        ranks_per_node=ranks_per_node,
        experts=frozenset((name,) for name in names),
        expert_ranks=expert_ranks,
        max_device_bytes=max_device_bytes,
        offload_optimizer=offload_optimizer,
        granularity=granularities(model, shard_granularity, names),
    )
    if checkpoint_modules is None:
        checkpoint_modules = default_checkpoint_modules(model, units)
    options = TraceOptions(
        loss_fn=loss_fn,
        mp_policy=mp_policy,
        activation_checkpointing=activation_checkpointing,
        checkpoint_modules=checkpoint_modules,
        device_type=device_type,
        kernels=kernels,
        fake=fake,
        max_saved_bytes=max_saved_bytes,
        experts=names,
        expert_ranks=expert_ranks,
        compiled=compiled_modules(compiled, lambda: default_checkpoint_modules(model, units)),
    )
    trace = trace_step(model, sample_input, [n for unit in units for n in unit.modules], options)
    shape = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    lines = without_cost(trace, unknown_costs)
    made = estimate_trace(trace, setup, shape, strategy, optimizer)
    made.notes.extend([*trace.notes, *lines])
    return made


def compiled_modules(
    compiled: bool | Sequence[str], blocks: Callable[[], Sequence[str]]
) -> tuple[str, ...]:
    """The names of the modules that ``compiled`` means.

    Args:
        blocks: the names of the blocks, which True stands for.

    Raises:
        ValueError: for True, if there are no blocks.
        TypeError: if it is neither a bool nor a sequence of names.
    """
    if isinstance(compiled, bool):
        names = tuple(blocks()) if compiled else ()
        if compiled and not names:
            raise ValueError(
                "compiled=True compiles blocks (modules of a class that occurs more than once), "
                "and the model has none: pass the names of modules"
            )
        return names
    if isinstance(compiled, str) or not all(isinstance(name, str) for name in compiled):
        raise TypeError(f"compiled must be a bool or a sequence of module names, got {compiled!r}")
    return tuple(compiled)


def default_checkpoint_modules(model: nn.Module, units: Sequence[Any]) -> list[str]:
    """The blocks: modules of units whose class occurs more than once, except embeddings."""
    modules = dict(model.named_modules())
    names = [name for unit in units if not unit.is_root for name in unit.modules]
    kinds = [type(modules[name]) for name in names]
    return [
        name
        for name, kind in zip(names, kinds, strict=True)
        if kinds.count(kind) > 1 and not isinstance(modules[name], nn.Embedding | nn.EmbeddingBag)
    ]


def estimate_trace(
    trace: StepTrace,
    setup: Setup,
    mesh_shape: tuple[int, ...],
    strategy: str,
    optimizer: Any,
) -> Estimate:
    """Estimate a step that has already been traced."""
    replays, ranks = {}, {}
    for rank in sorted({0, setup.num_shards - 1, *_boundary_ranks(trace, setup)}):
        replays[rank] = _replay_rank(trace, with_rank(setup, rank), optimizer)
        ranks[rank] = _rank_estimate(rank, replays[rank])
    worst = max(ranks.values(), key=lambda estimate: estimate.peak.total)
    shown = sorted({0, worst.rank, setup.num_shards - 1})
    return Estimate(
        mesh_shape=mesh_shape,
        strategy=strategy,
        num_params=sum(param.numel_of_all_experts for param in trace.params),
        num_units=len(setup.units),
        flops=trace.flops * setup.micro_batches,
        ranks=[ranks[rank] for rank in shown],
        traffic=_traffic(replays[0]),
    )


def _boundary_ranks(trace: StepTrace, setup: Setup) -> set[int]:
    """The last ranks that have rows of the largest parameters; their shards are smaller."""
    found: set[int] = set()
    largest = sorted(trace.params, key=lambda p: -p.numel)[:3]
    for param in largest:
        if param.shape:
            rows = setup.granularity.get(param.name, 1)
            chunk = entries_per_part(param.shape[0], setup.num_shards, rows)
            last = min(-(-param.shape[0] // chunk), setup.num_shards) - 1 if chunk else 0
            found |= {last}
    return found


def _replay_rank(trace: StepTrace, setup: Setup, optimizer: Any) -> Replay:
    return replay(trace, setup, optimizer=placed_optimizer(trace, setup, optimizer))


def placed_optimizer(
    trace: StepTrace,
    setup: Setup,
    optimizer: Any,
    known: dict[Any, OptimizerCost] | None = None,
) -> PlacedOptimizer:
    """The cost of the optimizer for this rank's shards, wherever they are; ``known`` as in
    `optimizer_cost`."""
    trained = trace.trained  # an optimizer passes over parameters without a gradient
    on_host = params_on_host(trace, setup)
    shards: dict[bool, list[Any]] = {False: [], True: []}
    for param in trace.params:
        if param.name in trained:
            shards[param.name in on_host].append((shard_shape(param, setup), param.dtype))
    # (On the CPU all is counted as the device's.)
    device = optimizer_cost(shards[False], optimizer, setup.device_type, known)
    host = optimizer_cost(shards[True], optimizer, "cpu")
    paged = None
    if (offload := setup.offload_optimizer) is not None:
        costs = {
            here: iter(param_costs(shards[here], optimizer, "cpu" if here else setup.device_type))
            for here in shards
        }
        params = [
            replace(next(costs[p.name in on_host]), on_host=p.name in on_host)
            for p in trace.params
            if p.name in trained
        ]
        paged = paged_state(params, offload, is_cpu=setup.device_type == "cpu")
    return PlacedOptimizer(device, host, paged)


def _rank_estimate(rank: int, made: Replay) -> RankEstimate:
    account = made.account
    everywhere = {
        name: account.now.get(name, 0) + account.host.get(name, 0)
        for name in ("parameters", "gradients", "optimizer state", "buffers", "inputs")
    }
    return RankEstimate(
        rank=rank,
        parameters=everywhere["parameters"],
        gradients=everywhere["gradients"],
        optimizer=everywhere["optimizer state"] + account.host.get("optimizer state in files", 0),
        buffers=everywhere["buffers"],
        inputs=everywhere["inputs"],
        forward=account.peaks["forward"],
        backward=account.peaks["backward"],
        step=account.peaks["optimizer"],
        host=dict(account.host),
        reserved=account.reserved,
    )


def _traffic(made: Replay) -> list[TrafficRow]:
    rows: dict[tuple[str, str], list[int]] = {}
    for transfer in made.transfers:
        row = rows.setdefault((transfer.kind, transfer.group), [0, 0, 0, 0, 0])
        row[0] += 1
        row[1] += transfer.messages
        row[2] += transfer.sent
        if transfer.between is not None:
            row[3] += transfer.sent
            row[4] += transfer.between
    result = []
    for (kind, group), (calls, messages, sent, known, known_between) in rows.items():
        size = made.setup.num_shards
        if group == "secondary":
            size = next(
                b.secondary.layout.num_shards for u in made.units for b in u.buckets if b.secondary
            )
        ring = made.setup.topology.ring(group, size)
        _, between = split_by_link(sent - known, ring, to_all=kind == "all_to_all")
        between += known_between
        result.append(TrafficRow(kind, group, calls, messages, sent, sent - between, between))
    return result
