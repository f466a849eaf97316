"""`predict`: the time and memory of one configuration; `sweep`: of many, from the same traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ..api.shard_model import Sharding, find_strategy
from ..render.text import one_line
from .choices import OF_SHARDING, OF_WORKLOAD, values_of
from .cluster import Cluster, check_arguments
from .prediction import Prediction, Sweep
from .predictor import Configuration, Predictor
from .traces import labelled
from .workload import Workload


def predict(workload: Workload, sharding: Sharding, cluster: Cluster) -> Prediction:
    """Predict the time and memory of a training step in one configuration.

    What `plan` simulates for each configuration that it tries, for the one that you name: the same
    trace, the same simulation, the same figures. Nothing is searched, and a configuration that does
    not fit into memory is predicted too (``Prediction.fits``).

    Args:
        workload: the model and its step.
        sharding: how the model is sharded.
        cluster: what it is trained on. Where `Hardware.speeds` differ, batches are equal and all
            wait for the slowest rank.

    Returns:
        The prediction: print it, or see its attributes.

    Raises:
        ValueError: for what `estimate` or `shard_model` would reject, and ranks that do not fill
            their nodes.
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
    """Predict the combinations of several ranks, batches, contexts, checkpointing and strategies.

    A step is traced once for each size of the micro-batch, kind of checkpointing and number of
    expert, tensor or context ranks, not for each combination: 20 numbers of ranks take one trace.

    Args:
        workload, sharding, cluster: as in `predict`; what all combinations have in common.
        over: values by field. Of `Cluster`, num_ranks (numbers, or meshes as tuples) and
            memory_budget; of `Workload`, sizes of the batch, micro_batches, accumulation,
            activation_checkpointing, compiled (names of modules as a tuple), offload_optimizer,
            numbers of ranks and the schedule; of `Sharding`, all but mp_policy and
            shard_granularity. The last field changes fastest.
        progress: called with (current task, number done, total).

    Returns:
        The table. Combinations that cannot run are in ``Sweep.failed`` with the reason.

    Raises:
        ValueError: for what `predict` would reject, or if no combination can run.
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
        for each in given:  # errors of values that go with nothing
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
    """The same with other values of some fields."""
    own = {name: value for name, value in what.items() if name in _OF_WORKLOAD}
    how = {name: value for name, value in what.items() if name in _OF_SHARDING}
    on = {name: value for name, value in what.items() if name in _OF_CLUSTER}
    if "num_ranks" in on:
        is_mesh = isinstance(on["num_ranks"], list | tuple)
        on |= {"num_ranks": None, "mesh": on["num_ranks"]} if is_mesh else {"mesh": None}
    return replace(workload, **own), replace(sharding, **how), replace(cluster, **on)
