"""The batches of ranks with different speeds. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...batches import split_batch
from ...common.pytree import map_tensors, tensors_in
from ..hardware.hardware import Hardware


@dataclass(frozen=True)
class Load:
    """The load of a kind of rank.

    Attributes:
        samples: samples of a micro-batch; None: as many as the sample input has.
        speed: speed of its kernels, as in `Hardware.speeds`.
    """

    samples: int | None
    speed: float


def speeds_of(hardware: Hardware, num_ranks: int) -> tuple[float, ...]:
    """The speed of each rank; all 1 if the hardware has no speeds.

    Raises:
        ValueError: if the number of speeds is neither the number of nodes nor the number of ranks.
    """
    speeds, node = hardware.speeds, min(hardware.ranks_per_node, num_ranks)
    if not speeds:
        return (1.0,) * num_ranks
    if len(speeds) == num_ranks:
        return tuple(speeds)
    if len(speeds) == num_ranks // node:
        return tuple(speed for speed in speeds for _ in range(node))
    raise ValueError(
        f"Hardware '{hardware.name}' has {len(speeds)} speeds, but there are "
        f"{num_ranks // node} nodes with {node} ranks each: give one for each node, or one for "
        "each rank"
    )


def even_load(speeds: Sequence[float]) -> list[Load]:
    """The load of equal batches: all ranks wait for the slowest."""
    return [Load(None, min(speeds))]


def uneven_loads(sizes: Sequence[int], speeds: Sequence[float]) -> list[Load]:
    """The loads of batches of different sizes, each with its slowest rank."""
    slowest: dict[int, float] = {}
    for size, speed in zip(sizes, speeds, strict=True):
        slowest[size] = min(speed, slowest.get(size, speed))
    return [Load(size, speed) for size, speed in sorted(slowest.items(), reverse=True)]


def batch_size(sample_input: Any) -> int:
    """Samples of the batch: the size of dim 0 of its first tensor that has dims.

    Raises:
        ValueError: if there is no such tensor.
    """
    for tensor in tensors_in(sample_input):
        if tensor.ndim:
            return tensor.shape[0]
    raise ValueError(
        "The hardware has ranks of different speeds, but sample_input has no tensor whose dim 0 "
        "would be the samples that could be divided among them"
    )


def sizes_of(sample_input: Any) -> tuple[int | None, int | None, bool]:
    """Samples and context of a micro-batch, if known, and whether it consists of tokens.

    Tokens are integers of shape (samples, positions).
    """
    for tensor in tensors_in(sample_input):
        if tensor.ndim:
            whole = not (tensor.is_floating_point() or tensor.is_complex())
            context = tensor.shape[1] if tensor.ndim > 1 else None
            return tensor.shape[0], context, whole and tensor.ndim == 2
    return None, None, False


def with_samples(sample_input: Any, samples: int | None) -> Any:
    """``sample_input`` with another number of samples; additional samples repeat the first ones.

    Tensors with another size of dim 0 than the first tensor have no samples (such as a shared mask)
    and do not change.
    """
    if samples is None:
        return sample_input
    size = batch_size(sample_input)

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or tensor.shape[0] != size:
            return tensor
        rows = torch.arange(samples, device=tensor.device) % size
        return tensor.detach()[rows].requires_grad_(tensor.requires_grad)

    return map_tensors(resized, sample_input)


def with_context(sample_input: Any, context: int | None) -> Any:
    """``sample_input`` with sequences of another length; additional values repeat the first ones.

    The length is the size of dim 1 of the first tensor that has this dim. All dims of this size,
    except dim 0, are sequence dims (a mask of positions by positions has two of them).

    Raises:
        ValueError: if there is no tensor with two dims, or if the last dim of a floating-point
            tensor has the same size and may be features.
    """
    if context is None:
        return sample_input
    sequences = [t for t in tensors_in(sample_input) if t.ndim > 1]
    if not sequences:
        raise ValueError(
            "sample_input has no tensor of two dims, so its dim 1 cannot be the context: pass "
            "sample inputs of other lengths one by one"
        )
    length = sequences[0].shape[1]

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        dims = [dim for dim in range(1, tensor.ndim) if tensor.shape[dim] == length]
        if tensor.is_floating_point() and len(dims) == 2 and dims[-1] == tensor.ndim - 1 == 2:
            raise ValueError(
                f"A tensor of shape {tuple(tensor.shape)} in sample_input has two dims of length "
                f"{length}: which of them is the context? Make the sample of another length"
            )
        made = tensor.detach()
        for dim in dims:
            made = made.index_select(dim, torch.arange(context, device=tensor.device) % length)
        return made.requires_grad_(tensor.requires_grad) if dims else tensor

    return map_tensors(resized, sample_input)


def with_part_of_context(sample_input: Any, ranks: int) -> tuple[Any, int]:
    """The part of ``sample_input`` on one of ``ranks``, and the number of its positions.

    Sequence dims are found as in `with_context`.

    Raises:
        ValueError: if there is no sequence, or it is not divisible: torch gives each rank a piece
            of the head and one of the tail.
    """
    sequences = [t for t in tensors_in(sample_input) if t.ndim > 1]
    if not sequences:
        raise ValueError(
            f"context_ranks={ranks} splits dim 1 of the tensors in sample_input, but none has two "
            "dims"
        )
    length = sequences[0].shape[1]
    if length % (2 * ranks):
        raise ValueError(
            f"context_ranks={ranks} gives each rank two pieces of a sequence, but the {length} "
            f"positions of sample_input (dim 1 of its first tensor) are no multiple of {2 * ranks}:"
            " pad the sequences, or choose other context_ranks"
        )
    return with_context(sample_input, length // ranks), length // ranks


def sizes_by_speed(samples: int, speeds: Sequence[float]) -> list[int]:
    """Samples of each rank in a micro-batch with ``samples`` per rank on average; equal for all
    ranks if there are too few to divide."""
    return split_batch(samples * len(speeds), speeds)


def describe_sizes(sizes: Sequence[int]) -> str:
    """Sizes as text: "11 on ranks 0 to 31, 5 on ranks 32 to 63"; at most six parts.

    Example:
        >>> describe_sizes([4, 4, 2])
        '4 on ranks 0 to 1, 2 on rank 2'
    """
    runs: list[list[int]] = []  # samples, first rank, last rank
    for rank, size in enumerate(sizes):
        if runs and runs[-1][0] == size:
            runs[-1][2] = rank
        else:
            runs.append([size, rank, rank])
    parts = [
        f"{size} on " + (f"rank {first}" if first == last else f"ranks {first} to {last}")
        for size, first, last in runs[:6]
    ]
    return ", ".join(parts) + (f" and {len(runs) - 6} more" if len(runs) > 6 else "")
