"""`benchmarks.graph`: what it compares trains alike, and what was measured is what docs say."""

from __future__ import annotations

import copy
import json
import statistics

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks import graph, machine
from benchmarks.host_ranks import ratios
from benchmarks.simple_fsdp import compiled, simple_fsdp
from fsdp2 import fully_shard
from harness import cached_mesh, distributed, ours_only

pytestmark = ours_only("its own benchmarks")


@distributed(2)
def test_simple_fsdp_has_the_gradients_of_fsdp2() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    other = copy.deepcopy(ours)
    mesh = cached_mesh(2)
    fully_shard(ours, mesh=mesh)
    simple_fsdp(other, mesh)
    call = compiled(other, "aot_eager")
    x = torch.randn(3, 4) * (1 + mesh.get_local_rank())
    losses = [model(x).square().mean() for model in (ours, call)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses)
    for mine, theirs in zip(ours.parameters(), other.parameters(), strict=True):
        assert isinstance(theirs.grad, DTensor)
        torch.testing.assert_close(mine.grad.to_local(), theirs.grad.to_local())


def test_the_table_in_the_docs_is_that_of_the_results() -> None:
    record = json.loads((machine.REPOSITORY / "benchmarks/results/graph.json").read_text())
    page = (machine.REPOSITORY / "docs/performance.md").read_text()
    assert graph.table(record) in page
    assert graph.describe(record) in page


def test_what_was_measured_meets_what_was_asked() -> None:
    """Half of the host time of eager steps, no more time, and 5 % more memory."""
    record = json.loads((machine.REPOSITORY / "benchmarks/results/graph.json").read_text())

    def ratio(measure: str, name: str, to: str) -> float:
        rounds = (record[measure][each]["rounds_s"] for each in (name, to))
        return statistics.median(ratios(*rounds))

    assert ratio("host", graph.GRAPH, graph.EAGER) <= 0.5
    assert ratio("train", graph.GRAPH, graph.EAGER) <= 1.0
    alone = record["alone"]
    assert alone[graph.GRAPH]["peak_bytes"] <= 1.05 * alone[graph.EAGER]["peak_bytes"]
    # Eager frees the last block before its backward, and gathers it again.
    assert alone[graph.GRAPH]["collectives"] == alone[graph.EAGER]["collectives"] - 1


def test_losses_that_differ_are_an_error() -> None:
    results = {graph.EAGER: {"losses": [1.0, 0.5]}, graph.GRAPH: {"losses": [1.0, 0.51]}}
    with pytest.raises(RuntimeError, match=r"compile_step has losses \[1.0, 0.51\]"):
        graph.check(results)
