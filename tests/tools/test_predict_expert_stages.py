"""Experts on a mesh of their own in the stages of a pipeline: `predict`, and runs over gloo."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from test_predict_experts import Experts
from test_predict_pipeline import Block as Dense
from test_predict_pipeline import Stage, batch, split
from test_predict_schedules import MICRO_BATCHES, assert_same_traffic

from benchmarks.ledger import Ledger
from by_keywords import Stages, make_setup, predict, sweep
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.cli.main import main
from fsdp2.experts import TokenExchange, shard_experts
from fsdp2.planning import find_hardware
from fsdp2.planning.replay.device import Collective
from fsdp2.planning.replay.pipeline import RankStage, replay_rank
from fsdp2.planning.replay.schedules import SPLIT, order_of, rank_of_stage
from fsdp2.planning.trace.events import ModelExchange, StartOfBackward, StartOfWeights
from fsdp2.planning.trace.expert_units import InnerTopology
from fsdp2.planning.trace.optimizers import NOTHING
from fsdp2.planning.traces import TracedStage
from fsdp2.transports.host.topology import Ring
from harness import cached_mesh, distributed
from traffic import counting, noting_messages, noting_tokens

H100 = find_hardware("h100")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Mixture(nn.Module):
    """A dense layer, then experts; token t goes to experts t and t + 1, with learned weights."""

    def __init__(self, width: int, num_experts: int = 8) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.mesh: DeviceMesh | None = None
        self.dense = nn.Linear(width, width)
        self.gate = nn.Linear(width, 2)
        self.experts = Experts(num_experts, width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.tanh(self.dense(x)).flatten(0, 1)
        first = torch.arange(len(flat), device=x.device) % self.num_experts
        ids = torch.stack([first, (first + 1) % self.num_experts], 1)
        exchange = TokenExchange(ids, self.num_experts, self.mesh)
        rows = self.experts(exchange.dispatch(flat), exchange.counts)
        return x + exchange.combine(rows, torch.sigmoid(self.gate(flat))).view_as(x)


class Words(nn.Module):
    """Token ids to logits of as many words, through ``blocks``."""

    def __init__(self, width: int, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Model(Words):
    """Dense blocks, then those with experts, as in DeepSeek-V3."""

    def __init__(
        self, num_blocks: int = 4, num_dense: int = 1, width: int = 64, num_experts: int = 8
    ) -> None:
        kinds = (i < num_dense for i in range(num_blocks))
        super().__init__(
            width, (Dense(width) if dense else Mixture(width, num_experts) for dense in kinds)
        )


def on_meta(**sizes: Any) -> Model:
    with torch.device("meta"):
        return Model(**sizes)


def steps_of(model: Any = None, **options: Any) -> Stages:
    given = {"split_stages": split, "wrap": [Dense, Mixture], "experts": Experts, **options}
    return Stages(model or on_meta(), batch(), **given)


def stages_over(
    steps: Stages, num_stages: int, expert_ranks: int, *, splits_backward: bool = False
) -> list[TracedStage]:
    return steps.get(num_stages, expert_ranks=expert_ranks, splits_backward=splits_backward)


# -- stages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [Experts, "class:Experts", "blocks.*.experts", ["*.*.experts"]])
def test_a_rank_has_its_experts_of_its_stages(experts: Any) -> None:
    """The first stage is dense; the others have two blocks with experts each."""
    steps = steps_of(on_meta(num_blocks=6, num_dense=2), experts=experts)
    stages = stages_over(steps, 3, 4)
    local = [[p.shape[0] for p in s.trace.params if p.num_experts is not None] for s in stages]
    assert local == [[], [2] * 4, [2] * 4]
    whole = sum(p.numel() for p in on_meta(num_blocks=6, num_dense=2).parameters())
    assert sum(p.numel_of_all_experts for s in stages for p in s.trace.params) == whole
    own = {("blocks.0.experts",), ("blocks.1.experts",)}
    assert [stage.expert_units for stage in stages] == [frozenset(), own, own]
    assert [own <= {unit.modules for unit in s.units} for s in stages] == [False, True, True]
    # Dispatch and combine, forward and backward, in each of two blocks.
    assert [sum(isinstance(e, ModelExchange) for e in s.trace.events) for s in stages] == [0, 8, 8]
    # The dense stage is the same, over however many ranks experts are.
    assert stages_over(steps, 3, 2)[0].trace is stages[0].trace
    assert steps.num_traced == 5


def test_stages_made_of_copies_have_the_same_experts() -> None:
    """As those of a script that copies the model, and drops what a stage has not."""

    def copied(model: Model, num_stages: int) -> list[Stage]:
        return [split(copy.deepcopy(model), num_stages)[i] for i in range(num_stages)]  # type: ignore[arg-type]

    stages = [stages_over(steps_of(split_stages=each), 2, 2) for each in (split, copied)]
    told = [[(s.units, s.expert_units, s.trace.flops) for s in each] for each in stages]
    assert told[0] == told[1]


def exchanges(events: Any) -> list[int]:
    return [event.nbytes for event in events if isinstance(event, ModelExchange)]


def test_a_split_backward_exchanges_tokens_with_the_gradients_of_inputs() -> None:
    """Those that come later, of weights, need none; but for the first stage, which computes all of
    them then."""
    for i, stage in enumerate(stages_over(steps_of(), 2, 2, splits_backward=True)):
        assert stage.split is not None
        events = stage.split.events
        kinds = [type(event) for event in events]
        middle, weights = kinds.index(StartOfBackward), kinds.index(StartOfWeights)
        parts = [exchanges(events[middle:weights]), exchanges(events[weights:])]
        sent = exchanges(events[:middle])
        assert sent
        assert parts == ([sent, []] if i else [[], sent])


def test_where_the_ranks_are() -> None:
    """Of a stage, which is on nodes of its own or on a part of one."""
    topology = InnerTopology(64, 1, 8, experts=16, pipeline=4)
    assert topology.ring("experts") == Ring(16, 8, 1)
    assert topology.ring("expert shard") == Ring(4, 1, 8)
    assert topology.ring("pipeline") == Ring(4, 1, 8)
    assert topology.ring("shard") == Ring(64, 8, 1)
    inside = InnerTopology(8, 1, 8, experts=4, pipeline=4)
    assert inside.ring("experts") == Ring(4, 4, 2)
    assert inside.ring("expert shard") == Ring(2, 2, 4)
    assert inside.ring("pipeline") == Ring(4, 1, 8)
    halves = InnerTopology(4, 1, 8, experts=4, pipeline=2)
    assert halves.ring("experts") == Ring(4, 4, 1)
    assert halves.ring("pipeline") == Ring(2, 2, 4)


# -- a run -----------------------------------------------------------------------------------------

LOOPED = {"Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2}


def sharded(stage: Any, expert_ranks: int, reshard: bool) -> Any:
    """Experts over the ranks of a stage, (efsdp, ep), and all else over the same ranks."""
    shape = (2, 2 // expert_ranks, expert_ranks)
    mesh = cached_mesh(*shape, names=("pipeline", "efsdp", "ep"))["efsdp", "ep"]
    data = cached_mesh(2, 2, names=("pipeline", "shard"))["shard"]
    for block in stage.blocks:
        if isinstance(block, Mixture):
            block.mesh = mesh["ep"]
            shard_experts(block.experts, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(block, mesh=data, reshard_after_forward=reshard)
    return fully_shard(stage, mesh=data)


def loss(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


def of_run(schedule: str, expert_ranks: int, reshard: bool) -> tuple[Any, ...]:
    """The second step of a pipeline over two ranks, of one or two stages each, by two shards.

    Returns:
        Its traffic, its live bytes, the bytes of its messages and of its exchanges of tokens, the
        moment at which reductions begin (not of looped schedules), and the rank in the pipeline.
    """
    mesh = cached_mesh(2, 2, names=("pipeline", "shard"))
    rank, group = mesh.get_local_rank("pipeline"), mesh.get_group("pipeline")
    num_stages = 2 * LOOPED.get(schedule, 1)
    torch.manual_seed(0)
    stages = [
        PipelineStage(
            sharded(stage, expert_ranks, reshard), number, num_stages, torch.device("cpu"),
            group=group,
        )
        for number, stage in enumerate(split(Model(), num_stages))  # type: ignore[arg-type]
        if rank_of_stage(schedule, number, 2) == rank
    ]  # fmt: skip
    kind = getattr(theirs, f"Schedule{schedule}")
    run = kind(stages if schedule in LOOPED else stages[0], MICRO_BATCHES, loss_fn=loss)
    tokens = torch.zeros(2 * MICRO_BATCHES, 16, dtype=torch.long)
    given = (tokens,) if any(each.is_first for each in stages) else ()
    target: dict[str, Any] = {}
    if any(each.is_last for each in stages):
        target = {"target": tokens, "losses": []}
    moments: list[int] = []
    reduce = stages[-1].perform_reduce_grad

    def reducing(*args: Any) -> None:
        moments.append(ledger.now)
        reduce(*args)

    stages[-1].perform_reduce_grad = reducing  # type: ignore[method-assign]
    for _ in range(2):
        target.get("losses", []).clear()
        for stage in stages:
            for param in stage.submod.parameters():
                param.grad = None
        with (
            counting() as traffic,
            Ledger() as ledger,
            noting_messages() as sent,
            noting_tokens() as exchanged,
        ):
            run.step(*given, **target, return_outputs=False)
    return traffic, ledger, sent, exchanged, moments[-1:], rank


def replayed(
    schedule: str, expert_ranks: int, reshard: bool, rank: int
) -> tuple[Any, list[RankStage]]:
    """The same, as `predict` replays it; and the stages of the rank."""
    num_stages = 2 * LOOPED.get(schedule, 1)
    target = torch.zeros(32, dtype=torch.long)
    steps = steps_of(device_type="cpu", loss_fn=lambda y: loss(y, target))
    stages = stages_over(steps, num_stages, expert_ranks, splits_backward=schedule in SPLIT)
    own = []
    for number, stage in enumerate(stages):
        setup = make_setup(
            stage.units, 2, micro_batches=MICRO_BATCHES, pipeline_ranks=2, device_type="cpu",
            reshard_after_forward=reshard, experts=stage.expert_units, expert_ranks=expert_ranks,
        )  # fmt: skip
        if rank_of_stage(schedule, number, 2) == rank:
            own.append(RankStage(number, stage.trace, setup, stage.split))
    order = order_of(schedule, rank, 2, MICRO_BATCHES, LOOPED.get(schedule, 1))
    late = schedule == "GPipe"
    return replay_rank(own, order, optimizer=NOTHING, sends_late=late), own


@pytest.mark.parametrize(
    ("schedule", "expert_ranks", "reshard"),
    [
        ("1F1B", 2, True),
        ("1F1B", 1, True),
        ("InterleavedZeroBubble", 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("1F1B", 2, False),
                ("1F1B", 1, False),
                ("GPipe", 2, False),
                ("GPipe", 2, True),
                ("Interleaved1F1B", 2, True),
                ("InterleavedZeroBubble", 1, False),
                ("ZBVZeroBubble", 2, True),
                ("ZBVZeroBubble", 1, True),
            )
        ),
    ],
)
@distributed(4)
def test_a_run_needs_and_sends_what_was_predicted(
    schedule: str, expert_ranks: int, reshard: bool
) -> None:
    traffic, ledger, sent, exchanged, moments, rank = of_run(schedule, expert_ranks, reshard)
    made, own = replayed(schedule, expert_ranks, reshard, rank)
    assert [t.nbytes for t in made.transfers if t.group == "experts"] == exchanged
    assert bool(exchanged) == (expert_ranks > 1)
    gathered_over = {t.group for t in made.transfers if t.kind == "all_gather"}
    assert gathered_over == {"shard", *(["expert shard"] * (expert_ranks < 2))}
    assert_same_traffic(made, own, traffic, sent)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        return  # schedules of older torch hold what they receive and send for longer
    if schedule in LOOPED:  # of the two shards, one holds a little less of what gloo sends
        most = torch.tensor(max(ledger.live_bytes))
        group = cached_mesh(2, 2, names=("pipeline", "shard")).get_group("shard")
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        assert int(most) == pytest.approx(made.account.peak.total, rel=0.1)
        return
    peaks = made.account.peaks
    before = max(peaks[phase].total for phase in ("forward", "backward"))
    [reducing] = moments
    assert max(ledger.live_bytes[:reducing]) == pytest.approx(before, rel=0.03)
    # While gradients are reduced, messages may come earlier or later.
    assert max(ledger.live_bytes) <= 1.03 * made.account.peak.total


# -- predictions -----------------------------------------------------------------------------------

SIZES = {"width": 512, "num_blocks": 8, "num_experts": 32}


def predicted(**options: Any) -> Any:
    given: dict[str, Any] = {
        "pipeline_ranks": 4, "micro_batches": 8, "split_stages": split, "mp_policy": BF16,
        "experts": Experts, "expert_ranks": 8, **options,
    }  # fmt: skip
    ranks = given.pop("num_ranks", 64)
    return predict(given.pop("model", on_meta(**SIZES)), batch(1, 2048), H100, ranks, **given)


def transfers(made: Any, group: str | None = None) -> list[Collective]:
    """The collectives of a predicted step: all of them, or those of a group."""
    found = [launch.work for launch in made.step.launches if isinstance(launch.work, Collective)]
    return [work for work in found if group in (None, work.group)]


def test_degrees_side_by_side() -> None:
    made = sweep(
        on_meta(**SIZES), batch(1, 2048), H100, 64, pipeline_ranks=[1, 4], expert_ranks=[1, 8, 16],
        micro_batches=8, split_stages=split, mp_policy=BF16, experts="blocks.*.experts",
    )  # fmt: skip
    assert not made.failed
    table = {(p.pipeline_ranks, p.choices["expert_ranks"]): p for p in made.predictions}
    local, node, wide = (table[4, ranks] for ranks in (1, 8, 16))
    assert node.mesh_shape == (16,)
    assert len(node.stages) == 4
    # Gathers of experts cost more than exchanges of tokens, and these more between nodes.
    assert "all-to-all" not in local.step.stream_s
    assert 0 < node.step.stream_s["all-to-all"] < wide.step.stream_s["all-to-all"]
    assert local.step.stream_s["all-gather"] > node.step.stream_s["all-gather"]
    groups = [{t.group for t in transfers(p)} for p in (local, node, wide)]
    assert groups[1] == {"shard", "experts", "expert shard"}
    assert groups[2] == {"shard", "experts"}  # 16 ranks of a stage, one mesh dim of 1
    assert "Tokens are taken to be spread evenly over experts (TokenExchange)" in str(made)
    assert {"Pipeline ranks", "Expert ranks"} <= set(re.split(r"\s{2,}", str(made).split("\n")[0]))
    data = json.loads(json.dumps(node.to_dict()))
    assert (data["pipeline_ranks"], data["expert_ranks"], data["num_ranks"]) == (4, 8, 64)
    for fact in ("Expert ranks           8", "Pipeline ranks         4", "all-to-all"):
        assert fact in str(node)


def test_larger_shards_are_not_of_experts() -> None:
    """They would be over another number of ranks; whatever the stages call the modules."""
    made = predicted(
        reshard_after_forward=4, expert_ranks=2, pipeline_ranks=2, num_ranks=32,
        split_stages=renamed,
    )  # fmt: skip
    of = {t.group: {each.unit for each in transfers(made) if each.group == t.group}
          for t in transfers(made)}  # fmt: skip
    assert of["secondary"]
    assert of["expert shard"]
    assert not of["secondary"] & of["expert shard"]


def test_padding_is_that_of_all_stages_of_the_fullest_rank() -> None:
    """Each rank has a dense stage, and one whose three experts are over two ranks."""
    made = predicted(
        model=on_meta(width=512, num_dense=2, num_experts=6), expert_ranks=2, pipeline_ranks=2,
        schedule="Interleaved1F1B", stages_per_rank=2, micro_batches=4, num_ranks=8,
    )  # fmt: skip
    assert made.padding is not None
    assert made.padding.worst[1:] == (3, 2)
    assert 1 < made.padding.factor < 4 / 3


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", *LOOPED])
def test_all_schedules_exchange_the_same_tokens(schedule: str) -> None:
    """A rank sends those of its stages, in each micro-batch, forward and backward."""
    made = predicted(schedule=schedule, stages_per_rank=LOOPED.get(schedule, 1), pipeline_ranks=2,
                     num_ranks=32, model=on_meta(**SIZES, num_dense=0))  # fmt: skip
    sent = [t.nbytes for t in transfers(made) if t.group == "experts"]
    assert len(sent) == 4 * 4 * 8  # dispatch and combine, blocks of half a model, micro-batches
    assert set(sent) == {2 * 2048 * 512 * 2}


def test_the_picture_has_a_lane_for_tokens(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    predicted(model=on_meta(**SIZES, num_dense=0)).picture(tmp_path / "step.svg")
    assert "all-to-all" in (tmp_path / "step.svg").read_text()


class Renamed(nn.Module):
    """A stage that calls its blocks something else."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.inner = stage

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def renamed(model: Any, num_stages: int) -> list[nn.Module]:
    return [Renamed(stage) for stage in split(model, num_stages)]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"expert_ranks": 32}, "expert_ranks=32 must divide the number of ranks of a stage, 16"),
        ({"expert_ranks": 3}, "expert_ranks=3 must divide the number of ranks of a stage, 16"),
        ({"expert_ranks": 64}, "more than the 32 experts"),
        ({"expert_ranks": 0}, "expert_ranks must be at least 1"),
        ({"experts": None}, "expert_ranks=8 needs experts="),
        ({"experts": "blocks.*.expert"}, "did you mean"),
        (
            {"experts": "blocks.*.experts", "split_stages": renamed},
            r"The experts of all stages have 0 elements of parameters, the model's experts "
            r"234,881,024, without 'blocks.1.experts.up': experts= must name the same modules in "
            "the stages",
        ),
        # Names of the model, of which each of the four stages has the first two.
        (
            {"experts": [f"blocks.{i}.experts" for i in (2, 3)]},
            r"have 0 elements .* without 'blocks.2.experts.up'",
        ),
        (
            {"experts": "blocks.1.experts"},
            r"the model's experts 33,554,432, with 'blocks.3.experts.up'",
        ),
        ({"max_device_bytes": 0}, "max_device_bytes"),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        predicted(**options)


