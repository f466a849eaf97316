"""`predict` for pipelines: schedules, stages, what they send, and the memory of each rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from benchmarks.ledger import Ledger
from by_keywords import Stages, make_setup, predict, sweep
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp2.cli.main import main
from fsdp2.planning import Hardware, Prediction, StateOffload, find_hardware
from fsdp2.planning.replay.pipeline import RankStage, replay_rank
from fsdp2.planning.replay.schedules import Action, actions_of
from fsdp2.planning.simulation.pipeline_times import RankTimes, begins
from fsdp2.planning.trace.events import Compute, StartOfBackward
from fsdp2.planning.trace.expert_units import InnerTopology
from fsdp2.planning.trace.optimizers import NOTHING
from fsdp2.transports.host.topology import Ring
from harness import cached_mesh, distributed
from traffic import counting, noting_messages

H100 = find_hardware("h100")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 32, num_blocks: int = 4, vocabulary: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stage(nn.Module):
    def __init__(self, model: Model, index: int, num_stages: int) -> None:
        super().__init__()
        count = len(model.blocks) // num_stages
        self.first = model.embedding if index == 0 else None
        self.blocks = model.blocks[index * count : (index + 1) * count]
        self.last = model.head if index == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is not None:
            x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x if self.last is None else self.last(x)


def split(model: Model, num_stages: int) -> list[Stage]:
    return [Stage(model, i, num_stages) for i in range(num_stages)]


class Even(nn.Module):
    """Blocks alone: all stages are alike."""

    def __init__(self, width: int = 64, num_blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def even_stages(model: Even, num_stages: int) -> list[nn.Module]:
    count = len(model.blocks) // num_stages
    return [nn.Sequential(*model.blocks[i * count : (i + 1) * count]) for i in range(num_stages)]


def batch(samples: int = 2, length: int = 16) -> Tensor:
    return torch.zeros(samples, length, dtype=torch.long, device="meta")


def on_meta(make: Any = Model, **sizes: Any) -> Any:
    with torch.device("meta"):
        return make(**sizes)


# -- the order -------------------------------------------------------------------------------------


def told(actions: list[Action]) -> list[str]:
    return [f"{a.stage}{'BF'[a.is_forward]}{a.micro_batch}" for a in actions]


def test_the_order_of_1f1b_and_gpipe() -> None:
    orders = [" ".join(told(actions_of("1F1B", rank, 3, 4))) for rank in range(3)]
    assert orders == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert told(actions_of("GPipe", 1, 2, 2)) == ["1F0", "1F1", "1B0", "1B1"]


# -- the time ------------------------------------------------------------------------------------


def makespan(schedule: str, ranks: int, m: int, stages: int = 1, **options: Any) -> float:
    """Of stages that take 2 forward and 4 backward in all, on each rank."""
    forward, backward = 2 / stages, 4 / stages
    times = []
    for rank in range(ranks):
        actions = actions_of(schedule, rank, ranks, m, stages)
        times.append(RankTimes(actions, [forward if a.is_forward else backward for a in actions]))
    sends = options.pop("sends", [(0.0, 0.0)] * ranks * stages)
    found = begins(times, sends, **options)
    return max(b[-1] + t.durations[-1] for b, t in zip(found, times, strict=True))


@pytest.mark.parametrize(("ranks", "m"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8)])
def test_the_bubble_of_equal_stages(ranks: int, m: int) -> None:
    """(p - 1) of m + p - 1 micro-batches; a part of it with several stages on each rank."""
    for schedule in ("1F1B", "GPipe"):
        assert makespan(schedule, ranks, m) == pytest.approx(6 * (m + ranks - 1))
        slow = makespan(schedule, ranks, m, waits_for_sends=True)
        assert slow == pytest.approx(6 * (m + ranks - 1))
    for stages in (2, 4):
        looped = makespan("Interleaved1F1B", ranks, m, stages)
        assert looped == pytest.approx(6 * m + 6 * (ranks - 1) / stages)


def test_links_delay_the_next_stage() -> None:
    # The first micro-batch goes through all links, and its gradient comes back through them.
    free = makespan("GPipe", 4, 8)
    assert makespan("GPipe", 4, 8, sends=[(0.5, 0.25)] * 4) == pytest.approx(free + 3 * 0.75)
    # 1F1B sends before it goes on, in each of its steady rounds.
    waiting = makespan("1F1B", 4, 8, sends=[(0.5, 0.25)] * 4, waits_for_sends=True)
    assert waiting > makespan("1F1B", 4, 8, sends=[(0.5, 0.25)] * 4) > free


def test_ranks_that_wait_for_each_other() -> None:
    wrong = RankTimes([Action(0, 0, False), Action(0, 0, True)], [1.0, 1.0])
    with pytest.raises(ValueError, match="wait for each other"):
        begins([wrong], [(0.0, 0.0)])


EVEN: dict[str, Any] = {"split_stages": even_stages, "optimizer": None, "mp_policy": BF16}


def free_links() -> Hardware:
    from dataclasses import replace

    return replace(
        H100, node_bandwidth=1e18, network_bandwidth=1e18, node_latency_s=1e-12,
        network_latency_s=1e-12, call_latency_s=1e-12, jitter=0.0, launch_s=0.0, call_host_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)]
)
def test_the_predicted_bubble(schedule: str, stages: int) -> None:
    """Of equal stages on free links, one rank each: what the formula says."""
    x = torch.empty(64, 512, 512, device="meta", requires_grad=True)
    made = predict(
        on_meta(Even, width=512), x, free_links(), 4, pipeline_ranks=4, micro_batches=8,
        schedule=schedule, stages_per_rank=stages, **EVEN,
    )  # fmt: skip
    assert (made.mesh_shape, made.num_ranks) == ((1,), 4)
    share = 3 / stages / (8 + 3 / stages)
    assert made.bubble_s / made.seconds == pytest.approx(share, rel=0.06)
    assert f"({100 * made.bubble_s / made.seconds:.0f} % of the step)" in str(made)
    alone = predict(on_meta(Even, width=512), x, free_links(), 1, micro_batches=8, **EVEN)
    assert made.step.flops * 4 == pytest.approx(alone.step.flops, rel=0.05)
    assert made.samples_per_s == pytest.approx(64 * 8 / made.seconds)


# -- stages ----------------------------------------------------------------------------------------


def staged(
    num_stages: int, model: Any = None, how: Any = split, wrap: Any = "auto", **options: Any
) -> Any:
    steps = Stages(
        model or on_meta(), options.pop("sample", batch()), split_stages=how, wrap=wrap,
        **{"mp_policy": BF16, **options},
    )  # fmt: skip
    return steps.get(num_stages), steps


def test_stages_are_parts_of_the_model() -> None:
    [whole], _ = staged(1)
    four, steps = staged(4)
    assert sum(stage.trace.flops for stage in four) == whole.trace.flops
    numels = [sum(p.numel for p in stage.trace.params) for stage in four]
    assert sum(numels) == sum(p.numel for p in whole.trace.params)
    between = 2 * 16 * 32 * 2  # bytes in bfloat16
    assert [s.trace.sent_bytes for s in four] == [between] * 3 + [0]
    assert [s.trace.returned_bytes for s in four] == [0] + [between] * 3
    assert steps.num_traced == 3  # those in the middle are alike
    # A block alone is a unit, too.
    assert [len(stage.units) for stage in four][1:3] == [2, 2]
    assert len(whole.units) == 7


@pytest.mark.parametrize("wrap", [[Block, nn.Embedding], "class:Block,Embedding", "blocks.*"])
def test_units_of_stages(wrap: Any) -> None:
    """Classes and names that some stages do not have; the rest belongs to the root."""
    stages, _ = staged(4, wrap=wrap)
    found = [[unit.modules for unit in stage.units] for stage in stages]
    first = [("first",)] if wrap != "blocks.*" else []
    assert sorted(found[0]) == sorted([*first, ("blocks.0",), ("",)])
    assert found[1:] == [[("blocks.0",), ("",)]] * 3
    with pytest.raises(ValueError, match=r"wrap='head' is no module of any stage"):
        staged(4, wrap=[Block, "head"])


def test_stages_that_differ_are_traced_apart() -> None:
    model = on_meta(num_blocks=8)
    model.blocks[3].scale = 2.0
    _, steps = staged(4, model)
    assert steps.num_traced == 4


def forward_of(trace: Any) -> list[Any]:
    events = trace.events
    return events[: next(i for i, e in enumerate(events) if isinstance(e, StartOfBackward))]


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_micro_batches_in_flight(schedule: str) -> None:
    """Rank r of p holds the activations of p - r micro-batches in 1F1B, and of all in GPipe."""
    four, _ = staged(4, on_meta(Even), even_stages, sample=torch.empty(4, 64, 64, device="meta"))
    m = 8
    for rank, stage in enumerate(four[:3]):
        setup = make_setup(stage.units, 1, micro_batches=m, pipeline_ranks=4, mp_policy=BF16)
        actions = actions_of(schedule, rank, 4, m)
        [before, after] = [
            replay_rank([RankStage(rank, stage.trace, setup)], acts, optimizer=NOTHING)
            for acts in ([Action(rank, 0, True), Action(rank, 0, False)], actions)
        ]
        in_flight = 4 - rank if schedule == "1F1B" else m
        kept = sum(e.net for e in forward_of(stage.trace) if isinstance(e, Compute))
        assert kept > 4 * 64 * 64 * 2  # at least one activation
        one = before.account.peaks["forward"].parts["activations"]
        held = after.account.peaks["forward"].parts["activations"]
        assert held == one + (in_flight - 1) * kept


# -- a run -----------------------------------------------------------------------------------------


def of_run(kind: Any, m: int, reshard: bool) -> tuple[Any, Any, int, list[int], int]:
    """One step of a pipeline of two stages over two shards.

    Returns:
        Its traffic, its live bytes, the moment at which its reductions begin, the bytes of its
        messages, and the stage.
    """
    mesh = cached_mesh(2, 2, names=("pipeline", "shard"))
    rank = mesh.get_local_rank("pipeline")
    torch.manual_seed(0)
    stage = split(Model(width=64, num_blocks=4), 2)[rank]
    for block in stage.blocks:
        fully_shard(block, mesh=mesh["shard"], reshard_after_forward=reshard)
    fully_shard(stage, mesh=mesh["shard"])
    made = PipelineStage(stage, rank, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
    run = kind(made, m, loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()))
    tokens = torch.zeros(2 * m, 16, dtype=torch.long)
    given = (tokens,) if rank == 0 else ()
    target: dict[str, Any] = {"target": tokens, "losses": []} if rank == 1 else {}
    moments: list[int] = []
    reduce = made.perform_reduce_grad

    def reducing(*args: Any) -> None:
        moments.append(ledger.now)
        reduce(*args)

    made.perform_reduce_grad = reducing  # type: ignore[method-assign]
    for _ in range(2):
        target.get("losses", []).clear()
        for param in stage.parameters():
            param.grad = None
        with counting() as traffic, Ledger() as ledger, noting_messages() as sent:
            run.step(*given, **target, return_outputs=False)
    return traffic, ledger, moments[-1], sent, rank


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
@pytest.mark.parametrize(
    ("kind", "schedule"), [(Schedule1F1B, "1F1B"), (ScheduleGPipe, "GPipe")], ids=["1F1B", "GPipe"]
)
@distributed(4)
def test_a_run_needs_and_sends_what_was_predicted(kind: Any, schedule: str, reshard: bool) -> None:
    m = 4
    traffic, ledger, reducing, sent, rank = of_run(kind, m, reshard)
    stages, _ = staged(
        2, on_meta(width=64, num_blocks=4), split, Block, device_type="cpu",
        mp_policy=MixedPrecisionPolicy(),
        loss_fn=lambda y: F.cross_entropy(y.flatten(0, 1), torch.zeros(32, dtype=torch.long)),
    )  # fmt: skip
    stage = stages[rank]
    setup = make_setup(
        stage.units, 2, micro_batches=m, pipeline_ranks=2, device_type="cpu",
        reshard_after_forward=reshard,
    )  # fmt: skip
    made = replay_rank(
        [RankStage(rank, stage.trace, setup)], actions_of(schedule, rank, 2, m),
        optimizer=NOTHING, sends_late=schedule == "GPipe",
    )  # fmt: skip
    assert sent == [stage.trace.sent_bytes + stage.trace.returned_bytes] * m
    gathers = [t for t in made.transfers if t.kind == "all_gather"]
    reductions = [t for t in made.transfers if t.kind == "reduce_scatter"]
    assert traffic.num_gathers == len(gathers)
    assert traffic.gathered == sum(t.sent for t in gathers)
    assert traffic.reduced == pytest.approx(sum(t.sent for t in reductions))
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        return  # schedules of older torch hold what they receive and send for longer
    peaks = made.account.peaks
    before = max(peaks[phase].total for phase in ("forward", "backward"))
    # Tokens and targets, 4 KiB, are in the run only.
    assert max(ledger.live_bytes[:reducing]) == pytest.approx(before, rel=0.01)
    # While gradients are reduced, messages may come earlier or later.
    assert max(ledger.live_bytes) <= 1.01 * made.account.peak.total


# -- predictions -----------------------------------------------------------------------------------

SIZES = {"width": 1024, "num_blocks": 8, "vocabulary": 32000}


def test_degrees_side_by_side() -> None:
    made = sweep(
        on_meta(**SIZES), batch(1, 2048), H100, [32, 64], pipeline_ranks=[1, 2, 4],
        schedule=["1F1B", "GPipe"], micro_batches=8, split_stages=split, mp_policy=BF16,
    )  # fmt: skip
    assert not made.failed
    table = {
        (p.num_ranks, p.pipeline_ranks, p.choices.get("schedule")): p for p in made.predictions
    }
    four, all_first = table[64, 4, "1F1B"], table[64, 4, "GPipe"]
    assert four.mesh_shape == (16,)
    assert len(four.stages) == 4
    assert four.samples_per_s == pytest.approx(16 * 8 / four.seconds)
    assert all_first.peak_bytes > four.peak_bytes
    assert four.peak_bytes == max(stage["peak_bytes"] for stage in four.stages)
    assert 0 < four.bubble_s < four.exposed_s < four.seconds
    assert "pipeline" in four.step.stream_s
    assert "Pipeline ranks" in str(made)
    # The last stage has the head, and the others wait for it.
    bubbles = [stage["bubble_s"] for stage in four.stages]
    assert min(bubbles) == bubbles[-1]
    data = json.loads(json.dumps(four.to_dict()))
    assert (data["pipeline_ranks"], data["num_ranks"], data["schedule"]) == (4, 64, "1F1B")


def test_beside_tensor_and_context_parallelism() -> None:
    from test_predict_context import Model as Attending
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    class Half(nn.Module):
        def __init__(self, model: Any, index: int) -> None:
            super().__init__()
            self.embedding = model.first if index == 0 else None
            self.blocks = model.blocks[index : index + 1]
            self.head = model.last if index else None

        def forward(self, x: Tensor) -> Tensor:
            x = x if self.embedding is None else self.embedding(x)
            x = self.blocks[0](x)
            return x if self.head is None else self.head(x)

    def parallelize(stage: Any, mesh: Any) -> None:
        colwise = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        plan = {**colwise, "out": RowwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(stage.blocks[0], mesh, plan)

    made = predict(
        on_meta(Attending), torch.zeros(2, 64, dtype=torch.long, device="meta"), H100, 64,
        pipeline_ranks=2, tensor_ranks=2, context_ranks=4, micro_batches=4, mp_policy=BF16,
        split_stages=lambda model, num: [Half(model, i) for i in range(num)],
        parallelize=parallelize,
    )  # fmt: skip
    assert (made.mesh_shape, made.num_ranks) == ((16,), 64)
    assert {"tensor parallel", "context parallel", "pipeline"} <= set(made.step.stream_s)
    assert made.samples_per_s == pytest.approx(2 * 4 * 4 / made.seconds)


def test_where_the_ranks_are() -> None:
    assert InnerTopology(16, 1, 8, pipeline=4).ring("pipeline") == Ring(4, 1, 8)
    assert InnerTopology(2, 1, 8, pipeline=4).ring("pipeline") == Ring(4, 4, 2)
    assert InnerTopology(2, 1, 8, tensor=2, pipeline=4).ring("pipeline") == Ring(4, 2, 4)
    assert InnerTopology(16, 1, 8, pipeline=4).ring("shard") == Ring(16, 8, 1)


def test_stages_have_a_communicator_of_their_own() -> None:
    options: dict[str, Any] = {"micro_batches": 2, "split_stages": split, "mp_policy": BF16}
    one, two = (
        predict(on_meta(**SIZES), batch(1, 256), H100, 8, pipeline_ranks=n, **options)
        for n in (1, 2)
    )
    assert one.step.libraries == H100.library_bytes(1)
    assert two.step.libraries == H100.library_bytes(2)


def test_recomputation_and_resharding() -> None:
    options: dict[str, Any] = {
        "pipeline_ranks": 2, "micro_batches": 4, "split_stages": split, "mp_policy": BF16,
    }  # fmt: skip
    made: dict[str, Prediction] = {
        mode: predict(
            on_meta(**SIZES), batch(1, 2048), H100, 16, activation_checkpointing=mode, **options
        )
        for mode in ("none", "full")
    }
    assert made["full"].peak_bytes < made["none"].peak_bytes
    assert made["full"].step.flops > made["none"].step.flops
    kept = predict(on_meta(**SIZES), batch(1, 2048), H100, 16, strategy="grad", **options)
    gathers = [made["none"].step.stream_s["all-gather"], kept.step.stream_s["all-gather"]]
    assert gathers[0] > 2 * gathers[1]


def test_compiled_blocks_of_stages() -> None:
    """Also where a stage has one block: what `tanh` and the sum would be is fewer kernels."""
    _, steps = staged(4)
    plain, compiled = (steps.get(4, compiled=each) for each in (False, True))
    for one, other in zip(plain, compiled, strict=True):
        counts = [
            sum(len(e.operations) for e in stage.trace.events if isinstance(e, Compute))
            for stage in (one, other)
        ]
        assert counts[1] < counts[0]
        assert one.trace.flops == other.trace.flops


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"split_stages": None}, "pipeline_ranks=2 needs split_stages="),
        ({"pipeline_ranks": 0}, "pipeline_ranks must be at least 1"),
        ({"pipeline_ranks": 3}, "pipeline_ranks=3 must divide num_ranks=8"),
        ({"schedule": "1f1b"}, "schedule must be one of .*did you mean '1F1B'"),
        ({"micro_batches": 1}, "at least as many micro_batches as pipeline_ranks=2, got 1"),
        ({"stages_per_rank": 2}, "stages_per_rank=2 needs a schedule with several stages"),
        (
            {"schedule": "Interleaved1F1B", "micro_batches": 5},
            "choose a multiple of 2",
        ),
        ({"compiled": ("blocks.0",)}, "stages have other names"),
        ({"accumulation": "every"}, "do not reduce gradients in every micro-batch"),
        ({"max_saved_bytes": 0}, "max_saved_bytes does not go together with pipeline_ranks=2"),
        (
            {"offload_optimizer": StateOffload()},
            "offload_optimizer does not go together with pipeline_ranks=2: .* Leave "
            "offload_optimizer or pipeline_ranks out",
        ),
        (
            {"max_device_bytes": 0, "offload_policy": CPUOffloadPolicy()},
            "max_device_bytes does not go together with pipeline_ranks=2: .* Leave "
            "max_device_bytes or pipeline_ranks out",
        ),
        (
            {"shard_granularity": 4},
            "shard_granularity does not go together with pipeline_ranks=2: .* Leave "
            "shard_granularity or pipeline_ranks out",
        ),
        ({"split_stages": lambda model, num: [model]}, "must return 2 modules"),
        (
            {"split_stages": lambda model, num: [model, model]},
            "put each parameter into one stage",
        ),
        (
            {"split_stages": lambda model, num: [nn.Sequential(Wrong(model.embedding)),
                                                 nn.Sequential(model.blocks, model.head)]},
            "must return a tensor that needs a gradient",
        ),
    ],
)  # fmt: skip
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    options = {"split_stages": split, "pipeline_ranks": 2, "micro_batches": 4, **options}
    with pytest.raises(ValueError, match=match):
        predict(on_meta(), batch(), H100, 8, mp_policy=BF16, **options)


def test_offloaded_parameters_of_all_stages() -> None:
    options = {"micro_batches": 4, "offload_policy": CPUOffloadPolicy(), "mp_policy": BF16}
    whole = predict(on_meta(), batch(), H100, 4, **options)
    common = {**options, "split_stages": split, "pipeline_ranks": 2}
    single = predict(on_meta(), batch(), H100, 8, **common)
    looped = predict(
        on_meta(), batch(), H100, 8, **common, schedule="Interleaved1F1B", stages_per_rank=2
    )
    for made in (single, looped):
        assert ", on the first rank" in str(made)
        assert made.step.optimizer_s < whole.step.optimizer_s
        for name in ("parameters", "optimizer state"):
            assert made.step.host_bytes[name] < whole.step.host_bytes[name]
    # The first rank has the embedding and half of the blocks, as one stage or as two.
    assert looped.step.host_bytes == single.step.host_bytes
    assert looped.step.optimizer_s == pytest.approx(single.step.optimizer_s)


class Wrong(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.inner(x)}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "staged_models.py"
    path.write_text(
        "import test_predict_pipeline as tests\n"
        "model, batch, split = tests.Model, tests.batch, tests.split\n"
    )
    sys.path.insert(0, str(Path(__file__).parent))
    code = main(
        ("predict", f"{path}:model", "--input", f"{path}:batch", "--hardware", "h100", "--json",
         "--quiet", "--world-size", "8", "--pipeline-ranks", "1,2", "--split-stages",
         f"{path}:split", "--schedule", "1F1B,GPipe", "--micro-batches", "4")
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert [p["pipeline_ranks"] for p in data["predictions"]] == [1, 1, 2, 2]
    assert data["num_traced"] == 3
