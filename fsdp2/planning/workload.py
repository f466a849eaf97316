"""What is trained: a model, its batch, and all of a step but how it is sharded and on what."""

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

# How gradients of micro-batches are summed: whole, and reduced in the last; reduce-scattered in
# each, and all-reduced over replicas in the last (`FSDPModule.set_accumulate_sharded`); or fully
# reduced in each, as where nobody calls `FSDPModule.set_requires_gradient_sync`.
ACCUMULATIONS = ("unsharded", "sharded", "every")
Compiled = bool | Sequence[str]
LossFn = Callable[[Any], torch.Tensor]
Parallelize = Callable[[Any, DeviceMesh], Any]
SplitStages = Callable[[Any, int], Sequence[nn.Module]]


@dataclass(frozen=True, eq=False)
class Workload:
    """A training step: the model, its batch and optimizer, and the model's own parallelisms.

    `estimate`, `predict`, `sweep` and `plan` run the step on fake tensors, which have shapes and no
    memory, and leave the model as it is.

    Attributes:
        model: not sharded; may be on the meta device.
        sample_input: the batch of one rank (of the ranks that share one, below), and a micro-batch
            of it if there are several: a tensor, a tuple of positional arguments or a dict of
            keyword arguments; tensors may be on the meta device.
        loss_fn: a function of the model's output that returns the loss. None: the output's
            ``loss``, the output itself if it is one number, or the sum of its tensors.
        optimizer: "adamw", "sgd", "momentum", an optimizer class, a function of the parameters, or
            None.
        samples: of a micro-batch: dim 0 of all tensors with as many rows as the first one. None: as
            many as ``sample_input`` has.
        context: length of a sequence: dim 1 of the first tensor that has one, and all other dims
            but dim 0 of that length. None: that of ``sample_input``. The model must be able to work
            on this length.
        micro_batches: forwards and backwards per optimizer step.
        accumulation: how gradients of micro-batches are summed:

            - ``"unsharded"``: whole gradients, reduced in the last micro-batch
              (``model.set_requires_gradient_sync(False)``, or ``no_sync()``, in all others);
            - ``"sharded"``: the same calls, after ``model.set_accumulate_sharded(True)``: every
              micro-batch reduce-scatters into shards, and the last all-reduces over replicas;
            - ``"every"``: every micro-batch reduces completely; what a loop does that calls none
              of these.
        activation_checkpointing: "none", "full" or "selective"; "selective" keeps the results of
            attention and of every second matrix multiplication. Checkpointing inside the model is
            taken into account in any case.
        checkpoint_modules: names of the modules to recompute. None: the blocks, meaning all units
            except the root that have parameters and inputs that need gradients.
        compiled: whether `torch.compile` makes one graph of each block (the modules that
            ``checkpoint_modules=None`` stands for), or the names of the modules that it compiles.
            Pointwise operators and reductions are then fused, and torch's partitioner decides what
            is saved for backward. `Plan.apply` does not compile.
        max_saved_bytes: the ``max_device_bytes`` of an `offload_activations` around forward and
            loss. None: activations stay on the device, as on the CPU in any case. Copies share no
            time with collectives, and `Plan.apply` does not offload.
        offload_optimizer: an `offload_optimizer`, whose copies, reads and writes take their time;
            None: state stays where its parameters are. `Plan.apply` does not call it.
        kernels: which attention kernel, and whether norms are fused. None: those that the device
            runs.
        fake: False runs one real step on the CPU, with all the memory that it needs; required for
            models whose shapes depend on their data.
        unknown_costs: what to do about operators whose FLOPs nobody has said (`register_cost`), if
            they are more than 1 % of the bytes of a step: "error", or "list" to go on without their
            FLOPs. They are listed in any case.
        experts: the modules that `shard_experts` gets before the others become units: names,
            patterns or classes, as in ``wrap``. None: experts are parameters like others.
        expert_ranks: consecutive ranks over which experts are distributed, a divisor of the ranks
            (of a stage, in a pipeline; context and tensor ranks count as well) and at most the
            number of experts; those with the same experts shard them. Forward must make a
            `TokenExchange` (without a mesh here), whose tokens are taken to be spread evenly over
            experts; each of its all-to-alls is waited for.
        parallelize: makes the model tensor-parallel: a function of the model (a copy of it on the
            meta device) and a mesh of ``tensor_ranks``, as the training script calls
            ``parallelize_module``; it may return the model. Operators and collectives of DTensors
            are then those of one rank; each collective is waited for. It leaves ``experts`` alone,
            and tokens travel from each of these ranks: those that it gives a rank.
        tensor_ranks: consecutive ranks that share the operators, a divisor of all ranks. The
            others are data-parallel; ``sample_input`` is the batch of one group of them.
        context_ranks: consecutive ranks, or groups of ``tensor_ranks``, over which each sequence is
            split, as by torch's ``context_parallel``: a divisor of the last dim of the mesh, over
            which parameters are sharded. ``sample_input`` has whole sequences, the batch of one
            such group: dim 1 of its first tensor of two dims, and each dim but dim 0 as long as
            that, a multiple of twice ``context_ranks``. Attention must be
            ``scaled_dot_product_attention`` without a mask.
        split_stages: makes the stages of a pipeline: a function of the model (a copy of it on the
            meta device) and their number that returns them in order, as modules. The first gets
            ``sample_input``, each other one what the one before returns. Each parameter belongs to
            one stage. ``parallelize`` then gets a stage, and ``wrap`` and ``experts`` name modules
            of stages, of which some may have none.
        pipeline_ranks: ranks of a pipeline, the first dim of the mesh, a divisor of all ranks; each
            stage is sharded over the others.
        schedule: "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
            "ZBVZeroBubble" or "DualPipeV", as in ``torch.distributed.pipelining``.
        stages_per_rank: of all but the first two, which then need that many times
            ``pipeline_ranks`` stages; of the last two, 2.

    Raises:
        ValueError: for unknown names, and numbers less than 1.
        TypeError: for a model that is no module, and numbers that are no ints.

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
        """Ranks that get the same batch."""
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
