"""`predict` for schedules with several stages on a rank, beside runs of torch's own classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from test_predict_pipeline import BF16, Block, Even, Model, even_stages, on_meta, split

from benchmarks.ledger import Ledger
from by_keywords import Stages, make_setup, predict
from fsdp2 import fully_shard
from fsdp2.planning import SimulatedStep, Simulator, find_hardware
from fsdp2.planning.replay.pipeline import RankStage, replay_rank
from fsdp2.planning.replay.replay import Replay
from fsdp2.planning.replay.schedules import (
    SPLIT,
    STAGES_PER_RANK,
    Action,
    actions_of,
    order_of,
    rank_of_stage,
)
from fsdp2.planning.simulation.pipeline_times import (
    RankTimes,
    begins,
    replay_pipeline,
    simulate_pipeline,
)
from fsdp2.planning.trace.events import Gradient
from fsdp2.planning.trace.optimizers import NOTHING
from harness import cached_mesh, distributed
from traffic import Traffic, counting, noting_messages

LOOPED = [name for name, allowed in STAGES_PER_RANK.items() if 2 in allowed]
MICRO_BATCHES = 4


def of_run(schedule: str, reshard: bool) -> tuple[Any, Any, list[int], int]:
    """The second step of a pipeline of four stages over two ranks, each over two shards.

    Returns:
        Its traffic, its live bytes, the bytes of its messages, and the rank in the pipeline.
    """
    mesh = cached_mesh(2, 2, names=("pipeline", "shard"))
    rank = mesh.get_local_rank("pipeline")
    torch.manual_seed(0)
    stages = []
    for number, stage in enumerate(split(Model(width=64, num_blocks=8), 4)):
        if rank_of_stage(schedule, number, 2) == rank:
            for block in stage.blocks:
                fully_shard(block, mesh=mesh["shard"], reshard_after_forward=reshard)
            fully_shard(stage, mesh=mesh["shard"])
            group = mesh.get_group("pipeline")
            stages.append(PipelineStage(stage, number, 4, torch.device("cpu"), group=group))
    kind = getattr(theirs, f"Schedule{schedule}")
    run = kind(
        stages, MICRO_BATCHES, loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())
    )
    tokens = torch.zeros(2 * MICRO_BATCHES, 16, dtype=torch.long)
    given = (tokens,) if any(each.is_first for each in stages) else ()
    target: dict[str, Any] = {}
    if any(each.is_last for each in stages):
        target = {"target": tokens, "losses": []}
    for _ in range(2):
        target.get("losses", []).clear()
        for stage in stages:
            for param in stage.submod.parameters():
                param.grad = None
        with counting() as traffic, Ledger() as ledger, noting_messages() as sent:
            run.step(*given, **target, return_outputs=False)
    return traffic, ledger, sent, rank


def parts_of(schedule: str, reshard: bool) -> list[RankStage]:
    sample = torch.zeros(2, 16, dtype=torch.long, device="meta")
    model = on_meta(width=64, num_blocks=8)
    steps = Stages(
        model, sample, "cpu", split_stages=split, wrap=Block,
        loss_fn=lambda y: F.cross_entropy(y.flatten(0, 1), torch.zeros(32, dtype=torch.long)),
    )  # fmt: skip
    stages = steps.get(4, splits_backward=schedule in SPLIT)
    return [
        RankStage(
            i,
            stage.trace,
            make_setup(
                stage.units, 2, micro_batches=MICRO_BATCHES, pipeline_ranks=2, device_type="cpu",
                reshard_after_forward=reshard,
            ),
            stage.split,
        )
        for i, stage in enumerate(stages)
    ]  # fmt: skip


def assert_same_traffic(
    made: Replay, own: list[RankStage], traffic: Traffic, sent: list[int]
) -> None:
    """Of a rank with the stages ``own``: gathers, reductions, and messages between stages."""
    gathers = [t for t in made.transfers if t.kind == "all_gather"]
    reductions = [t for t in made.transfers if t.kind == "reduce_scatter"]
    assert traffic.num_gathers == len(gathers)
    assert traffic.gathered == sum(t.sent for t in gathers)
    assert traffic.reduced == pytest.approx(sum(t.sent for t in reductions))
    here = {part.number for part in own}
    messages = [
        nbytes
        for part in own
        for nbytes, there in (
            (part.trace.sent_bytes, part.number + 1),
            (part.trace.returned_bytes, part.number - 1),
        )
        if nbytes and there not in here
    ]
    assert sorted(sent) == sorted(messages * MICRO_BATCHES)


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
@pytest.mark.parametrize("schedule", LOOPED)
@distributed(4)
def test_a_run_sends_and_needs_what_was_predicted(schedule: str, reshard: bool) -> None:
    traffic, ledger, sent, rank = of_run(schedule, reshard)
    own = [p for p in parts_of(schedule, reshard) if rank_of_stage(schedule, p.number, 2) == rank]
    order = order_of(schedule, rank, 2, MICRO_BATCHES, 2)
    made = replay_rank(own, order, optimizer=NOTHING)
    assert_same_traffic(made, own, traffic, sent)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        return  # schedules of older torch hold what they receive and send for longer
    # Of the two shards, one holds a little less of what gloo sends.
    most = torch.tensor(max(ledger.live_bytes))
    dist.all_reduce(most, dist.ReduceOp.MAX, group=cached_mesh(
        2, 2, names=("pipeline", "shard"))["shard"].get_group())  # fmt: skip
    assert int(most) == pytest.approx(made.account.peak.total, rel=0.1)


def test_what_is_sent_may_be_freed_at_once() -> None:
    """As schedules do that are not torch's: outputs are the most when all forwards are over."""
    own = [parts_of("LoopedBFS", False)[stage] for stage in (0, 2)]
    order = order_of("LoopedBFS", 0, 2, MICRO_BATCHES, 2)
    held, freed = (
        replay_rank(own, order, optimizer=NOTHING, holds_sent=holds).account.peak
        for holds in (True, False)
    )
    assert held.total - freed.total == 2 * MICRO_BATCHES * own[0].trace.sent_bytes > 0


