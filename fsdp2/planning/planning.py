"""The public calls: `predict` for one configuration, `sweep` for many, `plan` for the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ..api.shard_model import Sharding, find_strategy
from ..common.checks import check_number
from ..policy import adopt_offload_policy
from ..render.text import one_line, show_seconds
from .choices import OF_SHARDING, OF_WORKLOAD, Choices, given_of, values_of
from .cluster import Cluster, check_arguments
from .plan_report import Plan, Split
from .prediction import Prediction, Sweep
from .predictor import Configuration, Predictor
from .searching import SAME_SPEED, Search
from .simulation.loads import describe_sizes, even_load, sizes_by_speed, speeds_of, uneven_loads
from .traces import labelled, usual_wraps
from .workload import Workload


def predict(workload: Workload, sharding: Sharding, cluster: Cluster) -> Prediction:
    """Predict the time and memory of a training step in one configuration.

    `predict` simulates the given configuration in the same way as `plan` simulates each of its
    candidates. It does not search, and it also predicts a configuration that does not fit into
    memory (``Prediction.fits``).

    Args:
        workload: the model and its step.
        sharding: how the model is sharded.
        cluster: the GPUs. If `Hardware.speeds` differ, batches are equal and all ranks wait for the
            slowest one.

    Returns:
        The prediction; print it, or read its attributes.

    Raises:
        ValueError: for arguments that `estimate` or `shard_model` would reject, and for ranks that
            do not fill their nodes.
        RuntimeError: if a unit does not fit into ``max_gathered_bytes``.
        TypeError: for arguments of the wrong type.

    Example:
        >>> workload = Workload(model, tokens, loss_fn=loss)
        >>> made = predict(workload, Sharding(mp_policy=bf16), Cluster("h100", 64))
        >>> print(made.bound, made.fits)
        >>> best = plan(workload, Cluster("h100", 64), Sharding(mp_policy=bf16))
        >>> same = predict(best.workload, best.sharding, Cluster("h100", mesh=best.mesh_shape))
    """
    check_arguments(workload, sharding, cluster)
    predictor = Predictor(workload, sharding, cluster.gpu)
    mesh = cluster.mesh_for(workload, sharding.strategy)
    configuration = Configuration(predictor.workload, sharding, mesh)
    return predictor.predict(configuration, cluster.budget_bytes, ranged=True)


_OF_WORKLOAD = (
    *OF_WORKLOAD,
    *("samples", "context", "micro_batches", "compiled", "offload_optimizer"),
)
_OF_SHARDING = (
    *(*OF_SHARDING, "replicate_below", "direct_min_bytes", "comm_policy", "offload_policy"),
    *("max_gathered_bytes", "max_device_bytes"),
)
_OF_CLUSTER = ("num_ranks", "memory_budget")


def sweep(
    workload: Workload,
    sharding: Sharding,
    cluster: Cluster,
    over: Mapping[str, Sequence[Any]],
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> Sweep:
    """Predict all combinations of several values of fields.

    A step is traced once for each size of the micro-batch, kind of checkpointing and number of
    expert, tensor or context ranks, not for each combination. For example, 20 numbers of ranks need
    one trace.

    Args:
        workload, sharding, cluster: as in `predict`; the common part of all combinations.
        over: values by field. Fields of `Cluster`: num_ranks (numbers, or meshes as tuples) and
            memory_budget. Fields of `Workload`: sizes of the batch, micro_batches, accumulation,
            activation_checkpointing, compiled (names of modules as a tuple), offload_optimizer,
            numbers of ranks, and the schedule. Fields of `Sharding`: all except mp_policy and
            shard_granularity. The last field changes fastest.
        progress: called with (current task, number done, total).

    Returns:
        The table. ``Sweep.failed`` has the combinations that cannot run, with the reason.

    Raises:
        ValueError: for arguments that `predict` would reject, or if no combination can run.
        TypeError: for arguments of the wrong type, and for a field that cannot be varied.

    Example:
        >>> workload = Workload(model, tokens, loss_fn=loss)
        >>> modes = {"activation_checkpointing": ["none", "full"], "samples": [1, 2, 4]}
        >>> made = sweep(workload, Sharding(), Cluster("h100", 8), {"num_ranks": [8, 64], **modes})
        >>> print(made)
        >>> print(made.best)
    """
    check_arguments(workload, sharding, cluster)
    known = (*_OF_CLUSTER, *_OF_WORKLOAD, *_OF_SHARDING)
    values = {name: values_of(name, each, known, "sweep") for name, each in over.items()}
    for name, given in values.items():
        for each in given:  # errors of values that no combination supports
            if name == "strategy":
                find_strategy(each)
            _with(workload, sharding, cluster, {name: each})
    wraps = labelled(values.get("wrap", [sharding.wrap]))
    predictor = Predictor(workload, sharding, cluster.gpu, wraps)
    workload, show = predictor.workload, progress or (lambda what, done, total: None)
    varied = tuple(name for name, each in values.items() if len(each) > 1)
    predictions: list[Prediction] = []
    failed: list[tuple[dict[str, Any], str]] = []
    errors: list[Exception] = []
    combinations = [dict(zip(values, each, strict=True)) for each in product(*values.values())]
    for i, what in enumerate(combinations):
        told = ", ".join(f"{name} {what[name]}" for name in varied)
        show(f"simulating: {told or 'one configuration'}", i, len(combinations))
        try:
            own, how, on = _with(workload, sharding, cluster, what)
            configuration = Configuration(own, how, on.mesh_for(own, how.strategy))
            predictions.append(predictor.predict(configuration, on.budget_bytes))
        except (ValueError, RuntimeError) as error:
            errors.append(error)
            failed.append(({name: what[name] for name in varied}, one_line(error)))
    if not predictions:
        raise errors[0]
    columns = tuple(dict.fromkeys(("num_ranks", *varied)))
    return Sweep(predictions, failed, predictor.num_traced, columns)


def _with(
    workload: Workload, sharding: Sharding, cluster: Cluster, what: Mapping[str, Any]
) -> tuple[Workload, Sharding, Cluster]:
    """Copies with other values of some fields."""
    own = {name: value for name, value in what.items() if name in _OF_WORKLOAD}
    how = {name: value for name, value in what.items() if name in _OF_SHARDING}
    on = {name: value for name, value in what.items() if name in _OF_CLUSTER}
    if "num_ranks" in on:
        is_mesh = isinstance(on["num_ranks"], list | tuple)
        on |= {"num_ranks": None, "mesh": on["num_ranks"]} if is_mesh else {"mesh": None}
    return replace(workload, **own), replace(sharding, **how), replace(cluster, **on)


def plan(
    workload: Workload,
    cluster: Cluster,
    sharding: Sharding = Sharding(),  # noqa: B008 (frozen)
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    max_samples: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Choose units, resharding, prefetch, activation checkpointing and mesh for a model.

    A step is traced on fake tensors and simulated for every promising configuration. Kernels take
    the time of their FLOPs or bytes, and collectives the time of a ring over the links. The
    simulation runs the library's runtime, so streams wait for each other as in a real step. `plan`
    chooses the fastest configuration that fits into memory; among equally fast ones, the one that
    needs the least memory.

    Values in ``workload``, ``sharding`` and ``cluster`` that differ from the default are kept. The
    other fields are searched, among the values in ``over`` or these:

    - ``strategy``: "full", "hybrid" and "none", each with its meshes;
    - ``wrap``: blocks, groups of them, and the whole model;
    - ``reshard_after_forward``: None, False, and within nodes;
    - ``prefetch``: 1 and 2;
    - ``activation_checkpointing``: all modes; "none" for a model without blocks;
    - ``accumulation``, with several micro-batches: "unsharded" and "sharded". Unsharded sums
      communicate once per step, but need memory for the gradients of the whole model;
    - ``expert_ranks``, with ``experts``: the ranks of a node, the largest possible number, and one
      number in between;
    - ``pipeline_ranks``, with ``split_stages``: 1, 2, 4, ..., as long as each rank has a block and
      a micro-batch; ``schedule``: all; ``stages_per_rank``: 2, for looped schedules.

    ``tensor_ranks`` and ``context_ranks`` are searched only if ``over`` has several values of them,
    or of ``mesh``. With more of these ranks, a step has fewer samples, so `plan` maximizes samples
    per second.

    If `Hardware.speeds` differ, the step takes as long as the slowest rank. `plan` then also tries
    to divide each micro-batch of all ranks by speed (`split_batch`), and does so if this is faster;
    see `Plan.split`. The samples are the rows of all tensors in ``sample_input`` that have as many
    rows as the first one.

    Args:
        workload: the model and its step.
        cluster: the GPUs.
        sharding: the settings that are not searched.
        over: values to choose from, by field. Use it also to keep a default:
            ``over={"strategy": ["full"]}``.
        max_samples: the largest number of samples in a step, over all micro-batches of all ranks.
            Numbers of tensor, context and pipeline ranks that exceed it are left out. None: no
            limit.
        progress: called with (current task, number done, total).

    Returns:
        The plan. Call ``plan.apply(model)`` in the training script, or ``shard_model(model, mesh,
        plan.sharding)``; print it for the reasons.

    Raises:
        ValueError: if nothing fits (names the least memory needed), for fixed choices that
            contradict each other, or for arguments that `estimate` would reject.
        TypeError: for arguments of the wrong type, and for an unknown field in ``over``.

    Example:
        >>> made = plan(Workload(model, tokens, loss_fn=loss), Cluster("h100", 128))
        >>> print(made)
        >>> made.picture("plan.png")
    """
    check_arguments(workload, sharding, cluster)
    given = given_of(workload, sharding, over or {})
    sharding = replace(sharding, offload_policy=adopt_offload_policy(sharding.offload_policy))
    if sharding.max_gathered_bytes is not None:
        check_number("max_gathered_bytes", sharding.max_gathered_bytes)
    if max_samples is not None:
        check_number("max_samples", max_samples)
    hardware = cluster.gpu
    if cluster.num_ranks is not None:
        speeds_of(hardware, cluster.num_ranks)  # checks before a trace
    wraps = labelled(given["wrap"]) if "wrap" in given else usual_wraps(workload.model)
    predictor = Predictor(workload, sharding, hardware, wraps, search_units="wrap" not in given)
    choices = Choices(predictor, cluster, given, max_samples)
    for number in choices.pipeline_ranks:
        if number > 1:
            only = choices.accumulations[0] if len(choices.accumulations) == 1 else None
            own = replace(
                predictor.workload, pipeline_ranks=number, accumulation=only or "unsharded"
            )
            predictor.check_pipeline(own, sharding)
    budget = cluster.budget_bytes
    search = Search(
        predictor, sharding, choices, budget, progress or (lambda what, done, total: None)
    )
    speeds = speeds_of(hardware, choices.num_ranks)
    return _for_speeds(search, speeds)


