"""What `estimate`, `predict`, `sweep` and `plan` are given, and what they say of anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harness import ours_only

pytestmark = ours_only("planning")

MODEL, BATCH = nn.Linear(4, 4), torch.zeros(2, 4)


def workload() -> Any:
    import fsdp2

    return fsdp2.planning.Workload(MODEL, BATCH)


def eight() -> Any:
    import fsdp2

    return fsdp2.planning.Cluster("h100", 8)


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a model, as before": (
        lambda fsdp2: fsdp2.estimate(MODEL, (4, 8), BATCH),
        TypeError,
        r"workload must be a Workload, like Workload\(.*got a Linear",
    ),
    "a strategy": (
        lambda fsdp2: fsdp2.predict(workload(), "full", eight()),
        TypeError,
        r"sharding must be a Sharding, like Sharding\(\"full\"\), got 'full'",
    ),
    "hardware": (
        lambda fsdp2: fsdp2.planning.sweep(workload(), fsdp2.planning.Sharding(), "h100", {}),
        TypeError,
        r"cluster must be a Cluster, like .*, got 'h100'",
    ),
    "the order of predict": (
        lambda fsdp2: fsdp2.plan(workload(), fsdp2.planning.Sharding(), eight()),
        TypeError,
        r"sharding must be a Sharding, like .*, got a Cluster",
    ),
    "no bytes": (
        lambda fsdp2: fsdp2.planning.Cluster("h100", 8, memory_budget=0.5),
        ValueError,
        "memory_budget must be a positive number of bytes",
    ),
    "a field that does not exist": (
        lambda fsdp2: fsdp2.plan(workload(), eight(), over={"strateg": ["full"]}),
        TypeError,
        "did you mean 'strategy'",
    ),
    "a field that says what is compared": (
        lambda fsdp2: fsdp2.planning.sweep(
            workload(), fsdp2.planning.Sharding(), eight(), {"model": [MODEL]}
        ),
        TypeError,
        "sweep has no 'model' to choose in over",
    ),
    "no module": (
        lambda fsdp2: fsdp2.planning.Workload("model", BATCH),
        TypeError,
        "model must be an nn.Module, got 'model'",
    ),
    "half a micro-batch": (
        lambda fsdp2: fsdp2.planning.Workload(MODEL, BATCH, micro_batches=0.5),
        TypeError,
        "micro_batches must be an int, got 0.5",
    ),
    "an unknown accumulation": (
        lambda fsdp2: fsdp2.planning.Workload(MODEL, BATCH, accumulation="sharde"),
        ValueError,
        "accumulation must be one of .* did you mean 'sharded'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_values_are_refused_by_name(what: str) -> None:
    import fsdp2

    call, error, text = WRONG[what]
    with pytest.raises(error, match=text):
        call(fsdp2)


def test_a_sharding_is_what_shard_model_takes() -> None:
    """Its fields come by name, too, and before those of a ``sharding``."""
    import fsdp2

    with pytest.raises(TypeError, match=r"sharding must be a Sharding.*got 'grad'"):
        fsdp2.shard_model(nn.Linear(2, 2), None, "grad")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Sharding has no field 'strategi': did you mean"):
        fsdp2.shard_model(nn.Linear(2, 2), strategi="grad")
