"""Initial weights that do not depend on how a model is sharded.

A random operation on a DTensor draws for the local shard: on the CPU the weights depend then on
the world size, the mesh and the rows of a rank, and each rank's generator goes its own way. Inside
`init_on_whole_tensors` every rank draws the whole tensor from the ordinary generator of the device
and keeps its own part, so any code that initializes gives what it gives on one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .checkpoint.placement import own_part


@contextmanager
def init_on_whole_tensors(seed: int) -> Iterator[None]:
    """Inside, initialization of sharded parameters gives the weights of the unsharded model.

    For every world size, mesh, placement (uneven, HSDP, tensor parallel) and order of units, bit
    by bit, as long as the code that initializes does the same operations on parameters of the same
    device and dtype. In-place random operations (``normal_``, ``uniform_``, ...: all of
    ``torch.nn.init`` comes down to them) and ``rand_like``, ``randn_like`` of a DTensor draw the
    whole tensor, which is in memory meanwhile, one at a time.

    Args:
        seed: of the default generators, inside; the same on all ranks. After it they go on from
            where they were.

    Raises:
        NotImplementedError: for other random operations on DTensors.

    Example:
        >>> with torch.device("meta"):
        ...     model = Model()
        >>> fully_shard(model)
        >>> model.to_empty(device="cuda")
        >>> with init_on_whole_tensors(seed=0):
        ...     model.init_weights()
    """
    with torch.random.fork_rng(), _WholeTensors():
        torch.manual_seed(seed)
        yield


class _WholeTensors(TorchDispatchMode):
    """Random operations on DTensors are done on whole tensors of plain memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(first, DTensor):
            # ``if not mask.any()`` of a rejection loop: the answer of all ranks, not of this one.
            return first.full_tensor().item()
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(first, DTensor):
            return func(*args, **kwargs)
        if first.is_meta:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        rest = [*args[1:], *kwargs.values()]
        if any(isinstance(arg, DTensor) for arg in rest):
            raise NotImplementedError(f"{name} with several DTensors in init_on_whole_tensors")
        if name.endswith("_"):
            return _draw(func, first, args[1:], kwargs)
        if name in ("rand_like", "randn_like"):
            dtype = kwargs.pop("dtype", None) or first.dtype
            drawn: Any = torch.empty_like(first, dtype=dtype)
            in_place = {"rand_like": torch.Tensor.uniform_, "randn_like": torch.Tensor.normal_}
            return _draw(in_place[name], drawn, (), {})
        raise NotImplementedError(
            f"{name} on a DTensor in init_on_whole_tensors: it knows in-place random operations, "
            "rand_like and randn_like"
        )


def _draw(operation: Any, into: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Do the random operation on a whole tensor and keep this rank's part."""
    whole = torch.empty(into.shape, dtype=into.dtype, device=into._local_tensor.device)
    operation(whole, *args, **kwargs)
    into._local_tensor.copy_(own_part(whole, into)._local_tensor)
    return into
