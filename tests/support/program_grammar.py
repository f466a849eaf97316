"""The grammar of random programs: models, how they are sharded, and what is done with them."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import fsdp2
from programs import Operation, Program
from random_models import FAULTS, HOOK_FAULTS, all_layers, layers

numbers = st.integers(0, 30)
OPTIMIZERS = ["sgd", "momentum", "adamw"]
WRAPPED = ["plain", "local", "flat"]
COMM_POLICIES = (
    fsdp2.CommPolicy(gather=torch.bfloat16),
    fsdp2.CommPolicy(gather=torch.int8, reduce=torch.int8, block=16),
    fsdp2.CommPolicy(reduce=torch.bfloat16, error_feedback=True),
)
# Computation and reductions in other dtypes; outputs are cast back, for the loss.
PRECISIONS = (
    fsdp2.MixedPrecisionPolicy(torch.float32, torch.float64, torch.float64),
    fsdp2.MixedPrecisionPolicy(torch.float32, None, torch.float64),
    fsdp2.MixedPrecisionPolicy(None, torch.float32),
)
MODES = ["reduce", "skip", "no_sync", "sharded"]
# What may be done where gradients or a graph are held.
IN_BETWEEN = st.one_of(
    st.tuples(st.just("look"), st.sampled_from(["sharded", "whole"])),
    st.tuples(st.just("evaluate"), st.sampled_from(["no_grad", "inference", ""])),
    st.tuples(st.just("gather"), numbers, st.just(True)),
    st.just(("drop",)),
    st.just(("functional",)),
)
STEPS = st.lists(st.sampled_from(MODES), max_size=2).map(lambda modes: ("step", *modes))
OPERATIONS: tuple[st.SearchStrategy[Operation], ...] = (
    STEPS,
    STEPS,
    STEPS,
    st.tuples(st.just("step_with"), st.booleans(), st.booleans()),
    st.tuples(st.just("alone"), numbers, st.sampled_from(["forward", "encode"])),
    st.tuples(st.just("between"), st.sampled_from(["skip", "sharded"]), IN_BETWEEN),
    st.tuples(st.just("before_backward"), IN_BETWEEN),
    st.tuples(st.just("observe"), st.one_of(IN_BETWEEN, st.just(("twice",)), st.just(("step",)))),
    st.just(("budget",)),
    st.just(("resume",)),
    st.tuples(
        st.just("forwards"), st.sampled_from([2, 3]), st.sampled_from(["sum", "in turn", ""])
    ),
    st.just(("twice",)),
    st.tuples(st.just("partial"), numbers),
    st.just(("inputs",)),
    st.tuples(st.just("evaluate"), st.sampled_from(["no_grad", "inference", ""])),
    st.just(("drop",)),
    st.tuples(
        st.just("fail"),
        numbers,
        st.sampled_from((*FAULTS, *HOOK_FAULTS)),
        st.sampled_from(["error", "interrupt"]),
    ),
    st.tuples(st.just("freeze"), numbers),
    st.tuples(st.just("state_dict"), st.sampled_from(["sharded", "whole", "files"])),
    st.just(("copy",)),
    st.tuples(
        st.just("optimizer"),
        st.sampled_from(OPTIMIZERS),
        st.sampled_from(WRAPPED),
    ),
    st.tuples(
        st.just("setting"),
        st.sampled_from(["set_reshard_after_forward", "set_reshard_after_backward"]),
        st.booleans(),
    ),
    st.tuples(
        st.just("setting"),
        st.just("set_reduce_scatter_max_input_buffers"),
        st.sampled_from([1, 2, 8]),
    ),
    st.tuples(st.just("setting"), st.just("set_keep_frozen_gathered"), st.sampled_from([0, 10**6])),
    st.tuples(
        st.just("node_setting"), numbers, st.just("set_reshard_after_forward"), st.booleans()
    ),
    st.tuples(st.just("merge"), st.sampled_from([100, 1000])),
    st.tuples(st.just("gather"), numbers, st.booleans()),
    st.just(("functional",)),
    st.just(("hooked",)),
    st.tuples(st.just("divide"), st.sampled_from([1.0, 3.0])),
    st.tuples(st.just("change"), numbers),
    st.just(("move",)),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    # The root has a parameter, so that there is something to optimize.
    model = dataclasses.replace(draw(layers(2)), skipped=None, kind="linear")
    world_size = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 4, 6]))
    replicas = draw(st.sampled_from([n for n in (1, 2, 3, 4) if world_size % n == 0]))
    shards = world_size // replicas
    precision = fsdp2.MixedPrecisionPolicy()
    if not any(layer.kind == "batchnorm" for layer in all_layers(model)):  # its buffers stay fp64
        precision = draw(st.sampled_from([precision] * 3 + list(PRECISIONS)))
    return Program(
        model,
        world_size,
        replicas,
        options={
            "direct_min_bytes": draw(st.sampled_from([None, 0, 60, 150])),
            "offload_policy": fsdp2.CPUOffloadPolicy()
            if draw(st.integers(0, 7)) == 0
            else fsdp2.OffloadPolicy(),
            "mp_policy": precision,
            "comm_policy": draw(st.sampled_from([None] * 8 + list(COMM_POLICIES))),
        },
        placement=draw(st.sampled_from(["", "", "last dim", "small whole"])),
        operations=tuple(draw(st.lists(st.one_of(OPERATIONS), min_size=1, max_size=8))),
        first=(draw(st.sampled_from(OPTIMIZERS)), draw(st.sampled_from([*WRAPPED, "flat"]))),
        shards=draw(st.sampled_from([1, 1, 1, *(n for n in (2, 3) if shards % n == 0)])),
        deterministic=draw(st.sampled_from([False, False, False, True])),
    )


def sample(num: int, first: int = 0) -> list[Program]:
    """So many programs, others for each ``first`` seed."""
    found: list[Program] = []

    @seed(first)
    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def draw(program: Program) -> None:
        found.append(program)

    draw()
    return found
