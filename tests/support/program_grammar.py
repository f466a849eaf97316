"""The grammar of random programs: models, how they are sharded, and what is done with them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import fsdp2
from program_backwards import MODES
from program_pair import Operation
from programs import Program
from random_models import FAULTS, HOOK_FAULTS, all_layers, layers, styles

numbers = st.integers(0, 30)
OPTIMIZERS = ["sgd", "momentum", "adamw"]
WRAPPED = ["plain", "local", "flat", "offload"]
COMM_POLICIES = (
    fsdp2.CommPolicy(gather=torch.bfloat16),
    fsdp2.CommPolicy(gather=torch.int8, reduce=torch.int8, block=16),
    fsdp2.CommPolicy(reduce=torch.bfloat16, error_feedback=True),
)


def keep_some(parameter: torch.nn.Parameter) -> torch.dtype | None:
    """Scalars and those of five dims are computed with in their own dtype."""
    return parameter.dtype if parameter.ndim in (0, 5) else None


# Computation and reductions in other dtypes; outputs are cast back, for the loss.
PRECISIONS = (
    fsdp2.MixedPrecisionPolicy(torch.float32, torch.float64, torch.float64),
    fsdp2.MixedPrecisionPolicy(torch.float32, None, torch.float64),
    fsdp2.MixedPrecisionPolicy(None, torch.float32),
    fsdp2.MixedPrecisionPolicy(
        torch.float32,
        torch.float64,
        torch.float64,
        param_dtype_override_fn=keep_some,
    ),
)
mode, modes = st.sampled_from(MODES), st.lists(st.sampled_from(MODES), max_size=3)
place = st.sampled_from((*FAULTS, *HOOK_FAULTS))


def with_modes(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Operation]:
    """An operation whose last arguments are modes of micro-batches."""
    return st.tuples(st.tuples(st.just(name), *arguments), modes).map(lambda a: (*a[0], *a[1]))


def of(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Operation]:
    return st.tuples(st.just(name), *arguments)


def setting(method: str, *values: Any) -> st.SearchStrategy[Operation]:
    return of("setting", st.just(method), st.sampled_from(values))


def node_setting(method: str, *values: Any) -> st.SearchStrategy[Operation]:
    return of("node_setting", numbers, st.just(method), st.sampled_from(values))


EVALUATE = of("evaluate", st.sampled_from(["no_grad", "inference", ""]))
FUNCTIONAL = of("functional", st.sampled_from(["whole", "trained"]))
# What may be done where gradients or a graph are held.
IN_BETWEEN = st.one_of(
    of("look", st.sampled_from(["sharded", "whole"])),
    EVALUATE,
    of("gather", numbers, st.just(True)),
    of("drop"),
    FUNCTIONAL,
    of("stumble", numbers, st.sampled_from([p for p in (*FAULTS, *HOOK_FAULTS) if "forw" in p])),
)
STEP = with_modes("step")
# By what they exercise. A program keeps to a few of these families, so that it comes to cases that
# take several operations of one kind.
FAMILIES: dict[str, tuple[st.SearchStrategy[Operation], ...]] = {
    "accumulation": (
        STEP,
        of("between", mode, IN_BETWEEN),
        with_modes("finalized", st.booleans()),
        with_modes("unused", numbers),
    ),
    "gradients": (
        of("step_with", st.booleans(), st.booleans()),
        of("hooked"),
        with_modes("divide", st.sampled_from([1.0, 3.0])),
        with_modes("reduced_by_hook"),
        of("stepped_in_backward"),
    ),
    "graphs": (
        of("forwards", st.sampled_from([2, 3]), st.sampled_from(["sum", "in turn", ""])),
        with_modes("twice"),
        of("graph", st.sampled_from(["again", "anew"])),
        of("penalty", st.booleans()),
        of("partial", numbers),
        of("inputs"),
        of("before_backward", IN_BETWEEN),
        of("alone", numbers, st.sampled_from(["forward", "encode"])),
    ),
    "failures": (
        of("fail", numbers, place, st.sampled_from(["error", "interrupt"])),
        of("retried", mode, numbers, place),
        of("reset", mode, numbers, st.sampled_from(["", *FAULTS, *HOOK_FAULTS])),
    ),
    "weights": (
        of("state_dict", st.sampled_from(["sharded", "whole", "files"])),
        of("change", numbers),
        FUNCTIONAL,
        EVALUATE,
        of("gather", numbers, st.booleans()),
        of("drop"),
    ),
    "freezing": (
        of("freeze", numbers),
        setting("set_keep_frozen_gathered", 0, 100, 10**6),
        EVALUATE,
        of("change", numbers),
    ),
    "models": (
        of("copy"),
        of("move"),
        of("cast"),
        of("merge", st.sampled_from([100, 1000])),
    ),
    "optimizers": (
        of("optimizer", st.sampled_from(OPTIMIZERS), st.sampled_from(WRAPPED)),
        of("resume"),
        of("step_with", st.booleans(), st.booleans()),
    ),
    "memory": (
        of("budget", st.one_of(STEP, EVALUATE, of("forwards", st.just(2), st.just("")))),
        setting("set_reshard_after_forward", False, True),
        setting("set_reshard_after_backward", False, True),
        setting("set_reduce_scatter_max_input_buffers", 1, 2, 8),
        setting("set_keep_unsharded_storage", False, True),
        node_setting("set_reshard_after_forward", False, True),
        of("lookup", numbers),
    ),
    "communication": (
        of("custom", numbers, st.booleans(), st.booleans()),
        of("comm_policy", numbers, st.sampled_from([None, *COMM_POLICIES])),
        node_setting("set_force_sum_reduction_for_comms", False, True),
        setting("set_separate_reduce_scatter_group", True, False),
        of("prefetch", numbers, st.just("set_modules_to_forward_prefetch"), numbers),
        of("prefetch", numbers, st.just("set_modules_to_backward_prefetch"), numbers, numbers),
    ),
    "observers": (of("observe", st.one_of(IN_BETWEEN, of("twice"), STEP)),),
}
OPERATIONS = tuple(each for family in FAMILIES.values() for each in family)


@st.composite
def operations(draw: st.DrawFn) -> tuple[Operation, ...]:
    """Of all families, or of a few."""
    chosen = OPERATIONS
    if draw(st.integers(0, 3)):
        names = st.sampled_from(sorted(FAMILIES))
        families = draw(st.lists(names, min_size=1, max_size=3))
        chosen = tuple(each for name in families for each in FAMILIES[name])
    # Steps in between: an operation may leave the model in a state in which only they go wrong.
    either = st.one_of(STEP, st.one_of(chosen), st.one_of(chosen))
    return tuple(draw(st.lists(either, min_size=1, max_size=8)))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    # The root has a parameter, so that there is something to optimize.
    model = dataclasses.replace(
        draw(layers(2, draw(styles()))),
        skipped=None,
        kind="linear",
        passes="tensor",
        detached=False,
    )
    world_size = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 4, 5, 6]))
    replicas = draw(st.sampled_from([n for n in (1, 2, 3, 4) if world_size % n == 0]))
    shards = world_size // replicas
    precision = fsdp2.MixedPrecisionPolicy()
    if not any(layer.kind == "batchnorm" for layer in all_layers(model)):  # its buffers stay fp64
        precision = draw(st.sampled_from([precision] * 4 + list(PRECISIONS)))
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
        operations=draw(operations()),
        first=(draw(st.sampled_from(OPTIMIZERS)), draw(st.sampled_from([*WRAPPED, "flat"]))),
        shards=draw(st.sampled_from([1, 1, 1, *(n for n in (2, 3) if shards % n == 0)])),
        deterministic=draw(st.sampled_from([False, False, False, True])),
        on_meta=draw(st.sampled_from([False] * 5 + [True])),
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
