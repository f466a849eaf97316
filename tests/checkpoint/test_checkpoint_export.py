"""The command `fsdp2 ckpt export`: what it writes, and how it fails."""

# ruff: noqa: F401, F811 (fixtures are imported)

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoint_cases import assert_equal_bits
from checkpoint_commands import (
    command,
    copy,
    error_of,
    flip,
    folder,
    hub,
    offset_of,
    ranks,
)
from fsdp2.checkpoint import save_model
from harness import ours_only

pytestmark = ours_only("checkpoints")


@pytest.mark.parametrize("layout", ["per-rank", "shared"])
def test_export_from_three_ranks(
    ranks: tuple[Path, dict[str, Tensor]], layout: str, tmp_path: Path
) -> None:
    folder, state = ranks
    assert command("export", folder / layout, tmp_path / "out") == 0
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    expected = {n: t for n, t in state.items() if not n.startswith("optim.") and n != "head.weight"}
    assert_equal_bits(load_file(tmp_path / "out" / "model.safetensors"), expected)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert os.listdir(tmp_path) == ["out"]


def test_export_with_optimizer(
    ranks: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, state = ranks
    source = folder / "per-rank"
    out = tmp_path / "out"
    assert command("export", source, out, "--with-optimizer", "--dtype", "bf16") == 0
    assert sorted(os.listdir(out)) == ["model.safetensors", "optim.safetensors"]
    expected = {n: t for n, t in state.items() if n.startswith("optim.")}
    assert_equal_bits(load_file(out / "optim.safetensors"), expected)
    capsys.readouterr()
    assert command("export", source, tmp_path / "x.safetensors", "--with-optimizer") == 2
    assert "needs a folder" in error_of(capsys)
    assert command("export", out, tmp_path / "y", "--with-optimizer") == 2
    assert "no optimizer state" in error_of(capsys)


def test_export_to_numbered_files(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command("export", folder / "weights", out, "--max-file-size", "3kB") == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert len(files) > 1
    for file in files:
        for name in load_file(out / file):
            assert index["weight_map"][name] == file
    assert command("diff", folder / "weights", out) == 0
    assert command("export", out, tmp_path / "again", "--single") == 0
    assert os.listdir(tmp_path / "again") == ["model.safetensors"]
    assert command("diff", out, tmp_path / "again") == 0


def test_export_to_one_file(hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "one.safetensors"
    assert command("export", hub, out) == 0
    assert "it had no checksums" in capsys.readouterr().out
    assert_equal_bits(load_file(out), load_file(hub))
    assert sorted(os.listdir(tmp_path)) == ["hub.safetensors", "one.safetensors"]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_export_converts_floating_point_only(
    hub: Path, tmp_path: Path, dtype: str, expected: torch.dtype
) -> None:
    assert command("export", hub, tmp_path / "out.safetensors", "--dtype", dtype) == 0
    converted = {
        name: t.to(expected) if t.is_floating_point() else t for name, t in load_file(hub).items()
    }
    assert_equal_bits(load_file(tmp_path / "out.safetensors"), converted)


def test_export_tells_what_became_infinite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = torch.tensor([1.0, 1e5, -1e6, float("inf"), float("nan")])
    save_file({"x": values}, tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    assert command("export", tmp_path / "in.safetensors", out, "--dtype", "fp16") == 0
    warning = "fsdp2: warning: 2 values of 'x' overflowed to infinity in fp16\n"
    assert capsys.readouterr().err == warning


def test_export_refuses_what_exists(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out.safetensors").touch()
    for name in ("out", "out.safetensors"):
        assert command("export", folder / "run", tmp_path / name) == 2
        assert "exists already" in error_of(capsys)
    assert command("export", folder / "run", tmp_path / "out.safetensors" / "out") == 2
    assert "out.safetensors is a file, not a folder" in error_of(capsys)
    assert command("export", folder / "run", "/proc/out") == 2
    assert "/proc cannot be written to" in error_of(capsys)


def test_export_of_damaged_data(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(copy / "model.safetensors", offset_of(copy / "model.safetensors", "scale"))
    assert command("export", copy, tmp_path / "out") == 2
    assert "'scale' is wrong in block 0" in error_of(capsys)
    assert os.listdir(tmp_path) == ["copy"]
    assert command("export", copy, tmp_path / "out", "--no-verify") == 0
    assert "not verified" in capsys.readouterr().out


def test_export_writes_headers_last(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdp2.checkpoint.format.disk import Disk

    first_bytes = []

    def sync(self: Disk, fd: int, name: str) -> None:
        for path in tmp_path.glob(".out.*.tmp/model.safetensors"):
            first_bytes.append(path.read_bytes()[:8])
        assert not (tmp_path / "out").exists() or name == str(tmp_path)

    monkeypatch.setattr(Disk, "sync", sync)
    assert command("export", hub, tmp_path / "out") == 0
    assert first_bytes[0] == bytes(8)
    assert first_bytes[1] != bytes(8)


def test_interrupted_export_leaves_nothing(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdp2.checkpoint.format.disk import Disk

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Disk, "sync", interrupt)
    assert command("export", hub, tmp_path / "out") == 130
    assert capsys.readouterr() == ("", "")
    assert os.listdir(tmp_path) == ["hub.safetensors"]


MEASURE = """
import pathlib, re, runpy, sys
from fsdp2.cli.main import main

def peak_mib():
    # Of this program; what getrusage tells includes the process that started it.
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1]) / 1024

def run(name):
    assert main(["ckpt", "export", name, name + "-out", "--dtype", "bf16", "--single"]) == 0
    assert main(["ckpt", "verify", name]) == 0
    assert main(["ckpt", "diff", name, name]) == 0
    assert main(["ckpt", "diff", name, name + "-out", "--quiet"]) == 1

sys.argv[1:] = ["ckpt", "inspect", "small"]
try:
    runpy.run_module("fsdp2", run_name="__main__")
except SystemExit as end:
    assert end.code == 0

run("small")
before = peak_mib()
run("large")
print("MiB", peak_mib() - before)
"""


def test_memory_is_constant(tmp_path: Path) -> None:
    # The small one fills every buffer and thread already: what the large one adds is its size.
    for name, rows in (("small", 32 << 10), ("large", 160 << 10)):
        model = nn.Linear(256, rows, bias=False, device="meta").to_empty(device="cpu")
        nn.init.constant_(model.weight, 1.0625)
        model.weight.data[::7] = 1.001  # is another number in bfloat16
        save_model(model, tmp_path / name, layout="per-rank")
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-c", MEASURE],
        cwd=tmp_path,
        # Freed memory goes back to the system at once, whatever thread had it: what is measured is
        # what is in use.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    grown = float(result.stdout.split("MiB")[-1])
    assert "8,388,608 parameters" in result.stdout
    assert grown < 24  # of 128 MiB more
