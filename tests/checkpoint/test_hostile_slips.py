"""What an attacker can write into a checkpoint, one thing at a time: each error names it.

The search of `test_hostile_checkpoints` found most of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_hostile_checkpoints import save
from torch import nn

from checkpoint_cases import Tied, adamw, train
from fsdp2.checkpoint import Checkpointer, CheckpointError, CorruptCheckpoint, load_model
from fsdp2.checkpoint.checkpointer import peek
from fsdp2.checkpoint.format import strict
from fsdp2.checkpoint.format.header import parse_header
from fsdp2.checkpoint.format.inner import parse_description, parse_name
from fsdp2.checkpoint.format.marker import read_marker, signed
from fsdp2.checkpoint.format.strict import is_file_name
from fsdp2.checkpoint.format.tensors import describe
from fsdp2.checkpoint.format.values import decode
from fsdp2.checkpoint.loading.opening import open_source
from fsdp2.checkpoint.loading.pieces import pieces_in, wanted_of
from fsdp2.checkpoint.saving.random_state import checked_random_states, random_states
from fsdp2.dtensor.boxes import Box, overlapping
from fsdp2.planning import find_hardware
from harness import ours_only, run_on
from hostile import (
    INDEX,
    OWN,
    STEP,
    attempt,
    bits,
    content_of,
    manifests_of,
    seal,
    set_values,
    sign,
    values_of,
)
from old_manifests import as_version_1

pytestmark = ours_only("checkpoints")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one`: of one rank, with an index; `two`: of two ranks, each with files of its own."""
    path = tmp_path_factory.mktemp("hostile")
    save(str(path / "one"))
    run_on(2, save, str(path / "two"), "per-rank")
    return path


def edited(root: Path, to: Path, edit: Callable[[dict[str, Any]], object], rank: int = -1) -> Path:
    """A copy whose manifests (or one) are edited and signed again."""
    shutil.copytree(root, to, dirs_exist_ok=True)
    for number, manifest in enumerate(manifests_of(to / STEP)):
        if rank in (-1, number):
            content = content_of(manifest)
            edit(content)
            sign(manifest, json.dumps(content, separators=(",", ":")).encode())
    return to / STEP


def refused(step: Path, *facts: str) -> None:
    """By every reader, before it changes anything."""
    model = Tied()
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    before = bits(model)
    readers: list[Callable[[], object]] = [lambda: load_model(model, step)]
    if step.name == STEP:
        readers.append(lambda: Checkpointer(step.parent).load(1, model=model, optimizer=optimizer))
    for read in readers:
        with pytest.raises(CheckpointError) as caught:
            read()
        assert all(fact in str(caught.value) for fact in facts), (caught.value, facts)
        assert bits(model) == before


def first_set(content: dict[str, Any]) -> dict[str, Any]:
    return content["sets"][0]


def first_group(content: dict[str, Any]) -> list[Any]:
    return first_set(content)["groups"][0]


def row(content: dict[str, Any], name: str) -> list[Any]:
    """What a manifest says of a tensor."""
    [found] = [row for row in first_set(content)["tensors"] if row[1] == name]
    return found


def info(content: dict[str, Any]) -> list[Any]:
    """Size, length of the header and its digest of a data file."""
    return next(iter(first_set(content)["files"].values()))


