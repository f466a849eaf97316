"""Damaged, foreign or unfit checkpoints, and wrong calls: an error says what; nothing changes.

Also here: values that must come back bit for bit, and code that must never run.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from checkpoint_cases import Tied, adamw, assert_equal_bits, build, train, whole_state
from fsdp2.checkpoint import Checkpointer, CheckpointNotFound, CorruptCheckpoint, load_model
from fsdp2.checkpoint.format.header import ALIGN_BYTES
from fsdp2.checkpoint.format.marker import read_marker, signed
from fsdp2.checkpoint.loading import fill
from harness import ours_only, run_on
from old_manifests import as_version_1

pytestmark = ours_only("checkpoints")

STEP = "step-000001"
MODEL = "model-00001-of-00002.safetensors"  # of two files of the model


def save(root: str, layout: str = "shared", step: int = 1) -> None:
    """A step with two files of the model, so that there is an index."""
    model: Any = build("1d") if dist.is_initialized() else Tied()
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    if dist.is_initialized():
        model.bn.running_mean += dist.get_rank()
    checkpoints = Checkpointer(root, layout=layout, max_file_bytes=6000)
    checkpoints.save(step, model=model, optimizer=optimizer)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    made: dict[Any, Path] = {}

    def get(num_ranks: int, layout: str = "shared") -> Path:
        if (num_ranks, layout) not in made:
            made[num_ranks, layout] = root = tmp_path_factory.mktemp("original")
            run_on(num_ranks, save, str(root), layout) if num_ranks > 1 else save(str(root))
        return made[num_ranks, layout]

    yield get
    for root in made.values():
        shutil.rmtree(root)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What this rank has: tensors bit by bit, their identity, options, random numbers."""

    def local(tensor: Tensor) -> Any:
        value = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        return tensor.dtype, value.shape, value.reshape(-1).view(torch.uint8).tolist()

    found: dict[str, Any] = {"random": torch.get_rng_state().tolist()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = id(tensor), tensor.is_meta or local(tensor)
    if optimizer is not None:
        for number, (param, state) in enumerate(optimizer.state.items()):
            for key, value in state.items():
                found[f"{number}.{key}"] = id(param), local(value)
        groups = optimizer.param_groups
        found["groups"] = repr([{k: v for k, v in g.items() if k != "params"} for g in groups])
    return found


def on_meta() -> Any:
    with torch.device("meta"):
        return build("1d", seed=1) if dist.is_initialized() else Tied()


def attempts(root: str, weights: bool) -> list[str]:
    """Load the damaged step in all ways; returns what was said, "" where nothing was."""
    model: Any = build("1d", seed=1) if dist.is_initialized() else Tied()
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    model.eval()  # forward in training changes buffers
    meta, step = on_meta(), Path(root, STEP)
    before, meta_before, said = snapshot(model, optimizer), snapshot(meta), []
    for staged_bytes, load in (
        (fill.STAGED_BYTES, lambda: Checkpointer(root).load(1, model=model, optimizer=optimizer)),
        (0, lambda: Checkpointer(root).load(1, model=model, optimizer=optimizer)),
        (0, lambda: Checkpointer(root).load(1, model=meta)),
        (fill.STAGED_BYTES, lambda: load_model(model, step)),
        (0, lambda: load_model(model, step)),
        (0, lambda: load_model(meta, step)),
    )[: 6 if weights else 3]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fill, "STAGED_BYTES", staged_bytes)
            try:
                load()
                said.append("")
            except CorruptCheckpoint as error:
                said.append("\n".join([str(error), *getattr(error, "__notes__", [])]))
                after = snapshot(model, optimizer)
                assert after == before, "a load that failed has changed something"
                assert snapshot(meta) == meta_before, "a load that failed has made tensors real"
    return said


# -- damaged files ------------------------------------------------------------------------------


def resize(name: str, by: int) -> Callable[[Path], list[str]]:
    def damage(step: Path) -> list[str]:
        [path] = step.glob(name)
        size = path.stat().st_size
        actual = max(0, size + by)
        os.truncate(path, actual)
        return [path.name, f"expected {size} bytes", f"the file has {actual}"]

    return damage


def replace(name: str, how: str) -> Callable[[Path], list[str]]:
    def damage(step: Path) -> list[str]:
        [path] = step.glob(name)
        path.rename(path.with_name("elsewhere"))
        if how == "link":
            path.symlink_to("elsewhere")
            return [path.name, "is a symbolic link, which this checkpoint never had"]
        if how == "folder":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)
        return [path.name, "is missing" if how == "missing" else "is not a file"]

    return damage


