"""Finds the factors by which parts of a step take longer in a step than alone.

Operators, collectives and the host are measured one kind at a time. A whole step takes longer:
caches hold data of other layers, freed memory faults in again, ranks compute different things at
the same time, and the host does more than call operators. Measurements of parts do not show this.
So a few models are trained, and their steps are predicted from these measurements. Each part gets
the factor with which the predictions are closest to the measured steps.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...api.shard_model import Sharding, shard_model
from ...policy import MixedPrecisionPolicy
from ...wrap import UnitDescription, units_of
from ..replay.setups import make_setup
from ..simulation.simulate import Simulator
from ..trace.events import StepTrace
from ..trace.trace_options import TraceOptions
from ..trace.tracing import trace_step
from ..workload import Workload
from .curves import round_to
from .hardware import STEP_PARTS, Hardware
from .in_steps import wait_for
from .meeting import together
from .reference_models import CPU, CUDA, QUICK, Reference

_UNSHARDED = "unsharded"  # each rank alone: separates compute from communication
_SHARDED = ("full", "grad", "none")
_ROUNDS, _WARM_UP = 4, 2
_MOST = 3.0  # limit on a factor, and on its inverse
# The squared errors of steps (about 10 %) over the squared errors of factors (30 %): a part that
# the steps hardly determine keeps its time.
_STIFFNESS = 0.1


def _policy(device: torch.device) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=None if device.type == "cpu" else torch.bfloat16)


def _devices(device: torch.device) -> list[torch.device]:
    """The devices that have a separate random number generator."""
    return [] if device.type == "cpu" else [device]


def _strategies(device: torch.device) -> list[str]:
    """The strategies to measure; if sharding casts parameters, no unsharded model is equivalent."""
    casts = _policy(device).param_dtype is not None
    return [*_SHARDED] if casts else [_UNSHARDED, *_SHARDED]


@dataclass(frozen=True)
class ReferenceStep:
    """A measured step.

    Attributes:
        seconds: of forward and backward and, if parameters are as in a sharded run on these ranks,
            of the optimizer.
        predict: predicts these seconds for hardware.
    """

    name: str
    seconds: Sequence[float]
    predict: Callable[[Hardware], Sequence[float]]


class _Trainee:
    """A model with its optimizer, sharded in one way, and its batches."""

    def __init__(
        self, reference: Reference, strategy: str, mesh: DeviceMesh | None, device: torch.device
    ) -> None:
        with torch.device(device), torch.random.fork_rng(_devices(device)):
            torch.manual_seed(0)  # all ranks begin with the same values
            model = reference.make()
            self.batches = {n: reference.batch(n) for n in reference.samples}
        if mesh is not None and strategy != _UNSHARDED:
            model = shard_model(model, mesh, strategy=strategy, mp_policy=_policy(device))
        self._model, self._loss, self._device = model, reference.loss, device
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.seconds: dict[int, list[tuple[float, float]]] = {n: [] for n in reference.samples}

    def step(self, samples: int) -> None:
        wait_for(self._device)
        start = time.perf_counter()
        self._loss(self._model(self.batches[samples])).backward()
        wait_for(self._device)
        middle = time.perf_counter()
        self._optimizer.step()
        wait_for(self._device)
        end = time.perf_counter()
        self._optimizer.zero_grad()
        self.seconds[samples].append((middle - start, end - middle))


def measured_steps(
    references: Mapping[str, Reference],
    device: torch.device,
    progress: Callable[[str], None],
    rounds: int = _ROUNDS,
) -> list[ReferenceStep]:
    """Train each reference with each strategy, taking turns. All ranks call this."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = init_device_mesh(device.type, (world,)) if world > 1 else None
    strategies = _strategies(device) if mesh is not None else [_UNSHARDED]
    found = []
    for name, reference in references.items():
        progress(f"steps of a model: {name}")
        trainees = {each: _Trainee(reference, each, mesh, device) for each in strategies}
        for _ in range(rounds + _WARM_UP):
            for samples in reference.samples:
                for trainee in trainees.values():
                    together()
                    trainee.step(samples)
        predictor = ReferencePredictor(reference, world, device)
        for strategy, trainee in trainees.items():
            for samples, seconds in trainee.seconds.items():
                predict = predictor.of(strategy, samples)
                slowest = _slowest(seconds[_WARM_UP:], device)[: predictor.num_parts(strategy)]
                found.append(ReferenceStep(f"{name}, {strategy}, {samples}", slowest, predict))
        del trainees, trainee
        gc.collect()
    return found


def averaged(first: Sequence[ReferenceStep], again: Sequence[ReferenceStep]) -> list[ReferenceStep]:
    """The geometric means of the same steps, measured twice."""
    # Not the shorter time: predictions are of the usual time, and would be 10 % too short.
    return [
        replace(a, seconds=tuple(sqrt(x * y) for x, y in zip(a.seconds, b.seconds, strict=True)))
        for a, b in zip(first, again, strict=True)
    ]


