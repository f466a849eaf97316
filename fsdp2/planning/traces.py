"""Traced steps of one model, shared by all its simulations: plans, predictions, sweeps."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ..api.shard_model import Sharding
from ..wrap import UnitDescription, units_of
from .hardware.hardware import Hardware
from .simulation.loads import with_context, with_part_of_context, with_samples
from .trace.attention import ContextParallel
from .trace.events import StepTrace
from .trace.expert_units import experts_of, with_experts
from .trace.stage import Shape, Stage
from .trace.trace_options import TraceOptions
from .trace.tracing import trace_step
from .trace.uncosted import without_cost
from .workload import Compiled, Parallelize, Workload, compiled_modules, default_checkpoint_modules


@contextmanager
def parallel_copy(
    model: nn.Module, parallelize: Parallelize | None, ranks: int, context_ranks: int = 1
) -> Iterator[tuple[nn.Module, DeviceMesh | None]]:
    """Yield the model and the mesh of context ranks (None for one).

    With one tensor rank, it is ``model``; otherwise a tensor-parallel copy on the meta device. The
    process group of the meshes sends nothing, and exists only within the context.

    Raises:
        ValueError: if there is already a process group.
    """
    tensor_ranks = 1 if parallelize is None else ranks
    if tensor_ranks == context_ranks == 1:
        yield model, None
        return
    if dist.is_initialized():
        name, number = ("tensor_ranks", ranks) if ranks > 1 else ("context_ranks", context_ranks)
        raise ValueError(
            f"{name}={number} makes a process group of ranks that do not exist, but there is "
            "one already: predict in a process without one"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = context_ranks * tensor_ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        shape, names = (context_ranks, tensor_ranks), ("context", "tensor")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        made = model
        if tensor_ranks > 1 and parallelize is not None:
            copied = on_meta(model)
            made = parallelize(copied, mesh["tensor"]) or copied
            if not any(isinstance(p, DTensor) for p in made.parameters()):
                raise ValueError(
                    "parallelize left all parameters of the model plain: none is a DTensor"
                )
        yield made, mesh["context"] if context_ranks > 1 else None
    finally:
        dist.destroy_process_group()


def on_meta(model: nn.Module) -> nn.Module:
    """A copy without memory."""
    with torch.no_grad():
        memo: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            for p in model.parameters()
        }
        memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, memo)


class TracedStage(NamedTuple):
    """The step of a stage (or the whole model) with one micro-batch, and its units.

    Attributes:
        split: the step with gradients of inputs first; None: it was not requested.
        expert_units: the units that `shard_experts` makes, as their modules.
    """

    trace: StepTrace
    units: tuple[UnitDescription, ...]
    split: StepTrace | None = None
    expert_units: frozenset[tuple[str, ...]] = frozenset()


class TracedSteps:
    """Traces each step of a model once, on the first request.

    A trace depends on the sizes of the micro-batch, on recomputation, and on the degrees of the
    model's own parallelisms. It does not depend on units, meshes or ranks, because the modules of
    all choices of units are marked in each trace. `plan` and `predict` therefore simulate the same
    step.

    Args:
        workload: the common part of all steps: everything except the arguments of `get`.
        sharding: its dtypes matter here, and its units if ``wraps`` is None.
        wraps: choices of units by label; None: the units of ``sharding``.
        device_type: as in `TraceOptions`.

    Attributes:
        blocks: names of the modules to recompute.
        units: the units of each choice, by label.
        experts: names of the modules of experts.
        num_experts: number of experts of the module that has the fewest.
    """

    def __init__(
        self,
        workload: Workload,
        sharding: Sharding,
        wraps: Mapping[str, Any] | None = None,
        device_type: str = "cuda",
    ) -> None:
        self.workload = workload
        model = workload.model
        auto = units_of(model, "auto")
        self._blocks = default_checkpoint_modules(model, auto)
        given = workload.checkpoint_modules
        self.blocks = self._blocks if given is None else list(given)
        self.wraps = {_label(sharding.wrap): sharding.wrap} if wraps is None else wraps
        self.experts = experts_of(model, workload.experts)
        self.units: dict[str, tuple[UnitDescription, ...]] = {
            label: with_experts(units_of(model, each), self.experts)
            for label, each in self.wraps.items()
        }
        usual = wraps_of(auto, self._blocks).values()
        marked = [units_of(model, each) for each in usual] + [*self.units.values()]
        names = [name for units in marked for unit in units for name in unit.modules]
        self._names = list(dict.fromkeys(names))
        modules = dict(model.named_modules())
        sizes = [next(modules[name].parameters()).shape[0] for name in self.experts]
        self.num_experts = min(sizes, default=0)
        self._mp_policy, self._device_type = sharding.mp_policy, device_type
        self._made: dict[Any, StepTrace] = {}

    @property
    def num_traced(self) -> int:
        return len(self._made)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computation: of the policy, or of most parameters."""
        return self._mp_policy.param_dtype or _main_dtype(self.workload.model)

    def label_of(self, wrap: Any) -> str:
        """The label of this choice of units."""
        return next(label for label, each in self.wraps.items() if each is wrap or each == wrap)

    @property
    def expert_units(self) -> frozenset[tuple[str, ...]]:
        """The units of experts, as their modules."""
        return frozenset((name,) for name in self.experts)

    def stage(
        self,
        workload: Workload,
        label: str,
        stage: Stage = Stage(),  # noqa: B008 (frozen)
        received: tuple[Shape, ...] = (),
        *,
        splits_backward: bool = False,
    ) -> TracedStage:
        """The step with one choice of units; with ``splits_backward``, also with a split backward;
        see `get`."""
        trace, split = self.get(workload, stage, received), None
        if splits_backward:
            split = self.get(workload, stage._replace(splits_backward=True), received)
        return TracedStage(trace, self.units[label], split, self.expert_units)

    def get(
        self,
        workload: Workload,
        stage: Stage = Stage(),  # noqa: B008 (frozen)
        received: tuple[Shape, ...] = (),
    ) -> StepTrace:
        """The step on one rank.

        Args:
            workload: like the common one; may differ in the sizes of the micro-batch, activation
                checkpointing, compiled modules, and numbers of ranks.
            stage: the stage of a pipeline that the model is.
            received: the input of a rank of that stage, if it is not the first one.

        Raises:
            ValueError: for operators without a cost, unless ``unknown_costs`` is "list", and for
                sequences that cannot be split over context ranks.
            RuntimeError: if the model fails.
        """
        compiled = self.compiled_modules(workload.compiled)
        context_ranks, sizes = workload.context_ranks, (workload.samples, workload.context)
        degrees = (workload.expert_ranks, workload.tensor_ranks, context_ranks)
        key = (workload.activation_checkpointing, sizes, degrees, compiled, stage, received)
        if key in self._made:
            return self._made[key]
        sample = with_context(with_samples(workload.sample_input, sizes[0]), sizes[1])
        length = 0
        if context_ranks > 1:
            sample, length = with_part_of_context(sample, context_ranks)
        if not stage.is_first:
            sample = tuple(
                torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in received
            )
        base = self.workload
        copied = parallel_copy(base.model, base.parallelize, workload.tensor_ranks, context_ranks)
        with copied as (model, mesh):
            own = replace(
                workload,
                model=model,
                sample_input=sample,
                checkpoint_modules=self.blocks,
                compiled=compiled,
            )
            context = None if mesh is None else ContextParallel(mesh, length)
            found = trace_step(
                TraceOptions(own, self._mp_policy, self._device_type, self.experts, context, stage),
                self._names,
            )
        without_cost(found, workload.unknown_costs)  # an error before more traces
        self._made[key] = found
        return found

    def compiled_modules(self, compiled: Compiled) -> tuple[str, ...]:
        """The names of the modules that ``compiled`` means."""
        return compiled_modules(compiled, self._blocks)

    def notes(self, trace: StepTrace, hardware: Hardware) -> list[str]:
        """The assumptions of a trace, as sentences."""
        rates = [
            f"Hardware '{hardware.name}' has no FLOP/s of {str(dtype)[6:]}: multiplications in it "
            f"take the time of {str(hardware.rate_of(dtype))[6:]}"
            for dtype in trace.matmul_dtypes
            if hardware.rate_of(dtype) != dtype
        ]
        return [*trace.notes, *without_cost(trace, "list"), *rates, *factor_notes(hardware)]

    def check_ranks(self, workload: Workload) -> None:
        """Check the numbers of expert and tensor ranks.

        Raises:
            ValueError: for more expert ranks than experts, expert ranks without experts, and tensor
                ranks without ``parallelize``.
        """
        ranks = workload.expert_ranks
        if ranks > 1 and not self.experts:
            raise ValueError(
                f"expert_ranks={ranks} needs experts=: the modules whose dim 0 of all parameters "
                "is the expert"
            )
        if ranks > 1 and ranks > self.num_experts:
            raise ValueError(
                f"expert_ranks={ranks} is more than the {self.num_experts} experts: some ranks "
                "would have none"
            )
        if workload.tensor_ranks > 1 and workload.parallelize is None:
            raise ValueError(
                f"tensor_ranks={workload.tensor_ranks} needs parallelize=: a function of the model "
                "and a mesh of these ranks, as with torch's parallelize_module"
            )