def beyond(ranges: list[list[int]]) -> list[list[int]]:
    """As many numbers, all of them large."""
    return [[first + 10**6, last + 10**6, step] for first, last, step in ranges]


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown dtype": (
        lambda c: row(c, "scale").__setitem__(2, "F33"), "dtype and shape of 'scale'"
    ),
    "dtype is a list": (lambda c: row(c, "scale").__setitem__(2, ["F32"]), "unhashable"),
    "dtype is a number": (lambda c: row(c, "scale").__setitem__(2, 0), "dtype and shape"),
    "shape is negative": (lambda c: row(c, "scale").__setitem__(3, [-1]), "cannot be -1"),
    "shape is true": (lambda c: row(c, "scale").__setitem__(3, [True]), "cannot be True"),
    "shape overflows": (
        lambda c: row(c, "scale").__setitem__(3, [0, 2**62, 2**62]), "dtype and shape"
    ),
    "other shapes than groups": (
        lambda c: row(c, "scale").__setitem__(3, [2, 2]), "the manifests disagree"
    ),
    "a name is a number": (lambda c: row(c, "scale").__setitem__(1, 3), "a name cannot be 3"),
    "a tensor in no file": (lambda c: row(c, "scale").__setitem__(0, "x"), "the file of 'scale'"),
    "a tensor of three": (lambda c: row(c, "scale").pop(), "not enough values"),
    "a group of five": (lambda c: first_group(c).pop(), "not enough values"),
    "a group in a file": (lambda c: first_group(c).__setitem__(0, "x"), "the file of a group"),
    "a group of no dtype": (lambda c: first_group(c).__setitem__(1, "F3"), "of 'a group'"),
    "a box of texts": (lambda c: first_group(c).__setitem__(4, ["a"]), "shape of a box"),
    "a box outside": (lambda c: first_group(c).__setitem__(3, [10**9] * 2), "a box of"),
    "a box with other dims": (lambda c: first_group(c).__setitem__(3, []), "a box of"),
    "a box of nothing": (
        lambda c: first_group(c).__setitem__(4, [0] * len(first_group(c)[4])), "a box of"
    ),
    "tensors twice": (lambda c: first_group(c).__setitem__(5, [[0, 0, 1]] * 2), "of a group"),
    "tensors beyond": (
        lambda c: first_group(c).__setitem__(5, beyond(first_group(c)[5])), "manifests disagree"
    ),
    "a million tensors": (
        lambda c: first_group(c).__setitem__(5, [[0, 10**6, 1]]), "numbers cannot be"
    ),
    "a header is a list": (lambda c: first_set(c).update(headers=[]), "headers"),
    "a header of no file": (lambda c: first_set(c)["headers"].update(x="{}"), "of other files"),
    "a size is negative": (lambda c: info(c).__setitem__(0, -1), "the size of"),
    "a header that is long": (lambda c: info(c).__setitem__(1, 2**62), "the header of"),
    "a digest is a number": (lambda c: info(c).__setitem__(2, 1), "the digest of"),
    "files elsewhere": (
        lambda c: first_set(c)["files"].update({"../x": [1, 0, ""]}), "'../x'"
    ),
    "small files elsewhere": (lambda c: c["small_files"].update({"/etc/passwd": ""}), "/etc/pass"),
    "a name with NUL": (
        lambda c: first_set(c)["files"].update({"a\0b": [1, 0, ""]}), "a\\x00b"
    ),
    "half a character": (lambda c: c["aliases"].update({"a": "\ud800"}), "aliases"),
    "whole is a text": (lambda c: first_set(c).update(whole="yes"), "whole cannot be 'yes'"),
    "no sets": (lambda c: c.pop("sets"), "KeyError: 'sets'"),
    "version is a text": (lambda c: c.update(version="1"), "version 1: this fsdp2 reads up to"),
    "of another rank": (lambda c: c.update(rank=5), "the rank that describes a set cannot be 5"),
    "of more ranks": (lambda c: c.update(ranks=[0, 1]), "of rank 0 of 2 ranks"),
    "two sets of the same ranks": (
        lambda c: c["sets"].append(first_set(c) | {"groups": []}), "two of the same ranks"
    ),
    "two tensors of one name": (
        lambda c: first_set(c)["tensors"].append(row(c, "scale")), "two of one name"
    ),
    "another header": (
        lambda c: first_set(c)["headers"].update(dict.fromkeys(first_set(c)["headers"], "{")),
        "cannot be 'another than its digest is of'",
    ),
    "a header that is too long": (
        lambda c: first_set(c)["headers"].update(
            dict.fromkeys(first_set(c)["headers"], " " * 100_000_001)
        ),
        "cannot be 'another than its digest is of'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifests(root: Path, tmp_path: Path, case: str) -> None:
    edit, fact = MANIFESTS[case]
    step = edited(root / "one", tmp_path, edit)
    of_all = "manifests disagree" in fact  # which names none of them
    refused(step, str(step) if of_all else f"{OWN}/rank-00000-of-00001.json", fact)


@pytest.mark.parametrize("edit", [lambda n: b"", lambda n: n[:-1], lambda n: n + b"\0"])
def test_manifests_with_other_numbers_than_groups(
    root: Path, tmp_path: Path, edit: Callable[[bytes], bytes]
) -> None:
    shutil.copytree(root / "one", tmp_path, dirs_exist_ok=True)
    [manifest] = manifests_of(tmp_path / STEP)
    line, _, numbers = read_marker(manifest).split(b"\n", 2)
    manifest.write_bytes(signed(line, edit(numbers)) + values_of(manifest))
    refused_by_manifests(tmp_path / STEP, "not a manifest: numbers cannot be")


def test_offsets_that_are_not_those_of_the_header(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "two", tmp_path, dirs_exist_ok=True)
    manifest = manifests_of(tmp_path / STEP)[1]
    line, _, numbers = read_marker(manifest).split(b"\n", 2)
    (offset,) = struct.unpack("<Q", numbers[:8])
    numbers = struct.pack("<Q", offset + 4) + numbers[8:]
    manifest.write_bytes(signed(line, numbers) + values_of(manifest))
    refused_by_manifests(tmp_path / STEP, "is not what the manifest says")


def refused_by_manifests(step: Path, fact: str) -> None:
    (step / OWN / "index.fsdp2").unlink(missing_ok=True)
    refused(step, fact)


OLD_MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown dtype": (
        lambda c: c["tensors"].update(scale=["F33", [1]]), "dtype and shape of 'scale'"
    ),
    "dtype is a list": (lambda c: c["tensors"].update(scale=[["F32"], [1]]), "unhashable"),
    "shape is true": (lambda c: c["tensors"].update(scale=["F32", [True]]), "cannot be True"),
    "a box of texts": (lambda c: c["chunks"][0].__setitem__(3, ["a"]), "shape of a box"),
    "a box outside": (lambda c: c["chunks"][0].__setitem__(2, [10**9] * 2), "a box of"),
    "a box with other dims": (lambda c: c["chunks"][0].__setitem__(2, []), "a box of"),
    "a chunk of five": (lambda c: c["chunks"][0].pop(), "not enough values"),
    "a chunk of nothing": (lambda c: c["chunks"][0].__setitem__(0, "x"), "KeyError"),
    "a file is a list": (lambda c: c["chunks"][0].__setitem__(1, ["x"]), "the file of"),
    "a file of no set": (lambda c: c["chunks"][0].__setitem__(1, "x"), "cannot be 'x'"),
    "an offset in a file of whole tensors": (
        lambda c: c["chunks"][0].__setitem__(4, 3), "the offset of"
    ),
    "checksums are a number": (lambda c: c["chunks"][0].__setitem__(5, 3), "AttributeError"),
    "checksums with signs": (lambda c: c["chunks"][0].__setitem__(5, "-0000001"), "ValueError"),
    "checksums are none": (lambda c: c["chunks"][0].__setitem__(5, "zzzzzzzz"), "ValueError"),
    "too few checksums": (lambda c: c["chunks"][0].__setitem__(5, ""), "the checksums of"),
    "too many checksums": (lambda c: c["chunks"][0].__setitem__(5, "0" * 16), "the checksums of"),
    "a header is a list": (lambda c: first_set(c).update(headers=[]), "headers"),
    "a header of no file": (
        lambda c: first_set(c)["headers"].update(x="{}"), "of other files than sizes"
    ),
    "a size is negative": (lambda c: first_set(c)["sizes"].update(x=-1), "the size of 'x'"),
    "files elsewhere": (lambda c: first_set(c)["sizes"].update({"../x": 1}), "'../x'"),
    "whole is a text": (lambda c: first_set(c).update(whole="yes"), "whole cannot be 'yes'"),
}  # fmt: skip


