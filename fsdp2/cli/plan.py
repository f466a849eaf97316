"""``fsdp2 estimate``, ``predict`` and ``plan``, which need no GPUs and start no processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..render.text import fail, one_line, print_json, status
from .ckpt import parse_bytes
from .model import (
    DTYPES,
    STRATEGIES,
    ModelError,
    add_model,
    add_model_name,
    add_wire,
    comm_policy_of,
    find_object,
    load_model,
    parse_number,
    parse_wrap,
    precision_of,
    sharding_options,
)

CHECKPOINTING = ("none", "selective", "full")
_EXPERTS = "number of consecutive ranks that divide the experts"
_CONTEXT = "number of consecutive ranks that divide each sequence"
_NOT_GIVEN: Any = object()  # None is a choice
ACCUMULATION = ("unsharded", "sharded", "every")


def add_estimate(groups: Any) -> None:
    about = "estimate the memory of each rank and the traffic of a step"
    parser = groups.add_parser("estimate", help=about, description=f"{about[0].upper()}{about[1:]}")
    add_model(parser)
    _add_step(parser)
    parser.add_argument(
        "--checkpointing",
        choices=CHECKPOINTING,
        default="none",
        help="activation checkpointing (default: none)",
    )
    parser.add_argument(
        "--accumulation",
        choices=ACCUMULATION,
        default="unsharded",
        help="how to sum gradients of micro-batches: unsharded and reduced in the last one (the "
        "default), on shards (set_accumulate_sharded), or reduced in every one",
    )
    parser.add_argument(
        "--ranks-per-node", type=parse_number, default=8, metavar="N", help="(default: 8)"
    )
    parser.add_argument(
        "--expert-ranks", type=parse_number, default=1, metavar="N", help=f"{_EXPERTS} (default: 1)"
    )
    add_output(parser)
    parser.set_defaults(run=run_estimate)


def add_plan(groups: Any) -> None:
    about = "choose how to shard a model on given hardware"
    parser = groups.add_parser("plan", help=about, description=f"{about[0].upper()}{about[1:]}")
    add_model_name(parser)
    parser.add_argument(
        "--world-size", type=parse_number, required=True, metavar="N", help="number of GPUs"
    )
    _add_hardware(parser)
    parser.add_argument(
        "--strategy", choices=STRATEGIES, help="what to shard (default: try full, hybrid and none)"
    )
    parser.add_argument(
        "--wrap", metavar="POLICY", help="as for fsdp2 estimate (default: try several policies)"
    )
    parser.add_argument(
        "--reshard",
        type=parse_reshard,
        default=_NOT_GIVEN,
        metavar="R",
        help=f"{_RESHARD} (without this option: try several)",
    )
    parser.add_argument(
        "--prefetch",
        type=parse_number,
        metavar="N",
        help="units gathered ahead (default: try 1 and 2)",
    )
    parser.add_argument(
        "--expert-ranks",
        type=partial(list_of, parse_number),
        metavar="LIST",
        help=f"{_EXPERTS}; several to choose from (default: try three)",
    )
    parser.add_argument(
        "--tensor-ranks",
        type=partial(list_of, parse_number),
        default=[1],
        metavar="LIST",
        help="number of consecutive tensor-parallel ranks; several to choose from (default: 1)",
    )
    _add_parallelize(parser)
    parser.add_argument(
        "--context-ranks",
        type=partial(list_of, parse_number),
        default=[1],
        metavar="LIST",
        help=f"{_CONTEXT}; several to choose from (default: 1)",
    )
    _add_split_stages(parser)
    for name, parse, told in (
        ("--pipeline-ranks", parse_number, "number of pipeline-parallel ranks"),
        ("--schedule", str, "pipeline schedules"),
        ("--stages-per-rank", parse_number, "stages per rank of looped schedules"),
    ):
        parser.add_argument(
            name,
            type=partial(list_of, parse),
            metavar="LIST",
            help=f"{told}; several to choose from (default: try several with --split-stages)",
        )
    parser.add_argument(
        "--max-samples",
        type=parse_number,
        metavar="N",
        help="limit on the samples of a step over all ranks (default: none)",
    )
    parser.add_argument(
        "--checkpointing",
        choices=CHECKPOINTING,
        action="append",
        help="activation checkpointing to try (repeat for several; default: all)",
    )
    parser.add_argument(
        "--accumulation",
        choices=ACCUMULATION,
        action="append",
        help="how to sum gradients of micro-batches, as for fsdp2 estimate (repeat for several; "
        "default: unsharded and sharded)",
    )
    _add_step(parser)
    parser.add_argument("--picture", metavar="FILE", help="draw the step to a file: plan.png")
    add_output(parser)
    parser.set_defaults(run=run_plan)


def add_predict(groups: Any) -> None:
    about = "predict the time and memory of a step for one or more configurations"
    parser = groups.add_parser(
        "predict",
        help=about,
        description=f"{about[0].upper()}{about[1:]}. With LIST options (8,64,512), all "
        "combinations are predicted and printed as a table.",
    )
    add_configurations(parser)
    _add_hardware(parser)
    parser.add_argument("--picture", metavar="FILE", help="draw the step to a file: step.png")
    add_output(parser)
    parser.set_defaults(run=run_predict)


def add_configurations(parser: argparse.ArgumentParser) -> None:
    """Add the model and the options that take lists."""
    add_model_name(parser)
    parser.add_argument(
        "--world-size",
        type=partial(list_of, parse_number),
        required=True,
        metavar="LIST",
        help="numbers of GPUs",
    )
    strategies, modes = ", ".join(STRATEGIES), ", ".join(CHECKPOINTING)
    for name, parse, default, told in (
        ("--strategy", partial(_one_of, STRATEGIES), ["full"], strategies),
        ("--checkpointing", partial(_one_of, CHECKPOINTING), ["none"], modes),
        ("--reshard", parse_reshard, [None], _RESHARD),
        ("--prefetch", parse_number, [1], "units gathered ahead (default: 1)"),
        ("--expert-ranks", parse_number, [1], f"{_EXPERTS} (default: 1)"),
        (
            "--tensor-ranks",
            parse_number,
            [1],
            "number of consecutive tensor-parallel ranks (default: 1)",
        ),
        ("--context-ranks", parse_number, [1], f"{_CONTEXT} (default: 1)"),
        ("--pipeline-ranks", parse_number, [1], "number of pipeline-parallel ranks (default: 1)"),
        (
            "--schedule",
            str,
            ["1F1B"],
            "1F1B, GPipe, Interleaved1F1B, LoopedBFS, ZBVZeroBubble, ...",
        ),
        ("--stages-per-rank", parse_number, [1], "stages per rank of a schedule (default: 1)"),
        (
            "--samples",
            parse_number,
            [None],
            "samples per micro-batch of a rank (default: the input's)",
        ),
        ("--context", parse_number, [None], "sequence length (default: the input's)"),
    ):
        parser.add_argument(
            name, type=partial(list_of, parse), default=default, metavar="LIST", help=told
        )
    parser.add_argument("--wrap", default="auto", metavar="POLICY", help="as for fsdp2 estimate")
    _add_parallelize(parser)
    _add_split_stages(parser)
    parser.add_argument(
        "--accumulation",
        choices=ACCUMULATION,
        default="unsharded",
        help="how to sum gradients of micro-batches, as for fsdp2 estimate",
    )
    _add_step(parser)


def _add_parallelize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parallelize",
        metavar="FUNCTION",
        help="function, named like MODEL, that makes the model tensor-parallel; called with the "
        "model and a mesh",
    )


def _add_split_stages(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split-stages",
        metavar="FUNCTION",
        help="function, named like MODEL, that returns the stages of a pipeline; called with the "
        "model and their number",
    )


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hardware",
        required=True,
        metavar="NAME",
        help='h100, a100-80, ... or a JSON file such as {"base": "h100", "speeds": [1, 0.5]}',
    )
    parser.add_argument(
        "--speeds",
        type=parse_speeds,
        metavar="LIST",
        help="speed of each node or rank, if they differ, as fsdp2 doctor prints them: 1,1,0.5,1 "
        "or 1x62,0.5x2 (62 nodes, then two of half the speed)",
    )
    add_precision(parser)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add the memory budget and the dtypes of computation and of collectives."""
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        metavar="SIZE",
        help="memory budget of a GPU (default: all)",
    )
    parser.add_argument("--param-dtype", choices=DTYPES, help="dtype of computation and gathers")
    parser.add_argument("--reduce-dtype", choices=DTYPES, help="dtype of gradient reduction")
    add_wire(parser)