def _slowest(seconds: Sequence[tuple[float, float]], device: torch.device) -> tuple[float, float]:
    """Medians of steps; the slowest rank's time counts."""
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    first, second = (median(each) for each in zip(*found.tolist(), strict=True))
    return first, second


_Traced = tuple[StepTrace, Sequence[UnitDescription], Workload]


class ReferencePredictor:
    """Predicts steps of one reference; traces each batch on the first request."""

    def __init__(self, reference: Reference, world: int, device: torch.device) -> None:
        self._reference, self._world, self._device = reference, world, device
        self._policy = _policy(device) if world > 1 else MixedPrecisionPolicy()
        self._traces: dict[int, _Traced] = {}
        self._simulator: Simulator | None = None

    def num_parts(self, strategy: str) -> int:
        """How many of a step's two parts are predicted: on many ranks, optimizers are assumed to
        have DTensors."""
        return 1 if strategy == _UNSHARDED and self._world > 1 else 2

    def of(self, strategy: str, samples: int) -> Callable[[Hardware], Sequence[float]]:
        """Seconds of forward and backward, and of the optimizer, of a step on hardware."""
        unsharded = strategy == _UNSHARDED

        def predict(hardware: Hardware) -> Sequence[float]:
            trace, units, workload = self._trace(samples)
            setup = make_setup(
                units,
                1 if unsharded else self._world,
                workload,
                Sharding("none" if unsharded else strategy, mp_policy=self._policy),
                device_type=self._device.type,
            )
            known = self._simulator
            self._simulator = Simulator(hardware) if known is None else known.on(hardware)
            made = self._simulator.run(trace, setup)
            return (made.seconds - made.optimizer_s, made.optimizer_s)[: self.num_parts(strategy)]

        return predict

    def _trace(self, samples: int) -> _Traced:
        if samples not in self._traces:
            with torch.device("meta"):
                model = self._reference.make()
                batch = self._reference.batch(samples)
            units = units_of(model, "auto")
            workload = Workload(model, batch, loss_fn=self._reference.loss)
            names = list(dict.fromkeys(name for unit in units for name in unit.modules))
            trace = trace_step(TraceOptions(workload, self._policy, self._device.type), names)
            self._traces[samples] = trace, units, workload
        return self._traces[samples]


def references_of(device: torch.device, *, quick: bool) -> Mapping[str, Reference]:
    """The models to train on a device."""
    return QUICK if quick else (CPU if device.type == "cpu" else CUDA)


def step_factors(steps: Sequence[ReferenceStep], hardware: Hardware) -> dict[str, float]:
    """The `Hardware.step_factors` with which ``steps`` are predicted best."""

    def predict(factors: Mapping[str, float]) -> list[float]:
        made = replace(hardware, step_factors=factors)
        return [seconds for step in steps for seconds in step.predict(made)]

    measured = [seconds for step in steps for seconds in step.seconds]
    return {k: round_to(v, 4) for k, v in fitted(predict, measured, STEP_PARTS).items()}


def fitted(
    predict: Callable[[Mapping[str, float]], Sequence[float]],
    measured: Sequence[float],
    names: Sequence[str],
    rounds: int = 2,
) -> dict[str, float]:
    """The factors with which ``predict`` is closest to the measured times.

    They minimize squares of logarithms, by the Gauss-Newton method, since a step need not be the
    sum of its parts: the errors of predictions, and `_STIFFNESS` times the factors' deviation from
    1.

    Args:
        predict: seconds of each step with these factors.
    """
    logs = torch.zeros(len(names), dtype=torch.float64)
    goal = _logs(measured)
    bound = log(_MOST)

    def at(point: torch.Tensor) -> torch.Tensor:
        made = predict({n: exp(v) for n, v in zip(names, point.tolist(), strict=True)})
        return _logs(made)

    for _ in range(rounds):
        here, slopes, by = at(logs), [], 0.02
        for i in range(len(names)):
            moved = logs.clone()
            moved[i] += by
            slopes.append((at(moved) - here) / by)
        slope = torch.stack(slopes, 1)
        matrix = slope.T @ slope + _STIFFNESS * torch.eye(len(names), dtype=torch.float64)
        down = slope.T @ (goal - here) - _STIFFNESS * logs
        logs = (logs + torch.linalg.solve(matrix, down)).clamp(-bound, bound)
    return {n: exp(v) for n, v in zip(names, logs.tolist(), strict=True)}


def _logs(seconds: Sequence[float]) -> torch.Tensor:
    return torch.tensor(seconds, dtype=torch.float64).log()
