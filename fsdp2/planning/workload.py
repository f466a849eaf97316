"""The training step: a model, its batch and optimizer; not its sharding or hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..common.checks import check_kind, check_number
from ..common.suggestions import did_you_mean
from .trace.checkpointing import MODES
from .trace.kernels import Kernels
from .trace.optimizers import StateOffload
from .trace.uncosted import CHOICES

# How gradients of micro-batches are summed: unsharded, and reduced in the last micro-batch;
# reduce-scattered in each, and all-reduced over replicas in the last
# (`FSDPModule.set_accumulate_sharded`); or fully reduced in each, the default of `fully_shard`.
ACCUMULATIONS = ("unsharded", "sharded", "every")
Compiled = bool | Sequence[str]
LossFn = Callable[[Any], torch.Tensor]
Parallelize = Callable[[Any, DeviceMesh], Any]
SplitStages = Callable[[Any, int], Sequence[nn.Module]]


@dataclass(frozen=True, eq=False)
class Workload:
    """A training step: the model, its batch and optimizer, and the model's own parallelisms.

    `estimate`, `predict`, `sweep` and `plan` run the step on fake tensors, which have shapes but no
    memory. They do not change the model.

    Attributes:
        model: the unsharded model; may be on the meta device.
        sample_input: the input of one forward, that is a micro-batch of one rank, or of one group
            of ranks that share a batch (tensor, context and pipeline ranks, below). A tensor, a
            tuple of positional arguments or a dict of keyword arguments; tensors may be on the meta
            device.
        loss_fn: a function that computes the loss from the model's output. None: the output's
            ``loss``, the output itself if it is one number, or the sum of its tensors.
        optimizer: "adamw", "sgd", "momentum", an optimizer class, a function that creates an
            optimizer from the parameters, or None.
        samples: samples in a micro-batch: the size of dim 0 of all tensors that have as many rows
            as the first one. None: the size in ``sample_input``.
        context: length of a sequence: the size of dim 1 of the first tensor that has this dim, and
            of all other dims except dim 0 with the same size. None: the size in ``sample_input``.
            The model must support this length.
        micro_batches: forwards and backwards per optimizer step.
        accumulation: how gradients of micro-batches are summed:

            - ``"unsharded"``: whole gradients are summed, and reduced in the last micro-batch
              (``model.set_requires_gradient_sync(False)``, or ``no_sync()``, in all others);
            - ``"sharded"``: the same calls, after ``model.set_accumulate_sharded(True)``. Every
              micro-batch reduce-scatters into shards, and the last all-reduces over replicas;
            - ``"every"``: every micro-batch reduces completely, as in a loop without these calls.
        activation_checkpointing: "none", "full" or "selective". "selective" keeps the results of
            attention and of every second matrix multiplication. Checkpointing inside the model is
            always taken into account.
        checkpoint_modules: names of the modules to recompute. None: the blocks, that is all units
            except the root that have parameters and inputs that need gradients.
        compiled: whether `torch.compile` compiles each block (as in ``checkpoint_modules=None``) as
            one graph, or the names of the compiled modules. Pointwise operators and reductions are
            then fused, and torch's partitioner decides what is saved for backward. `Plan.apply`
            does not compile.
        max_saved_bytes: ``max_device_bytes`` of an `offload_activations` around forward and loss.
            None (and always on the CPU): activations stay on the device. Copies are assumed not to
            compete with collectives. `Plan.apply` does not offload activations.
        offload_optimizer: the options of an `offload_optimizer`; its copies, reads and writes take
            time. None: the state stays with its parameters. `Plan.apply` does not call it.
        kernels: the attention kernel, and whether norms are fused. None: torch's choice for the
            device.
        fake: False runs one real step on the CPU, with all the memory that it needs; required for
            models whose shapes depend on their data.
        unknown_costs: what to do if operators without known FLOPs (`register_cost`) make up more
            than 1 % of the bytes of a step: "error", or "list" to continue without their FLOPs. The
            result always lists them.
        experts: the modules for which `shard_experts` is called before the others become units:
            names, patterns or classes, as in ``wrap``. None: experts are sharded like other
            parameters.
        expert_ranks: number of consecutive ranks over which experts are distributed. It must divide
            the number of ranks (in a pipeline, of a stage; context and tensor ranks count too), and
            be at most the number of experts. Ranks with the same experts shard them. Forward must
            create a `TokenExchange` (without a mesh here). Tokens are assumed to be spread evenly
            over experts; compute waits for each all-to-all.
        parallelize: a function that makes the model tensor-parallel. It is called with a copy of
            the model on the meta device and a mesh of ``tensor_ranks``, and calls
            ``parallelize_module`` as the training script does; it may return the model. The trace
            then has one rank's operators and collectives, and compute waits for each collective.
            The function must not change ``experts``; each tensor rank sends the tokens that it
            holds.
        tensor_ranks: number of consecutive ranks that divide the operators, a divisor of all ranks.
            The others are data-parallel; ``sample_input`` is the batch of one group of
            ``tensor_ranks``.
        context_ranks: number of consecutive ranks, or groups of ``tensor_ranks``, that divide each
            sequence, as in torch's ``context_parallel``. It must divide the last dim of the mesh,
            over which parameters are sharded. ``sample_input`` is the batch of one such group, with
            whole sequences. The sequence dims are dim 1 of its first 2-D tensor and all dims of the
            same size except dim 0; the size must be a multiple of twice ``context_ranks``.
            Attention must be ``scaled_dot_product_attention`` without a mask.
        split_stages: a function that returns the stages of a pipeline as modules, in order. It is
            called with a copy of the model on the meta device and the number of stages. The first
            stage gets ``sample_input``, each other stage the output of the one before. Each
            parameter belongs to one stage. ``parallelize`` is then called for each stage, and
            ``wrap`` and ``experts`` name modules of stages; some stages may have none of them.
        pipeline_ranks: number of pipeline ranks, a divisor of all ranks and the first dim of the
            mesh. Each stage is sharded over the other dims.
        schedule: "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
            "ZBVZeroBubble" or "DualPipeV", as in ``torch.distributed.pipelining``.
        stages_per_rank: number of stages on each rank: 1 for the first two schedules, 2 for the
            last two. The model is split into ``stages_per_rank * pipeline_ranks`` stages.

    Raises:
        ValueError: for unknown names, and for numbers less than 1.
        TypeError: if the model is not a module, or a number is not an int.

    Example:
        >>> with torch.device("meta"):
        ...     model = Transformer(config)
        >>> batch = torch.empty(1, 16, dtype=torch.long, device="meta")
        >>> workload = Workload(model, batch, loss_fn=lambda out: out.float().mean())
        >>> print(estimate(workload, Sharding("full"), 1024))
    """

    model: nn.Module
    sample_input: Any
    loss_fn: LossFn | None = None
    optimizer: Any = "adamw"
    samples: int | None = None
    context: int | None = None
    micro_batches: int = 1
    accumulation: str = "unsharded"
    activation_checkpointing: str = "none"
    checkpoint_modules: Sequence[str] | None = None
    compiled: Compiled = False
    max_saved_bytes: int | None = None
    offload_optimizer: StateOffload | None = None
    kernels: Kernels | None = None
    fake: bool = True
    unknown_costs: str = "error"
    experts: Any = None
    expert_ranks: int = 1
    parallelize: Parallelize | None = None
    tensor_ranks: int = 1
    context_ranks: int = 1
    split_stages: SplitStages | None = None
    pipeline_ranks: int = 1
    schedule: str = "1F1B"
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {self.model!r}")
        for name in ("samples", "context"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value)
        for name in _NUMBERS:
            check_number(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.offload_optimizer is not None:
            check_kind("offload_optimizer", self.offload_optimizer, StateOffload, "StateOffload()")

    @property
    def ranks_per_batch(self) -> int:
        """Number of ranks that share a batch."""
        return self.tensor_ranks * self.context_ranks * self.pipeline_ranks


_NUMBERS = (
    *("micro_batches", "expert_ranks", "tensor_ranks", "context_ranks", "pipeline_ranks"),
    "stages_per_rank",
)
_CHOICES = {
    "accumulation": ACCUMULATIONS,
    "activation_checkpointing": MODES,
    "unknown_costs": CHOICES,
}


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise a ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        raise ValueError(f"{name} must be one of {choices}, got {value!r}{hint}")


def default_checkpoint_modules(model: nn.Module, units: Sequence[Any]) -> list[str]:
    """The blocks: modules of units whose class occurs more than once, except embeddings."""
    modules = dict(model.named_modules())
    names = [name for unit in units if not unit.is_root for name in unit.modules]
    kinds = [type(modules[name]) for name in names]
    return [
        name
        for name, kind in zip(names, kinds, strict=True)
        if kinds.count(kind) > 1 and not isinstance(modules[name], nn.Embedding | nn.EmbeddingBag)
    ]


def compiled_modules(compiled: Compiled, blocks: Sequence[str]) -> tuple[str, ...]:
    """The names of the modules that ``compiled`` means: True stands for ``blocks``.

    Raises:
        ValueError: for True, if there are no blocks.
        TypeError: if it is neither a bool nor a sequence of names.
    """
    if isinstance(compiled, bool):
        if compiled and not blocks:
            raise ValueError(
                "compiled=True compiles blocks (modules of a class that occurs more than once), "
                "and the model has none: pass the names of modules"
            )
        return tuple(blocks) if compiled else ()
    if isinstance(compiled, str) or not all(isinstance(name, str) for name in compiled):
        hint = "a step as one graph (fsdp2.graph) cannot be estimated"
        raise TypeError(f"compiled must be a bool or names of modules, got {compiled!r}; {hint}")
    return tuple(compiled)
