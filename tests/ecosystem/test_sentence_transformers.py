"""sentence-transformers: its modules have `abc.ABC` before `nn.Module` among their bases."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import full_state_dict, fully_shard
from harness import distributed, ours_only, shared_folder
from reference import average_gradients

pytestmark = pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed"
)


@pytest.mark.long
@pytest.mark.timeout(300)
@distributed(2, timeout_s=280)
def test_dense_trains_as_in_one_process() -> None:
    from sentence_transformers.models import Dense

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Dense(6, 10), Dense(10, 3))

    plain, model = build(), build()
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(layer, Dense) for layer in model)  # type: ignore[attr-defined]
    for side in (model, plain):
        optimizer = torch.optim.AdamW(side.parameters(), lr=0.01)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            out = side({"sentence_embedding": torch.randn(4, 6, generator=generator)})
            (out["sentence_embedding"] - 1).square().mean().backward()
            if side is plain:
                average_gradients(plain)
            optimizer.step()
            optimizer.zero_grad()
    values = full_state_dict(model, ranks=range(2))
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(values[name], wanted, msg=name)


@pytest.mark.long
@pytest.mark.timeout(300)
@ours_only("torch's raises on every rank")
@distributed(2, timeout_s=280)
def test_a_model_of_several_modules_is_saved_and_loaded() -> None:
    """Each module saves itself: those of the root's unit, and those that are units."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, StaticEmbedding
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    def build() -> SentenceTransformer:
        torch.manual_seed(0)
        words = Tokenizer(WordLevel({word: i for i, word in enumerate("abcdefg")}, unk_token="a"))
        embedding = StaticEmbedding(words, embedding_dim=6)
        return SentenceTransformer(modules=[embedding, Dense(6, 10), Dense(10, 3)], device="cpu")

    plain, model = build(), build()
    fully_shard(model[1])
    fully_shard(model)
    with shared_folder() as ours, shared_folder() as theirs:
        model.save_pretrained(ours, create_model_card=False)
        if dist.get_rank() == 0:
            plain.save_pretrained(theirs, create_model_card=False)
            for path in Path(theirs).rglob("*"):
                if path.is_file():
                    written = Path(ours, path.relative_to(theirs))
                    assert written.read_bytes() == path.read_bytes(), path
            read = SentenceTransformer(ours, device="cpu").state_dict()
            for name, value in plain.state_dict().items():
                assert torch.equal(read[name], value), name
