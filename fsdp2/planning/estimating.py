"""`estimate`: predicts memory and traffic of sharded training without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..api.shard_model import Sharding
from ..dtensor.boxes import entries_per_part
from ..policy import check_comm_policy
from ..transports.host.topology import split_by_link
from ..wrap import units_of
from .cluster import check_arguments
from .estimate_report import Estimate, RankEstimate, TrafficRow
from .replay.replay import Replay, placed_optimizer, replay
from .replay.setups import checked_mesh, granularities, make_setup
from .replay.shards import Setup
from .trace.events import StepTrace
from .trace.expert_units import experts_of, with_experts
from .trace.kernels import kernels_of
from .trace.uncosted import without_cost
from .traces import TracedSteps
from .workload import Workload, compiled_modules, default_checkpoint_modules


def estimate(
    workload: Workload,
    sharding: Sharding,
    mesh_shape: int | Sequence[int],
    *,
    device_type: str = "cuda",
    ranks_per_node: int = 8,
) -> Estimate:
    """Estimate memory and traffic of one training step, without running or sharding the model.

    One step runs on fake tensors, which have shapes and no memory. It is then replayed through the
    library's own runtime, so the numbers include what the runtime does: it gathers one unit ahead,
    keeps the last unit for backward, frees embeddings and heads early, and limits the reductions in
    flight. Needs no process group and no GPU; takes seconds for any number of ranks.

    Args:
        workload: the model and its step; without a pipeline, of which `predict` knows more.
        sharding: how the model is sharded.
        mesh_shape: number of ranks, or (replicas, shards) for HSDP; each stands for
            ``tensor_ranks`` ranks.
        device_type: the device of the run. "cpu" models gloo: up to 32 ranks read what they need
            from each other's memory within a node, and send each shard, and a node's sum of each
            gradient, once to each other node.
        ranks_per_node: determines which traffic leaves a node; ranks are numbered node by node.

    Returns:
        The estimate. Peaks are of live tensors; ``reserved`` is what torch's allocator holds for
        them. Neither includes memory of CUDA, cuBLAS and NCCL (1 to 3 GB of a GPU: `plan` counts
        it) or scratch memory inside kernels.

    Raises:
        ValueError: for a mesh or a strategy that does not fit, a model that is already sharded,
            shapes that depend on data (with ``fake``), a step without a loss, operators without a
            cost, modules that cannot be compiled, or a pipeline.
        RuntimeError: if a unit does not fit into ``max_gathered_bytes``, with the least that works.
        TypeError: for arguments of the wrong type.

    Example:
        >>> with torch.device("meta"):
        ...     model = Transformer(config)
        >>> batch = torch.empty(1, 8192, dtype=torch.long, device="meta")
        >>> workload = Workload(model, batch, loss_fn=lambda out: out.float().mean())
        >>> print(estimate(workload, Sharding(), 1024))
    """
    check_arguments(workload, sharding)
    if workload.pipeline_ranks > 1:
        raise ValueError(
            f"pipeline_ranks={workload.pipeline_ranks}: an estimate is of ranks that do the same; "
            "predict knows pipelines"
        )
    check_comm_policy(sharding.comm_policy)
    names = experts_of(workload.model, workload.experts)
    units = with_experts(units_of(workload.model, sharding.wrap), names)
    blocks = default_checkpoint_modules(workload.model, units)  # of these units, experts among them
    given = workload.checkpoint_modules
    workload = replace(
        workload,
        kernels=kernels_of(workload.kernels, device_type),
        checkpoint_modules=blocks if given is None else given,
        compiled=compiled_modules(workload.compiled, blocks),
    )
    setup = make_setup(
        units,
        mesh_shape,
        workload,
        sharding,
        experts=frozenset((name,) for name in names),
        granularity=granularities(workload.model, sharding.shard_granularity, names),
        device_type=device_type,
        ranks_per_node=ranks_per_node,
    )
    trace = TracedSteps(workload, sharding, device_type=device_type).get(workload)
    made = _estimate_trace(trace, setup, checked_mesh(mesh_shape))
    made.notes.extend([*trace.notes, *without_cost(trace, "list")])
    return made


def _estimate_trace(trace: StepTrace, setup: Setup, mesh_shape: tuple[int, ...]) -> Estimate:
    replays, ranks = {}, {}
    for rank in sorted({0, setup.num_shards - 1, *_boundary_ranks(trace, setup)}):
        own = replace(setup, rank=rank)
        cost = placed_optimizer(trace, own, setup.workload.optimizer)
        replays[rank] = replay(trace, own, optimizer=cost)
        ranks[rank] = _rank_estimate(rank, replays[rank])
    worst = max(ranks.values(), key=lambda estimate: estimate.peak.total)
    shown = sorted({0, worst.rank, setup.num_shards - 1})
    return Estimate(
        mesh_shape=mesh_shape,
        strategy=setup.sharding.strategy,
        num_params=sum(param.numel_of_all_experts for param in trace.params),
        num_units=len(setup.units),
        flops=trace.flops * setup.workload.micro_batches,
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
