"""sentence-transformers: its modules have `abc.ABC` before `nn.Module` among their bases."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import full_state_dict, fully_shard
from harness import distributed
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
