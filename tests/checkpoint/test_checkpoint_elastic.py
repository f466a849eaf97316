"""Saved on one mesh, loaded on another: model and optimizer, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_cases import adamw, assert_equal_bits, build, tokens, train, whole_state
from fsdp2.checkpoint import Checkpointer, load_model, save_model
from fsdp2.checkpoint.tools.inspect import check, open_checkpoint
from harness import DEVICE, cpu_only, distributed, ours_only, run_on, shared_folder

pytestmark = ours_only("checkpoints")

STEPS = 3
ONE_FILE = "one file for all ranks"
MESHES = [
    ("1d", 1),
    ("1d", 2),
    ("1d", 3),
    ("1d", 4),
    ("1d", 8),
    ("hsdp", 4),
    ("tp", 4),
    ("columns", 3),
    ("torch", 2),
    ("plain", 2),
]
_saved: dict[tuple[Any, ...], tuple[Path, dict[str, Tensor]]] = {}


def save(folder: str, kind: str, layout: str) -> dict[str, Tensor] | None:
    """Train a little and save; rank 0 answers with everything that was saved."""
    model = build(kind)
    optimizer = adamw(model)
    train(model, optimizer, range(STEPS))
    options: dict[str, Any] = {"layout": layout}
    if layout == ONE_FILE:
        options = {"layout": "per-rank", "files_per_host": 1}
    checkpoints = Checkpointer(folder, **options)
    checkpoints.save(STEPS, model=model, optimizer=optimizer, extra={"rank": dist.get_rank()})
    state = whole_state(model, optimizer)
    return state if dist.get_rank() == 0 else None


def load(folder: str, kind: str, expected: dict[str, Tensor]) -> list[float]:
    """Load into another model with other values, compare, and train on."""
    model = build(kind, seed=1)
    optimizer = adamw(model)
    loaded = Checkpointer(folder).load(model=model, optimizer=optimizer)
    assert loaded.step == STEPS
    assert loaded.verified
    assert len(loaded.extra_of_ranks) >= 1
    assert_equal_bits(whole_state(model, optimizer), expected)
    return train(model, optimizer, range(STEPS, STEPS + 2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints, each made once."""

    def get(kind: str, num_ranks: int, layout: str = "auto") -> tuple[Path, dict[str, Tensor]]:
        key = (kind, num_ranks, layout)
        if key not in _saved:
            folder = tmp_path_factory.mktemp("checkpoints") / "-".join(map(str, key))
            _saved[key] = folder, run_on(num_ranks, save, str(folder), kind, layout)[0]
        return _saved[key]

    yield get
    for folder, _ in _saved.values():
        shutil.rmtree(folder)
    _saved.clear()


def mesh_id(mesh: tuple[str, int]) -> str:
    return f"{mesh[0]}{mesh[1]}"


def pairs() -> list[Any]:
    """Each mesh onto 2 ranks and back; long: each onto each other."""
    found = []
    for a in MESHES:
        for b in MESHES:
            short = ("1d", 2) in (a, b)
            marks = [] if short else [pytest.mark.long]
            if "torch" in (a[0], b[0]):
                marks.append(cpu_only("torch's FSDP2 steps, and frees what is still being read"))
            found.append(pytest.param(a, b, marks=marks, id=f"{mesh_id(a)}-{mesh_id(b)}"))
    return found


@pytest.mark.parametrize(("from_mesh", "to_mesh"), pairs())
def test_load_on_another_mesh(
    saved: Any, from_mesh: tuple[str, int], to_mesh: tuple[str, int]
) -> None:
    folder, expected = saved(*from_mesh)
    losses = run_on(to_mesh[1], load, str(folder), to_mesh[0], expected)
    assert all(each == losses[0] for each in losses)
    assert losses[0] == pytest.approx(continued(), rel=1e-4)


_continued: list[float] = []


def continued() -> list[float]:
    """The losses of the steps that follow, of a run on one rank that never stopped."""
    if not _continued:
        _continued.extend(run_on(1, train_through)[0])
    return _continued


def train_through() -> list[float]:
    model = build("1d")
    return train(model, adamw(model), range(STEPS + 2))[STEPS:]