@pytest.mark.parametrize("case", OLD_MANIFESTS)
def test_manifests_of_earlier_releases(root: Path, tmp_path: Path, case: str) -> None:
    edit, fact = OLD_MANIFESTS[case]
    shutil.copytree(root / "one", tmp_path / "old")
    as_version_1(tmp_path / "old" / STEP)
    step = edited(tmp_path / "old", tmp_path / "edited", edit)
    refused(step, f"{OWN}/rank-00000-of-00001.json", fact)


@pytest.mark.parametrize("text", [b"[" * 1_000_000, b'{"a":' * 200_000, b"[]", b"3", b"\xff"])
def test_manifests_that_are_no_object(root: Path, tmp_path: Path, text: bytes) -> None:
    shutil.copytree(root / "one", tmp_path, dirs_exist_ok=True)
    [manifest] = manifests_of(tmp_path / STEP)
    sign(manifest, text)
    refused(tmp_path / STEP, "not a manifest")
    manifest.write_bytes(b"{}\n" + text)
    refused(tmp_path / STEP, "not a manifest")


def test_two_chunks_of_one_part_do_not_stand_for_the_other(root: Path, tmp_path: Path) -> None:
    """Sizes add up, checksums are right; rows of the model would keep what was in memory."""

    def edit(content: dict[str, Any]) -> None:
        for files in content["sets"]:
            for group in files["groups"]:
                _, _, shape, start, _, _ = group
                if shape == [37, 12]:  # of 37 rows the first rank has 19
                    group[3] = [start[0] and 18, 0]

    step = edited(root / "two", tmp_path, edit)
    refused(step, "of 'embed.weight' two ranks wrote the same part", "(18, 12) at (18, 0)")


