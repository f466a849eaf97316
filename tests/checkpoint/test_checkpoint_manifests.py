"""Parts of manifests: groups of boxes, headers, ranges of ranks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp2.checkpoint import CorruptCheckpoint
from fsdp2.checkpoint.format import header
from fsdp2.checkpoint.format.header import TensorInfo, parse_header, plan_file
from fsdp2.checkpoint.format.manifest import Manifest, TensorPart, tables_of
from fsdp2.checkpoint.format.marker import dump, load
from fsdp2.checkpoint.format.ranges import Ranges, parsed_ranges
from fsdp2.checkpoint.format.small_state import SmallFile
from fsdp2.checkpoint.format.strict import Check
from fsdp2.checkpoint.saving.writing import plan_save
from fsdp2.dtensor.boxes import Box

VALUES = [
    None, True, False, 0, 1, 5, 2**62, 2**63, -1, 1.0, 0.5, "", "1", "weight", "a/b", "..", "F32",
    "\ud800", "0000000g", "+1", " 1", "0_1", [], [0], [True], [1.0], [-1], ["0"], [2**63], [1, 2],
    [-48, 0], {}, {"0": 1},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield from places(value[key], (*path, key))


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except CorruptCheckpoint as error:
        return str(error)


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


# -- groups -------------------------------------------------------------------------------------


def example() -> Manifest:
    """With equal and different boxes, several blocks, and a 0-dim one, in files of both kinds."""
    infos = [
        TensorInfo("weight", "F32", (4, 3)),
        TensorInfo("other", "F32", (4, 3)),
        TensorInfo("long", "U8", (3 << 20,)),
        TensorInfo("step", "F32", ()),
        TensorInfo("empty", "F32", (0, 3)),
    ]
    boxes = [Box((2, 0), (2, 3)), Box((2, 0), (2, 3)), Box((1,), (2 << 20,)), Box((), ())]
    boxes.append(Box.whole((0, 3)))
    parts = [
        TensorPart("model", info, box, box, ranks, True)
        for info, box in zip(infos, boxes, strict=True)
        for ranks in [(0, 1, 2) if info.name != "step" else (0, 2)]
    ]
    plan = plan_save(parts, 0, (0, 1, 2), layout="per-rank")
    others = [replace(part, ranks=(0, 1)) for part in parts[:2]]
    shared = plan_save(others, 0, (0, 1), layout="shared")
    sums = [[1], [2], [3, 4], [5]]
    sets = (*plan.recorded(sums), *shared.recorded([[6], [2**32 - 1]]))
    return Manifest(
        "nonce", "name", 0, Ranges.of([0, 1, 2]), sets, {"tied": "weight"},
        {"state": SmallFile("digest", 0)}, {"fsdp2": "0"}, "names",
    )  # fmt: skip


def test_what_is_written_is_read() -> None:
    manifest = example()
    assert load(dump(manifest), "it") == manifest
    assert [(g.file, list(g.tensors)) for g in manifest.groups] == [
        ("model-rank-00000.safetensors", [1, 2]),
        ("model-rank-00000.safetensors", [3]),
        (manifest.sets[1].groups[0].file, [0]),
        ("", [0, 1]),
    ]


def test_groups_are_the_chunks_that_were_written() -> None:
    manifest = example()
    found = [c for files in manifest.sets for c in files.chunks(tables_of([manifest]))]
    assert [(c.tensor.name, c.box.shape, c.checksums) for c in found] == [
        ("weight", (2, 3), (1,)),
        ("other", (2, 3), (2,)),
        ("long", (2 << 20,), (3, 4)),
        ("step", (), (5,)),
        ("weight", (2, 3), (6,)),
        ("other", (2, 3), (2**32 - 1,)),
    ]
    # Widest dtype first: `long`, of bytes, comes behind the others.
    assert [c.offset for c in found] == [4096, 4120, 4144, 4096, None, None]
    assert [c.file for c in found[4:]] == ["model.safetensors"] * 2


def test_a_manifest_does_not_grow_with_its_layers() -> None:
    """But for a place and a checksum of each box, and what the first rank says of each tensor."""
    sizes = []
    for num in (100, 1000):
        infos = [TensorInfo(f"layers.{i}.weight", "F32", (4, 3)) for i in range(num)]
        box = Box((2, 0), (2, 3))
        parts = [TensorPart("model", info, box, box, (0, 1), True) for info in infos]
        plan = plan_save(parts, 1, (0, 1), layout="per-rank")
        manifest = replace(example(), sets=plan.recorded([[1]] * num))
        sizes.append(len(dump(manifest)))
    assert sizes[1] - sizes[0] < 900 * 16 + 100


# -- ranks --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True))
def test_ranks_are_kept_in_their_order(numbers: list[int]) -> None:
    ranks = Ranges.of(numbers)
    assert list(ranks) == numbers
    assert [ranks[i] for i in range(-len(ranks), len(ranks))] == numbers * 2
    assert [ranks.position(number) for number in numbers] == list(range(len(numbers)))
    assert {number for number in range(70) if number in ranks} == set(numbers)
    assert ranks[1:3] == tuple(numbers[1:3])
    assert (ranks == Ranges.of(numbers[::-1])) == (numbers == numbers[::-1])
    for listed in (ranks.listed(), numbers):  # as now, and as in version 1
        found = parsed_ranges(json.loads(json.dumps(listed)), "ranks", Check("it"))
        assert (found, hash(found)) == (ranks, hash(ranks))


def test_ranks_take_few_ranges() -> None:
    assert Ranges.of(range(16_384)).listed() == [[0, 16_383, 1]]
    assert Ranges.of(range(3, 16_384, 8)).listed() == [[3, 16_379, 8]]
    assert Ranges.of([5]).listed() == [[5, 5, 1]]
    assert repr(Ranges.of([*range(4), 9, 11])) == "Ranges(0 to 3, 9 to 11 by 2)"
    with pytest.raises(ValueError, match="7 is not one of these ranks"):
        Ranges.of(range(4)).position(7)
    with pytest.raises(IndexError):
        Ranges.of(range(4))[4]


@pytest.mark.parametrize(
    "listed",
    [[[0, 1]], [[1, 0, 1]], [[0, 4, 0]], [[0, 4, 3]], [[0, 1 << 40, 1]], [["a", 1, 1]], {}],
)
def test_ranks_that_cannot_be(listed: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="ranks cannot be"):
        parsed_ranges(listed, "ranks", Check("it"))
