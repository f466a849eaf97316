"""Manifests are checked all at once, and one by one only for the error: both accept the same."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp2.checkpoint import CorruptCheckpoint
from fsdp2.checkpoint.format import header, manifest
from fsdp2.checkpoint.format.header import TensorInfo, parse_header, plan_file
from fsdp2.checkpoint.format.manifest import Chunk, Manifest, SetOfFiles, dump, load
from fsdp2.checkpoint.format.ranks import Ranks, parsed_ranks
from fsdp2.checkpoint.format.strict import Check
from fsdp2.dtensor.boxes import Box

VALUES = [
    None, True, False, 0, 1, 5, 2**62, 2**63, -1, 1.0, 0.5, "", "1", "weight", "a/b", "..", "F32",
    "\ud800", "0000000g", "+1", " 1", "0_1", [], [0], [True], [1.0], [-1], ["0"], [2**63], [1, 2],
    [-48, 0], {}, {"0": 1},
]  # fmt: skip


def example() -> dict[str, Any]:
    """The content of a manifest with equal and different boxes, several blocks, and a 0-dim one."""
    infos = [
        TensorInfo("weight", "F32", (4, 3)),
        TensorInfo("other", "F32", (4, 3)),
        TensorInfo("long", "U8", (3 << 20,)),
        TensorInfo("step", "F32", ()),
    ]
    boxes = [Box((2, 0), (2, 3)), Box((2, 0), (2, 3)), Box((0,), (2 << 20,)), Box((), ())]
    sums = [(1,), (2,), (3, 4), (5,)]
    files = ["model.safetensors", "model.safetensors", "model-rank.safetensors", "optim"]
    offsets = [None, None, 4096, None]
    chunks = tuple(map(Chunk, infos, files, boxes, offsets, sums))
    sets = (SetOfFiles(Ranks.of([0]), dict.fromkeys(files, 9), True, "digest"),)
    made = Manifest("nonce", "name", 0, Ranks.of([0]), sets, chunks, {}, {}, {})
    return json.loads(dump(made).partition(b"\n")[0])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield from places(value[key], (*path, key))


def mutated(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for table in ("tensors", "chunks"):
        for path in places(content[table], (table,)):
            for value in VALUES:
                changed = copy.deepcopy(content)
                inside: Any = changed
                for key in path[:-1]:
                    inside = inside[key]
                inside[path[-1]] = value
                yield changed
                if type(inside) is list and value is None:
                    del inside[path[-1]]
                    yield changed


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except CorruptCheckpoint as error:
        return str(error)


def signed(content: dict[str, Any]) -> bytes:
    line = json.dumps(content).encode()
    return line + b'\n{"sha256":"' + hashlib.sha256(line).hexdigest().encode() + b'"}\n'


def test_manifests_are_read_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    content = example()
    cases = [signed(content), *map(signed, mutated(content))]
    at_once = [outcome(lambda data=data: load(data, "it")) for data in cases]  # type: ignore[misc]
    assert isinstance(at_once[0], Manifest)
    for name in ("_tensors_at_once", "_chunks_at_once"):
        assert getattr(manifest, name) is not None
        monkeypatch.setattr(manifest, name, lambda *_: None)
    one_by_one = [outcome(lambda data=data: load(data, "it")) for data in cases]  # type: ignore[misc]
    for data, first, second in zip(cases, at_once, one_by_one, strict=True):
        assert first == second, data
        assert repr(first) == repr(second), data  # 1 is equal to True and to 1.0


def test_what_is_right_is_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes time with thousands of tensors; equal boxes are one object."""
    data = signed(example())
    for name in ("_parsed_tensor", "_parsed_chunk"):
        monkeypatch.setattr(manifest, name, pytest.fail)
    chunks = load(data, "it").chunks
    assert chunks[0].box is chunks[1].box


def test_headers_are_read_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [TensorInfo(name, "F32", (4, 3)) for name in ("a", "b", "c")]
    plan = plan_file([*infos, TensorInfo("d", "U8", (2,)), TensorInfo("e", "F32", ())])
    table = json.loads(plan.header)
    bodies = [table]
    for path in places(table):
        for value in VALUES if path else ():
            changed = copy.deepcopy(table)
            inside: Any = changed
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = value
            bodies.append(changed)
    cases = [json.dumps(body).encode() for body in bodies]

    def found() -> list[object]:
        end = 4 * 12 * 3 + 2 + 4
        return [
            outcome(lambda body=body: parse_header(body, 8 + len(body) + end, "it"))  # type: ignore[misc]
            for body in cases
        ]

    at_once = found()
    assert not isinstance(at_once[0], str)
    monkeypatch.setattr(header, "_entry_like", lambda *_: None)
    assert list(map(repr, at_once)) == list(map(repr, found()))


# -- ranks --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True))
def test_ranks_are_kept_in_their_order(numbers: list[int]) -> None:
    ranks = Ranks.of(numbers)
    assert list(ranks) == numbers
    assert [ranks[i] for i in range(-len(ranks), len(ranks))] == numbers * 2
    assert [ranks.position(number) for number in numbers] == list(range(len(numbers)))
    assert {number for number in range(70) if number in ranks} == set(numbers)
    assert ranks[1:3] == tuple(numbers[1:3])
    assert (ranks == Ranks.of(numbers[::-1])) == (numbers == numbers[::-1])
    for listed in (ranks.listed(), numbers):  # as now, and as in version 1
        found = parsed_ranks(json.loads(json.dumps(listed)), "ranks", Check("it"))
        assert (found, hash(found)) == (ranks, hash(ranks))


def test_ranks_take_few_ranges() -> None:
    assert Ranks.of(range(16_384)).listed() == [[0, 16_383, 1]]
    assert Ranks.of(range(3, 16_384, 8)).listed() == [[3, 16_379, 8]]
    assert Ranks.of([5]).listed() == [[5, 5, 1]]
    assert repr(Ranks.of([*range(4), 9, 11])) == "Ranks(0 to 3, 9 to 11 by 2)"
    with pytest.raises(ValueError, match="7 is not one of these ranks"):
        Ranks.of(range(4)).position(7)
    with pytest.raises(IndexError):
        Ranks.of(range(4))[4]


@pytest.mark.parametrize(
    "listed",
    [[[0, 1]], [[1, 0, 1]], [[0, 4, 0]], [[0, 4, 3]], [[0, 1 << 40, 1]], [["a", 1, 1]], {}],
)
def test_ranks_that_cannot_be(listed: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="ranks cannot be"):
        parsed_ranks(listed, "ranks", Check("it"))
