"""All settings of one unit, in one dataclass.

`fully_shard` makes a `UnitConfig` from its arguments, `shard_model` and the methods of `FSDPModule`
change it between steps, and `copy.deepcopy` of a model copies it as a whole. Whatever a user may
set per unit is a field here, so that no other place lists the settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm.mesh_transports import CommOptions
from ..comm.streams import Streams
from ..policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy


@dataclass
class UnitConfig:
    """The settings of one unit.

    Attributes:
        mp_policy, offload_policy, direct_min_bytes: as of `fully_shard`.
        reshard_after_forward: the same; None: False for the root, else True.
        reshard_after_backward: whether parameters are freed after backward.
        unshard_in_backward: whether they are gathered for backward.
        keep_unsharded_storage: whether gathered parameters keep their memory when they are freed.
        keep_frozen: the limit for frozen parameters that stay gathered, as an object of the part
            that chooses them; None: none do.
        max_gathered_bytes: limit on what a tree may hold gathered; of the root only.
        strategy: the name passed to `shard_model`; only displayed.
        gathered_once: parameters stay gathered after a backward without gradient sync.
        sync_grads: whether the next backward is the last of a step, which reduces gradients.
        accumulate_sharded: whether the backwards before it reduce-scatter too.
        reduce_grads: whether a backward reduces its gradients; otherwise they accumulate unsharded.
            The setters of the two above compute it, since hooks read it often.
        all_reduce_grads: whether reduced gradients are summed over replicas.
        manual_finalization: whether the caller ends an iteration; of the root only.
        reduce_unused: whether parameters without a gradient take part in reductions.
        divide_factor: what sums of gradients are divided by; None: the number of ranks.
        all_reduce_hook, all_reduce_stream: called on reduced gradients, on that stream.
        max_input_buffers: units whose gradients may be in flight; None: a number of bytes limits
            them.
        comm_options: how to communicate.
        shared_streams: streams shared with units of other trees; see `share_comm_ctx`.
    """

    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    direct_min_bytes: int | None = None
    # What is gathered when, and for how long.
    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_unsharded_storage: bool = False
    keep_frozen: Any = None
    max_gathered_bytes: int | None = None
    strategy: str | None = None
    gathered_once: bool = False
    # What is reduced when, and how.
    sync_grads: bool = True
    accumulate_sharded: bool = False
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    manual_finalization: bool = False
    reduce_unused: bool = False
    divide_factor: float | None = None
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_stream: Any = None
    max_input_buffers: int | None = None
    # How to communicate.
    comm_options: CommOptions = field(default_factory=CommOptions)
    shared_streams: Streams | None = None

    @property
    def offload(self) -> bool:
        """Whether shards live in host memory."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    def pins_memory(self, device: torch.device) -> bool:
        """Whether the memory of offloaded shards is page-locked, for copies to ``device``."""
        policy = self.offload_policy
        return isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and device.type != "cpu"

    def set_sync(self, sync: bool) -> None:
        """For the backward of the last micro-batch of a step (True), or of one before it."""
        self.sync_grads = self.all_reduce_grads = sync
        self.reduce_grads = sync or self.accumulate_sharded
        if self.gathered_once:
            self.reshard_after_backward = sync

    def set_accumulate_sharded(self, accumulate_sharded: bool) -> None:
        """Whether backwards without gradient sync reduce-scatter too."""
        self.accumulate_sharded = accumulate_sharded
        self.reduce_grads = self.sync_grads or accumulate_sharded