def header(edit: Callable[[str], str], *facts: str) -> Callable[[Path], list[str]]:
    """Another JSON of the same length, or shorter with spaces."""

    def damage(step: Path) -> list[str]:
        data = bytearray((step / MODEL).read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        before = data[8 : 8 + length].decode()
        after = edit(before)
        assert after != before
        data[8 : 8 + length] = after.rstrip(" ").ljust(length).encode()
        (step / MODEL).write_bytes(data)
        return [MODEL, *facts]

    return damage


def length(value: int, *facts: str) -> Callable[[Path], list[str]]:
    def damage(step: Path) -> list[str]:
        with open(step / MODEL, "r+b") as file:
            file.write(struct.pack("<Q", value))
        return [MODEL, *facts]

    return damage


def zero(step: Path) -> list[str]:
    """The last tensor of the file that has one with other bytes."""
    data = bytearray((step / MODEL).read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + size])
    first, end = entries["embed.weight"]["data_offsets"]
    data[8 + size + first : 8 + size + end] = bytes(end - first)
    (step / MODEL).write_bytes(data)
    return [MODEL, "the checksum of tensor 'embed.weight' is wrong in block 0 of 1"]


def rewrite(name: str, edit: Callable[[bytes], bytes], *facts: str) -> Callable[[Path], list[str]]:
    def damage(step: Path) -> list[str]:
        [path] = step.glob(name)
        path.write_bytes(edit(path.read_bytes()))
        return [path.name, *facts]

    return damage


def no_manifest(step: Path) -> list[str]:
    for path in (step / ".fsdp2").glob("rank-*"):
        path.unlink()
    return ["has no manifest"]


def without_index(step: Path) -> None:
    """As checkpoints of earlier releases are: the manifests of all ranks are read."""
    (step / ".fsdp2" / "index.fsdp2").unlink(missing_ok=True)


