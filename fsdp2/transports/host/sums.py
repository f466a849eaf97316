"""How ranks that exchange messages or reads add: in rank order, each the whole or a part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# An all-reduce of so few bytes by messages is one exchange of the whole: half as many steps, one
# after the other, and (n-1) instead of 2 (n-1)/n times the bytes. Where several ranks are on each
# of several hosts, of fewer than:
WHOLE_BYTES = 64 * 1024
# Else, of no more than: by whether all ranks are on one host, and by how many they are at most.
# Measured: a test compares with what ``python -m benchmarks.phases --write`` has kept.
MEASURED_WHOLE_BYTES = {
    True: {4: 1024 * 1024, 8: 512 * 1024, 16: 128 * 1024, 32: 128 * 1024},
    False: {4: 64 * 1024, 8: 128 * 1024, 16: 128 * 1024},
}


def whole_bytes(num_ranks: int, *, one_host: bool) -> int:
    """Up to which an all-reduce by messages between all ranks is one exchange of the whole."""
    measured = MEASURED_WHOLE_BYTES[one_host]
    most = max(measured)
    if num_ranks > most:  # as much is sent as by those
        return measured[most] * most // num_ranks
    return measured[min(n for n in measured if n >= num_ranks)]


def exchanged_sum_dtype(reduce_dtype: torch.dtype, grad_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an exchange adds."""
    # The addition is local: adding low precision in float32 costs no byte on the wire. And where
    # ``.grad`` is wider than that, adding in its dtype lets the sum be written straight into it.
    sums = reduce_dtype if reduce_dtype.itemsize >= 4 else torch.float32
    return grad_dtype if grad_dtype.itemsize > sums.itemsize else sums


# Elements added up at a time: few enough to stay in a core's cache until they are divided.
BLOCK_NUMEL = 64 * 1024


def mean_in_order(terms: Sequence[torch.Tensor], out: torch.Tensor, divide_by: int = 0) -> None:
    """``out`` = mean of ``terms``, added one after the other in the dtype of ``out``.

    Args:
        terms: 1-D tensors of the same length.
        out: 1-D tensor of that length; may be one of the first two terms, no later one.
        divide_by: what the sum is divided by, if not by the number of ``terms``; 1 leaves a sum.
    """
    divide_by = divide_by or len(terms)
    blocks = [term.split(BLOCK_NUMEL) for term in terms]
    for i, block in enumerate(out.split(BLOCK_NUMEL)):
        # With a wider ``out`` the first term is copied into it: ``add`` of two narrow ones would
        # round their sum before it is widened.
        if len(terms) > 1 and terms[0].dtype == terms[1].dtype == out.dtype:
            torch.add(blocks[0][i], blocks[1][i], out=block)
            rest = blocks[2:]
        else:
            block.copy_(blocks[0][i])
            rest = blocks[1:]
        for term in rest:
            block.add_(term[i])
        if divide_by != 1:
            block.div_(divide_by)


def cut(tensor: torch.Tensor, num: int) -> list[torch.Tensor]:
    """``num`` views of a 1-D tensor, which come to the whole; see `cut_length`."""
    length = cut_length(len(tensor), num)
    return [tensor[i * length : (i + 1) * length] for i in range(num)]


def cut_length(numel: int, num: int) -> int:
    """Elements of each of ``num`` parts; the last ones may be shorter or empty."""
    length = -(-numel // num)
    return length + -length % 16  # parts begin on 16 bytes if the whole does
