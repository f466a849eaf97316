"""The arithmetic of checkpoints: headers, boxes, placements, and values as JSON."""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict, defaultdict, deque
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as safetensors_load
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fsdp2.checkpoint import CheckpointError, CorruptCheckpoint
from fsdp2.checkpoint.format.header import (
    ALIGN_BYTES,
    ITEM_BITS,
    MAX_HEADER_BYTES,
    Header,
    TensorInfo,
    frame,
    header_length,
    parse_header,
    plan_file,
    plan_files,
)
from fsdp2.checkpoint.format.tensors import DTYPES
from fsdp2.checkpoint.format.values import decode, encode
from fsdp2.dtensor.boxes import Box, offset, run_numel, run_offsets, span, split_evenly, strides
from fsdp2.dtensor.placement import box_of
from harness import ours_only

pytestmark = ours_only("checkpoints")

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def tensors(draw: st.DrawFn) -> list[TensorInfo]:
    chosen = draw(st.lists(names.filter("__metadata__".__ne__), max_size=6, unique=True))
    return [
        TensorInfo(name, draw(st.sampled_from(sorted(ITEM_BITS))), draw(shapes)) for name in chosen
    ]


def read(data: bytes) -> Header:
    length = header_length(data[:8], len(data), "file")
    return parse_header(data[8 : 8 + length], len(data), "file")


def file_of(table: Any, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


# -- headers ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(tensors())
def test_a_planned_file_reads_back(infos: list[TensorInfo]) -> None:
    """By this package and by safetensors; data starts on a page, and every tensor is aligned."""
    plan = plan_file(infos)
    data = frame(plan.header)
    assert len(data) % ALIGN_BYTES == 0
    data += bytes(plan.size - len(data))
    header = read(data)
    assert header.tensors == {info.name: info for info in infos}
    assert header.offsets == plan.offsets
    assert header.metadata == {"format": "pt"}
    assert all(plan.offsets[info.name] % info.itemsize == 0 for info in infos)
    if any(info.dtype == "F8_E8M0" for info in infos):
        return  # safetensors reads this from files, and not from bytes
    loaded = safetensors_load(data)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in loaded.items()} == {
        info.name: (DTYPES[info.dtype], info.shape) for info in infos
    }


@settings(max_examples=60, deadline=None)
@given(tensors(), st.integers(1, 300))
def test_files_keep_to_the_limit(infos: list[TensorInfo], limit: int) -> None:
    """Only a tensor that is larger alone exceeds it; the order stays, and nothing is lost."""
    plans = plan_files(infos, limit)
    assert len(plans) >= 1
    for plan in plans:
        nbytes = plan.size - len(frame(plan.header))
        assert nbytes <= limit or len([t for t in plan.tensors if t.nbytes]) == 1
    assert sorted(t.name for p in plans for t in p.tensors) == sorted(t.name for t in infos)


@pytest.mark.parametrize(
    ("first", "size", "message"),
    [
        (b"", 0, "0 bytes are too few"),
        (b"1234567", 7, "7 bytes are too few"),
        (struct.pack("<Q", 0), 100, "length 0: the file was never completed"),
        (struct.pack("<Q", 2**63), 2**20, f"length {2**63} is over the limit of 100000000"),
        (struct.pack("<Q", 2**64 - 1), 2**20, f"length {2**64 - 1} is over the limit"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), 2**30, "length 100000001 is over the limit"),
        (struct.pack("<Q", 93), 100, "should end at byte 101, the file has 100 bytes"),
    ],
)
def test_wrong_lengths_of_headers(first: bytes, size: int, message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        header_length(first, size, "file")


def test_the_largest_header_is_allowed() -> None:
    first = struct.pack("<Q", MAX_HEADER_BYTES)
    assert header_length(first, MAX_HEADER_BYTES + 8, "file") == MAX_HEADER_BYTES
    with pytest.raises(CheckpointError, match="lower max_file_bytes"):
        frame(" " * MAX_HEADER_BYTES)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
AFTER = {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]}
BAD_TABLES = {
    "no JSON": (b"{", "the header is not valid JSON"),
    "no UTF-8": (b'{"\xff": 1}', "not valid JSON"),
    "too deep": (b"[" * 200_000, "not valid JSON"),
    "a list": ([], "the header is a list, not an object"),
    "metadata": ({"__metadata__": 3, "a": GOOD}, "__metadata__ is a int"),
    "a tensor twice": (b'{"a":1,"a":2}', "key 'a' occurs twice"),
    "a dtype twice": (
        b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
        "key 'dtype' occurs twice",
    ),
    "no entry": ({"a": 3}, "tensor 'a': expected dtype, shape and data_offsets"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "expected dtype"),
    "one key more": ({"a": {**GOOD, "stride": [1]}}, "expected dtype"),
    "unknown dtype": ({"a": {**GOOD, "dtype": "F33"}}, "unknown dtype 'F33'"),
    "dtype is a list": ({"a": {**GOOD, "dtype": ["F32"]}}, "unknown dtype"),
    "negative shape": ({"a": {**GOOD, "shape": [-2]}}, r"\[-2\] is not a list of sizes"),
    "true": ({"a": {**GOOD, "shape": [2, True]}}, "is not a list of sizes"),
    "float": ({"a": {**GOOD, "shape": [2.0]}}, "is not a list of sizes"),
    "three offsets": ({"a": {**GOOD, "data_offsets": [0, 4, 8]}}, "are not a range"),
    "offsets backwards": ({"a": {**GOOD, "data_offsets": [8, 0]}}, "are not a range"),
    "other size": ({"a": {**GOOD, "shape": [3]}}, "hold 8 bytes, but shape .3. in F32 has 12"),
    "overlap": (
        {"a": GOOD, "b": {**AFTER, "data_offsets": [4, 8]}},
        "tensor 'b' overlaps the one before: it starts at data byte 4, expected 8",
    ),
    "gap": (
        {"a": GOOD, "b": {**AFTER, "data_offsets": [9, 13]}},
        "tensor 'b' leaves a gap: it starts at data byte 9, expected 8",
    ),
    "gap at the start": ({"b": AFTER}, "tensor 'b' leaves a gap"),
    "huge": (
        {"a": {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 2**62]}},
        "it is truncated",
    ),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_headers(case: str) -> None:
    """All have one type of error, which names the file."""
    table, message = BAD_TABLES[case]
    with pytest.raises(CorruptCheckpoint, match=message) as caught:
        read(file_of(table, bytes(12)))
    assert str(caught.value).startswith("file: ")


