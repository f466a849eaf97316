"""`estimate`: predicts memory and traffic of sharded training without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from typing_extensions import override

from ..api.shard_model import Sharding
from ..dtensor.boxes import entries_per_part
from ..policy import check_comm_policy
from ..render.text import plural, show_bytes, table
from ..transports.host.topology import split_by_link
from ..wrap import units_of
from .cluster import check_arguments
from .replay.replay import Replay, placed_optimizer, replay
from .replay.setups import Setup, checked_mesh, granularities, make_setup
from .trace.account import Peak
from .trace.events import StepTrace
from .trace.expert_units import experts_of, with_experts
from .trace.kernels import kernels_of
from .trace.uncosted import without_cost
from .traces import TracedSteps
from .workload import Workload, compiled_modules, default_checkpoint_modules

_PHASES = (("forward", "forward"), ("backward", "backward"), ("step", "optimizer step"))


@dataclass(frozen=True)
class RankEstimate:
    """Bytes on one rank.

    Attributes:
        rank: index among the ranks that share each parameter.
        parameters, gradients, optimizer: bytes of the shards; in host memory if offloaded.
        buffers, inputs: bytes of the model's buffers and of a batch.
        forward, backward, step: the memory peaks of the phases of a training step. They include all
            of the above that is in device memory at that time.
        host: bytes in host memory, by category.
        reserved: bytes that torch's allocator holds after some steps: the peak and fragmentation.
            None on the CPU, which has no such allocator.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    inputs: int
    forward: Peak
    backward: Peak
    step: Peak
    host: dict[str, int]
    reserved: int | None = None

    @property
    def peak(self) -> Peak:
        """The highest peak of a training step."""
        return max((self.forward, self.backward, self.step), key=lambda peak: peak.total)


@dataclass(frozen=True)
class TrafficRow:
    """The traffic of a rank in one training step with one kind of collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce" or, with a `CommPolicy`, "all_to_all".
        group: the group of ranks: "shard", "secondary" (smaller groups after
            ``reshard_after_forward=N``) or "replicate".
        calls: number of launches; ``messages``: number of collectives in them.
        sent: bytes that the rank sends.
        within_nodes, between_nodes: the parts of ``sent`` by link, averaged over the ranks of a
            node, for rings that enter and leave each node once.
    """

    kind: str
    group: str
    calls: int
    messages: int
    sent: int
    within_nodes: int
    between_nodes: int


@dataclass(frozen=True)
class Estimate:
    """The result of `estimate`; ``print`` shows it as tables.

    Attributes:
        ranks: the first and the last rank, and between them the rank with the highest peak if it is
            another one.
        traffic: the traffic of the first rank.
        flops: FLOPs of one rank's forward and backward, including recomputation.
        num_params: number of elements of the whole model's parameters.
        notes: operators without a cost, and other assumptions of the estimate.
    """

    mesh_shape: tuple[int, ...]
    strategy: str
    num_params: int
    num_units: int
    flops: int
    ranks: list[RankEstimate]
    traffic: list[TrafficRow]
    notes: list[str] = field(default_factory=list)

    @property
    def worst(self) -> RankEstimate:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak.total)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends per step."""
        return sum(row.sent for row in self.traffic)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as JSON-compatible data."""
        return {**asdict(self), "peak_bytes": self.worst.peak.total, "sent_bytes": self.sent}

    @override
    def __str__(self) -> str:
        return _as_text(self)


def _as_text(made: Estimate) -> str:
    """Tables: memory by phase and by purpose, other ranks, traffic."""
    shape = " x ".join(map(str, made.mesh_shape))
    worst = made.worst
    lines = [
        f"{made.num_params / 1e6:,.1f}M parameters in {plural(made.num_units, 'unit')}, "
        f"strategy '{made.strategy}', mesh {shape}",
        "",
        f"Memory of rank {worst.rank}, peak of each phase",
        _memory(worst),
        "",
        "Ranks",
        _ranks(made),
    ]
    if made.traffic:
        lines += ["", "Sent per rank and step", _traffic_table(made)]
    lines += ["", f"Compute per rank and step: {made.flops / 1e12:,.2f} TFLOP"]
    return "\n".join([*lines, *made.notes])


