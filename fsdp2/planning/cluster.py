"""What a model is trained on: hardware, how many ranks of it, and the memory that each may use."""

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
    """GPUs, and how many of them train.

    Attributes:
        hardware: the name of a preset ("h100", "h200", "a100-80", "a100-40"), a file that ends in
            ``.json`` (see ``fsdp2.planning.find_hardware``) or a `Hardware`, which it then is.
            Where `Hardware.speeds` differ, all wait for the slowest rank.
        num_ranks: number of GPUs; of several nodes, a multiple of the GPUs in a node. None: those
            of ``mesh``. For the strategy ``"hybrid"``, nodes are replicas, as in `shard_model`.
        mesh: of one pair of tensor and pipeline ranks, the mesh that shards: (ranks,) or
            (replicas, shards); in place of ``num_ranks``. None: all other ranks.
        memory_budget: bytes of a GPU that a rank may use: what the allocator reserves, which is
            more than live tensors, and what CUDA, cuBLAS and NCCL hold. None: all of them.

    Raises:
        ValueError: for unknown hardware, numbers that are not positive, ranks that do not fill
            their nodes, and for ``num_ranks`` beside ``mesh``, or neither.
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
        """``hardware``, which is no name any more."""
        assert isinstance(self.hardware, Hardware)
        return self.hardware

    @property
    def budget_bytes(self) -> int:
        """Bytes of a GPU that a rank may use."""
        return int(self.gpu.memory_bytes if self.memory_budget is None else self.memory_budget)

    def mesh_for(self, workload: Workload, strategy: str) -> tuple[int, ...]:
        """The mesh that shards parameters; of a pipeline, that of a stage.

        Raises:
            ValueError: for ranks that do not divide, or do not fill their nodes.
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
    """Raise a TypeError for what is not of these classes."""
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
