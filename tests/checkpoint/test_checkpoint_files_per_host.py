"""Files of boxes that several ranks write: each knows where the others write, without asking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpoint_cases import adamw, build, train
from checkpoint_crash import NAME, TOGETHER, make_job, mark, run, save, tensors
from fsdp2.checkpoint import CheckpointError, CorruptCheckpoint, save_model
from fsdp2.checkpoint.format.header import TensorInfo, frame, parse_header, plan_file
from fsdp2.checkpoint.format.manifest import Chunk, section_of
from fsdp2.checkpoint.loading.opening import open_source
from fsdp2.checkpoint.saving.capture import Captured, capture
from fsdp2.checkpoint.saving.job import SaveOptions
from fsdp2.checkpoint.saving.writing import Writers, _share, plan_save
from fsdp2.dtensor import placement
from fsdp2.dtensor.boxes import Box
from harness import cached_mesh, ours_only, run_on

pytestmark = ours_only("checkpoints")


# -- what each rank writes, as the others see it ------------------------------------------------


def on_slices(mesh: DeviceMesh, *, flat: bool) -> nn.Module:
    """Tensors on slices of a mesh: of two dims, or of the flattened one of them."""
    if flat:
        mesh["dp", "cp"]._flatten("dp_cp")
        data, shards = mesh["dp_cp"], [Shard(0)]
    else:
        data, shards = mesh["dp", "cp"], [Replicate(), Shard(0)]
    model = nn.Module()
    for name, rows, of, placements in (
        ("both", 5, mesh, [Replicate(), Shard(0), Shard(1)]),
        ("weight", 7, data, shards),
        ("short", 1, data, shards),
        ("columns", 5, mesh["tp"], [Shard(1)]),
        ("norm", 9, data, [Replicate()] * data.ndim),
        ("plain", 3, None, None),
    ):
        value = torch.ones(rows, 6)
        if of is not None:
            value = distribute_tensor(value, of, placements, src_data_rank=None)
        model.register_parameter(name, nn.Parameter(value))
    return model


def of_stage(mesh: DeviceMesh) -> nn.Module:
    """Tensors of a stage of a pipeline: its ranks are the model's."""
    both, data = mesh["dp", "tp"], mesh["dp"]
    model = nn.Module()
    model.both = nn.Parameter(distribute_tensor(torch.ones(5, 6), both, [Shard(0), Shard(1)]))
    model.weight = nn.Parameter(distribute_tensor(torch.ones(7, 6), data, [Shard(0)]))
    return model


def seen_by_all(kind: str) -> dict[tuple[str, str], tuple[int, dict[int, int]]]:
    """Of each tensor: what this rank writes, and what it says that each rank writes."""
    rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
    optimizers: list[torch.optim.Optimizer] = []
    if kind == "stage":
        model = of_stage(cached_mesh(2, 2, 2, names=("pp", "dp", "tp")))
    elif kind in ("slices", "flat"):
        mesh = cached_mesh(2, 2, 2, names=("dp", "cp", "tp"))
        model = on_slices(mesh, flat=kind == "flat")
    else:
        model = build(kind)
        optimizers = [adamw(model)]
        train(model, optimizers[0], range(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "UNIT_BYTES", 1)  # so that all replicas write something
        captured = capture(model, optimizers, ranks, rank)
    return {(p.kind, p.tensor.name): seen(captured, p) for p in captured.parts}


def seen(captured: Captured, part: Any) -> tuple[int, dict[int, int]]:
    local = captured.locals.get((part.kind, part.tensor.name))
    return 0 if local is None else local.numel(), {r: part.written_by(r) for r in part.ranks}


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("1d", 3), ("1d", 8), ("hsdp", 4), ("tp", 4), ("columns", 3), ("torch", 2), ("plain", 2),
     ("slices", 8), ("flat", 8), ("stage", 8)],
)  # fmt: skip
def test_a_rank_knows_what_the_others_write(kind: str, num_ranks: int) -> None:
    found = run_on(num_ranks, seen_by_all, kind)
    for of_rank in found:
        for key, (_, said) in of_rank.items():
            assert sum(said.values()) > 0 or key[1] == "empty"
            for rank in said:
                assert found[rank][key] == (said[rank], said), (key, rank)
    writers = [sum(own > 0 for own, _ in each.values()) for each in found]
    assert sum(num > 0 for num in writers) >= num_ranks / 2