def test_ranks_that_say_other_shapes_of_one_tensor(root: Path, tmp_path: Path) -> None:
    def edit(content: dict[str, Any]) -> None:
        for files in content["sets"]:
            for group in files["groups"]:
                if group[2] == [37, 12]:
                    group[2] = [38, 12]

    step = edited(root / "two", tmp_path, edit, rank=1)
    refused(step, "the manifests disagree", "shape (38, 12)", "(37, 12)")


def test_optimizer_files_with_other_names(root: Path, tmp_path: Path) -> None:
    """`inspect` cut the kind of state out of the name."""
    shutil.copytree(root / "one", tmp_path, dirs_exist_ok=True)
    step = tmp_path / STEP
    save_file({"x": torch.zeros(0)}, step / "optim-00009.safetensors")
    data = (step / "optim-00009.safetensors").read_bytes()
    [manifest] = manifests_of(step)
    content = content_of(manifest)
    digest = hashlib.sha256(data).hexdigest()  # it is all header
    first_set(content)["files"]["optim-00009.safetensors"] = [len(data), len(data), digest]
    sign(manifest, json.dumps(content).encode())
    refused(step, "optim-00009.safetensors: 'x' is no optimizer's state")


# -- small state --------------------------------------------------------------------------------


def with_state(root: Path, to: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(root / "one", to, dirs_exist_ok=True)
    [manifest] = manifests_of(to / STEP)
    values = json.loads(values_of(manifest))
    edit(values)
    set_values(manifest, json.dumps(values).encode())
    seal(to / STEP)
    return to / STEP


def group(values: dict[str, Any]) -> dict[str, Any]:
    return values["optimizers"][0][0]


def entry(values: dict[str, Any]) -> dict[str, Any]:
    return values["optimizer_state"]["embed.weight"]


STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no options": (lambda v: group(v).pop("options"), "options cannot be a null"),
    "parameters as options": (
        lambda v: group(v)["options"].update(params=[]), "an option cannot be 'params'"
    ),
    "an option that is a function": (
        lambda v: group(v)["options"].update(lr={"$": "dtype", "value": "load"}), "options of AdamW"
    ),
    "an option that is nothing": (
        lambda v: group(v)["options"].update(lr={"$": "bytes", "value": "A"}), "options of AdamW"
    ),
    "no keys": (lambda v: entry(v).pop("keys"), "keys of optimizer_state['embed.weight']"),
    "no values": (lambda v: entry(v).pop("values"), "values of optimizer_state['embed.weight']"),
    "keys that cannot be": (
        lambda v: entry(v).update(keys=[[1]]), "a key of the state of 'embed.weight'"
    ),
    "a layout that is a number": (lambda v: entry(v)["layouts"].update(a=3), "a layout of"),
    "a sharded dim that is none": (
        lambda v: entry(v)["layouts"].update(exp_avg=[-1]), "a layout of"
    ),
    "extra that is nothing": (
        lambda v: v.update(extra={"$": "tuple", "value": 3}), "the extra of rank 0"
    ),
    "random numbers": (lambda v: v["random"].pop("torch"), "the state of random numbers"),
    "random numbers of NumPy": (
        lambda v: v["random"]["numpy"].__setitem__(2, 10**6), "the state of random numbers"
    ),
    "a scheduler that is nothing": (
        lambda v: v.update(schedulers=[{"$": "deque", "value": 3}]), "the state of the schedulers"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_small_state(root: Path, tmp_path: Path, case: str) -> None:
    """Weights alone do not need it: only the training is refused."""
    edit, fact = STATES[case]
    step = with_state(root, tmp_path, edit)
    model = Tied()
    optimizer = adamw(model)
    before = bits(model), torch.get_rng_state().tolist()
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path).load(1, model=model, optimizer=optimizer)
    assert fact in str(caught.value)
    assert str(step) in str(caught.value)
    assert (bits(model), torch.get_rng_state().tolist()) == before


@pytest.mark.parametrize("num", [480, 100_000])
def test_small_state_that_is_nested_deep(root: Path, tmp_path: Path, num: int) -> None:
    """The parser stops at one depth, and what decodes values at another."""
    shutil.copytree(root / "one", tmp_path, dirs_exist_ok=True)
    [manifest] = manifests_of(tmp_path / STEP)
    nested = '{"$":"tuple","value":[' * num + "]}" * num
    text = values_of(manifest).decode().replace('"extra":', '"former":', 1)
    set_values(manifest, f'{text[:-1]}, "extra": {nested}}}'.encode())
    seal(tmp_path / STEP)
    limit = sys.getrecursionlimit()  # torch's compiler raises it
    sys.setrecursionlimit(1000)
    try:
        with pytest.raises(CorruptCheckpoint, match="recursion"):
            Checkpointer(tmp_path).load(1, model=Tied())
    finally:
        sys.setrecursionlimit(limit)


def test_extra_state_is_read_before_the_model_changes(root: Path, tmp_path: Path) -> None:
    bad = {"_extra_state": {"$": "float", "value": "x"}}
    step = with_state(root, tmp_path, lambda v: v.update(extra_state=bad))
    refused(step, "'_extra_state'")
    step = with_state(root, tmp_path / "list", lambda v: v.update(extra_state=[]))
    refused(step, "extra_state cannot be a list")


def test_a_scheduler_that_does_not_accept_its_state(root: Path, tmp_path: Path) -> None:
    """Code of others meets what the file has last of all: the error says what is loaded."""
    with_state(root, tmp_path, lambda v: v.update(schedulers=[3]))
    model = Tied()
    scheduler = torch.optim.lr_scheduler.LambdaLR(adamw(model), lambda _: 1.0)
    with pytest.raises(CheckpointError, match="LambdaLR does not accept what was saved") as caught:
        Checkpointer(tmp_path).load(1, model=model, scheduler=scheduler)
    assert "holds the checkpoint now" in caught.value.__notes__[0]


def test_buffers_of_a_rank_that_do_not_fit(root: Path, tmp_path: Path) -> None:
    """They were copied after the model had been loaded."""
    shutil.copytree(root / "one", tmp_path, dirs_exist_ok=True)
    step = tmp_path / STEP
    save_file({"bn.running_mean": torch.ones(3)}, step / OWN / "own-00000.safetensors")
    [manifest] = manifests_of(step)
    content = content_of(manifest)
    content["small_files"]["own-00000.safetensors"] = ""
    sign(manifest, json.dumps(content).encode())
    seal(step)
    model = Tied()
    before = bits(model)
    with pytest.raises(CheckpointError, match=r"'bn.running_mean' of this rank: .*\(3,\)"):
        Checkpointer(tmp_path).load(1, model=model)
    assert bits(model) == before


def test_no_value_is_a_function_or_imports_anything() -> None:
    for value in (
        {"$": "dtype", "value": "load"},
        {"$": "dtype", "value": "_dynamo"},
        {"$": "tensor", "dtype": "save", "shape": [1], "value": "AAAA"},
        {"$": "defaultdict", "value": [], "default": "eval"},
    ):
        with pytest.raises(LookupError):
            decode(value)
    assert decode({"$": "dtype", "value": "bfloat16"}) is torch.bfloat16


def test_states_of_generators_are_tried_before_they_are_set() -> None:
    good = random_states()
    assert checked_random_states(good).keys() >= {"python", "torch", "numpy"}
    for position in (-1, 625, 10**6, True):
        states = {**good, "numpy": [*good["numpy"][:2], position, *good["numpy"][3:]]}
        with pytest.raises(ValueError, match="a state of NumPy's generator"):
            checked_random_states(states)


def test_no_more_is_saved_than_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict, "MAX_SMALL_BYTES", 60_000)
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, model=Tied())
    with pytest.raises(CheckpointError, match=r"state-00000\.json would have .*: more than 60000"):
        checkpoints.save(2, model=Tied(), extra="x" * 60_000)
    assert checkpoints.steps() == [1]
    with pytest.raises(CheckpointError, match="'weight' has 65 dims: at most 64 are saved"):
        describe("weight", torch.ones([1] * 65))


