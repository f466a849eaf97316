"""The index of a checkpoint: it says what all manifests say together, and is read in parts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from checkpoint_cases import Tied, adamw, train
from checkpoint_crash import NAME, make_job, run, save
from fsdp2.checkpoint import Checkpointer, CheckpointError, CorruptCheckpoint, load_model
from fsdp2.checkpoint.checkpointer import peek
from fsdp2.checkpoint.format import index as index_format
from fsdp2.checkpoint.format.header import TensorInfo
from fsdp2.checkpoint.format.index import TAIL, Index
from fsdp2.checkpoint.format.manifest import (
    BLOCK_BYTES,
    Manifest,
    TensorPart,
    marker_name,
    tables_of,
)
from fsdp2.checkpoint.format.marker import dump, read_marker
from fsdp2.checkpoint.format.ranges import Ranges
from fsdp2.checkpoint.format.small_state import SmallFile
from fsdp2.checkpoint.loading.opening import open_source
from fsdp2.checkpoint.saving import indexing
from fsdp2.checkpoint.saving.attempt import check_agreement
from fsdp2.checkpoint.saving.indexing import index_parts
from fsdp2.checkpoint.saving.writing import Writers, plan_save
from fsdp2.checkpoint.tools.inspect import check, open_checkpoint
from fsdp2.dtensor.boxes import Box, split_evenly
from harness import ours_only, run_on
from old_manifests import as_version_1

pytestmark = ours_only("checkpoints")

STEP = "step-000001"
INDEX = Path(".fsdp2", "index.fsdp2")


def manifests_of(
    shapes: dict[str, tuple[int, ...]],
    mesh: tuple[int, int],
    layout: str,
    replicas: int = 1,
    together: int = 1,
) -> list[Manifest]:
    """Of ranks on a mesh that cuts dim 0 and, where there is one, dim 1; replicas take turns."""
    num_ranks = mesh[0] * mesh[1] * replicas
    ranks, found = tuple(range(num_ranks)), []

    def share(number: int, shape: tuple[int, ...], rank: int) -> tuple[Box, bool]:
        place, replica = divmod(rank, replicas)
        row, column = divmod(place, mesh[1])
        cuts = [(0, size) for size in shape]
        for dim, (parts_of_dim, mine) in enumerate(((mesh[0], row), (mesh[1], column))):
            if dim < len(shape):
                cuts[dim] = split_evenly(shape[dim], parts_of_dim, mine)
        alone = all(not (mine and dim >= len(shape)) for dim, mine in enumerate((row, column)))
        box = Box(tuple(start for start, _ in cuts), tuple(size for _, size in cuts))
        return box, alone and number % replicas == replica

    def written(number: int, shape: tuple[int, ...], rank: int) -> int:
        box, writes = share(number, shape, rank)
        return box.numel * writes

    for rank in ranks:
        parts = []
        for number, (name, shape) in enumerate(shapes.items()):
            box, writes = share(number, shape, rank)
            kind = "optim" if name.startswith("optim.") else "model"
            info, by = TensorInfo(name, "F32", shape), partial(written, number, shape)
            parts.append(TensorPart(kind, info, box, box, ranks, writes, by))
        plan = plan_save(
            parts, rank, ranks, layout=layout, max_file_bytes=4000, writers=Writers(together)
        )
        sets = plan.recorded(
            [
                hash((rank, planned.part.tensor.name, block)) % 2**32
                for block in range(-(-4 * planned.part.box.numel // BLOCK_BYTES))
            ]
            for planned in plan.chunks
        )
        small = {f"state-{rank:05d}.json": SmallFile("digest", 3)}
        found.append(Manifest("n", "s", rank, Ranges.of(ranks), sets, {}, small, {}, "names"))
    check_agreement(found)
    return found


def opened(folder: Path, manifests: list[Manifest]) -> Index:
    path = folder / "index.fsdp2"
    path.write_bytes(b"".join(index_parts(manifests, lambda: None)))
    return Index(path)


def found_in(index: Index, kind: str, name: str, box: Box) -> set[tuple[Any, ...]]:
    row = index.tables[kind][name]
    return {
        (entry.box, written.file or row.file, written.offset, written.checksums)
        for partition, place in row.partitions
        for entry in index.near(partition, box)
        for written in [index.written(partition, place, entry)]
    }


def listed_in(manifests: list[Manifest], name: str, box: Box) -> set[tuple[Any, ...]]:
    tables = tables_of(manifests)
    return {
        (chunk.box, chunk.file, chunk.offset, chunk.checksums)
        for manifest in manifests
        for files in manifest.sets
        for chunk in files.chunks(tables)
        if chunk.tensor.name == name and chunk.box.intersect(box) is not None
    }


sizes = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(sizes, max_size=3).map(tuple), min_size=1, max_size=6),
    st.tuples(st.integers(1, 7), st.integers(1, 3)),
    st.sampled_from(["shared", "per-rank"]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 4),
    st.data(),
)
def test_every_box_is_found(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    mesh: tuple[int, int],
    layout: str,
    replicas: int,
    together: int,
    stretch: int,
    data: st.DataObject,
) -> None:
    named = {f"t{i}": shape for i, shape in enumerate(shapes)}
    named |= {f"optim.exp_avg.t{i}": shape for i, shape in enumerate(shapes[:2])}
    manifests = manifests_of(named, mesh, layout, replicas, together)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_format, "STRETCH", stretch)
        patch.setattr(indexing, "STRETCH", stretch)
        index = opened(tmp_path_factory.mktemp("index"), manifests)
        for name, shape in named.items():
            starts = [data.draw(st.integers(0, size - 1)) for size in shape]
            ends = [data.draw(st.integers(a + 1, n)) for a, n in zip(starts, shape, strict=True)]
            box = Box(tuple(starts), tuple(b - a for a, b in zip(starts, ends, strict=True)))
            kind = "optim" if name.startswith("optim.") else "model"
            for each in (box, Box.whole(shape)):
                assert found_in(index, kind, name, each) == listed_in(manifests, name, each)
        for rank, manifest in enumerate(manifests):
            assert index.record_of(rank).small_files == manifest.small_files
    index.close()


@pytest.mark.parametrize("layout", ["shared", "per-rank"])
def test_tensors_of_several_blocks(tmp_path: Path, layout: str) -> None:
    shapes = dict.fromkeys(("first", "second", "third"), (3, BLOCK_BYTES // 4 + 9))
    manifests = manifests_of(shapes, (2, 1), layout)
    index = opened(tmp_path, manifests)
    for name in shapes:
        assert (index.tables["model"][name].file is None) == (layout == "per-rank")
        box = Box((2, 0), (1, 5))
        assert found_in(index, "model", name, box) == listed_in(manifests, name, box)
        assert [len(sums) for *_, sums in found_in(index, "model", name, box)] == [2]
    index.close()


def test_a_tensor_that_ranks_without_common_files_both_have(tmp_path: Path) -> None:
    """The first one's counts, as in the manifests."""
    first, second = manifests_of({"expert": (4, 2)}, (2, 1), "per-rank")
    [files] = second.sets
    table = first.sets[0].tensors
    second = replace(second, sets=(replace(files, ranks=Ranges.of([1]), tensors=table),))
    index = opened(tmp_path, [first, second])
    whole = Box.whole((4, 2))
    assert found_in(index, "model", "expert", whole) == listed_in([first], "expert", whole)
    index.close()


