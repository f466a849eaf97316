"""The command `fsdp2 explain`: what it answers, and how it fails."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
import harness

pytestmark = harness.ours_only("explain")

MODELS = """
import torch
from torch import nn
from helper_of_models import WIDTH

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        assert torch.empty(0).is_meta
        self.embedding = nn.Embedding(1000, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1000)
        self.norm.weight.requires_grad_(False)

def build_model():
    return Model()

def fails():
    raise RuntimeError("out of\\nideas")

number = 3
three = lambda: 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("models_of_a_user", "helper_of_models"):
        sys.modules.pop(name, None)
    (tmp_path / "models_of_a_user.py").write_text(MODELS)
    (tmp_path / "helper_of_models.py").write_text("WIDTH = 64")
    return str(tmp_path / "models_of_a_user.py")


def command(*args: object) -> int:
    from fsdp2.cli.main import main

    return main(["explain", *map(str, args)])


def answer(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    assert command(*args, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    return json.loads(out)


def test_it_says_what_explain_says(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    from fsdp2 import MixedPrecisionPolicy, explain

    found = answer(capsys, f"{models}:build_model", "--world-size", 8)
    with torch.device("meta"):
        model = sys.modules["models_of_a_user"].build_model()
    assert found == explain(model, 8).to_dict()
    assert [unit["name"] for unit in found["units"]][-1] == "norm, head"
    found = answer(
        capsys, f"{models}:Model", "--world-size", 16, "--node-size", 4, "--strategy", "hybrid",
        "--wrap", "class:Block", "--param-dtype", "bf16", "--reduce-dtype", "fp32",
        "--replicate-below", "1KiB", "--device", "cpu",
    )  # fmt: skip
    expected = explain(
        model,
        (4, 4),
        strategy="hybrid",
        wrap=["blocks.*"],
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        replicate_below=1024,
        device_type="cpu",
    )
    assert found == expected.to_dict()


@pytest.mark.parametrize(
    ("wrap", "units"),
    [
        ("root", ["(root)"]),
        (
            "size:16KiB",
            ["(root)", "embedding", "blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp", "head"],
        ),
        ("blocks.[01],norm+head", ["(root)", "blocks.0", "blocks.1", "norm, head"]),
    ],
)
def test_wrap(models: str, wrap: str, units: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, f"{models}:Model", "--world-size", 2, "--wrap", wrap)
    assert [unit["name"] for unit in found["units"]] == units


def test_tables(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(f"{models}:Model", "--world-size", 4, "--params") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "blocks.0 .. blocks.2 (3)" in out
    assert "norm.weight" in out
    assert "frozen" in out
    assert "Shard(0)" in out


def test_it_needs_no_processes_and_no_rich(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a module in the working folder, as `python -m` finds it."""
    monkeypatch.chdir(Path(models).parent)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert command("models_of_a_user:Model", "--world-size", 16384) == 0
    assert "on 16,384 ranks" in capsys.readouterr().out
    assert command("models_of_a_usr:Model", "--world-size", 2) == 2
    assert "did you mean 'models_of_a_user'?" in capsys.readouterr().err
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["MODELS:nothing", "--world-size", "2"], "has no 'nothing'"),
        (["MODELS:fails", "--world-size", "2"], "fails failed: RuntimeError: out of ideas"),
        (["MODELS:number", "--world-size", "2"], "number is a int, not a function"),
        (["MODELS:three", "--world-size", "2"], "three returned a int, not a model"),
        (["MODELS", "--world-size", "2"], "does not name a function: write module:function"),
        (["/no/such.py:x", "--world-size", "2"], "/no/such.py: No such file"),
        (["no_such_module:x", "--world-size", "2"], "cannot import no_such_module"),
        (["MODELS:Model", "--world-size", "0"], "'0' is not a positive number"),
        (["MODELS:Model", "--world-size", "2", "--wrap", "layers.*"], "No module is named"),
        (["MODELS:Model", "--world-size", "2", "--wrap", "x:y"], "--wrap must be auto, root"),
        (["MODELS:Model", "--world-size", "2", "--wrap", "size:big"], "'big' is not a size"),
        (["MODELS:Model", "--world-size", "2", "--strategy", "hybrid"], "needs --node-size"),
        (["MODELS:Model", "--world-size", "6", "--node-size", "4"], "multiple of --node-size"),
        (["MODELS:Model"], "required: --world-size"),
        (["MODELS:Modle", "--world-size", "2"], "has no 'Modle': did you mean 'Model'?"),
        (["MODELS:Model", "--worldsize", "2"], "no --worldsize: did you mean '--world-size'?"),
        (["MODELS:Model", "--world-size", "2", "--jsn"], "--jsn: did you mean '--json'?"),
        (["MODELS:Model", "--world-size", "2", "--strategy", "ful"], "did you mean 'full'?"),
        (["MODELS:Model", "--world-size", "2", "--param-dtype", "bfloat16"], "mean 'bf16'?"),
        (["MODELS:Model", "--world-size", "2", "--wrap", "class:linear"], "mean 'Linear'?"),
        (["MODELS:Model", "--world-size", "2", "--wrap", "clas:Linear"], "mean 'class'?"),
        (["MODELS:Model", "--world-size", "2", "--wrap", "atuo"], "did you mean 'auto'?"),
    ],
)
def test_errors_are_one_line(
    models: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if args[0] == "MODELS":
        args = ["models_of_a_user", *args[1:]]
    assert command(*(arg.replace("MODELS:", f"{models}:") for arg in args)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fsdp2: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["explan"], "did you mean 'explain'?"),
        (["inspect", "x"], "did you mean 'ckpt inspect'?"),
        (["ckpt", "inspec", "x"], "did you mean 'inspect'?"),
        (["ckpt", "inspect", "x", "--setp", "1"], "--setp 1: did you mean '--step'?"),
        (["--versoin"], "there is no --versoin: did you mean '--version'?"),
    ],
)
def test_misspelt_commands_and_options_are_recognised(
    args: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdp2.cli.main import main

    assert main(args) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert hint in err


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: fsdp2.explain(nn.Linear(2, 2), 2, strategy="ful"), "did you mean 'full'?"),
        (lambda: fsdp2.planning.Cluster("a100", 8), "did you mean 'a100-80'?"),
        (lambda: fsdp2.explain(Deep(), 2, wrap="layer.*"), "did you mean 'layers.*'?"),
    ],
)
def test_misspelt_arguments_are_recognised(call: Any, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert hint in str(caught.value)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


def test_rich_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """The same cells, whoever draws the table; and plain text where the terminal is narrow."""
    pytest.importorskip("rich", reason="rich is not installed")
    from unittest import mock

    from fsdp2.render.text import plain_table, show_table

    header, rows = ("unit", "bytes"), [("a", "1 B"), ("[b]", "22 B")]
    for columns, plain in (("80", False), ("6", True)):
        with (
            mock.patch.object(sys.stdout, "isatty", return_value=True),
            mock.patch.dict(os.environ, COLUMNS=columns, TERM="xterm", NO_COLOR="1"),
        ):
            show_table(header, rows, right="1")
        out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        assert (out == plain_table(header, rows, right="1") + "\n") == plain
        words = [line.split() for line in out.splitlines() if set(line) - set(" ─━-")]
        assert words == [["unit", "bytes"], ["a", "1", "B"], ["[b]", "22", "B"]]


def test_strategies_are_those_of_shard_model() -> None:
    """The command knows their names before it imports torch."""
    from fsdp2.api import shard_model as strategies
    from fsdp2.cli import model as cli_model

    assert tuple(strategies.STRATEGIES) == cli_model.STRATEGIES


def test_modules_may_be_models(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "torch.nn:Identity", "--world-size", 2)
    assert found["totals"]["numel"] == sum(p.numel() for p in nn.Identity().parameters())