_RESHARD = "reshard parameters after forward: default, true, false, or a number of ranks"


def parse_reshard(text: str) -> bool | int | None:
    """``default``, ``true``, ``false`` or a number of ranks."""
    words: dict[str, bool | None] = {"default": None, "true": True, "false": False}
    if text in words:
        return words[text]
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not default, true, false or a number of ranks")


def list_of(parse: Callable[[str], Any], text: str) -> list[Any]:
    return [parse(part) for part in text.split(",")]


def _one_of(known: Sequence[str], text: str) -> str:
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
    return text


def parse_speeds(text: str) -> list[float]:
    """Parse a list of speeds: ``1x2,0.5`` is [1, 1, 0.5]."""
    speeds: list[float] = []
    for part in text.split(","):
        speed, times, number = part.partition("x")
        try:
            speeds += [float(speed)] * (int(number) if times else 1)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list of speeds such as 1,0.5 or 1x62,0.5x2"
            ) from None
    return speeds


def _bytes_or_0(text: str) -> int:
    return 0 if text == "0" else parse_bytes(text)


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        required=True,
        metavar="FUNCTION",
        help="function, named like MODEL, that returns the batch of one rank: a tensor, a tuple of "
        "arguments or a dict of keyword arguments; called on the meta device",
    )
    parser.add_argument(
        "--loss",
        metavar="FUNCTION",
        help="function that computes the loss from the model's output (default: its .loss, the "
        "output itself if it is one number, or its sum)",
    )
    parser.add_argument(
        "--micro-batches",
        type=parse_number,
        default=1,
        metavar="N",
        help="micro-batches per optimizer step (default: 1)",
    )
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "sgd", "momentum", "none"),
        default="adamw",
        help="optimizer whose state and step are counted (default: adamw)",
    )
    parser.add_argument(
        "--max-gathered",
        type=parse_bytes,
        metavar="SIZE",
        help="limit on gathered parameters, as of set_max_gathered_bytes: 2GiB, ... "
        "(default: none)",
    )
    parser.add_argument(
        "--max-saved",
        type=parse_bytes,
        metavar="SIZE",
        help="activations that offload_activations keeps on the device: 4GiB, ... (default: all)",
    )
    parser.add_argument(
        "--max-state",
        type=_bytes_or_0,
        metavar="SIZE",
        help="optimizer state that offload_optimizer keeps on the device: 0, 2GiB, ... "
        "(default: all)",
    )
    parser.add_argument(
        "--state-in",
        choices=("cpu", "files"),
        default="cpu",
        help="where to keep the rest of the state: host memory (the default) or files",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="keep parameters, gradients and optimizer state in host memory (CPUOffloadPolicy)",
    )
    parser.add_argument(
        "--max-device",
        type=parse_bytes,
        metavar="SIZE",
        help="with --offload, what to keep on the device, as of shard_model(max_device_bytes=...) "
        "(default: 0)",
    )
    parser.add_argument(
        "--attention",
        choices=("auto", "flash", "efficient", "cudnn", "math"),
        default="auto",
        help="kernel of scaled_dot_product_attention on a GPU (default: auto, torch's choice)",
    )
    parser.add_argument(
        "--experts",
        metavar="MODULES",
        help="modules to pass to shard_experts: layers.*.experts or class:Experts (default: none)",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compile each block as one graph: fused kernels, and fewer saved activations",
    )
    parser.add_argument(
        "--unknown-costs",
        choices=("error", "list"),
        default="error",
        help="what to do about costly operators of unknown FLOPs: raise an error (the default), or "
        "list them and count no FLOPs",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def workload_of(args: argparse.Namespace, **others: Any) -> Any:
    """The `Workload` that the options describe, with ``others`` of its fields."""
    from ..planning import Kernels, StateOffload, Workload

    state = None
    if args.max_state is not None:
        state = StateOffload(args.state_in, args.max_state)
    return Workload(
        load_model(args.model),
        _call(args.input),
        loss_fn=_found(args.loss),
        optimizer=None if args.optimizer == "none" else args.optimizer,
        micro_batches=args.micro_batches,
        compiled=args.compiled,
        max_saved_bytes=args.max_saved,
        offload_optimizer=state,
        kernels=None if args.attention == "auto" else Kernels(attention=args.attention),
        unknown_costs=args.unknown_costs,
        experts=None if args.experts is None else parse_wrap(args.experts),
        **others,
    )


def _found(target: str | None) -> Any:
    """The function of this name, if one is given."""
    return None if target is None else find_object(target)


def _sharding_of(args: argparse.Namespace, **others: Any) -> Any:
    """The `Sharding` that options of all commands describe, with ``others`` of its fields."""
    from ..planning import Sharding
    from ..policy import CPUOffloadPolicy, OffloadPolicy

    return Sharding(
        mp_policy=precision_of(args),
        offload_policy=CPUOffloadPolicy() if args.offload else OffloadPolicy(),
        comm_policy=comm_policy_of(args),
        max_gathered_bytes=args.max_gathered,
        max_device_bytes=args.max_device,
        **others,
    )


def _call(target: str) -> Any:
    import torch

    function = find_object(target)
    if not callable(function):
        raise ModelError(f"{target} is a {type(function).__name__}, not a function")
    try:
        with torch.device("meta"):
            return function()
    except Exception as error:
        raise ModelError(f"{target} failed: {type(error).__name__}: {error}") from error


def run_estimate(args: argparse.Namespace) -> int:
    """Estimate a model created on the meta device."""
    from ..planning import Estimate, estimate

    def make() -> Estimate:
        options = sharding_options(args)
        sharding = _sharding_of(
            args,
            strategy=options["strategy"],
            wrap=options["wrap"],
            replicate_below=options["replicate_below"],
        )
        workload = workload_of(
            args,
            activation_checkpointing=args.checkpointing,
            accumulation=args.accumulation,
            expert_ranks=args.expert_ranks,
        )
        with status(args) as show:
            show("running a step on fake tensors", 0, 1)
            return estimate(
                workload,
                sharding,
                options["mesh_shape"],
                device_type=options["device_type"],
                ranks_per_node=args.ranks_per_node,
            )

    return answer(args, make)


def run_predict(args: argparse.Namespace) -> int:
    """Predict for a model created on the meta device."""
    from ..planning import Cluster, predict, sweep

    def make() -> Any:
        cluster = Cluster(_hardware_of(args), args.world_size[0], memory_budget=args.memory)
        workload, sharding, over = configurations(args)
        with status(args) as show:
            if not over:
                show("simulating a step", 0, 1)
                return predict(workload, sharding, cluster)
            if args.picture:
                raise ModelError("--picture is of one configuration, not of several")
            return sweep(workload, sharding, cluster, over, progress=show)

    return answer(args, make, draw if args.picture else None)


# The fields that take a list, with the names of their options.
_OF_SHARDING = {"strategy": "strategy", "reshard_after_forward": "reshard", "prefetch": "prefetch"}
_OF_WORKLOAD = {
    "samples": "samples",
    "context": "context",
    "activation_checkpointing": "checkpointing",
    "expert_ranks": "expert_ranks",
    "tensor_ranks": "tensor_ranks",
    "context_ranks": "context_ranks",
    "pipeline_ranks": "pipeline_ranks",
    "schedule": "schedule",
    "stages_per_rank": "stages_per_rank",
}


def configurations(args: argparse.Namespace) -> tuple[Any, Any, dict[str, list[Any]]]:
    """The workload and the sharding of `sweep`, and the fields with several values."""
    how, own = (
        {field: getattr(args, option) for field, option in options.items()}
        for options in (_OF_SHARDING, _OF_WORKLOAD)
    )
    workload = workload_of(
        args,
        accumulation=args.accumulation,
        parallelize=_found(args.parallelize),
        split_stages=_found(args.split_stages),
        **{field: values[0] for field, values in own.items()},
    )
    first = {field: values[0] for field, values in how.items()}
    sharding = _sharding_of(args, wrap=parse_wrap(args.wrap), **first)
    sizes = {name: own.pop(name) for name in ("samples", "context", "activation_checkpointing")}
    lists = {"num_ranks": args.world_size, **sizes, **how, **own}
    return workload, sharding, {k: values for k, values in lists.items() if len(values) > 1}


def _hardware_of(args: argparse.Namespace) -> Any:
    from dataclasses import replace

    from ..planning import find_hardware

    hardware = find_hardware(args.hardware)
    return replace(hardware, speeds=args.speeds) if args.speeds else hardware


def run_plan(args: argparse.Namespace) -> int:
    """Plan for a model created on the meta device."""
    from ..planning import Cluster, Plan, plan

    def make() -> Plan:
        cluster = Cluster(_hardware_of(args), args.world_size, memory_budget=args.memory)
        over: dict[str, Any] = {
            "strategy": args.strategy and [args.strategy],
            "wrap": args.wrap and [parse_wrap(args.wrap)],
            "reshard_after_forward": None if args.reshard is _NOT_GIVEN else [args.reshard],
            "prefetch": args.prefetch and [args.prefetch],
            "activation_checkpointing": args.checkpointing or CHECKPOINTING,
            "accumulation": args.accumulation or ACCUMULATION[:2],
            "expert_ranks": args.expert_ranks,
            "tensor_ranks": args.tensor_ranks,
            "context_ranks": args.context_ranks,
            "pipeline_ranks": args.pipeline_ranks,
            "schedule": args.schedule,
            "stages_per_rank": args.stages_per_rank,
        }
        workload = workload_of(
            args,
            parallelize=_found(args.parallelize),
            split_stages=_found(args.split_stages),
        )
        with status(args) as show:
            return plan(
                workload,
                cluster,
                _sharding_of(args),
                over={name: values for name, values in over.items() if values is not None},
                max_samples=args.max_samples,
                progress=show,
            )

    return answer(args, make, draw if args.picture else None)


def draw(args: argparse.Namespace, made: Any) -> int:
    """Draw a plan that has already been printed, so that an error here loses nothing."""
    try:
        made.picture(args.picture)
    except (ImportError, OSError, ValueError) as error:  # ValueError: a name that is no picture's
        what = {run_plan: "plan", run_predict: "prediction"}.get(args.run, "table")
        return fail(f"The {what} is whole, but its picture was not written: {one_line(error)}")
    if not args.json:
        print(f"\nWritten: {args.picture}")
    return 0


def answer(
    args: argparse.Namespace,
    make: Callable[[], Any],
    then: Callable[[argparse.Namespace, Any], int] | None = None,
) -> int:
    """Print the result of ``make``, or why it fails; then call ``then`` with the result.

    Returns:
        The exit status.
    """
    from ..features.gather_budget import GatherBudgetError

    try:
        made = make()
    except (ModelError, ValueError, TypeError, ImportError, OSError) as error:
        return fail(error)
    except RuntimeError as error:
        if isinstance(error, GatherBudgetError):
            return fail(error)
        # From torch, in the model.
        return fail(f"{args.model} failed on this input: {error}")
    if args.json:
        print_json(made.to_dict())
    else:
        print(made)
    return then(args, made) if then is not None else 0
