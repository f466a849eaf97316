"""`predict`: the time and memory of one configuration; `sweep`: of many, from the same traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from torch import nn

from ..api.shard_model import find_strategy
from ..common.suggestions import did_you_mean
from ..policy import CommPolicy, MixedPrecisionPolicy, OffloadPolicy, adopt_offload_policy
from ..render.text import one_line
from .candidates import Degrees, Pipeline
from .cells import Cells, check_mode, mesh_of
from .hardware.hardware import Hardware, find_hardware
from .model_steps import ModelSteps
from .prediction import Prediction, Sweep
from .replay.setups import check_number
from .staged_steps import SplitStages
from .tensor_parallel import Parallelize
from .trace.kernels import Kernels, kernels_of
from .trace.paged_state import StateOffload
from .trace.trace_options import LossFn, TraceOptions
from .traces import WHOLE, Compiled, Size


def predict(
    model: nn.Module,
    sample_input: Any,
    hardware: str | Hardware,
    num_ranks: int | Sequence[int],
    *,
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
    parallelize: Parallelize | None = None,
    tensor_ranks: int = 1,
    context_ranks: int = 1,
    split_stages: SplitStages | None = None,
    pipeline_ranks: int = 1,
    schedule: str = "1F1B",
    stages_per_rank: int = 1,
    micro_batches: int = 1,
    accumulation: str = "unsharded",
    optimizer: Any = "adamw",
    loss_fn: LossFn | None = None,
    memory_budget: float | None = None,
    kernels: Kernels | None = None,
    fake: bool = True,
    unknown_costs: str = "error",
    compiled: Compiled = False,
    shard_granularity: Any = None,
    max_device_bytes: int | None = None,
    offload_optimizer: StateOffload | None = None,
) -> Prediction:
    """Predict the time and memory of a training step in one configuration.

    What `plan` simulates for each configuration that it tries, for the one that you name: the same
    trace, the same simulation, the same figures. Nothing is searched, and a configuration that does
    not fit into memory is predicted too (``Prediction.fits``).

    Args:
        model, sample_input, hardware: as in `plan`. Where `Hardware.speeds` differ, batches are
            equal and all wait for the slowest rank.
        num_ranks: the number of GPUs, or the mesh that shards, (replicas, shards). For the
            strategy ``"hybrid"``, a number means that nodes are replicas, as in `shard_model`.
        strategy, wrap, mp_policy, offload_policy, reshard_after_forward: as in `shard_model`.
        prefetch, replicate_below, direct_min_bytes: as in `shard_model`.
        comm_policy, max_gathered_bytes: as in `shard_model`.
        activation_checkpointing: "none", "full" or "selective"; see `estimate`.
        checkpoint_modules: names of the modules to recompute; None: the blocks, as in `plan`.
        max_saved_bytes: as in `estimate`; copies share no time with collectives.
        experts: the modules that `shard_experts` gets before the others become units: names,
            patterns or classes, as in ``wrap``. None: experts are parameters like others.
        expert_ranks: consecutive ranks over which experts are distributed, a divisor of the ranks
            (of a stage, in a pipeline; context and tensor ranks count as well) and at most the
            number of experts; those with the same experts shard them. Forward must make a
            `TokenExchange` (without a mesh here), whose tokens are taken to be spread evenly over
            experts; each of its all-to-alls is waited for.
        parallelize: makes the model tensor-parallel: a function of the model (a copy of it on the
            meta device) and a mesh of ``tensor_ranks``, as the training script calls
            ``parallelize_module``; it may return the model. Operators and collectives of DTensors
            are then those of one rank; each collective is waited for. It leaves ``experts`` alone,
            and tokens travel from each of these ranks: those that it gives a rank.
        tensor_ranks: consecutive ranks that share the operators, a divisor of ``num_ranks``. The
            other ranks are data-parallel; ``sample_input`` is the batch of one group of
            ``tensor_ranks``.
        context_ranks: consecutive ranks, or groups of ``tensor_ranks``, over which each sequence is
            split, as by torch's ``context_parallel``: a divisor of the last dim of the mesh, over
            which parameters are sharded. ``sample_input`` has whole sequences, the batch of one
            such group: dim 1 of its first tensor of two dims, and each dim but dim 0 as long as
            that, a multiple of twice ``context_ranks``. Attention must be
            ``scaled_dot_product_attention`` without a mask.
        split_stages: makes the stages of a pipeline: a function of the model (a copy of it on the
            meta device) and their number that returns them in order, as modules. The first gets
            ``sample_input``, each other one what the one before returns. Each parameter belongs to
            one stage. ``parallelize`` then gets a stage, and ``wrap`` and ``experts`` name modules
            of stages, of which some may have none.
        pipeline_ranks: ranks of a pipeline, the first dim of the mesh, a divisor of ``num_ranks``;
            each stage is sharded over the others. ``sample_input`` is a micro-batch.
        schedule: "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
            "ZBVZeroBubble" or "DualPipeV", as in ``torch.distributed.pipelining``.
        stages_per_rank: of all but the first two, which then need that many times
            ``pipeline_ranks`` stages; of the last two, 2.
        micro_batches, accumulation, optimizer, loss_fn: as in `estimate`.
        memory_budget: bytes of a GPU that a rank may use; None: all of them.
        kernels, fake, unknown_costs, compiled: as in `estimate`.
        shard_granularity, max_device_bytes: as in `shard_model`.
        offload_optimizer: as in `estimate`. The step takes its copies, reads and writes.

    Returns:
        The prediction: print it, or see its attributes.

    Raises:
        ValueError: for arguments that `estimate` or `shard_model` would reject, and ranks that do
            not fill their nodes.
        RuntimeError: if a unit does not fit into ``max_gathered_bytes``.
        TypeError: for arguments of the wrong type.

    Example:
        >>> made = predict(model, tokens, "h100", 64, mp_policy=bf16, loss_fn=loss)
        >>> print(made.bound, made.fits)
        >>> chosen = plan(model, tokens, "h100", 64, mp_policy=bf16, loss_fn=loss)
        >>> same = predict(model, tokens, "h100", chosen.mesh_shape, loss_fn=loss,
        ...     activation_checkpointing=chosen.activation_checkpointing, **chosen.kwargs)
    """
    options = {
        "wrap": wrap,
        "mp_policy": mp_policy,
        "offload_policy": adopt_offload_policy(offload_policy),
        "replicate_below": replicate_below,
        "direct_min_bytes": direct_min_bytes,
        "comm_policy": comm_policy,
        "max_gathered_bytes": max_gathered_bytes,
        "checkpoint_modules": checkpoint_modules,
        "max_saved_bytes": max_saved_bytes,
        "experts": experts,
        "parallelize": parallelize,
        "split_stages": split_stages,
        "optimizer": optimizer,
        "loss_fn": loss_fn,
        "memory_budget": memory_budget,
        "kernels": kernels,
        "fake": fake,
        "unknown_costs": unknown_costs,
        "shard_granularity": shard_granularity,
        "max_device_bytes": max_device_bytes,
        "offload_optimizer": offload_optimizer,
    }
    cells = _cells_of(model, sample_input, find_hardware(hardware), options)
    return cells.predict(
        num_ranks,
        WHOLE,
        activation_checkpointing=activation_checkpointing,
        pipeline=Pipeline(schedule, stages_per_rank),
        degrees=Degrees(expert_ranks, tensor_ranks, context_ranks, pipeline_ranks),
        strategy=strategy,
        reshard_after_forward=reshard_after_forward,
        prefetch=prefetch,
        micro_batches=micro_batches,
        accumulation=accumulation,
        compiled=compiled,
        ranged=True,
    )


def sweep(
    model: nn.Module,
    sample_input: Any,
    hardware: str | Hardware,
    num_ranks: Any,
    *,
    samples: int | list[int] | None = None,
    context: int | list[int] | None = None,
    activation_checkpointing: str | list[str] = "none",
    strategy: str | list[str] = "full",
    reshard_after_forward: Any = None,
    prefetch: int | list[int] = 1,
    micro_batches: int | list[int] = 1,
    accumulation: str | list[str] = "unsharded",
    expert_ranks: int | list[int] = 1,
    tensor_ranks: int | list[int] = 1,
    compiled: Compiled | list[Compiled] = False,
    context_ranks: int | list[int] = 1,
    pipeline_ranks: int | list[int] = 1,
    schedule: str | list[str] = "1F1B",
    stages_per_rank: int | list[int] = 1,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Sweep:
    """Predict the combinations of several ranks, batches, contexts, checkpointing and strategies.

    Each argument may be one value or a list of them. A step is traced once for each size of the
    micro-batch, kind of checkpointing and number of expert, tensor or context ranks, not for each
    combination: 20 numbers of ranks take one trace.

    Args:
        model, hardware: as in `predict`.
        sample_input: as in `predict`. Its sizes are changed by ``samples`` and ``context``.
        num_ranks: numbers of GPUs, or tuples (replicas, shards).
        samples: of a micro-batch of one rank: dim 0 of all tensors with as many rows as the first
            one. None: as many as ``sample_input`` has.
        context: length of a sequence: dim 1 of the first tensor that has one, and all other dims
            but dim 0 of that length. None: that of ``sample_input``. The model must be able to work
            on this length.
        activation_checkpointing, strategy, reshard_after_forward, prefetch: as in `predict`.
        micro_batches, accumulation, expert_ranks, tensor_ranks, context_ranks: as in `predict`.
        compiled: as in `predict`, with names of modules as a tuple.
        pipeline_ranks, schedule, stages_per_rank: as in `predict`.
        progress: called with (current task, number done, total).
        options: the other arguments of `predict`, for all combinations.

    Returns:
        The table. Combinations that cannot run are in ``Sweep.failed`` with the reason.

    Raises:
        ValueError: for arguments that `predict` would reject, or if no combination can run.
        TypeError: for arguments of the wrong type.

    Example:
        >>> made = sweep(model, tokens, "h100", [8, 64, 512], samples=[1, 2, 4],
        ...     activation_checkpointing=["none", "full"], mp_policy=bf16, loss_fn=loss)
        >>> print(made)
        >>> print(made.best)
    """
    chosen_hardware = find_hardware(hardware)
    axes = {
        "num_ranks": num_ranks,
        "samples": samples,
        "context": context,
        "activation_checkpointing": activation_checkpointing,
        "strategy": strategy,
        "reshard_after_forward": reshard_after_forward,
        "prefetch": prefetch,
        "micro_batches": micro_batches,
        "accumulation": accumulation,
        "expert_ranks": expert_ranks,
        "tensor_ranks": tensor_ranks,
        "compiled": compiled,
        "context_ranks": context_ranks,
        "pipeline_ranks": pipeline_ranks,
        "schedule": schedule,
        "stages_per_rank": stages_per_rank,
    }
    values = {k: v if isinstance(v, list) else [v] for k, v in axes.items()}
    for name, given in values.items():
        if not given:
            raise ValueError(f"{name} is an empty list: give at least one value")
    for shape in values["num_ranks"]:
        mesh_of(shape, "full", chosen_hardware)
    for each in values["strategy"]:
        find_strategy(each)
    for mode in values["activation_checkpointing"]:
        check_mode(mode)
    for name in ("samples", "context"):
        for size in values[name]:
            _check_size(name, size)
    cells = _cells_of(model, sample_input, chosen_hardware, _known(options))
    return _swept(cells, values, progress or (lambda what, done, total: None))


def _swept(
    cells: Cells, values: dict[str, list[Any]], progress: Callable[[str, int, int], None]
) -> Sweep:
    varied = tuple(name for name, each in values.items() if len(each) > 1)
    predictions: list[Prediction] = []
    failed: list[tuple[dict[str, Any], str]] = []
    errors: list[Exception] = []
    combinations = [dict(zip(values, each, strict=True)) for each in product(*values.values())]
    for i, what in enumerate(combinations):
        told = ", ".join(f"{name} {what[name]}" for name in varied)
        progress(f"simulating: {told or 'one configuration'}", i, len(combinations))
        size = Size(what["samples"], what["context"])
        rest = {k: v for k, v in what.items() if k not in ("num_ranks", "samples", "context")}
        degrees = Degrees(*(rest.pop(f"{name}_ranks") for name in _DEGREES))
        pipeline = Pipeline(rest.pop("schedule"), rest.pop("stages_per_rank"))
        try:
            predictions.append(
                cells.predict(what["num_ranks"], size, degrees=degrees, pipeline=pipeline, **rest)
            )
        except (ValueError, RuntimeError) as error:
            errors.append(error)
            failed.append(({name: what[name] for name in varied}, one_line(error)))
    if not predictions:
        raise errors[0]
    columns = tuple(dict.fromkeys(("num_ranks", *varied)))
    return Sweep(predictions, failed, cells.steps.num_traced, columns)


def _cells_of(
    model: nn.Module, sample_input: Any, hardware: Hardware, options: dict[str, Any]
) -> Cells:
    """``options``: those of `_OPTIONS`."""
    rest = dict(options)
    traced = {name: rest.pop(name) for name in _OF_TRACES}
    traced["kernels"] = kernels_of(traced["kernels"], hardware.device_type)
    of_steps = {name: rest.pop(name) for name in _OF_STEPS}
    steps = ModelSteps(model, sample_input, TraceOptions(**traced), **of_steps)
    return Cells(steps, hardware, **rest)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"sweep has no argument '{name}'{did_you_mean(name, _OPTIONS)}")
    return {**_OPTIONS, **options}


_DEGREES = ("expert", "tensor", "context", "pipeline")

# Arguments of `predict` that are fields of `TraceOptions`, and further ones of `ModelSteps`.
_OF_TRACES = ("loss_fn", "mp_policy", "kernels", "fake", "max_saved_bytes")
_OF_STEPS = (
    *("wrap", "checkpoint_modules", "experts", "parallelize", "split_stages", "unknown_costs"),
    "shard_granularity",
)

# The arguments of `predict` that a sweep does not vary, with their defaults.
_OPTIONS: dict[str, Any] = {
    "wrap": "auto",
    "mp_policy": MixedPrecisionPolicy(),
    "offload_policy": OffloadPolicy(),
    "replicate_below": 0,
    "direct_min_bytes": None,
    "comm_policy": None,
    "max_gathered_bytes": None,
    "checkpoint_modules": None,
    "max_saved_bytes": None,
    "experts": None,
    "parallelize": None,
    "split_stages": None,
    "optimizer": "adamw",
    "loss_fn": None,
    "memory_budget": None,
    "kernels": None,
    "fake": True,
    "unknown_costs": "error",
    "shard_granularity": None,
    "max_device_bytes": None,
    "offload_optimizer": None,
}


def _check_size(name: str, size: Any) -> None:
    if size is not None:
        check_number(name, size)