def test_stages_with_other_names_take_a_class() -> None:
    made = predicted(split_stages=renamed)
    assert made.step.flops == predicted().step.flops
    assert made.stages[1]["peak_bytes"] == predicted().stages[1]["peak_bytes"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    path = tmp_path / "mixtures.py"
    path.write_text(
        "import test_predict_expert_stages as tests\n"
        "model, batch, split = tests.Model, tests.batch, tests.split\n"
    )
    code = main(
        ("predict", f"{path}:model", "--input", f"{path}:batch", "--hardware", "h100", "--json",
         "--quiet", "--world-size", "16", "--pipeline-ranks", "2,4", "--split-stages",
         f"{path}:split", "--micro-batches", "4", "--experts", "blocks.*.experts",
         "--expert-ranks", "2,8", "--wrap", "class:Block,Mixture,Embedding")
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    data = json.loads(out)
    found = [(p["pipeline_ranks"], p["expert_ranks"]) for p in data["predictions"]]
    assert found == [(2, 2), (4, 2), (2, 8)]
    [failed] = data["failed"]
    assert failed["why"].startswith("expert_ranks=8 must divide the number of ranks of a stage, 4")
    # Classes that one stage has, and another has not.
    with torch.device("meta"):
        same = predict(
            Model(), batch(), H100, 16, pipeline_ranks=2, split_stages=split, micro_batches=4,
            experts=Experts, expert_ranks=2, wrap=[Dense, Mixture, nn.Embedding],
        )  # fmt: skip
    assert data["predictions"][0]["step_s"] == same.seconds
