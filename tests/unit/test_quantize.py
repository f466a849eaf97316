"""The arithmetic of narrower numbers: bounds of errors, special numbers, sizes of messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2.sharding.layout import plan_bucket
from fsdp2.transports.compressed import quantize as quantizing
from fsdp2.transports.compressed.quantize import (
    WireRow,
    cut_reduction,
    dequantize,
    gather_row,
    quantize,
)

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
BLOCK = 32


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def there_and_back(
    values: torch.Tensor, dtype: torch.dtype, block: int = BLOCK, out: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrives, and the scale of each element."""
    n = values.shape[-1]
    numbers = torch.empty(values.shape, dtype=dtype)
    scales = torch.empty((*values.shape[:-1], -(-n // block)))
    quantize(values, numbers, scales, block)
    made = torch.full(values.shape, 7.0, dtype=out or values.dtype)
    dequantize(numbers, scales, made, block)
    return made, scales.repeat_interleave(block, dim=-1)[..., :n]


@pytest.mark.parametrize("exponent", [0, 30, -30, -44, 37])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 1000])
def test_int8_is_half_a_scale_off_at_most(n: int, exponent: int) -> None:
    values = torch.randn(3, n, generator=torch.Generator().manual_seed(n)) * 10.0**exponent
    made, scale = there_and_back(values, INT8)
    error = (made.double() - values.double()).abs()
    assert (error <= scale.double() / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("exponent", [0, 30, -30])
@pytest.mark.parametrize("n", [1, 33, 1000])
def test_float8_is_a_sixteenth_off_at_most(n: int, exponent: int) -> None:
    values = torch.randn(3, n, generator=torch.Generator().manual_seed(n)) * 10.0**exponent
    made, scale = there_and_back(values, FLOAT8)
    error = (made - values).abs()
    assert (error <= torch.maximum(values.abs() / 16, scale * 2**-10) * (1 + 1e-6)).all()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.floats(width=32, allow_nan=False, max_value=2.0**126, min_value=-(2.0**126)),
        min_size=1,
        max_size=100,
    ),
    st.integers(16, 40),
)
def test_any_numbers(values: list[float], block: int) -> None:
    given_values = torch.tensor(values)
    made, scale = there_and_back(given_values, INT8, block)
    error = (made.double() - given_values.double()).abs()
    assert (error <= scale.double() / 2 * (1 + 1e-6)).all()
    assert made[given_values == 0].eq(0).all()


@pytest.mark.parametrize("dtype", [INT8, FLOAT8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(dtype: torch.dtype, bad: float) -> None:
    """The whole block of it, and no other one."""
    values = torch.randn(2, 100)
    values[1, 40] = bad
    made, _ = there_and_back(values, dtype)
    assert not made[1, 32:64].isfinite().any()
    assert made[0].isfinite().all()
    assert made[1, :32].isfinite().all()
    assert made[1, 64:].isfinite().all()


@pytest.mark.parametrize("dtype", [INT8, FLOAT8])
def test_zeros_and_extremes(dtype: torch.dtype) -> None:
    made, _ = there_and_back(torch.zeros(40), dtype)
    assert made.eq(0).all()
    values = torch.linspace(-3, 3, 32)
    made, _ = there_and_back(values, dtype)
    assert made.abs().max() == pytest.approx(3, rel=1e-6)
    again, _ = there_and_back(made, dtype)
    assert torch.allclose(again, made, rtol=1e-6), "what was rounded is not rounded further"


@pytest.mark.parametrize("dtype", [INT8, FLOAT8])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_rounded_once(dtype: torch.dtype, out: torch.dtype) -> None:
    values = torch.randn(2, 77)
    narrow, _ = there_and_back(values, dtype, out=out)
    wide, _ = there_and_back(values, dtype)
    assert torch.equal(narrow, wide.to(out))
    from_narrow, _ = there_and_back(values.to(out), dtype, out=torch.float32)
    assert torch.allclose(from_narrow, values, atol=0.02, rtol=0.07)


def test_every_float8_is_what_torch_makes_of_it() -> None:
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(FLOAT8)
    made = torch.empty(256)
    dequantize(numbers, torch.tensor([0.3]), made, 256)
    right = numbers.float() * 0.3
    finite = right.isfinite()
    assert finite.sum() == 254
    assert torch.equal(made[finite], right[finite])
    dequantize(numbers, torch.tensor([float("nan")]), made, 256)
    assert made.isnan().all()


def test_long_tensors_are_worked_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(3, 5000)
    whole, _ = there_and_back(values, INT8)
    monkeypatch.setattr(quantizing, "_CHUNK_CPU", 200)
    pieces, _ = there_and_back(values, INT8)
    assert torch.equal(whole, pieces)


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_has_the_bytes_of_its_parts() -> None:
    row = WireRow(INT8, 256, (1000, 7, 256), (True, False, True))
    assert row.blocks == (4, 0, 1)
    assert row.nbytes == (16 + 1008) + 16 + (16 + 256)
    assert WireRow(torch.bfloat16, 256, (1000, 7), (True, False)).nbytes == 2000 + 16
    parts = [torch.randn(2, n) for n in row.numels]
    rows = torch.zeros(2, row.nbytes, dtype=torch.uint8)
    row.encode(parts, rows)
    made = [torch.empty_like(part) for part in parts]
    row.decode(rows, made)
    assert torch.equal(made[1], parts[1].bfloat16().float())
    for part, back, bound in zip(parts, made, (0.02, 0.02, 0.02), strict=True):
        assert (part - back).abs().max() <= bound
    sums = [part.clone() for part in made]
    row.add_decoded(rows, sums)
    row.add_decoded(rows, sums, times=-1)
    for part, total in zip(made, sums, strict=True):
        assert torch.allclose(part, total, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6),
    st.integers(2, 5),
    st.sampled_from([0, 64, 10**9]),
)
def test_rows_of_a_bucket_have_all_of_it(
    shapes: list[tuple[int, int]], num_shards: int, least: int
) -> None:
    """Every element of the sharded storage is in one part; views of parts do not overlap."""
    layout = plan_bucket(
        shapes, [0] * len(shapes), num_shards, itemsizes=(4, 4, 4), direct_min_bytes=least
    )
    row = gather_row(layout, INT8, 16)
    assert sum(row.numels) == layout.shard_numel
    even = [i for i in layout.direct if i not in layout.tail]
    cut = cut_reduction(layout, even, layout.tail)
    assert sum(numel for _, numel in cut.spans) == layout.shard_numel
    assert [sum(span) for span in cut.spans[:-1]] == [start for start, _ in cut.spans[1:]]
    for made in (row, cut.row(INT8, 16), cut.row(INT8, 16, 3), cut.row(torch.bfloat16, 16)):
        rows = torch.zeros(2, made.nbytes, dtype=torch.uint8)
        for numbers, scales in made.views(rows):
            assert not numbers.view(torch.uint8).any(), "bytes that another part has written"
            numbers.view(torch.uint8).fill_(1)
            if scales is not None:
                assert not scales.any()
                scales.fill_(1)
        assert made.nbytes % 16 == 0
