"""The command `fsdp2 ckpt`: what it answers, what it writes, and how it fails."""

# ruff: noqa: F401, F811 (fixtures are imported)

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoint_commands import (
    answer_of,
    change,
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


# -- inspect ------------------------------------------------------------------------------------


def test_inspect_shows_the_latest_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("inspect", folder / "run") == 0
    lines = capsys.readouterr().out.splitlines()
    facts = {line[:10].strip(): line[10:].strip() for line in lines[: lines.index("")]}
    assert facts["Steps"] == "1 2"
    assert facts["Step"] == "2"
    assert facts["Model"] == "1,566 parameters in 20 tensors, 6.12 KiB"
    assert facts["Optimizer"].startswith("exp_avg, exp_avg_sq, step: 48 tensors")
    assert "shared" in facts["Layout"]
    assert "1 rank" in facts["Layout"]
    assert f"torch {torch.__version__}" in facts["Written"]
    assert facts["Verifiable"].startswith("yes")
    assert "  F32  19 tensors  1,565  6.11 KiB" in lines
    assert "  head.weight  is  embed.weight" in lines
    assert any(line.split()[0] == "model.safetensors" for line in lines if line.startswith("  "))


def test_inspect_another_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("inspect", folder / "run", "--step", 1, "--json") == 0
    answer = answer_of(capsys)
    assert answer["step"] == 1
    assert answer["steps"] == [1, 2]
    assert command("inspect", folder / "run", "--step", 7) == 2
    assert "no committed step 7; the last ones: 1, 2" in error_of(capsys)
    assert command("inspect", folder / "weights", "--step", 1) == 2
    assert "has no steps" in error_of(capsys)


def test_inspect_lists_tensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("inspect", folder / "weights", "--json", "--tensors") == 0
    answer = answer_of(capsys)
    assert answer["total_bytes"] == sum(
        p.stat().st_size for p in (folder / "weights").rglob("*") if p.is_file()
    )
    assert len(answer["tensors"]) == answer["model"]["num_tensors"]
    for entry in answer["tensors"]:
        (file,) = entry["files"]
        tensor = load_file(folder / "weights" / file)[entry["name"]]
        assert entry["shape"] == list(tensor.shape)
        assert entry["nbytes"] == tensor.numel() * tensor.element_size()
    assert command("inspect", folder / "weights", "--tensors") == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if "[37, 12]" in line)
    assert row[:6] == ["embed.weight", "F32", "[37,", "12]", "1.73", "KiB"]