# -- files that are something else --------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{OWN}/rank-00000-of-00001.json",
                                  f"{OWN}/index.fsdp2", INDEX,
                                  f"{OWN}/own-00000.safetensors"])  # fmt: skip
@pytest.mark.parametrize("how", ["pipe", "device", "sparse", "folder"])
def test_small_files_that_are_something_else(
    root: Path, tmp_path: Path, name: str, how: str
) -> None:
    """A pipe never ended, /dev/zero filled the memory, and so did a file of 4 TB."""
    shutil.copytree(root / "one", tmp_path, dirs_exist_ok=True)
    path = tmp_path / STEP / name
    path.unlink()
    if "rank" in name:  # manifests are read where there is no index
        (tmp_path / STEP / OWN / "index.fsdp2").unlink()
    fact = "is not a file"
    if how == "pipe":
        os.mkfifo(path)
    elif how == "device":
        path.symlink_to("/dev/zero")
        fact = "is a symbolic link"
    elif how == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 42)
        fact = "not an index" if "fsdp2" in path.suffix else f"has {1 << 42} bytes: more than"
    with pytest.raises(CorruptCheckpoint) as caught:
        Checkpointer(tmp_path).load(1, model=Tied())
    assert path.name in str(caught.value)
    assert fact in str(caught.value)


