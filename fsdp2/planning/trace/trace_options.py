"""The options that determine a traced step, except its units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor import DTensor

from ...common.checks import check_bytes
from ...policy import MixedPrecisionPolicy
from ..workload import Workload, compiled_modules
from .attention import ContextParallel
from .compiled import check_compiled
from .kernels import Kernels, kernels_of
from .stage import Stage


@dataclass(frozen=True)
class TraceOptions:
    """The arguments of a traced step; two traces with equal arguments are the same.

    Attributes:
        workload: its ``model`` and ``sample_input`` belong to one rank, and in a pipeline to one
            stage; ``checkpoint_modules=None`` means none here.
        mp_policy: parameters and inputs are cast as in a sharded run.
        device_type: the device of the run. Some CPU kernels make other gradients.
        experts: names of the modules for ``shard_experts``. Their parameters have the experts of
            one rank, and tokens are sent where the model creates a ``TokenExchange``.
        context: the ranks that divide sequences; the sample input is this rank's part. None: it has
            whole sequences.
        stage: the stage of a pipeline that the model is; by default, it is the whole model.
    """

    workload: Workload
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    device_type: str = "cuda"
    experts: Sequence[str] = ()
    context: ContextParallel | None = None
    stage: Stage = field(default_factory=Stage)

    @property
    def kernels(self) -> Kernels:
        """The kernels that fake tensors represent."""
        return kernels_of(self.workload.kernels, self.device_type)

    @property
    def saved_limit(self) -> int | None:
        """``max_saved_bytes``, or None on the CPU, where nothing is offloaded."""
        return None if self.device_type == "cpu" else self.workload.max_saved_bytes

    @property
    def compiled(self) -> tuple[str, ...]:
        """Names of the modules that `torch.compile` compiles, each as one graph."""
        return compiled_modules(self.workload.compiled, ())

    @property
    def checkpointed(self) -> Sequence[str]:
        """Names of the modules whose activations are recomputed."""
        return self.workload.checkpoint_modules or ()

    def check(self, modules: Sequence[str]) -> None:
        """Check the options; ``modules`` are the model's modules that may be units.

        Raises:
            ValueError: for options that contradict each other, or modules that cannot be compiled.
            TypeError: if parameters are already DTensors.
        """
        workload, model = self.workload, self.workload.model
        plain = workload.tensor_ranks == 1
        if plain and any(isinstance(p, DTensor) for p in model.parameters()):
            raise TypeError(
                "Parameters of the model are DTensors already; only plain parameters can be "
                "estimated: pass the plain model, and to predict the function that makes it "
                "tensor-parallel"
            )
        if workload.expert_ranks > 1 and not workload.fake:
            raise ValueError(
                "fake=False runs on one process, which has all experts: expert_ranks is 1"
            )
        self._check_experts()
        self._check_saved()
        self._check_context()
        if self.compiled:
            check_compiled(self.compiled, dict(model.named_modules()), modules, self.checkpointed)
            if not (workload.fake and plain and self.context is None):
                raise ValueError(
                    "compiled= goes together neither with fake=False nor with tensor_ranks or "
                    "context_ranks"
                )

    def _check_experts(self) -> None:
        for module in self.experts:
            for name, param in self.workload.model.get_submodule(module).named_parameters():
                if isinstance(param, DTensor):
                    raise ValueError(
                        f"'{module}.{name}' is tensor-parallel, but belongs to experts, which are "
                        "distributed whole, over tensor ranks too: leave experts out of "
                        "parallelize"
                    )

    def _check_saved(self) -> None:
        if self.workload.max_saved_bytes is None:
            return
        check_bytes(
            "max_saved_bytes", self.workload.max_saved_bytes, kinds="an int (bytes) or None"
        )
        if not self.workload.fake:
            raise ValueError(
                "Offloaded activations are counted on fake tensors, which have no values: "
                "max_saved_bytes does not go together with fake=False"
            )

    def _check_context(self) -> None:
        if self.context is None:
            return
        if not self.workload.fake:
            raise ValueError(
                "fake=False runs on one process, which has whole sequences: context_ranks is 1"
            )
        if self.kernels.device == "cpu":
            raise ValueError(
                f"context_ranks={self.context.ranks}: torch's context_parallel has no attention "
                "kernel of the CPU: predict for GPUs, or with context_ranks=1"
            )
