"""`predict`: the time and memory of one configuration; `sweep`: of many, from the same traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn

from ..api.shard_model import find_strategy
from ..common.suggestions import did_you_mean
from ..estimation.checkpointing import MODES
from ..estimation.kernels import Kernels, kernels_of
from ..estimation.paged_state import StateOffload
from ..estimation.setups import check_number, checked_mesh, granularities, make_setup
from ..estimation.tracing import LossFn, trace_step
from ..policy import (
    CommPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    check_comm_policy,
)
from ..render.text import one_line, plural
from .advice import padding_of
from .arguments import check_ranks, checked_budget
from .candidates import Candidate, Degrees
from .hardware import Hardware, find_hardware
from .loads import even_load, sizes_of, speeds_of
from .outcomes import bound_of, outcome_of, simulate_ranks
from .prediction import Prediction, Sweep
from .ranges import range_of
from .simulate import Simulator
from .tensor_parallel import Parallelize
from .traces import (
    ALONE,
    WHOLE,
    Compiled,
    Size,
    TracedSteps,
    check_context_ranks,
    check_expert_ranks,
    check_tensor_ranks,
)


def predict(
    model: nn.Module,
    sample_input: Any,
    hardware: str | Hardware,
    num_ranks: int | Sequence[int],
    *,
    strategy: str = "full",
    wrap: Any = "auto",
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (has no state)
    reshard_after_forward: Any = None,
    prefetch: int = 1,
    replicate_below: int = 0,
    direct_min_bytes: int | None = None,
    comm_policy: CommPolicy | None = None,
    max_gathered_bytes: int | None = None,
    activation_checkpointing: str = "none",
    checkpoint_modules: Sequence[str] | None = None,
    max_saved_bytes: int | None = None,
    experts: Any = None,
    expert_ranks: int = 1,
    parallelize: Parallelize | None = None,
    tensor_ranks: int = 1,
    context_ranks: int = 1,
    micro_batches: int = 1,
    accumulation: str = "unsharded",
    optimizer: Any = "adamw",
    loss_fn: LossFn | None = None,
    memory_budget: float | None = None,
    kernels: Kernels | None = None,
    fake: bool = True,
    unknown_costs: str = "error",
    compiled: Compiled = False,
    shard_granularity: Any = None,
    max_device_bytes: int | None = None,
    offload_optimizer: StateOffload | None = None,
) -> Prediction:
    """Predict the time and memory of a training step in one configuration.

    What `plan` simulates for each configuration that it tries, for the one that you name: the same
    trace, the same simulation, the same figures. Nothing is searched, and a configuration that does
    not fit into memory is predicted too (``Prediction.fits``).

    Args:
        model, sample_input, hardware: as in `plan`. Where `Hardware.speeds` differ, batches are
            equal and all wait for the slowest rank.
        num_ranks: the number of GPUs, or the data-parallel mesh, (replicas, shards). For the
            strategy ``"hybrid"``, a number means that nodes are replicas, as in `shard_model`.
        strategy, wrap, mp_policy, offload_policy, reshard_after_forward: as in `shard_model`.
        prefetch, replicate_below, direct_min_bytes: as in `shard_model`.
        comm_policy, max_gathered_bytes: as in `shard_model`.
        activation_checkpointing: "none", "full" or "selective"; see `estimate`.
        checkpoint_modules: names of the modules to recompute; None: the blocks, as in `plan`.
        max_saved_bytes: as in `estimate`; copies share no time with collectives.
        experts: the modules that `shard_experts` gets before the others become units: names,
            patterns or classes, as in ``wrap``. None: experts are parameters like others.
        expert_ranks: consecutive ranks over which experts are distributed, a divisor of the ranks
            and at most the number of experts; those with the same experts shard them. Forward must
            make a `TokenExchange` (without a mesh here), whose tokens are taken to be spread evenly
            over experts; each of its all-to-alls is waited for.
        parallelize: makes the model tensor-parallel: a function of the model (a copy of it on the
            meta device) and a mesh of ``tensor_ranks``, as the training script calls
            ``parallelize_module``; it may return the model. Operators and collectives of DTensors
            are then those of one rank; each collective is waited for.
        tensor_ranks: consecutive ranks that share the operators, a divisor of ``num_ranks``. The
            other ranks are data-parallel; ``sample_input`` is the batch of one group of
            ``tensor_ranks``.
        context_ranks: consecutive ranks, or groups of ``tensor_ranks``, over which each sequence is
            split, as by torch's ``context_parallel``: a divisor of the last dim of the mesh, over
            which parameters are sharded. ``sample_input`` has whole sequences, the batch of one
            such group: dim 1 of its first tensor of two dims, and each dim but dim 0 as long as
            that, a multiple of twice ``context_ranks``. Attention must be
            ``scaled_dot_product_attention`` without a mask.
        micro_batches, accumulation, optimizer, loss_fn: as in `estimate`.
        memory_budget: bytes of a GPU that a rank may use; None: all of them.
        kernels, fake, unknown_costs, compiled: as in `estimate`.
        shard_granularity, max_device_bytes: as in `shard_model`.
        offload_optimizer: as in `estimate`. The step takes its copies, reads and writes.

    Returns:
        The prediction: print it, or see its attributes.

    Raises:
        ValueError: for arguments that `estimate` or `shard_model` would reject, and ranks that do
            not fill their nodes.
        RuntimeError: if a unit does not fit into ``max_gathered_bytes``.
        TypeError: for arguments of the wrong type.

    Example:
        >>> made = predict(model, tokens, "h100", 64, mp_policy=bf16, loss_fn=loss)
        >>> print(made.bound, made.fits)
        >>> chosen = plan(model, tokens, "h100", 64, mp_policy=bf16, loss_fn=loss)
        >>> same = predict(model, tokens, "h100", chosen.mesh_shape, loss_fn=loss,
        ...     activation_checkpointing=chosen.activation_checkpointing, **chosen.kwargs)
    """
    cells = _Cells(
        model,
        sample_input,
        find_hardware(hardware),
        wrap=wrap,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        replicate_below=replicate_below,
        direct_min_bytes=direct_min_bytes,
        comm_policy=comm_policy,
        max_gathered_bytes=max_gathered_bytes,
        checkpoint_modules=checkpoint_modules,
        max_saved_bytes=max_saved_bytes,
        experts=experts,
        parallelize=parallelize,
        optimizer=optimizer,
        loss_fn=loss_fn,
        memory_budget=memory_budget,
        kernels=kernels,
        fake=fake,
        unknown_costs=unknown_costs,
        shard_granularity=shard_granularity,
        max_device_bytes=max_device_bytes,
        offload_optimizer=offload_optimizer,
    )
    return cells.predict(
        num_ranks,
        WHOLE,
        activation_checkpointing=activation_checkpointing,
        strategy=strategy,
        reshard_after_forward=reshard_after_forward,
        prefetch=prefetch,
        micro_batches=micro_batches,
        accumulation=accumulation,
        expert_ranks=expert_ranks,
        tensor_ranks=tensor_ranks,
        compiled=compiled,
        context_ranks=context_ranks,
        ranged=True,
    )


def sweep(
    model: nn.Module,
    sample_input: Any,
    hardware: str | Hardware,
    num_ranks: Any,
    *,
    samples: int | list[int] | None = None,
    context: int | list[int] | None = None,
    activation_checkpointing: str | list[str] = "none",
    strategy: str | list[str] = "full",
    reshard_after_forward: Any = None,
    prefetch: int | list[int] = 1,
    micro_batches: int | list[int] = 1,
    accumulation: str | list[str] = "unsharded",
    expert_ranks: int | list[int] = 1,
    tensor_ranks: int | list[int] = 1,
    compiled: Compiled | list[Compiled] = False,
    context_ranks: int | list[int] = 1,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Sweep:
    """Predict the combinations of several ranks, batches, contexts, checkpointing and strategies.

    Each argument may be one value or a list of them. A step is traced once for each size of the
    micro-batch, kind of checkpointing and number of expert, tensor or context ranks, not for each
    combination: 20 numbers of ranks take one trace.

    Args:
        model, hardware: as in `predict`.
        sample_input: as in `predict`. Its sizes are changed by ``samples`` and ``context``.
        num_ranks: numbers of GPUs, or tuples (replicas, shards).
        samples: of a micro-batch of one rank: dim 0 of all tensors with as many rows as the first
            one. None: as many as ``sample_input`` has.
        context: length of a sequence: dim 1 of the first tensor that has one, and all other dims
            but dim 0 of that length. None: that of ``sample_input``. The model must be able to work
            on this length.
        activation_checkpointing, strategy, reshard_after_forward, prefetch: as in `predict`.
        micro_batches, accumulation, expert_ranks, tensor_ranks, context_ranks: as in `predict`.
        compiled: as in `predict`, with names of modules as a tuple.
        progress: called with (current task, number done, total).
        options: the other arguments of `predict`, for all combinations.

    Returns:
        The table. Combinations that cannot run are in ``Sweep.failed`` with the reason.

    Raises:
        ValueError: for arguments that `predict` would reject, or if no combination can run.
        TypeError: for arguments of the wrong type.

    Example:
        >>> made = sweep(model, tokens, "h100", [8, 64, 512], samples=[1, 2, 4],
        ...     activation_checkpointing=["none", "full"], mp_policy=bf16, loss_fn=loss)
        >>> print(made)
        >>> print(made.best)
    """
    chosen_hardware = find_hardware(hardware)
    axes = {
        "num_ranks": num_ranks,
        "samples": samples,
        "context": context,
        "activation_checkpointing": activation_checkpointing,
        "strategy": strategy,
        "reshard_after_forward": reshard_after_forward,
        "prefetch": prefetch,
        "micro_batches": micro_batches,
        "accumulation": accumulation,
        "expert_ranks": expert_ranks,
        "tensor_ranks": tensor_ranks,
        "compiled": compiled,
        "context_ranks": context_ranks,
    }
    values = {k: v if isinstance(v, list) else [v] for k, v in axes.items()}
    for name, given in values.items():
        if not given:
            raise ValueError(f"{name} is an empty list: give at least one value")
    for shape in values["num_ranks"]:
        _mesh_of(shape, "full", chosen_hardware)
    for each in values["strategy"]:
        find_strategy(each)
    for mode in values["activation_checkpointing"]:
        _check_mode(mode)
    for name in ("samples", "context"):
        for size in values[name]:
            _check_size(name, size)
    cells = _Cells(model, sample_input, chosen_hardware, **_known(options))
    return _swept(cells, values, progress or (lambda what, done, total: None))


def _swept(
    cells: _Cells, values: dict[str, list[Any]], progress: Callable[[str, int, int], None]
) -> Sweep:
    varied = tuple(name for name, each in values.items() if len(each) > 1)
    predictions: list[Prediction] = []
    failed: list[tuple[dict[str, Any], str]] = []
    errors: list[Exception] = []
    combinations = [dict(zip(values, each, strict=True)) for each in product(*values.values())]
    for i, what in enumerate(combinations):
        told = ", ".join(f"{name} {what[name]}" for name in varied)
        progress(f"simulating: {told or 'one configuration'}", i, len(combinations))
        size = Size(what["samples"], what["context"])
        rest = {k: v for k, v in what.items() if k not in ("num_ranks", "samples", "context")}
        try:
            predictions.append(cells.predict(what["num_ranks"], size, **rest))
        except (ValueError, RuntimeError) as error:
            errors.append(error)
            failed.append(({name: what[name] for name in varied}, one_line(error)))
    if not predictions:
        raise errors[0]
    columns = tuple(dict.fromkeys(("num_ranks", *varied)))
    return Sweep(predictions, failed, cells.traces.num_traced, columns)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"sweep has no argument '{name}'{did_you_mean(name, _OPTIONS)}")
    return {**_OPTIONS, **options}


# The arguments of `predict` that a sweep does not vary, with their defaults.
_OPTIONS: dict[str, Any] = {
    "wrap": "auto",
    "mp_policy": MixedPrecisionPolicy(),
    "offload_policy": OffloadPolicy(),
    "replicate_below": 0,
    "direct_min_bytes": None,
    "comm_policy": None,
    "max_gathered_bytes": None,
    "checkpoint_modules": None,
    "max_saved_bytes": None,
    "experts": None,
    "parallelize": None,
    "optimizer": "adamw",
    "loss_fn": None,
    "memory_budget": None,
    "kernels": None,
    "fake": True,
    "unknown_costs": "error",
    "shard_granularity": None,
    "max_device_bytes": None,
    "offload_optimizer": None,
}


class _Cells:
    """Predicts configurations of one model on one kind of hardware."""

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        hardware: Hardware,
        *,
        wrap: Any,
        mp_policy: MixedPrecisionPolicy,
        checkpoint_modules: Sequence[str] | None,
        max_saved_bytes: int | None,
        experts: Any,
        parallelize: Parallelize | None,
        optimizer: Any,
        loss_fn: LossFn | None,
        memory_budget: float | None,
        kernels: Kernels | None,
        fake: bool,
        unknown_costs: str,
        shard_granularity: Any,
        **options: Any,
    ) -> None:
        check_comm_policy(options["comm_policy"])
        self.hardware = hardware
        self.budget = checked_budget(memory_budget, hardware)
        self._sample_input = sample_input
        self._simulator = Simulator(hardware, optimizer)
        self._dtype = mp_policy.param_dtype or _main_dtype(model)
        self._options = {"mp_policy": mp_policy, **options}
        self._max_saved_bytes = max_saved_bytes
        chosen = kernels_of(kernels, hardware.device_type)
        common: dict[str, Any] = {
            "loss_fn": loss_fn,
            "mp_policy": mp_policy,
            "kernels": chosen,
            "fake": fake,
            "max_saved_bytes": max_saved_bytes,
        }
        self.traces = TracedSteps(
            model,
            sample_input,
            partial(trace_step, **common),
            wrap=wrap,
            checkpoint_modules=checkpoint_modules,
            experts=experts,
            parallelize=parallelize,
            unknown_costs=unknown_costs,
        )
        [(self._label, self._units)] = self.traces.units.items()
        self._granularity = granularities(model, shard_granularity, self.traces.experts)

    def predict(
        self,
        num_ranks: int | Sequence[int],
        size: Size,
        *,
        activation_checkpointing: str,
        strategy: str,
        expert_ranks: int,
        tensor_ranks: int,
        context_ranks: int,
        compiled: Compiled = False,
        ranged: bool = False,
        **choices: Any,
    ) -> Prediction:
        """Simulate one configuration; ``ranged``: with the range of its time."""
        _check_mode(activation_checkpointing)
        check_expert_ranks(expert_ranks, self.traces)
        check_tensor_ranks(tensor_ranks, self.traces)
        check_context_ranks(context_ranks, self.traces)
        degrees = Degrees(expert_ranks, tensor_ranks, context_ranks)
        mesh = _mesh_of(num_ranks, strategy, self.hardware, degrees)
        shape: Any = mesh[0] if len(mesh) == 1 else mesh
        setup = make_setup(
            self._units,
            shape,
            strategy=strategy,
            experts=self.traces.expert_units,
            expert_ranks=expert_ranks,
            tensor_ranks=tensor_ranks,
            context_ranks=context_ranks,
            granularity=self._granularity,
            **choices,
            **self._options,
        )
        trace = self.traces.get(activation_checkpointing, size, degrees, compiled)
        loads = even_load(speeds_of(self.hardware, setup.num_ranks * tensor_ranks))
        work = [(trace, load.speed) for load in loads]
        steps = simulate_ranks(self._simulator, setup, work, keep_samples=True)
        candidate = Candidate(strategy, mesh, activation_checkpointing, self._label)

        def seconds(hardware: Hardware, speed: float) -> float:
            others = [(trace, load.speed * speed) for load in loads]
            made = simulate_ranks(self._simulator.on(hardware), setup, others)
            return outcome_of(candidate, made, self.budget).seconds

        outcome = outcome_of(candidate, steps, self.budget)
        samples, context, tokens = sizes_of(self._sample_input)
        samples, context = size.samples or samples, size.context or context
        rate = None
        if samples is not None:
            rate = samples * setup.micro_batches * setup.num_batches / outcome.seconds
        told = {"strategy": strategy, "wrap": self._label, **choices}
        told["compiled"] = None
        if names := self.traces.compiled_modules(compiled):
            told["compiled"] = "blocks" if compiled is True else plural(len(names), "module")
        if self.traces.experts:
            told["expert_ranks"] = expert_ranks
        if self.traces.parallelize is not None:
            told["tensor_ranks"] = tensor_ranks
        if context_ranks > 1:
            told["context_ranks"] = context_ranks
        return Prediction(
            hardware=self.hardware,
            mesh_shape=mesh,
            tensor_ranks=tensor_ranks,
            context_ranks=context_ranks,
            choices=self._told(told, activation_checkpointing),
            seconds=outcome.seconds,
            samples_per_s=rate,
            tokens_per_s=rate * context if rate and context and tokens else None,
            exposed_s=outcome.exposed_s,
            bound=bound_of(steps[0]),
            peak_bytes=outcome.peak_bytes,
            reserved_bytes=outcome.reserved_bytes,
            needed_bytes=outcome.needed_bytes,
            memory_budget=self.budget,
            fits=outcome.fits,
            samples=samples,
            context=context,
            dtype=self._dtype,
            step=steps[0],
            padding=padding_of(trace, setup, steps[0]),
            range=range_of(self.hardware, seconds) if ranged else None,
            notes=self.traces.notes(trace, self.hardware),
        )

    def _told(self, choices: dict[str, Any], mode: str) -> dict[str, Any]:
        """What makes this configuration, as JSON-compatible data."""
        told = {**choices, "activation_checkpointing": mode}
        reshard = told["reshard_after_forward"]
        told["reshard_after_forward"] = "default" if reshard is None else reshard
        if callable(reshard):
            told["reshard_after_forward"] = "by unit"
        if told["micro_batches"] == 1:
            told["accumulation"] = None
        policy = self._options["mp_policy"]
        for name in ("param_dtype", "reduce_dtype"):
            if (dtype := getattr(policy, name)) is not None:
                told[name] = str(dtype)[6:]
        if isinstance(self._options["offload_policy"], CPUOffloadPolicy):
            told["offload"] = True
        if self._granularity:
            told["shard_granularity"] = f"of {plural(len(self._granularity), 'parameter')}"
        if self._options["max_device_bytes"] is not None:
            told["max_device_bytes"] = self._options["max_device_bytes"]
        for name in ("replicate_below", "comm_policy", "max_gathered_bytes", "offload_optimizer"):
            if value := self._options[name]:
                told[name] = value if isinstance(value, int) else str(value)
        if self._max_saved_bytes is not None:  # 0 is the tightest limit
            told["max_saved_bytes"] = self._max_saved_bytes
        return told


def _main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most elements of parameters."""
    found: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        found[param.dtype] += param.numel()
    return found.most_common(1)[0][0] if found else torch.float32


