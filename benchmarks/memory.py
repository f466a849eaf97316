"""Memory above sharded state during a step: tensor bytes, counted operation by operation.

At every moment of forward and backward: the bytes of all live tensors, minus the sharded
parameters, minus those sharded gradients that exist by then. What is left are gathered
parameters, communication buffers, unsharded gradients and activations. The batch is small, so that
activations are little; what the plain model needs beyond parameters and gradients is reported
beside it. The optimizer is SGD without momentum: it has no state. What is held between steps,
after the gradients were dropped, is a number of its own and no part of the peak.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .ledger import Ledger
from .models import LMConfig, lm_loss
from .ranks import progress
from .steps import make_lm, mean_over_ranks, random_tokens, train_step
from .transport import around_waits
from .variants import Variant, average_gradients, build, gradient_norm

WARM_UP_STEPS = 2
LEARNING_RATE = 1e-2


def measure(names: list[str], config: LMConfig, tokens: int, bf16: bool) -> dict[str, Any]:
    """Measures the named variants on this rank, one after the other.

    Args:
        names: Variants.
        config: Sizes of the model.
        tokens: Tokens of the batch, one sequence.
        bf16: Compute in bf16.

    Returns:
        For each variant what `measure_variant` says, for this rank.
    """
    results = {}
    for name in names:
        progress(f"memory{' bf16' if bf16 else ''}: {name}")
        results[name] = measure_variant(name, config, tokens, bf16)
    return results


def measure_variant(name: str, config: LMConfig, tokens: int, bf16: bool) -> dict[str, Any]:
    """Trains a few steps under a ledger and takes the last one's peaks apart."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # From before the model: a buffer that is kept since then is counted too.
    with Ledger(every_operation=False) as ledger, around_waits(ledger.paused):
        variant = build(name, partial(make_lm, config), mesh, bf16)
        optimizer = torch.optim.SGD(variant.model.parameters(), lr=LEARNING_RATE)
        batch = random_tokens(config, 1, tokens)
        for _ in range(WARM_UP_STEPS):
            train_step(variant, batch)
            average_gradients(variant)
            optimizer.step()
            optimizer.zero_grad()
        inputs, targets = batch
        ledger.every_operation = True
        ledger.sample("between steps")
        start = ledger.now
        loss = lm_loss(variant.model(inputs), targets)
        ledger.sample("backward starts")
        backward_start = ledger.now
        loss.backward()
        ledger.sample("backward ends")
        peaks = take_apart(ledger, variant, start, backward_start, ledger.now)
    average_gradients(variant)
    return {
        **peaks,
        "losses": [mean_over_ranks(loss.item())],
        "gradient_norms": [gradient_norm(variant)],
    }


def take_apart(
    ledger: Ledger, variant: Variant, start: int, backward_start: int, end: int
) -> dict[str, Any]:
    """Peaks of one step above its state, and what was alive at the highest.

    Args:
        ledger: What was recorded.
        variant: Right after backward; its gradients are there.
        start: Moment between the steps.
        backward_start: Moment after forward.
        end: Moment after backward.
    """
    parameters = state_bytes(ledger, variant.local_parameters())
    gradients = state_bytes(ledger, variant.local_gradients())

    def gradient_bytes(moment: int) -> int:
        # In forward no gradient exists: memory kept for it then is not state but overhead.
        if moment < backward_start:
            return 0
        return sum(min(n, ledger.histories[h].range_at(moment)[1]) for h, n in gradients.items())

    parameter_bytes = sum(parameters.values())
    above = {
        moment: ledger.live_bytes[moment] - parameter_bytes - gradient_bytes(moment)
        for moment in range(start, end + 1)
    }
    between_steps = above.pop(start)
    peak = max(above, key=lambda moment: above[moment])
    return {
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": gradient_bytes(end),
        "between_steps_bytes": between_steps,
        "forward_peak_bytes": max(above[m] for m in range(start + 1, backward_start + 1)),
        "backward_peak_bytes": max(above[m] for m in range(backward_start, end + 1)),
        "after_backward_bytes": above[end],
        "peak_bytes": above[peak],
        "peak_operation": ledger.operations[peak],
        "peak_position": (peak - start) / max(1, end - start),
        "alive_at_peak": alive_at(ledger, peak, {**parameters, **gradients}),
        "operations": end - start,
    }


def state_bytes(ledger: Ledger, tensors: list[Tensor]) -> dict[int, int]:
    """The bytes of some tensors, by the place in the ledger's histories of what holds them."""
    num_bytes: Counter[int] = Counter()
    for tensor in tensors:
        num_bytes[ledger.memory_of(tensor)] += tensor.nbytes
    return num_bytes


def alive_at(ledger: Ledger, moment: int, state: dict[int, int]) -> list[dict[str, Any]]:
    """What was alive at a moment, beyond the state: bytes and count per maker, largest first.

    Args:
        ledger: What was recorded.
        moment: A moment of it.
        state: Bytes that count as state, by storage.
    """
    ranges = [(h.range_at(moment), place) for place, h in enumerate(ledger.histories)]
    # By address, and of those that begin together the largest first: it holds the others.
    live = sorted((address, -n, place) for (address, n), place in ranges if n)
    num_bytes: Counter[str] = Counter()
    count: Counter[str] = Counter()
    end, maker = 0, ""
    for address, negative_bytes, place in live:
        if address >= end:
            end, maker = address - negative_bytes, ledger.histories[place].made_by
            num_bytes[maker] -= negative_bytes
            count[maker] += 1
        num_bytes[maker] -= state.get(place, 0)
    return [
        {"made_by": maker, "bytes": n, "storages": count[maker]}
        for maker, n in num_bytes.most_common(12)
        if n > 0
    ]