def _memory(rank: RankEstimate) -> str:
    peaks = [getattr(rank, attribute) for attribute, _ in _PHASES]
    names = list(dict.fromkeys(name for peak in peaks for name, n in peak.parts.items() if n))
    rows: list[tuple[str, ...]] = [("", *(title for _, title in _PHASES))]
    for name in names:
        rows.append((name, *(_cell(peak.parts.get(name, 0)) for peak in peaks)))
    rows.append(("total", *(show_bytes(peak.total) for peak in peaks)))
    for name, nbytes in rank.host.items():
        rows.append((f"{name} on the host", *([show_bytes(nbytes)] * 3)))
    return table(rows, right="123")


def _cell(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else "-"


def _ranks(made: Estimate) -> str:
    reserves = made.worst.reserved is not None
    header = ("rank", "parameters", "gradients", "optimizer state", "peak")
    rows: list[tuple[str, ...]] = [(*header, *["reserved"] * reserves, "")]
    for rank in made.ranks:
        note = "worst" if rank is made.worst else ""
        sizes = [rank.parameters, rank.gradients, rank.optimizer, rank.peak.total]
        if rank.reserved is not None:
            sizes.append(rank.reserved)
        rows.append((str(rank.rank), *map(show_bytes, sizes), note))
    return table(rows, right="012345" if reserves else "01234")


def _traffic_table(made: Estimate) -> str:
    header = ("collective", "over", "calls", "sent", "within nodes", "between nodes")
    rows: list[tuple[str, ...]] = [header]
    for row in made.traffic:
        sizes = map(show_bytes, (row.sent, row.within_nodes, row.between_nodes))
        kind = row.kind.replace("_", "-")
        rows.append((kind, row.group, str(row.calls), *sizes))
    return table(rows, right="2345")


def estimate(
    workload: Workload,
    sharding: Sharding,
    mesh_shape: int | Sequence[int],
    *,
    device_type: str = "cuda",
    ranks_per_node: int = 8,
) -> Estimate:
    """Estimate memory and traffic of one training step, without running or sharding the model.

    One step runs on fake tensors, which have shapes but no memory. It is then replayed through the
    library's runtime, so the numbers reflect the runtime's behaviour: it gathers one unit ahead,
    keeps the last unit for backward, frees embeddings and heads early, and limits the reductions in
    flight. This needs no process group and no GPU, and takes seconds for any number of ranks.

    Args:
        workload: the model and its step, without a pipeline (use `predict` for pipelines).
        sharding: how the model is sharded.
        mesh_shape: number of ranks, or (replicas, shards) for HSDP. With tensor parallelism, each
            counts for ``tensor_ranks`` ranks.
        device_type: the device of the run. "cpu" models gloo. Up to 32 ranks read each other's
            memory within a node. They send each shard, and a node's sum of each gradient, once to
            each other node.
        ranks_per_node: number of ranks on each node, which determines the traffic between nodes.
            Ranks are numbered node by node.

    Returns:
        The estimate. Peaks count live tensors; ``reserved`` is the memory that torch's allocator
        holds for them. Neither includes scratch memory inside kernels, or memory of CUDA, cuBLAS
        and NCCL (1 to 3 GB of a GPU, which `plan` counts).

    Raises:
        ValueError: if the mesh does not match the strategy, the model is already sharded, or the
            step has no loss; for shapes that depend on data (with ``fake``), operators without a
            cost, modules that cannot be compiled, and pipelines.
        RuntimeError: if a unit does not fit into ``max_gathered_bytes``; names the smallest limit.
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
            "predict supports pipelines"
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
    names = ("parameters", "gradients", "optimizer state", "buffers", "inputs")
    held: list[Any] = [account.now.get(name, 0) + account.host.get(name, 0) for name in names]
    held[2] += account.host.get("optimizer state in files", 0)
    held += [account.peaks[phase] for phase in ("forward", "backward", "optimizer")]
    held += [dict(account.host), account.reserved]
    return RankEstimate(rank, *held)


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
        size = made.num_secondary if group == "secondary" else made.setup.num_shards
        ring = made.setup.topology.ring(group, size)
        _, between = split_by_link(sent - known, ring, to_all=kind == "all_to_all")
        between += known_between
        result.append(TrafficRow(kind, group, calls, messages, sent, sent - between, between))
    return result
