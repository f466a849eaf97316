"""``backward(inputs=...)`` and ``torch.autograd.grad`` with sharded parameters.

Autograd's graphs contain the unsharded parameters, and no sharded ones. Asked for the gradient of a
sharded parameter, ``backward`` would silently do nothing and call no hook. So requests are checked
before the engine runs. ``backward`` is also asked for the unsharded parameters, and their units
reduce the gradients as always. ``torch.autograd.grad`` returns gradients instead of accumulating
them, so nothing would reduce them: it raises an error with advice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ..common.torch_patches import wrap
from ..runtime.events import UnitPart, registry
from ..runtime.unit import Unit
from ..sharding.param import ShardedParam, managed_param

_Found = list[tuple[ShardedParam, nn.Parameter]]  # with the unsharded ones

_INPUTS = 3  # the place of `inputs` among the engine's arguments after the outputs


def look_at_requests() -> None:
    """Check all runs of the engine with ``inputs`` from now on."""
    # torch.autograd has imported the function by name, and calls its own.
    for module in ("torch.autograd.graph", "torch.autograd"):
        wrap(f"{module}._engine_run_backward", _run)


def _run(run: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = args[_INPUTS] or () if len(args) > _INPUTS else ()
    params = sharded_among(inputs) if inputs else []
    if not params:
        return run(outputs, *args, **kwargs)
    # The shards are also requested: a penalty may be computed from the sharded parameters, which
    # are then leaves of the graph. Otherwise ``backward`` ignores them.
    more = [unsharded for _, unsharded in params]
    asked = (*args[:_INPUTS], (*inputs, *more), *args[_INPUTS + 1 :])
    if kwargs.get("accumulate_grad"):
        return run(outputs, *asked, **kwargs)
    return _grad(functools.partial(run, outputs), params, asked, kwargs)


def sharded_among(inputs: Iterable[Any]) -> _Found:
    """The sharded parameters that have computed, with the unsharded ones."""
    found = []
    for tensor in inputs:
        param = managed_param(tensor) if isinstance(tensor, DTensor) else None
        if param is not None and param.unsharded is not None and param.unsharded.requires_grad:
            found.append((param, param.unsharded))
    return found


def _grad(run: Any, params: _Found, asked: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    num_inputs, allow_unused = len(asked[_INPUTS]) - len(params), asked[_INPUTS + 1]
    # The run itself allows unused ones: usually only one of a sharded parameter and its unsharded
    # form is in the graph. The user's setting is applied to the result.
    grads = run(*asked[: _INPUTS + 1], True, *asked[_INPUTS + 2 :], **kwargs)
    used = [
        param.fqn
        for (param, _), grad in zip(params, grads[num_inputs:], strict=True)
        if grad is not None
    ]
    if used:
        more = f" and {len(used) - 1} more" if len(used) > 1 else ""
        raise RuntimeError(
            f"torch.autograd.grad was asked for the gradient of the sharded parameter '{used[0]}'"
            f"{more}. Forward uses the unsharded parameters, and gradients that are returned "
            "instead of accumulated are never reduced over ranks. Call loss.backward(inputs=[...]) "
            "with these parameters and read their .grad, which is reduced. For gradients of this "
            "rank's own loss (for a penalty), use reshard_after_forward=False and pass "
            "model.parameters(), called between forward and backward: they are unsharded then"
        )
    if not allow_unused and any(grad is None for grad in grads[:num_inputs]):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set "
            "allow_unused=True if this is the desired behavior."
        )
    return grads[:num_inputs]


class _LooksAtRequests(UnitPart):
    @override
    def sharded(self, unit: Unit) -> None:
        look_at_requests()


registry.add(_LooksAtRequests())