@pytest.mark.parametrize("layout", ["shared", "per-rank", ONE_FILE])
@pytest.mark.parametrize(
    "from_mesh", [("1d", 3), ("hsdp", 4), ("tp", 4), ("columns", 3), ("plain", 2)], ids=mesh_id
)
def test_layouts(saved: Any, from_mesh: tuple[str, int], layout: str) -> None:
    folder, expected = saved(*from_mesh, layout)
    files = {p.name for p in (folder / f"step-{STEPS:06d}").iterdir() if p.is_file()}
    last = f"{from_mesh[1] - 1:05d}"
    if layout == "shared":
        assert files == {"model.safetensors", "optim.safetensors"}
    elif layout == ONE_FILE:
        assert files == {f"{kind}-ranks-00000-{last}.safetensors" for kind in ("model", "optim")}
    else:
        assert "model-rank-00000.safetensors" in files
    with open_checkpoint(folder / f"step-{STEPS:06d}") as source:
        assert check(source).checksums
    for kind, num_ranks in [("1d", 2), ("tp", 4)]:
        run_on(num_ranks, load, str(folder), kind, expected)


@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
def test_files_are_ordinary_safetensors(saved: Any, mesh: tuple[str, int]) -> None:
    """Tied tensors are there once, under their first name."""
    folder, expected = saved(*mesh)
    step = folder / f"step-{STEPS:06d}"
    model = load_file(step / "model.safetensors")
    optimizer = load_file(step / "optim.safetensors")
    assert "head.weight" not in model
    expected = {name: t for name, t in expected.items() if name != "head.weight"}
    assert_equal_bits({**model, **optimizer}, expected)


def save_weights(folder: str, kind: str, max_file_bytes: int) -> dict[str, Tensor]:
    model = build(kind)
    save_model(model, f"{folder}/weights", max_file_bytes=max_file_bytes)
    return whole_state(model)


def load_weights(folder: str, kind: str, expected: dict[str, Tensor]) -> None:
    with torch.device("meta"):
        model = build(kind, seed=1)
    load_model(model, f"{folder}/weights")
    assert_equal_bits(whole_state(model), expected)
    assert model.head.weight is model.embed.weight
    train(model, adamw(model), range(1))


ON_CPU = pytest.param(("plain", 1), marks=cpu_only("plain models are loaded there"), id="plain1")


@pytest.mark.parametrize("to_mesh", [("1d", 1), ("1d", 3), ("hsdp", 4), ("tp", 4), ON_CPU],
                         ids=mesh_id)  # fmt: skip
def test_weights_onto_the_meta_device(tmp_path: Path, to_mesh: tuple[str, int]) -> None:
    expected = run_on(2, save_weights, str(tmp_path), "1d", 2000)[0]
    files = sorted(p.name for p in (tmp_path / "weights").glob("*"))
    assert "model.safetensors.index.json" in files
    assert len(files) > 4
    run_on(to_mesh[1], load_weights, str(tmp_path), to_mesh[0], expected)


@distributed(2)
def test_buffers_of_a_model_on_the_meta_device_come_to_its_mesh() -> None:
    """They are on no mesh themselves."""
    model = build("1d")
    with shared_folder() as folder:
        save_model(model, f"{folder}/weights")
        with torch.device("meta"):
            other = build("1d", seed=1)
        load_model(other, f"{folder}/weights")
    assert list(other.buffers())
    assert {t.device.type for t in (*other.parameters(), *other.buffers())} == {DEVICE}
    other(tokens(0))


@distributed(2)
def test_forward_after_a_load_uses_what_was_loaded() -> None:
    """Also where parameters are kept gathered after forward."""
    import tempfile

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model, other = build("1d").eval(), build("1d", seed=1).eval()
    save_model(model, f"{folder[0]}/weights")
    expected = model(tokens(0))
    other.set_reshard_after_forward(False)
    assert not torch.equal(other(tokens(0)), expected)
    load_model(other, f"{folder[0]}/weights")
    assert torch.equal(other(tokens(0)), expected)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def test_shards_of_single_ranks_are_in_no_index(saved: Any) -> None:
    """An index promises whole tensors to whoever reads by it."""
    folder, _ = saved("1d", 3, "per-rank")
    names = {p.name for p in (folder / f"step-{STEPS:06d}").iterdir()}
    assert "model.safetensors.index.json" not in names
