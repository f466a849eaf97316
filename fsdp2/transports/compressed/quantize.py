"""What travels in place of tensors under a `CommPolicy`: blocks of 8-bit numbers, or bfloat16.

A *row* is what one rank sends to one other: parts of several tensors, as bytes. Each part, and
the scales of each, start on 16 bytes::

    | scales of A (float32) | A in blocks (a byte each) | scales of B | B | the pack, in bfloat16 |

A part *in blocks* is cut into blocks of ``block`` elements, the last one shorter. Each block has a
scale, by which its largest absolute value becomes the largest of the 8-bit dtype::

    scale = max|x| / 127 (int8) or / 448 (float8)       q = round(x / scale)        x' = q * scale

as in ZeRO++ (Wang et al. 2023, arXiv 2306.10209, section 3.1), whose blocks keep an outlier from
costing the precision of a whole tensor; float8 is E4M3 (Micikevicius et al. 2022, arXiv
2209.05433). Blocks never contain elements of two parameters, or of two ranks. The error of an
element is at most half a scale with int8; with float8, the larger of ``|x| / 16`` and a thousandth
of a scale. Zeros come back as zeros. A block in which a number is not finite has none that is
finite when it comes back: an overflow or a NaN is seen where it would have been seen without.

Parts that are not worth blocks (biases, norms: fewer elements than a block, or packed) travel in
bfloat16. They are few bytes, and the ones that a model is most sensitive to.

Pure arithmetic on tensors: nothing here communicates, so both sides of a message and all reports
of bytes come to the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...sharding.layout import ALIGN_BYTES, BucketLayout

# The largest numbers of the dtypes that have scales.
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
Key = tuple[int, str, int]
_SCALE = torch.float32
_SMALL = torch.bfloat16
# The least scale: without it, the scale of a block of the tiniest numbers would be rounded to zero,
# and dividing by it would make NaNs of them.
_TINY = torch.finfo(_SCALE).tiny
# Elements that are worked on at a time: few enough that what a step leaves for the next one is
# still in a core's cache, and that temporary memory does not grow with the gradient.
_CHUNK_CPU, _CHUNK_DEVICE = 128 * 1024, 16 * 1024 * 1024


@dataclass(frozen=True)
class WireRow:
    """Where the bytes of each part lie in a row.

    Args:
        dtype: in which parts in blocks travel; bfloat16: all parts do, without blocks.
        block: elements per scale.
        numels: elements of each part.
        in_blocks: for each part, whether it may travel in blocks.
    """

    dtype: torch.dtype
    block: int
    numels: tuple[int, ...]
    in_blocks: tuple[bool, ...]

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Scales of each part; 0 for one that travels in bfloat16."""
        return tuple(
            -(-numel // self.block) if chosen and self.dtype in _LARGEST else 0
            for numel, chosen in zip(self.numels, self.in_blocks, strict=True)
        )

    @cached_property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """Where in a row each part's scales begin, its numbers begin, and its bytes end."""
        # Each part is rounded up, not the row: then several reductions of a unit (of its head,
        # early) have the bytes of one, and every part starts on an address that kernels like.
        places, start = [], 0
        for numel, blocks in zip(self.numels, self.blocks, strict=True):
            numbers = start + _aligned(blocks * _SCALE.itemsize)
            end = numbers + _aligned(numel * (1 if blocks else _SMALL.itemsize))
            places.append((start, numbers, end))
            start = end
        return tuple(places)

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return self.places[-1][-1] if self.places else 0

    def views(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """For each part, its numbers and its scales in ``rows``.

        Args:
            rows: bytes, of shape (..., ``nbytes``).

        Returns:
            Views of shape (..., numel) and (..., blocks); without scales, None.
        """
        views: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for numel, blocks, (scales, numbers, _) in zip(
            self.numels, self.blocks, self.places, strict=True
        ):
            dtype = self.dtype if blocks else _SMALL
            part = rows[..., numbers : numbers + numel * dtype.itemsize].view(dtype)
            if not blocks:
                views.append((part, None))
                continue
            stop = scales + blocks * _SCALE.itemsize
            views.append((part, rows[..., scales:stop].view(_SCALE)))
        return views

    def encode(self, parts: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Write ``parts``, of shapes (..., numel), into ``rows``, of shape (..., ``nbytes``)."""
        for part, (numbers, scales) in zip(parts, self.views(rows), strict=True):
            if scales is None:
                numbers.copy_(part)
            else:
                quantize(part, numbers, scales, self.block)

    def decode(self, rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """The reverse: write what ``rows`` stand for into ``parts``, in their dtype."""
        for part, (numbers, scales) in zip(parts, self.views(rows), strict=True):
            if scales is None:
                part.copy_(numbers)
            else:
                dequantize(numbers, scales, part, self.block)

    def add_decoded(
        self, rows: torch.Tensor, sums: Sequence[torch.Tensor], *, times: int = 1
    ) -> None:
        """Add ``times`` what ``rows`` stand for to ``sums``."""
        for total, (numbers, scales) in zip(sums, self.views(rows), strict=True):
            if scales is None:
                total.add_(numbers, alpha=times)
                continue
            for a, b, of_scales, size in _chunks(numbers, self.block):
                some = numbers[..., a:b].unflatten(-1, (-1, size))
                product = torch.mul(*_factors(some, scales[..., of_scales].unsqueeze(-1)))
                total[..., a:b].unflatten(-1, (-1, size)).add_(product, alpha=times)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def quantize(values: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, block: int) -> None:
    """Write ``values`` as 8-bit ``numbers`` and one scale per block.

    Args:
        values: shape (..., n), any real floating-point dtype.
        numbers: shape (..., n), int8 or float8_e4m3fn.
        scales: shape (..., number of blocks), float32.
        block: elements per scale; the last block may have fewer.
    """
    largest = _LARGEST[numbers.dtype]
    for a, b, of_scales, size in _chunks(values, block):
        some = values[..., a:b].unflatten(-1, (-1, size))
        # (Two passes: on the CPU, `aminmax` along a dim takes 15 times as long. NaNs pass through
        # all of these, and an infinite scale makes NaNs and infinities.)
        high, low = some.amax(-1), some.amin(-1)
        scale = torch.maximum(high, low.neg_()).to(_SCALE).div_(largest).clamp_(min=_TINY)
        ratio = some / scale.unsqueeze(-1)
        if numbers.dtype == torch.int8:
            ratio.round_()
        numbers[..., a:b].unflatten(-1, (-1, size)).copy_(ratio)
        scales[..., of_scales] = scale


def dequantize(
    numbers: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, block: int
) -> None:
    """Write what ``numbers`` and ``scales`` stand for to ``values``; see `quantize`."""
    for a, b, of_scales, size in _chunks(values, block):
        some = numbers[..., a:b].unflatten(-1, (-1, size))
        out = values[..., a:b].unflatten(-1, (-1, size))
        scale = scales[..., of_scales].unsqueeze(-1)
        torch.mul(*_factors(some, scale), out=out)  # in float32, and rounded once


def _factors(numbers: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors whose product is what ``numbers`` and ``scales`` stand for."""
    if numbers.dtype == torch.int8:
        return numbers, scales
    # Nothing multiplies float8, and to cast it takes the CPU longer than all the rest. But with its
    # bits in the right places it is a float16 of 1/256 the value (the bias of E4M3's exponents is
    # 7, float16's is 15), subnormal numbers too. (Its NaN is not one then; the scale is.)
    bits = numbers.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    return bits.bitwise_and_(~(1 << 14)).view(torch.float16), scales * 256


def _chunks(tensor: torch.Tensor, block: int) -> Iterator[tuple[int, int, slice, int]]:
    """First and one-past-last element of runs of equal blocks along the last dim, their scales,
    and the size of a block."""
    n = tensor.shape[-1]
    whole = n - n % block
    others = max(tensor.numel() // max(n, 1), 1)
    limit = _CHUNK_CPU if tensor.device.type == "cpu" else _CHUNK_DEVICE
    step = max(limit // others // block, 1) * block
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        yield start, stop, slice(start // block, stop // block), block
    if whole < n:
        yield whole, n, slice(whole // block, whole // block + 1), n - whole


# -- which parts a bucket sends --------------------------------------------------------------------


def gather_row(layout: BucketLayout, dtype: torch.dtype, block: int) -> WireRow:
    """What a rank sends in the all-gather of a bucket: its direct shards, and its pack."""
    numels = [layout.slots[i].shard_numel for i in layout.direct]
    in_blocks = [numel >= block for numel in numels]
    if layout.pack_numel:
        numels.append(layout.pack_numel)
        in_blocks.append(False)
    return WireRow(dtype, block, tuple(numels), tuple(in_blocks))


@dataclass(frozen=True)
class Cut:
    """The spans of a reduction, cut where parameters end: the pack stays one.

    Attributes:
        direct: how many of the parts are separate tensors, in the order of ``plan.direct``; the
            others lie one behind the other in the stage.
        spans: (offset, numel) of each part in the sharded storage.
        in_blocks: which of them may travel in blocks.
        held_by_all: (part, offset in it) of each 0-dim parameter, which all ranks hold: a sum of it
            goes to every rank, and all of them must get the same bits.
    """

    direct: int
    spans: tuple[tuple[int, int], ...]
    in_blocks: tuple[bool, ...]
    held_by_all: tuple[tuple[int, int], ...] = ()

    def keys(self, tag: int, hop: str) -> list[Key]:
        """What names each part in one hop: the same whichever others are reduced with it.

        Args:
            tag: of the bucket.
        """
        return [(tag, hop, start) for start, _ in self.spans]

    def row(self, dtype: torch.dtype, block: int, num_ranks: int = 1) -> WireRow:
        """A row of the parts; of the ``num_ranks``-th of each, rounded up."""
        numels = tuple(-(-numel // num_ranks) for _, numel in self.spans)
        chosen = zip(numels, self.in_blocks, strict=True)
        in_blocks = tuple(wanted and numel >= block for numel, wanted in chosen)
        return WireRow(dtype, block, numels, in_blocks)


def cut_reduction(layout: BucketLayout, direct: Sequence[int], copied_in: Sequence[int]) -> Cut:
    """Cut what a `ReducePlan` reduces, by its ``direct`` and ``copied_in``."""
    slots = [layout.slots[i] for i in (*direct, *copied_in) if layout.slots[i].direct]
    # (Without elements only where every rank holds the whole: nothing to send.)
    spans = [(slot.shard_offset, slot.shard_numel) for slot in slots if slot.shard_numel]
    in_blocks = [True] * len(spans)
    places = {start: part for part, (start, _) in enumerate(spans)}
    if copied_in and layout.pack_numel:
        spans.append((layout.pack_offset, layout.pack_numel))
        in_blocks.append(False)
    shared = [layout.slots[i] for i in (*direct, *copied_in) if layout.slots[i].dim is None]
    held_by_all = [
        (places[slot.shard_offset], 0)
        if slot.direct
        else (len(spans) - 1, slot.shard_offset - layout.pack_offset)
        for slot in shared
    ]
    return Cut(len(direct), tuple(spans), tuple(in_blocks), tuple(held_by_all))