def test_a_folder_of_manifests_that_is_a_link(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "one", tmp_path, dirs_exist_ok=True)
    (tmp_path / STEP / OWN).rename(tmp_path / "outside")
    (tmp_path / STEP / OWN).symlink_to(tmp_path / "outside")
    refused(tmp_path / STEP, f"{OWN} is a symbolic link")


NAMES = ["a\0b", "\ud800", "x" * 300, "loop", "pipe", "device"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_files_that_an_index_must_not_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CorruptCheckpoint):
        load_model(nn.Linear(1, 1), tmp_path)
    assert is_file_name("a b")
    assert not is_file_name("a/b")


def test_an_index_of_billions_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{")
    os.truncate(tmp_path / INDEX, 1 << 40)
    with pytest.raises(CorruptCheckpoint, match="more than 100000000, the limit"):
        load_model(nn.Linear(1, 1), tmp_path)


# -- headers ------------------------------------------------------------------------------------


def header(**entry: Any) -> bytes:
    return json.dumps(
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **entry}}
    ).encode()


@pytest.mark.parametrize(
    ("entry", "fact"),
    [
        ({"shape": [10**300] * 200_000}, "are too large"),  # their product took minutes
        ({"shape": [1] * 1_000_000}, "are too large"),
        ({"shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}, "are too large"),
        ({"shape": [0], "data_offsets": [2**70, 2**70]}, "are too large"),
        ({"shape": ["x" * 1_000_000]}, "is not a list of sizes"),
        ({"dtype": "x" * 1_000_000}, "unknown dtype"),
    ],
)
def test_headers_that_cost_much(entry: dict[str, Any], fact: str) -> None:
    """Refused at once, by a short message."""
    body = header(**entry)
    with pytest.raises(CorruptCheckpoint, match=fact) as caught:
        parse_header(body, len(body) + 12, "file")
    assert len(str(caught.value)) < 1000


def test_names_that_are_no_text() -> None:
    body = b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    with pytest.raises(CorruptCheckpoint, match="the name is no text"):
        parse_header(body, len(body) + 12, "file")


def test_memory_is_bounded_by_the_size_of_the_file(tmp_path: Path) -> None:
    """Nothing is allocated for what a header claims; only for what the file has."""
    path = tmp_path / "x.safetensors"
    for length in (99_999_999, 2**63, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", length) + b"{" * 100)
        assert not attempt("load_model", lambda: load_model(nn.Linear(1, 1), path))
    body = header(shape=[2**40], data_offsets=[0, 2**42])
    path.write_bytes(struct.pack("<Q", len(body)) + body)
    os.truncate(path, 8 + len(body) + 2**42)  # sparse, and all is as it should be
    assert not attempt("load_model", lambda: load_model(nn.Linear(1, 1), path))


# -- tensor subclasses, boxes, hardware ---------------------------------------------------------


def test_rows_in_names_are_few_digits() -> None:
    assert parse_name("w.rows-0-5.codes") == ("w", 0, 5, "codes")
    assert parse_name(f"w.rows-0-{'9' * 5000}.codes") is None
    assert parse_name("w.rows-0-\u0665.codes") is None


GOOD = {"kind": "a.B", "shape": [4], "local_shape": [2], "dtype": "torch.float32",
        "follows": {"codes": True}, "context": None}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"kind": 3}, {"shape": [-1]}, {"shape": 4}, {"shape": [2**62, 2**62]}, {"local_shape": None},
     {"dtype": []}, {"follows": {"codes": 3}}, {"context": []}, {"context": {}}],
    ids=str,
)  # fmt: skip
def test_descriptions_of_subclasses(change: dict[str, Any]) -> None:
    def parsed(value: Any) -> Any:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return parse_description(data, "file: 'w'")

    assert parsed(GOOD).shape == (4,)
    with pytest.raises(CorruptCheckpoint, match="file: 'w'"):
        parsed({**GOOD, **change})
    with pytest.raises(CorruptCheckpoint, match="file: 'w'"):
        parsed([GOOD])


def test_boxes_that_overlap() -> None:
    def grid(rows: int, columns: int) -> list[Box]:
        return [Box((i * 3, j * 2), (3, 2)) for i in range(rows) for j in range(columns)]

    assert overlapping([]) is None
    assert overlapping([Box((), ())]) is None
    assert overlapping([Box((), ()), Box((), ())]) is not None
    for boxes in (grid(4, 1), grid(1, 4), grid(3, 3)):
        assert overlapping(boxes) is None
        for box in boxes:
            moved = Box((box.start[0] + 1, box.start[1]), (1, 1))
            assert set(overlapping([*boxes, moved]) or ()) == {box, moved}


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("[" * 100_000, "is not JSON"),
        ("\xff", "is not JSON"),
        ('{"base": "SELF"}', "base has to be the name of a preset"),
        ('{"base": ["h100"]}', "base has to be the name of a preset"),
        ('{"base": "h100", "memory_bytes": 1' + "0" * 400 + "}", "memory_bytes has to be a number"),
        ('{"base": "h100", "speeds": [1' + "0" * 400 + "]}", "speeds has to be a list of numbers"),
        ('{"base": "h100", "memory_bytes": NaN}', "memory_bytes has to be a number"),
        ('{"base": "h100", "matmul_flops": {}}', "an object with a number for each dtype"),
        ('{"base": "h100", "matmul_flops": {"_dynamo": 1}}', "there is no dtype '_dynamo'"),
        ('{"base": "h100"}' + " " * 1_000_000, "has more than 1000000 bytes"),
    ],
    ids=range(10),
)
def test_files_of_hardware(tmp_path: Path, text: str, fact: str) -> None:
    path = tmp_path / "ours.json"
    path.write_bytes(text.replace("SELF", str(path)).encode("latin-1"))
    with pytest.raises(ValueError, match=fact) as caught:
        find_hardware(str(path))
    assert str(path) in str(caught.value)


