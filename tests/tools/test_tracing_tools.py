"""Tools that trace or change a sharded module: right, or an error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import prune

from harness import distributed, ours_only
from models import EVEN_MLP, MLP, run_backward
from reference import assert_same_gradients, average_gradients, pair

pytestmark = [ours_only("torch's fails somewhere inside")]


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@distributed(2)
def test_tracing_and_exporting_are_refused() -> None:
    """Before the first forward and after one; the model goes on working."""
    for trained in (False, True):
        model, plain = pair(EVEN_MLP)
        (x,) = EVEN_MLP.batch(0, dist.get_rank(), torch.float64)
        if trained:
            run_backward(EVEN_MLP, model, 1)
            model.zero_grad()
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace of a sharded model"):
            torch.jit.trace(model, (x,))
        with pytest.raises(Exception, match=r"torch\.export of a sharded model"):
            torch.export.export(model, (x,), strict=False)
        for each in (model, plain):
            run_backward(EVEN_MLP, each, 0)
        average_gradients(plain)
        assert_same_gradients(model, plain)


@distributed(2)
def test_pruning_after_sharding_is_refused() -> None:
    """And the model goes on working."""
    methods: list[Any] = [prune.l1_unstructured, prune.random_unstructured]
    for method in methods:
        for trained in (False, True):
            model, plain = pair(MLP)
            if trained:
                run_backward(MLP, model, 1)
                model.zero_grad()
            text = r"prune.*'0\.weight'.*before fully_shard"
            with pytest.raises(RuntimeError, match=text):
                method(model[0], "weight", 0.3)  # type: ignore[index]
            for each in (model, plain):
                run_backward(MLP, each, 0)
            average_gradients(plain)
            assert_same_gradients(model, plain)