def _mesh_of(
    num_ranks: Any, strategy: str, hardware: Hardware, degrees: Degrees = ALONE
) -> tuple[int, ...]:
    """The mesh that shards parameters for a number of ranks, or the mesh that is given."""
    if isinstance(num_ranks, list | tuple):
        mesh = checked_mesh(num_ranks)
        check_ranks(prod(mesh) * degrees.tensor, hardware)
    else:
        check_ranks(num_ranks, hardware)
        if num_ranks % degrees.tensor:
            raise ValueError(f"tensor_ranks={degrees.tensor} must divide num_ranks={num_ranks}")
        mesh = (num_ranks // degrees.tensor,)
        if find_strategy(strategy).hybrid:
            node = max(1, min(hardware.ranks_per_node // degrees.tensor, *mesh))
            mesh = (mesh[0] // node, node)
    if mesh[-1] % degrees.context:
        raise ValueError(
            f"context_ranks={degrees.context} must divide the last dim of the mesh, {mesh[-1]}: "
            "parameters are sharded over data and context ranks together"
        )
    return mesh


def _check_mode(mode: Any) -> None:
    if mode not in MODES:
        hint = did_you_mean(str(mode), MODES)
        raise ValueError(f"activation_checkpointing must be one of {MODES}, got {mode!r}{hint}")


def _check_size(name: str, size: Any) -> None:
    if size is not None:
        check_number(name, size)