def test_a_file_of_hardware_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ours.json")
    with pytest.raises(ValueError, match=r"ours\.json is not a file"):
        find_hardware(str(tmp_path / "ours.json"))


def test_peek_reads_what_is_right(root: Path) -> None:
    assert peek(root / "one").extra["position"] == (1, 2)


def test_shards_of_a_subclass_have_to_make_up_its_rows(tmp_path: Path) -> None:
    """Rows that are in no shard would keep what they are; rows in two would depend on the order."""
    for rows, good in (
        ([(0, 2), (2, 4)], True),
        ([(0, 4)], True),
        ([(0, 2)], False),
        ([(2, 4)], False),
        ([(0, 3), (2, 4)], False),
        ([(0, 2), (3, 4)], False),
        ([(0, 2), (2, 2), (2, 4)], False),
        ([(0, 5)], False),
        ([(3, 1)], False),
    ):
        tensors = {
            f"w.rows-{a}-{b}.subclass": torch.frombuffer(
                bytearray(json.dumps(GOOD).encode()), dtype=torch.uint8
            ).clone()
            for a, b in rows
        }
        save_file(tensors, tmp_path / "x.safetensors")
        with open_source(tmp_path / "x.safetensors") as source:
            [pieces] = pieces_in(source, source.tensors).values()
            # A plain tensor here: the first check that fails tells whether the rows were right.
            what = "convert the model in the same way" if good else "do not make up its 4 rows"
            with pytest.raises(CheckpointError, match=what):
                wanted_of("w", torch.zeros(4), pieces, Box((0,), (4,)))


@pytest.mark.parametrize("more", [3, 9])
def test_more_files_than_a_process_may_open(tmp_path: Path, more: int) -> None:
    """With 3 not all can be opened; with 9 they can, but not once more for threads that read."""
    names = [f"{i}.weight" for i in range(8)]
    for name in names:
        save_file({name: torch.ones(2, 2)}, tmp_path / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in names}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in names))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is on numbers: those that are free between others are taken first.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    filled = [os.dup(0)]
    while filled[-1] < highest:
        filled.append(os.dup(0))
    lowest = filled[-1] + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, hard))
    try:
        with pytest.raises(CheckpointError, match=r"may open no more files: \d+ of the checkpoint"):
            load_model(model, tmp_path)
        assert os.dup(0) == lowest  # none is left open
        os.close(lowest)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in filled:
            os.close(number)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
    load_model(model, tmp_path)
    assert all(bool((p == 1).all()) for p in model.parameters())
