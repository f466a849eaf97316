"""The stages of a pipeline, made of a copy of the model, and their traced steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..api.shard_model import Sharding
from ..wrap import as_policy, units_of
from .replay.schedules import SPLIT
from .trace.events import ModelExchange, StepTrace
from .trace.expert_units import experts_of
from .trace.stage import Shape, Stage
from .traces import TracedStage, TracedSteps, on_meta
from .workload import Workload, default_checkpoint_modules


class StagedSteps:
    """Traces the stages of a model on the first request; arguments as in `TracedSteps`.

    Each stage gets the output of the one before it. Equal stages are traced once. Names and classes
    in ``wraps``, ``experts`` and ``checkpoint_modules`` are of the model and of its stages; some
    stages may have none of them.

    Args:
        wraps: None: the blocks of each stage, and the whole stage, with the labels of `wraps_of`.
    """

    def __init__(
        self,
        workload: Workload,
        sharding: Sharding,
        wraps: Mapping[str, Any] | None,
        device_type: str = "cuda",
    ) -> None:
        self._workload = workload
        self._device_type = device_type
        self._sharding = sharding
        self._wraps = {"blocks": "auto", "one": "root"} if wraps is None else wraps
        self._blocks = block_types(workload.model)
        self._made: dict[int, list[TracedSteps]] = {}
        self._names: dict[int, tuple[str, ...]] = {}  # of the blocks of a stage

    @property
    def labels(self) -> list[str]:
        """The labels of the stages' choices of units."""
        return [*self._wraps]

    @property
    def num_traced(self) -> int:
        steps = {id(each): each for stages in self._made.values() for each in stages}
        return sum(each.num_traced for each in steps.values())

    def get(self, workload: Workload, label: str) -> list[TracedStage]:
        """The steps of all stages, with a choice of units; see `TracedSteps.get`.

        Raises:
            ValueError: if ``split_stages`` returns another number of stages, or stages whose
                parameters or experts differ from the model's; for context ranks, if no stage has
                attention.
        """
        num_stages = workload.pipeline_ranks * workload.stages_per_rank
        stages = self._made.get(num_stages)
        if stages is None:
            stages = self._made[num_stages] = self._make(num_stages)
        received: tuple[Shape, ...] = ()
        made = []
        for i, steps in enumerate(stages):
            own = replace(
                workload,
                expert_ranks=workload.expert_ranks if steps.experts else 1,
                compiled=self._names[id(steps)] if workload.compiled is True else False,
            )
            stage, splits = Stage(i == 0, i == num_stages - 1), workload.schedule in SPLIT
            made.append(steps.stage(own, label, stage, received, splits_backward=splits))
            received = made[-1].trace.outputs
        if workload.context_ranks > 1 and not any(_attends(stage.trace) for stage in made):
            raise ValueError(
                f"context_ranks={workload.context_ranks}: no stage of the pipeline calls attention "
                "that torch's context_parallel splits: predict with context_ranks=1"
            )
        return made

    def _make(self, num_stages: int) -> list[TracedSteps]:
        copied = on_meta(self._workload.model)
        params = dict(copied.named_parameters())  # before stages may take modules out of it
        experts = _params_of(copied, experts_of(copied, self._workload.experts))
        assert self._workload.split_stages is not None
        found = self._workload.split_stages(copied, num_stages)
        stages = list(found) if isinstance(found, list | tuple | nn.ModuleList) else []
        if len(stages) != num_stages or not all(isinstance(s, nn.Module) for s in stages):
            raise ValueError(
                f"split_stages must return {num_stages} modules, one for each stage in order, got "
                f"{type(found).__name__} of {len(stages)}"
            )
        numel = sum(sum(p.numel() for p in each.parameters()) for each in stages)
        expected = sum(p.numel() for p in params.values())
        if numel != expected:
            raise ValueError(
                f"The stages have {numel:,} elements of parameters, the model {expected:,}: "
                "split_stages must put each parameter into one stage (not one that is tied into "
                "two)"
            )
        self._check_experts(params, experts, stages)
        for each in (e for wrap in self._wraps.values() for e in _elements(wrap)):
            if each != "auto" and not any(_is_in(stage, each) for stage in stages):
                raise ValueError(
                    f"wrap={each!r} is no module of any stage: names are relative to the stage"
                )
        made: dict[Any, TracedSteps] = {}
        steps = []
        for i, stage in enumerate(stages):
            alike = (i == 0, i == num_stages - 1, _signature(stage))
            if alike not in made:
                made[alike] = self._steps_of(stage)
            steps.append(made[alike])
        return steps

    def _check_experts(
        self, params: Mapping[str, Any], experts: Mapping[str, Any], stages: Sequence[nn.Module]
    ) -> None:
        """Check that the stages have exactly the model's ``experts``, among all its ``params``.

        Stages may be made of copies of modules, so only numbers of elements can be compared.
        """
        found = [p for s in stages for p in _params_of(s, self._experts_of(s)).values()]
        numel, expected = (sum(p.numel() for p in ps) for ps in (found, experts.values()))
        here, meant = {id(p) for p in found}, {id(p) for p in experts.values()}
        others = [name for name, p in params.items() if id(p) in here - meant]
        if numel == expected and not others:
            return
        missing = [name for name, p in experts.items() if id(p) not in here]
        told = f", without '{missing[0]}'" if missing else ""
        told += f", with '{others[0]}'" if others else ""
        raise ValueError(
            f"The experts of all stages have {numel:,} elements of parameters, the model's experts "
            f"{expected:,}{told}: experts= must name the same modules in the stages, whose names "
            "differ. Use a class or a pattern"
        )

    def _experts_of(self, stage: nn.Module) -> list[str]:
        """The names of the modules of experts of a stage."""
        elements = _elements(self._workload.experts)
        return experts_of(stage, [each for each in elements if _names_of(stage, each)] or None)

    def _steps_of(self, stage: nn.Module) -> TracedSteps:
        blocks = blocks_in(stage, self._blocks)
        named, given = dict(stage.named_modules()), self._workload.checkpoint_modules
        recomputed = blocks if given is None else [name for name in given if name in named]
        own = replace(
            self._workload,
            model=stage,
            experts=self._experts_of(stage) or None,
            checkpoint_modules=recomputed,
        )
        wraps = {k: wrap_of_stage(stage, each, self._blocks) for k, each in self._wraps.items()}
        made = TracedSteps(own, self._sharding, wraps, self._device_type)
        self._names[id(made)] = tuple(blocks)
        return made


