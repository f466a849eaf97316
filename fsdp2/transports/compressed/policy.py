"""`CommPolicy`: the dtypes in which messages are sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...policy import WirePolicy

_WIRE_DTYPES = {
    "gather": (torch.bfloat16, torch.int8, torch.float8_e4m3fn),
    "reduce": (torch.bfloat16, torch.int8),
    "secondary": (torch.bfloat16, torch.int8, torch.float8_e4m3fn),
}


@dataclass(frozen=True)
class CommPolicy(WirePolicy):
    """Compresses messages, at the price of precision. Off by default, and set per unit.

    Storage and computation keep their dtypes; only messages are narrower. int8 and float8 numbers
    travel in blocks, each with a scale (``fsdp2.transports.compressed.quantize`` has the arithmetic
    and its error bounds). Parameters that are packed (their slice is below ``direct_min_bytes``),
    or have fewer elements per rank than a block, travel in bfloat16. Values that are not
    floating-point, or not wider than the dtype chosen here, travel as without a policy.

    - *Weights* are quantized from the sharded values at each gather, and restored to the compute
      dtype. All ranks, the owner too, compute with the same bits. Gathers of the same shards give
      the same bits, so recomputation in backward sees the weights of forward. Optimizers,
      ``state_dict`` and checkpoints see the sharded values, which stay exact.
    - *Gradients* are sent to their owners in an all-to-all and added there in rank order, in
      float32 or wider, so nothing is rounded between additions. A rank's contribution to its own
      shard is exact (except to a 0-dim parameter, whose bits are the same on all ranks). An
      all-reduce over replicas (HSDP, `replicate`) has two such phases: the means are sent back in
      the same format, and all replicas get the same bits.

    A block with a NaN or an infinity arrives without finite numbers, so a ``GradScaler`` skips the
    same steps.

    Args:
        gather: dtype in which weights are gathered: ``torch.bfloat16``, ``torch.int8`` or
            ``torch.float8_e4m3fn``. None: the compute dtype. (ZeRO++, arXiv 2306.10209, qwZ;
            float8: arXiv 2209.05433.)
        reduce: dtype in which gradients are sent: ``torch.bfloat16`` or ``torch.int8``. None: the
            dtype of the mixed-precision policy. (ZeRO++, qgZ.)
        block: elements per scale, at least 16.
        ranks_per_node: reduce in two hops: first within groups of this many consecutive ranks, then
            the sums across groups. Nodes exchange 1/``ranks_per_node`` of the bytes, and sums are
            rounded once more. It must divide the number of shards if that is larger. None: one hop.
        error_feedback: add the rounding errors of a step's gradients to the next step's gradients
            (Seide et al., Interspeech 2014; Karimireddy et al. 2019, arXiv 1901.09847). Costs a
            float32 tensor per rank as large as the unit's whole gradient. Checkpoints do not
            contain it. It starts from zero when training is resumed, after `set_comm_policy` and
            ``model.to``, and in copies of the model.
        secondary: dtype in which the larger shards of ``reshard_after_forward=int`` are kept and
            gathered. None: the compute dtype, which gives the weights of forward. Other dtypes
            round them once more, so backward computes with slightly different weights.

    Raises:
        ValueError: for a dtype that is not supported there, or arguments that exclude each other.
        TypeError: for arguments of the wrong type.

    Example:
        >>> policy = CommPolicy(gather=torch.int8, reduce=torch.int8, ranks_per_node=8)
        >>> fully_shard(block, comm_policy=policy)
    """

    gather: torch.dtype | None = None
    reduce: torch.dtype | None = None
    block: int = 256
    ranks_per_node: int | None = None
    error_feedback: bool = False
    secondary: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, known in _WIRE_DTYPES.items():
            value = getattr(self, name)
            if value is None or value in known:
                continue
            if not isinstance(value, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype or None, got {value!r}")
            choices = ", ".join(map(str, known))
            raise ValueError(f"{name} of CommPolicy must be None or one of {choices}, got {value}")
        for name in ("block", "ranks_per_node"):
            value = getattr(self, name)
            optional = value is None and name == "ranks_per_node"
            if not optional and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} of CommPolicy must be an int, got {value!r}")
        if self.block < 16:
            raise ValueError(f"block must be at least 16 elements, got {self.block}")
        if self.ranks_per_node is not None and self.ranks_per_node < 2:
            raise ValueError(f"ranks_per_node must be at least 2, got {self.ranks_per_node}")
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"error_feedback must be a bool, got {self.error_feedback!r}")
        for name in ("ranks_per_node", "error_feedback"):
            if getattr(self, name) and self.reduce is None:
                raise ValueError(f"{name} is about how gradients are sent: choose reduce=..., too")

    def gathers(self, dtype: torch.dtype) -> bool:
        """Whether weights that compute in ``dtype`` are gathered in a narrower one."""
        return _narrows(self.gather, dtype)

    def reduces(self, dtype: torch.dtype) -> bool:
        """Whether gradients that are reduced in ``dtype`` are sent in a narrower one."""
        return _narrows(self.reduce, dtype)

    def keeps(self, dtype: torch.dtype) -> bool:
        """Whether secondary shards of weights in ``dtype`` are kept in a narrower one."""
        return _narrows(self.secondary, dtype)


def _narrows(wire: torch.dtype | None, dtype: torch.dtype) -> bool:
    return wire is not None and dtype.is_floating_point and wire.itemsize < dtype.itemsize


def hops_of(policy: CommPolicy, num_shards: int) -> int:
    """Ranks per node of a reduction in two hops over ``num_shards`` ranks; 1: in one hop.

    Raises:
        ValueError: if nodes of that many ranks do not divide them.
    """
    node = policy.ranks_per_node
    if node is None or num_shards <= node:
        return 1  # all within a node
    if num_shards % node:
        raise ValueError(
            f"ranks_per_node={node} of CommPolicy does not divide the {num_shards} ranks that "
            "parameters are sharded over"
        )
    return node