@pytest.mark.parametrize(("num", "what"), [(11, "truncated"), (13, "too long"), (0, "truncated")])
def test_wrong_sizes_of_files(num: int, what: str) -> None:
    table = {"a": GOOD, "b": AFTER}
    start = len(file_of(table))
    assert read(file_of(table, bytes(12))).offsets == {"a": start, "b": start + 8}
    message = f"expected {start + 12} bytes, the file has {start + num}: it is {what}"
    with pytest.raises(CorruptCheckpoint, match=message):
        read(file_of(table, bytes(num)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_the_header_is_there_is_one_type_of_error(data: st.DataObject) -> None:
    """What is accepted is accepted by safetensors too, and means the same."""
    good = file_of({"a": GOOD, "b": AFTER, "__metadata__": {"x": "y"}}, bytes(12))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(good) - 13))] = data.draw(st.integers(0, 255))
    try:
        header = read(bytes(bad))
    except CorruptCheckpoint:
        return
    if any(not isinstance(value, str) for value in header.metadata.values()):
        with pytest.raises(SafetensorError):  # it wants strings there, which nobody here reads
            safetensors_load(bytes(bad))
        return
    loaded = safetensors_load(bytes(bad))
    assert {n: tuple(t.shape) for n, t in loaded.items()} == {
        n: i.shape for n, i in header.tensors.items()
    }


# -- boxes --------------------------------------------------------------------------------------


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n)) for n in shape)
    size = tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True))
    return Box(start, size)