def test_what_a_rank_reads_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    """The bytes that a rank reads for its own shards, of 16 to 1,024 ranks."""
    shapes = {f"layer{i}.weight": (2048, 4) for i in range(8)}
    read = []
    for num_ranks in (16, 128, 1024):
        index = opened(tmp_path, manifests_of(shapes, (num_ranks, 1), "per-rank"))
        rows = 2048 // num_ranks
        box = Box((rows * 5, 0), (rows, 4))
        for name in shapes:
            [(found, *_)] = found_in(index, "model", name, box)
            assert found == box
        assert os.path.getsize(tmp_path / "index.fsdp2") > 300 * num_ranks
        read.append(index.bytes_read)
        index.close()
    # Stretches have up to 128 entries of 40 bytes, and the contents list where they begin.
    assert read[2] < read[0] + 6500


def test_each_stretch_is_read_once_for_all_tensors(tmp_path: Path) -> None:
    shapes = {f"layer{i}.weight": (512, 4) for i in range(20)}
    index = opened(tmp_path, manifests_of(shapes, (512, 1), "shared"))
    box = Box((300, 0), (1, 4))
    found_in(index, "model", "layer0.weight", box)
    read = index.bytes_read
    for name in shapes:
        found_in(index, "model", name, box)
    assert index.bytes_read == read
    index.close()


