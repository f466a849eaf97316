"""The grammar of random programs: models, how they are sharded, and what is done with them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch

import fsdp2
from draws import Draw, in_order, just, one, one_of, several
from program_backwards import MODES
from program_pair import Operation
from programs import Program
from random_models import FAULTS, HOOK_FAULTS, all_layers, layers, style

numbers = one(*range(31))
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


def half_of(parameter: torch.nn.Parameter) -> int:
    """Blocks of half of the rows: ranks beyond the second have none."""
    return max(1, parameter.shape[0] // 2) if parameter.ndim else 1


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
flag, mode = one(False, True), one(*MODES)


def modes(chance: random.Random) -> tuple[str, ...]:
    """Up to three, half of the time the same ones: their sums are kept in different places."""
    if chance.random() < 0.5:
        return (mode(chance),) * chance.randint(1, 3)
    return several(mode, 0, 3)(chance)


place = one(*FAULTS, *HOOK_FAULTS)


def of(name: str, *arguments: Draw[Any]) -> Draw[Operation]:
    return in_order(just(name), *arguments)


def with_modes(name: str, *arguments: Draw[Any]) -> Draw[Operation]:
    """An operation whose last arguments are modes of micro-batches."""
    return lambda chance: (*of(name, *arguments)(chance), *modes(chance))


def setting(method: str, *values: Any) -> Draw[Operation]:
    return of("setting", just(method), one(*values))


def node_setting(method: str, *values: Any) -> Draw[Operation]:
    return of("node_setting", numbers, just(method), one(*values))


EVALUATE = of("evaluate", one("no_grad", "inference", ""))
FUNCTIONAL = of("functional", one("whole", "trained"), one(1, 1, 2))
CHANGE = of("change", numbers, one("freed", "operator", "rows"))
FREEZE = of("freeze", numbers)
SETTINGS = (
    setting("set_reshard_after_forward", False, True),
    setting("set_reshard_after_backward", False, True),
    setting("set_reduce_scatter_max_input_buffers", 1, 2, 8),
    setting("set_keep_unsharded_storage", False, True),
    node_setting("set_reshard_after_forward", False, True),
)
KEEP_FROZEN = setting("set_keep_frozen_gathered", 0, 100, 10**6)
COMMUNICATION = (
    of("custom", numbers, flag, flag),
    of("comm_policy", numbers, one(None, *COMM_POLICIES)),
    node_setting("set_force_sum_reduction_for_comms", False, True),
    setting("set_separate_reduce_scatter_group", True, False),
    of("prefetch", numbers, just("set_modules_to_forward_prefetch"), numbers),
    of("prefetch", numbers, just("set_modules_to_backward_prefetch"), numbers, numbers),
)
# What may be done where gradients or a graph are held.
IN_BETWEEN = one_of(
    (
        of("look", one("sharded", "whole")),
        EVALUATE,
        of("gather", numbers, just(True)),
        of("drop"),
        FUNCTIONAL,
        of("stumble", numbers, one(*(p for p in (*FAULTS, *HOOK_FAULTS) if "forw" in p))),
        FREEZE,
        one_of((*SETTINGS, KEEP_FROZEN, *COMMUNICATION)),
        of("move"),
    )
)


def in_between(name: str, *arguments: Draw[Any]) -> Draw[Operation]:
    """An operation whose last arguments are one or two others, done in the middle of it."""
    others = several(IN_BETWEEN, 1, 2)
    return lambda chance: (*of(name, *arguments)(chance), *others(chance))


STEP = with_modes("step")
# By what they exercise. A program keeps to a few of these families, so that it comes to cases that
# take several operations of one kind.
FAMILIES: dict[str, tuple[Draw[Operation], ...]] = {
    "accumulation": (
        STEP,
        in_between("between", mode),
        of("between", mode, one_of((CHANGE, of("state_dict", one("sharded", "whole"))))),
        of("set_late", mode),
        with_modes("finalized", flag),
        with_modes("unused", numbers),
        of("abandoned", mode, flag),
    ),
    "gradients": (
        of("step_with", flag, flag),
        of("hooked"),
        with_modes("divide", one(1.0, 3.0)),
        with_modes("reduced_by_hook"),
        with_modes("unused", numbers),
        of("stepped_in_backward"),
    ),
    "graphs": (
        of("forwards", one(2, 3), one("sum", "in turn", "")),
        with_modes("twice"),
        of("graph", one("again", "anew")),
        of("penalty", flag),
        of("partial", numbers),
        of("inner", numbers, numbers, one("dropped", "kept", "used")),
        of("inputs"),
        of("saved", one("identity", "copies", "on cpu", "budget")),
        of("watched", numbers),
        in_between("before_backward"),
        of("alone", numbers, one("forward", "encode")),
    ),
    "failures": (
        of("fail", numbers, place, one("error", "interrupt")),
        of("retried", mode, numbers, place),
        of("reset", mode, numbers, one("", *FAULTS, *HOOK_FAULTS)),
    ),
    "weights": (
        of("state_dict", one("sharded", "whole", "files", "assigned")),
        of("replaced", numbers),
        CHANGE,
        FUNCTIONAL,
        EVALUATE,
        of("gather", numbers, flag),
        of("drop"),
    ),
    "freezing": (
        FREEZE,
        KEEP_FROZEN,
        EVALUATE,
        CHANGE,
    ),
    "models": (
        of("copy"),
        of("move"),
        of("cast"),
        of("merge", one(100, 1000)),
        of("forward_hook", numbers),
    ),
    "optimizers": (
        of("optimizer", one(*OPTIMIZERS), one(*WRAPPED)),
        of("resume"),
        of("step_with", flag, flag),
    ),
    "memory": (
        of("budget", one_of((STEP, EVALUATE, of("forwards", just(2), just(""))))),
        *SETTINGS,
        of("lookup", numbers),
    ),
    "communication": COMMUNICATION,
    "compilation": (
        of("compiled", numbers, one("model", "module", "layer"), one("eager", "aot_eager")),
    ),
    "observers": (of("observe", one_of((IN_BETWEEN, of("twice"), STEP))),),
}
OPERATIONS = tuple(each for family in FAMILIES.values() for each in family)


def operations(chance: random.Random, families: Sequence[str] = ()) -> tuple[Operation, ...]:
    """Of these families; by default of all, or of a few."""
    chosen = OPERATIONS
    if chance.randrange(4) and not families:
        families = chance.sample(sorted(FAMILIES), chance.randint(1, 3))
    if families:
        chosen = tuple(each for name in families for each in FAMILIES[name])
    # Steps in between: an operation may leave the model in a state in which only they go wrong.
    return several(one_of((STEP, *[one_of(chosen)] * 3)), 1, 8)(chance)


def program(chance: random.Random, families: Sequence[str] = ()) -> Program:
    # The root has a parameter, so that there is something to optimize.
    model = dataclasses.replace(
        layers(2, style(chance))(chance),
        skipped=None,
        kind="linear",
        passes="tensor",
        detached=False,
        writes="",  # the input is a leaf
    )
    world_size = chance.choice([1, 2, 2, 3, 3, 4, 4, 5, 6])
    replicas = chance.choice([n for n in (1, 2, 3, 4) if world_size % n == 0])
    shards = world_size // replicas
    precision = fsdp2.MixedPrecisionPolicy()
    if not any(layer.kind == "batchnorm" for layer in all_layers(model)):  # its buffers stay fp64
        precision = chance.choice([precision] * 4 + list(PRECISIONS))
    offloads = not chance.randrange(8)
    granularity = chance.choice([None] * 5 + [2, 3, half_of])
    return Program(
        model,
        world_size,
        replicas,
        options={
            "direct_min_bytes": chance.choice([None, 0, 60, 150]),
            "offload_policy": fsdp2.CPUOffloadPolicy() if offloads else fsdp2.OffloadPolicy(),
            "mp_policy": precision,
            "comm_policy": chance.choice([None] * 8 + list(COMM_POLICIES)),
            "shard_granularity": granularity,
        },
        placement=chance.choice(["", "", "last dim", "small whole"]),
        operations=operations(chance, families),
        first=(chance.choice(OPTIMIZERS), chance.choice([*WRAPPED, "flat"])),
        shards=chance.choice([1, 1, 1, *(n for n in (2, 3) if shards % n == 0)]),
        deterministic=chance.random() < 0.25,
        on_meta=chance.random() < 0.15,
    )


def sample(num: int, first: int = 0, families: Sequence[str] = ()) -> list[Program]:
    """So many programs, others for each ``first`` seed, with operations of these families."""
    return [program(random.Random(f"{first}/{number}"), families) for number in range(num)]
