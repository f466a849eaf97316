"""Measures the operations of a step: bytes of live storages, FLOPs, bytes read and written.

A dispatch mode sees every operation below autograd. A storage counts from the operation that
allocates it until a weak reference to it dies, so memory that autograd saves is counted exactly as
long as autograd holds it. Works on fake tensors, whose storages have no memory, and on real ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .events import Compute, Operation
from .workspaces import with_float32_gradients, with_workspace

# Operations that read only selected rows.
_LOOKUPS = ("embedding", "index_select", "gather", "index")
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
# Operations without a kernel.
_FREE = ("detach", "_unsafe_view", "device", "lift_fresh", "alias", "empty", "empty_like")


class StorageMeter(TorchDispatchMode):
    """Counts the storages allocated inside the context, and the cost of operations.

    Args:
        device_type: the device whose kernels fake tensors stand for.

    Example:
        >>> with StorageMeter() as meter:
        ...     y = torch.ones(256) * 2
        >>> meter.take().net  # the ones are gone
        1024
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()
        self._device_type = device_type
        self.live = 0
        self._start = 0
        self._peak = 0
        self._operations: list[Operation] = []
        self._tracked: dict[int, tuple[Any, int]] = {}
        self._is_view: dict[Any, bool] = {}
        self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused:
            return result
        result = with_workspace(func, args, kwargs, result)
        if self._device_type == "cpu":
            result = with_float32_gradients(func, args, result)
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.track(tensor)
        name = func._schema.name.partition("::")[2]
        if name not in _FREE and not self._views(func):
            cost = _cost(func, name, args, kwargs, result)
            if cost is not None:
                self._operations.append(cost)
        return result

    def _views(self, func: Any) -> bool:
        known = self._is_view.get(func)
        if known is None:
            returns = func._schema.returns
            known = self._is_view[func] = bool(returns) and all(
                r.alias_info is not None and not r.alias_info.is_write for r in returns
            )
        return known

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose operations are not counted."""
        outer, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = outer

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` from now on, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._tracked:
            return
        nbytes = storage.nbytes()
        if not nbytes:
            return
        self._tracked[key] = (weakref.ref(storage, self._when_dead(key)), nbytes)
        self.live += nbytes
        self._peak = max(self._peak, self.live)

    def _when_dead(self, key: int) -> Callable[[Any], None]:
        def dead(_: Any) -> None:
            self.live -= self._tracked.pop(key)[1]

        return dead

    def ignore(self, tensor: torch.Tensor) -> int:
        """Stop counting the storage of ``tensor``; returns the bytes that it counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        reference, nbytes = self._tracked.get(key, (None, 0))
        if reference is None:
            reference = weakref.ref(storage, self._when_dead(key))
        # The reference stays, so that views of this storage do not count as new storages.
        self._tracked[key] = (reference, 0)
        self.live -= nbytes
        return nbytes

    def take(self) -> Compute | None:
        """What happened since the last call; None if nothing did."""
        if not self._operations and self.live == self._start and self._peak <= self._start:
            return None
        done = Compute(
            tuple(self._operations), max(0, self._peak - self._start), self.live - self._start
        )
        self.begin()
        return done

    def begin(self) -> None:
        """Start counting from here."""
        self._start = self._peak = self.live
        self._operations.clear()


def _cost(func: Any, name: str, args: tuple, kwargs: dict, result: Any) -> Operation | None:
    read = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    written = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
    if not read and not written:
        return None
    num_written = sum(map(_nbytes, written))
    num_read = num_written if name in _LOOKUPS else sum(map(_nbytes, read))
    dtype = next((t.dtype for t in read if t.is_floating_point()), torch.float32)
    flops = _flops(func, name, args, kwargs, result)
    return Operation(flops, num_read + num_written, dtype, name.startswith(_ATTENTION))


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the memory behind ``tensor``: an expanded tensor is read once."""
    if not tensor.numel():
        return 0
    reach = 1 + sum(
        (n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    )
    return min(tensor.numel(), reach) * tensor.itemsize


def _flops(func: Any, name: str, args: tuple, kwargs: dict, result: Any) -> int:
    """FLOPs by torch's formulas. Causal attention counts half, as kernels skip the rest."""
    if name.startswith("_scaled_dot_product"):
        backward = name.endswith("_backward")
        causal = _causal(func, args, kwargs)
        if backward:
            grad, q, k, v = (t.shape for t in args[:4])
            flops = sdpa_backward_flop_count(grad, q, k, v)
        else:
            q, k, v = (t.shape for t in args[:3])
            flops = sdpa_flop_count(q, _heads(q, k), _heads(q, v))
        return flops // 2 if causal else flops
    if name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
        return _rnn_flops(name, args)
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _heads(q: torch.Size, k: torch.Size) -> torch.Size:
    """The shape of keys or values repeated for all heads of the queries (grouped attention)."""
    return torch.Size((*q[:-2], *k[-2:]))


def _causal(func: Any, args: tuple, kwargs: dict) -> bool:
    if "is_causal" in kwargs:
        return bool(kwargs["is_causal"])
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "is_causal":
            return bool(value)
    return False


def _rnn_flops(name: str, args: tuple) -> int:
    """Input and hidden projections of every step; twice that in backward."""
    tokens = args[0].numel() // args[0].shape[-1]
    weights = args[1].numel() + args[2].numel()
    return (4 if name.endswith("backward") else 2) * tokens * weights