def factor_notes(hardware: Hardware) -> list[str]:
    """The measured factors of parts of steps, as a sentence."""
    if not hardware.step_factors:
        return []
    told = ", ".join(f"{part} {factor:.2f}" for part, factor in hardware.step_factors.items())
    return [f"Parts of a step take longer in a step than alone (step_factors): {told}"]


def wraps_of(units: Sequence[UnitDescription], blocks: Sequence[str]) -> dict[str, Any]:
    """Choices of units as `shard_model` accepts them: one block, several blocks, the whole model.

    Args:
        units: from ``units_of(model, "auto")``.
        blocks: names of the modules that share a class.
    """
    wraps: dict[str, Any] = {"blocks": "auto"}
    names = [u.modules for u in units if not u.is_root]
    single = [group for group in names if len(group) == 1 and group[0] in set(blocks)]
    for size in (2, 4):
        if len(single) >= 2 * size:
            grouped: dict[tuple[str, ...], tuple[str, ...]] = {}
            for i in range(0, len(single), size):
                whole = tuple(name for group in single[i : i + size] for name in group)
                grouped |= dict.fromkeys(single[i : i + size], whole)
            wraps[f"{size} blocks"] = [
                group[0] if len(group) == 1 else group
                for group in dict.fromkeys(grouped.get(group, group) for group in names)
            ]
    wraps["one"] = "root"
    return wraps


def usual_wraps(model: nn.Module) -> dict[str, Any]:
    """The choices of units that `plan` searches."""
    auto = units_of(model, "auto")
    return wraps_of(auto, default_checkpoint_modules(model, auto))


def labelled(wraps: Sequence[Any]) -> dict[str, Any]:
    """These choices of units by label."""
    found: dict[str, Any] = {}
    for wrap in wraps:
        label = _label(wrap)
        found[label if label not in found else f"{label} {len(found) + 1}"] = wrap
    return found


def _label(wrap: Any) -> str:
    """The name of a choice of units in tables."""
    if isinstance(wrap, str):
        return {"auto": "blocks", "root": "one"}.get(wrap, wrap)
    return "given"


def _main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most elements of parameters."""
    found: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        found[param.dtype] += param.numel()
    return found.most_common(1)[0][0] if found else torch.float32