# -- the order ------------------------------------------------------------------------------------


def told(actions: Any) -> str:
    kinds = {"": "B", "input": "I", "weight": "W"}
    return " ".join(
        f"{a.stage}{'F' if a.is_forward else kinds[a.part]}{a.micro_batch}" for a in actions
    )


def test_the_order_of_zbv() -> None:
    """As in section 6 of arXiv 2401.10241: the first rank has the first and the last stage."""
    assert told(actions_of("ZBVZeroBubble", 0, 2, 4, 2)).startswith("0F0 0F1 0F2 3F0 3I0 3W0 3F1")
    assert [rank_of_stage("ZBVZeroBubble", stage, 2) for stage in range(4)] == [0, 1, 1, 0]
    assert [rank_of_stage("LoopedBFS", stage, 2) for stage in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("schedule", LOOPED)
def test_all_is_computed_once_gathered_before_and_reduced_after(schedule: str) -> None:
    ranks, m = 4, 8
    for rank in range(ranks):
        order = order_of(schedule, rank, ranks, m, 2)
        own = [stage for stage in range(8) if rank_of_stage(schedule, stage, ranks) == rank]
        for stage in own:
            of_stage = [action for action in order if action.stage == stage]
            assert next(a.part for a in of_stage if not a.computes) == "unshard"
            assert [a.part for a in of_stage].count("reduce") == 1
            last = max(i for i, a in enumerate(of_stage) if a.computes)
            assert [a.part for a in of_stage].index("reduce") > last
            for number in range(m):
                parts = [a.part for a in of_stage if a.micro_batch == number and not a.is_forward]
                assert parts in ([""], ["input", "weight"])
                assert sum(a.is_forward for a in of_stage if a.micro_batch == number) == 1


# -- the time --------------------------------------------------------------------------------------


def makespan(schedule: str, ranks: int, m: int, forward: float, inputs: float) -> float:
    """Of stages whose gradients of weights take as long as those of inputs."""
    seconds = {"": 2 * inputs, "input": inputs, "weight": inputs}
    times = []
    for rank in range(ranks):
        actions = actions_of(schedule, rank, ranks, m, 2)
        spent = [forward if a.is_forward else seconds[a.part] for a in actions]
        times.append(RankTimes(actions, spent))
    found = begins(times, [(0.0, 0.0)] * 2 * ranks)
    return max(b[-1] + t.durations[-1] for b, t in zip(found, times, strict=True))


def test_gradients_of_weights_fill_the_bubble() -> None:
    """With forwards that take as long as each part of a backward, what is left of the bubble is
    that the last rank waits for the first micro-batch."""
    ranks, m = 4, 16
    work = 2 * m * 3.0
    looped = makespan("Interleaved1F1B", ranks, m, 1.0, 1.0)
    assert looped == pytest.approx(work + 3.0 * (ranks - 1))
    split_apart = makespan("InterleavedZeroBubble", ranks, m, 1.0, 1.0)
    v_shaped = makespan("ZBVZeroBubble", ranks, m, 1.0, 1.0)
    assert split_apart == v_shaped == pytest.approx(work + ranks - 1)


def ends_together(replays: list[Replay], alone: list[SimulatedStep], sends_s: float) -> float:
    """When the last of all launches of all ranks ends, each as soon as it can.

    What an action launches waits for the action of the other stage that it needs. That takes
    ``sends_s``; the parts of an action take what they take on a rank alone.
    """
    computed: dict[Action, float] = {}
    ends: list[list[float]] = [[] for _ in replays]
    free: list[dict[str, float]] = [{} for _ in replays]
    done = [0] * len(replays)

    def launch(rank: int, until: int, come: float) -> float:
        """Up to number ``until``, after ``come``; returns when its compute has ended."""
        last = come
        for i in range(len(ends[rank]), until):
            each, span = alone[rank].launches[i], alone[rank].spans[i]
            begin = max(
                come, free[rank].get(each.stream, 0.0), *(ends[rank][j] for j in each.after)
            )
            ends[rank].append(begin + span.end - span.begin)
            free[rank][each.stream] = ends[rank][-1]
            last = ends[rank][-1] if each.stream == "compute" else last
        return last

    num_stages = 1 + max(a.stage for each in replays for a in each.actions)
    while any(n < len(each.actions) for n, each in zip(done, replays, strict=True)):
        for rank, each in enumerate(replays):
            if done[rank] == len(each.actions):
                continue
            action = each.actions[done[rank]]
            other = action.stage + (-1 if action.is_forward else 1)
            needed = action._replace(stage=other)
            if 0 <= other < num_stages and needed not in computed:
                continue
            launch(rank, each.starts[done[rank]], 0.0)
            come = computed[needed] + sends_s if 0 <= other < num_stages else 0.0
            computed[action] = launch(rank, each.ends[done[rank]], come)
            done[rank] += 1
    for rank, step in enumerate(alone):
        launch(rank, len(step.launches), 0.0)
    return max(map(max, ends))


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS"])
def test_gathers_and_reductions_go_on_while_a_rank_waits(schedule: str) -> None:
    """Of stages whose gathers take as long as a few micro-batches: what all launches of all ranks
    together come to."""
    even = replace(find_hardware("h100"), jitter=0.0, launch_s=0.0, call_host_s=0.0)
    sample = torch.empty(1, 4096, 4096, device="meta", requires_grad=True)
    model = on_meta(Even, width=4096, num_blocks=16)
    steps = Stages(model, sample, split_stages=even_stages, mp_policy=BF16)
    parts = [
        RankStage(
            i,
            stage.trace,
            make_setup(stage.units, 16, mp_policy=BF16, pipeline_ranks=4, micro_batches=8),
        )
        for i, stage in enumerate(steps.get(16))
    ]
    simulator = Simulator(even, None)
    replays = replay_pipeline(simulator, parts, schedule)
    alone = [simulator.time_stages(each) for each in replays]
    made = simulate_pipeline(simulator, parts, schedule, replays)
    sends_s = simulator.send_s(parts[1].trace.sent_bytes, parts[1].setup)
    together = ends_together(replays, alone, sends_s)
    assert together > 1.1 * max(step.seconds for step in alone)  # they wait
    assert made[0].seconds == pytest.approx(together, rel=1e-3)


# -- predictions -----------------------------------------------------------------------------------

SIZES = {"width": 1024, "num_blocks": 8, "vocabulary": 32000}


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_split_backward_computes_the_same(mode: str) -> None:
    """The FLOPs of its parts are those of the whole, but for what is recomputed for each part."""
    sample = torch.zeros(1, 256, dtype=torch.long, device="meta")
    steps = Stages(on_meta(**SIZES), sample, split_stages=split, mp_policy=BF16)
    for stage in steps.get(4, activation_checkpointing=mode, splits_backward=True):
        assert stage.split is not None
        if mode == "none":
            assert stage.split.flops == stage.trace.flops
        assert stage.split.flops >= stage.trace.flops
        assert stage.split.returned_bytes == stage.trace.returned_bytes
        grads = [sorted((g.param, g.nbytes) for g in t.events if isinstance(g, Gradient))
                 for t in (stage.trace, stage.split)]  # fmt: skip
        assert grads[0] == grads[1]


def predicted(schedule: str, **options: Any) -> Any:
    several = 2 if 2 in STAGES_PER_RANK[schedule] else 1
    return predict(
        on_meta(**SIZES), torch.zeros(1, 2048, dtype=torch.long, device="meta"),
        find_hardware("h100"), 16, **{
            "pipeline_ranks": 4, "stages_per_rank": several, "schedule": schedule,
            "micro_batches": 8, "split_stages": split, "mp_policy": BF16, **options,
        },
    )  # fmt: skip


def test_all_schedules_side_by_side() -> None:
    made = {schedule: predicted(schedule) for schedule in STAGES_PER_RANK}
    assert made["LoopedBFS"].peak_bytes > made["Interleaved1F1B"].peak_bytes
    for schedule in SPLIT:
        assert made[schedule].step.flops == made["Interleaved1F1B"].step.flops or (
            schedule != "InterleavedZeroBubble"  # V-shaped ones have other stages on a rank
        )
        assert 0 < made[schedule].bubble_s < made[schedule].seconds
    assert len({each.choices["schedule"] for each in made.values()}) == len(made)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"schedule": "ZBVZeroBubble", "stages_per_rank": 1}, "has two stages on each rank"),
        ({"schedule": "DualPipeV", "micro_batches": 4}, "as many micro_batches as stages, 8"),
        ({"schedule": "InterleavedZeroBubble", "micro_batches": 9}, "choose a multiple of 4"),
        ({"schedule": "ZBVZeroBubble", "compiled": True}, "splits backwards, and a compiled"),
    ],
)
def test_what_torch_refuses(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        predicted(**options)