# -- how many of them share a file --------------------------------------------------------------


def test_by_default_from_the_number_of_ranks() -> None:
    found = [SaveOptions().writers(num).num for num in (1, 512, 513, 1025, 16_384, 65_536)]
    assert found == [1, 1, 2, 4, 32, 128]
    assert SaveOptions("per-rank").writers(16_384).num == 1


def test_files_are_few_where_every_eighth_rank_shares_tensors() -> None:
    members = tuple(range(3, 16_384, 8))
    writers = SaveOptions().writers(16_384)
    groups = {tuple(writers.group(members, rank)) for rank in members}
    assert len(groups) == 64
    assert {len(group) for group in groups} == {32}
    assert sorted(rank for group in groups for rank in group) == list(members)


def test_by_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for layout in ("auto", "per-rank"):
        found = [SaveOptions(layout, files_per_host=n).writers(64) for n in (1, 2, 4, 8)]
        assert found == [Writers(num, of_host=True) for num in (8, 4, 2, 1)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"files_per_host": 3}, "files_per_host must divide the 8 ranks of a host, got 3"),
        ({"files_per_host": 0}, "must be a number of files, got 0"),
        ({"files_per_host": "2"}, "must be a number of files, got '2'"),
        ({"files_per_host": True}, "must be a number of files, got True"),
        ({"files_per_host": 2, "layout": "shared"}, "for the layouts 'per-rank' and 'auto'"),
    ],
)
def test_what_cannot_be(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=said):
        save_model(nn.Linear(2, 2), tmp_path / "weights", **options)
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_a_file_are_those_of_a_host(tmp_path: Path) -> None:
    """Also if fewer save: the first file has those below 2, whoever they are."""
    save(tmp_path, 5, layout=TOGETHER)
    files = sorted(path.name for path in (tmp_path / NAME).glob("model*"))
    assert files == [
        "model-rank-00004.safetensors",
        "model-ranks-00000-00001.safetensors",
        "model-ranks-00002-00003.safetensors",
    ]
    parts = [
        replace(p, ranks=(1, 2, 3), written_by=lambda _, p=p: p.box.numel)
        for p in make_job(tmp_path, 0).captured.parts
    ]
    for rank, file in ((1, "model-rank-00001"), (3, "model-ranks-00002-00003")):
        plan = plan_save(parts, rank, (1, 2, 3), layout="per-rank", writers=Writers(2, True))
        assert next(iter(plan.headers)) == f"{file}.safetensors"


# -- what ranks could disagree on ---------------------------------------------------------------


def disagreeing(root: Path, change: Callable[[Any], None]) -> None:
    """Two ranks save, the second with another idea of who writes what."""
    mark(root, 1, layout=TOGETHER)
    first, second = (make_job(root, rank, 2, layout=TOGETHER) for rank in (0, 1))
    change(second)
    run(first)
    run(second)


def other_sizes(job: Any, of: int = 0) -> None:
    """One element more of a tensor, for one rank."""
    job.captured.parts[:] = [
        replace(p, written_by=partial(_one_more, p.written_by, of))
        if p.tensor.name == "weight"
        else p
        for p in job.captured.parts
    ]


def _one_more(written_by: Callable[[int], int], of: int, rank: int) -> int:
    return written_by(rank) + (rank == of)