def of_version_1(damage: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    """In a checkpoint of an earlier release, whose values are files."""

    def changed(step: Path) -> list[str]:
        as_version_1(step)
        return damage(step)

    return changed


def first_entry(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


INDEX = "model.safetensors.index.json"
MANIFEST = ".fsdp2/rank-00000-*"
OWN_INDEX = ".fsdp2/index.fsdp2"
STATE = ".fsdp2/state-00000.json"
WRONG = "the header is not the one that was written"
DAMAGE: dict[str, Callable[[Path], list[str]]] = {
    "one byte short": resize(MODEL, -1),
    "one byte more": resize(MODEL, 1),
    "empty": resize(MODEL, -(10**9)),
    "optimizer short": resize("optim-00001-*", -4),
    "no file": replace(MODEL, "missing"),
    "link": replace(MODEL, "link"),
    "folder": replace(MODEL, "folder"),
    "pipe": replace(MODEL, "pipe"),
    "zeroed": zero,
    "length 0": length(0, "length 0: the file was never completed"),
    "length 2^63": length(2**63, f"header length {2**63} is over the limit of 100000000"),
    "length over 100 MB": length(100_000_001, "header length 100000001 is over the limit"),
    "length over the file": length(99_999_999, "truncated: the header should end at"),
    "no JSON": header(lambda text: text[:-3000].rstrip()[:-1], "the header is not valid JSON"),
    "key twice": header(
        first_entry('"embed.weight":{', '"embed.weight":{"dtype":"I32",'), "'dtype' occurs twice"
    ),
    "tensor twice": header(first_entry("{", '{"embed.weight":3,'), "'embed.weight' occurs twice"),
    "dtype": header(first_entry('"F32"', '"I32"'), WRONG),
    "shape": header(first_entry("[37,12]", "[12,37]"), WRONG),
    "name": header(first_entry("embed.weight", "embed.height"), WRONG),
    "overlap": header(first_entry("[37,12]", "[37,11]"), "tensor 'embed.weight'", "hold 1776"),
    "metadata": header(first_entry('"pt"', '"tp"'), WRONG),
    "padding": header(lambda text: text.rstrip() + "\n", WRONG),
    "no manifest at all": no_manifest,
    "manifest cut": rewrite(
        MANIFEST, lambda data: data[: data.index(b'"numbers"') + 20], "checksum", "is wrong"
    ),
    "manifest of a line": rewrite(MANIFEST, lambda data: data.split(b"\n")[0], "not a manifest"),
    "manifest empty": rewrite(MANIFEST, lambda data: b"", "not a manifest"),
    "manifest edited": rewrite(
        MANIFEST, lambda data: data.replace(b'"rank":0', b'"rank":1', 1), "checksum", "is wrong"
    ),
    "manifest is a link": replace(MANIFEST, "link"),
    "index cut": rewrite(OWN_INDEX, lambda data: data[:-20], "not an index of version 1"),
    "index empty": rewrite(OWN_INDEX, lambda data: b"", "truncated: it has 0 bytes"),
    "index is a link": replace(OWN_INDEX, "link"),
    "state cut": rewrite(MANIFEST, lambda data: data[:-1], "the checksum is wrong", "state-00000"),
    "no state": rewrite(MANIFEST, lambda data: data[:-300], "the checksum is wrong"),
    "state of version 1 cut, manifest": of_version_1(
        rewrite(STATE, lambda data: data[:-1], "the checksum is wrong")
    ),
    "no state of version 1, manifest": of_version_1(replace(STATE, "missing")),
    "state of version 1 is a link, manifest": of_version_1(replace(STATE, "link")),
    "state of version 1 is a folder, manifest": of_version_1(replace(STATE, "folder")),
    "state of version 1 is a pipe, manifest": of_version_1(replace(STATE, "pipe")),
    "no Hugging Face index": replace(INDEX, "missing"),
    "Hugging Face index edited": rewrite(
        INDEX, lambda data: data.replace(b"00001-of", b"00002-of", 1), "the index is not the one"
    ),
}  # fmt: skip


BOTH_WAYS = [
    (case, by)
    for case in DAMAGE
    for by in ("index", "manifests")
    if by == ("manifests" if "manifest" in case else "index" if "index" in case else by)
]


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(("case", "by"), BOTH_WAYS)
def test_damage(originals: Any, tmp_path: Path, case: str, by: str, num_ranks: int) -> None:
    """The message names the file and what is wrong; model, optimizer and state stay."""
    shutil.copytree(originals(num_ranks), tmp_path, dirs_exist_ok=True)
    facts = DAMAGE[case](tmp_path / STEP)
    if by == "manifests":
        without_index(tmp_path / STEP)
    weights = "state" not in case  # which weights alone do without
    if num_ranks == 1:
        answers = [attempts(str(tmp_path), weights)]
    else:
        answers = run_on(2, attempts, str(tmp_path), weights)
    for said in answers:
        if case == "optimizer short" and by == "index":
            assert said[2:] == [""] * 4  # no other load needs the file
            del said[2:]
        for message in said:
            assert message, f"rank {answers.index(said)} noticed nothing"
            assert "holds part of the checkpoint" not in message
            assert all(fact in message for fact in facts), (message, facts)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", ["shared", "per-rank"])
def test_a_manifest_of_a_rank_is_missing(
    originals: Any, tmp_path: Path, layout: str, rank: int
) -> None:
    """What is there covers less than all bytes; of how many, the first rank's manifest tells."""
    shutil.copytree(originals(2, layout), tmp_path, dirs_exist_ok=True)
    step = tmp_path / STEP
    without_index(step)
    sizes = [p.stat().st_size for p in step.glob("*.safetensors")]
    (step / ".fsdp2" / f"rank-0000{rank}-of-00002.json").unlink()
    for said in run_on(2, attempts, str(tmp_path), True):
        for message in said:
            assert f"the manifest of rank {rank} is missing" in message
            covered = message.split("cover ")[1].removesuffix(" bytes").split(" of ")
            assert 0 < int(covered[0]) < sum(sizes)
            if rank == 0:
                assert len(covered) == 1
                continue
            have, total = map(int, covered)
            assert have < total <= sum(sizes)
            if layout == "shared":  # of which the headers tell
                assert total > sum(sizes) - len(sizes) * (ALIGN_BYTES + 1)


def test_a_file_that_is_in_no_set(originals: Any, tmp_path: Path) -> None:
    """Nothing that fsdp2 wrote, but the checksums are right."""
    shutil.copytree(originals(2), tmp_path, dirs_exist_ok=True)
    without_index(tmp_path / STEP)
    for path in (tmp_path / STEP / ".fsdp2").glob("rank-*.json"):
        line, _, numbers = read_marker(path).split(b"\n", 2)
        content = json.loads(line)
        for tensor in content["sets"][0]["tensors"]:
            tensor[0] = "model-elsewhere.safetensors"
        path.write_bytes(signed(json.dumps(content).encode(), numbers))
    for said in run_on(2, attempts, str(tmp_path), True):
        for message in said:
            assert "the file of 'empty' cannot be 'model-elsewhere.safetensors'" in message


@pytest.mark.parametrize("how", ["another step", "another run"])
def test_manifests_of_different_saves(originals: Any, tmp_path: Path, how: str) -> None:
    shutil.copytree(originals(2), tmp_path, dirs_exist_ok=True)
    without_index(tmp_path / STEP)
    again = 2 if how == "another step" else 1
    other = tmp_path / "again"
    run_on(2, save, str(other), step=again)
    name = ".fsdp2/rank-00001-of-00002.json"
    manifest = (other / f"step-00000{again}" / name).read_bytes()
    if how == "another run":
        line, _, numbers = read_marker(other / f"step-00000{again}" / name).split(b"\n", 2)
        manifest = signed(line.replace(b'"nonce":"', b'"nonce":"ffff'), numbers)
    (tmp_path / STEP / name).write_bytes(manifest)
    for said in run_on(2, attempts, str(tmp_path), True):
        assert all("manifests of ranks 0 and 1 are of different saves" in m for m in said)


def places(path: Path) -> list[int]:
    """Some bytes of every region: of each tensor the first, the last and one between."""
    data, generator = path.read_bytes(), random.Random(path.name)
    ends = [0, len(data)]
    if path.suffix == ".safetensors":
        (size,) = struct.unpack("<Q", data[:8])
        table = json.loads(data[8 : 8 + size])
        text_end = 8 + len(data[8 : 8 + size].rstrip())
        offsets = [t["data_offsets"] for n, t in table.items() if n != "__metadata__"]
        ends = [0, 8, text_end, 8 + size, *(8 + size + end for _, end in offsets)]
    if path.name.startswith("rank-"):
        line, second, _ = data.split(b"\n", 2)
        ends = [0, len(line), len(line) + len(second), len(read_marker(path)), len(data)]
    if path.suffix == ".fsdp2":  # with a stretch of each cut and the place of each rank
        ends = [*range(0, len(data), 128), len(data)]
    regions = [(a, b) for a, b in zip(sorted(ends), sorted(ends)[1:], strict=False) if a < b]
    found = {generator.randrange(*region) for region in regions for _ in range(3)}
    return sorted(found | {a for a, _ in regions} | {b - 1 for _, b in regions})


def find_flipped_bits(root: str, only: str, every: int) -> tuple[list[str], int]:
    """Flip a bit, load, flip it back; returns what nobody noticed."""
    model = build("1d", seed=1)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    before = snapshot(model, optimizer)
    checkpoints, missed, num = Checkpointer(root), [], 0
    for path in sorted(p for p in Path(root, STEP).rglob(only) if p.is_file()):
        for place in places(path)[::every]:
            bit = 1 << (place % 8)
            _flip(path, place, bit)
            num += 1
            found = torch.zeros(1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fill, "STAGED_BYTES", fill.STAGED_BYTES * (num % 2))
                try:
                    checkpoints.load(1, model=model, optimizer=optimizer, random_state=False)
                except CorruptCheckpoint:
                    found += 1
                    assert snapshot(model, optimizer) == before
            if path.name.startswith("model"):
                finds_too(checkpoints, bool(found))
            dist.all_reduce(found)
            if not found:
                missed.append(f"{path.name} byte {place} bit {bit}")
            _flip(path, place, bit)
            if found != 2:  # a rank that does not need these bytes has loaded the rest
                before = snapshot(model, optimizer)
    return missed, num


def finds_too(checkpoints: Checkpointer, found: bool) -> None:
    """A model on the meta device reads the same bytes, and stays there if they are damaged."""
    with torch.random.fork_rng():
        model = on_meta()
    before = snapshot(model)
    try:
        checkpoints.load(1, model=model, random_state=False)
    except CorruptCheckpoint:
        assert found
        assert snapshot(model) == before
    else:
        assert not found


def _flip(path: Path, place: int, bit: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        with open(path, "r+b") as file:
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ bit]))
    dist.barrier()


