"""One step of a model as a list of events: pure data, no tensors.

A `StepTrace` is made once (`tracing.trace_step`) and replayed any number of times, with different
meshes, units and policies. It refers to modules and parameters by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import prod

import torch


class CallKind(Enum):
    """The points of a step at which the runtime is called."""

    ENTER = "forward begins"
    LEAVE = "forward ends"
    BACKWARD_ENTER = "backward reaches the outputs"
    BACKWARD_LEAVE = "backward leaves through the inputs"


class Event:
    """An event in a step."""


@dataclass(frozen=True)
class Call(Event):
    """Forward or backward enters or leaves a module that may be a unit.

    Attributes:
        module: index into `StepTrace.modules`.
        flag: for ENTER, whether an input needs a gradient, so that backward will leave through it;
            for LEAVE, whether an output needs one.
    """

    kind: CallKind
    module: int
    flag: bool = False


@dataclass(frozen=True)
class Gradient(Event):
    """The gradient of a parameter is complete.

    Attributes:
        param: index into `StepTrace.params`.
        nbytes: bytes of its memory, which counted as an activation until now.
        dtype: the dtype in which autograd made it.
        storage: the number of its memory in ``Compute.memory``.
    """

    param: int
    nbytes: int
    dtype: torch.dtype
    storage: int = -1


@dataclass(frozen=True)
class Operation:
    """The cost of one kernel.

    Attributes:
        flops: FLOPs of matrix multiplications and the like (two per multiply-add).
        nbytes: bytes read and written.
        dtype: dtype of the operands.
        attention: whether it is a fused attention kernel.
        operator: the operator's name, "namespace::name", if the kernel is a call of one.
    """

    flops: int
    nbytes: int
    dtype: torch.dtype
    attention: bool = False
    operator: str = ""


@dataclass(frozen=True)
class Uncosted:
    """The calls of an operator whose cost is not known.

    Attributes:
        calls: in a forward and backward.
        nbytes: bytes of the tensors that they read and wrote.
    """

    calls: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Compute(Event):
    """The operations between two other events.

    Attributes:
        peak: peak bytes of activations during them, relative to the beginning.
        net: bytes of activations at the end, relative to the beginning.
        memory: allocations and frees in order: the number of a storage and its bytes, or 0 if it
            is freed.
        num_recomputed: how many of the operations belong to a forward that backward repeats.
    """

    operations: tuple[Operation, ...]
    peak: int
    net: int
    memory: tuple[tuple[int, int], ...] = ()
    num_recomputed: int = 0

    @property
    def flops(self) -> int:
        return sum(operation.flops for operation in self.operations)


@dataclass(frozen=True)
class ModelExchange(Event):
    """A collective of the model itself, which compute waits for.

    It moves tokens between the ranks of experts, partial results of tensor parallelism, or keys and
    values of other parts of a sequence.

    Attributes:
        nbytes: bytes of the whole data that is gathered, scattered or reduced; for an all-to-all,
            the bytes that a rank sends, also to itself.
        ranks: number of ranks of the group.
        kind, group: as in `Collective`.
        number: of the `ExchangeEnd` at which compute waits for it; None: it waits at once.
    """

    nbytes: int
    ranks: int
    kind: str = "all_to_all"
    group: str = "experts"
    number: int | None = None


@dataclass(frozen=True)
class ExchangeEnd(Event):
    """Compute waits for the `ModelExchange` of this ``number``."""

    number: int


@dataclass(frozen=True)
class HostCopy(Event):
    """The copy of a saved tensor between device and host begins, in parallel to compute.

    Attributes:
        number: the number of the copy.
        kind: "to host" or "to device".
        nbytes: its bytes.
    """

    number: int
    kind: str
    nbytes: int


@dataclass(frozen=True)
class CopyEnd(Event):
    """Compute waits for the `HostCopy` of this ``number``."""

    number: int


@dataclass(frozen=True)
class StartOfBackward(Event):
    """Forward and loss are done."""


@dataclass(frozen=True)
class StartOfWeights(Event):
    """A split backward has made the gradients of inputs; the gradients of weights follow."""


@dataclass(frozen=True)
class ParamInfo:
    """A parameter as the user made it.

    Attributes:
        name: its first qualified name.
        dtype: dtype of storage.
        param_dtype: the ``param_dtype`` that the mixed-precision policy gives it.
        num_experts: number of experts, if it belongs to experts on a separate mesh; dim 0 of
            ``shape`` then counts the experts of one rank. None: it does not.
        made_dtype: its dtype before it was sharded; None: ``dtype``.
        is_embedding: whether it is the weight of exactly one ``nn.Embedding``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_embedding: bool
    param_dtype: torch.dtype | None = None
    num_experts: int | None = None
    made_dtype: torch.dtype | None = None

    @property
    def made_bytes(self) -> int:
        """Bytes of the whole parameter as the user made it, which ``replicate_below`` counts."""
        return self.numel * (self.made_dtype or self.dtype).itemsize

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def numel_of_all_experts(self) -> int:
        """Elements of the whole parameter, wherever its experts are."""
        if self.num_experts is None:
            return self.numel
        return self.numel // self.shape[0] * self.num_experts


@dataclass
class StepTrace:
    """One forward and backward.

    Attributes:
        events: in host order.
        modules: names of the modules that may be units.
        module_order: names of all modules, in model order.
        embeddings: names of the modules whose backward does not read their parameters.
        input_bytes: bytes of the sample input, which lives during the whole step.
        buffer_bytes: bytes of the model's buffers.
        host_bytes: the most host memory that offloaded activations use.
        nbytes: bytes that all operations read and write.
        uncosted: the operators without a cost, by name.
        notes: assumptions of the trace, as sentences.
        outputs: shapes and dtypes of the tensors that a stage of a pipeline sends.
        sent_bytes: bytes of these tensors.
        returned_bytes: bytes of the gradients that a stage of a pipeline sends back.
    """

    events: list[Event] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    module_order: list[str] = field(default_factory=list)
    embeddings: frozenset[str] = frozenset()
    params: list[ParamInfo] = field(default_factory=list)
    input_bytes: int = 0
    buffer_bytes: int = 0
    host_bytes: int = 0
    nbytes: int = 0
    uncosted: dict[str, Uncosted] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    sent_bytes: int = 0
    returned_bytes: int = 0

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward, including recomputation."""
        return sum(event.flops for event in self.events if isinstance(event, Compute))

    @property
    def matmul_dtypes(self) -> list[torch.dtype]:
        """The dtypes in which it multiplies."""
        made = (event.operations for event in self.events if isinstance(event, Compute))
        found = {o.dtype: None for operations in made for o in operations if o.flops}
        return list(found)

    @property
    def activation_peak(self) -> int:
        """Peak bytes of activations, without inputs."""
        live = peak = 0
        for event in self.events:
            if isinstance(event, Compute):
                peak = max(peak, live + event.peak)
                live += event.net
            elif isinstance(event, Gradient):
                live -= event.nbytes
        return peak

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that get a gradient; some may be unused."""
        numbers = {event.param for event in self.events if isinstance(event, Gradient)}
        return frozenset(self.params[number].name for number in numbers)

    def indices(self, names: Sequence[str]) -> list[int]:
        """Numbers of the parameters with these names."""
        return [self._numbers[name] for name in names]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {param.name: i for i, param in enumerate(self.params)}
