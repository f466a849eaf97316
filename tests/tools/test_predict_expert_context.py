"""Experts on a mesh of their own beside context parallelism: `predict`, `plan`, a run over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from test_predict_context import Block as Attention
from test_predict_context import Sent, attend, batch
from test_predict_expert_stages import BF16, H100, Mixture, Words, transfers
from test_predict_pipeline import split

from by_keywords import make_setup, plan, predict, predict_planned, sweep, trace_step
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.experts import shard_experts
from fsdp2.planning.replay.replay import replay
from fsdp2.planning.simulation.loads import with_part_of_context
from fsdp2.planning.trace.attention import ContextParallel
from fsdp2.planning.trace.events import ModelExchange
from fsdp2.planning.trace.expert_units import InnerTopology, with_experts
from fsdp2.planning.traces import parallel_copy
from fsdp2.transports.host.topology import Ring
from fsdp2.wrap import units_of
from harness import cached_mesh, distributed
from ring_attention import RingAttention
from traffic import counting, noting_tokens

WIDTH, HEAD, LENGTH = 32, 8, 256


class Block(nn.Module):
    """Attention and a dense layer, then experts."""

    def __init__(self, width: int, head: int, attention: Any, num_experts: int) -> None:
        super().__init__()
        self.attention = Attention(width, head, attention)
        self.mixture = Mixture(width, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixture(self.attention(x))


class Model(Words):
    def __init__(
        self,
        width: int = WIDTH,
        head: int = HEAD,
        num_blocks: int = 2,
        num_experts: int = 8,
        attention: Any = attend,
    ) -> None:
        super().__init__(
            width, (Block(width, head, attention, num_experts) for _ in range(num_blocks))
        )


def on_meta(**sizes: Any) -> Model:
    with torch.device("meta"):
        return Model(**sizes)


EXPERTS = ["blocks.0.mixture.experts", "blocks.1.mixture.experts"]
UNITS = ["blocks.0", "blocks.1"]


def traced(mesh: DeviceMesh | None, part: int, sample: Any, expert_ranks: int) -> Any:
    context = None if mesh is None else ContextParallel(mesh, part)
    return trace_step(
        on_meta(), sample, [*UNITS, *EXPERTS], context=context, experts=EXPERTS,
        expert_ranks=expert_ranks, mp_policy=MixedPrecisionPolicy(),
    )  # fmt: skip


def exchanges(trace: Any, group: str) -> list[tuple[str, int]]:
    return [
        (e.kind, e.nbytes)
        for e in trace.events
        if isinstance(e, ModelExchange) and e.group == group
    ]


# -- the trace -------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [2, 4])
def test_tokens_are_those_of_a_part_of_the_sequences(context: int) -> None:
    whole = traced(None, 0, batch(length=LENGTH), 4)
    sample, part = with_part_of_context(batch(length=LENGTH), context)
    with parallel_copy(on_meta(), None, 1, context) as (_, mesh):
        made = traced(mesh, part, sample, 4)
    assert exchanges(whole, "context") == []
    assert exchanges(made, "context")
    sent = exchanges(made, "experts")
    assert sent == [(kind, n // context) for kind, n in exchanges(whole, "experts")]
    assert len(sent) == 8
    assert made.flops * context == whole.flops
    assert [p.shape for p in made.params] == [p.shape for p in whole.params]


def test_where_the_ranks_are() -> None:
    """Context ranks are data-parallel ranks: experts are over both."""
    topology = InnerTopology(64, 1, 8, experts=8, context=4)
    assert topology.ring("experts") == Ring(8, 8, 1)
    assert topology.ring("expert shard") == Ring(8, 1, 8)
    assert topology.ring("context") == Ring(4, 4, 2)
    staged = InnerTopology(64, 1, 8, experts=8, context=4, pipeline=2)
    for group in ("experts", "expert shard", "context"):
        assert staged.ring(group) == topology.ring(group)


# -- a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expert_ranks", [2, 4, pytest.param(1, marks=pytest.mark.long)]
)  # fmt: skip
@distributed(4)
def test_a_run_sends_what_was_predicted(expert_ranks: int) -> None:
    """Two batches, each sequence over two ranks; experts over two or all four of them."""
    context = cached_mesh(2, 2, names=("data", "context"))["context"]
    mesh = cached_mesh(4 // expert_ranks, expert_ranks, names=("efsdp", "ep"))
    data = cached_mesh(4, names=("dp",))
    torch.manual_seed(0)
    group = context.get_group()
    model: Any = Model(attention=lambda q, k, v: RingAttention.apply(group, q, k, v))
    for block in model.blocks:
        block.mixture.mesh = mesh["ep"]
        shard_experts(block.mixture.experts, mesh=mesh)
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    for _ in range(2):
        x = torch.randint(48, (2, LENGTH // 2))
        with counting() as traffic, noting_tokens() as tokens, Sent() as sent:
            model(x).sum().backward()
    sample, part = with_part_of_context(batch(length=LENGTH), 2)
    trace = traced(context, part, sample, expert_ranks)
    units = with_experts(units_of(on_meta(), UNITS), EXPERTS)
    own = {(name,) for name in EXPERTS}
    setup = make_setup(
        units, 4, experts=own, expert_ranks=expert_ranks, context_ranks=2, device_type="cpu"
    )
    made = replay(trace, setup).transfers
    assert sent.found == exchanges(trace, "context")
    assert tokens == [t.nbytes for t in made if t.group == "experts"]
    assert bool(tokens) == (expert_ranks > 1)
    gathers = [t for t in made if t.kind == "all_gather" and t.group != "context"]
    reductions = [t for t in made if t.kind == "reduce_scatter"]
    assert ("expert shard" in {t.group for t in gathers}) == (expert_ranks < 4)
    assert traffic.num_gathers == len(gathers)
    assert traffic.gathered == sum(t.sent for t in gathers)
    assert traffic.reduced == pytest.approx(sum(t.sent for t in reductions))


# -- predictions -----------------------------------------------------------------------------------

SIZES = {"width": 1024, "head": 128, "num_experts": 32}
COMMON: dict[str, Any] = {"mp_policy": BF16, "experts": "blocks.*.mixture.experts"}


def check_degrees_side_by_side(kind: str, model: nn.Module, **given: Any) -> None:
    """Of one rank and four that share sequences ("context") or operators ("tensor"), on 64."""
    made = sweep(
        model, batch(1, 4096), H100, 64, **{f"{kind}_ranks": [1, 4]}, expert_ranks=[8, 32], **given
    )
    assert not made.failed
    table = {(getattr(p, f"{kind}_ranks"), p.choices["expert_ranks"]): p for p in made.predictions}
    whole, part, wide = table[1, 8], table[4, 8], table[4, 32]
    # Experts are sharded over as many ranks in both cases.
    assert [t.nbytes for t in transfers(part, "expert shard")] == [
        t.nbytes for t in transfers(whole, "expert shard")
    ]
    tokens = [sum(t.nbytes for t in transfers(p, "experts")) for p in (whole, part, wide)]
    assert tokens[0] == 4 * tokens[1] == 4 * tokens[2] > 0
    assert {"all-to-all", f"{kind} parallel"} <= set(part.step.stream_s)
    assert part.step.stream_s["all-to-all"] < wide.step.stream_s["all-to-all"]
    assert part.peak_bytes < whole.peak_bytes
    assert part.samples_per_s == pytest.approx(16 / part.seconds)
    data = part.to_dict()
    assert (data[f"{kind}_ranks"], data["expert_ranks"], data["num_ranks"]) == (4, 8, 64)
    assert {f"{kind.capitalize()} ranks", "Expert ranks"} <= {
        title.strip() for title in str(made).split("\n")[0].split("  ") if title
    }


def test_degrees_side_by_side() -> None:
    check_degrees_side_by_side("context", on_meta(**SIZES), **COMMON)


def test_beside_a_pipeline_too() -> None:
    made = predict(
        on_meta(**SIZES), batch(1, 4096), H100, 64, context_ranks=4, expert_ranks=8,
        pipeline_ranks=2, micro_batches=4, split_stages=split, **COMMON,
    )  # fmt: skip
    assert (made.mesh_shape, made.num_ranks) == ((32,), 64)
    assert {"all-to-all", "context parallel", "pipeline"} <= set(made.step.stream_s)
    [one] = {t.nbytes for t in transfers(made, "experts")}
    assert one == 2 * 1024 * 1024 * 2  # choices, positions of a rank, width, bytes


def test_a_plan_chooses_both_and_is_what_predict_says() -> None:
    made = plan(
        on_meta(**SIZES), batch(1, 4096), H100, 64, context_ranks=[2, 4], expert_ranks=[8, 32],
        checkpoint="none", strategy="full", prefetch=1, **COMMON,
    )  # fmt: skip
    assert {o.candidate.context_ranks for o in made.outcomes} == {2, 4}
    assert {o.candidate.expert_ranks for o in made.outcomes} == {8, 32}
    same = predict_planned(made)
    assert (same.seconds, same.peak_bytes) == (made.chosen.seconds, made.chosen.peak_bytes)
    over = f"over {made.candidate.expert_ranks} ranks"
    for told in ("Context parallel  over", f"2 modules, {over}", f"Experts: {over}"):
        assert told in str(made)
    with pytest.raises(ValueError, match=r"shard_experts .* with a mesh of \(ranks // "):
        made.apply(on_meta(**SIZES), None)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"expert_ranks": 3}, "expert_ranks=3 must divide the number of ranks, 16"),
        ({"context_ranks": 3}, "context_ranks=3 must divide the last dim of the mesh, 16"),
        ({"expert_ranks": 16}, "more than the 8 experts"),
        ({"experts": None}, "expert_ranks=4 needs experts="),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {**COMMON, "context_ranks": 2, "expert_ranks": 4, **options}
    with pytest.raises(ValueError, match=match):
        predict(on_meta(), batch(), H100, 16, **given)
