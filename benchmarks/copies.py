"""Bytes that a step copies outside collectives, beyond what the plain model copies.

From torch.profiler with shapes: every copy (`COPIES`) that has no other copy inside it counts the
bytes it moves, so that a `_chunk_cat` that runs a `cat` counts once, and a cast counts as what
it reads or writes, whichever its first argument is. A copy falls into one of three places:

- transport: inside a `c10d::` or `gloo:` operation, or inside `Work.wait()`;
- exchange: inside a range named `fsdp2::exchange`, communication that `fsdp2` does by itself
  (its own slice, the local sum);
- outside: everywhere else, which is what the measure is about. What the plain model copies in its
  own forward and backward is subtracted from it; with bf16 compute, that of a model in bf16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

from .models import LMConfig
from .ranks import progress
from .steps import make_lm, mean_over_ranks, random_tokens, train_step
from .transport import around_waits
from .variants import Variant, average_gradients, build, gradient_norm

WARM_UP_STEPS = 2
LEARNING_RATE = 1e-2
WAIT = "transport::wait"
EXCHANGE = "fsdp2::exchange"
# Operators that only move bytes. `to`, `contiguous` and `clone` end in `copy_`. The first argument
# of each, a tensor or a list of them, has as many elements as are moved.
COPIES = frozenset(
    f"aten::{name}"
    for name in (
        "copy_",
        "_foreach_copy_",
        "cat",
        "_chunk_cat",
        "split_copy",
        "split_with_sizes_copy",
        "index_copy_",
        "scatter_",
    )
)


def measure(names: list[str], config: LMConfig, tokens: int, bf16: bool) -> dict[str, Any]:
    """Measures the named variants on this rank, one after the other.

    Args:
        names: Variants; "plain" must be among them.
        config: Sizes of the model.
        tokens: Tokens of the batch, one sequence.
        bf16: Compute in bf16.

    Returns:
        For each variant what `measure_variant` says, and `above_plain_bytes`.
    """
    results = {}
    for name in names:
        progress(f"copies{' bf16' if bf16 else ''}: {name}")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        variant = build(name, partial(make_lm, config), mesh, bf16)
        results[name] = measure_variant(variant, config, tokens)
    plain_bytes = results["plain"]["outside_bytes"]
    if bf16:
        # The plain variant casts its weights, which is no part of forward and backward.
        model = make_lm(config).to(torch.bfloat16)
        reference = Variant("bf16 weights", model, sharded=False, averages=False)
        plain_bytes = measure_variant(reference, config, tokens)["outside_bytes"]
    for result in results.values():
        result["above_plain_bytes"] = result["outside_bytes"] - plain_bytes
    return results


def measure_variant(variant: Variant, config: LMConfig, tokens: int) -> dict[str, Any]:
    """Trains a few steps and counts the copies of the last one's forward and backward."""
    optimizer = torch.optim.SGD(variant.model.parameters(), lr=LEARNING_RATE)
    batch = random_tokens(config, 1, tokens)
    for _ in range(WARM_UP_STEPS):
        train_step(variant, batch)
        average_gradients(variant)
        optimizer.step()
        optimizer.zero_grad()
    with (
        around_waits(partial(record_function, WAIT)),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
    ):
        loss = train_step(variant, batch)
    average_gradients(variant)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    copies = count_copies(profiler.profiler.kineto_results.experimental_event_tree())
    return {
        **copies,
        "losses": [mean_over_ranks(loss)],
        "gradient_norms": [gradient_norm(variant)],
    }


def count_copies(roots: list[Any]) -> dict[str, Any]:
    """Adds up the copies of a profile by place, and lists those outside, largest first.

    Args:
        roots: The profiler's event tree.

    Returns:
        `outside_bytes`, `exchange_bytes`, `transport_bytes`, `largest_bytes` of one copy outside,
        and `outside`: bytes, number and largest for each operator and what it ran in.
    """
    totals = Counter({"outside": 0, "exchange": 0, "transport": 0})
    num_bytes: Counter[tuple[str, str]] = Counter()
    largest: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for event, place, inside in innermost_copies(roots):
        moved = moved_bytes(event)
        totals[place] += moved
        if place == "outside":
            key = (event.name, inside)
            num_bytes[key] += moved
            count[key] += 1
            largest[key] = max(largest[key], moved)
    listed = [
        {
            "operator": key[0],
            "inside": key[1],
            "bytes": n,
            "count": count[key],
            "largest_bytes": largest[key],
        }
        for key, n in num_bytes.most_common(12)
    ]
    return {
        **{f"{place}_bytes": n for place, n in totals.items()},
        "largest_bytes": max(largest.values(), default=0),
        "outside": listed,
    }


def innermost_copies(roots: list[Any]) -> Iterator[tuple[Any, str, str]]:
    """Walks an event tree; yields (event, place, name of the range or operation around it)."""
    waiting = [(root, "outside", "") for root in roots]
    while waiting:
        event, place, inside = waiting.pop()
        if place == "outside":
            if event.name == EXCHANGE:
                place = "exchange"
            elif event.name == WAIT or event.name.startswith(("c10d::", "gloo:")):
                place = "transport"
        if event.name in COPIES and not any(map(has_copy, event.children)):
            yield event, place, inside
            continue
        if not event.name.startswith("aten::"):
            inside = event.name.partition(" (")[0]
        waiting += [(child, place, inside) for child in event.children]


def has_copy(event: Any) -> bool:
    """Whether an event is a copy or has one inside."""
    return event.name in COPIES or any(map(has_copy, event.children))


def moved_bytes(event: Any) -> int:
    """How many bytes a copying event moves, by the shape and dtype of its first argument."""
    first = event.typed[1].inputs[0]
    tensors = first if isinstance(first, list) else [first]
    return sum(torch.Size(t.sizes).numel() * t.dtype.itemsize for t in tensors)