def test_inspect_files_of_ranks(
    ranks: tuple[Path, dict[str, Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("inspect", ranks[0] / "per-rank", "--json", "--tensors") == 0
    answer = answer_of(capsys)
    assert answer["layout"] == "per-rank"
    assert answer["ranks"] == [0, 1, 2]
    files = {entry["name"]: entry["files"] for entry in answer["tensors"]}
    assert files["blocks.0.up.weight"] == [f"model-rank-0000{r}.safetensors" for r in range(3)]


def test_inspect_what_others_wrote(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("inspect", hub) == 0
    out = capsys.readouterr().out
    assert "by another library (format=pt)" in out
    assert "no checksums" in out
    assert "no state" in out
    assert command("inspect", hub.parent, "--json") == 0
    answer = answer_of(capsys)
    assert answer["format"] == "safetensors"
    assert answer["dtypes"]["BF16"] == {"num_tensors": 1, "num_elements": 4, "nbytes": 8}
    assert not answer["verifiable"]


def test_names_do_not_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a\x1b[31m": torch.ones(1)}, tmp_path / "x.safetensors")
    assert command("inspect", tmp_path, "--tensors") == 0
    assert "a\\x1b[31m" in capsys.readouterr().out


# -- verify -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["per-rank", "shared"])
def test_verify_finds_nothing_wrong(
    ranks: tuple[Path, dict[str, Tensor]], layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("verify", ranks[0] / layout) == 0
    out, err = capsys.readouterr()
    assert "all checksums match: 68 tensors" in out
    assert "/s)" in out
    assert err == ""
    assert command("verify", ranks[0] / layout, "--json") == 0
    answer = answer_of(capsys)
    data = sum(t.numel() * t.element_size() for n, t in ranks[1].items() if n != "head.weight")
    assert answer["ok"]
    assert answer["checksums"]
    assert answer["nbytes"] > data


def test_verify_names_tensor_and_block(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "model.safetensors"
    flip(file, offset_of(file, "embed.weight") + 5)
    assert command("verify", copy) == 1
    error = error_of(capsys)
    assert "model.safetensors" in error
    assert "'embed.weight' is wrong in block 0 of 1" in error
    assert command("verify", copy, "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is False
    assert err.count("\n") == 1


def test_verify_names_the_second_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(1024, 700, bias=False)
    save_model(model, tmp_path / "big", layout="per-rank")
    (file,) = (tmp_path / "big").glob("*.safetensors")
    flip(file, offset_of(file, "weight") + (1 << 20) + 7)
    assert command("verify", tmp_path / "big") == 1
    assert f"{file.name}: the checksum of tensor 'weight' is wrong in block 1 of 3" in error_of(
        capsys
    )


@pytest.mark.parametrize(
    ("name", "offset", "says"),
    [
        (".fsdp2/rank-00000-of-00001.json", -20, "state-00000.json is damaged"),
        (".fsdp2/rank-00000-of-00001.json", 20, "the checksum of the manifest is wrong"),
        ("optim.safetensors", 30, "not the one that was written"),  # "pt" in its metadata
    ],
)
def test_verify_reads_everything(
    copy: Path, name: str, offset: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "optim.safetensors":
        offset = (copy / name).read_bytes().index(b'"pt"') + 1
    flip(copy / name, offset)
    assert command("verify", copy) == 1
    error = error_of(capsys)
    assert name in error
    assert says in error


def test_verify_compares_the_index(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(folder / "weights", tmp_path / "copy"))
    index = copy / "model.safetensors.index.json"
    assert command("verify", index) == 0
    assert "all checksums match" in capsys.readouterr().out
    text = index.read_text()
    index.write_text(text.replace("-00001-of", "-00002-of"))
    assert command("verify", copy) == 1
    assert "index.json: the index is not the one that was written" in error_of(capsys)
    index.unlink()
    assert command("verify", copy) == 1
    assert "index.json is missing" in error_of(capsys)


def test_verify_finds_a_truncated_file(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(copy / "optim.safetensors", 5000)
    assert command("verify", copy) == 1
    assert "optim.safetensors: expected" in error_of(capsys)


def test_verify_without_checksums(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify", hub) == 0
    assert "only its structure could be checked" in capsys.readouterr().out
    assert command("verify", hub, "--json") == 0
    assert answer_of(capsys)["checksums"] is False
    os.truncate(hub, hub.stat().st_size - 1)
    assert command("verify", hub) == 1
    assert "truncated" in error_of(capsys)


class Terminal:
    """A stderr that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("tqdm", [True, False])
def test_progress_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tqdm: bool, tmp_path: Path
) -> None:
    if tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert command("verify", folder / "run") == 0
    assert "verify" in stderr.text
    assert tqdm or "100%" in stderr.text
    for options in (("verify", folder / "run", "--quiet"), ("verify", folder / "run", "--json")):
        stderr.text = ""
        assert command(*options) == 0
        assert stderr.text == ""


# -- diff ---------------------------------------------------------------------------------------


def test_diff_between_layouts(
    ranks: tuple[Path, dict[str, Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("diff", ranks[0] / "per-rank", ranks[0] / "shared") == 0
    assert capsys.readouterr().out == "68 tensors equal; 0 different\n"


def test_diff_of_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = folder / "run" / "step-000001", folder / "run"
    assert command("diff", a, b, "--json") == 1
    answer = answer_of(capsys)
    states = [load_file(folder / "run" / f"step-00000{i}" / "model.safetensors") for i in (1, 2)]
    largest = max(
        float((x.double() - states[1][n].double()).abs().max())
        for n, x in states[0].items()
        if x.numel()
    )
    assert answer["max_abs_difference"] >= largest
    scale = next(d for d in answer["differences"] if d["name"] == "scale")
    expected = abs(float(states[0]["scale"].double() - states[1]["scale"].double()))
    assert scale["max_abs_difference"] == expected
    assert answer["num_equal"] == 1  # the empty one
    assert command("diff", a, b, "--atol", 10) == 0
    assert "within the tolerances" in capsys.readouterr().out


def test_diff_of_weights_and_training_state(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("diff", folder / "run", folder / "weights") == 0
    assert "optimizer state only in A, not compared" in capsys.readouterr().out


def test_diff_of_names_dtypes_shapes(
    hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = change(
        hub,
        tmp_path / "other.safetensors",
        a=torch.arange(6.0).view(3, 2),
        b=torch.tensor([1, 2, 3], dtype=torch.int32),
        none=None,
        more=torch.ones(1),
    )
    assert command("diff", hub, other) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "Only in A",
        "  none",
        "Only in B",
        "  more",
        "Different",
        "  a  shape  F32 [2, 3] and F32 [3, 2]",
        "  b  dtype  I64 [3] and I32 [3]; equal values",
        "2 tensors equal; 2 different; 2 only in one",
    ]


def test_diff_of_special_values(
    hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("diff", hub, hub) == 0  # with a NaN
    c = load_file(hub)["c"]
    zero = change(hub, tmp_path / "zero", c=torch.where(c == 0, 0.0, c).to(c.dtype))
    nan = change(hub, tmp_path / "nan", c=torch.nan_to_num(c, nan=3.0, posinf=float("inf")))
    finite = change(hub, tmp_path / "finite", c=torch.where(c.isinf(), 9.0, c).to(c.dtype))
    capsys.readouterr()
    assert command("diff", hub, zero, "--json") == 1  # -0.0 and 0.0 are not the same bits
    answer = answer_of(capsys)
    assert answer["differences"][0]["num_different"] == 1
    assert answer["differences"][0]["max_abs_difference"] == 0
    assert command("diff", hub, zero, "--atol", "1e-30") == 0
    capsys.readouterr()
    assert command("diff", hub, nan, "--atol", 100) == 1
    assert "1 of 4 values, by up to 0, 1 with NaN" in capsys.readouterr().out
    for pair in ((hub, finite), (finite, hub)):
        assert command("diff", *pair, "--rtol", 100, "--json") == 1
        assert answer_of(capsys)["max_abs_difference"] == "inf"


def test_diff_of_relative_tolerance(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    save_file({"x": torch.tensor([100.0, 1.0])}, a)
    save_file({"x": torch.tensor([101.0, 1.0])}, b)
    assert command("diff", a, b) == 1
    assert command("diff", a, b, "--rtol", 0.005) == 1
    assert command("diff", a, b, "--rtol", 0.01) == 0
    assert command("diff", a, b, "--rtol", 0.005, "--atol", 0.5) == 0


def test_diff_of_large_integers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("a", 1 << 62), ("b", (1 << 62) + 1)):  # the same number in float64
        save_file({"x": torch.tensor([value, 5])}, tmp_path / name)
    assert command("diff", tmp_path / "a", tmp_path / "b", "--atol", 0.5) == 1
    assert "1 of 2 values, by up to 1" in capsys.readouterr().out
    assert command("diff", tmp_path / "a", tmp_path / "b", "--atol", 1) == 0


def test_diff_knows_tied_tensors(folder: Path, tmp_path: Path) -> None:
    exported = tmp_path / "first.safetensors"
    assert command("export", folder / "weights", exported) == 0
    tensors = load_file(exported)
    embed = tensors.pop("embed.weight")
    both = {**tensors, "embed.weight": embed, "head.weight": embed.clone()}
    changed = {**tensors, "embed.weight": embed, "head.weight": embed + 1}
    for name, expected, content in (
        ("other", 0, {**tensors, "head.weight": embed}),
        ("both", 0, both),
        ("changed", 1, changed),
    ):
        save_file(content, tmp_path / name)
        assert command("diff", folder / "weights", tmp_path / name) == expected, name
        assert command("diff", tmp_path / name, folder / "weights") == expected, name


# -- failing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("unknown",),
        ("inspect",),
        ("inspect", "x", "--step", "two"),
        ("export", "x", "y", "--dtype", "int8"),
        ("export", "x", "y", "--max-file-size", "5 bananas"),
        ("export", "x", "y", "--max-file-size", "0"),
        ("diff", "x"),
        ("diff", "x", "y", "--atol", "-1"),
        ("diff", "x", "y", "--rtol", "nan"),
    ],
)
def test_wrong_usage(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*args) == 2
    assert "--help)" in error_of(capsys)


@pytest.mark.parametrize("args", [("inspect",), ("verify",), ("export", "out"), ("diff", "x")])
def test_input_that_cannot_be_read(
    args: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *more = args
    assert command(name, tmp_path / "missing", *more) == 2
    assert "missing does not exist" in error_of(capsys)
    assert command(name, tmp_path, *more) == 2
    assert "no safetensors file" in error_of(capsys)


def test_damaged_input(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(hub, 100)
    assert command("inspect", hub) == 2
    assert "truncated" in error_of(capsys)
    assert command("diff", hub, hub) == 2
    assert "truncated" in error_of(capsys)


def test_errors_of_the_system_are_one_line(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdp2.checkpoint.format.disk import Disk

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Disk, "write_at", full)
    assert command("export", hub, tmp_path / "out") == 2
    assert error_of(capsys) == "fsdp2: error: No space left on device\n"
    assert os.listdir(tmp_path) == ["hub.safetensors"]


def test_closed_pipe_is_silent(
    hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert command("inspect", hub) == 141
    assert capsys.readouterr().err == ""


def test_sizes() -> None:
    from fsdp2.cli.ckpt import parse_bytes
    from fsdp2.render.text import show_bytes

    sizes = {"5GB": 5 * 10**9, "5gib": 5 << 30, "1.5 MiB": 3 << 19, "77": 77, "2k": 2000, "9B": 9}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    shown = {0: "0 B", 1023: "1023 B", 1536: "1.50 KiB", 10 << 20: "10.0 MiB", 999 << 30: "999 GiB"}
    assert {num: show_bytes(num) for num in shown} == shown
    assert show_bytes(3 << 50) == "3072 TiB"