@pytest.mark.parametrize("layout", ["shared", "per-rank"])
@pytest.mark.parametrize("only", ["model*.safetensors", "optim*", "*.json", "own*", "*.fsdp2"])
def test_every_flipped_bit_is_found(originals: Any, tmp_path: Path, layout: str, only: str) -> None:
    """In headers, padding, every tensor, manifests, small state, own buffers and indexes."""
    shutil.copytree(originals(2, layout), tmp_path, dirs_exist_ok=True)
    if only == "*.json":
        without_index(tmp_path / STEP)
    every = {"optim*": 9, "model*.safetensors": 6}.get(only, 3)
    missed, num = run_on(2, find_flipped_bits, str(tmp_path), only, every)[0]
    assert missed == []
    assert num >= 5


# -- checkpoints of others ----------------------------------------------------------------------


def hub(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Two files with an index, as others write them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    files = {"0": "a.safetensors", "1": "b.safetensors"}
    state = model.state_dict()
    for layer, file in files.items():
        save_file({n: t for n, t in state.items() if n[0] == layer}, folder / file)
    weight_map: dict[str, Any] = {name: files[name[0]] for name in state}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return model, weight_map


def assert_refused(path: Path, error: type[Exception], *facts: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = snapshot(model)
    with pytest.raises(error) as caught:
        load_model(model, path)
    assert all(fact in str(caught.value) for fact in facts), (caught.value, facts)
    assert snapshot(model) == before


@pytest.mark.parametrize("file", ["../b.safetensors", "/b.safetensors", "x/b", "..", ".", "", 3])
def test_an_index_may_name_files_of_its_folder_only(tmp_path: Path, file: Any) -> None:
    (tmp_path / "in").mkdir()
    _, weight_map = hub(tmp_path / "in")
    shutil.copy(tmp_path / "in" / "b.safetensors", tmp_path)
    weight_map |= {"1.weight": file}
    (tmp_path / "in" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    facts = () if file == 3 else ("leads out of the checkpoint's folder",)
    assert_refused(tmp_path / "in", CorruptCheckpoint, repr(file), *facts)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "not an index of safetensors files"),
        ('{"weight_map": [1]}', "not an index of safetensors files"),
        (
            '{"weight_map": {"0.weight": "a.safetensors", "0.weight": "b"}}',
            "'0.weight' occurs twice",
        ),
        ('{"weight_map": {"2.weight": "a.safetensors"}}', "'2.weight' is not in a.safetensors"),
        ('{"weight_map": {"0.weight": "c.safetensors"}}', "file c.safetensors is missing"),
    ],
)
def test_bad_indices(tmp_path: Path, text: str, fact: str) -> None:
    hub(tmp_path)
    (tmp_path / INDEX).write_text(text)
    assert_refused(tmp_path, CorruptCheckpoint, INDEX if "c." not in text else "", fact)


