"""The gradients of a unit that no reduction has taken yet.

Autograd leaves them on the unsharded parameters. The gradients of a micro-batch without gradient
sync wait there for the last micro-batch, in the reduce dtype: ``grad_dtype`` of these parameters is
set, so autograd itself adds them up in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any

import torch

from ..sharding.bucket import Bucket
from .param_group import ParamGroup, requires_grad_of
from .reduction import Reduction
from .unit_config import UnitConfig

_partial_of = attrgetter("partial.present")
Taken = list[dict[int, torch.Tensor]]  # for each bucket: index of a parameter -> its gradient


def _local_gradient(bucket: Bucket, i: int, grad: torch.Tensor) -> torch.Tensor:
    return bucket.params[i].local_gradient(grad)


class UnitGrads:
    """Unreduced gradients of one unit.

    Attributes:
        sums: whether autograd makes gradients in the reduce dtype, or adds to such gradients.
        holds_earlier: whether the last backward left gradients unreduced, so that some rank may
            hold sums in the reduce dtype.
        holds_partial_sums: whether the last backward left out the all-reduce over replicas.
        local_gradient: converts the gradient of a bucket's parameter (given by its index) to the
            tensor that is reduced over data-parallel ranks. A part may replace it.
    """

    reduction_type: type[Reduction] = Reduction  # `fsdp2.planning` has one that sums nothing

    def __init__(self, param_group: ParamGroup, config: UnitConfig) -> None:
        self._param_group = param_group
        self._config = config
        self.local_gradient: Callable[[Bucket, int, torch.Tensor], torch.Tensor] = _local_gradient
        self.sums = False
        self.holds_earlier = False
        self.holds_partial_sums = False

    # -- is there anything? -----------------------------------------------------------------

    def has_unsharded(self) -> bool:
        """Whether there are gradients that no reduction has taken."""
        # A loop: this runs in every backward, and a generator costs a frame per item.
        for param in self._param_group.unsharded:
            if param is not None and param.grad is not None:
                return True
        return False

    def will_accumulate(self) -> bool | None:
        """Whether the run of autograd in progress, which was asked for inputs, accumulates any
        gradient of this unit.

        ``backward(inputs=...)`` does if it is asked for some of its parameters; ``autograd.grad``
        passes through the unit without accumulating. To be called inside such a run.

        Returns:
            None where nothing of the unit was trained in the forward.
        """
        # The node is looked up each time, through a view of the parameter, and not kept: it would
        # outlive its graph, and add for the next one on the stream of the former forward.
        # Usually the first answer ends it.
        answer = None
        with torch.enable_grad():
            in_graph = self._param_group.freezing.in_graph
            for param in filter(requires_grad_of, in_graph):  # not frozen since then
                try:
                    view: Any = param.view_as(param).grad_fn
                except NotImplementedError:  # not every tensor subclass has views
                    continue
                if will_run(view.next_functions[0][0]):
                    return True
                answer = False
        return answer

    def has_unreduced(self) -> bool:
        """Whether anything is left to reduce, including sums that wait for an all-reduce."""
        if self.has_unsharded():
            return True
        return any(map(_partial_of, self._param_group.buckets))

    def has_unreduced_from_before(self) -> bool:
        """Whether earlier backwards left gradients that are in no ``.grad`` yet."""
        return (self.holds_earlier or self.holds_partial_sums) and self.has_unreduced()

    # -- taking and keeping -----------------------------------------------------------------

    def take(self, *, direct_only: bool = False) -> Taken:
        """Remove the gradients from the unsharded parameters.

        Args:
            direct_only: only of parameters that are not packed.
        """
        taken = []
        for bucket in self._param_group.buckets:
            grads: dict[int, torch.Tensor] = {}
            for i, unsharded in bucket.unsharded_direct if direct_only else bucket.unsharded:
                grad = unsharded.grad
                if grad is not None:
                    # Now, and not after the reduction: the next use in this backward then starts a
                    # new sum, and nothing is reduced twice.
                    unsharded.grad = None
                    if grad.requires_grad:  # from backward(create_graph=True)
                        grad = grad.detach()
                    if (
                        type(grad) is not torch.Tensor
                        or grad.is_sparse
                        or bucket.sums_plain
                        or not grad.is_contiguous()
                    ):
                        grad = self.local_gradient(bucket, i, grad)
                    grads[i] = grad
            taken.append(grads)
        return taken

    def sum_in_reduce_dtype(self, *, wanted: bool) -> None:
        """Let autograd make gradients in the reduce dtype, or stop doing so.

        The first term of a sum over several backwards is cast anyway. If autograd does it, the
        uses of a tied parameter are added up in that dtype, too, and so is the rest of the sum.

        Args:
            wanted: whether the backward that begins adds to such a sum.
        """
        self.sums = wanted
        for bucket in self._param_group.buckets:
            if bucket.params[0].grad_dtype_is_set or bucket.reduce_dtype == bucket.gather_dtype:
                continue
            for _, unsharded in bucket.unsharded:
                if unsharded.grad is not None:
                    # None: a sum takes terms of any dtype. After this backward it is gone.
                    unsharded.grad_dtype, self.sums = None, True
                elif wanted:
                    unsharded.grad_dtype = bucket.reduce_dtype
                else:
                    unsharded.grad_dtype = None if bucket.keeps_dtypes else bucket.gather_dtype

    def keep_as_sums(self) -> None:
        """After a backward that does not reduce: cast sums that it began in another dtype.

        These were computed before sync was turned off, or by hand.
        """
        for bucket in self._param_group.buckets:
            if bucket.params[0].grad_dtype_is_set or bucket.reduce_dtype == bucket.gather_dtype:
                continue
            for _, unsharded in bucket.unsharded:
                grad = unsharded.grad
                if grad is not None and grad.dtype != bucket.reduce_dtype:
                    unsharded.grad, unsharded.grad_dtype = None, bucket.reduce_dtype
                    unsharded.grad = grad.detach().to(bucket.reduce_dtype)
                    self.sums = True

    def drop(self) -> None:
        """Drop every gradient that is in no ``.grad`` of a sharded parameter yet."""
        self.holds_earlier = self.holds_partial_sums = False
        for param in self._param_group.params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        for bucket in self._param_group.buckets:
            bucket.partial.drop()

    # -- reducing ---------------------------------------------------------------------------

    def make_reductions(self, taken: Taken, *, final: bool) -> list[Reduction]:
        """One `Reduction` per bucket that has gradients.

        Args:
            final: the last reductions of this backward: sums that wait for an all-reduce are due,
                also for parameters that have no gradient now.
        """
        param_group, config = self._param_group, self._config
        reductions = []
        for index, (bucket, grads) in enumerate(zip(param_group.buckets, taken, strict=True)):
            if grads and self.follows_autograd(bucket):
                # Before the reduction is made: it takes its dtypes, and ``.grad``, from the bucket.
                bucket.widen(grads.values())
            present: Collection[int] = grads.keys()
            if final and config.all_reduce_grads and bucket.partial.present:
                if not grads:
                    present = bucket.partial.present  # nothing new: only the all-reduce is due
                # In one reduction with the new ones, with zeros for missing gradients.
                for i in bucket.partial.present - set(present):
                    shape = bucket.params[i].full_shape
                    grads[i] = torch.zeros(shape, dtype=bucket.reduce_dtype, device=bucket.device)
            if not present:
                continue
            reductions.append(
                self.reduction_type(
                    bucket,
                    param_group.reduce_plan(index, present, sums=self.holds_earlier),
                    [grads.get(i) for i in range(len(bucket.params))],
                    param_group.transports[index],
                    config,
                    tag=param_group.reduce_tags[index],
                )
            )
        return reductions

    def follows_autograd(self, bucket: Bucket) -> bool:
        """Whether gradients are reduced in the dtype that autograd makes (``grad_dtype`` None)."""
        param = bucket.params[0]
        if self._config.mp_policy.reduce_dtype is not None:
            return False
        return param.grad_dtype_is_set and param.grad_dtype is None and param.sharded.requires_grad


def will_run(accumulator: Any) -> bool:
    """Whether this run of autograd will execute the node ``accumulator``."""
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # it is asked for by ``autograd.grad``, and not accumulated
        return False
