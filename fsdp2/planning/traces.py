"""Traced steps of one model, shared by all that is simulated of it: plans, predictions, sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..wrap import UnitDescription, units_of
from .candidates import Degrees, wraps_of
from .estimating import compiled_modules, default_checkpoint_modules
from .hardware.hardware import Hardware
from .replay.setups import check_number
from .simulation.loads import with_context, with_part_of_context, with_samples
from .tensor_parallel import Parallelize, parallel_copy
from .trace.context import ContextParallel
from .trace.events import StepTrace
from .trace.expert_units import experts_of, with_experts
from .trace.stage import Shape, Stage
from .trace.trace_options import TraceOptions
from .trace.tracing import trace_step
from .trace.uncosted import check_choice, without_cost


class Size(NamedTuple):
    """Of a micro-batch of one rank; None: that of the sample input."""

    samples: int | None = None
    context: int | None = None


WHOLE = Size()
Compiled = bool | Sequence[str]
ALONE = Degrees()


class TracedSteps:
    """Traces steps of a model when they are first asked for, each once.

    A trace depends on the sizes of the micro-batch, on what is recomputed and on the degrees of the
    model's own parallelisms. It does not depend on units, meshes or ranks: the modules of all
    choices of units are marked in each, so what is simulated of a configuration is the same whoever
    asks (`plan` or `predict`).

    Args:
        options: what is the same for all traces.
        wrap: the one choice of units, or several by label; None: all of `wraps_of`.
        checkpoint_modules: names of modules to recompute; None: the blocks.
        experts: which modules `shard_experts` gets, named as in ``wrap``; None: there are none.
        parallelize: makes a model tensor-parallel over a mesh; None: it is not.
        compiled: as in `estimate`, where `get` is not told otherwise.

    Attributes:
        blocks: names of the modules to recompute.
        wraps: choices of units by label, as `shard_model` takes them.
        units: the same as units.
        experts: names of the modules of experts.
        num_experts: of the module that has the fewest.
        num_traced: the number of steps traced so far.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        options: TraceOptions,
        *,
        wrap: Any = None,
        checkpoint_modules: Any = None,
        experts: Any = None,
        parallelize: Parallelize | None = None,
        unknown_costs: str = "error",
        compiled: Compiled = False,
    ) -> None:
        check_choice(unknown_costs)
        auto = units_of(model, "auto")
        blocks = self._blocks = default_checkpoint_modules(model, auto)
        self.blocks = blocks if checkpoint_modules is None else list(checkpoint_modules)
        usual = wraps_of(auto, blocks)
        self.wraps: Mapping[str, Any] = usual
        if wrap is not None:
            self.wraps = wrap if isinstance(wrap, Mapping) else {_label(wrap): wrap}
        self.experts = experts_of(model, experts)
        self.units: dict[str, tuple[UnitDescription, ...]] = {
            label: with_experts(units_of(model, each), self.experts)
            for label, each in self.wraps.items()
        }
        marked = [units_of(model, each) for each in usual.values()] + [*self.units.values()]
        self._names = [name for units in marked for unit in units for name in unit.modules]
        modules = dict(model.named_modules())
        sizes = [next(modules[name].parameters()).shape[0] for name in self.experts]
        self.num_experts = min(sizes, default=0)
        self.parallelize = parallelize
        self._compiled = self.compiled_modules(compiled)
        self._model = model
        self._sample_input = sample_input
        self._options = replace(options, checkpoint_modules=self.blocks, experts=self.experts)
        self._unknown_costs = unknown_costs
        self._made: dict[Any, StepTrace] = {}

    @property
    def num_traced(self) -> int:
        return len(self._made)

    @property
    def dtype(self) -> torch.dtype:
        """Of computation: that of the policy, or of most parameters."""
        return self._options.mp_policy.param_dtype or _main_dtype(self._model)

    def units_of(self, label: str | None) -> tuple[UnitDescription, ...]:
        """The units with this label, or the only ones."""
        if len(self.units) == 1:
            [units] = self.units.values()
            return units
        assert label is not None
        return self.units[label]

    @property
    def expert_units(self) -> frozenset[tuple[str, ...]]:
        """The units of experts, as their modules."""
        return frozenset((name,) for name in self.experts)

    def get(
        self,
        mode: str,
        size: Size = WHOLE,
        degrees: Degrees = ALONE,
        compiled: Compiled | None = None,
        stage: Stage = Stage(),  # noqa: B008 (frozen)
        received: tuple[Shape, ...] = (),
    ) -> StepTrace:
        """The step with this activation checkpointing and size of the micro-batch, on one rank.

        Args:
            compiled: as in `estimate`; None: that of all.
            stage: of a pipeline, which the model is.
            received: what a rank of that stage gets, if it is not the first.

        Raises:
            ValueError: for operators without a cost, unless they are to be listed, and sequences
                that cannot be split over context ranks.
            RuntimeError: if the model fails.
        """
        names = self._compiled if compiled is None else self.compiled_modules(compiled)
        key = (mode, size, degrees, names, stage, received)
        found = self._made.get(key)
        if found is None:
            sample = with_context(with_samples(self._sample_input, size.samples), size.context)
            length = 0
            if degrees.context > 1:
                sample, length = with_part_of_context(sample, degrees.context)
            if not stage.is_first:
                sample = tuple(
                    torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in received
                )
            copied = parallel_copy(self._model, self.parallelize, degrees.tensor, degrees.context)
            with copied as (model, mesh):
                found = trace_step(
                    model,
                    sample,
                    list(dict.fromkeys(self._names)),
                    self._options,
                    activation_checkpointing=mode,
                    expert_ranks=degrees.experts,
                    tensor_ranks=degrees.tensor,
                    context=None if mesh is None else ContextParallel(mesh, length),
                    compiled=names,
                    stage=stage,
                )
            without_cost(found, self._unknown_costs)  # an error before more traces
            self._made[key] = found
        return found

    def compiled_modules(self, compiled: Compiled) -> tuple[str, ...]:
        """The names of the modules that ``compiled`` means."""
        return compiled_modules(compiled, lambda: self._blocks)

    def notes(self, trace: StepTrace, hardware: Hardware) -> list[str]:
        """What a trace assumes, as sentences."""
        rates = [
            f"Hardware '{hardware.name}' has no FLOP/s of {str(dtype)[6:]}: multiplications in it "
            f"take the time of {str(hardware.rate_of(dtype))[6:]}"
            for dtype in trace.matmul_dtypes
            if hardware.rate_of(dtype) != dtype
        ]
        return [*trace.notes, *without_cost(trace, "list"), *rates, *factor_notes(hardware)]


