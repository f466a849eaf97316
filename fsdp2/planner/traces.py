"""Traced steps of one model, shared by all that is simulated of it: plans, predictions, sweeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from ..estimation.estimating import default_checkpoint_modules
from ..estimation.events import StepTrace
from ..estimation.uncosted import check_choice, without_cost
from ..wrap import UnitDescription, units_of
from .candidates import wraps_of
from .hardware import Hardware
from .loads import with_context, with_samples


class Size(NamedTuple):
    """Of a micro-batch of one rank; None: that of the sample input."""

    samples: int | None = None
    context: int | None = None


WHOLE = Size()


class TracedSteps:
    """Traces steps of a model when they are first asked for, each once.

    A trace depends on the sizes of the micro-batch and on what is recomputed. It does not depend on
    units, meshes or ranks: the modules of all choices of units are marked in each, so what is
    simulated of a configuration is the same whoever asks (`plan` or `predict`).

    Args:
        trace: ``trace_step`` of the model with all that is the same for all traces; takes the
            sample input, the names of the modules that may be units, and keyword arguments.
        wrap: the one choice of units; None: all of `wraps_of`.
        checkpoint_modules: names of modules to recompute; None: the blocks.

    Attributes:
        blocks: names of the modules to recompute.
        wraps: choices of units by label, as `shard_model` takes them.
        units: the same as units.
        num_traced: the number of steps traced so far.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any,
        trace: Callable[..., StepTrace],
        *,
        wrap: Any = None,
        checkpoint_modules: Any = None,
        unknown_costs: str = "error",
    ) -> None:
        check_choice(unknown_costs)
        auto = units_of(model, "auto")
        blocks = default_checkpoint_modules(model, auto)
        self.blocks = blocks if checkpoint_modules is None else list(checkpoint_modules)
        usual = wraps_of(auto, blocks)
        self.wraps: Mapping[str, Any] = usual if wrap is None else {_label(wrap): wrap}
        self.units: dict[str, tuple[UnitDescription, ...]] = {
            label: tuple(units_of(model, each)) for label, each in self.wraps.items()
        }
        marked = [units_of(model, each) for each in usual.values()] + [*self.units.values()]
        self._names = [name for units in marked for unit in units for name in unit.modules]
        self._sample_input = sample_input
        self._trace = trace
        self._unknown_costs = unknown_costs
        self._made: dict[tuple[str, Size], StepTrace] = {}

    @property
    def num_traced(self) -> int:
        return len(self._made)

    def get(self, mode: str, size: Size = WHOLE) -> StepTrace:
        """The step with this activation checkpointing and size of the micro-batch.

        Raises:
            ValueError: for operators without a cost, unless they are to be listed.
            RuntimeError: if the model fails.
        """
        found = self._made.get((mode, size))
        if found is None:
            sample = with_samples(self._sample_input, size.samples)
            found = self._trace(
                with_context(sample, size.context),
                list(dict.fromkeys(self._names)),
                activation_checkpointing=mode,
                checkpoint_modules=self.blocks,
            )
            without_cost(found, self._unknown_costs)  # an error before more traces
            self._made[mode, size] = found
        return found

    def notes(self, trace: StepTrace, hardware: Hardware) -> list[str]:
        """What a trace assumes, as sentences."""
        rates = [
            f"Hardware '{hardware.name}' has no FLOP/s of {str(dtype)[6:]}: multiplications in it "
            f"take the time of {str(hardware.rate_of(dtype))[6:]}"
            for dtype in trace.matmul_dtypes
            if hardware.rate_of(dtype) != dtype
        ]
        return [*trace.notes, *without_cost(trace, "list"), *rates]


def _label(wrap: Any) -> str:
    """How a choice of units is called in tables."""
    if isinstance(wrap, str):
        return {"auto": "blocks", "root": "one"}.get(wrap, wrap)
    return "given"