def test_two_sets_of_ranks_that_both_hold_a_tensor_whole(tmp_path: Path) -> None:
    """Checksums and file are those of the first that wrote it, not of the first that leads."""
    info, found = TensorInfo("norm", "F32", (4, 2)), []
    for rank in range(4):
        members, whole = (rank % 2, rank % 2 + 2), Box.whole(info.shape)
        part = TensorPart("model", info, whole, whole, members, writes=rank in (1, 2))
        plan = plan_save([part], rank, (0, 1, 2, 3), layout="shared")
        sets = plan.recorded([[rank]] * len(plan.chunks))
        found.append(Manifest("n", "s", rank, Ranges.of(range(4)), sets, {}, {}, {}))
    index = opened(tmp_path, found)
    [(_, file, _, checksums)] = found_in(index, "model", "norm", Box.whole(info.shape))
    assert (checksums, [file]) == ((1,), list(found[1].sets[0].files))
    index.close()


def test_a_name_without_elements_on_the_first_rank_only(tmp_path: Path) -> None:
    """Ranks that share no files: what has bytes counts, and its shape."""
    found = []
    for rank, shape in enumerate([(0, 2), (5, 2)]):
        parts = [
            TensorPart("model", TensorInfo(name, "F32", each), whole, whole, (rank,), writes=True)
            for name, each in (("bank", shape), (f"other{rank}", (5, 2)))
            for whole in [Box.whole(each)]
        ]
        plan = plan_save(parts, rank, (0, 1), layout="per-rank")
        sets = plan.recorded([[rank]] * len(plan.chunks))
        found.append(Manifest("n", "s", rank, Ranges.of([0, 1]), sets, {}, {}, {}))
    index = opened(tmp_path, found)
    assert {name: row.info.shape for name, row in index.tables["model"].items()} == {
        "bank": (5, 2),
        "other0": (5, 2),
        "other1": (5, 2),
    }
    index.close()