def _for_speeds(search: Search, speeds: Sequence[float]) -> Plan:
    """The plan; if speeds of ranks differ, with batches divided by speed if that is faster."""
    differ = len(set(speeds)) > 1
    samples = search.predictor.batch_size if differ else 0
    even = search.run(even_load(speeds))
    if not differ:
        return even
    if even.candidate.ranks_per_batch > 1:
        even.reasons.append(
            "Samples: as many on all ranks; with tensor or context parallelism, or a pipeline, "
            "nothing else."
        )
        return even
    return _divided(search, even, speeds, samples)


def _divided(search: Search, even: Plan, speeds: Sequence[float], samples: int) -> Plan:
    """The plan with batches divided by speed, or ``even`` if that gains nothing."""
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
        made = search.run(uneven_loads(sizes, speeds))
    except ValueError as error:
        return stay(f"by speed ({told}) does not work: {error}")
    except RuntimeError as error:  # the model or the loss expects a number of samples
        return stay(f"by speed ({told}) the model fails: {error}")
    if made.seconds >= even.seconds * (1 - SAME_SPEED):
        return stay(f"by speed ({told}) a step takes {show_seconds(made.seconds)}")
    slower = 100 * (even.seconds / made.seconds - 1)
    made.reasons.append(
        f"Samples: by speed; {samples} on each rank is {slower:.1f} % slower "
        f"({show_seconds(even.seconds)} a step)."
    )
    return replace(made, split=Split(tuple(speeds), sizes, even.seconds))