def test_damaged_files_of_others(tmp_path: Path) -> None:
    hub(tmp_path)
    size = (tmp_path / "b.safetensors").stat().st_size
    os.truncate(tmp_path / "b.safetensors", size - 1)
    facts = "b.safetensors", f"expected {size} bytes", f"has {size - 1}: it is truncated"
    assert_refused(tmp_path, CorruptCheckpoint, *facts)
    assert_refused(tmp_path / "b.safetensors", CorruptCheckpoint, *facts)


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    assert_refused(tmp_path / "x", CheckpointNotFound, "x does not exist")
    assert_refused(tmp_path, CheckpointNotFound, "no safetensors file")
    hub(tmp_path)
    (tmp_path / INDEX).unlink()
    facts = "several files without", INDEX, "'a.safetensors', 'b.safetensors'"
    assert_refused(tmp_path, CheckpointNotFound, *facts)


def test_snapshots_of_a_hub_are_symbolic_links(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They load, and that nothing could be verified is said."""
    for name in ("blobs", "snapshot"):
        (tmp_path / name).mkdir()
    model, _ = hub(tmp_path / "blobs")
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with caplog.at_level(logging.INFO, logger="fsdp2.checkpoint"):
        report = load_model(other, tmp_path / "snapshot")
    assert not report.verified
    assert "it cannot be verified" in caplog.text
    assert_equal_bits(whole_state(other), whole_state(model))


def test_the_index_of_an_own_checkpoint_is_verified_too(originals: Any, tmp_path: Path) -> None:
    shutil.copytree(originals(1), tmp_path, dirs_exist_ok=True)
    assert load_model(Tied(), tmp_path / STEP / INDEX).verified
    zero(tmp_path / STEP)
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        load_model(Tied(), tmp_path / STEP / INDEX)