def other_number(job: Any) -> None:
    job.options = SaveOptions("per-rank", job.options.max_file_bytes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_sizes, "Ranks 0 and 1 disagree on the sizes of what each rank writes into model-ra"),
        (other_number, "Ranks 0 and 1 disagree on .* files_per_host= and LOCAL_WORLD_SIZE have to"),
    ],
)
def test_ranks_that_disagree(tmp_path: Path, change: Callable[[Any], None], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        disagreeing(tmp_path, change)
    assert not (tmp_path / NAME).exists()


def test_a_rank_that_would_not_write_what_the_others_expect(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"Rank 1 would write other bytes into model-ranks-00000-00001"
    ):
        disagreeing(tmp_path, partial(other_sizes, of=1))
    assert not (tmp_path / NAME).exists()


# -- what is read -------------------------------------------------------------------------------


def test_chunks_lie_within_the_part_of_a_rank() -> None:
    plan = plan_file([section_of(3, "F32", 10), TensorInfo("empty", "F32", (0, 2)),
                      section_of(4, "F32", 5), section_of(4, "U8", 6),
                      TensorInfo("weight", "F32", (2, 2))])  # fmt: skip
    header = parse_header(plan.header.encode(), len(plan.header) + 8 + 40 + 20 + 6 + 16, "it")
    at = {name: header.offsets[name] for name in header.tensors}
    weight, box = TensorInfo("weight", "F32", (4, 2)), Box((0, 0), (2, 2))

    def place(offset: int | None, dtype: str = "F32", box: Box = box) -> int | None:
        return Chunk(weight._replace(dtype=dtype), "file", box, offset).place_in(header)

    first, second, of_bytes = at["rank-00003.F32"], at["rank-00004.F32"], at["rank-00004.U8"]
    assert place(first) == first
    assert place(first + 24) == first + 24
    assert place(first + 28) is None  # it would reach into the next
    assert place(second) == second
    assert place(second, "U8") is None
    assert place(of_bytes, "U8") == of_bytes
    assert place(0) is None
    assert place(1 << 62) is None
    # An entry with the name of a tensor holds one box of it, from its first byte on.
    assert place(at["weight"]) == at["weight"]
    assert place(at["weight"], box=Box((0, 0), (1, 4))) is None
    assert place(at["weight"] + 8, box=Box((0, 0), (1, 2))) is None
    assert place(None) is None


def test_bytes_of_another_rank_are_not_taken(tmp_path: Path) -> None:
    """A flipped bit in one rank's part is found by whoever reads it, and nobody else."""
    save(tmp_path, 2, layout=TOGETHER, whole=tensors(1, 800))
    with open_source(tmp_path / NAME) as source:
        stored = source.tensors["weight"]
        (_, lower), (_, upper) = sorted(stored.near(Box.whole(stored.info.shape)))
        assert lower.file == upper.file == "model-ranks-00000-00001.safetensors"
        assert upper.offset - lower.offset >= 400 * 5 * 4
    with open_source(tmp_path / NAME, by_manifests=True) as source:
        chunks = source.tensors["weight"].near(Box((0, 0), (800, 5)))
        assert [extent for _, extent in chunks] == [lower, upper]
    path = tmp_path / NAME / upper.file
    data = bytearray(path.read_bytes())
    data[upper.offset + 5] ^= 1
    path.write_bytes(data)
    from fsdp2.checkpoint.tools.inspect import check, open_checkpoint

    with (
        open_checkpoint(tmp_path / NAME) as source,
        pytest.raises(CorruptCheckpoint, match="'weight'"),
    ):
        check(source)


def test_a_dtensor_stays_one() -> None:
    """What the other tests compare would be plain tensors otherwise."""
    assert all(run_on(8, are_dtensors))


def are_dtensors() -> bool:
    model = on_slices(cached_mesh(2, 2, 2, names=("dp", "cp", "tp")), flat=False)
    return [isinstance(p, DTensor) for p in model.parameters()] == [True] * 5 + [False]


# -- the header of a file that several ranks write ----------------------------------------------


@pytest.mark.parametrize("num", [1, 2, 3, 64, 2000])
def test_shares_of_a_header_are_the_header(num: int) -> None:
    text = plan_file([section_of(rank, "F32", 10) for rank in range(64)]).header
    shares = [_share(text, position, num) for position in range(num)]
    whole = b""
    for begin, share in shares:
        assert begin == len(whole)
        whole += share
    assert whole == frame(text)
    assert shares[0][1][:8] == whole[:8]
    num_json = [len(share.strip()) for _, share in shares[1:]]
    assert not num_json or max(num_json) - min(num_json) <= 1  # each has as much of the JSON