def cut(tensor: Tensor, box: Box) -> Tensor:
    for dim, (start, num) in enumerate(zip(box.start, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, num)
    return tensor


def positions(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


@settings(max_examples=150, deadline=None)
@given(st.data(), shapes)
def test_runs_are_the_bytes_of_a_box(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes_in(shape))
    expected = cut(positions(shape), box).flatten().tolist()
    assert box.within(shape)
    assert box.numel == len(expected)
    assert strides(shape) == (positions(shape).stride() if math.prod(shape) else strides(shape))
    assert Box.whole(shape).numel == math.prod(shape)
    if not expected:
        assert list(run_offsets(box, shape, 1)) == []
        assert span(box, shape) == 0
        return
    assert offset(box, shape) == expected[0]
    assert span(box, shape) == expected[-1] - expected[0] + 1
    run = run_numel(box, shape)
    found = [o + i for o in run_offsets(box, shape, run) for i in range(run)]
    assert found == expected
    # No longer run would do.
    assert run == len(expected) or expected[run] != expected[run - 1] + 1


@settings(max_examples=150, deadline=None)
@given(st.data(), shapes, st.integers(1, 40))
def test_pieces_are_small_and_all_of_a_box(
    data: st.DataObject, shape: tuple[int, ...], limit: int
) -> None:
    box = data.draw(boxes_in(shape))
    pieces = list(box.pieces(limit, shape))
    assert all(span(piece, shape) <= limit for piece in pieces)
    found = [i for piece in pieces for i in cut(positions(shape), piece).flatten().tolist()]
    assert found == cut(positions(shape), box).flatten().tolist()


@settings(max_examples=150, deadline=None)
@given(st.data(), shapes)
def test_intersections(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = a.intersect(b)
    both = set(cut(positions(shape), a).flatten().tolist())
    both &= set(cut(positions(shape), b).flatten().tolist())
    assert common == b.intersect(a)
    assert (set() if common is None else set(cut(positions(shape), common).flatten().tolist())) == (
        both
    )
    if common is not None:
        inside = common.relative_to(a)
        assert inside.within(a.shape)
        assert torch.equal(cut(cut(positions(shape), a), inside), cut(positions(shape), common))


def test_boxes_outside_of_a_tensor() -> None:
    assert not Box((1,), (3,)).within((3,))
    assert not Box((-1,), (1,)).within((3,))
    assert not Box((0,), (1,)).within((3, 3))
    assert Box((), ()).within(())


@given(st.integers(0, 40), st.integers(1, 9))
def test_cuts_are_those_of_torch(size: int, num: int) -> None:
    chunks = list(torch.arange(size).chunk(num)) if size else []
    chunks += [torch.arange(0)] * (num - len(chunks))
    for index, chunk in enumerate(chunks):
        start, length = split_evenly(size, num, index)
        assert list(range(start, start + length)) == chunk.tolist()


# -- placements ---------------------------------------------------------------------------------


def local_by_torch(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Placement], at: tuple[int, ...]
) -> Tensor:
    """Cut one mesh dim after the other, as the rank at ``at`` does, by torch's own code."""
    local = positions(shape)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            pieces, _ = placement._split_tensor(local, mesh[dim], with_padding=False)
            local = pieces[at[dim]]
    return local


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
def test_boxes_of_shards(data: st.DataObject, shape: tuple[int, ...]) -> None:
    mesh = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    choices = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    placements = data.draw(
        st.lists(st.sampled_from(choices), min_size=len(mesh), max_size=len(mesh))
    )
    for at in product(*(range(n) for n in mesh)):
        box = box_of(shape, mesh, tuple(placements), at)
        assert torch.equal(cut(positions(shape), box), local_by_torch(shape, mesh, placements, at))


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4))
def test_tensor_parallel_is_cut_first(rows: int, dp: int, tp: int) -> None:
    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    whole = list(torch.arange(rows).chunk(tp)) if rows else []
    whole += [torch.arange(0)] * (tp - len(whole))
    for i, j in product(range(dp), range(tp)):
        mine = list(whole[j].chunk(dp)) if whole[j].numel() else []
        expected = mine[i].tolist() if i < len(mine) else []
        box = box_of((rows,), (dp, tp), placements, (i, j))
        assert cut(torch.arange(rows), box).tolist() == expected


def test_placements_that_cannot_be_saved() -> None:
    with pytest.raises(ValueError, match=r"'w' has placement .*: only sharded and replicated"):
        box_of((4,), (2,), (Partial(),), (0,), "w")
    with pytest.raises(ValueError, match=r"'w' has placements .* gives split factor 3"):
        box_of((4,), (2, 2), (_StridedShard(0, split_factor=3), Shard(0)), (0, 0), "w")


# -- values -------------------------------------------------------------------------------------

plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(),
    st.complex_numbers(),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.sampled_from(["$", "value"]))
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(values)
def test_values_come_back_as_they_were(value: Any) -> None:
    """With types and order; `repr` tells nan and -0.0 from others."""
    back = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert repr(back) == repr(value)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES.values()), key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)], ids=str)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.arange(math.prod(shape) * size, dtype=torch.uint8).flip(0) * 37
    if dtype == torch.bool:
        raw = raw % 2
    tensor = raw.view(dtype).reshape(shape)
    back = decode(json.loads(json.dumps(encode(tensor))))
    assert back.dtype == dtype
    assert back.shape == shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), raw) or not raw.numel()


def test_other_types_that_come_back() -> None:
    value = {
        "set": {1},
        "frozen": frozenset({(1, 2)}),
        "deque": deque([1, 2], maxlen=2),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, a=[1]),
        (1, None): "tuple as key",
    }
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert back["deque"].maxlen == 2
    assert list(back["ordered"]) == ["b", "a"]


def test_lazily_conjugated_tensors_are_written_as_what_they_are() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert torch.equal(decode(encode(tensor)), tensor.resolve_conj())
    assert torch.equal(decode(encode(tensor.imag)), tensor.imag.resolve_neg())


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (Odd(), "extra is a "),
        ({"a": [1, {"b": Odd()}]}, r"extra\['a'\]\[1\]\['b'\] is a .*\.Odd"),
        ({"a": (1, lambda: 0)}, r"extra\['a'\]\[1\] is a builtins.function"),
        ({3: {"$": Odd()}}, r"extra\[3\]\['\$'\] is a "),
        ([range(3)], r"extra\[0\] is a builtins.range"),
    ],
)
def test_what_cannot_be_kept_is_named_with_its_place(value: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place) as caught:
        encode(value, "extra")
    assert "nothing is pickled" in str(caught.value)


def test_unknown_tags_are_an_error() -> None:
    with pytest.raises(ValueError, match="Unknown tag 'pickle'"):
        decode({"$": "pickle", "value": "gASV"})
