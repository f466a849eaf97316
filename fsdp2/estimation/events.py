"""What one step of a model does, as a list of events: pure data, no tensors.

A `StepTrace` is made once (`tracing.trace_step`) and replayed any number of times: for other
meshes, other units, other policies. It knows modules and parameters by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch


class Kind(Enum):
    """The points of a step at which the runtime is called."""

    ENTER = "forward begins"
    LEAVE = "forward ends"
    BACKWARD_ENTER = "backward reaches the outputs"
    BACKWARD_LEAVE = "backward leaves by the inputs"


@dataclass(frozen=True)
class Call:
    """A module that may be a unit is at one of its four borders.

    Attributes:
        module: index into `StepTrace.modules`.
        flag: ENTER: whether an input needs a gradient, so that backward will leave by it;
            LEAVE: whether an output needs one.
    """

    kind: Kind
    module: int
    flag: bool = False


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter is complete.

    Attributes:
        param: index into `StepTrace.params`.
        nbytes: of the memory that it keeps; counted as an activation until now.
    """

    param: int
    nbytes: int


@dataclass(frozen=True)
class Operation:
    """One kernel, by what it costs.

    Attributes:
        flops: multiplications and additions that matrix units do (two per multiply-add).
        nbytes: read and written.
        dtype: of its operands.
        attention: whether it is a fused attention kernel.
    """

    flops: int
    nbytes: int
    dtype: torch.dtype
    attention: bool = False


@dataclass(frozen=True, eq=False)
class Compute:
    """What runs between two other events.

    Attributes:
        peak: most bytes of activations inside, above those at its begin.
        net: bytes of activations after it, above those at its begin.
    """

    operations: tuple[Operation, ...]
    peak: int
    net: int

    @property
    def flops(self) -> int:
        return sum(operation.flops for operation in self.operations)


@dataclass(frozen=True)
class StartOfBackward:
    """Forward and loss are done."""


Event = Call | Gradient | Compute | StartOfBackward


@dataclass(frozen=True)
class ParamInfo:
    """A parameter as the user made it.

    Attributes:
        name: its first qualified name.
        dtype: in which it is stored.
        param_dtype: what the mixed-precision policy says for it.
        is_embedding: whether it is the weight of exactly one ``nn.Embedding``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_embedding: bool
    param_dtype: torch.dtype | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass
class StepTrace:
    """One forward and backward.

    Attributes:
        events: in the order of the host.
        modules: names of the modules that may be units.
        module_order: names of all modules, in the order of the model.
        embeddings: names of those that are exactly ``nn.Embedding``.
        input_bytes: of the sample input; alive during the whole step.
        buffer_bytes: of the model's buffers.
    """

    events: list[Event] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    module_order: list[str] = field(default_factory=list)
    embeddings: frozenset[str] = frozenset()
    params: list[ParamInfo] = field(default_factory=list)
    input_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def flops(self) -> int:
        """Of forward and backward, recomputation included."""
        return sum(event.flops for event in self.events if isinstance(event, Compute))

    @property
    def activation_peak(self) -> int:
        """Most bytes of activations at any time, without inputs."""
        live = peak = 0
        for event in self.events:
            if isinstance(event, Compute):
                peak = max(peak, live + event.peak)
                live += event.net
            elif isinstance(event, Gradient):
                live -= event.nbytes
        return peak

    def indices(self, names: Sequence[str]) -> list[int]:
        """Numbers of the parameters with these names."""
        where = {param.name: i for i, param in enumerate(self.params)}
        return [where[name] for name in names]
