"""Training libraries with the import of `fully_shard` changed, beside torch's FSDP2."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from client_programs import run_both
from harness import ours_only

pytestmark = [
    ours_only("compares with torch's implementation"),
    pytest.mark.long,
    pytest.mark.skipif(torch.__version__ < "2.15", reason="the clients are tested with torch 2.15"),
]

# What each imports that it does not bring.
NEEDS = {
    "torchtune": ("torchtune", "torchao", "omegaconf", "sentencepiece", "tiktoken"),
    "verl": ("verl", "transformers", "peft", "tensordict", "codetiming"),
    "nemo": ("nemo_automodel", "transformers"),
    "axolotl": ("axolotl", "addict", "transformers", "peft", "accelerate"),
}


@pytest.mark.parametrize(
    ("client", "option"),
    [
        ("torchtune", "full"),
        ("torchtune", "lora"),
        ("verl", "plain"),
        ("verl", "tied"),
        ("verl", "lora"),
        ("nemo", "untied"),
        ("nemo", "tied"),
        ("axolotl", "lora"),
    ],
)
def test_losses_norms_and_parameters(client: str, option: str, tmp_path: Path) -> None:
    """To the last bit, on every rank."""
    if missing := [name for name in NEEDS[client] if find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    program = Path(__file__).with_name(f"{client}_run.py")
    ours, theirs = run_both(program, tmp_path, option)
    assert len(ours[0]) > 4
    assert ours == theirs


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trainers_of_trl(kind: str, tmp_path: Path) -> None:
    """The first step to the last bit. From then on nearly: sums over micro-batches without sync are
    in another order."""
    ours, theirs = run_both(Path(__file__).with_name("trl_run.py"), tmp_path, kind)
    assert len(ours[0]) == 5
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine[0] == expected[0]
        for step, expected_step in zip(mine, expected, strict=True):
            assert step == pytest.approx(expected_step, rel=1e-4, abs=1e-6)