def rewritten(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the contents of an index; its checksum is right."""
    data = path.read_bytes()
    magic, version, at, num, _ = TAIL.unpack(data[-TAIL.size :])
    contents = json.loads(data[at : at + num])
    edit(contents)
    text = json.dumps(contents).encode()
    tail = TAIL.pack(magic, version, at, len(text), crc32(text))
    path.write_bytes(data[:at] + text + tail)


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a rank speaks twice": (lambda c: c.update(speakers=[0, 0]), "speakers"),
    "no rank speaks": (lambda c: c.update(speakers=[]), "speakers"),
    "another rank speaks": (lambda c: c.update(speakers=[9]), "speakers"),
    "ranks twice": (lambda c: c.update(ranks=[[0, 1, 1], [1, 1, 1]]), "ranks"),
    "one partition twice": (
        lambda c: c["partitions"].append(c["partitions"][0]), "the places of partitions"
    ),
    "a tensor twice in a partition": (
        lambda c: c["partitions"][0].update(tensors=c["partitions"][0]["tensors"] * 2), "one twice"
    ),
    "tensors of other shapes": (
        lambda c: c["partitions"][0].update(tensors=[0, 1]), "different dtypes or shapes"
    ),
    "a header of a terabyte": (
        lambda c: c["files"].update(x=[1 << 40, 1 << 40, ""]), "the header of 'x'"
    ),
    "a longer header than its file": (
        lambda c: c["files"].update(x=[9, 10, ""]), "the header of 'x'"
    ),
    "a file elsewhere": (lambda c: c["files"].update({"../x": [9, 9, ""]}), "files cannot be"),
    "two tensors of one name": (
        lambda c: c["tensors"].append(c["tensors"][0]), "two of one name"
    ),
    "starts out of order": (
        lambda c: c["partitions"][0].update(num=300, starts=[3, 2, 4], crcs=[0, 0, 0]), "unsorted"
    ),
    "too few stretches": (lambda c: c["partitions"][0].update(num=300), "the stretches"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_contents_of_an_attacker(tmp_path: Path, case: str) -> None:
    edit, fact = HOSTILE[case]
    save(tmp_path, 2)
    rewritten(tmp_path / NAME / INDEX, edit)
    with pytest.raises(CorruptCheckpoint, match=rf"index.fsdp2: not an index: .*{fact}"):
        open_source(tmp_path / NAME)


# -- checkpoints --------------------------------------------------------------------------------


def test_loads_open_only_what_they_need(tmp_path: Path) -> None:
    """Of 40 ranks with files of their own: the files and records of the boxes that are wanted."""
    whole = {"weight": torch.randn(80, 5), "bias": torch.randn(40)}
    save(tmp_path, 40, layout="per-rank", whole=whole)
    with open_source(tmp_path / NAME) as source:
        assert source.files == {}
        [(chunk, extent)] = source.tensors["weight"].near(Box((6, 0), (2, 5)))
        assert chunk.box == extent.box == Box((6, 0), (2, 5))
        assert list(source.files) == ["model-rank-00003.safetensors"]
        (tmp_path / NAME / "model-rank-00004.safetensors").unlink()
        with pytest.raises(CorruptCheckpoint, match=r"model-rank-00004.safetensors is missing"):
            source.tensors["weight"].extents_near(Box((7, 0), (2, 5)))


def test_files_are_missed_before_anything_changes(tmp_path: Path) -> None:
    """Also where tensors are read in place, one after the other."""
    save(tmp_path, 2, layout="per-rank", whole=nn.Linear(5, 80).state_dict())
    (tmp_path / NAME / "model-rank-00001.safetensors").unlink()
    model = nn.Linear(5, 80)
    before = model.weight.clone()
    with pytest.raises(CorruptCheckpoint, match=r"00001.safetensors is missing") as caught:
        load_model(model, tmp_path / NAME, verify_checksums=False)
    assert torch.equal(model.weight, before)
    assert not hasattr(caught.value, "__notes__")  # that something has changed


def test_an_index_that_lacks_an_entry(tmp_path: Path) -> None:
    """Nothing that fsdp2 wrote: rows would keep the values that they have in memory."""
    save(tmp_path, 3, layout="per-rank")
    path = tmp_path / NAME / INDEX
    with open_source(tmp_path / NAME, by_manifests=True) as source:
        manifests = list(source.manifests.values())
    second = manifests[1]
    files, *others = second.sets
    table = manifests[0].sets[0].tensors
    names = [{table[position][1].name for position in group.tensors} for group in files.groups]
    weight = files.groups[names.index({"weight"})]
    rest = tuple(group for group in files.groups if group is not weight)
    for groups, said in (
        (rest, r"lists 25 elements of 'weight', of the 40 at"),
        (
            (weight._replace(box=Box((0, 0), weight.box.shape)), *rest),
            r"lists 40 elements of 'weight', of the 40 at",
        ),
    ):
        manifests[1] = replace(second, sets=(replace(files, groups=groups), *others))
        path.write_bytes(b"".join(index_parts(manifests, lambda: None)))
        with (
            open_source(tmp_path / NAME) as source,
            pytest.raises(CorruptCheckpoint, match=said),
        ):
            source.tensors["weight"].near(Box((0, 0), (8, 5)))


def test_verify_compares_the_index_with_the_manifests(tmp_path: Path) -> None:
    save(tmp_path, 2)
    step = tmp_path / NAME
    with open_checkpoint(step) as source:
        assert check(source).checksums
        manifests = list(source.manifests.values())
    other = replace(manifests[1], aliases={"a": "weight"})
    (step / INDEX).write_bytes(b"".join(index_parts([manifests[0], other], lambda: None)))
    with pytest.raises(CorruptCheckpoint, match=r"index.fsdp2: the index is not the one"):
        open_checkpoint(step)


def test_an_index_that_would_be_too_large_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads refuse what does not fit into memory; without an index they read the manifests."""
    monkeypatch.setattr(indexing, "MAX_SMALL_BYTES", 500)
    save(tmp_path, 2)
    step = tmp_path / NAME
    assert sorted(path.name for path in (step / ".fsdp2").glob("*index*")) == []
    with open_source(step) as source:
        assert list(source.manifests) == [0, 1]


def test_hugging_faces_index_may_be_written_anew(tmp_path: Path) -> None:
    """By a tool that formats JSON: what it says is the same."""
    save(tmp_path, 2)
    path = tmp_path / NAME / "model.safetensors.index.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    for by_manifests in (False, True):
        with open_source(tmp_path / NAME, by_manifests=by_manifests) as source:
            assert "weight" in source.tensors


def test_a_file_that_was_refused_is_refused_again(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with open_source(tmp_path / NAME) as source:
        assert source.index is not None
        (name, info), *_ = source.index.files.items()
        os.truncate(tmp_path / NAME / name, info.size - 1)
        for _ in range(2):
            with pytest.raises(CorruptCheckpoint, match=f"expected {info.size} bytes"):
                source.open_file(name, info)
        assert source.files == {}


def test_a_rank_that_dies_while_it_writes_the_index(tmp_path: Path) -> None:
    """The next one to look commits; what is left of the first does not stay in the way."""

    class Died(BaseException):
        pass

    def before(call: str, operand: str) -> None:
        if call == "pwrite" and operand == "index.fsdp2":
            raise Died

    run(make_job(tmp_path, 0))
    job = make_job(tmp_path, 1, before=before)
    job.begin()
    with pytest.raises(Died):
        job.write()
    assert not (tmp_path / NAME).exists()
    assert make_job(tmp_path, 1).attempt.commit()
    with open_source(tmp_path / NAME) as source:
        assert source.index is not None


@pytest.mark.parametrize("layout", ["shared", "per-rank"])
def test_a_checkpoint_of_an_earlier_release(tmp_path: Path, layout: str) -> None:
    """No index, and manifests with a row for each part of each tensor."""
    save(tmp_path, 3, layout=layout)
    step, found = tmp_path / NAME, []
    for version in (2, 1):
        if version == 1:
            as_version_1(step)
        assert len(list(step.glob(".fsdp2/state-*"))) == (3 if version == 1 else 0)
        with open_source(step, by_manifests=version == 2) as source:
            assert check(source).num_blocks > 3
            found.append((source.tensors, source.optimizer, source.ranks))
    assert found[0] == found[1]


def test_files_of_a_rank_are_listed_as_they_always_were() -> None:
    """Indices that were written earlier are compared with what manifests say, byte for byte."""
    [first] = manifests_of({"weight": (4,)}, (1, 1), "shared")
    small = {"own-00000.safetensors": SmallFile("abc", None), "state-00000.json": SmallFile("d", 3)}
    manifest = replace(first, small_files=small)
    listed = b'"small_files":{"own-00000.safetensors":"abc","state-00000.json":["d",3]}'
    assert listed in dump(manifest)
    assert listed in b"".join(index_parts([manifest], lambda: None))


def test_a_run_of_an_earlier_release_goes_on(tmp_path: Path) -> None:
    """Its manifests do not tell the names that optimizers have."""
    model = Tied()
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer, extra={"epoch": 3})
        as_version_1(tmp_path / STEP)
        again = Tied()
        loaded = checkpoints.load(model=again, optimizer=adamw(again))
    assert loaded.extra_of_ranks == {0: {"epoch": 3}}
    assert torch.equal(again.embed.weight, model.embed.weight)


def test_tensors_of_one_name_in_model_and_optimizer(tmp_path: Path) -> None:
    """What is written of one does not count for the other."""
    shapes = {"optim.a.b": (4,)}
    [of_optimizer] = manifests_of(shapes, (1, 1), "per-rank")
    [files] = of_optimizer.sets
    (_, tensor), [group] = files.tensors[0], files.groups
    half = replace(
        files,
        tensors=(("model", tensor), ("optim", tensor)),
        groups=(
            group._replace(box=Box((0,), (2,)), tensors=Ranges.of([0])),
            group._replace(box=Box((2,), (2,)), tensors=Ranges.of([1])),
        ),
    )
    with pytest.raises(CheckpointError, match=r"the ranks wrote 8 of 16 bytes"):
        check_agreement([replace(of_optimizer, sets=(half,))])


def test_ranks_that_wrote_less_than_all(tmp_path: Path) -> None:
    """Also a tensor of which no rank wrote anything is missed."""
    manifests = manifests_of({"a": (4, 2), "b": (4,)}, (2, 1), "per-rank")
    [files] = manifests[1].sets
    fewer = replace(manifests[1], sets=(replace(files, groups=files.groups[1:]),))
    with pytest.raises(CheckpointError, match=r"^'a': the ranks wrote 16 of 32 bytes"):
        check_agreement([manifests[0], fewer])
    none = [
        replace(m, sets=tuple(replace(s, groups=s.groups[:1]) for s in m.sets)) for m in manifests
    ]
    with pytest.raises(CheckpointError, match=r"^'b': the ranks wrote 0 of 16 bytes"):
        check_agreement(none)
    with pytest.raises(CheckpointError, match=r"manifest of rank 0 does not describe what ranks"):
        check_agreement(manifests[1:])
    with pytest.raises(CheckpointError, match=r"manifest of rank 0 does not describe what it"):
        list(index_parts(manifests[1:], lambda: None))
    other = files.groups[0]._replace(dtype="I32")
    manifests[1] = replace(manifests[1], sets=(replace(files, groups=(other,)),))
    with pytest.raises(CheckpointError, match=r"disagree on the dtype and shape .* F32 .* I32"):
        list(index_parts(manifests, lambda: None))


def save_a_stage(root: str) -> None:
    """As in a pipeline: each rank has parameters, and state of them, that the other lacks."""
    stage = nn.Linear(3, 2 + dist.get_rank())
    model = nn.ModuleDict({f"stage{dist.get_rank()}": stage})
    optimizer = adamw(model)
    stage(torch.ones(3)).sum().backward()
    optimizer.step()
    with Checkpointer(root, rank_local=lambda name: True) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)


