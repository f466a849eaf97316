"""What published runs come to: the settings of rows, and estimates beside simulations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published import ROWS, block_ms
from benchmarks.published_megatron import SIZES_OF_MEGATRON
from benchmarks.published_runs import FAMILIES, Run, figures_of, parts_of, simulator_of
from fsdp2.planning.simulation.pipeline_times import replay_pipeline, simulate_pipeline
from harness import cpu_only, ours_only

pytestmark = [ours_only("models of the benchmarks"), cpu_only("models of the benchmarks")]

SMALL = Run(
    "Megatron 1.7B", "a100-80", 64, 1, "full", "float16",
    tensor_ranks=4, pipeline_ranks=4, parts=False, stages_per_rank=3, micro_batches=8,
)  # fmt: skip


def test_a_pipeline_comes_to_what_its_simulation_says() -> None:
    parts, simulator = parts_of(SMALL), simulator_of(SMALL)
    assert len(parts) == 12
    replays = replay_pipeline(simulator, parts, "Interleaved1F1B")
    steps = simulate_pipeline(simulator, parts, "Interleaved1F1B", replays)
    found = figures_of(SMALL)
    assert found.reserved_bytes is None  # an estimate: of replicated stages, as Megatron's
    assert found.step_s == pytest.approx(max(step.seconds for step in steps), rel=0.04)
    assert found.flops == sum(step.flops for step in steps) / len(steps)
    assert steps[0].flops < found.flops < steps[-1].flops  # the first rank does less than the mean
    most = max(step.needed_bytes for step in steps)
    assert found.needed_bytes == pytest.approx(most, rel=0.1)


def test_a_pipeline_of_sharded_stages_is_simulated_and_may_free_what_it_sent() -> None:
    [run] = {r.run for r in ROWS if r.source == "Llama 3" and r.run.num_gpus == 16384}
    frees, holds = figures_of(run), figures_of(replace(run, holds_sent=True))
    assert frees.reserved_bytes is not None
    assert frees.reserved_bytes < frees.needed_bytes
    assert frees.step_s == holds.step_s
    # A rank has at most as many outputs in flight as the last rank of a step's micro-batches, and
    # what it returned: 16 of eight stages each, of 8,192 tokens over 8 ranks.
    most = 2 * 16 * 8 * 8192 * 16384 * 2 // 8
    assert 0.25 * most < holds.needed_bytes - frees.needed_bytes <= most
    assert frees.needed_bytes < 80 * 2**30


def test_flops_are_those_of_the_papers_formula() -> None:
    """Equation 3 of "Efficient Large-Scale Language Model Training"."""
    width, layers, _ = SIZES_OF_MEGATRON[SMALL.model]
    length, batch = 2048, SMALL.micro_batches * 4
    formula = 96 * batch * length * layers * width**2
    formula *= 1 + length / (6 * width) + 51200 / (16 * layers * width)
    assert figures_of(SMALL).flops * SMALL.num_gpus == pytest.approx(formula, rel=1e-3)


def test_a_block_is_what_a_longer_model_takes_more() -> None:
    run = Run("Megatron 1.7B", "a100-80", 8, 4, "none", tensor_ranks=8, blocks=4)
    made = block_ms(run)
    step = figures_of(run)
    assert 4 * made < 1e3 * (step.step_s - step.optimizer_s) < 4 * made + 40  # the rest: the head


def test_rows_fill_their_gpus() -> None:
    """Replicas and micro-batches are whole numbers, and stages have equally many blocks."""
    assert len({row.run for row in ROWS}) > 35
    for row in ROWS:
        run = row.run
        assert run.num_gpus % (run.tensor_ranks * run.pipeline_ranks) == 0
        if run.model in SIZES_OF_MEGATRON:
            assert SIZES_OF_MEGATRON[run.model][1] % run.num_stages == 0
        assert run.model in FAMILIES
        assert run.stages_per_rank == 1 or run.micro_batches % run.pipeline_ranks == 0
    batches = {
        (row.run.model, row.run.num_gpus): row.run.batch
        * row.run.micro_batches
        * row.run.num_gpus
        // (row.run.tensor_ranks * row.run.pipeline_ranks)
        for row in ROWS
        if row.source == "Megatron 2021"
    }
    assert batches["Megatron 1.7B", 32] == 512
    assert batches["Megatron 39.1B", 512] == 1536
    assert batches["Megatron 310.1B", 1920] == 2160
    assert batches["Megatron 530B", 2240] == 2240
