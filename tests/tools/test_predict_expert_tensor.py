"""Experts on a mesh of their own beside tensor parallelism: `predict`, `plan`, runs over gloo."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInputOutput,
    SequenceParallel,
    parallelize_module,
)

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from test_predict_expert_context import SIZES, check_degrees_side_by_side
from test_predict_expert_stages import BF16, H100, Experts, Mixture, Words, transfers
from test_predict_pipeline import batch, split
from test_predict_schedules import MICRO_BATCHES, assert_same_traffic
from test_predict_tensor import Block as Attention
from test_predict_tensor import plan_of

from benchmarks.ledger import Ledger
from by_keywords import Stages, make_setup, plan, predict, sweep, trace_step
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.cli.main import main
from fsdp2.experts import shard_experts
from fsdp2.planning.replay.pipeline import RankStage, replay_rank
from fsdp2.planning.replay.replay import replay
from fsdp2.planning.replay.schedules import order_of
from fsdp2.planning.trace.events import ModelExchange
from fsdp2.planning.trace.expert_units import InnerTopology, with_experts
from fsdp2.planning.trace.optimizers import NOTHING
from fsdp2.planning.traces import parallel_copy
from fsdp2.transports.host.topology import Ring
from fsdp2.wrap import units_of
from harness import cached_mesh, distributed, run_on
from traffic import counting, noting_messages, noting_tokens

WIDTH, HEAD, LENGTH = 32, 8, 64


class Block(nn.Module):
    """Attention and a feed-forward layer, then a dense layer and experts."""

    def __init__(self, width: int, head: int, num_experts: int) -> None:
        super().__init__()
        self.attention = Attention(width, head)
        self.mixture = Mixture(width, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixture(self.attention(x))


class Model(Words):
    def __init__(
        self, width: int = WIDTH, head: int = HEAD, num_blocks: int = 2, num_experts: int = 8
    ) -> None:
        super().__init__(width, (Block(width, head, num_experts) for _ in range(num_blocks)))


def on_meta(**sizes: Any) -> Model:
    with torch.device("meta"):
        return Model(**sizes)


def in_parts(model: Any, mesh: DeviceMesh) -> None:
    """Attention by heads; each rank sends its part of each sequence to experts."""
    for block in model.blocks:
        parallelize_module(block.attention, mesh, plan_of(block.attention))
        rows: dict[str, ParallelStyle] = {
            "mixture": PrepareModuleInputOutput(
                input_layouts=(Replicate(),),
                desired_input_layouts=(Shard(1),),
                use_local_input=True,
                output_layouts=(Shard(1),),
                desired_output_layouts=(Replicate(),),
            ),
            "mixture.dense": SequenceParallel(sequence_dim=1, use_local_output=True),
            "mixture.gate": SequenceParallel(sequence_dim=0, use_local_output=True),
        }
        parallelize_module(block, mesh, rows)


def as_a_whole(model: Any, mesh: DeviceMesh) -> None:
    """Each rank sends all tokens of the batch."""
    for block in model.blocks:
        parallelize_module(block.attention, mesh, plan_of(block.attention))


EXPERTS = ["blocks.0.mixture.experts", "blocks.1.mixture.experts"]
UNITS = ["blocks.0", "blocks.1"]


def traced(model: nn.Module, tensor_ranks: int, expert_ranks: int) -> Any:
    return trace_step(
        model, batch(2, LENGTH), [*UNITS, *EXPERTS], tensor_ranks=tensor_ranks, experts=EXPERTS,
        expert_ranks=expert_ranks, mp_policy=MixedPrecisionPolicy(), device_type="cpu",
    )  # fmt: skip


def exchanges(trace: Any, group: str) -> list[tuple[str, int]]:
    return [
        (e.kind, e.nbytes)
        for e in trace.events
        if isinstance(e, ModelExchange) and e.group == group
    ]


# -- the trace -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [2, 4])
def test_tokens_are_those_that_a_rank_is_given(tensor: int) -> None:
    alone = traced(on_meta(), 1, 4)
    made = {}
    for how in (in_parts, as_a_whole):
        with parallel_copy(on_meta(), how, tensor) as (model, _):
            made[how] = traced(model, tensor, 4)
    sent = exchanges(alone, "experts")
    assert len(sent) == 8
    assert exchanges(made[as_a_whole], "experts") == sent
    assert exchanges(made[in_parts], "experts") == [(kind, n // tensor) for kind, n in sent]
    # A part is cut for nothing in forward and gathered in backward, results the other way round.
    whole = 2 * LENGTH * WIDTH * 4
    assert exchanges(alone, "tensor") == []
    gathers = [n for kind, n in exchanges(made[in_parts], "tensor") if kind == "all_gather"]
    assert [n for kind, n in exchanges(made[as_a_whole], "tensor") if kind == "all_gather"] == []
    assert len(gathers) == 4
    assert set(gathers) <= {whole, whole // tensor}
    own = {p.name: p.shape for p in made[in_parts].params if p.num_experts is not None}
    assert own == {p.name: p.shape for p in alone.params if p.num_experts is not None}


def test_where_the_ranks_are() -> None:
    """Experts are over all ranks, tensor-parallel ones too."""
    topology = InnerTopology(16, 1, 8, experts=8, tensor=4)
    assert topology.ring("experts") == Ring(8, 8, 1)
    assert topology.ring("expert shard") == Ring(8, 1, 8)
    assert topology.ring("tensor") == Ring(4, 4, 2)
    assert topology.ring("shard") == Ring(16, 2, 4)
    wide = InnerTopology(8, 2, 8, experts=2, tensor=4, pipeline=2)
    assert wide.ring("experts") == Ring(2, 2, 4)
    assert wide.ring("expert shard") == Ring(32, 4, 2)
    assert wide.ring("pipeline") == Ring(2, 1, 8)


# -- a run -----------------------------------------------------------------------------------------


def apply(model: Any, how: Any, dense: DeviceMesh, experts: DeviceMesh) -> Any:
    """Make a model, or a stage, parallel; ``experts`` has the ranks of all dims of ``dense``."""
    how(model, dense["tp"])
    data_ranks = dense["dp"].size() if how is in_parts else None
    for block in model.blocks:
        block.mixture.mesh = experts["ep"]
        shard_experts(block.mixture.experts, mesh=experts, data_ranks=data_ranks)
        fully_shard(block, mesh=dense["dp"])
    return fully_shard(model, mesh=dense["dp"])


def sharded(how: Any, expert_ranks: int) -> Any:
    """Two tensor-parallel ranks by two data-parallel ones; experts over all four."""
    experts = cached_mesh(4 // expert_ranks, expert_ranks, names=("efsdp", "ep"))
    torch.manual_seed(0)
    return apply(Model(), how, cached_mesh(2, 2, names=("dp", "tp")), experts)


@pytest.mark.parametrize(
    ("expert_ranks", "how"),
    [
        (2, in_parts),
        (4, in_parts),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((1, in_parts), (2, as_a_whole), (4, as_a_whole))
        ),
    ],
)
@distributed(4)
def test_a_run_needs_and_sends_what_was_predicted(expert_ranks: int, how: Any) -> None:
    planned = on_meta()
    how(planned, cached_mesh(2, 2, names=("dp", "tp"))["tp"])
    trace = traced(planned, 2, expert_ranks)
    units = with_experts(units_of(on_meta(), UNITS), EXPERTS)
    setup = make_setup(
        units, 2, experts={(name,) for name in EXPERTS}, expert_ranks=expert_ranks,
        tensor_ranks=2, device_type="cpu",
    )  # fmt: skip
    made = replay(trace, setup)

    model = sharded(how, expert_ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randint(48, (2, LENGTH))
    with Ledger(every_operation=False) as ledger:
        for _ in range(2):
            with CommDebugMode() as mode:
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ledger.every_operation = True
        with counting() as traffic, noting_tokens() as tokens:
            model(x).sum().backward()

    assert tokens == [t.nbytes for t in made.transfers if t.group == "experts"]
    assert bool(tokens) == (expert_ranks > 1)
    counts = {str(k).rpartition(".")[2]: n for k, n in mode.get_comm_counts().items() if n}
    told = [kind for kind, _ in exchanges(trace, "tensor")]
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert told.count(kind) == sum(n for name, n in counts.items() if name.startswith(kind))
    own = [t for t in made.transfers if t.group != "tensor"]
    gathers = [t for t in own if t.kind == "all_gather"]
    reductions = [t for t in own if t.kind == "reduce_scatter"]
    assert ("expert shard" in {t.group for t in gathers}) == (expert_ranks < 4)
    assert traffic.num_gathers == len(gathers)
    assert traffic.gathered == sum(t.sent for t in gathers)
    assert traffic.reduced == pytest.approx(sum(t.sent for t in reductions))
    # On some ranks, others in each run, up to 6 % more. (Why was not found.)
    assert 0.999 <= max(ledger.live_bytes) / made.account.peak.total < 1.08


def loss(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


def of_pipeline(expert_ranks: int) -> tuple[Any, ...]:
    """The second step of a pipeline of two stages, each over two tensor-parallel ranks.

    Returns:
        The rank in the pipeline, its traffic, bytes of its messages, and of its tokens.
    """
    dense = cached_mesh(2, 1, 2, names=("pipeline", "dp", "tp"))
    shape = (2, 2 // expert_ranks, expert_ranks)
    experts = cached_mesh(*shape, names=("pipeline", "efsdp", "ep"))["efsdp", "ep"]
    rank, group = dense.get_local_rank("pipeline"), dense.get_group("pipeline")
    torch.manual_seed(0)
    stage = apply(split(Model(), 2)[rank], in_parts, dense, experts)  # type: ignore[arg-type]
    run = Schedule1F1B(
        PipelineStage(stage, rank, 2, torch.device("cpu"), group=group), MICRO_BATCHES, loss_fn=loss
    )
    tokens = torch.zeros(2 * MICRO_BATCHES, LENGTH, dtype=torch.long)
    given = ((tokens,), {}) if rank == 0 else ((), {"target": tokens})
    for _ in range(2):
        stage.zero_grad()
        with counting() as traffic, noting_messages() as sent, noting_tokens() as exchanged:
            run.step(*given[0], **given[1], return_outputs=False)
    return rank, traffic, sent, exchanged


@pytest.mark.parametrize("expert_ranks", [1, 2])
def test_a_pipeline_sends_what_was_predicted(expert_ranks: int) -> None:
    target = torch.zeros(2 * LENGTH, dtype=torch.long)
    steps = Stages(
        on_meta(), batch(2, LENGTH), "cpu", loss_fn=lambda y: loss(y, target), split_stages=split,
        wrap=[Block], experts=Experts, parallelize=in_parts,
    )  # fmt: skip
    stages = steps.get(2, expert_ranks=expert_ranks, tensor_ranks=2)
    for rank, traffic, sent, exchanged in run_on(4, of_pipeline, expert_ranks):
        stage = stages[rank]
        setup = make_setup(
            stage.units, 1, micro_batches=MICRO_BATCHES, pipeline_ranks=2, tensor_ranks=2,
            device_type="cpu", experts=stage.expert_units, expert_ranks=expert_ranks,
        )  # fmt: skip
        own = [RankStage(rank, stage.trace, setup, stage.split)]
        order = order_of("1F1B", rank, 2, MICRO_BATCHES, 1)
        made = replay_rank(own, order, optimizer=NOTHING)
        assert [t.nbytes for t in made.transfers if t.group == "experts"] == exchanged
        assert bool(exchanged) == (expert_ranks > 1)
        gathers = [t for t in made.transfers if t.kind == "all_gather" and t.group != "tensor"]
        assert {t.group for t in gathers} == ({"expert shard"} if expert_ranks == 1 else set())
        made.transfers[:] = [t for t in made.transfers if t.group != "tensor"]
        assert_same_traffic(made, own, traffic, sent)


# -- predictions -----------------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    "mp_policy": BF16, "experts": "blocks.*.mixture.experts", "parallelize": in_parts,
}  # fmt: skip


def test_degrees_side_by_side() -> None:
    check_degrees_side_by_side("tensor", on_meta(**SIZES), **COMMON)


def test_experts_may_be_over_more_ranks_than_there_are_batches() -> None:
    given: dict[str, Any] = {"tensor_ranks": 4, "expert_ranks": 16, **COMMON}
    made = predict(on_meta(**SIZES), batch(1, 4096), H100, 16, **given)
    assert made.mesh_shape == (4,)
    assert transfers(made, "expert shard") == []  # each rank has experts of its own
    hybrid = predict(on_meta(**SIZES), batch(1, 4096), H100, 16, strategy="hybrid", **given)
    assert [t.nbytes for t in transfers(hybrid, "experts")] == [
        t.nbytes for t in transfers(made, "experts")
    ]


def test_beside_context_and_a_pipeline_too() -> None:
    made = predict(
        on_meta(**SIZES), batch(1, 4096), H100, 64, tensor_ranks=4, context_ranks=2,
        expert_ranks=32, pipeline_ranks=2, micro_batches=4, split_stages=split, **COMMON,
    )  # fmt: skip
    assert (made.mesh_shape, made.num_ranks) == ((8,), 64)
    lanes = {"all-to-all", "tensor parallel", "context parallel", "pipeline"}
    assert lanes <= set(made.step.stream_s)
    [one] = {t.nbytes for t in transfers(made, "experts")}
    assert one == 2 * 512 * 1024 * 2  # choices, positions of a rank, width, bytes


def test_a_plan_chooses_both_and_is_what_predict_says() -> None:
    """Over a network so slow that tokens should stay in their node."""
    slow = replace(H100, network_bandwidth=2e9)
    given: dict[str, Any] = {"tensor_ranks": [1, 2, 4], "expert_ranks": [8, 32], **COMMON}
    made = plan(
        on_meta(**SIZES), batch(1, 4096), slow, 64, checkpoint="none", strategy="full", prefetch=1,
        reshard_after_forward=None, wrap="auto", **given,
    )  # fmt: skip
    assert {o.candidate.tensor_ranks for o in made.outcomes} == {1, 2, 4}
    assert {o.candidate.expert_ranks for o in made.outcomes} == {8, 32}
    table = sweep(on_meta(**SIZES), batch(1, 4096), slow, 64, **given)
    best = max(table.predictions, key=lambda p: p.samples_per_s or 0)
    assert (made.tensor_ranks, made.candidate.expert_ranks) == (
        best.tensor_ranks, best.choices["expert_ranks"],
    )  # fmt: skip
    assert (best.seconds, best.peak_bytes) == (made.chosen.seconds, made.chosen.peak_bytes)
    tried = {(o.candidate.tensor_ranks, o.candidate.expert_ranks) for o in made.outcomes}
    assert tried == {(t, e) for t in (1, 2, 4) for e in (8, 32)}
    told = f"2 modules, over {made.candidate.expert_ranks} ranks"
    for text in ("Tensor parallel", told, f"Experts: over {made.candidate.expert_ranks} ranks"):
        assert text in str(made)


def test_how_a_plan_is_applied() -> None:
    made = plan(
        on_meta(), batch(), H100, 16, tensor_ranks=2, expert_ranks=4, strategy="full", **COMMON
    )
    match = (
        r"parallelize the model over 2 ranks, then call shard_experts .* with a mesh of \(ranks // "
        r"4, 4\) \(and data_ranks=8, if they send parts of a batch\)"
    )
    with pytest.raises(ValueError, match=match):
        made.apply(on_meta(), None)


def parallel_experts(model: Any, mesh: DeviceMesh) -> None:
    in_parts(model, mesh)
    up = model.blocks[1].mixture.experts.up
    model.blocks[1].mixture.experts.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(2)]))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"expert_ranks": 3}, "expert_ranks=3 must divide the number of ranks, 16"),
        ({"tensor_ranks": 3}, "tensor_ranks=3 must divide num_ranks=16"),
        ({"expert_ranks": 16}, "more than the 8 experts"),
        ({"experts": None}, "expert_ranks=4 needs experts="),
        (
            {"parallelize": parallel_experts},
            "'blocks.1.mixture.experts.up' is tensor-parallel, but belongs to experts",
        ),
        (
            {"pipeline_ranks": 4, "split_stages": split, "micro_batches": 8, "expert_ranks": 8},
            "expert_ranks=8 must divide the number of ranks of a stage, 4",
        ),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {**COMMON, "tensor_ranks": 2, "expert_ranks": 4, **options}
    with pytest.raises(ValueError, match=match):
        predict(on_meta(num_blocks=4), batch(), H100, 16, **given)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    path = tmp_path / "experts_in_parts.py"
    path.write_text(
        "import test_predict_expert_tensor as tests\n"
        "model, batch, in_parts = tests.Model, tests.batch, tests.in_parts\n"
    )
    common = (
        f"{path}:model", "--input", f"{path}:batch", "--hardware", "h100", "--json", "--quiet",
        "--world-size", "16", "--experts", "blocks.*.mixture.experts", "--expert-ranks", "4,8",
        "--parallelize", f"{path}:in_parts", "--tensor-ranks", "1,2",
    )  # fmt: skip
    assert main(("predict", *common)) == 0
    data = json.loads(capsys.readouterr().out)
    found = {(p["tensor_ranks"], p["expert_ranks"]) for p in data["predictions"]}
    assert found == {(1, 4), (1, 8), (2, 4), (2, 8)}
    assert main(("plan", *common, "--strategy", "full", "--max-samples", "16")) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["tensor_ranks"], data["num_ranks"]) == (2, 16)
    assert {o["expert_ranks"] for o in data["outcomes"]} == {4, 8}
