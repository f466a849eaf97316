"""The commands `fsdp2 estimate` and `fsdp2 plan`: what they answer, and how they fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import harness
from fsdp2.cli.main import main

pytestmark = harness.ours_only("estimate and plan")

MODELS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        assert torch.empty(0).is_meta
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)

def batch():
    return torch.zeros(2, 8, dtype=torch.long)

def wrong_batch():
    return torch.zeros(2, 8)

def loss(logits):
    return logits.float().mean()

def fails():
    raise RuntimeError("out of\\nideas")
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("models_to_plan", None)
    (tmp_path / "models_to_plan.py").write_text(MODELS)
    return str(tmp_path / "models_to_plan.py")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(args)
    out, err = capsys.readouterr()
    return code, out, err


def test_an_estimate_as_a_table_and_as_json(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("estimate", f"{models}:Model", "--input", f"{models}:batch", "--world-size", "16")
    code, out, err = run(capsys, *args, "--node-size", "8", "--strategy", "hybrid")
    assert (code, err) == (0, "")
    for word in ("mesh 2 x 8", "optimizer state", "all-reduce", "between nodes"):
        assert word in out
    code, out, _ = run(capsys, *args, "--json", "--loss", f"{models}:loss", "--optimizer", "sgd")
    data = json.loads(out)
    assert code == 0
    assert data["ranks"][0]["optimizer"] == 0
    assert data["peak_bytes"] > 0
    _, out, _ = run(capsys, *args, "--json", "--param-dtype", "bf16")
    assert json.loads(out)["sent_bytes"] < data["sent_bytes"]


def test_a_plan_with_a_picture(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.png"
    args = ("plan", f"{models}:Model", "--input", f"{models}:batch", "--world-size", "8",
            "--hardware", "h100", "--checkpointing", "none")  # fmt: skip
    code, out, err = run(capsys, *args, "--picture", str(picture))
    assert (code, err) == (0, "")
    assert "Why" in out
    assert picture.stat().st_size > 10_000
    code, out, _ = run(capsys, *args, "--json", "--memory", "8GB")
    data = json.loads(out)
    assert code == 0
    assert data["memory_budget"] == 8 * 10**9
    assert data["activation_checkpointing"] == "none"


@pytest.mark.parametrize("why", ["no matplotlib", "no folder", "no such format"])
def test_a_picture_that_cannot_be_written_does_not_discard_the_plan(
    why: str,
    models: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    name = {"no folder": "file/plan.png", "no such format": "plan.xyz"}.get(why, "plan.png")
    if why == "no matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    args = ("plan", f"{models}:Model", "--input", f"{models}:batch", "--world-size", "8",
            "--hardware", "h100", "--checkpointing", "none")  # fmt: skip
    code, out, err = run(capsys, *args, "--picture", str(tmp_path / name))
    assert code == 2
    assert "Why" in out
    assert "Written" not in out
    assert "The plan is whole, but its picture was not written: " in err
    code, out, err = run(capsys, *args, "--json", "--picture", str(tmp_path / name))
    assert (code, json.loads(out)["activation_checkpointing"]) == (2, "none")


def test_a_limit_on_gathered_bytes(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = ("--input", f"{models}:batch", "--world-size", "8", "--json")
    args = ("estimate", f"{models}:Model", *step, "--wrap", "blocks.*")
    limited, free = (
        json.loads(run(capsys, *args, *limit)[1])["ranks"][0]["backward"]["parts"]
        for limit in (("--max-gathered", "42KB"), ())
    )
    assert limited["gathered parameters"] <= 42_000 < free["gathered parameters"]
    args = ("plan", f"{models}:Model", *step, "--hardware", "h100", "--checkpointing", "none")
    data = json.loads(run(capsys, *args, "--max-gathered", "40KiB")[1])
    assert data["shard_model"]["max_gathered_bytes"] == 40960


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        ("estimate", {"--input": "{}:nothing"}, "has no 'nothing'"),
        ("estimate", {"--input": "{}:fails"}, "failed: RuntimeError: out of ideas"),
        ("estimate", {"--strategy": "hybrid"}, "--node-size"),
        ("estimate", {"--world-size": "0"}, "not a positive number"),
        ("estimate", {"--input": "nowhere.py:batch"}, "No such file"),
        ("estimate", {"--max-gathered": "1KB"}, "The least budget that works is"),
        ("plan", {"--hardware": "abacus"}, "no hardware 'abacus'"),
        ("plan", {"--world-size": "12"}, "multiple of the 8 GPUs"),
        ("plan", {"--memory": "1KB"}, "Nothing fits into 1000 B"),
        ("plan", {"--memory": "much"}, "is not a size"),
        ("plan", {"--input": "{}:wrong_batch"}, "Model failed on this input"),
    ],
)
def test_errors_are_one_line(
    command: str,
    changes: dict[str, str],
    message: str,
    models: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"--input": "{}:batch", "--world-size": "8"}
    if command == "plan":
        options |= {"--hardware": "h100", "--checkpointing": "none"}
    options |= changes
    flat = [part.format(models) for pair in options.items() for part in pair]
    code, out, err = run(capsys, command, f"{models}:Model", *flat)
    assert (code, out) == (2, "")
    assert err.startswith("fsdp2: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_compiled_blocks_and_offloaded_state(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = (f"{models}:Model", "--input", f"{models}:batch", "--loss", f"{models}:loss")
    told = (*step, "--world-size", "2", "--json", "--quiet")

    def predicted(*more: str) -> dict[str, Any]:
        code, out, err = run(capsys, "predict", *told, "--hardware", "h100", *more)
        assert code == 0, err
        return json.loads(out)

    assert predicted()["compiled"] is None
    assert predicted("--compiled")["compiled"] == "blocks"
    away = predicted("--offload", "--max-device", "10KB", "--max-state", "0", "--state-in", "cpu")
    assert away["host_bytes"]["parameters"] > 0
    assert away["max_device_bytes"] == 10_000
    assert "StateOffload" in away["offload_optimizer"]
    for command in ("estimate", "plan"):
        hardware = ("--hardware", "h100") if command == "plan" else ()
        code, _, err = run(capsys, command, *told, *hardware, "--compiled", "--max-state", "1MiB")
        assert code == 0, err
