"""The example and the guide for models of the Hugging Face hub, with a tiny random Llama."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its own pages", allow_module_level=True)

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched
pytest.importorskip("transformers", reason="the example uses it")

from example_runs import run_scripts
from pages import ROOT, blocks, commands, is_quoted

PAGE = ROOT / "docs" / "guides" / "huggingface.md"
STEPS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`source`: of the hub, in several files; `copied` after no step; `trained` after some."""
    from transformers import LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("huggingface")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=101, max_position_embeddings=40,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(root / "source", max_shard_size="20kB")
    (root / "source" / "tokenizer.json").write_text("{}")
    runs = [
        (
            "huggingface.py",
            [str(root / "source"), str(root / name), str(steps)],
            root / f"{name}.txt",
        )
        for name, steps in (("copied", 0), ("trained", STEPS))
    ]
    run_scripts(2, runs)
    return root


def read_back(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_what_was_loaded_is_saved_and_read_back(folders: Path) -> None:
    source, copied = read_back(folders / "source"), read_back(folders / "copied")
    assert len(list((folders / "source").glob("*.safetensors"))) > 1
    assert copied.dtype == torch.float32
    theirs = dict(source.named_parameters())
    for name, param in copied.named_parameters():
        assert torch.equal(param, theirs[name].float()), name
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert (folders / "copied" / "tokenizer.json").is_file()


def test_training_is_that_of_a_plain_model(folders: Path) -> None:
    model = read_back(folders / "source").float()
    started = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(1, STEPS + 1):
        for rank in range(2):
            generator = torch.Generator().manual_seed(2 * step + rank)
            start = torch.randint(101, (4, 1), generator=generator)
            tokens = (start + torch.arange(16)) % 101
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / 2).backward()
            losses += [loss.item()] if rank == 0 else []
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    printed = re.findall(r"loss ([\d.]+)$", (folders / "trained.txt").read_text(), re.MULTILINE)
    assert [float(value) for value in printed] == pytest.approx(losses, rel=5e-3)
    trained = list(read_back(folders / "trained").parameters())
    moved = sum((now - then).abs().sum() for now, then in zip(trained, started, strict=True))
    apart = sum((a - b).abs().sum() for a, b in zip(trained, model.parameters(), strict=True))
    assert 0 < apart < 0.3 * moved  # computed in bfloat16


def test_code_on_the_page_is_that_of_the_example(folders: Path) -> None:
    for block in blocks(PAGE):
        if (
            block.language == "python"
            and "from_pretrained(" in block.code
            and "config" not in block.code
        ):
            names: dict[str, Any] = {}
            code = block.code.replace('"trained"', repr(str(folders / "trained")))
            exec(f"from transformers import AutoModelForCausalLM\n{code}", names)
            assert not any(param.is_meta for param in names["model"].parameters())
        elif block.language == "python":
            assert is_quoted(block, PAGE), block.code
    script = r"torchrun --standalone --nproc-per-node \d examples/huggingface.py \S+ \S+"
    assert all(re.fullmatch(script, command) for command in commands(PAGE))