def test_state_under_names_that_only_other_ranks_have(tmp_path: Path) -> None:
    run_on(2, save_a_stage, str(tmp_path))
    with open_source(tmp_path / STEP) as source:
        assert source.speakers == (0, 1)
    model = nn.ModuleDict({"stage0": nn.Linear(3, 2), "stage1": nn.Linear(3, 3)})
    optimizer = adamw(model)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.load(model=model, optimizer=optimizer, random_state=False)
    steps = [float(state["step"]) for state in optimizer.state.values()]
    assert steps == [1.0] * 4


def test_extras_of_other_ranks_are_read_when_asked_for(tmp_path: Path) -> None:
    save(tmp_path, 3, name=STEP)
    for rank in range(3):
        path = tmp_path / STEP / ".fsdp2" / marker_name(rank, 3)
        assert json.loads(path.read_bytes()[len(read_marker(path)) :])["rank"] == rank
    found = peek(tmp_path).extra_of_ranks
    assert (len(found), list(found)) == (3, [0, 1, 2])
    assert found[0] is found[2] is None  # nothing was passed as extra
    with pytest.raises(KeyError):
        found[3]
    path = tmp_path / STEP / ".fsdp2" / marker_name(1, 3)
    path.write_bytes(read_marker(path) + b"{}")
    with pytest.raises(CheckpointError, match=r"checksum is wrong: state-00001.json is damaged"):
        found[1]
    shutil.rmtree(tmp_path / STEP)
    save(tmp_path, 3, name=STEP, attempt=2)
    with pytest.raises(CheckpointError, match="was saved again: the extra of rank 1 belongs to"):
        found[1]
