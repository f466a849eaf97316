"""What a traced step depends on, beside the model, its input and its units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...common.checks import check_bytes
from ...policy import MixedPrecisionPolicy
from .compiled import check_compiled
from .context import ContextParallel
from .kernels import Kernels, kernels_of
from .stage import Stage

LossFn = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class TraceOptions:
    """The arguments of a traced step; two traces of a model with equal ones are the same.

    Attributes:
        loss_fn: computes a scalar from the model's output. None: the output's ``loss``, or the
            output if it is a scalar, or the sum of its tensors.
        mp_policy: parameters and inputs are cast as in a sharded run.
        activation_checkpointing: see `checkpointing.checkpointed`.
        checkpoint_modules: names of the modules whose activations are recomputed.
        device_type: the device of the run. Some kernels of the CPU make other gradients.
        kernels: which of them fake tensors stand for; None: those of ``device_type``.
        fake: False computes on real memory of the CPU, for models whose shapes depend on data.
        experts: names of the modules that ``shard_experts`` gets. Their parameters have the experts
            of one rank, and tokens travel where the model makes a ``TokenExchange``.
        expert_ranks: over which experts are distributed.
        tensor_ranks: of the mesh over which the parameters of the model are DTensors.
        context: over which sequences are split, of which the sample input has this rank's part;
            None: it has whole ones.
        stage: of a pipeline, which the model is; by default all of it.
        max_saved_bytes: the ``max_device_bytes`` of an `offload_activations` around forward and
            loss; None: there is none. It does nothing on the CPU.
        compiled: names of the modules that `torch.compile` makes one graph of: see `compiled`.
    """

    loss_fn: LossFn | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    activation_checkpointing: str = "none"
    checkpoint_modules: Sequence[str] = ()
    device_type: str = "cuda"
    kernels: Kernels | None = None
    fake: bool = True
    experts: Sequence[str] = ()
    expert_ranks: int = 1
    tensor_ranks: int = 1
    context: ContextParallel | None = None
    stage: Stage = field(default_factory=Stage)
    max_saved_bytes: int | None = None
    compiled: Sequence[str] = ()

    @property
    def chosen_kernels(self) -> Kernels:
        return kernels_of(self.kernels, self.device_type)

    @property
    def saved_limit(self) -> int | None:
        """``max_saved_bytes``, or None on the CPU, where nothing is offloaded."""
        return None if self.device_type == "cpu" else self.max_saved_bytes

    def check(self, model: nn.Module, modules: Sequence[str]) -> None:
        """Check the options of a trace of ``model``, of which ``modules`` may be units.

        Raises:
            ValueError: for options that do not go together, or modules that cannot be compiled.
            TypeError: if parameters are DTensors already.
        """
        if self.tensor_ranks == 1 and any(isinstance(p, DTensor) for p in model.parameters()):
            raise TypeError(
                "Parameters of the model are DTensors already; only plain parameters can be "
                "estimated: pass the plain model, and to predict the function that makes it "
                "tensor-parallel"
            )
        if self.expert_ranks > 1 and not self.fake:
            raise ValueError(
                "fake=False runs on one process, which has all experts: expert_ranks is 1"
            )
        self._check_experts(model)
        self._check_saved()
        self._check_context()
        if self.compiled:
            check_compiled(
                self.compiled, dict(model.named_modules()), modules, self.checkpoint_modules
            )
            if not self.fake or self.tensor_ranks > 1 or self.context is not None:
                raise ValueError(
                    "compiled= goes together neither with fake=False nor with tensor_ranks or "
                    "context_ranks"
                )

    def _check_experts(self, model: nn.Module) -> None:
        for module in self.experts:
            for name, param in model.get_submodule(module).named_parameters():
                if isinstance(param, DTensor):
                    raise ValueError(
                        f"'{module}.{name}' is tensor-parallel, but belongs to experts, which are "
                        "distributed whole, over tensor ranks too: leave experts out of "
                        "parallelize"
                    )

    def _check_saved(self) -> None:
        if self.max_saved_bytes is None:
            return
        check_bytes("max_saved_bytes", self.max_saved_bytes, kinds="an int (bytes) or None")
        if not self.fake:
            raise ValueError(
                "Offloaded activations are counted on fake tensors, which have no values: "
                "max_saved_bytes does not go together with fake=False"
            )

    def _check_context(self) -> None:
        if self.context is None:
            return
        if not self.fake:
            raise ValueError(
                "fake=False runs on one process, which has whole sequences: context_ranks is 1"
            )
        if self.chosen_kernels.device == "cpu":
            raise ValueError(
                f"context_ranks={self.context.ranks}: torch's context_parallel has no attention "
                "kernel of the CPU: predict for GPUs, or with context_ranks=1"
            )
