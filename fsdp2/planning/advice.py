"""Explains why a configuration does not fit, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from ..policy import CPUOffloadPolicy
from ..render.text import plural, show_bytes
from .replay.pipeline import RankStage
from .replay.setups import Setup, rows_of, shard_of
from .simulation.simulate import SimulatedStep

# The smallest fraction of the needed memory that counts as a cause.
MATTERS = 0.15
# The smallest factor of padding that is reported.
SHOWN_PADDING = 1.05
_GATHERED = ("gathered parameters", "secondary shards", "communication buffers")
_STATES = ("parameters", "gradients", "optimizer state", "optimizer scratch")
_PADDED = (*_STATES, *_GATHERED)


@dataclass(frozen=True)
class Padding:
    """The cost of uneven dims on the fullest rank.

    For example, a dim of 256 over 2,048 ranks gives 256 of them a row and the others none. The
    fullest rank holds eight times an even share, and gathers send eight times the bytes.

    Attributes:
        factor: elements of the fullest rank's shards, divided by an even share.
        nbytes: approximate bytes that the fullest rank holds in addition to an even share. They
            include parameters, gradients, optimizer state, gathered parameters (one padded shard
            per rank) and buffers of reductions.
        worst: the parameter with the most padding: its name, its size along the sharded dim, and
            the number of ranks that share it.
    """

    factor: float
    nbytes: int
    worst: tuple[str, int, int]

    @override
    def __str__(self) -> str:
        name, size, ranks = self.worst
        return (
            f"about {show_bytes(self.nbytes)} are padding of uneven dims (shards have "
            f"{self.factor:.2g} times an even share), most of it of '{name}': "
            f"{plural(size, 'row')} over {plural(ranks, 'rank')}"
        )


def padding_of(stages: Sequence[RankStage], step: SimulatedStep) -> Padding | None:
    """Padding of the shards of the fullest rank; None if there is none.

    Args:
        stages: the stages of this rank; the whole model, without a pipeline.
    """
    held = even = 0.0
    worst = (0.0, ("", 0, 0))
    for param, setup in ((param, stage.setup) for stage in stages for param in stage.trace.params):
        ranks, dim = shard_of(param, setup)
        size = param.dtype.itemsize
        if dim is None or ranks < 2:
            held += param.numel * size
            even += param.numel * size
            continue
        rows = param.shape[dim]
        share = param.numel * size / ranks
        most = rows_of(param, setup) * (param.numel // rows if rows else 0) * size
        held += most
        even += share
        worst = max(worst, (most - share, (param.name, rows, ranks)))
    if held <= even or not even:
        return None
    parts = step.peak.parts
    padded = sum(parts.get(name, 0) for name in _PADDED)
    return Padding(held / even, int(padded * (1 - even / held)), worst[1])


def advice(stages: Sequence[RankStage], step: SimulatedStep, mode: str) -> str:
    """The causes of a rank's lack of memory and their remedies, the largest first.

    A cause takes at least `MATTERS` of the needed memory.

    Args:
        stages: as in `padding_of`.
    """
    parts, needed = step.peak.parts, step.needed_bytes
    setups = [stage.setup for stage in stages]
    padding = padding_of(stages, step)
    padded = padding.nbytes if padding is not None else 0
    even = 1.0 if padding is None else 1 / padding.factor
    states = int(even * sum(parts.get(name, 0) for name in _STATES))
    gathered = int(even * sum(parts.get(name, 0) for name in _GATHERED))
    activations = parts.get("activations", 0)
    whole = parts.get("unreduced gradients", 0)
    causes: list[tuple[int, str]] = [
        (activations, f"activations: {show_bytes(activations)}: {_for_activations(mode)}"),
        (states, f"shards and their optimizer: {show_bytes(states)}: {_for_states(setups[0])}"),
        (gathered, f"gathered parameters: {show_bytes(gathered)}: {_for_gathered(setups)}"),
        (whole, f"gradients before reduction: {show_bytes(whole)}: {_for_gradients(setups[0])}"),
    ]
    if padding is not None:
        causes.append((padded, f"padding: {padding}. {_for_padding(padding)}"))
    causes.sort(key=lambda cause: -cause[0])
    told = [text for nbytes, text in causes if nbytes >= MATTERS * needed]
    return "; ".join(told or [text for _, text in causes[:1]])


def _for_activations(mode: str) -> str:
    less = "" if mode == "full" else ", activation_checkpointing='full'"
    return f"a smaller micro-batch, shorter sequences or more context_ranks or tensor_ranks{less}"


def _for_states(setup: Setup) -> str:
    if isinstance(setup.sharding.offload_policy, CPUOffloadPolicy):
        return "more ranks"
    return "more ranks, or offload_policy=CPUOffloadPolicy()"


def _for_gathered(setups: Sequence[Setup]) -> str:
    smaller = "make smaller units (wrap=)"
    # The argument has no effect on the root, and None frees all other units after forward.
    chosen = [
        setup.reshard_after_forward(unit)
        for setup in setups
        if setup.reshard_after_forward is not None
        for unit in setup.units
        if not unit.is_root
    ]
    if all(each is None or each is True for each in chosen):
        return smaller
    return f"{smaller}, or free them after forward (reshard_after_forward=True)"


def _for_gradients(setup: Setup) -> str:
    if setup.workload.micro_batches > 1 and setup.workload.accumulation == "unsharded":
        return "sum them on shards (accumulation='sharded')"
    return "make smaller units (wrap=)"


def _for_padding(padding: Padding) -> str:
    _, size, ranks = padding.worst
    if ranks <= size:
        return "More ranks make it more: choose a number that divides the rows"
    return (
        "More ranks do not help: put experts on a separate mesh (fsdp2.experts.shard_experts; "
        f"experts= here), or shard over at most {size} ranks (strategy='hybrid')"
    )
