"""The cluster: its hardware, the number of ranks, and the memory that each rank may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

from ..api.shard_model import Sharding, find_strategy
from ..common.checks import check_kind, check_number
from .hardware.hardware import Hardware, find_hardware
from .replay.setups import checked_mesh
from .workload import Workload


@dataclass(frozen=True)
class Cluster:
    """The GPUs that train: their type and number, or their mesh.

    Attributes:
        hardware: the name of a preset ("h100", "h200", "a100-80", "a100-40"), a ``.json`` file (see
            ``fsdp2.planning.find_hardware``) or a `Hardware`; converted to a `Hardware`. If
            `Hardware.speeds` differ, all ranks wait for the slowest one.
        num_ranks: number of GPUs; on several nodes, a multiple of the GPUs in a node. None: the
            GPUs of ``mesh``. For the strategy ``"hybrid"``, nodes are replicas, as in
            `shard_model`.
        mesh: the mesh that shards parameters, (ranks,) or (replicas, shards), without tensor and
            pipeline ranks; instead of ``num_ranks``. None: all ranks that ``num_ranks`` leaves.
        memory_budget: bytes of a GPU that a rank may use. They include the memory that the
            allocator reserves (more than live tensors), and memory of CUDA, cuBLAS and NCCL. None:
            the whole memory.

    Raises:
        ValueError: for unknown hardware, numbers that are not positive, ranks that do not fill
            their nodes, and if both or neither of ``num_ranks`` and ``mesh`` are given.
        TypeError: for values of other types.

    Example:
        >>> made = predict(Workload(model, tokens, loss_fn=loss), Sharding(), Cluster("h100", 64))
        >>> nodes = Cluster("h100", mesh=(8, 8), memory_budget=60e9)
    """

    hardware: str | Hardware
    num_ranks: int | None = None
    mesh: int | Sequence[int] | None = None
    memory_budget: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "hardware", find_hardware(self.hardware))
        if (self.num_ranks is None) == (self.mesh is None):
            raise ValueError(
                "A Cluster has either num_ranks or mesh, got "
                f"num_ranks={self.num_ranks!r} and mesh={self.mesh!r}"
            )
        if self.mesh is None:
            check_ranks(self.num_ranks, self.gpu)
        else:
            object.__setattr__(self, "mesh", checked_mesh(self.mesh, "mesh"))
        budget = self.memory_budget
        if budget is None:
            return
        if isinstance(budget, bool) or not isinstance(budget, int | float):
            raise TypeError(f"memory_budget must be a number of bytes or None, got {budget!r}")
        if not (budget >= 1 and isfinite(budget)):
            raise ValueError(
                f"memory_budget must be a positive number of bytes, got {budget}; None is the "
                "whole memory of the GPU"
            )

    @property
    def gpu(self) -> Hardware:
        """``hardware``, typed as a `Hardware`."""
        assert isinstance(self.hardware, Hardware)
        return self.hardware

    @property
    def budget_bytes(self) -> int:
        """Bytes of a GPU that a rank may use."""
        return int(self.gpu.memory_bytes if self.memory_budget is None else self.memory_budget)

    def mesh_for(self, workload: Workload, strategy: str) -> tuple[int, ...]:
        """The mesh that shards parameters; in a pipeline, the mesh of each stage.

        Raises:
            ValueError: for numbers of ranks that are not divisible, or do not fill their nodes.
        """
        of_tensor, of_pipeline = workload.tensor_ranks, workload.pipeline_ranks
        if self.mesh is not None:
            mesh = checked_mesh(self.mesh)
            check_ranks(prod(mesh) * of_tensor * of_pipeline, self.gpu)
        else:
            assert self.num_ranks is not None
            rest = self.num_ranks
            for name, number in (("tensor", of_tensor), ("pipeline", of_pipeline)):
                if rest % number:
                    raise ValueError(
                        f"{name}_ranks={number} must divide num_ranks={self.num_ranks}"
                    )
                rest //= number
            mesh = (rest,)
            if find_strategy(strategy).hybrid:
                node = max(1, min(self.gpu.ranks_per_node // of_tensor, rest))
                mesh = (rest // node, node)
        if mesh[-1] % workload.context_ranks:
            raise ValueError(
                f"context_ranks={workload.context_ranks} must divide the last dim of the mesh, "
                f"{mesh[-1]}: parameters are sharded over data and context ranks together"
            )
        return mesh


def check_arguments(workload: object, sharding: object, *cluster: object) -> None:
    """Raise a TypeError for arguments of other classes."""
    check_kind("workload", workload, Workload, "Workload(model, batch)")
    check_kind("sharding", sharding, Sharding, 'Sharding("full")')
    for each in cluster:
        check_kind("cluster", each, Cluster, 'Cluster("h100", 64)')


def check_ranks(num_ranks: Any, hardware: Hardware) -> None:
    """Check a number of ranks.

    Raises:
        ValueError: if it is less than 1, or several nodes would not be full.
        TypeError: if it is not an int.
    """
    check_number("num_ranks", num_ranks)
    node = hardware.ranks_per_node
    if num_ranks > node and num_ranks % node:
        raise ValueError(
            f"num_ranks must be a multiple of the {node} GPUs of a node if there are several "
            f"nodes; got {num_ranks}"
        )
