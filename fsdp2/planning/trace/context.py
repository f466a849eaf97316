"""Context parallelism on fake tensors: attention of a rank's part of each sequence to all parts.

torch's own code runs (``torch.distributed.tensor.experimental.context_parallel``): keys and values
are gathered, or go around a ring, while the kernel computes with those that are there. So kernels,
what autograd keeps and what is sent are those of the installed torch, as `set_rotate_method` says.
All other operators are taken to treat each position by itself; those that are known not to are
refused, as they would see a part of the sequence without an error in a run, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .op_costs import operator_name

_SEQUENCE_DIM = 2  # of queries, keys and values
# Operators in which positions meet.
_MEETINGS = re.compile(r"attention|attn|sdpa|lstm|gru|rnn|scan", re.IGNORECASE)
_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")


class ContextParallel:
    """Attention of ranks that have parts of the same sequences.

    Args:
        mesh: of these ranks, of one dim.
        length: positions of each rank.

    Attributes:
        num_calls: of attention, so far.
    """

    def __init__(self, mesh: DeviceMesh, length: int) -> None:
        self.mesh = mesh
        self.length = length
        self.num_calls = 0
        self._causal: bool | None = None
        self._inside = False
        self._allowed: set[Any] = set()

    @property
    def ranks(self) -> int:
        return self.mesh.size()

    @property
    def group(self) -> str:
        """The name of its process group."""
        return self.mesh.get_group().group_name

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which attention of DTensors is that of all parts of a sequence."""
        from torch.distributed.tensor.experimental._attention import (
            _cp_options,
            _disable_context_parallel_dispatcher,
            _enable_context_parallel_dispatcher,
        )

        balanced = _cp_options.enable_load_balance
        _enable_context_parallel_dispatcher()
        try:
            yield
        finally:
            _disable_context_parallel_dispatcher()
            _cp_options.enable_load_balance = balanced

    def attend(
        self,
        kernel: Callable[..., torch.Tensor],
        parts: tuple[torch.Tensor, ...],
        *,
        causal: bool,
    ) -> torch.Tensor:
        """What ``kernel`` returns for queries, keys and values of which this rank has ``parts``.

        Raises:
            ValueError: for attention that torch does not split.
        """
        lengths = {part.shape[_SEQUENCE_DIM] for part in parts}
        if lengths != {self.length}:
            raise self.refused(
                f"attention of {parts[0].shape[_SEQUENCE_DIM]} queries to "
                f"{parts[1].shape[_SEQUENCE_DIM]} keys on a rank that has {self.length} positions"
            )
        if self._causal not in (None, causal):
            raise self.refused("causal attention beside attention that is not (one of both only)")
        self._causal = causal
        self._balance(causal)
        self.num_calls += 1
        over = [DTensor.from_local(t, self.mesh, [Shard(_SEQUENCE_DIM)], run_check=False)
                for t in parts]  # fmt: skip
        self._inside = True
        try:
            made = kernel(*over)
        finally:
            self._inside = False
        assert isinstance(made, DTensor)
        return made.to_local()

    def _balance(self, causal: bool) -> None:
        """As torch wants it: each rank has a part of the head and one of the tail, if causal."""
        from torch.distributed.tensor.experimental._attention import _cp_options

        _cp_options.enable_load_balance = causal

    def refused(self, what: str) -> ValueError:
        return ValueError(
            f"context_ranks={self.ranks}: torch's context_parallel does not split {what}; it "
            "splits scaled_dot_product_attention of a sequence to itself, without a mask. Predict "
            "this model with context_ranks=1"
        )

    def check(self, func: Any, result: Any) -> None:
        """Refuse an operator in which positions meet, but for the attention that is split."""
        name = operator_name(func)
        if name in _SOFTMAX and result.ndim > 2 and result.shape[-2:] == (self.length,) * 2:
            raise self.refused(
                f"attention written by hand ({name} of {self.length} by {self.length} scores; if "
                "these are none, make the sample of another length)"
            )
        if func in self._allowed or self._inside:
            return
        if _MEETINGS.search(name) and not name.endswith("backward"):
            raise self.refused(f"the operator {name}")
        self._allowed.add(func)

    def check_whole(self) -> None:
        """Check, of all of a model, that it has attention to split.

        Raises:
            ValueError: if it has none.
        """
        if not self.num_calls:
            raise self.refused("this model, which calls no such attention")

    def conclude(self) -> list[str]:
        """What the trace assumes, as sentences; nothing without attention, as in a stage that
        embeds tokens."""
        from torch.distributed.tensor.experimental._attention import _cp_options

        if not self.num_calls:
            return []
        method = _cp_options.rotate_method.name.lower().replace("_", "-")
        notes = [
            f"Context parallel: as torch's context_parallel, with keys and values by {method} "
            "(set_rotate_method)"
        ]
        if not self._causal:
            notes.append(
                "Attention is not causal: torch's context_parallel then needs its load balance off "
                "(_cp_options.enable_load_balance = False)"
            )
        return notes