def factor_notes(hardware: Hardware) -> list[str]:
    """What measured hardware says of parts of steps, as a sentence."""
    if not hardware.step_factors:
        return []
    told = ", ".join(f"{part} {factor:.2f}" for part, factor in hardware.step_factors.items())
    return [f"Parts of a step take longer in a step than alone (step_factors): {told}"]


def check_expert_ranks(ranks: Any, traces: TracedSteps) -> None:
    """Check a number of ranks over which experts are distributed.

    Raises:
        ValueError: if it is less than 1 or more than there are experts, or there are none.
        TypeError: if it is not an int.
    """
    check_number("expert_ranks", ranks)
    if ranks > 1 and not traces.experts:
        raise ValueError(
            f"expert_ranks={ranks} needs experts=: the modules whose dim 0 of all parameters is "
            "the expert"
        )
    if ranks > 1 and ranks > traces.num_experts:
        raise ValueError(
            f"expert_ranks={ranks} is more than the {traces.num_experts} experts: some ranks would "
            "have none"
        )


def check_tensor_ranks(ranks: Any, traces: TracedSteps) -> None:
    """Check a number of ranks of tensor parallelism.

    Raises:
        ValueError: if it is less than 1, or more without a function that makes models parallel.
        TypeError: if it is not an int.
    """
    check_number("tensor_ranks", ranks)
    if ranks > 1 and traces.parallelize is None:
        raise ValueError(
            f"tensor_ranks={ranks} needs parallelize=: a function of the model and a mesh of these "
            "ranks, as with torch's parallelize_module"
        )


def _label(wrap: Any) -> str:
    """How a choice of units is called in tables."""
    if isinstance(wrap, str):
        return {"auto": "blocks", "root": "one"}.get(wrap, wrap)
    return "given"


def _main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most elements of parameters."""
    found: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        found[param.dtype] += param.numel()
    return found.most_common(1)[0][0] if found else torch.float32