def _attends(trace: StepTrace) -> bool:
    """Whether the step has attention over parts of sequences."""
    return any(isinstance(each, ModelExchange) and each.group == "context" for each in trace.events)


def block_types(model: nn.Module) -> tuple[type, ...]:
    """The classes of the blocks of a whole model; a stage may have a single block."""
    blocks = default_checkpoint_modules(model, units_of(model, "auto"))
    return tuple({type(model.get_submodule(name)) for name in blocks})


def blocks_in(stage: nn.Module, types: tuple[type, ...]) -> list[str]:
    """The names of the blocks of a stage."""
    named = stage.named_modules()
    return [name for name, module in named if name and isinstance(module, types)]


def wrap_of_stage(stage: nn.Module, wrap: Any, types: tuple[type, ...]) -> Any:
    """``wrap`` for a stage. "auto" finds only repeated blocks, but a stage may have a single one.
    Classes and names of other stages are left out."""
    if wrap != "auto":
        elements = _elements(wrap)
        return [each for each in elements if _is_in(stage, each)] if elements else wrap
    inside = [m for m in stage.modules() if m is not stage and isinstance(m, types)]
    if not inside:
        return "auto"
    names = {name for unit in units_of(stage, "auto") for name in unit.modules}
    units = {id(stage.get_submodule(name)) for name in names if name}
    return "auto" if id(inside[0]) in units else list(dict.fromkeys(map(type, inside)))


def _elements(wrap: Any) -> list[Any]:
    """The parts of a ``wrap`` argument that name modules; none for "root" and sizes, which have the
    same meaning in every stage."""
    if wrap in (None, "root", "none") or (isinstance(wrap, str) and wrap.startswith("size:")):
        return []
    if isinstance(wrap, str) and wrap.startswith("class:"):
        return [f"class:{name.strip()}" for name in wrap[6:].split(",")]
    return [*wrap] if isinstance(wrap, list | tuple) else [wrap]


def _names_of(stage: nn.Module, element: Any) -> list[Any]:
    """The modules of the stage that ``element`` names."""
    try:
        return [*as_policy(element)(stage)]
    except ValueError:  # no such module
        return []


def _params_of(model: nn.Module, modules: Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters of these modules by their names in the model."""
    return {
        f"{name}.{inner}": param
        for name in modules
        for inner, param in model.get_submodule(name).named_parameters()
    }


def _is_in(stage: nn.Module, element: Any) -> bool:
    try:
        units_of(stage, [element])
    except ValueError:  # no such module
        return False
    return True


def _signature(stage: nn.Module) -> Any:
    """Equal for stages with equal steps: classes, attributes and tensors of all modules."""
    return tuple(
        (
            name,
            type(module),
            module.training,
            tuple(sorted((k, v) for k, v in vars(module).items() if type(v) in _PLAIN)),
            tuple(_tensor(k, t) for k, t in module._parameters.items()),
            tuple(_tensor(k, t) for k, t in module._buffers.items()),
            tuple((k, id(v)) for k, v in vars(module).items() if callable(v)),
        )
        for name, module in stage.named_modules()
    )


_PLAIN = (bool, int, float, str)


def _tensor(name: str, tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return name
    return name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
